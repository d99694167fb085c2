"""Training advice: the settings that use a privacy budget best.

Everything is computed from settings: no private data is read, and nothing is charged. The noise is
calibrated by the accounting that charges it, so all releases of an advised run together cost at
most the budget.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from scipy.optimize import brentq

from dp_core.config.fields import one_line
from dp_core.config.privacy import MOST_CLAIM, refuse_large_delta
from dp_core.errors import BadInput, BudgetExceeded, ConfideError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_delta
from dp_core.privacy.advice import (
    Case,
    Expected,
    Recipe,
    batches_to_try,
    cases,
    expected_gain,
    measured_curves,
    noise_by_limit,
    noise_to_signal,
    outlook,
    phrase_noise,
    rough_noise,
    rows_to_try,
    zipf_coverage,
)
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.ledger import AdmissionDecision, Entry
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    NoisedWeights,
    PhraseRounds,
    PoissonGaussian,
    ThresholdedHistogram,
    compose,
)
from dp_core.privacy.statement import total_epsilon
from tasks.protocol.defaults import PHRASES_SHARE, rounded_down, share_of, words_share
from tasks.protocol.job import budget_of_run
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import Charged, PretrainSpec
from tasks.releases.charge import calibrated_noise, planned_release, training_plan

# Rows read by the whole training, as a multiple of the rows that the settings read.
MORE_COMPUTING = {4.0: "four times the computing", 16.0: "sixteen times the computing"}
REAL_MODEL = Path(__file__).with_name("real_model.txt")  # written by benchmarks/real_model
MADE_UP_START = (
    "The public text is made up, so the model will know little of real language. Before the run, "
    "name real public text: confide ledger declare-public FOLDER, then --set public_format=text "
    "--set public_path=FOLDER."
)
_LIKELY = 8  # number of the best plans by the limit whose exact σ is computed
# Search for the largest ε that the filter of a registered budget admits.
_TRIALS = 4
_CHARGE_GROWS = 1.5  # first guess of the power of ε by which the filter's charge grows
_SHORT_OF_ALL, _CLOSE = 0.99, 0.95  # ε of a trial, of the estimate; the share that is enough


@dataclass(frozen=True)
class PrivacyBudget:
    """The largest (ε, δ) of all releases of a run from the private data set.

    Attributes:
        epsilon: ε of all releases, composed by PLD at `delta`.
        delta: sum of the releases' δ.
    """

    epsilon: float
    delta: float

    def check(self, declared_units: int) -> None:
        """Refuse a budget that is meaningless or unreachable by any noise.

        Raises:
            BadInput: ε is not a number above 0, at most 500.
            PlanError: δ is not above 0 and below one in the units.
        """
        if not 0 < self.epsilon <= MOST_CLAIM:
            raise BadInput(
                f"{self.epsilon:g} is not above 0, at most {MOST_CLAIM:g}", where="--epsilon"
            )
        refuse_large_delta([self.delta], declared_units, "--delta")


@dataclass(frozen=True)
class RunReleases:
    """The releases of a run from the private data set.

    Attributes:
        training: the plan of DP pre-training.
        alongside: the other releases from the same data set: vocabulary, phrases, fine-tuning.
        example: what a protected example is, or empty for another unit.
    """

    training: ExecutionPlan
    alongside: tuple[Entry, ...]
    example: str = ""

    @classmethod
    def of(cls, settings: JobSettings) -> RunReleases:
        """Return the releases that follow from settings, without further trainings of the job.

        Raises:
            BadInput: as `planned_release`.
        """
        alone = settings.model_copy(update={"more_trainings": ""})
        return cls.of_charged(budget_of_run(alone).charged)

    @classmethod
    def of_charged(cls, charged: Iterable[Charged]) -> RunReleases:
        """Return the releases of the charged steps from the data set of the private training."""
        charged = list(charged)
        (training,) = (spec for spec in charged if isinstance(spec, PretrainSpec))
        dataset = planned_release(training).dataset
        others = [planned_release(spec) for spec in charged if spec is not training]
        of_dataset = (release for release in others if release.dataset == dataset)
        return cls(training_plan(training), tuple(of_dataset), training.private_plan.example)

    @property
    def events_alongside(self) -> list[MechanismEvent]:
        """The mechanisms of the other releases."""
        return [release.event for release in self.alongside]

    @property
    def delta(self) -> float:
        """Sum of the δ of all releases."""
        return math.fsum([self.training.delta, *(release.delta for release in self.alongside)])

    @property
    def epsilon(self) -> float:
        """ε of all releases at `delta` by PLD, with the ledger's arithmetic.

        Raises:
            BadInput: the releases do not compose, because they protect different units.
        """
        events = [*self.events_alongside, self.event_of(self.training)]
        total = total_epsilon(events, self.delta)
        if total is None:
            raise BadInput(
                "the releases protect different units, and their ε do not add up",
                where="settings",
                fix="Give private labels a separate data set (entities_dataset).",
            )
        return total

    @property
    def noise_to_signal(self) -> float:
        """Noise-to-signal ratio of the whole training: see `dp_core.privacy.advice`."""
        return noise_to_signal(self.training, self.recipe)

    @property
    def phrases(self) -> PhraseRounds | None:
        """The release of phrases, or None if there is none."""
        return next((e for e in self.events_alongside if isinstance(e, PhraseRounds)), None)

    @property
    def recipe(self) -> Recipe:
        """The measured trainings that the run is compared with."""
        return "phrases" if self.phrases else "gradients"

    @property
    def figure(self) -> float:
        """The noise figure that predicts the gain: of phrases if released, else of the training."""
        if self.phrases is None:
            return self.noise_to_signal
        return phrase_noise(self.phrases) / self.training.declared_units

    def expected(self) -> dict[str, Expected]:
        """Return, by quantity, the gain that was measured at this figure."""
        return expected_gain(self.recipe, self.figure)

    def training_event(self, noise_multiplier: float) -> MechanismEvent:
        """Return the training's event at another noise multiplier."""
        plan = replace(self.training, noise_multiplier=noise_multiplier, adaptive=None)
        return self.event_of(plan)

    def event_of(self, training: ExecutionPlan) -> MechanismEvent:
        """Return the event of a training that protects the same unit as the run."""
        return training.event().stating(training.unit, self.example)


def changed(settings: JobSettings, **changes: Any) -> JobSettings:
    """Return a copy of the settings with changes.

    Raises:
        BadInput: the changed settings are inconsistent.
    """
    try:
        return JobSettings.model_validate(settings.model_dump() | changes)
    except ValidationError as error:
        raise BadInput(one_line(error), where="settings") from None


def calibrated(settings: JobSettings, budget: PrivacyBudget) -> JobSettings:
    """Return the settings with the least training noise at which all releases keep the budget.

    δ is divided among the releases as the settings divide it. The ε of the other releases stays.

    Raises:
        BadInput: the other releases exhaust the budget, or a noise above 1000 would be needed.
        PlanError: δ is not below one in the units.
    """
    budget.check(settings.declared_units)
    settings = _sharing_delta(settings, budget.delta)
    charged = budget_of_run(settings.model_copy(update={"more_trainings": ""})).charged
    (training,) = (spec for spec in charged if isinstance(spec, PretrainSpec))
    others = RunReleases.of_charged(charged).alongside
    return changed(settings, noise_multiplier=calibrated_noise(training, budget.epsilon, others))


def _of_one_band(settings: JobSettings) -> JobSettings:
    """Return the settings without correlated noise, if the plan would choose its bands."""
    return settings if settings.noise_bands else changed(settings, noise_bands=1)


def _sharing_delta(settings: JobSettings, delta: float) -> JobSettings:
    """Return the settings with every δ scaled, so that their sum is at most the budget's δ."""
    factor = delta / RunReleases.of(settings).delta
    if math.isclose(factor, 1.0, rel_tol=1e-9):
        return settings
    charged = {
        "delta": True,
        "vocabulary_delta": settings.releases_private_words,
        "phrases_delta": bool(settings.phrases_epsilon),
        "finetune_delta": settings.tunes_the_private_data_set,
    }
    exact = {n: getattr(settings, n) * factor for n, is_charged in charged.items() if is_charged}
    return changed(settings, **{name: rounded_down(delta) for name, delta in exact.items()})


# --- which batch, and how much of ε for the vocabulary


VOCABULARY_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # of ε, that are compared


@dataclass(frozen=True)
class Advice:
    """The settings that use a budget best, and the expected gain.

    Attributes:
        settings: the advised settings; the rest is taken from `given`.
        budget: the budget that they keep.
        given: the caller's settings.
        decision: the ledger's decision on a run with the advised settings; None if no budget is
            registered.
    """

    settings: JobSettings
    budget: PrivacyBudget
    given: JobSettings
    decision: AdmissionDecision | None = None

    @functools.cached_property
    def spending(self) -> RunReleases:
        """The releases of a run with the advised settings."""
        return RunReleases.of(self.settings)

    @functools.cached_property
    def outlook(self) -> tuple[Case, ...]:
        """The expected gain of the advised plan, for other units and ε, and with more computing."""
        return (*outlook_of(self.settings), *_with_more_computing(self.settings))

    @property
    def changes(self) -> dict[str, Any]:
        """The advised settings that differ from the caller's."""
        before, after = self.given.model_dump(mode="json"), self.settings.model_dump(mode="json")
        return {name: after[name] for name in after if after[name] != before[name]}

    @functools.cached_property
    def phrases_instead(self) -> str:
        """A hint at the gain of released phrases; empty if the settings already release them."""
        if self.spending.phrases is not None:
            return ""
        share = share_of(self.budget.epsilon, PHRASES_SHARE)
        try:
            expected = RunReleases.of(changed(self.settings, phrases_epsilon=share)).expected()
        except ConfideError:
            return ""
        first = next(iter(expected.values()))
        return (
            f"With released phrases, on made-up notes, such a budget kept {first} of the "
            f"gain: add --set phrases_epsilon={share:g}."
        )

    @property
    def public_start(self) -> tuple[str, ...]:
        """Measurements with a real public model, or a warning if real notes follow made-up text."""
        settings = self.settings
        if settings.public_model:
            notes, labels = REAL_MODEL.read_text("utf-8").splitlines()
            return (notes, labels) if settings.finetune_privacy == "dp" else (notes,)
        real_notes = settings.private_format != "synthetic"
        return (MADE_UP_START,) if real_notes and settings.public_format == "synthetic" else ()

    @property
    def verdict(self) -> str:
        """Whether the budget is worth spending, in one plain sentence."""
        return verdict(self.outlook[0].expected)


def outlook_of(settings: JobSettings) -> Iterator[Case]:
    """Return the expected gain of a run, also for other numbers of units and ε."""
    spending = RunReleases.of(settings)
    if spending.phrases is None:
        return outlook(spending.training)
    return cases("phrases", functools.partial(_phrase_case, settings))


def _with_more_computing(settings: JobSettings) -> Iterator[Case]:
    """Yield the best plans with the same ε that read more rows; none if phrases are released."""
    spending = RunReleases.of(settings)
    if spending.phrases is not None:
        return
    training = spending.training
    epsilon = epsilon_pld(training.event(), training.delta)
    for factor, name in MORE_COMPUTING.items():
        best = RunReleases.of(_with_best_batch(_of_one_band(settings), epsilon, factor))
        plan = best.training
        yield Case(name, plan.declared_units, epsilon, plan.noise_multiplier, best.figure)


def _phrase_case(settings: JobSettings, name: str, factor: float, price: float) -> Case:
    """Return the plan of released phrases with other units and another ε."""
    epsilon = price * settings.phrases_epsilon
    event = RunReleases.of(changed(settings, phrases_epsilon=epsilon)).phrases
    noise = phrase_noise(event) if event else math.inf
    units = max(1, round(factor * settings.declared_units))
    return Case(name, units, epsilon, noise, noise / units, "phrases")


def verdict(expected: Mapping[str, Expected]) -> str:
    """Return one sentence on whether a training is expected to beat public text alone."""
    first = next(iter(expected.values()))
    if all(outcome.is_hopeless for outcome in expected.values()):
        return (
            "This budget cannot be expected to beat training on public text only: train on public "
            "text alone, which costs nothing, or find more units or a larger ε."
        )
    if not all(outcome.beats_public_only for outcome in expected.values()):
        return (
            f"This budget may beat training on public text only, by {first.share:.0%} of the gain, "
            "but the measured trainings are too few, or spread too much, to be sure of it."
        )
    return (
        f"This budget should beat training on public text only, by {first.share:.0%} of the gain."
    )


def how_it_is_known(recipe: Recipe) -> str:
    """Return a note on the measurements behind the expected gain."""
    first = measured_curves(recipe)[0]
    way = {
        "gradients": "by DP-SGD alone: what released phrases add is not counted",
        "phrases": "by text written from released phrases, then DP-SGD",
    }[recipe]
    return (
        f"Expectations come from {len(first.figures)} trainings on made-up notes ({first.source}), "
        f"of a small model, {way}. They are not a promise: real notes share less with each other. "
        "* is beyond the measured range."
    )


def advised(settings: JobSettings, budget: PrivacyBudget) -> Advice:
    """Return the batch size, noise and vocabulary's ε that use a budget best.

    The number of drawn units (the epochs of the settings) stays, as it determines the compute. All
    batch sizes of `batches_to_try` are compared by `noise_to_signal`. Shares of ε for the
    vocabulary are compared by the expected gain times the share of running words that the
    vocabulary covers by Zipf's law. If phrases are released, words and phrases get the measured
    shares (`PHRASES_SHARE`). Private labels keep their ε.

    Raises:
        BadInput: no plan keeps the budget.
        PlanError: δ is not below one in the units.
    """
    budget.check(settings.declared_units)
    start = _of_one_band(_sharing_delta(settings, budget.delta))
    left_by_split = ((split, _left_for_training(split, budget)) for split in _splits(start, budget))
    compared = [(split, left) for split, left in left_by_split if left is not None]
    if not compared:
        raise BadInput(
            f"ε={budget.epsilon:g} is too small: the releases other than the training exhaust it",
            where="--epsilon",
            fix="Choose a larger ε, or train on public text alone.",
        )
    split, left = max(compared, key=lambda one: _worth(*one))
    best = changed(_with_best_batch(split, left), noise_bands=settings.noise_bands)
    return Advice(calibrated(best, budget), budget, settings)


def advised_within(
    settings: JobSettings, budget: PrivacyBudget, decide: Callable[[JobSettings], AdmissionDecision]
) -> Advice:
    """Return the advice for the largest ε, up to the budget's, that the ledger admits.

    Args:
        settings: as of `advised`.
        budget: the most that the plan may cost.
        decide: the ledger's decision on a run with given settings; nothing is registered.

    Raises:
        BudgetExceeded: no plan fits, or the budget is closed.
        BadInput: as `advised`.
    """
    advice = advised(settings, budget)
    decision = decide(advice.settings)
    if decision.fits:
        return replace(advice, decision=decision)
    best, epsilon, room, power = None, budget.epsilon, decision.left_after, _CHARGE_GROWS
    for _ in range(_TRIALS if room > 0 else 0):
        before, excess = epsilon, decision.share / room
        epsilon *= _SHORT_OF_ALL * excess ** (-1 / power)
        try:
            smaller = advised(settings, replace(budget, epsilon=epsilon))
        except BadInput:  # too little ε for any plan
            break
        decision = decide(smaller.settings)
        if decision.fits:
            best = replace(smaller, decision=decision)
            if decision.share > _CLOSE * room:
                break
        slope = math.log(excess * room / decision.share) / math.log(before / epsilon)
        power = min(max(slope, 1.0), 3.0)
    if best is None:
        raise BudgetExceeded(
            f"no plan with these settings fits the registered budget: {decision.refusal}",
            where=f"data set {settings.private_dataset}",
            fix="The remaining budget: confide ledger remaining.",
        )
    return best


def _splits(settings: JobSettings, budget: PrivacyBudget) -> list[JobSettings]:
    """Return the settings with every share of ε for the vocabulary, if the vocabulary is charged.

    Private labels have a separate ε, which stays as it is set.
    """
    shares: tuple[float, ...] = VOCABULARY_SHARES
    if settings.phrases_epsilon:
        phrases = share_of(budget.epsilon, PHRASES_SHARE)
        settings = changed(settings, phrases_epsilon=phrases)
        shares = (words_share(budget.epsilon, phrases),)
    if not _vocabulary(RunReleases.of(settings)):
        return [settings]
    epsilons = [share_of(budget.epsilon, share) for share in shares]
    return [changed(settings, vocabulary_epsilon=epsilon) for epsilon in dict.fromkeys(epsilons)]


def _vocabulary(spending: RunReleases) -> ThresholdedHistogram | NoisedWeights | None:
    kinds = ThresholdedHistogram | NoisedWeights
    return next((e for e in spending.events_alongside if isinstance(e, kinds)), None)


def _left_for_training(settings: JobSettings, budget: PrivacyBudget) -> float | None:
    """Return the approximate ε left for a training; None if the other releases exhaust the budget.

    It hardly depends on the batch. A Gaussian with the same noise replaces each histogram, which is
    accurate enough to compare plans but not to charge them.
    """
    spending = RunReleases.of(settings)
    beside = [_as_gaussians(event) for event in spending.events_alongside]

    def composed(sigma: float) -> MechanismEvent:
        return compose(*beside, spending.training_event(sigma))

    composed(1.0)  # an error here is a fault of the settings, not of the budget
    try:
        sigma = rough_noise(composed, budget.epsilon, spending.delta)
    except BadInput:
        return None
    return epsilon_pld(spending.training_event(sigma), spending.delta)


def _as_gaussians(event: MechanismEvent) -> MechanismEvent:
    if isinstance(event, PhraseRounds):
        return compose(*(_as_gaussians(part) for part in event.rounds))
    if not isinstance(event, ThresholdedHistogram | NoisedWeights):
        return event
    single = PoissonGaussian.single(1.0, 1 / event.mu, 1, unit=event.unit)
    return replace(single, example=event.example)


def _roughly_noised(settings: JobSettings, epsilon: float) -> JobSettings:
    spending = RunReleases.of(settings)
    sigma = rough_noise(spending.training_event, epsilon, spending.delta)
    return changed(settings, noise_multiplier=sigma)


def _with_best_batch(settings: JobSettings, epsilon: float, rows_read: float = 1.0) -> JobSettings:
    """Return the settings with the batch size and rows per unit of the least noise-to-signal ratio.

    The best candidates by `noise_by_limit` are compared at the exact σ by PLD.

    Args:
        settings: only batch size, rows, maskings and epochs may change.
        epsilon: of the training alone.
        rows_read: rows read by the training, as a multiple of the rows that the settings read.
    """
    releases = RunReleases.of(settings)
    delta = releases.training.delta
    mu = brentq(lambda mu: float(gaussian_delta(epsilon, mu)) - delta, 1e-6, 100.0)

    def by_limit(plan: ExecutionPlan) -> float:
        noised = replace(plan, noise_multiplier=noise_by_limit(plan, mu))
        return noise_to_signal(noised, releases.recipe)

    likely = heapq.nsmallest(
        _LIKELY, _with_batches(settings, rows_read), key=lambda pair: by_limit(pair[1])
    )
    tried = []
    for likely_settings, _ in likely:
        try:
            tried.append(_roughly_noised(likely_settings, epsilon))
        except ConfideError:
            continue  # σ is larger than a setting allows
    if not tried:
        return settings
    return min(tried, key=lambda noised: RunReleases.of(noised).noise_to_signal)


def _with_batches(
    settings: JobSettings, rows_read: float
) -> Iterator[tuple[JobSettings, ExecutionPlan]]:
    """Yield settings and plan for each batch size, rows and maskings at this number of rows."""
    units = settings.declared_units
    reads = settings.epochs * settings.examples_per_step * settings.maskings_per_example * rows_read
    for rows, maskings in rows_to_try(settings.max_examples_per_unit):
        epochs = reads / (rows * maskings)
        for batch in batches_to_try(units, epochs * units):
            try:
                changed_settings = changed(
                    settings,
                    batch_size=batch,
                    epochs=float(f"{epochs:.3g}"),
                    examples_per_step=rows,
                    maskings_per_example=maskings,
                )
                yield changed_settings, RunReleases.of(changed_settings).training
            except ConfideError:
                continue  # this batch size is inconsistent with other settings


def _worth(settings: JobSettings, epsilon: float) -> float:
    """Return the expected gain times the share of covered words, to compare splits of ε."""
    spending = RunReleases.of(_roughly_noised(settings, epsilon))
    vocabulary = _vocabulary(spending)
    words = 1.0
    if vocabulary is not None:
        needed = vocabulary.units_to_pass
        words = zipf_coverage(needed, settings.declared_units, settings.words_per_unit)
    kept = measured_curves("gradients")[0].expected(spending.noise_to_signal).share
    return kept * words
