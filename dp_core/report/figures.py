"""The figures of a job's report, after Hoory et al. 2021, Fig. 2, and the training behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, PercentFormatter

from dp_core.audit.exposure import EMBEDDED, ExposureRow
from dp_core.privacy.labels import Dp, Operator, Public
from dp_core.report import drawing
from dp_core.report.cells import significant
from dp_core.report.drawing import COLOURS, MARKERS, Drawing
from dp_core.report.model import Curve, Exposures, Kind, ModelRow

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
    figure, panels = drawing.canvas(len(patterns), 3, 3.9)
    for axes, pattern in zip(panels, patterns, strict=True):
        own = [(model, [r for r in rows if r.pattern == pattern]) for model, rows in shown]
        _exposure_panel(axes, own)
        axes.set_title(pattern)
    panels[0].set_ylabel("Exposure, bits")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=len(labels))
    return drawing.finish(
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
    for place, (model, rows) in enumerate(shown):
        rows = sorted(rows, key=lambda row: row.expected_occurrences)
        nudge = 1.06 ** (place - (len(shown) - 1) / 2)
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
        color=drawing.PALE,
        zorder=0,
        label="no memory",
    )
    ceiling = math.log2(max(row.candidates for row in every))
    axes.axhline(ceiling, color="#9aa5b1", linestyle=":", linewidth=1.2)
    axes.set_ylim(0, ceiling * 1.05)
    places = sorted({row.expected_occurrences for row in every})
    axes.set_xlim(places[0] / 1.5, places[-1] * 1.5)
    axes.set_xticks(places, [significant(x) for x in places])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(visible=False, axis="x", which="minor")
    axes.set_xlabel("Expected occurrences, units")


def training_figure(curves: Sequence[Curve], names: Mapping[Kind, str]) -> Drawing | None:
    """Return what training did, a panel for each quantity, ε beside it; None without curves."""
    quantities = [q for q in _QUANTITIES if any(c.quantity == q and c.updates for c in curves)]
    if not quantities:
        return None
    figure, panels = drawing.canvas(len(quantities), 2, 3.9)
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
    return drawing.finish(
        figure,
        "training",
        "Training, and the privacy it spends",
        "Each model's progress by update; the dashed red line is the privacy loss ε of the DP "
        "training so far (right axis), a function of the settings alone.",
    )


def _epsilon_line(axes: Axes, curve: Curve) -> Artist:
    right = drawing.twin(axes)
    (line,) = right.plot(
        curve.updates, curve.epsilon, color=drawing.EPSILON_RED, linestyle="--", linewidth=1.6
    )
    right.set_ylabel("ε", color=drawing.EPSILON_RED, rotation=0, labelpad=10, fontsize=13)
    right.tick_params(axis="y", colors=drawing.EPSILON_RED)
    right.set_ylim(bottom=0)
    return line


def entity_figure(models: Sequence[ModelRow]) -> Drawing | None:
    """Return strict F1 by entity type, a bar for each model; None if no value may be shown."""
    measured = [
        (model, {**model.f1_by_type, "all (micro)": model.f1})
        for model in models
        if any(
            isinstance(v, Dp | Public | Operator) for v in (model.f1, *model.f1_by_type.values())
        )
    ]
    if not measured:
        return None
    types = sorted({kind for _, scores in measured for kind in scores if kind != "all (micro)"})
    types.append("all (micro)")
    figure, (axes,) = drawing.canvas(1, 1, 3.8)
    width = 0.8 / len(measured)
    for place, (model, scores) in enumerate(measured):
        offset = (place - (len(measured) - 1) / 2) * width
        known = [
            (x + offset, value.value)
            for x, value in enumerate(scores.get(kind) for kind in types)
            if isinstance(value, Dp | Public | Operator)
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
    return drawing.finish(
        figure,
        "entities",
        "Entity extraction by type",
        "Strict entity F1 after fine-tuning each model in the same way: an entity counts when "
        "its type and both ends are right.",
    )
