"""Figures of a job's report: exposure (Hoory et al. 2021, Fig. 2), scores, training and attacks."""

from __future__ import annotations

import io
import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dp_core.audit.exposure import EMBEDDED, ExposureRow, summarise
from dp_core.audit.membership_sample import rarity_correlation
from tasks.report.model import (
    QUANTITIES,
    TEMPLATES,
    Curve,
    Exposures,
    ModelRow,
    measure_of,
    number_of,
)
from tasks.report.tables import significant

# Okabe and Ito's palette is safe for colour-blind readers; the markers differ as well. A page
# shows the colours by their names, as templates/style.css defines them for light and dark screens.
FIGURES: dict[str, Any] = tomllib.loads((TEMPLATES / "figures.toml").read_text(encoding="utf-8"))
COLOURS: dict[str, str] = FIGURES["colours"]
STYLES = {kind: (COLOURS[name], marker) for kind, (name, marker) in FIGURES["styles"].items()}
MORE_STYLES = tuple((COLOURS[name], marker) for name, marker in FIGURES["more"]["styles"])
EPSILON_COLOUR, SCORE_COLOUR = COLOURS["black"], COLOURS["blue"]
_LEGEND_LETTERS = 110  # characters of a legend in one line
WIDTH = 9.6  # inches, the width of the page's column
_STYLE = TEMPLATES / "figures.mplstyle"
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Drawing:
    """A rendered figure."""

    key: str  # also its file name
    title: str
    caption: str  # describes the figure for readers who cannot see it
    svg: str  # a complete file
    png: bytes

    def write(self, folder: Path) -> None:
        """Write the drawing as .svg and .png."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.key}.svg").write_text(self.svg, encoding="utf-8")
        (folder / f"{self.key}.png").write_bytes(self.png)

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


def finish(figure: Figure, key: str, **values: object) -> Drawing:
    """Write the figure as SVG and PNG, with the values in its title and caption."""
    title, caption = (FIGURES[key][part].format(**values) for part in ("title", "caption"))
    with matplotlib.rc_context(fname=_STYLE):
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", metadata=_NO_METADATA)
        figure.set_layout_engine("none")  # laid out once: both forms are the same picture
        figure.savefig(pixels, format="png", dpi=160)
    return Drawing(key, title, caption, vector.getvalue(), pixels.getvalue())


def styles_of(models: Sequence[ModelRow]) -> dict[str, tuple[str, str]]:
    """Return colour and marker by model name; the first model of a kind has those of its kind."""
    styles: dict[str, tuple[str, str]] = {}
    more = itertools.cycle(MORE_STYLES)
    for model in models:
        of_kind = STYLES[model.kind]
        styles[model.name] = of_kind if of_kind not in styles.values() else next(more)
    return styles


Point = tuple[float, float, float, float]  # x, value, and the ends of its interval
Scale = Literal["share", "zero", "log", "values"]
Lines = Mapping[str, Sequence[Point]]  # by name
Styles = Mapping[str, tuple[str, ...]]  # by name: colour, marker, and stroke if not solid
_TICK_LETTERS = 110  # characters of names of x values in one line
_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.3g}%".replace("-", "−"))
_MARKED = 12  # most points of a line that has a marker at each point


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        title: title of the panel.
        lines: the lines; a line with one point at x = ∞ is level.
        x: title of the x axis.
        ticks: values of x with their texts; empty: chosen by the scale.
        log_x: whether the x axis is logarithmic.
        y: scale of the y axis: `share` in percent, from `zero`, `log`, or around the values.
        apart: distance in x, or factor, that keeps bars of one line from covering others.
        band: values that need no explanation; they are shaded.
        ceiling: largest possible value, drawn as a dotted line.
        spending: the curve whose ε is drawn on the right axis.
    """

    title: str
    lines: Lines
    x: str
    ticks: Mapping[float, str] = field(default_factory=dict)
    log_x: bool = False
    y: Scale = "values"
    apart: float = 0.0
    band: tuple[float, float] | None = None
    ceiling: float | None = None
    spending: Curve | None = None

    @property
    def ends(self) -> list[float]:
        """The ends of all intervals, the band and the ceiling; empty without lines."""
        ends = [end for points in self.lines.values() for _, *ends in points for end in ends]
        return ends and [*ends, *(self.band or ()), *filter(None, [self.ceiling])]


def lines_figure(
    key: str,
    panels: Sequence[Panel],
    styles: Styles,
    *,
    columns: int = 3,
    one_scale: bool = False,
    **values: object,
) -> Drawing | None:
    """Return a figure of the panels that have lines, or None if there are none.

    Args:
        key: name of the figure, whose title and caption are in `templates/figures.toml`.
        panels: the panels, row by row.
        styles: the style of each line.
        columns: largest number of panels in a row.
        one_scale: all y axes have one scale with 0, because readers compare the panels.
        values: values in title and caption.
    """
    shown = [panel for panel in panels if panel.ends]
    if not shown:
        return None
    figure, drawn = canvas(len(shown), columns, 3.9)
    every_end = [0.0, *(end for panel in shown for end in panel.ends)]
    for axes, panel in zip(drawn, shown, strict=True):
        _draw(axes, panel, styles)
        _mark(axes, panel)
        frame(axes, every_end if one_scale else panel.ends, panel.y)
    legend_below(figure)
    drawn[0].set_ylabel(FIGURES[key].get("y", ""))
    return finish(figure, key, **values)


def lines_of(values: Iterable[tuple[str, float, float | None]]) -> dict[str, list[Point]]:
    """Return the lines through points without intervals: name, x, and value if it is known."""
    lines: dict[str, list[Point]] = {}
    for name, x, value in values:
        if value is not None:
            lines.setdefault(name, []).append((x, value, value, value))
    return lines


def _plain(text: str) -> str:
    """Return a text of a user, such as an entity type, as Matplotlib shows it without formulas."""
    return text.replace("$", r"\$")


def _draw(axes: Axes, panel: Panel, styles: Styles) -> None:
    if panel.log_x:
        axes.set_xscale("log")
    for index, (name, points) in enumerate(panel.lines.items()):
        shift = index - (len(panel.lines) - 1) / 2
        colour, marker, *strokes = styles[name]
        x, y, low, high = np.array(sorted(points)).T
        if math.isinf(x[-1]):
            axes.axhline(y[-1], color=colour, linestyle=":", linewidth=1.8, label=name)
            continue
        bars = np.maximum(0, [y - low, high - y])
        bars[:, ~bars.any(axis=0)] = np.nan  # draws nothing for a point without an interval
        axes.errorbar(
            x * panel.apart**shift if panel.log_x and panel.apart else x + panel.apart * shift,
            y,
            yerr=None if np.isnan(bars).all() else bars,
            color=colour,
            marker=marker if len(x) <= _MARKED or "none" in strokes else None,
            linestyle=strokes[0] if strokes else "-",
            capsize=3,
            elinewidth=1.2,
            label=name,
        )
    if panel.ticks:
        turned = 90 if sum(map(len, panel.ticks.values())) > _TICK_LETTERS else 0
        axes.set_xticks(list(panel.ticks), [*map(_plain, panel.ticks.values())], rotation=turned)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(visible=False, axis="x", which="minor")
    axes.margins(x=0.1 if panel.ticks else 0.05)
    axes.set_xlabel(panel.x)
    axes.set_title(_plain(panel.title), loc="left")


def _mark(axes: Axes, panel: Panel) -> None:
    """Draw the band, the ceiling and the ε spent."""
    if panel.band:
        axes.axhspan(*panel.band, color=COLOURS["pale"], zorder=0, label="no memory")
    if panel.ceiling is not None:
        axes.axhline(panel.ceiling, color=COLOURS["axis"], linestyle=":", linewidth=1.2)
    if spending := panel.spending:
        right, name = twin(axes), "ε spent by DP training (right axis)"
        (line,) = right.plot(spending.updates, spending.epsilon, "--", label=name)
        line.set(color=EPSILON_COLOUR, linewidth=1.6)
        right.set_ylabel("ε", rotation=0, labelpad=10, fontsize=13)
        right.set_ylim(bottom=0)


def frame(axes: Axes, ends: Sequence[float], scale: Scale) -> None:
    """Set the scale of a y axis, with all values and ends of their intervals inside.

    An axis of shares spans at least five percentage points, so that small random differences do not
    look large.
    """
    low, high = min(ends), max(ends)
    if scale == "share":
        air = max(0.1 * (high - low), (0.05 - (high - low)) / 2)
        axes.set_ylim(low - air if low < 0 else max(0.0, low - air), min(1.0, high + air))
        axes.yaxis.set_major_formatter(_PERCENT)
    elif scale == "zero":
        axes.set_ylim(min(0.0, low), 1.05 * high)
    elif scale == "log":
        axes.set_yscale("log")


def exposure_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return exposure against occurrences by pattern, or None if no exposure may be shown."""
    rows = {model.name: embedded_rows(model.audits[0]) for model in models if model.audits}
    return exposure_drawing("exposure", rows, styles_of(models))


def embedded_rows(exposures: Exposures) -> list[ExposureRow]:
    """Return the groups of canaries that were placed among random tokens."""
    return [row for row in exposures.rows if row.context == EMBEDDED]


def exposure_drawing(
    key: str, rows: Mapping[str, Sequence[ExposureRow]], styles: Styles
) -> Drawing | None:
    """Return exposures by occurrences, with one panel per pattern, or None without canaries."""
    patterns = {row.pattern for of_line in rows.values() for row in of_line}
    panels = []
    for pattern in sorted(patterns, key=lambda p: (len(p), p)):
        of_pattern = {n: [row for row in rows[n] if row.pattern == pattern] for n in rows}
        shown = [row for of_line in of_pattern.values() for row in of_line]
        occurrences = {row.expected_occurrences for row in shown}
        panels.append(
            Panel(
                pattern,
                {
                    name: [(r.expected_occurrences, r.exposure, r.low, r.high) for r in of_line]
                    for name, of_line in of_pattern.items()
                    if of_line
                },
                "Expected occurrences, units",
                {number: significant(number) for number in occurrences},
                log_x=True,
                y="zero",
                apart=1.06,
                band=(min(r.null_low for r in shown), max(r.null_high for r in shown)),
                ceiling=math.log2(max(row.candidates for row in shown)),
            )
        )
    return lines_figure(key, panels, styles)


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
        [*map(_plain, handles)],
        loc="outside lower center",
        frameon=False,
        labelcolor=COLOURS["ink"],
        ncols=max(1, min(most, len(handles), fitting)),
    )


_SCALES: Mapping[str, Scale] = {"loss": "values", "mlm_public": "share"}  # perplexities: log


def training_figure(curves: Sequence[Curve], models: Sequence[ModelRow]) -> Drawing | None:
    """Return the training curves with the ε spent, one panel per quantity; None without curves."""
    panels = []
    for quantity in QUANTITIES:
        shown = [c for c in curves if c.quantity == quantity and c.updates]
        panels.append(
            Panel(
                QUANTITIES[quantity],
                lines_of(
                    (c.model, *at) for c in shown for at in zip(c.updates, c.values, strict=True)
                ),
                "Updates",
                y=_SCALES.get(quantity, "log"),
                spending=next((curve for curve in shown if curve.epsilon), None),
            )
        )
    return lines_figure("training", panels, styles_of(models), columns=2)


def epochs_figure(rows: Sequence[ModelRow], models: Sequence[ModelRow]) -> Drawing | None:
    """Return scores, mean exposures and losses by epoch, or None if no value may be shown.

    Args:
        rows: the models that each training saved.
        models: the models of the job, whose attacks measured losses on private text.
    """
    summaries = [(row, summarise(audit.rows)) for row in rows for audit in row.audits]
    band = (0.0, max((summary.mean_null_high for _, summary in summaries), default=0.0))
    scores = lines_of((row.name, row.epochs, number_of(row.score)) for row in rows)
    exposures = lines_of((row.name, row.epochs, summary.mean) for row, summary in summaries)
    losses = lines_of(
        (model.name, attacked.epochs, attacked.losses.get("others"))
        for model in models
        for attacked in model.memberships
    )
    panels = [
        _by_epoch(measure_of(models).axis, scores, y="share"),
        _by_epoch("Exposure, mean, bits", exposures, y="zero", band=band),
        _by_epoch("Loss on held-out text, nats", losses),
    ]
    shown = "; ".join(panel.title for panel in panels if panel.lines)
    styles = styles_of(list({row.name: row for row in (*models, *rows)}.values()))
    return lines_figure("epochs", panels, styles, shown=shown)


def _by_epoch(title: str, lines: Lines, **scales: Any) -> Panel:
    """Return a panel of values by epoch, without lines if no model was saved several times."""
    epochs = sorted({x for points in lines.values() for x, *_ in points if math.isfinite(x)})
    apart = 0.06 * min(np.diff(epochs), default=1.0)
    ticks = {epoch: significant(epoch) for epoch in epochs}
    return Panel(title, lines if epochs else {}, "Epochs", ticks, apart=apart, **scales)


def leakage_figure(leakages: Sequence[Mapping[str, Any]], styles: Styles) -> Drawing | None:
    """Return the leakage of the paper's attacks by epoch, or None without models of epochs.

    Args:
        leakages: `model`, `epoch` (None for the only model of a training), `level`, `attack`,
            `value` and `interval` of each attack, as in the figures of a report.
        styles: the style of each model.
    """
    titles = FIGURES["leakage"]["panels"]
    lines: dict[str, dict[str, list[Point]]] = {attack: {} for attack in titles}
    for row in leakages:
        of_attack = lines.get(f"{row['level']} {row['attack']}", {})
        epoch = math.inf if row["epoch"] is None else row["epoch"]
        of_attack.setdefault(row["model"], []).append((epoch, row["value"], *row["interval"]))
    panels = [_by_epoch(title, lines[attack], y="share") for attack, title in titles.items()]
    return lines_figure("leakage", panels, styles, one_scale=True)


def rarity_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return leakage against the rarity of units, with one panel per model; None if not known."""
    panels = []
    for model in models:
        rarity = model.memberships[-1].rarity if model.memberships else ()
        if rarity:
            ranks = rarity_correlation(rarity)
            shown = "" if ranks is None else f": ρ = {ranks:.2f}".replace("-", "−")
            points = lines_of((model.name, b.log_probability, b.leakage) for b in rarity)
            panels.append(Panel(f"{model.name}{shown}", points, "ln p(profile)", y="share"))
    return lines_figure("rarity", panels, _without_strokes(models), one_scale=True)


def _without_strokes(models: Sequence[ModelRow]) -> Styles:
    """Return the styles of points that no line connects."""
    return {name: (*style, "none") for name, style in styles_of(models).items()}


def entity_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return F1 by entity type or class for each model, or None if no value may be shown."""
    measure = measure_of(models)
    types = sorted({kind for model in models for kind in model.f1_by_type})
    lines = lines_of(
        (model.name, place, number_of(value))
        for model in models
        for place, value in enumerate([*map(model.f1_by_type.get, types), model.score])
    )
    for model in models:
        low, high = (number_of(end) for end in model.interval or (None, None))
        if model.name in lines and low is not None and high is not None:
            lines[model.name][-1] = (*lines[model.name][-1][:2], low, high)
    ticks = {float(place): kind for place, kind in enumerate([*types, measure.over_all])}
    apart = 0.6 / max(1, len(lines))
    panel = Panel("", lines if types else {}, "", ticks, y="share", apart=apart)
    return lines_figure("entities", [panel], _without_strokes(models), by_label=measure.by_label)
