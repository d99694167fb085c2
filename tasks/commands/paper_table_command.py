"""`confide paper-table`: figures that the papers print, and their true values."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
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
_PRINTED = Path(__file__).with_name("printed_epsilons.toml")

# Numbers that Hoory et al. state.
_EXAMPLES = 83_000_000
_WORDS = 712_000_000
_TUPLE = 256
_SIGMA = 2.72
_DELTA = 1e-8
_STEPS = 1_000_000
_SHARDS, _PER_SHARD, _ACCUMULATION = 256, 32, 32
# Rows of 128 word pieces with half a row more for each of 2.08M notes; BERT's input pipeline writes
# every row ten times, with other masks, which makes about 83M examples.
_ROWS = 8_500_000
_BATCHES = {"128k = 131,072": 131_072, "256k = 256·32·32": _SHARDS * _PER_SHARD * _ACCUMULATION}


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
@as_json
def command() -> None:
    """Recompute the papers' figures: the printed value and the true one for its parameters.

    Example:
      confide paper-table
    """
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


def paper_table() -> list[PaperRow]:
    """Return every row, starting with the vocabulary. Takes seconds."""
    return [
        *_vocabulary(paper_parameters()),
        *_arithmetic(),
        *_training(),
        *_other_papers(),
    ]


def _vocabulary(paper: PaperHistogram) -> Iterator[PaperRow]:
    given: dict[str, float | str] = {"N": paper.words_per_unit, "σ": paper.sigma}
    at_delta = given | {"δ": paper.claimed_delta}
    yield PaperRow(
        "epsilon_v_formula",
        "ε_V by Corollary 1",
        at_delta,
        paper.epsilon,
        "The formula's value; it holds at the true δ below, not at 1e-9.",
        printed=0.517,
        source="final",
    )
    yield PaperRow(
        "threshold_formula",
        "threshold C = 1 + σ·erf⁻¹(1 − δ/N)",
        at_delta,
        paper.threshold,
        "The formula's value; erf⁻¹ is not the normal quantile, so C is too small.",
        printed=982.5,
        source="final",
        more={"lone_word_passes": paper.lone_word},
    )
    yield PaperRow(
        "delta_v",
        "δ at that ε_V and C",
        given | {"C": paper.threshold, "ε": paper.epsilon},
        paper.true_delta,
        "The procedure is (ε_V, this)-DP; no larger ε repairs it.",
        printed=paper.claimed_delta,
        source="final",
    )
    yield PaperRow(
        "threshold_right",
        "threshold C = 1 + σ·Φ⁻¹(1 − δ/N)",
        at_delta,
        paper.right_threshold,
        "With this C the paper's proof gives its δ.",
        more={"delta": paper.right_delta},
    )
    best = calibrate(paper.epsilon, paper.claimed_delta, paper.words_per_unit)
    yield PaperRow(
        "threshold_exact",
        "smallest threshold for the same ε_V and δ",
        {"N": best.items_per_unit, "ε": best.epsilon, "δ": best.delta, "σ": best.sigma},
        best.threshold,
        "Exact calibration for discrete noise: more words, same privacy.",
    )


def _arithmetic() -> Iterator[PaperRow]:
    yield PaperRow(
        "batch_product",
        "total batch P · 32 · T",
        {"P": _SHARDS, "per shard": _PER_SHARD, "T": _ACCUMULATION},
        printed=128_000,
        source="both",
        true=_SHARDS * _PER_SHARD * _ACCUMULATION,
        verdict="Twice the printed value.",
    )
    yield PaperRow(
        "updates",
        "updates in 1M steps, T micro-batches each",
        {"steps": _STEPS, "T": _ACCUMULATION},
        source="both",
        true=_STEPS / _ACCUMULATION,
        verdict="ε_T is near the printed value only if “1M training steps” counts micro-batches.",
    )
    yield PaperRow(
        "words_per_example",
        "words per training example",
        {"words": _WORDS, "examples": _EXAMPLES},
        printed=_TUPLE,
        source="final",
        true=_WORDS / _EXAMPLES,
        verdict="The examples of ε_T are not the 256-word tuples of ε_V: two different units, so "
        "the printed sum ε_V + ε_T = 1.1 guarantees nothing.",
    )


def _training() -> Iterator[PaperRow]:
    updates = _STEPS // _ACCUMULATION
    noises = (
        ("accumulated", 1, "σ applies to a whole update"),
        ("per_shard", _SHARDS, "each shard adds σ: σ√P per update"),
        ("per_shard_and_micro", _SHARDS * _ACCUMULATION, "each micro-batch adds σ: σ√(P·T)"),
    )
    for (batch_name, batch), steps, (noise_name, draws, meaning) in itertools.product(
        _BATCHES.items(), (updates, _STEPS), noises
    ):
        name = f"epsilon_t_{batch}_{steps}_{noise_name}"
        figure = f"ε_T, batch {batch_name}, {steps:,} updates, {meaning}"
        printed = 0.6 if draws == 1 else None
        sigma = _SIGMA * math.sqrt(draws)
        yield _epsilon_row(name, figure, printed, "final", batch=batch, sigma=sigma, steps=steps)
    yield _epsilon_row(
        "epsilon_t_workshop", f"ε_T in the workshop version, {updates:,} updates",
        0.58, "workshop",
    )  # fmt: skip
    yield _epsilon_row(
        "epsilon_t_256_words", "ε_T if an example is a 256-word tuple, as for the vocabulary",
        None, "neither", examples=_WORDS // _TUPLE,
    )  # fmt: skip
    yield _epsilon_row(
        "epsilon_t_rows", "ε_T if an example is a row of 128 word pieces, written ten times",
        None, "neither", examples=_ROWS,
    )  # fmt: skip


def _other_papers() -> Iterator[PaperRow]:
    for row in tomllib.loads(_PRINTED.read_text(encoding="utf-8"))["training"]:
        event = PoissonGaussian.single(row["sampling_rate"], row["sigma"], row["updates"])
        yield PaperRow(
            row["name"],
            row["figure"],
            {name: row[name] for name in ("sampling_rate", "sigma", "updates", "delta")},
            epsilon_pld(event, row["delta"]),
            row["verdict"],
            row["printed"],
            "final",
            _by_renyi(event, row["delta"]),
            row["paper"],
        )


def _by_renyi(event: PoissonGaussian, delta: float) -> dict[str, float]:
    """Return ε by Rényi accounting, with the conversion of 2020 and with the older one."""
    renyi = epsilon_rdp(event, delta)
    assert renyi is not None  # noqa: S101 - the Rényi curve of Poisson samples is known
    return {"epsilon_rdp": renyi, "epsilon_old_conversion": epsilon_paper_conversion(event, delta)}


def _epsilon_row(
    name: str,
    figure: str,
    printed: float | None,
    source: Source,
    *,
    examples: int = _EXAMPLES,
    batch: int = 131_072,
    sigma: float = _SIGMA,
    steps: int = _STEPS // _ACCUMULATION,
) -> PaperRow:
    event = PoissonGaussian.single(batch / examples, sigma, steps)
    true, more = epsilon_pld(event, _DELTA), _by_renyi(event, _DELTA)
    return PaperRow(
        name,
        figure,
        {"n": examples, "B": batch, "σ": sigma, "updates": steps, "δ": _DELTA},
        true,
        _verdict(printed, true, *more.values()),
        printed,
        source,
        more,
    )


def _verdict(printed: float | None, true: float, renyi: float, old: float) -> str:
    if printed is None:
        return "Not printed; the value of these parameters if batches are Poisson samples."
    if true > printed:
        return "More than the printed value, which does not hold for these parameters."
    decimals = len(repr(printed).partition(".")[2])
    if round(renyi, decimals) == printed:
        return (
            f"Within rounding of the value of Rényi accounting, {renyi:.3f}, "
            "if batches are Poisson samples."
        )
    if renyi < printed < old:
        return (
            f"Holds if batches are Poisson samples: between the value of Rényi accounting, "
            f"{renyi:.3f}, and the older conversion's {old:.3f}; it is neither, rounded."
        )
    return "Holds with a margin if batches are Poisson samples."
