"""The figures of a job's report, after Hoory et al. 2021, Fig. 2, and the training behind it."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter

from dp_core.audit.exposure import EMBEDDED, ExposureRow
from tasks.report.model import Curve, Exposures, Kind, ModelRow, SweepRow, number_of
from tasks.report.tables import significant

# Okabe and Ito's palette: told apart with any kind of colour vision; markers differ as well.
COLOURS: dict[Kind, str] = {
    "public": "#6b6b6b",
    "phrases": "#009e73",
    "dp": "#0072b2",
    "nonprivate": "#d55e00",
}
MARKERS: dict[Kind, str] = {"public": "s", "phrases": "D", "dp": "o", "nonprivate": "^"}
EPSILON_RED, SCORE_BLUE, PALE, INK = "#c1272d", "#0072b2", "#e8e8e4", "#1f2933"
WIDTH = 9.6  # inches, the width of the page's column

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "axes.edgecolor": "#9aa5b1",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#eceff1",
    "axes.axisbelow": True,
    "lines.linewidth": 2.0,
    "lines.markersize": 6.5,
    "svg.fonttype": "none",  # text stays text: searchable, and read aloud
    "svg.hashsalt": "confide",  # the same figure is the same bytes
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Drawing:
    """A figure as it is shown and kept."""

    key: str  # also its file name
    title: str
    caption: str  # says what is seen, so that it can stand for the figure
    svg: str  # a file of its own
    png: bytes

    @property
    def inline_svg(self) -> str:
        """The SVG as it stands within an HTML page: no prologue, no namespaces, ids of its own.

        HTML parsers know SVG without namespaces; two figures on a page must not share ids.
        """
        body = self.svg[self.svg.index("<svg") :]
        body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href", "href")
        body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        body = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{self.key}-", body)
        return re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", body, count=1)


def canvas(panels: int, columns: int, row_height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of the page's width with that many panels, row by row."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, row_height * rows), layout="constrained")
        return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def twin(axes: Axes) -> Axes:
    """Return a second y axis on the right, in the figures' style and without a grid of its own."""
    with matplotlib.rc_context(_STYLE):
        other = axes.twinx()
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    return other


def finish(figure: Figure, key: str, title: str, caption: str) -> Drawing:
    """Write the figure as SVG and PNG."""
    with matplotlib.rc_context(_STYLE):
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", metadata=_NO_METADATA)
        figure.set_layout_engine("none")  # laid out once: both forms are the same picture
        figure.savefig(pixels, format="png", dpi=160)
    return Drawing(key, title, caption, vector.getvalue(), pixels.getvalue())


_QUANTITIES = {
    "loss": "Training loss, nats per prediction",
    "mlm_public": "MLM accuracy on public text",
}


def exposure_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return exposure against occurrences, a panel for each pattern; None if none may be shown."""
    shown = [
        (model, [row for row in model.exposures.rows if row.context == EMBEDDED])
        for model in models
        if isinstance(model.exposures, Exposures)
    ]
    patterns = sorted({row.pattern for _, rows in shown for row in rows}, key=lambda p: (len(p), p))
    if not patterns:
        return None
    figure, panels = canvas(len(patterns), 3, 3.9)
    for axes, pattern in zip(panels, patterns, strict=True):
        own = [(model, [r for r in rows if r.pattern == pattern]) for model, rows in shown]
        _exposure_panel(axes, own)
        axes.set_title(pattern)
    panels[0].set_ylabel("Exposure, bits")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=len(labels))
    return finish(
        figure,
        "exposure",
        "Exposure against occurrences",
        "How strongly each model favours planted secrets, by pattern (H: hint, S: secret) and by "
        "the number of units expected to carry them (after Hoory et al. 2021, Fig. 2). "
        "Bars: 95% intervals over canaries. The band "
        "is where 95% of models that remember nothing would lie; the dotted line, a secret "
        "that is always ranked first.",
    )


def _exposure_panel(axes: Axes, shown: Sequence[tuple[ModelRow, list[ExposureRow]]]) -> None:
    every = [row for _, rows in shown for row in rows]
    axes.set_xscale("log")
    # Models share their occurrences: points stand side by side, so that bars do not cover bars.
    for index, (model, rows) in enumerate(shown):
        rows = sorted(rows, key=lambda row: row.expected_occurrences)
        nudge = 1.06 ** (index - (len(shown) - 1) / 2)
        axes.errorbar(
            [row.expected_occurrences * nudge for row in rows],
            [row.exposure for row in rows],
            yerr=[
                [row.exposure - row.low for row in rows],
                [row.high - row.exposure for row in rows],
            ],
            color=COLOURS[model.kind],
            marker=MARKERS[model.kind],
            capsize=3,
            elinewidth=1.2,
            label=model.name,
        )
    axes.axhspan(
        min(row.null_low for row in every),
        max(row.null_high for row in every),
        color=PALE,
        zorder=0,
        label="no memory",
    )
    ceiling = math.log2(max(row.candidates for row in every))
    axes.axhline(ceiling, color="#9aa5b1", linestyle=":", linewidth=1.2)
    axes.set_ylim(0, ceiling * 1.05)
    occurrences = sorted({row.expected_occurrences for row in every})
    axes.set_xlim(occurrences[0] / 1.5, occurrences[-1] * 1.5)
    axes.set_xticks(occurrences, [significant(x) for x in occurrences])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(visible=False, axis="x", which="minor")
    axes.set_xlabel("Expected occurrences, units")


def training_figure(curves: Sequence[Curve], names: Mapping[Kind, str]) -> Drawing | None:
    """Return what training did, a panel for each quantity, ε beside it; None without curves."""
    quantities = [q for q in _QUANTITIES if any(c.quantity == q and c.updates for c in curves)]
    if not quantities:
        return None
    figure, panels = canvas(len(quantities), 2, 3.9)
    handles: dict[str, Artist] = {}
    for axes, quantity in zip(panels, quantities, strict=True):
        own = [c for c in curves if c.quantity == quantity and c.updates]
        for curve in own:
            (handles[names[curve.kind]],) = axes.plot(
                curve.updates, curve.values, color=COLOURS[curve.kind], label=names[curve.kind]
            )
        axes.set_xlabel("Updates")
        axes.set_title(_QUANTITIES[quantity], loc="left")
        axes.set_xlim(left=0)
        if quantity == "mlm_public":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.set_ylim(bottom=0)
        if spending := next((c for c in own if c.epsilon), None):
            handles["ε spent by DP training"] = _epsilon_line(axes, spending)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        frameon=False,
        ncols=len(handles),
    )
    return finish(
        figure,
        "training",
        "Training, and the privacy it spends",
        "Each model's progress by update; the dashed red line is the privacy loss ε of the DP "
        "training so far (right axis), a function of the settings alone.",
    )


def _epsilon_line(axes: Axes, curve: Curve) -> Artist:
    right = twin(axes)
    (line,) = right.plot(
        curve.updates, curve.epsilon, color=EPSILON_RED, linestyle="--", linewidth=1.6
    )
    right.set_ylabel("ε", color=EPSILON_RED, rotation=0, labelpad=10, fontsize=13)
    right.tick_params(axis="y", colors=EPSILON_RED)
    right.set_ylim(bottom=0)
    return line


def entity_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return strict F1 by entity type, a bar for each model; None if no value may be shown."""
    measured = [
        (model, {**model.f1_by_type, "all (micro)": model.f1})
        for model in models
        if any(number_of(v) is not None for v in (model.f1, *model.f1_by_type.values()))
    ]
    if not measured:
        return None
    types = sorted({kind for _, scores in measured for kind in scores if kind != "all (micro)"})
    types.append("all (micro)")
    figure, (axes,) = canvas(1, 1, 3.8)
    width = 0.8 / len(measured)
    for index, (model, scores) in enumerate(measured):
        offset = (index - (len(measured) - 1) / 2) * width
        known = [
            (x + offset, score)
            for x, kind in enumerate(types)
            if (score := number_of(scores.get(kind))) is not None
        ]
        bars = axes.bar(
            [x for x, _ in known],
            [y for _, y in known],
            width * 0.92,
            color=COLOURS[model.kind],
            label=model.name,
        )
        axes.bar_label(bars, [f"{100 * y:.1f}" for _, y in known], padding=2, fontsize=10)
    axes.set_xticks(range(len(types)), types)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.08)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.set_ylabel("Strict entity F1")
    figure.legend(loc="outside lower center", frameon=False, ncols=len(measured))
    return finish(
        figure,
        "entities",
        "Entity extraction by type",
        "Strict entity F1 after fine-tuning each model in the same way: an entity counts when "
        "its type and both ends are right.",
    )


Coordinates = tuple[float, float, float]  # σ, batch size, epochs


@dataclass(frozen=True)
class _Panel:
    """One of the three settings on the x axis; the other two are held."""

    axis: int  # its index in the coordinates
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
    figure, panels = canvas(len(_PANELS), 3, 4.1)
    # F1 is compared across panels, and so is ε: each has one scale.
    top_epsilon = max((e for p in points if (e := _epsilon(p)) is not None), default=1.0)
    for index, (axes, panel) in enumerate(zip(panels, _PANELS, strict=True)):
        right = twin(axes)
        _lines(axes, right, panel, grid, middle)
        held = [_HELD[i](middle[i]) for i in range(3) if i != panel.axis]
        axes.set_title(", ".join(held), fontsize=10.5)
        axes.set_xlabel(panel.title)
        axes.set_ylim(0, top_epsilon * 1.1)
        axes.tick_params(axis="y", colors=EPSILON_RED)
        right.tick_params(axis="y", colors=SCORE_BLUE)
        right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        _score_limits(right, points)
        if index == 0:
            axes.set_ylabel("ε in total", color=EPSILON_RED)
        if index == len(_PANELS) - 1:
            right.set_ylabel("Strict entity F1", color=SCORE_BLUE)
    return finish(
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
        for drawn_on, value_of, colour, style in (
            (axes, _epsilon, EPSILON_RED, "o-"),
            (right, lambda p: number_of(p.f1), SCORE_BLUE, "s--"),
        ):
            known = [(c[panel.axis], v) for c in line if (v := value_of(grid[c])) is not None]
            x, y = [x for x, _ in known], [y for _, y in known]
            drawn_on.plot(x, y, style, color=colour, alpha=strength)
    settings = sorted({c[panel.axis] for c in grid})
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(settings, [significant(x) for x in settings])
    axes.margins(x=0.12)


def _epsilon(point: SweepRow) -> float | None:
    """Return the total ε, if there is a finite one to draw."""
    epsilon = point.cost.corpus.epsilon
    return epsilon if epsilon is not None and math.isfinite(epsilon) else None


def _score_limits(right: Axes, points: Sequence[SweepRow]) -> None:
    """Frame F1 with some air, at least five points high, so that noise does not look like a law."""
    scores = [score for p in points if (score := number_of(p.f1)) is not None]
    if not scores:
        right.set_yticks([])
        return
    low, high = min(scores), max(scores)
    air = max(0.1 * (high - low), (0.05 - (high - low)) / 2)
    right.set_ylim(max(0.0, low - air), min(1.0, high + air))
