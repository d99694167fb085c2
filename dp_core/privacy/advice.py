"""Advice on the plan of a private training, by the ratio of its noise to its signal.

With DP a training is limited by its noise, not by its compute: McKenna et al. 2025 (VaultGemma's
scaling laws, arXiv:2501.18914) find that the loss depends only on the model, the number of updates
and the *noise-batch ratio* σ/B. A plan is chosen here by one figure made of the last two: the
deviation of the mean of all noised updates, raised where the updates are few. Everything is a
function of declared numbers: no private data is read, and the ledger is not charged.

If phrases are released first, they bring most of the gain, and the noise of their counts is the
figure. Theory does not give the gain at a figure. `GainCurve` holds measurements on made-up notes:
expectations, not guarantees.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from scipy.optimize import brentq, curve_fit
from scipy.special import expit
from scipy.stats import t as student

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.execution_plan import MOST_NOISE, BatchPhase, ExecutionPlan
from dp_core.privacy.mechanisms import MechanismEvent, PhraseRounds

MEASURED = Path(__file__).with_name("gain_curve.json")  # written by benchmarks/utility
CONFIDENCE = 0.95
# T₀, updates that learn half without noise. The trainings of the curve by gradients lie closer
# to one curve with 200 than with 60 (deviation 0.07 of the gain, not 0.09), hardly so beyond.
# Phrases have taught most of it: at one ε, 36 updates of 1,024 patients then bring more than 141 of
# 256 (docs/phrases.md).
HALF_LEARNED = {"gradients": 200, "phrases": 5}
# v: the total variance of clipped single-row gradients over the squared norm of their mean.
# On made-up notes at the public model, norms of 1, 4 and 8 rows: 0.31, 0.55 and 0.66
# (docs/measurements.md).
ROW_VARIANCE = 9.4
MOST_ROWS = 32  # of a unit, that advice lets an update read; and of masks of each
LEAST_WORTH = 0.05  # of the gain: a smaller share is lost among the seeds
ENGLISH_WORDS = 30_000  # distinct words of a language that are worth a place: BERT's table
_ROUGH = 1e-3  # of ln σ: enough to compare plans
LEAST_POINTS = 4  # a curve of two numbers, and its interval, need more than two

# By DP-SGD alone, or by text written from released phrases and then DP-SGD.
Recipe = Literal["gradients", "phrases"]


def noise_to_signal(plan: ExecutionPlan, recipe: Recipe = "gradients") -> float:
    """Return the ratio of noise to signal of a whole training, for each coordinate.

    Let σ_t/B_t be the noise-batch ratio of update t, in clip norms. The mean of T updates has
    noise of deviation √(Σ (σ_t/B_t)²)/T, less where it is correlated and cancels. Its signal is
    one mean gradient, of which T updates learn the share T/(T + T₀), because few updates do not
    finish a training even without noise. The figure is their ratio, so smaller is better. At one ε
    it hardly depends on the batch where σ is large (then σ² ∝ B at equal passes), falls with larger
    batches where σ is near 1, and rises again where too few updates are left, so there is a best
    batch between. The signal of a unit grows with its rows and their maskings (`signal_norm`).

    Args:
        plan: of the training; its accounting has no part in this.
        recipe: determines T₀, the updates that learn half of the signal without noise.
    """
    sigma, updates = plan.gradient_noise_multiplier(), plan.steps
    total = math.fsum(phase.steps * (sigma / phase.expected_batch) ** 2 for phase in plan.schedule)
    left = plan.strategy.sum_deviation(updates) / math.sqrt(updates)
    noise = math.sqrt(total) * left / updates
    signal = signal_norm(plan.examples_per_step * plan.maskings_per_example)
    return noise / signal * (1 + HALF_LEARNED[recipe] / updates)


def signal_norm(rows: int) -> float:
    """Return the norm of the mean clipped gradient, in clip norms, if all units have one signal.

    A unit's gradient is the mean over k rows (maskings count as rows): the mean of all, and a
    deviation of variance v/k, in squared norms of that mean. Clipped to norm 1 it keeps
    1/√(1 + v/k) of the mean's direction, and the deviations of many units cancel.

    Args:
        rows: k, rows of a unit that an update reads.
    """
    return 1 / math.sqrt(1 + ROW_VARIANCE / rows)


def phrase_noise(event: PhraseRounds) -> float:
    """Return the deviation of the noise of one round, in norms of a unit.

    Divided by the declared units it is the figure of released phrases: the share of all units that
    must hold a phrase is proportional to it.
    """
    return 1 / float(min(part.mu for part in event.rounds))  # type: ignore[attr-defined]


def rough_noise(event_of: Callable[[float], MechanismEvent], epsilon: float, delta: float) -> float:
    """Return σ at which an event has ε, to a part in a thousand: to compare plans, not to charge.

    `accounting.calibration.noise_for` gives the σ that is charged.

    Args:
        event_of: the event at a noise multiplier.
        epsilon: by PLD, at `delta`.

    Raises:
        BadInput: no σ up to a million reaches it.
    """

    @functools.cache
    def above(log_sigma: float) -> float:
        return math.log(max(epsilon_pld(event_of(math.exp(log_sigma)), delta), 1e-12) / epsilon)

    low, high = 0.0, 0.0
    while above(high) > 0:
        low, high = high, high + 1.0
        if high > math.log(MOST_NOISE):
            raise BadInput(
                f"no noise reaches ε={epsilon:g} at δ={delta:g}",
                where="epsilon",
                fix="Raise ε or δ.",
            )
    while low >= high or above(low) <= 0:
        if low < math.log(0.05):  # ε in the hundreds: any noise does
            return math.exp(low)
        low, high = min(low, high) - 0.5, min(low, high) if low < high else high
    return math.exp(brentq(above, low, high, xtol=_ROUGH))


@dataclass(frozen=True)
class Case:
    """The noise-to-signal figure of a plan, as it is or with other units or another ε.

    Attributes:
        name: in words.
        declared_units: n.
        epsilon: of the training alone, at its δ; where phrases are released, of these.
        noise_multiplier: σ that reaches ε, of the training or of the phrases.
        figure: `noise_to_signal`, or `phrase_noise` for each unit.
        recipe: the measured trainings that it is compared with.
    """

    name: str
    declared_units: int
    epsilon: float
    noise_multiplier: float
    figure: float
    recipe: Recipe = "gradients"

    @property
    def expected(self) -> dict[str, Expected]:
        """The expected gain, by quantity."""
        return expected_gain(self.recipe, self.figure)


_CASES = (  # name, factor of the units, factor of ε
    ("as planned", 1.0, 1.0),
    ("half the units", 0.5, 1.0),
    ("twice the units", 2.0, 1.0),
    ("half the ε of", 1.0, 0.5),
    ("twice the ε of", 1.0, 2.0),
)


def cases(release: str, case_of: Callable[[str, float, float], Case]) -> Iterator[Case]:
    """Yield a plan as it is, with half and twice the units, and with half and twice the ε.

    A case without a valid plan is left out, for example if δ is not below 1/units.

    Args:
        release: the release whose ε changes, in a word.
        case_of: the case of a name, a factor of the units and a factor of ε.
    """
    for name, units, price in _CASES:
        with contextlib.suppress(ConfideError):
            yield case_of(name if price == 1 else f"{name} {release}", units, price)


def outlook(plan: ExecutionPlan) -> Iterator[Case]:
    """Yield the `cases` of a training; batch and passes over the units stay where possible.

    Args:
        plan: of the training; ε covers the training alone, without other releases.
    """
    epsilon = epsilon_pld(plan.event(), plan.delta)

    def case_of(name: str, units: float, price: float) -> Case:
        changed = (units, price) != (1, 1)
        other = _noised(_with_units(plan, units), price * epsilon) if changed else plan
        sigma, figure = other.noise_multiplier, noise_to_signal(other)
        return Case(name, other.declared_units, price * epsilon, sigma, figure)

    return cases("training", case_of)


def _with_units(plan: ExecutionPlan, factor: float) -> ExecutionPlan:
    """Return the plan for more or fewer units, with as many passes over them."""
    units = max(1, round(factor * plan.declared_units))
    phases = tuple(
        BatchPhase(max(1, math.ceil(factor * phase.steps * phase.expected_batch / batch)), batch)
        for phase in plan.schedule
        for batch in [min(phase.expected_batch, units)]
    )
    return replace(plan, declared_units=units, schedule=phases)


def _noised(plan: ExecutionPlan, epsilon: float) -> ExecutionPlan:
    """Return the plan with the noise of another ε; a learned clip norm takes the same share."""
    share = plan.gradient_noise_multiplier() / plan.noise_multiplier
    plain = replace(plan, adaptive=None)
    sigma = rough_noise(lambda s: replace(plain, noise_multiplier=s).event(), epsilon, plan.delta)
    return replace(plain, noise_multiplier=sigma * share)


def noise_by_limit(plan: ExecutionPlan, mu: float) -> float:
    """Return σ at which a training of Poisson-sampled batches is about μ-Gaussian DP.

    By the central limit theorem of composition (Bu, Dong, Long and Su 2020, arXiv:1911.11607):
    μ² = (e^(1/σ²) − 1)·Σ q². It is meant for sorting plans, since it underestimates ε.

    Args:
        plan: of the training; its σ has no part in this.
        mu: μ.
    """
    rates = math.fsum(
        phase.steps * (phase.expected_batch / plan.declared_units) ** 2 for phase in plan.schedule
    )
    return 1 / math.sqrt(math.log1p(mu**2 / rates))


def batches_to_try(declared_units: int, draws: float) -> tuple[int, ...]:
    """Return the expected batches that are compared: powers of two, and all units at once.

    Args:
        declared_units: the most that a batch can expect.
        draws: units that the whole training may draw: no batch is larger than all of it.
    """
    most = int(min(declared_units, draws))
    powers = [2**i for i in range(3, 25) if 2**i <= most]
    return tuple(dict.fromkeys([*powers, max(1, most)]))


def rows_to_try(most_rows: int) -> tuple[tuple[int, int], ...]:
    """Return the (rows, maskings of each) to try for a unit and update, in powers of two.

    Rows grow first, because a row is worth at least as much as a masking. Then the maskings of all
    rows grow. Beyond `MOST_ROWS` of each the signal hardly grows.

    Args:
        most_rows: rows that are kept of a unit.
    """
    rows = [2**i for i in range(MOST_ROWS.bit_length()) if 2**i <= most_rows]
    return (*((k, 1) for k in rows), *((rows[-1], k) for k in rows[1:]))


def zipf_coverage(threshold: float, declared_units: int, words_per_unit: int) -> float:
    """Return the share of running words that a released vocabulary has, if words follow Zipf's law.

    The word of rank r is in min(1, k/r) of the units, k such that a unit counts N distinct words
    of the V of a language. It is released if this share is at least the threshold's share of the
    units, and the words up to rank r make ln r/ln V of running text. No corpus is read: this is a
    rule of thumb (Zipf 1949) for comparing splits of a budget.

    Args:
        threshold: C of the histogram, in units.
        declared_units: n.
        words_per_unit: N.
    """
    words = min(words_per_unit, ENGLISH_WORDS)

    def distinct(log_k: float) -> float:
        k = math.exp(log_k)
        return k * (1 + math.log(ENGLISH_WORDS / k)) - words

    k = math.exp(brentq(distinct, -20.0, math.log(ENGLISH_WORDS)))
    if threshold >= declared_units:
        return 0.0
    rank = k * declared_units / threshold
    return min(1.0, max(0.0, math.log(max(rank, 1.0)) / math.log(ENGLISH_WORDS)))


# --- measured gain at a figure


@dataclass(frozen=True)
class Expected:
    """Predicted share of the non-private gain at a figure, with its interval.

    Attributes:
        share: of the non-private gain that is kept: 0 is public text only, 1 no privacy.
        low, high: within which one more training of this kind falls in 95% of cases.
        measured: whether the figure lies within those that were measured.
    """

    share: float
    low: float
    high: float
    measured: bool

    @property
    def beats_public_only(self) -> bool:
        """Whether the whole interval lies above public text only."""
        return self.low > 0

    @property
    def is_hopeless(self) -> bool:
        """Whether the kept share is too small to be noticed among the seeds."""
        return self.share < LEAST_WORTH

    def __str__(self) -> str:
        """Return the share with its interval; values below 0 are shown as 0."""
        shares = (self.share, self.low, self.high)
        share, low, high = (f"{min(max(value, 0.0), 1.0):.0%}" for value in shares)
        return f"{share} ({low} … {high})" + ("" if self.measured else " *")


def _logistic(log_figure: NDArray[np.float64], middle: float, slope: float) -> NDArray[np.float64]:
    return np.asarray(expit(slope * (middle - log_figure)))


@dataclass(frozen=True)
class GainCurve:
    """Share of the non-private gain that is kept, as a function of a case's figure.

    share = 1/(1 + (figure/f₀)^k), by least squares: 1 without noise, 0 in nothing but noise.

    Attributes:
        recipe: of all the trainings.
        quantity: of which it is the share, in words.
        figures, shares: the measured trainings, one each.
        source: where they were measured, in words.

    Raises:
        BadInput: fewer than four points, or figures that are all the same.
    """

    recipe: Recipe
    quantity: str
    figures: tuple[float, ...]
    shares: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.figures) != len(self.shares) or len(set(self.figures)) < LEAST_POINTS:
            raise BadInput(
                f"{len(set(self.figures))} different figures are too few for a curve",
                where=self.quantity,
                fix=f"Measure {LEAST_POINTS} or more.",
            )

    @functools.cached_property
    def _fit(self) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        """Return (middle, slope), their covariance, and the variance of one training."""
        x, y = np.log(self.figures), np.array(self.shares)
        lowest, highest = (x.min() - 20, 1e-3), (x.max() + 20, 20.0)
        start = (float(np.median(x)), 1.0)
        values, covariance = curve_fit(_logistic, x, y, p0=start, bounds=(lowest, highest))
        variance = float(np.sum((y - _logistic(x, *values)) ** 2) / (len(x) - 2))
        return values, covariance, variance

    def expected(self, figure: float) -> Expected:
        """Return the share that one more training with this figure is expected to keep.

        The prediction interval (Student's t, by the delta method) covers the spread of single
        trainings and the uncertainty of the curve fitted to few points.

        Args:
            figure: of a `Case`.
        """
        (middle, slope), covariance, variance = self._fit
        x = math.log(figure)
        share = float(_logistic(np.array(x), middle, slope))
        row = share * (1 - share) * np.array([slope, middle - x])  # derivative of the share
        spread = math.sqrt(variance + float(row @ covariance @ row))
        reach = float(student.ppf((1 + CONFIDENCE) / 2, len(self.figures) - 2)) * spread
        within = min(self.figures) <= figure <= max(self.figures)
        return Expected(share, share - reach, share + reach, within)


CURVES = TypeAdapter(tuple[GainCurve, ...])  # reads and writes curves as JSON


@functools.lru_cache(maxsize=2)
def measured_curves(recipe: Recipe) -> tuple[GainCurve, ...]:
    """Return the measured curves of a recipe from `gain_curve.json`; advice uses the first."""
    curves = CURVES.validate_json(MEASURED.read_bytes())
    return tuple(curve for curve in curves if curve.recipe == recipe)


def expected_gain(recipe: Recipe, figure: float) -> dict[str, Expected]:
    """Return, by quantity, the gain that was measured at this figure."""
    return {curve.quantity: curve.expected(figure) for curve in measured_curves(recipe)}
