"""Tables and plots of docs/reproduction.md, from the figures of the study."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot

from benchmarks.study.experiments import Column, Experiment
from benchmarks.study.runs import INFINITE, ModelFigures
from benchmarks.utility.shares import Share, mean_of

COLOURS = ("#6b6b6b", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#b58900")
MARKERS = "sDo^vP"
_EPSILON = Column("ε", "epsilon")


@dataclass(frozen=True)
class Row:
    """One model of one variant, over the seeds.

    Attributes:
        variant: its name in the experiment.
        model: its name in MLflow.
        values: the values of each column, one per seed.
    """

    variant: str
    model: str
    values: dict[str, tuple[float, ...]]

    @property
    def name(self) -> str:
        """The title of the row."""
        return ", ".join(filter(None, (self.variant, self.model)))


def rows_of(
    experiment: Experiment, runs: Iterable[tuple[str, Sequence[ModelFigures]]]
) -> list[Row]:
    """Return a row for each variant and model.

    Args:
        experiment: the experiment of the runs.
        runs: (variant, models) of each finished run.
    """
    by_model: dict[tuple[str, str], list[ModelFigures]] = {}
    for variant, models in runs:
        for figures in models:
            if not experiment.models or figures.model in experiment.models:
                by_model.setdefault((variant, figures.model), []).append(figures)
    rows = [
        Row(
            variant,
            model,
            {
                column.metric: tuple(
                    figures_of_seed.metrics[column.metric]
                    for figures_of_seed in seeds
                    if column.metric in figures_of_seed.metrics
                )
                for column in experiment.columns
            },
        )
        for (variant, model), seeds in by_model.items()
    ]
    # Initial models of other models have a cost, but no scores.
    return [row for row in rows if any(v for k, v in row.values.items() if k != "epsilon")]


def shown(column: Column, values: Sequence[float]) -> str:
    """Return a cell: the mean, and for several values the standard deviation."""
    if not values:
        return "–"
    if max(values) >= INFINITE:
        return "∞"
    factor = 100.0 if column.unit == "%" else 1.0
    mean = f"{factor * statistics.fmean(values):.{column.decimals}f}"
    if len(values) > 1 and max(values) - min(values) > 10 ** -(column.decimals + 2):
        mean += f" ± {factor * statistics.stdev(values):.{column.decimals}f}"
    return mean


def table(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return the table in Markdown: means and standard deviations over seeds."""
    titles = [c.title + (", %" if c.unit == "%" else "") for c in experiment.columns]
    kept = [i for i, c in enumerate(experiment.columns) if any(r.values[c.metric] for r in rows)]
    lines = ["| | " + " | ".join(titles[i] for i in kept) + " |", "| --- |" + " --- |" * len(kept)]
    for row in rows:
        cells = [shown(c, row.values[c.metric]) for c in (experiment.columns[i] for i in kept)]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def differences(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return a line for each compared pair of rows that exists."""
    named, lines = {row.name: row for row in rows}, []
    for first, second, column in experiment.compared:
        if first not in named or second not in named:
            continue
        paired = difference(named[first], named[second], column.metric)
        if paired is None or paired.low is None or paired.high is None:
            continue
        factor = 100.0 if column.unit == "%" else 1.0
        mean, low, high = (factor * value for value in (paired.mean, paired.low, paired.high))
        lines.append(
            f"- {second}, against {first}: {column.title} {mean:+.1f} "
            f"({low:+.1f} to {high:+.1f}; {paired.seeds} seeds)"
        )
    return (
        "\n".join(["", "Differences seed by seed, 95% interval by Student's t:", "", *lines])
        if lines
        else ""
    )


def difference(first: Row, second: Row, metric: str) -> Share | None:
    """Return the paired difference of two rows over seeds, with its interval (t)."""
    pairs = list(zip(first.values[metric], second.values[metric], strict=False))
    if not pairs or not all(map(math.isfinite, (v for pair in pairs for v in pair))):
        return None
    return mean_of(b - a for a, b in pairs)


def draw_models(rows: Sequence[Row], file: Path) -> None:
    """Draw F1 against largest exposure for each model and seed."""
    with pyplot.rc_context({"font.size": 10, "svg.hashsalt": "study", "svg.fonttype": "none"}):
        figure, panel = pyplot.subplots(figsize=(6.4, 3.9), layout="constrained")
        for edge in ("top", "right"):
            panel.spines[edge].set_visible(False)
        for row, colour, marker in zip(rows, COLOURS, MARKERS, strict=False):
            x = [100 * value for value in row.values["f1"]]
            y = row.values["exposure_largest"]
            panel.scatter(x, y, s=26, color=colour, marker=marker, alpha=0.45, linewidth=0)
            panel.errorbar(
                statistics.fmean(x),
                statistics.fmean(y),
                xerr=_spread(x),
                yerr=_spread(y),
                color=colour,
                marker=marker,
                markersize=9,
                capsize=3,
                linewidth=1.2,
                label=f"{row.model}, ε = {shown(_EPSILON, row.values['epsilon'])}",
            )
        panel.set_xlabel("entities found: strict F1, %")
        panel.set_ylabel("remembered: largest exposure, bits")
        panel.set_ylim(bottom=0)
        panel.grid(color="#eceff1", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.legend(frameon=False, loc="upper left")
        _save(figure, file)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _save(figure: pyplot.Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
