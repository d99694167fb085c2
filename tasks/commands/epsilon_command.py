"""`confide epsilon`, `calibrate` and `paper-table`: ε and noise of given and printed parameters."""

import itertools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dp_core.config.privacy import refuse_large_delta
from dp_core.errors import BadInput
from dp_core.privacy import mechanisms
from dp_core.privacy.accounting.accountants import (
    epsilon_paper_conversion,
    epsilon_pld,
    epsilon_rdp,
    gaussian_epsilon,
)
from dp_core.privacy.accounting.calibration import noise_for, steps_within
from dp_core.privacy.accounting.tradeoff import group_privacy
from dp_core.privacy.mechanisms import MechanismEvent
from dp_core.vocabulary import selection_calibration as selection
from tasks.commands.command_options import options_of
from tasks.commands.output import as_json, write_answer, write_pairs, write_table

Schedule = list[tuple[float, int]]  # phases of (sampling rate, updates)


# The options of a training except its noise, which are the fields of `Training`.
training_options = options_of("training")


@dataclass(frozen=True)
class Training:
    """The options of a training: how batches are drawn, the number of updates, and δ."""

    sampling_rate: float | None
    steps: int | None
    phases: tuple[tuple[float, int], ...]
    sampling: str
    units: int | None
    cap: int | None
    delta: float

    def __post_init__(self) -> None:
        if self.units is not None:
            refuse_large_delta([self.delta], self.units, "--delta")

    @property
    def schedule(self) -> Schedule:
        """The phases of (rate, updates); a single one for --sampling-rate and --steps.

        Raises:
            BadInput: the options are incomplete or contradict each other.
        """
        rate, steps = self.sampling_rate, self.steps
        single = [] if rate is None or steps is None else [(rate, steps)]
        if bool(single) == bool(self.phases) or (rate is None) != (steps is None):
            raise BadInput(
                "Missing option: either a rate and steps, or phases",
                where="--sampling-rate, --steps, --phase",
                fix="Give --sampling-rate and --steps, or one --phase RATE STEPS for each phase.",
            )
        return list(self.phases) or single

    def event(self, schedule: Schedule, sigma: float) -> MechanismEvent:
        """Return the mechanism: phases of (rate, updates), at noise multiplier σ.

        Raises:
            BadInput: units or cap are missing or belong to another sampling, or a batch is not a
                whole number.
        """
        phases = tuple((rate, sigma, steps) for rate, steps in schedule)
        if self.cap is not None and self.sampling != "truncated-poisson":
            raise BadInput(f"{self.sampling} batches have no cap", where="--cap")
        if self.sampling == "truncated-poisson":
            units, cap = _required(self.units, "--units"), _required(self.cap, "--cap")
            return mechanisms.TruncatedPoissonGaussian(units, cap, phases)
        if self.sampling == "fixed-size":
            slots = _required(self.units, "--units")
            batches = tuple((_whole_batch(q, slots), s, n) for q, s, n in phases)
            return mechanisms.FixedSizeGaussian(slots, batches)
        if self.sampling == "shuffled":
            return mechanisms.ShuffledGaussian(sigma, _epochs(schedule))
        return mechanisms.PoissonGaussian(phases)

    def described(self, schedule: Schedule, sigma: float) -> dict[str, Any]:
        """Return the training as plain JSON data."""
        return {
            "noise_multiplier": sigma,
            "steps": sum(steps for _, steps in schedule),
            "sampling_rate": schedule[0][0] if len(schedule) == 1 else None,
            "sampling": self.sampling,
            "delta": self.delta,
            "neighbours": self.event(schedule, sigma).relation.value,
            "phases": [{"sampling_rate": rate, "steps": steps} for rate, steps in schedule],
        }


def _epochs(schedule: Schedule) -> int:
    """Return the epochs that shuffled batches begin: an epoch has ⌊1/q⌋ whole batches."""
    return sum(math.ceil(n / math.floor(1 / rate + 1e-9)) for rate, n in schedule)


def _whole_batch(rate: float, units: int) -> int:
    """Return rate · units. A batch rounded down would state an ε that is too small."""
    batch = round(rate * units)
    if batch < 1 or not math.isclose(batch, rate * units, rel_tol=1e-6):
        larger = max(1, math.ceil(rate * units))
        raise BadInput(
            f"{rate:g} of {units} units are {rate * units:g}, which is no whole batch",
            where="--sampling-rate",
            fix=f"For batches of {larger} units give {larger / units:g}.",
        )
    return batch


def _required(value: int | None, option: str) -> int:
    if value is None:
        raise BadInput("this sampling needs it", where=option)
    return value


@click.command("epsilon")
@options_of("epsilon")
@training_options
@as_json
def command(noise_multiplier: float, group: int, **given: Any) -> None:
    """Compute ε of DP-SGD: by PLD (the claim), by RDP, unamplified, and for groups of units.

    Example:
      confide epsilon --phase 0.01 10000 --noise-multiplier 4 --delta 1e-5
    """
    training = Training(**given)
    schedule, delta = training.schedule, training.delta
    event = training.event(schedule, noise_multiplier)
    claim = epsilon_pld(event, delta)
    together = group_privacy(claim, delta, group)._asdict()
    # Each unit takes part once an epoch, and the Gaussians of all epochs are one (Dong, Roth and Su
    # 2022, Corollary 3.3). A replaced unit moves a sum by twice the clip norm.
    mu = math.sqrt(_epochs(schedule)) / noise_multiplier
    answer: dict[str, Any] = {
        "epsilon_pld": claim,
        "epsilon_rdp": epsilon_rdp(event, delta),
        "epsilon_unamplified": gaussian_epsilon(delta, mu),
        "epsilon_unamplified_replace_one": gaussian_epsilon(delta, 2 * mu),
        "group": together,
        **training.described(schedule, noise_multiplier),
    }
    shown = {
        "PLD (the claim)": claim,
        "RDP": answer["epsilon_rdp"],
        "shuffled epochs, no amplification: zero-out": answer["epsilon_unamplified"],
        "shuffled epochs, no amplification: replace-one": answer["epsilon_unamplified_replace_one"],
    }
    if group > 1:
        shown[f"for {group} units together (δ = {together['delta']:.3g})"] = together["epsilon"]
    title = f"ε at δ = {delta:g}, where {event.relation.describe()}"
    write_answer(answer, lambda: write_pairs(title, shown))


# --- calibration


@click.group("calibrate")
def calibrate() -> None:
    """Compute the noise for a privacy target of a training or of a vocabulary.

    Example:
      confide calibrate training --epsilon 3 --delta 1e-5 --phase 0.01 10000
    """


@calibrate.command("training")
@options_of("calibrate training")
@training_options
@as_json
def training(epsilon: float, noise_multiplier: float | None, **given: Any) -> None:
    """Compute the smallest σ for a number of updates, or the most updates for a σ.

    Every way of drawing batches has its proven accounting.

    Example:
      confide calibrate training --epsilon 3 --delta 1e-5 --phase 0.01 10000
    """
    wanted = Training(**given)
    delta = wanted.delta
    if noise_multiplier is None:
        schedule = wanted.schedule
        noise_multiplier = noise_for(lambda s: wanted.event(schedule, s), epsilon, delta)
    elif wanted.sampling_rate is None or wanted.steps is not None or wanted.phases:
        raise BadInput(
            "a number of updates can only be computed for one rate",
            where="--noise-multiplier",
            fix="Give it only with --sampling-rate, or omit it to compute the noise.",
        )
    else:
        rate, sigma = wanted.sampling_rate, noise_multiplier
        most = steps_within(lambda n: wanted.event([(rate, n)], sigma), epsilon, delta)
        schedule = [(rate, most)]
    event = wanted.event(schedule, noise_multiplier)
    answer = {
        **wanted.described(schedule, noise_multiplier),
        "epsilon": epsilon_pld(event, delta),
        "epsilon_rdp": epsilon_rdp(event, delta),
    }
    shown = {name: value for name, value in answer.items() if name != "phases"}
    title = f"DP-SGD with ε ≤ {epsilon:g} at δ = {delta:g}, where {event.relation.describe()}"
    write_answer(answer, lambda: write_pairs(title, shown))


@calibrate.command("vocabulary")
@options_of("calibrate vocabulary")
@as_json
def vocabulary(epsilon: float, delta: float, words: int, units: int | None, mode: str) -> None:
    """Compute the σ with the smallest threshold, which releases the most words.

    Example:
      confide calibrate vocabulary --epsilon 1 --delta 1e-9 --tuple-words 256
    """
    if units is not None:
        refuse_large_delta([delta], units, "--delta")
    answer = {"mode": mode, "tuple_words": words, "epsilon": epsilon, "delta": delta}
    if mode == "paper":
        sigma = selection.paper_sigma(epsilon, delta, words)
        paper = selection.paper_parameters(sigma, delta, words)
        title = "Word histogram as the paper has it: its δ is delta_earned, not delta"
        answer |= {
            "sigma": paper.sigma,
            "threshold": paper.threshold,
            "delta_earned": paper.true_delta,
            "lone_word_passes": paper.lone_word,
            "right_threshold": paper.right_threshold,
            "delta_earned_at_right_threshold": paper.right_delta,
        }
    else:
        plan = selection.calibrate(epsilon, delta, words)
        title = "Word histogram, discrete Gaussian noise"
        earned = selection.delta_of(words, plan.sigma, plan.threshold, epsilon)
        answer |= {"sigma": plan.sigma, "threshold": plan.threshold, "delta_earned": earned}
    write_answer(answer, lambda: write_pairs(title, answer))


# --- figures of papers

_PRINTED = Path(__file__).with_name("printed_epsilons.toml")
_PARAMETERS = ("examples", "batch", "sigma", "updates", "delta")
_NOT_PRINTED: dict[str, Any] = {
    "printed": None,
    "source": "neither",
    "more": {},
    "paper": "Hoory et al. 2021",
}


@click.command("paper-table")
@options_of("paper-table")
@as_json
def papers(figure: Path | None) -> None:
    """Recompute the papers' figures: the printed value and the true one for its parameters.

    Example:
      confide paper-table
    """
    if figure is not None:
        _write_guarantee(figure)
    rows = paper_table()
    write_answer(rows, lambda: _show_papers(rows))


def _show_papers(rows: list[dict[str, Any]]) -> None:
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
        event = mechanisms.PoissonGaussian.single(given["rate"], sigma, given["updates"])
        for accountant, stroke, epsilon in accountants:
            name = f"σ = {sigma:g}, {accountant}"
            styles[name] = *style, stroke
            points += [(name, delta, epsilon(event, delta)) for delta in given["deltas"]]
    ticks = {delta: power_of_ten(delta) for delta in given["deltas"]}
    panel = Panel("", lines_of(points), "δ", ticks, log_x=True, y="zero")
    if drawing := lines_figure("guarantee", [panel], styles, **of_paper):
        drawing.write(folder)


def paper_table() -> list[dict[str, Any]]:
    """Return every row, starting with the vocabulary. Takes seconds.

    A row has the figure's `name`, its description (`figure`), the `parameters` of the computation,
    the `printed` value, the `source` that prints it, the `true` value, `more` values of the same
    parameters, a `verdict` of one sentence, and the `paper`.
    """
    printed = tomllib.loads(_PRINTED.read_text(encoding="utf-8"))
    vocabulary = _of_vocabulary(selection.paper_parameters())
    rows = [
        *(row | vocabulary[row["name"]] for row in printed["vocabulary"]),
        *map(_of_arithmetic, printed["arithmetic"]),
        *map(_of_training, printed["training"]),
    ]
    return [_NOT_PRINTED | row for row in rows]


def _of_vocabulary(paper: selection.PaperHistogram) -> dict[str, dict[str, Any]]:
    """Return the computed fields of each row of the vocabulary."""
    given = {"N": paper.words_per_unit, "σ": paper.sigma}
    at_delta = given | {"δ": paper.claimed_delta}
    best = selection.calibrate(paper.epsilon, paper.claimed_delta, paper.words_per_unit)
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


def _of_arithmetic(row: dict[str, Any]) -> dict[str, Any]:
    first, *others = row["parameters"].values()
    product = row["name"] == "batch_product"
    return row | {"true": first * math.prod(others) if product else first / others[0]}


def _of_training(row: dict[str, Any]) -> dict[str, Any]:
    parameters = {name: row.pop(name) for name in _PARAMETERS}
    rate, delta = parameters["batch"] / parameters["examples"], parameters["delta"]
    event = mechanisms.PoissonGaussian.single(rate, parameters["sigma"], parameters["updates"])
    older = {"epsilon_old_conversion": epsilon_paper_conversion(event, delta)}
    more = {"epsilon_rdp": epsilon_rdp(event, delta), **older}
    return row | {"parameters": parameters, "true": epsilon_pld(event, delta), "more": more}
