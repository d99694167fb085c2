"""The figures of the reports: after Hoory et al. 2021, Figs. 1 and 2, and the training behind."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter

from dp_core.audit.exposure import EMBEDDED, ExposureRow, summarise
from dp_core.training.bootstrap import MeanF1
from tasks.protocol.sweep import BASELINE_NAMES, Baseline
from tasks.report.cells import significant
from tasks.report.model import (
    F1,
    Curve,
    EpochsRow,
    Exposures,
    Kind,
    Measure,
    ModelAt,
    ModelRow,
    SweepRow,
    compared_by,
    measure_of,
    number_of,
)
from tasks.report.sweep_tables import FINETUNING_TITLES

# Okabe and Ito's palette: told apart with any kind of colour vision; markers differ as well.
COLOURS: dict[Kind, str] = {
    "public": "#6b6b6b",
    "phrases": "#009e73",
    "dp": "#0072b2",
    "nonprivate": "#d55e00",
}
MARKERS: dict[Kind, str] = {"public": "s", "phrases": "D", "dp": "o", "nonprivate": "^"}
_BASELINE_STYLES: dict[Baseline, tuple[str, str]] = {  # colour and dashes, told apart in grey
    "public": (COLOURS["public"], ":"),
    "public-training": (COLOURS["public"], "-."),
    "checkpoint": (COLOURS["phrases"], "--"),
    "nonprivate": (COLOURS["nonprivate"], "--"),
    "nonprivate-training": (COLOURS["nonprivate"], "-."),
}
_OF_THE_SAME_TOKENS: tuple[Baseline, ...] = ("public-training", "nonprivate-training")
# Of further ones of a kind: strokes and gaps, in widths of the line.
_MORE_DASHES = ((0, (9, 2)), (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))
EPSILON_RED, SCORE_BLUE, PALE, INK = "#c1272d", "#0072b2", "#e8e8e4", "#1f2933"
_FAR_APART = 20  # the largest perplexity over the smallest
_LEGEND_LETTERS = 110  # of a figure's width
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
    "perplexity_public": "Perplexity, public text",
    "perplexity_private": "Perplexity, private text",
}


_MARKED = 12  # points of a curve, of which each has a marker


@dataclass(frozen=True)
class _Style:
    """How a model's lines look: in colour, and where there is none."""

    colour: str
    marker: str


_MORE = (  # of further private models
    _Style("#56b4e9", "v"),
    _Style("#cc79a7", "P"),
    _Style("#e69f00", "X"),
    _Style("#000000", "<"),
)


def styles_of(models: Sequence[ModelRow]) -> dict[str, _Style]:
    """Return each model's style, by its name: each kind has its own, further private ones more."""
    found: dict[str, _Style] = {}
    more = itertools.cycle(_MORE)
    for model in models:
        own = _Style(COLOURS[model.kind], MARKERS[model.kind])
        found[model.name] = own if own not in found.values() else next(more)
    return found


@dataclass(frozen=True)
class _Line:
    """One model's exposures to the canaries among random tokens, and how it is drawn."""

    name: str
    rows: Sequence[ExposureRow]
    colour: Any
    marker: str
    style: str = "-"


_OCCURRENCES = (
    "by pattern (H: hint, S: secret) and by the number of units expected to carry them (after "
    "Hoory et al. 2021, Fig. 2). Bars: 95% intervals over canaries. The band is where 95% of "
    "models that remember nothing would lie; the dotted line, a secret that is always ranked first."
)


def exposure_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return exposure against occurrences, a panel for each pattern; None if none may be shown."""
    styles = styles_of(models)
    lines = [
        _Line(
            model.name,
            _embedded(model.exposures),
            styles[model.name].colour,
            styles[model.name].marker,
        )
        for model in models
        if isinstance(model.exposures, Exposures)
    ]
    caption = f"How strongly each model favours planted secrets, {_OCCURRENCES}"
    return _exposure_drawing(lines, "exposure", caption)


def sweep_exposure_figure(points: Sequence[SweepRow]) -> Drawing | None:
    """Return exposure against occurrences, a line for each batch size and number of updates.

    Trainings without privacy are drawn in red, as in the paper. None where there is one line only,
    or none may be shown. Lines go through the middle σ; of several seeds, each line is the mean,
    and its bars reach over the intervals of all of them.
    """
    known = [p for p in points if isinstance(p.exposures, tuple) and p.exposures]
    red = _lines_without_privacy([p for p in known if p.baseline])
    known = [p for p in known if p.baseline is None]
    sizes = sorted({(p.batch_size, p.updates) for p in known})
    if len(sizes) + len(red) < 2 or not sizes:
        return None
    sigma = _middle([_coordinates(p) for p in known])[0]
    trained = {}  # of settings that differ in fine-tuning alone, one
    for point in known:
        size = point.batch_size, point.updates
        if size not in trained or point.noise_multiplier == sigma:
            trained[size] = point
    batches = sorted({batch for batch, _ in sizes})
    styles = ("-", "--", ":", "-.")
    lines = []
    for batch, updates in sizes:
        point = trained[batch, updates]
        assert isinstance(point.exposures, tuple)  # noqa: S101 - narrows the type
        own = [u for b, u in sizes if b == batch]
        shade = 0.35 + 0.6 * batches.index(batch) / max(1, len(batches) - 1)
        lines.append(
            _Line(
                f"bs={batch} step={updates} σ={significant(point.noise_multiplier)}",
                _over_seeds([_embedded(one) for one in point.exposures]),
                matplotlib.colormaps["viridis_r"](shade),
                "osD^v"[batches.index(batch) % 5],
                styles[own.index(updates) % len(styles)],
            )
        )
    caption = f"Exposure by batch size (bs) and number of updates (step), {_OCCURRENCES}"
    if red:
        caption += " Red: training without privacy."
    return _exposure_drawing([*lines, *red], "sweep-exposure", caption)


def _lines_without_privacy(baselines: Sequence[SweepRow]) -> list[_Line]:
    """Return a line for each vocabulary and number of updates of trainings without privacy.

    Public models have read none of the canaries.
    """
    trained: dict[tuple[Baseline | None, int], SweepRow] = {}
    for row in baselines:  # settings that differ in fine-tuning alone have one
        if row.updates:
            trained.setdefault((row.baseline, row.updates), row)
    found = []
    for number, (baseline, updates) in enumerate(sorted(trained, key=str)):
        row = trained[baseline, updates]
        assert isinstance(row.exposures, tuple) and baseline  # noqa: S101 - narrow the types
        found.append(
            _Line(
                f"{BASELINE_NAMES[baseline]} bs={row.batch_size} step={updates}",
                _over_seeds([_embedded(one) for one in row.exposures]),
                COLOURS["nonprivate"],
                "^vXP*"[number % 5],
                ("--", "-", ":", "-.")[number % 4],
            )
        )
    return found


def _embedded(exposures: Exposures) -> list[ExposureRow]:
    return [row for row in exposures.rows if row.context == EMBEDDED]


def _over_seeds(models: Sequence[Sequence[ExposureRow]]) -> list[ExposureRow]:
    """Return the mean exposure of each group, with bars over those of all models."""
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


def _exposure_drawing(lines: Sequence[_Line], key: str, caption: str) -> Drawing | None:
    patterns = {row.pattern for line in lines for row in line.rows}
    if not patterns:
        return None
    figure, panels = canvas(len(patterns), 3, 3.9)
    for axes, pattern in zip(panels, sorted(patterns, key=lambda p: (len(p), p)), strict=True):
        _exposure_panel(axes, lines, pattern)
        axes.set_title(pattern)
    panels[0].set_ylabel("Exposure, bits")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = _legend_columns(labels)
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=columns)
    return finish(figure, key, "Exposure against occurrences", caption)


def _exposure_panel(axes: Axes, lines: Sequence[_Line], pattern: str) -> None:
    shown = [(line, [row for row in line.rows if row.pattern == pattern]) for line in lines]
    every = [row for _, rows in shown for row in rows]
    axes.set_xscale("log")
    # Models share their occurrences: points stand side by side, so that bars do not cover bars.
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


def _legend_columns(names: Sequence[str]) -> int:
    """Return in how many columns a legend's names fit the page."""
    return max(1, min(len(names), 4, _LEGEND_LETTERS // (max(map(len, names)) + 4)))


def training_figure(curves: Sequence[Curve], models: Sequence[ModelRow]) -> Drawing | None:
    """Return what training did, a panel for each quantity, ε beside it; None without curves."""
    styles = styles_of(models)
    quantities = [q for q in _QUANTITIES if any(c.quantity == q and c.updates for c in curves)]
    if not quantities:
        return None
    figure, panels = canvas(len(quantities), 2, 3.9)
    handles: dict[str, Artist] = {}
    for axes, quantity in zip(panels, quantities, strict=True):
        own = [c for c in curves if c.quantity == quantity and c.updates]
        for curve in own:
            style = styles[curve.model]
            (handles[curve.model],) = axes.plot(
                curve.updates,
                curve.values,
                color=style.colour,
                marker=style.marker if len(curve.values) <= _MARKED else None,
                label=curve.model,
            )
        axes.set_xlabel("Updates")
        axes.set_title(_QUANTITIES[quantity], loc="left")
        axes.set_xlim(left=0)
        if quantity == "mlm_public":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axes.set_ylim(bottom=0)
        if quantity.startswith("perplexity"):
            axes.set_yscale("log")
        if spending := next((c for c in own if c.epsilon), None):
            handles["ε spent by DP training"] = _epsilon_line(axes, spending)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        frameon=False,
        ncols=_legend_columns(list(handles)),
    )
    return finish(
        figure,
        "training",
        "Training, and the privacy it spends",
        "Each model's progress by update; the dashed red line is the privacy loss ε of the job's "
        "DP training so far (right axis), a function of the settings alone; of a model that is "
        "kept on the way, what counts is the ε at its end.",
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


def epochs_figure(rows: Sequence[EpochsRow], measure: Measure = F1) -> Drawing | None:
    """Return scores and mean exposures by epoch, a line a training; None if none may be shown."""
    scores = [_known(row, lambda one: number_of(one.score)) for row in rows]
    exposures = [_known(row, _mean_exposure) for row in rows]
    shown = [
        (title, found)
        for title, found in ((measure.axis, scores), ("Exposure, mean, bits", exposures))
        if any(found)
    ]
    if not shown:
        return None
    figure, panels = canvas(len(shown), 2, 3.9)
    handles: dict[str, Artist] = {}
    for axes, (title, found) in zip(panels, shown, strict=True):
        for row, line in zip(rows, found, strict=True):
            if line:
                (handles[row.name],) = axes.plot(
                    *_columns(line), color=COLOURS[row.kind], marker=MARKERS[row.kind]
                )
        axes.set_xlabel("Epochs")
        axes.set_xticks(sorted({epochs for line in found for epochs, _ in line}))
        axes.set_title(title, loc="left")
        if found is scores:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
            _frame_scores(axes, [score for line in found for _, score in line], measure)
        else:
            chance = _highest_by_chance(rows)
            axes.axhspan(0, chance, color=PALE, zorder=0)
            highest = max(chance, *(value for line in found for _, value in line))
            axes.set_ylim(0, 1.1 * highest)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        frameon=False,
        ncols=_legend_columns(list(handles)),
    )
    return finish(
        figure,
        "epochs",
        "Usefulness and memory by epoch",
        f"{measure.axis} after fine-tuning, and exposure of the canaries (in the band: what 97.5% "
        "of models that remember nothing stay below), of the models that one training had after "
        "several of its epochs. One charge covers all models of a training: each has the ε of all.",
    )


def _known(row: EpochsRow, value: Callable[[ModelAt], float | None]) -> list[tuple[float, float]]:
    """Return (epochs, value) of a training's models, where it was measured and may be seen."""
    return [(one.epochs, v) for one in row.at if (v := value(one)) is not None]


def _mean_exposure(one: ModelAt) -> float | None:
    if not isinstance(one.exposures, Exposures):
        return None
    return summarise(one.exposures.rows).mean


def _highest_by_chance(rows: Sequence[EpochsRow]) -> float:
    seen = [one.exposures for row in rows for one in row.at]
    return max(summarise(one.rows).mean_null_high for one in seen if isinstance(one, Exposures))


def entity_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return F1 by entity type or class, a bar for each model; None if no value may be shown."""
    measure = measure_of(models)
    measured = [
        (model, {**model.f1_by_type, measure.over_all: model.score})
        for model in models
        if any(number_of(v) is not None for v in (model.score, *model.f1_by_type.values()))
    ]
    if not measured:
        return None
    types = sorted({kind for model, _ in measured for kind in model.f1_by_type})
    types.append(measure.over_all)
    figure, (axes,) = canvas(1, 1, 3.8)
    width, styles = 0.8 / len(measured), styles_of(models)
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
            color=styles[model.name].colour,
            label=model.name,
        )
        axes.bar_label(bars, [f"{100 * y:.1f}" for _, y in known], padding=2, fontsize=10)
    axes.set_xticks(range(len(types)), types)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.08)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    axes.set_ylabel(measure.axis if measure is F1 else "F1, accuracy")
    figure.legend(
        loc="outside lower center",
        frameon=False,
        ncols=_legend_columns([m.name for m, _ in measured]),
    )
    return finish(
        figure,
        "entities",
        measure.by_label,
        f"{measure.axis} after fine-tuning each model in the same way: {measure.explained}.",
    )


Coordinates = tuple[float, ...]  # a value of each of `_AXES`; 0 where the sweep sets none


@dataclass(frozen=True)
class _Axis:
    """One of the settings that stand on an x axis, where the others are held."""

    name: str
    title: str
    held: Callable[[float], str]
    logarithmic: bool = True


def _named(name: str, value: float) -> str:
    return f"{name} {significant(value)}"


_AXES = (
    _Axis(
        "noise_multiplier",
        "Noise multiplier σ",
        lambda s: f"σ = {significant(s)}",
        logarithmic=False,
    ),
    _Axis("batch_size", "Batch size, expected units", lambda b: f"batch {significant(b)}"),
    _Axis("epochs", "Epochs", lambda e: f"{significant(e)} epochs"),
    *(
        _Axis(name, title, partial(_named, title.lower()))
        for name, title in FINETUNING_TITLES.items()
    ),
)
_OF_TRAINING = 3  # the first of them, which every sweep has


def _coordinates(point: SweepRow) -> Coordinates:
    own = point.noise_multiplier, float(point.batch_size), point.epochs
    return *own, *(point.finetuning.get(axis.name, 0.0) for axis in _AXES[_OF_TRAINING:])


_ON_THE_WAY = (
    " Where points differ in epochs alone, they are models on the way of one training, on its "
    "course of the learning rate; its one charge covers them together, so all have its ε."
)


def sweep_figure(points: Sequence[SweepRow]) -> Drawing | None:
    """Return ε (red) and scores (blue) against each setting, a panel each; None without points.

    Strong lines go through the middle of the points; pale ones are the others. Perplexity is by
    token, so that of other vocabularies is no level to compare with.
    """
    measure = compared_by(points)
    baselines = [p for p in points if p.baseline and number_of(p.compared) is not None]
    if not measure.is_share:
        baselines = [p for p in baselines if p.baseline in _OF_THE_SAME_TOKENS]
    grid = {_coordinates(point): point for point in points if point.baseline is None}
    if not grid:
        return None
    middle = _middle(list(grid))
    on_the_way = any(point.training_epochs for point in points)
    varied = [i for i in range(len(_AXES)) if len({c[i] for c in grid}) > 1]
    # A sweep of pre-training shows the paper's three panels.
    of_training = not varied or min(varied) < _OF_TRAINING
    shown = sorted({*varied, *range(_OF_TRAINING)}) if of_training else varied
    scored = any(number_of(point.compared) is not None for point in points)
    figure, panels = canvas(len(shown), 3, 4.1)
    # Scores are compared across panels, and so is ε: each has one scale.
    top_epsilon = max((e for p in points if (e := _epsilon(p)) is not None), default=1.0)
    for axes, index in zip(panels, shown, strict=True):
        right = twin(axes)
        _lines(axes, right, index, grid, middle)
        handles = {
            row.name: _level(right, row, [p.baseline for p in baselines[:n]].count(row.baseline))
            for n, row in enumerate(baselines)
        }
        held = [_AXES[i].held(middle[i]) for i in shown if i != index]
        axes.set_title(", ".join(held), fontsize=10.5)
        axes.set_xlabel(_AXES[index].title)
        axes.set_ylim(0, top_epsilon * 1.1)
        axes.tick_params(axis="y", colors=EPSILON_RED)
        right.tick_params(axis="y", colors=SCORE_BLUE)
        if measure.is_share:
            right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        _score_limits(right, [*grid.values(), *baselines], measure)
        if index == shown[0]:
            axes.set_ylabel("ε in total", color=EPSILON_RED)
        if index == shown[-1] and scored:
            right.set_ylabel(measure.axis, color=SCORE_BLUE)
    if baselines:
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            frameon=False,
            ncols=min(3, _legend_columns(list(handles))),
        )
    over = "documents and seeds" if measure.is_share else "seeds"
    scores = (
        f" (red circles, left axes), and {measure.axis[0].lower()}{measure.axis[1:]} (blue "
        f"squares, right axes; bars and band: 95% intervals over {over})"
    )
    return finish(
        figure,
        "sweep",
        "Privacy and usefulness against each setting",
        f"ε of all that each point cost, its seeds together{scores if scored else ''}, against "
        "each setting. Strong lines hold the other settings at the middle of the points, given "
        "above each panel; pale lines are the rest"
        f"{'; level ones, the models that are compared with' if baselines else ''}. After Hoory "
        "et al. 2021, Fig. 1, which shows the ε of training alone."
        f"{_ON_THE_WAY if on_the_way else ''}",
    )


def _level(right: Axes, row: SweepRow, before: int) -> Artist:
    """Draw the score of a baseline, which has none of the settings of the axis.

    `before`: how many of its kind are drawn already, for other numbers of epochs or so.
    """
    score = number_of(row.compared)
    assert score is not None and row.baseline  # noqa: S101 - narrow the types
    colour, own = _BASELINE_STYLES[row.baseline]
    dashes = _MORE_DASHES[(before - 1) % len(_MORE_DASHES)] if before else own
    return right.axhline(score, color=colour, linestyle=dashes, linewidth=1.5)


def _middle(grid: Sequence[Coordinates]) -> Coordinates:
    """Return the point of the grid nearest to the median rank in every setting.

    Of several, the one on most lines: of points around one, it is that one.
    """
    values = [sorted(set(column)) for column in zip(*grid, strict=True)]

    def distance(point: Coordinates) -> float:
        ranks = zip(point, values, strict=True)
        return sum(abs(own.index(value) - (len(own) - 1) / 2) for value, own in ranks)

    def neighbours(point: Coordinates) -> int:
        return sum(sum(a != b for a, b in zip(point, o, strict=True)) == 1 for o in grid)

    return min(sorted(grid), key=lambda point: (distance(point), -neighbours(point)))


def _lines(
    axes: Axes,
    right: Axes,
    index: int,
    grid: dict[Coordinates, SweepRow],
    middle: Coordinates,
) -> None:
    if _AXES[index].logarithmic:
        axes.set_xscale("log")
    held = {c[:index] + c[index + 1 :] for c in grid}
    own = middle[:index] + middle[index + 1 :]
    for others in sorted(held, key=lambda o: o == own):  # the strong line last, on top
        strength = 1.0 if others == own else 0.22
        line = sorted(c for c in grid if c[:index] + c[index + 1 :] == others)
        epsilons = [(c[index], v) for c in line if (v := _epsilon(grid[c])) is not None]
        axes.plot(*_columns(epsilons), "o-", color=EPSILON_RED, alpha=strength)
        scores = [
            (c[index], v, grid[c]) for c in line if (v := number_of(grid[c].compared)) is not None
        ]
        x, y = _columns([(x, y) for x, y, _ in scores])
        bars = _columns([_bars(point, y) for _, y, point in scores])
        if others == own:
            low = [value - below for value, below in zip(y, bars[0], strict=True)]
            high = [value + above for value, above in zip(y, bars[1], strict=True)]
            right.fill_between(x, low, high, color=SCORE_BLUE, alpha=0.12, linewidth=0)
        right.errorbar(
            x,
            y,
            yerr=bars if any(map(any, bars)) else None,
            fmt="s--",
            color=SCORE_BLUE,
            alpha=strength,
            capsize=3,
            elinewidth=1.2,
        )
    settings = sorted({c[index] for c in grid})
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(settings, [significant(x) for x in settings])
    axes.margins(x=0.12)


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _bars(point: SweepRow, score: float) -> tuple[float, float]:
    """Return how far the interval of a score reaches below and above it; 0 without one."""
    spread = point.spread if isinstance(point.spread, MeanF1) else None
    if spread is None or spread.interval is None:
        return 0.0, 0.0
    low, high = spread.interval
    return max(0.0, score - low), max(0.0, high - score)


def _epsilon(point: SweepRow) -> float | None:
    """Return the total ε, if there is a finite one to draw."""
    epsilon = point.cost.corpus.epsilon
    return epsilon if epsilon is not None and math.isfinite(epsilon) else None


def _score_limits(right: Axes, points: Sequence[SweepRow], measure: Measure) -> None:
    scores = [score for p in points if (score := number_of(p.compared)) is not None]
    if scores:
        _frame_scores(right, scores, measure)
    else:
        right.set_yticks([])
        right.spines["right"].set_visible(False)


def _frame_scores(axes: Axes, scores: Sequence[float], measure: Measure) -> None:
    """Frame scores with some air, at least five points high: noise must not look like a law.

    Perplexities stand above 0, or on a logarithmic scale where they are far apart.
    """
    low, high = min(scores), max(scores)
    if not measure.is_share:
        if high > _FAR_APART * low:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.2 * high)
        return
    air = max(0.1 * (high - low), (0.05 - (high - low)) / 2)
    axes.set_ylim(max(0.0, low - air), min(1.0, high + air))
