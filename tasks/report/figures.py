"""Figures of a job's report: exposure (Hoory et al. 2021, Fig. 2) and training."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from dp_core.audit.exposure import EMBEDDED, ExposureRow
from tasks.protocol.points import Mode
from tasks.report.model import (
    QUANTITIES,
    Curve,
    Exposures,
    Measure,
    ModelRow,
)
from tasks.report.tables import significant

# Okabe and Ito's palette is safe for colour-blind readers; the markers differ as well. A page
# shows the colours by their names, as templates/style.css defines them for light and dark screens.
COLOURS = {
    "paper": "#ffffff", "ink": "#1f2933", "axis": "#9aa5b1", "grid": "#eceff1", "pale": "#e8e8e4",
    "grey": "#6b6b6b", "green": "#009e73", "blue": "#0072b2", "orange": "#d55e00",
    "sky": "#56b4e9", "pink": "#cc79a7", "yellow": "#e69f00", "black": "#000000",
}  # fmt: skip
STYLES: dict[Mode, tuple[str, str]] = {  # colour and marker
    "public": (COLOURS["grey"], "s"),
    "phrases": (COLOURS["green"], "D"),
    "dp": (COLOURS["blue"], "o"),
    "nonprivate": (COLOURS["orange"], "^"),
}
MORE_STYLES = tuple(
    (COLOURS[name], marker)
    for name, marker in zip(("sky", "pink", "yellow", "black"), "vPX<", strict=True)
)
EPSILON_COLOUR, SCORE_COLOUR = COLOURS["black"], COLOURS["blue"]
_FAR_APART = 20  # ratio of the largest to the smallest perplexity for a logarithmic axis
_LEGEND_LETTERS = 110  # characters of a legend in one line
WIDTH = 9.6  # inches, the width of the page's column
_STYLE = Path(__file__).parent / "templates" / "figures.mplstyle"
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Drawing:
    """A rendered figure."""

    key: str  # also its file name
    title: str
    caption: str  # describes the figure for readers who cannot see it
    svg: str  # a complete file
    png: bytes

    @property
    def inline_svg(self) -> str:
        """The SVG element for an HTML page, without prologue and namespaces.

        The figure's key prefixes all ids, because ids must be unique within a page. The page's
        style sheet defines the colours.
        """
        body = self.svg[self.svg.index("<svg") :]
        body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href", "href")
        body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        body = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{self.key}-", body)
        for name, colour in COLOURS.items():
            body = body.replace(colour, f"var(--figure-{name})")
        return re.sub(r'(<svg[^>]*?)\swidth="[^"]*"', r"\1", body, count=1)


def canvas(panels: int, columns: int, row_height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of the page's width, and its panels row by row."""
    columns = min(columns, panels)
    rows = -(-panels // columns)
    with matplotlib.rc_context(fname=_STYLE):
        figure = Figure(figsize=(WIDTH, row_height * rows), layout="constrained")
        return figure, [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]


def twin(axes: Axes) -> Axes:
    """Return a second y axis on the right, without a grid."""
    with matplotlib.rc_context(fname=_STYLE):
        other = axes.twinx()
    other.grid(visible=False)
    other.spines["right"].set_visible(True)
    return other


def finish(figure: Figure, key: str, title: str, caption: str) -> Drawing:
    """Write the figure as SVG and PNG."""
    with matplotlib.rc_context(fname=_STYLE):
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", metadata=_NO_METADATA)
        figure.set_layout_engine("none")  # laid out once: both forms are the same picture
        figure.savefig(pixels, format="png", dpi=160)
    return Drawing(key, title, caption, vector.getvalue(), pixels.getvalue())


_MARKED = 12  # most points of a curve that has a marker at each point


def styles_of(models: Sequence[ModelRow]) -> dict[str, tuple[str, str]]:
    """Return colour and marker by model name; the first model of a kind has those of its kind."""
    styles: dict[str, tuple[str, str]] = {}
    more = itertools.cycle(MORE_STYLES)
    for model in models:
        of_kind = STYLES[model.kind]
        styles[model.name] = of_kind if of_kind not in styles.values() else next(more)
    return styles


@dataclass(frozen=True)
class Line:
    """One model's exposures to the canaries among random tokens, with the style of its line."""

    name: str
    rows: Sequence[ExposureRow]
    colour: Any
    marker: str
    style: str = "-"


OCCURRENCES = (
    "by pattern (H: hint, S: secret) and by the expected number of units that contain them (after "
    "Hoory et al. 2021, Fig. 2). Bars: 95% intervals over canaries. The band contains 95% of "
    "models that remember nothing; the dotted line is the exposure of a secret that is always "
    "ranked first."
)


def exposure_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return exposure against occurrences by pattern, or None if no exposure may be shown."""
    styles = styles_of(models)
    lines = [
        Line(
            model.name,
            embedded_rows(model.audits[0]),
            *styles[model.name],
        )
        for model in models
        if model.audits
    ]
    caption = f"How strongly each model favours planted secrets, {OCCURRENCES}"
    return exposure_drawing(lines, "exposure", caption)


def embedded_rows(exposures: Exposures) -> list[ExposureRow]:
    """Return the groups of canaries that were placed among random tokens."""
    return [row for row in exposures.rows if row.context == EMBEDDED]


def exposure_drawing(lines: Sequence[Line], key: str, caption: str) -> Drawing | None:
    """Return exposures by occurrences, with one panel per pattern, or None without canaries."""
    patterns = {row.pattern for line in lines for row in line.rows}
    if not patterns:
        return None
    figure, panels = canvas(len(patterns), 3, 3.9)
    for axes, pattern in zip(panels, sorted(patterns, key=lambda p: (len(p), p)), strict=True):
        _exposure_panel(axes, lines, pattern)
        axes.set_title(pattern)
    panels[0].set_ylabel("Exposure, bits")
    legend_below(figure)
    return finish(figure, key, "Exposure against occurrences", caption)


def _exposure_panel(axes: Axes, lines: Sequence[Line], pattern: str) -> None:
    shown = [(line, [row for row in line.rows if row.pattern == pattern]) for line in lines]
    all_rows = [row for _, rows in shown for row in rows]
    axes.set_xscale("log")
    # All models have the same occurrences: a small shift keeps their bars from covering each other.
    for index, (line, rows) in enumerate(shown):
        rows = sorted(rows, key=lambda row: row.expected_occurrences)
        nudge = 1.06 ** (index - (len(shown) - 1) / 2)
        axes.errorbar(
            [row.expected_occurrences * nudge for row in rows],
            [row.exposure for row in rows],
            yerr=[
                [row.exposure - row.low for row in rows],
                [row.high - row.exposure for row in rows],
            ],
            color=line.colour,
            marker=line.marker,
            linestyle=line.style,
            capsize=3,
            elinewidth=1.2,
            label=line.name,
        )
    axes.axhspan(
        min(row.null_low for row in all_rows),
        max(row.null_high for row in all_rows),
        color=COLOURS["pale"],
        zorder=0,
        label="no memory",
    )
    ceiling = math.log2(max(row.candidates for row in all_rows))
    axes.axhline(ceiling, color=COLOURS["axis"], linestyle=":", linewidth=1.2)
    axes.set_ylim(
        min(0.0, *(row.low for row in all_rows)),
        1.05 * max(ceiling, *(row.high for row in all_rows)),
    )
    occurrences = sorted({row.expected_occurrences for row in all_rows})
    axes.set_xlim(occurrences[0] / 1.5, occurrences[-1] * 1.5)
    axes.set_xticks(occurrences, [significant(x) for x in occurrences])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(visible=False, axis="x", which="minor")
    axes.set_xlabel("Expected occurrences, units")


def legend_below(figure: Figure, most: int = 4) -> None:
    """Draw a legend of all panels below them, with at most `most` columns that fit the page."""
    drawn = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {
        name: handle
        for of_axes, names in drawn
        for handle, name in zip(of_axes, names, strict=True)
    }
    if not handles:
        return
    fitting = _LEGEND_LETTERS // (max(map(len, handles)) + 4)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        frameon=False,
        labelcolor=COLOURS["ink"],
        ncols=max(1, min(most, len(handles), fitting)),
    )


def training_figure(curves: Sequence[Curve], models: Sequence[ModelRow]) -> Drawing | None:
    """Return the training curves with the ε spent, one panel per quantity; None without curves."""
    styles = styles_of(models)
    quantities = [q for q in QUANTITIES if any(c.quantity == q and c.updates for c in curves)]
    if not quantities:
        return None
    figure, panels = canvas(len(quantities), 2, 3.9)
    for axes, quantity in zip(panels, quantities, strict=True):
        shown = [c for c in curves if c.quantity == quantity and c.updates]
        for curve in shown:
            colour, marker = styles[curve.model]
            axes.plot(
                curve.updates,
                curve.values,
                color=colour,
                marker=marker if len(curve.values) <= _MARKED else None,
                label=curve.model,
            )
        axes.set_xlabel("Updates")
        axes.set_title(QUANTITIES[quantity], loc="left")
        axes.set_xlim(left=0)
        if quantity == "mlm_public":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.set_ylim(bottom=0)
        if quantity.startswith("perplexity"):
            axes.set_yscale("log")
        if spending := next((c for c in shown if c.epsilon), None):
            right = twin(axes)
            right.plot(
                spending.updates,
                spending.epsilon,
                color=EPSILON_COLOUR,
                linestyle="--",
                linewidth=1.6,
                label="ε spent by DP training (right axis)",
            )
            right.set_ylabel("ε", rotation=0, labelpad=10, fontsize=13)
            right.set_ylim(bottom=0)
    legend_below(figure)
    return finish(
        figure,
        "training",
        "Training, and the privacy it spends",
        "Each model's progress by update. The dashed line is the privacy loss ε of the job's DP "
        "training so far, which depends on the settings alone. A model that is saved during the "
        "training has the ε of the end of the training.",
    )


def frame_scores(axes: Axes, scores: Sequence[float], measure: Measure) -> None:
    """Set the limits of an axis of scores and of the ends of their intervals.

    The axis of shares spans at least five percentage points, so that small random differences do
    not look large. The axis of perplexities starts at 0, or is logarithmic if they differ widely.
    """
    low, high = min(scores), max(scores)
    if not measure.is_share:
        if low > 0 and high > _FAR_APART * low:
            axes.set_yscale("log")
        else:
            axes.set_ylim(min(0.0, low), 1.2 * high)
        return
    air = max(0.1 * (high - low), (0.05 - (high - low)) / 2)
    axes.set_ylim(max(0.0, low - air), min(1.0, high + air))
