"""Figures of a sweep, in the form of Hoory et al. 2021, Figs. 1 and 2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from dp_core.audit.exposure import ExposureRow
from dp_core.training.bootstrap import MeanF1
from tasks.protocol.points import BASELINE_NAMES, Baseline
from tasks.report import figures
from tasks.report.model import WORDS, Measure, ModelRow, measure_of, number_of
from tasks.report.tables import significant

# The last three give strokes and gaps, in line widths.
_DASHES = (":", "-.", "--", (0, (9, 2)), (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))
_FAR_APART = 20  # ratio of the largest to the smallest perplexity for a logarithmic axis
_WITH_VOCABULARY_OF_SWEEP: tuple[Baseline, ...] = ("public-training", "nonprivate-training")


def sweep_exposure_figure(points: Sequence[ModelRow]) -> figures.Drawing | None:
    """Return exposure against occurrences, with one line per batch size and number of updates.

    Lines show the middle σ. A line over several seeds is the mean, and its bars span the intervals
    of all seeds. Trainings without privacy are orange, with one line for each vocabulary. Public
    models are left out, since they have not read the canaries. Returns None if there would be only
    one line, or if no exposure may be shown.
    """
    known = [p for p in points if p.audits and (p.baseline is None or p.updates)]
    private = [p for p in known if p.baseline is None]
    if not private:
        return None
    sigma = _middle([_coordinates(p) for p in private])[0]
    trained = {}  # one setting per training, since settings may differ in fine-tuning alone
    for point in known:
        baseline = BASELINE_NAMES[point.baseline] if point.baseline else ""
        training = baseline, point.batch_size, point.updates
        if training not in trained or point.noise_multiplier == sigma:
            trained[training] = point
    if len(trained) < 2:
        return None
    batches = sorted({point.batch_size for point in private})
    lines: dict[str, list[ExposureRow]] = {}
    styles: dict[str, tuple[str, str, str]] = {}
    colours = itertools.cycle(figures.COLOURS[c] for c in ("sky", "blue", "green", "pink", "black"))
    colour_of = dict(zip(batches, colours, strict=False))
    for (baseline, batch, updates), point in sorted(trained.items()):
        size = f"bs={batch} step={updates}"
        if baseline:
            name, colour, markers = f"{baseline} {size}", figures.STYLES["nonprivate"][0], "^vXP*"
        else:
            name = f"{size} σ={significant(point.noise_multiplier)}"
            colour = colour_of[batch]
            markers = "osD^v"[batches.index(batch) % 5]
        before = sum(style[0] == colour for style in styles.values())
        stroke = ("-", "--", ":", "-.")[before % 4]
        styles[name] = colour, markers[before % len(markers)], stroke
        lines[name] = _over_seeds([figures.embedded_rows(exposures) for exposures in point.audits])
    return figures.exposure_drawing("sweep-exposure", lines, styles)


def _over_seeds(models: Sequence[Sequence[ExposureRow]]) -> list[ExposureRow]:
    """Return the mean exposure of each group, with bars that span the bars of all models."""
    groups: dict[tuple[str, float], list[ExposureRow]] = {}
    for row in (row for rows in models for row in rows):
        groups.setdefault((row.pattern, row.canary_rate), []).append(row)
    return [
        replace(
            rows[0],
            exposure=math.fsum(row.exposure for row in rows) / len(rows),
            low=min(row.low for row in rows),
            high=max(row.high for row in rows),
        )
        for rows in groups.values()
    ]


Coordinates = tuple[float, ...]  # one value per element of `_AXES`; 0 if the sweep sets none


# Settings on the x axes, with their titles, and the words in titles of other panels.
_AXES: dict[str, tuple[str, str]] = WORDS["axes"]
_TITLES, _BATCH_SIZE = tuple(_AXES.values()), list(_AXES).index("batch_size")


def _coordinates(point: ModelRow) -> Coordinates:
    settings = {axis: float(getattr(point, axis, 0.0)) for axis in _AXES}
    return tuple({**settings, **point.finetuning}.values())


def sweep_figure(points: Sequence[ModelRow], *, scaled: bool = False) -> figures.Drawing | None:
    """Return ε and scores against each setting that varies, or None without points.

    Strong lines go through the middle point, and the other lines are pale. Perplexity is by token,
    so baselines with another vocabulary are left out.

    Args:
        points: rows of the sweep.
        scaled: σ grows with the root of the batch size, and so do lines over batch sizes.
    """
    measure = measure_of(points)
    baselines = [p for p in points if p.baseline and number_of(measure.of(p)) is not None]
    if measure.by_token:
        baselines = [p for p in baselines if p.baseline in _WITH_VOCABULARY_OF_SWEEP]
    grid = {_coordinates(point): point for point in points if point.baseline is None}
    if not grid:
        return None
    middle = _middle(list(grid))
    on_the_way = any(point.training_epochs for point in points)
    shown = [i for i in range(len(_AXES)) if len({c[i] for c in grid}) > 1] or [0]
    scored = any(number_of(measure.of(point)) is not None for point in points)
    figure, panels = figures.canvas(len(shown), 3, 4.1)
    # Readers compare panels, so all panels have the same scales.
    top_epsilon = max((e for p in points if (e := _epsilon(p)) is not None), default=1.0)
    for axes, index in zip(panels, shown, strict=True):
        right = figures.twin(axes)
        scales = scaled and index == _BATCH_SIZE
        _lines(axes, right, index, grid, middle, measure, scales)
        for row, dashes in zip(baselines, itertools.cycle(_DASHES), strict=False):
            # A level line, since the score of a baseline does not depend on the axis.
            level = number_of(measure.of(row))
            assert level is not None  # noqa: S101 - narrows the type
            colour, _ = figures.STYLES[row.kind]
            right.axhline(level, color=colour, linestyle=dashes, linewidth=1.5, label=row.name)
        held = [_TITLES[i][1].format(significant(middle[i])) for i in shown if i != index]
        if scales and 0 in shown:
            held[0] += f"·√(B / {significant(middle[index])})"
        axes.set_title(", ".join(held), fontsize=10.5)
        axes.set_xlabel(_TITLES[index][0])
        axes.set_ylim(0, top_epsilon * 1.1)
        right.tick_params(axis="y", colors=figures.SCORE_COLOUR)
        _score_limits(right, [*grid.values(), *baselines], measure)
        if index == shown[0]:
            axes.set_ylabel("ε in total")
        if index == shown[-1] and scored:
            right.set_ylabel(measure.axis, color=figures.SCORE_COLOUR)
    figures.legend_below(figure, most=3)
    words = figures.FIGURES["sweep"]
    scores = words["scores"].format(
        axis=f"{measure.axis[:1].lower()}{measure.axis[1:]}",
        over="seeds" if measure.by_token else "documents and seeds",
    )
    return figures.finish(
        figure,
        "sweep",
        scores=scores if scored else "",
        baselines=words["baselines"] if baselines else "",
        on_the_way=words["on_the_way"] if on_the_way else "",
    )


def _middle(grid: Sequence[Coordinates]) -> Coordinates:
    """Return the point of the grid that is nearest to the median rank in every setting.

    Among equally near points it is the point on most lines, for example the centre of a star.
    """
    values = [sorted(set(column)) for column in zip(*grid, strict=True)]

    def distance(point: Coordinates) -> float:
        ranks = zip(point, values, strict=True)
        return sum(abs(axis.index(value) - (len(axis) - 1) / 2) for value, axis in ranks)

    def neighbours(point: Coordinates) -> int:
        return sum(sum(a != b for a, b in zip(point, o, strict=True)) == 1 for o in grid)

    return min(sorted(grid), key=lambda point: (distance(point), -neighbours(point)))


def _lines(
    axes: Axes,
    right: Axes,
    index: int,
    grid: dict[Coordinates, ModelRow],
    middle: Coordinates,
    measure: Measure,
    scales: bool,
) -> None:
    def others_of(point: Coordinates) -> Coordinates:
        """Return the settings that are equal on a line."""
        if scales:
            point = (round(point[0] / math.sqrt(point[index]), 9), *point[1:])
        return point[:index] + point[index + 1 :]

    if index:  # all settings except σ
        axes.set_xscale("log")
    held, middle_others = {others_of(c) for c in grid}, others_of(middle)
    for others in sorted(held, key=lambda o: o == middle_others):  # draws the strong line on top
        strength = 1.0 if others == middle_others else 0.22
        names = ("ε in total", measure.axis) if others == middle_others else (None, None)
        line = sorted((c for c in grid if others_of(c) == others), key=lambda c: c[index])
        epsilons = {c[index]: v for c in line if (v := _epsilon(grid[c])) is not None}
        epsilon_line = list(epsilons), list(epsilons.values())
        axes.plot(*epsilon_line, "o-", color=figures.EPSILON_COLOUR, alpha=strength, label=names[0])
        scores = [
            (c[index], v, *_interval(grid[c], v))
            for c in line
            if (v := number_of(measure.of(grid[c]))) is not None
        ]
        x, y, low, high = zip(*scores, strict=True) if scores else ((), (), (), ())
        if others == middle_others:
            right.fill_between(x, low, high, color=figures.SCORE_COLOUR, alpha=0.12, linewidth=0)
        right.errorbar(
            x,
            y,
            yerr=np.abs(np.subtract([low, high], y)) if (low, high) != (y, y) else None,
            fmt="s--",
            color=figures.SCORE_COLOUR,
            alpha=strength,
            capsize=3,
            elinewidth=1.2,
            label=names[1] if scores else None,
        )
    settings = sorted({c[index] for c in grid})
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(settings, [significant(x) for x in settings])
    axes.margins(x=0.12)


def _interval(point: ModelRow, score: float) -> tuple[float, float]:
    """Return the interval of a score that includes the score, or the score without an interval."""
    spread = point.spread if isinstance(point.spread, MeanF1) else None
    if spread is None or spread.interval is None:
        return score, score
    low, high = spread.interval
    return min(low, score), max(high, score)


def _epsilon(point: ModelRow) -> float | None:
    """Return the total ε, or None if it is not finite."""
    epsilon = point.cost.corpus.epsilon
    return epsilon if epsilon is not None and math.isfinite(epsilon) else None


def _score_limits(right: Axes, points: Sequence[ModelRow], measure: Measure) -> None:
    """Set the limits of an axis of scores and of the ends of their intervals.

    The axis of perplexities starts at 0, or is logarithmic if they differ widely.
    """
    scores = [(p, score) for p in points if (score := number_of(measure.of(p))) is not None]
    ends = [end for p, score in scores for end in _interval(p, score)]
    if ends:
        far = min(ends) > 0 and max(ends) > _FAR_APART * min(ends)
        figures.frame(right, ends, "share" if measure.is_share else "log" if far else "zero")
    else:
        right.set_yticks([])
        right.spines["right"].set_visible(False)
