import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from privacy_oracles import composed_delta, gaussian_mixture, hockey_stick
from scipy.stats import norm

from dp_core.config.release import ReleaseRecord
from dp_core.privacy import mechanisms
from dp_core.privacy.accounting.profiles import Floats, Profile, SelfComposed
from dp_core.privacy.batch_selection import PoissonSampling
from dp_core.privacy.execution_plan import BatchPhase, ExecutionPlan
from dp_core.privacy.matrix_factorization import ToeplitzStrategy, power_coefficients
from dp_core.privacy.mechanism_event import REGISTRY

Law = dict[tuple[int, ...], float]
PATIENT = mechanisms.PrivacyUnit.PATIENT
HISTOGRAM = mechanisms.ThresholdedHistogram(2, 1.6, 4, unit=PATIENT)
PHRASES = mechanisms.PhraseRounds(
    (mechanisms.ThresholdedHistogram(1, 1.6, 4, unit=PATIENT),) * 2, (2, 3), unit=PATIENT
)
WEIGHTS = mechanisms.NoisedWeights(2, (200_000,), ((0, 0, 1_900_000),), unit=PATIENT)
POISSON = mechanisms.PoissonGaussian(((0.2, 1.0, 2),), unit=PATIENT)
ZERO_OUT, REPLACE = mechanisms.NeighboringRelation.ZERO_OUT, mechanisms.NeighboringRelation.REPLACE


def plan_of(*, expected_batch: float = 256, steps: int = 300, **changes: Any) -> ExecutionPlan:
    usual: dict[str, Any] = {
        "unit": PATIENT, "declared_units": 4000, "sampling": PoissonSampling(),
        "schedule": (BatchPhase(steps, expected_batch),),
        "noise_multiplier": 1.2, "clip_norm": 0.5, "delta": 1e-6,
    }  # fmt: skip
    return ExecutionPlan(**usual | changes)


def power_strategy(bands: int, exponent: float) -> ToeplitzStrategy:
    return ToeplitzStrategy.of(power_coefficients(bands, exponent))


def release(
    ledger_id: str, event: mechanisms.MechanismEvent, delta: float = 1e-6, **fields: Any
) -> ReleaseRecord:
    usual = {"dataset": "notes", "unit": "patient", "epsilon": 1.0, "epsilon_rdp": None}
    body = usual | {"event": event.to_json(), "delta": delta, "ledger_id": ledger_id} | fields
    body.setdefault("budget", body["dataset"])
    return ReleaseRecord.model_validate(body)


@dataclass(frozen=True)
class Laplace(mechanisms.MechanismEvent):
    """A mechanism that the product lacks: Laplace noise on a sum of sensitivity 1."""

    kind = "laplace"
    title = "noised sum"
    assumed = ("each unit moved the sum by at most 1",)
    scale: float

    def __post_init__(self) -> None:
        self.require(self.scale > 0, "scale must be above 0")

    def steps(self) -> list[SelfComposed]:
        return [SelfComposed(LaplaceProfile(self.scale), 1)]

    def describe(self) -> str:
        return f"the Laplace mechanism of scale {self.scale:g}"


REGISTRY.pop(("laplace", 1))  # other tests count the kinds in the registry


@dataclass(frozen=True)
class LaplaceProfile(Profile):
    scale: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        both = -np.expm1(np.minimum(epsilon - 1 / self.scale, 0.0) / 2)
        return both, both

    def reach(self) -> float:
        return 1 / self.scale


EXAMPLES: list[mechanisms.MechanismEvent] = [
    POISSON,
    mechanisms.TruncatedPoissonGaussian(4, 1, ((0.5, 1.0, 1),)),
    mechanisms.CyclicPoissonGaussian(3, ((0.2, 1.0, 4),), unit=PATIENT),
    mechanisms.FixedSizeGaussian(4, ((2, 1.5, 1),), unit=mechanisms.PrivacyUnit.EXAMPLE),
    mechanisms.Gaussian(2.0, 3),
    mechanisms.ShuffledGaussian(1.5, 2),
    HISTOGRAM,
    PHRASES,
    WEIGHTS,
    mechanisms.Composed((POISSON, HISTOGRAM), unit=PATIENT),
    mechanisms.RandomCountSelection(
        (mechanisms.Gaussian(2.0), mechanisms.Gaussian(4.0)), "poisson", 1e-6, mean=4.0
    ),
    mechanisms.RandomCountSelection(
        (POISSON,), "truncated-negative-binomial", 1e-6, eta=1.0, gamma=0.1, unit=PATIENT
    ),
    mechanisms.Unaccounted("non-private training"),
    Laplace(0.7),
]


def either_way(p: dict[float, float], q: dict[float, float], sigma: float, epsilon: float) -> float:
    """Return the larger hockey-stick divergence of two Gaussian mixtures, over both directions."""
    one, two = gaussian_mixture(p, sigma), gaussian_mixture(q, sigma)
    return max(hockey_stick(one, two, epsilon, 16.0), hockey_stick(two, one, epsilon, 16.0))


def truncated_sum(values: list[float], rate: float, cap: int) -> dict[float, float]:
    """Return Pr[sum] for Poisson sampling truncated to a uniform subset of at most `cap` values."""
    outcome: dict[float, float] = {}
    for drawn in itertools.product((0, 1), repeat=len(values)):
        weight = math.prod(rate if d else 1 - rate for d in drawn)
        batch = [v for v, d in zip(values, drawn, strict=True) if d]
        subsets = list(itertools.combinations(batch, min(cap, len(batch))))
        for subset in subsets:
            total = sum(subset)
            outcome[total] = outcome.get(total, 0.0) + weight / len(subsets)
    return outcome


def fixed_size_sum(values: list[float], batch: int) -> dict[float, float]:
    """Return Pr[sum] for a uniform subset of `batch` values."""
    subsets = list(itertools.combinations(values, batch))
    outcome: dict[float, float] = {}
    for subset in subsets:
        outcome[sum(subset)] = outcome.get(sum(subset), 0.0) + 1 / len(subsets)
    return outcome


def truncated_truth(units: int, cap: int, rate: float, sigma: float, epsilon: float) -> float:
    """Return the worst δ over all gradients of ±1 of the other units."""
    return max(
        either_way(
            truncated_sum([*others, 1.0], rate, cap),
            truncated_sum(list(others), rate, cap),
            sigma,
            epsilon,
        )
        for others in itertools.combinations_with_replacement((-1.0, 1.0), units - 1)
    )


def fixed_size_truth(slots: int, batch: int, sigma: float, epsilon: float) -> float:
    """Return the worst δ of replacing one unit, over gradients of −1, 0 and 1 of the others."""
    return max(
        either_way(
            fixed_size_sum([*others, 1.0], batch), fixed_size_sum([*others, new], batch),
            sigma, epsilon,
        )
        for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), slots - 1)
        for new in (-1.0, 0.0)
    )  # fmt: skip


def poisson_truth(rate: float, sigma: float, steps: int, epsilon: float) -> float:
    """Return δ of binned outcomes, slightly below the true δ as binning is post-processing."""
    edges = np.linspace(-6.5, 6.5, 2000 if steps <= 2 else 160)
    without = np.diff(norm.cdf(edges, 0, sigma))
    with_unit = (1 - rate) * without + rate * np.diff(norm.cdf(edges, 1, sigma))
    return max(
        composed_delta(with_unit, without, steps, epsilon),
        composed_delta(without, with_unit, steps, epsilon),
    )


def discrete_pmf(sigma: float, reach: int) -> Floats:
    """Return the probabilities of the discrete Gaussian on −reach … reach."""
    k = np.arange(-reach, reach + 1)
    weights = np.exp(-(k**2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum())


def released(shared: list[bool], lone: int, sigma: float, threshold: int) -> Law:
    """Return the distribution of a histogram's release.

    Shared words have count 9, or 10 with the unit. `lone` words have count 1 with the unit and are
    absent without it. Absent words are never released.
    """
    reach = 14

    def word(count: int) -> dict[int, float]:
        law: dict[int, float] = {}
        for z, weight in zip(range(-reach, reach + 1), discrete_pmf(sigma, reach), strict=True):
            shown = count + z if count + z >= threshold else 0
            law[shown] = law.get(shown, 0.0) + float(weight)
        return law

    words = [word(10 if with_unit else 9) for with_unit in shared] + [word(1)] * lone
    law: Law = {}
    for outcome in itertools.product(*(w.items() for w in words)):
        key = tuple(value for value, _ in outcome)
        law[key] = law.get(key, 0.0) + math.prod(weight for _, weight in outcome)
    return law


def histogram_truth(
    words: int, sigma: float, threshold: int, epsilon: float
) -> tuple[float, float]:
    """Return the worst δ of adding and of removing, over the number of words only the unit has."""
    adding, removing, e = [], [], math.exp(epsilon)
    for lone in range(words + 1):
        with_unit = released([True] * (words - lone), lone, sigma, threshold)
        rest = released([False] * (words - lone), 0, sigma, threshold)
        without = {(*key, *([0] * lone)): w for key, w in rest.items()}
        pairs = [
            (with_unit.get(k, 0.0), without.get(k, 0.0)) for k in set(with_unit) | set(without)
        ]
        adding.append(sum(max(0.0, p - e * q) for p, q in pairs))
        removing.append(sum(max(0.0, q - e * p) for p, q in pairs))
    return max(adding), max(removing)


def rounds_truth(sigma: float, threshold: int, epsilon: float) -> float:
    """Return the worst δ of two rounds of one phrase per unit, each shared or only the unit's."""

    def laws(lone: bool) -> tuple[Law, Law]:
        if lone:
            return released([], 1, sigma, threshold), {(0,): 1.0}
        return released([True], 0, sigma, threshold), released([False], 0, sigma, threshold)

    def both(first: Law, second: Law) -> Law:
        return {(*a, *b): p * q for a, p in first.items() for b, q in second.items()}

    worst, e = 0.0, math.exp(epsilon)
    for lone in itertools.product((False, True), repeat=2):
        pairs = [laws(alone) for alone in lone]
        with_unit, without = both(pairs[0][0], pairs[1][0]), both(pairs[0][1], pairs[1][1])
        for p, q in ((with_unit, without), (without, with_unit)):
            worst = max(worst, sum(max(0.0, w - e * q.get(key, 0.0)) for key, w in p.items()))
    return worst


def gaussian_truth(mu: float, epsilon: float) -> float:
    return either_way({mu: 1.0}, {0.0: 1.0}, 1.0, epsilon)


def weights_truth(scale: int, threshold: int, epsilon: float) -> float:
    """Return the worst δ of a unit's two items, with a continuous Gaussian of the same deviation.

    The three cases: all other units have both items; they have one of them, and the other, of
    weight 1/√2, is released or not; the unit has one item, of weight 1, that no other unit has.
    """
    deviation = math.hypot(256 * 1024, 1280)
    shared = gaussian_truth(scale / deviation, epsilon)
    passes = norm.sf((threshold - scale / math.sqrt(2)) / deviation)
    half = gaussian_truth(scale / math.sqrt(2) / deviation, epsilon - math.log1p(-passes))
    return max(shared, passes + (1 - passes) * half, norm.sf((threshold - scale) / deviation))


# Each with the largest permitted ratio of the claimed δ to the true one.
TRUTHS: list[tuple[mechanisms.MechanismEvent, Callable[[float], float], float]] = [
    (POISSON, lambda e: poisson_truth(0.2, 1.0, 2, e), 1.02),
    (mechanisms.PoissonGaussian.single(0.2, 1.0, 3), lambda e: poisson_truth(0.2, 1.0, 3, e), 1.02),
    *((mechanisms.PoissonGaussian.single(rate, sigma, 1),
       lambda e, q=rate, s=sigma: either_way({0.0: 1 - q, 1.0: q}, {0.0: 1.0}, s, e), 1.001)
      for rate, sigma in ((0.01, 0.7), (0.3, 1.0), (0.9, 2.0))),
    (mechanisms.CyclicPoissonGaussian(3, ((0.2, 1.0, 4),)),
     lambda e: poisson_truth(0.2, 1.0, 2, e), 1.02),
    (mechanisms.CyclicPoissonGaussian(2, ((0.2, 1.0, 6),)),
     lambda e: poisson_truth(0.2, 1.0, 3, e), 1.02),
    (mechanisms.TruncatedPoissonGaussian(4, 1, ((0.5, 1.0, 1),)),
     lambda e: truncated_truth(4, 1, 0.5, 1.0, e), math.inf),
    *((mechanisms.FixedSizeGaussian(4, ((batch, 1.5, 1),)),
       lambda e, batch=batch: fixed_size_truth(4, batch, 1.5, e), math.inf)
      for batch in (1, 2, 4)),
    (mechanisms.Gaussian(2.0, 3), lambda e: gaussian_truth(math.sqrt(3) / 2, e), 1.01),
    (mechanisms.ShuffledGaussian(1.5, 2), lambda e: gaussian_truth(math.sqrt(2) / 1.5, e), 1.01),
    (HISTOGRAM, lambda e: max(histogram_truth(2, 1.6, 4, e)), 1.06),
    (PHRASES, lambda e: rounds_truth(1.6, 4, e), 1.6),
    (WEIGHTS, lambda e: weights_truth(200_000, 1_900_000, e), 1.02),
    (mechanisms.Composed((mechanisms.Gaussian(2.0), mechanisms.Gaussian(1.0))),
     lambda e: gaussian_truth(math.sqrt(1.25), e), 1.01),
    (Laplace(0.7), lambda e: hockey_stick(
        lambda x: np.exp(-np.abs(x - 1) / 0.7) / 1.4, lambda x: np.exp(-np.abs(x) / 0.7) / 1.4,
        e, 16.0), 1.01),
]  # fmt: skip
