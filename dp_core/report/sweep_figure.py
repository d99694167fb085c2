"""Fig. 1 of Hoory et al. 2021: what σ, batch size and epochs do to ε and to F1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter

from dp_core.privacy.labels import Dp, Operator, Public
from dp_core.report import drawing
from dp_core.report.cells import significant
from dp_core.report.drawing import EPSILON_RED, SCORE_BLUE, Drawing
from dp_core.report.model import SweepRow

Coordinates = tuple[float, float, float]  # σ, batch size, epochs


@dataclass(frozen=True)
class _Panel:
    """One of the three settings on the x axis; the other two are held."""

    axis: int  # its place in the coordinates
    title: str
    logarithmic: bool


_PANELS = (
    _Panel(0, "Noise multiplier σ", logarithmic=False),
    _Panel(1, "Batch size, expected units", logarithmic=True),
    _Panel(2, "Epochs", logarithmic=True),
)
_HELD: tuple[Callable[[float], str], ...] = (
    lambda s: f"σ = {significant(s)}",
    lambda b: f"batch {significant(b)}",
    lambda e: f"{significant(e)} epochs",
)


def sweep_figure(points: Sequence[SweepRow]) -> Drawing | None:
    """Return ε (red) and F1 (blue) against each setting, three panels; None without points.

    Strong lines go through the middle of the grid; pale ones are its other points.
    """
    if not points:
        return None
    grid = {(p.noise_multiplier, float(p.batch_size), p.epochs): p for p in points}
    middle = _middle(list(grid))
    figure, panels = drawing.canvas(len(_PANELS), 3, 4.1)
    # F1 is compared across panels, and so is ε: each has one scale.
    top_epsilon = max((e for p in points if (e := _cost(p)) is not None), default=1.0)
    for place, (axes, panel) in enumerate(zip(panels, _PANELS, strict=True)):
        right = drawing.twin(axes)
        _lines(axes, right, panel, grid, middle)
        held = [_HELD[i](middle[i]) for i in range(3) if i != panel.axis]
        axes.set_title(", ".join(held), fontsize=10.5)
        axes.set_xlabel(panel.title)
        axes.set_ylim(0, top_epsilon * 1.1)
        axes.tick_params(axis="y", colors=EPSILON_RED)
        right.tick_params(axis="y", colors=SCORE_BLUE)
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        _score_limits(right, points)
        if place == 0:
            axes.set_ylabel("ε in total", color=EPSILON_RED)
        if place == len(_PANELS) - 1:
            right.set_ylabel("Strict entity F1", color=SCORE_BLUE)
    return drawing.finish(
        figure,
        "sweep",
        "Privacy and usefulness against each setting",
        "ε of all that each model cost (red circles, left axes) and strict entity F1 (blue "
        "squares, right axes) against noise multiplier, batch size and epochs. Strong lines hold "
        "the other two settings at the middle of the grid, given above each panel; pale lines are "
        "the rest. After Hoory et al. 2021, Fig. 1, which shows the ε of training alone.",
    )


def _middle(grid: Sequence[Coordinates]) -> Coordinates:
    """Return the point of the grid nearest to the median rank in every setting."""
    values = [sorted({point[axis] for point in grid}) for axis in range(3)]

    def distance(point: Coordinates) -> float:
        return sum(abs(values[a].index(point[a]) - (len(values[a]) - 1) / 2) for a in range(3))

    return min(sorted(grid), key=distance)


def _lines(
    axes: Axes,
    right: Axes,
    panel: _Panel,
    grid: dict[Coordinates, SweepRow],
    middle: Coordinates,
) -> None:
    if panel.logarithmic:
        axes.set_xscale("log")
    held = {c[: panel.axis] + c[panel.axis + 1 :] for c in grid}
    own = middle[: panel.axis] + middle[panel.axis + 1 :]
    for others in sorted(held, key=lambda o: o == own):  # the strong line last, on top
        strength = 1.0 if others == own else 0.22
        line = sorted(c for c in grid if c[: panel.axis] + c[panel.axis + 1 :] == others)
        costs = [(c[panel.axis], _cost(grid[c])) for c in line]
        axes.plot(
            [x for x, cost in costs if cost is not None],
            [cost for _, cost in costs if cost is not None],
            color=EPSILON_RED,
            marker="o",
            alpha=strength,
        )
        scores = [(c[panel.axis], _score(grid[c])) for c in line]
        known = [(x, y) for x, y in scores if y is not None]
        right.plot(
            [x for x, _ in known],
            [y for _, y in known],
            color=SCORE_BLUE,
            marker="s",
            linestyle="--",
            alpha=strength,
        )
    places = sorted({c[panel.axis] for c in grid})
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(places, [significant(x) for x in places])
    axes.margins(x=0.12)


def _cost(point: SweepRow) -> float | None:
    """Return the total ε, if there is a finite one to draw."""
    total = point.epsilon_total
    return total if total is not None and math.isfinite(total) else None


def _score(point: SweepRow) -> float | None:
    return point.f1.value if isinstance(point.f1, Dp | Public | Operator) else None


def _score_limits(right: Axes, points: Sequence[SweepRow]) -> None:
    """Frame F1 with some air, at least five points high, so that noise does not look like a law."""
    scores = [score for score in map(_score, points) if score is not None]
    if not scores:
        right.set_yticks([])
        return
    low, high = min(scores), max(scores)
    air = max(0.1 * (high - low), (0.05 - (high - low)) / 2)
    right.set_ylim(max(0.0, low - air), min(1.0, high + air))
