"""`confide paper-table`: figures that the papers print, and their true values."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from operator import truediv
from pathlib import Path
from typing import Any, Literal

import click

from dp_core.privacy.accounting.accountants import (
    epsilon_paper_conversion,
    epsilon_pld,
    epsilon_rdp,
)
from dp_core.privacy.mechanisms import PoissonGaussian
from dp_core.vocabulary.selection_calibration import PaperHistogram, calibrate, paper_parameters
from tasks.commands.output import as_json, write_answer, write_table

Source = Literal["final", "workshop", "both", "neither"]

HOORY = "Hoory et al. 2021"
_PARAMETERS = ("examples", "batch", "sigma", "updates", "delta")
_PRINTED = Path(__file__).with_name("printed_epsilons.toml")
_ARITHMETIC: dict[str, Callable[..., float]] = {  # of the parameters, in their order
    "batch_product": lambda *factors: math.prod(factors),
    "updates": truediv,
    "words_per_example": truediv,
}


@dataclass(frozen=True)
class PaperRow:
    """One figure of a paper.

    Attributes:
        name: stable name. figure: description. parameters: parameters of the computation.
        true: the true value. Infinite values are `math.inf`.
        verdict: one sentence.
        printed: the paper's value, or None. source: the version of the paper that prints it.
        more: further values of the same parameters (Rényi, the old conversion).
        paper: authors and year.
    """

    name: str
    figure: str
    parameters: dict[str, float | str]
    true: float
    verdict: str
    printed: float | None = None
    source: Source = "neither"
    more: dict[str, float] = field(default_factory=dict)
    paper: str = HOORY


@click.command("paper-table")
@click.option(
    "--figure",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for Fig. 2 of Kerrigan et al., ε against δ, as guarantee.svg and .png.",
)
@as_json
def command(figure: Path | None) -> None:
    """Recompute the papers' figures: the printed value and the true one for its parameters.

    Example:
      confide paper-table
    """
    if figure is not None:
        _write_guarantee(figure)
    rows = [asdict(row) for row in paper_table()]
    write_answer(rows, lambda: _show(rows))


def _show(rows: list[dict[str, Any]]) -> None:
    def text(value: object) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    for paper, of_paper in itertools.groupby(rows, lambda row: row["paper"]):
        write_table(
            f"{paper}, recomputed",
            ["figure", "from", "printed", "true", "verdict"],
            [
                [
                    row["figure"],
                    ", ".join(f"{name}={text(value)}" for name, value in row["parameters"].items()),
                    *(row[name] for name in ("printed", "true", "verdict")),
                ]
                for row in of_paper
            ],
        )


def _write_guarantee(folder: Path) -> None:
    """Draw ε against δ for several σ, in the form of Kerrigan et al. 2020, Fig. 2."""
    # Matplotlib is slow to import.
    from tasks.report.figures import MORE_STYLES, Panel, lines_figure, lines_of
    from tasks.report.tables import power_of_ten

    given = tomllib.loads(_PRINTED.read_text(encoding="utf-8"))["guarantee"]
    of_paper = {"rate": given["rate"], "updates": given["updates"]}
    points, styles = [], {}
    accountants = ("PLD", "-", epsilon_pld), ("paper", "--", epsilon_paper_conversion)
    for sigma, style in zip(given["sigmas"], MORE_STYLES, strict=True):
        event = PoissonGaussian.single(given["rate"], sigma, given["updates"])
        for accountant, stroke, epsilon in accountants:
            name = f"σ = {sigma:g}, {accountant}"
            styles[name] = *style, stroke
            points += [(name, delta, epsilon(event, delta)) for delta in given["deltas"]]
    ticks = {delta: power_of_ten(delta) for delta in given["deltas"]}
    panel = Panel("", lines_of(points), "δ", ticks, log_x=True, y="zero")
    if drawing := lines_figure("guarantee", [panel], styles, **of_paper):
        drawing.write(folder)


def paper_table() -> list[PaperRow]:
    """Return every row, starting with the vocabulary. Takes seconds."""
    printed = tomllib.loads(_PRINTED.read_text(encoding="utf-8"))
    values = _vocabulary(paper_parameters())
    return [
        *(PaperRow(**row, **values[row["name"]]) for row in printed["vocabulary"]),
        *map(_arithmetic, printed["arithmetic"]),
        *map(_training, printed["training"]),
    ]


def _vocabulary(paper: PaperHistogram) -> dict[str, dict[str, Any]]:
    """Return the computed fields of each row of the vocabulary."""
    given = {"N": paper.words_per_unit, "σ": paper.sigma}
    at_delta = given | {"δ": paper.claimed_delta}
    best = calibrate(paper.epsilon, paper.claimed_delta, paper.words_per_unit)
    exact = {"N": best.items_per_unit, "ε": best.epsilon, "δ": best.delta, "σ": best.sigma}
    return {
        "epsilon_v_formula": {"parameters": at_delta, "true": paper.epsilon},
        "threshold_formula": {
            "parameters": at_delta,
            "true": paper.threshold,
            "more": {"lone_word_passes": paper.lone_word},
        },
        "delta_v": {
            "parameters": given | {"C": paper.threshold, "ε": paper.epsilon},
            "true": paper.true_delta,
        },
        "threshold_right": {
            "parameters": at_delta,
            "true": paper.right_threshold,
            "more": {"delta": paper.right_delta},
        },
        "threshold_exact": {"parameters": exact, "true": best.threshold},
    }


def _arithmetic(row: dict[str, Any]) -> PaperRow:
    return PaperRow(**row, true=_ARITHMETIC[row["name"]](*row["parameters"].values()))


def _training(row: dict[str, Any]) -> PaperRow:
    parameters = {name: row.pop(name) for name in _PARAMETERS}
    rate, delta = parameters["batch"] / parameters["examples"], parameters["delta"]
    event = PoissonGaussian.single(rate, parameters["sigma"], parameters["updates"])
    renyi = epsilon_rdp(event, delta)
    assert renyi is not None  # noqa: S101 - the Rényi curve of Poisson samples is known
    more = {"epsilon_rdp": renyi, "epsilon_old_conversion": epsilon_paper_conversion(event, delta)}
    return PaperRow(**row, parameters=parameters, true=epsilon_pld(event, delta), more=more)
