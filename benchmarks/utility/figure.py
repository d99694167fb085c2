"""The figure: share of the non-private gain that is kept, against the number of units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5ea2", "#c98b1b", "#4c4c4c")
MARKERS = "osD^vP"
SHOWN = ("MLM accuracy on private text", "entity F1")


def draw(rows: Iterable[Mapping[str, Any]], file: Path, recipes: Iterable[str] = ()) -> None:
    """Draw made-up notes: a row of panels per ε, a panel per quantity, and a line per recipe.

    Args:
        rows: the rows of `aggregate`.
        file: .svg or .png.
        recipes: the drawn recipes; all if empty.
    """
    wanted = set(recipes)
    shown = [r for r in rows if r["corpus"] == "made-up" and (not wanted or r["recipe"] in wanted)]
    quantities = [q for q in SHOWN if any(r["quantity"] == q for r in shown)]
    sizes = {
        e: {r["units"] for r in shown if r["epsilon"] == e} for e in {r["epsilon"] for r in shown}
    }
    # A single size is no curve; if another ε has several sizes, this one is in the results file
    # only.
    epsilons = sorted(e for e in sizes if len(sizes[e]) > 1 or max(map(len, sizes.values())) == 1)
    names = list(dict.fromkeys(r["recipe"] for r in shown))
    units = sorted({r["units"] for r in shown})
    with pyplot.rc_context({"font.size": 9, "svg.hashsalt": "utility", "svg.fonttype": "none"}):
        figure, panels = pyplot.subplots(
            max(1, len(epsilons)),
            max(1, len(quantities)),
            figsize=(1.2 + 3.1 * max(1, len(quantities)), 0.9 + 2.4 * max(1, len(epsilons))),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for i, epsilon in enumerate(epsilons):
            for j, quantity in enumerate(quantities):
                selected = [
                    r for r in shown if r["quantity"] == quantity and r["epsilon"] == epsilon
                ]
                _panel(panels[i, j], selected, names, units)
                if i == 0:
                    panels[i, j].set_title(quantity, fontsize=9)
                if i == len(epsilons) - 1:
                    panels[i, j].set_xlabel("patients")
            panels[i, 0].set_ylabel(f"share of the gain kept,\nε = {epsilon:g} in total")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        for panel in panels.flat:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles.append(handle)
                    labels.append(label)
        if labels:
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=2 if len(labels) > 3 else max(1, len(labels)),
                frameon=False,
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def _panel(panel: Axes, rows: list[Mapping[str, Any]], names: list[str], units: list[int]) -> None:
    for edge in ("top", "right"):
        panel.spines[edge].set_visible(False)
    panel.axhline(0, color="#888888", linewidth=0.8)
    panel.axhline(1, color="#888888", linewidth=0.8, linestyle=":")
    for k, name in enumerate(names):
        selected = sorted((r for r in rows if r["recipe"] == name), key=lambda r: r["units"])
        if not selected:
            continue
        x, y = [r["units"] for r in selected], [r["share"] for r in selected]
        colour = COLOURS[k % len(COLOURS)]
        panel.plot(
            x,
            y,
            color=colour,
            marker=MARKERS[k % len(MARKERS)],
            markersize=4,
            linewidth=1.3,
            label=name,
        )
        spread = [r for r in selected if r["low"] is not None]
        if spread:
            panel.fill_between(
                [r["units"] for r in spread],
                [r["low"] for r in spread],
                [r["high"] for r in spread],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
            panel.vlines(
                [r["units"] for r in spread],
                [r["low"] for r in spread],
                [r["high"] for r in spread],
                color=colour,
                linewidth=0.8,
            )
    panel.set_xscale("log")
    panel.set_xticks(units)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}k"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    lowest = min((r["share"] for r in rows), default=0.0)
    # With few seeds an interval may be many times the whole gain, so it is cut off at the panel.
    panel.set_ylim(min(-0.15, lowest - 0.1), 1.1)
    panel.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    panel.set_axisbelow(True)
