"""From the runs' lines to shares of the gain, with intervals, and to the curve that advice uses.

share = (private − public only)/(non-private − public only), of one figure, one seed at a time.
Entity F1 is held to the reference of the corpus, size and seed, whatever the vocabulary. Accuracy
and perplexity of masked tokens can be compared with one vocabulary only: where a recipe has
another than its reference, they have no share.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from dp_core.privacy.advice import (
    CONFIDENCE,
    LEAST_POINTS,
    GainCurve,
    Recipe,
    curves_from_json,
)

QUANTITIES = {  # metric -> what it is called, and whether it needs the reference's vocabulary
    "mlm_accuracy_private": ("MLM accuracy on private text", True),
    "f1": ("entity F1", False),
    "perplexity_private": ("log perplexity of private text", True),
}
_LEAST_GAIN = 0.01  # of accuracy or F1, or of nats: less than that is no gain to have a share of


@dataclass(frozen=True)
class Share:
    """The share of the gain of one cell over its seeds.

    Attributes:
        mean: over the seeds.
        low, high: 95% interval of the mean (Student's t); None with a single seed.
        seeds: how many.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int


def share_of(metric: str, cell: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """Return the share of the gain of one training, or None where it has none.

    Args:
        metric: a key of `QUANTITIES`.
        cell: its line. reference: the line of what it is held to.
    """
    _, one_vocabulary = QUANTITIES[metric]
    if one_vocabulary and cell["vocabulary"] != reference["vocabulary"]:
        return None
    values = [
        _value(metric, line) for line in (cell["dp"], reference["public"], reference["nonprivate"])
    ]
    if None in values:
        return None
    private, public, best = (value for value in values if value is not None)
    gain = best - public
    return (private - public) / gain if gain >= _LEAST_GAIN else None


def _value(metric: str, figures: Mapping[str, float]) -> float | None:
    if metric not in figures:
        return None
    return -math.log(figures[metric]) if metric.startswith("perplexity") else figures[metric]


def mean_of(shares: Iterable[float]) -> Share:
    """Return the mean of the seeds' shares, with its interval."""
    values = list(shares)
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Share(mean, None, None, n)
    reach = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * statistics.stdev(values) / n**0.5
    return Share(mean, mean - reach, mean + reach, n)


def aggregate(lines: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each corpus, size, ε, recipe and quantity."""
    grouped: dict[tuple[Any, ...], list[float]] = {}
    for line in lines.values():
        if "reference" not in line or line["reference"] not in lines:
            continue
        for metric in QUANTITIES:
            share = share_of(metric, line, lines[line["reference"]])
            if share is not None:
                key = (line["corpus"], line["units"], line["epsilon"], line["recipe"], metric)
                grouped.setdefault(key, []).append(share)
    rows = []
    for (corpus, units, epsilon, recipe, metric), shares in sorted(grouped.items()):
        found = mean_of(shares)
        rows.append(
            {
                "corpus": corpus,
                "units": units,
                "epsilon": epsilon,
                "recipe": recipe,
                "quantity": QUANTITIES[metric][0],
                "share": found.mean,
                "low": found.low,
                "high": found.high,
                "seeds": found.seeds,
            }
        )
    return rows


def _gains(lines: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return what each reference gains by private text without privacy."""
    found = {}
    for key, line in lines.items():
        ends = [_value(metric, line.get(model, {})) for model in ("public", "nonprivate")]
        if None not in ends:
            found[key] = float(ends[1] or 0) - float(ends[0] or 0)
    return found


def curves(
    lines: Mapping[str, Mapping[str, Any]],
    recipes: Mapping[Recipe, Collection[str]],
    source: str,
) -> list[GainCurve]:
    """Return what a figure is worth, of the made-up notes: a point for each training.

    Shares of a small gain do not compare with those of a large one: where even a training without
    privacy gains less than half of the most (too few notes, too few updates), there is no point.

    Args:
        lines: of the runs.
        recipes: those that advice may name, by what it calls them: what other settings gain would
            not be had with it.
        source: of the points, in words.
    """
    found = []
    for recipe, metric in itertools.product(recipes, ("mlm_accuracy_private", "f1")):
        points, gains = [], _gains(lines, metric)
        most = max(gains.values(), default=0.0)
        for line in lines.values():
            if line["corpus"] != "made-up" or line.get("recipe") not in recipes[recipe]:
                continue
            if gains.get(line["reference"], -1.0) < most / 2:
                continue
            share = share_of(metric, line, lines[line["reference"]])
            if share is not None:
                points.append((line["figure"], share))
        if len({figure for figure, _ in points}) >= LEAST_POINTS:
            figures, shares = zip(*sorted(points), strict=True)
            found.append(GainCurve(recipe, QUANTITIES[metric][0], figures, shares, source))
    return found


def replace_curves(file: Path, found: Sequence[GainCurve]) -> None:
    """Write curves into the file that advice reads, in place of those of the same recipes."""
    recipes = {curve.recipe for curve in found}
    there = curves_from_json(json.loads(file.read_text())) if file.exists() else ()
    kept = [curve for curve in there if curve.recipe not in recipes]
    in_order = sorted([*kept, *found], key=lambda curve: curve.recipe)
    file.write_text(json.dumps([one.to_json() for one in in_order], indent=1) + "\n")
