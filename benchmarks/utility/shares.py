"""Shares of the gain with intervals, and the curve of the advice, from the lines of the runs.

share = (private − public only)/(non-private − public only), of one figure, one seed at a time.
Entity F1 is compared with the reference of the corpus, size and seed, with any vocabulary. Accuracy
and perplexity of masked tokens are only comparable for the same vocabulary: a recipe with another
vocabulary than its reference has no such share.
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

from dp_core.privacy.advice import CONFIDENCE, CURVES, LEAST_POINTS, GainCurve, Recipe

QUANTITIES = {  # metric -> its title, and whether it needs the reference's vocabulary
    "mlm_accuracy_private": ("MLM accuracy on private text", True),
    "f1": ("entity F1", False),
    "perplexity_private": ("log perplexity of private text", True),
}
_LEAST_GAIN = 0.01  # of accuracy or F1, or of nats; a smaller gain has no share


@dataclass(frozen=True)
class Share:
    """The share of the gain of one cell over its seeds.

    Attributes:
        mean: the mean over the seeds.
        low, high: 95% interval of the mean (Student's t); None with a single seed.
        seeds: the number of seeds.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int


def share_of(metric: str, cell: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    """Return the share of the gain of one training, or None if it is undefined.

    Args:
        metric: a key of `QUANTITIES`.
        cell: the line of the training.
        reference: the line of its reference.
    """
    _, needs_vocabulary = QUANTITIES[metric]
    if needs_vocabulary and cell["vocabulary"] != reference["vocabulary"]:
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
    """Return the mean of the shares over seeds, with its interval."""
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
        share_of_group = mean_of(shares)
        rows.append(
            {
                "corpus": corpus,
                "units": units,
                "epsilon": epsilon,
                "recipe": recipe,
                "quantity": QUANTITIES[metric][0],
                "share": share_of_group.mean,
                "low": share_of_group.low,
                "high": share_of_group.high,
                "seeds": share_of_group.seeds,
            }
        )
    return rows


def _gains(lines: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return the gain of each reference by private text without privacy."""
    gains = {}
    for key, line in lines.items():
        ends = [_value(metric, line.get(model, {})) for model in ("public", "nonprivate")]
        if None not in ends:
            gains[key] = float(ends[1] or 0) - float(ends[0] or 0)
    return gains


def curves(
    lines: Mapping[str, Mapping[str, Any]], recipes: Mapping[Recipe, Collection[str]], source: str
) -> list[GainCurve]:
    """Return the curves of the gain by figure on made-up notes, with a point for each training.

    Shares of a small gain are not comparable with shares of a large gain. If even a training
    without privacy gains less than half of the largest gain (too few notes, too few updates), it
    yields no point.

    Args:
        lines: the lines of the runs.
        recipes: the measured recipes by the name of the advice; other recipes have another gain.
        source: a description of the points.
    """
    result = []
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
            result.append(GainCurve(recipe, QUANTITIES[metric][0], figures, shares, source))
    return result


def replace_curves(file: Path, new: Sequence[GainCurve]) -> None:
    """Write curves into the file of the advice, replacing curves of the same recipes."""
    recipes = {curve.recipe for curve in new}
    existing = CURVES.validate_json(file.read_bytes()) if file.exists() else ()
    kept = [curve for curve in existing if curve.recipe not in recipes]
    in_order = sorted([*kept, *new], key=lambda curve: curve.recipe)
    file.write_text(json.dumps(CURVES.dump_python(tuple(in_order), mode="json"), indent=1) + "\n")
