"""Private selection with a random number of runs (Papernot and Steinke 2022, arXiv:2110.03620).

`RandomCountSelection` is the mechanism; the functions below it draw. The number of trainings K and
each training's candidate are drawn from the reservation's secret seed, so that a retry repeats
them. K must stay secret: no log, metric, duration or file that leaves the operator may reveal it,
and only the best training may be shown.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import scipy

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import ORDERS, epsilon_rdp
from dp_core.privacy.accounting.profiles import NO_GUARANTEE, EpsilonDelta, Floats, SelfComposed
from dp_core.privacy.mechanism_event import MechanismEvent
from dp_core.privacy.seed_store import PrivacySeed

Law = Literal["geometric", "logarithmic", "poisson"]
_BITS = 128
MOST_TRAININGS = 1_000_000


@dataclass(frozen=True)
class RandomCountSelection(MechanismEvent):
    """The best of K trainings, K secret and random, each of a candidate drawn from a public list.

    Papernot and Steinke 2022 (arXiv:2110.03620). Every training draws its candidate uniformly and
    independently (with replacement). Its score must be a function of the released model and of
    public data, because the choice reveals it. Only the best training's model is released.
    A candidate drawn uniformly is a mixture, whose Rényi divergence is at most the worst of the
    list at each order (quasi-convexity, van Erven and Harremoës 2014, Theorem 13).

    Attributes:
        candidates: the mechanism of each point of the list, all for the same neighbours.
        count: "truncated-negative-binomial" (Theorem 2) or "poisson" (Theorem 6): K's law.
        eta: shape η > −1 of the truncated negative binomial (1: geometric, 0: logarithmic).
        gamma: its γ in (0, 1).
        mean: μ of the Poisson law. The numbers of the other law are 0.
        delta: δ at which the Rényi bound is turned into ε where it meets a PLD: no PLD is known.
    """

    kind = "random_count_selection"
    has_pld = False
    covers_every_iterate = False  # the best model alone is released
    claimed_by_rdp = True  # at the requested δ, not at the event's field `delta`
    candidates: tuple[MechanismEvent, ...]
    count: str
    delta: float
    eta: float = 0.0
    gamma: float = 0.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        self.require(len(self.candidates) > 0, "a selection needs candidates")
        alike = {(c.unit, c.relation) for c in self.candidates}
        self.require(len(alike) == 1, "candidates protect different units or neighbours")
        self.require(
            self.candidates[0].unit is self.unit, "the unit differs from the candidates' unit"
        )
        self.require(0 < self.delta < 1, f"delta {self.delta} is not in (0, 1)")
        if self.count == "poisson":
            fits = self.mean > 0 and math.isfinite(self.mean) and self.eta == self.gamma == 0
        else:
            negative_binomial = self.count == "truncated-negative-binomial"
            self.require(negative_binomial, f"unknown law of K {self.count!r}")
            fits = math.isfinite(self.eta) and self.eta > -1 and 0 < self.gamma < 1
            fits = fits and self.mean == 0
        self.require(fits, f"impossible numbers for the law {self.count}")

    def steps(self) -> list[SelfComposed]:
        """Return the (ε, δ) that the Rényi curve proves at its own δ."""
        epsilon = epsilon_rdp(self, self.delta)
        return [
            SelfComposed(NO_GUARANTEE if epsilon is None else EpsilonDelta(epsilon, self.delta), 1)
        ]

    def rdp(self, orders: Sequence[float]) -> Floats | None:
        """Return the theorem's curve; its λ̂ and α range over `orders` and `ORDERS`."""
        every = np.asarray([*orders, *ORDERS], dtype=np.float64)
        known = [c for event in self.candidates if (c := event.rdp(list(every))) is not None]
        if len(known) < len(self.candidates):
            return None
        base = worst(known)
        if self.count == "poisson":
            curve = poisson_curve(every, base, self.mean)
        else:
            curve = negative_binomial_curve(every, base, self.eta, self.gamma)
        return curve[: len(orders)]


def negative_binomial_curve(orders: Floats, base: Floats, eta: float, gamma: float) -> Floats:
    """Return the curve of the best of K runs, K truncated negative binomial.

    Papernot and Steinke 2022 (arXiv:2110.03620), Theorem 2: ε + (1+η)·[(1 − 1/λ̂)·ε̂ + ln(1/γ)/λ̂]
    + ln E[K]/(λ − 1), at the best λ̂ among the orders, and λ̂ = 1, where the bracket is ln(1/γ).
    (For η < 0 the same holds: 1 + η > 0.)

    Args:
        orders: λ > 1. base: curve of one run. eta: > −1. gamma: in (0, 1).
    """
    hat = (1 - 1 / orders) * base + math.log(1 / gamma) / orders
    best = min(math.log(1 / gamma), float(np.min(hat)))
    mean = negative_binomial_mean(eta, gamma)
    return np.asarray(base + (1 + eta) * best + math.log(mean) / (orders - 1))


def negative_binomial_mean(eta: float, gamma: float) -> float:
    """Return E[K] of the truncated negative binomial law on 1, 2, … (Definition 1)."""
    if eta == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    # η(1 − γ)/(γ(1 − γ^η)), in the form that keeps its digits near η = 0
    return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


def poisson_curve(orders: Floats, base: Floats, mean: float) -> Floats:
    """Return the curve of the best of K runs, K Poisson.

    Papernot and Steinke 2022, Theorem 6: ε + μ·δ̂ + ln(μ)/(λ − 1), where one run is (ε̂, δ̂)-DP with
    e^ε̂ ≤ 1 + 1/(λ − 1). We add e^{−μ}, the contribution of K = 0 to the moment. Without it the
    formula fails for small μ (it is below 0 for μ < 1 and ε near 0); with it the proof's integral
    over the other outcomes is unchanged. δ̂ comes from the Rényi bound: δ̂ = min over α of
    e^{(α−1)(ε_α − ε̂)}·(1 − 1/α)^{α−1}/α (Canonne, Kamath and Steinke 2020, Proposition 12).

    Args:
        orders: λ > 1. base: curve of one run. mean: μ.
    """
    epsilons = np.log1p(1 / (orders - 1))  # (orders,)
    a = orders[:, None]
    logs = (a - 1) * (base[:, None] - epsilons[None, :] + np.log1p(-1 / a)) - np.log(a)
    deltas = np.exp(np.minimum(np.min(logs, axis=0), 0.0))
    moments = math.log(mean) + (orders - 1) * (base + mean * deltas)
    return np.asarray(np.logaddexp(moments, -mean) / (orders - 1))


def worst(curves: Sequence[Floats]) -> Floats:
    """Return the largest bound at each order, which bounds a candidate drawn at random."""
    return np.asarray(np.max(np.stack(curves), axis=0))


# --- draws from the secret seed


def draw_count(event: RandomCountSelection, seed: PrivacySeed) -> int:
    """Return K, the number of trainings: secret, and the same for the same seed.

    By inversion of the law in double precision: each probability is off by less than 1e-12,
    whatever the data are, since K does not depend on them.
    """
    u = Fraction(int.from_bytes(seed.derive("selection count")[: _BITS // 8], "big"), 1 << _BITS)
    below = Fraction(0)
    for k, probability in _probabilities(event):
        below += Fraction(probability)
        if u < below:
            return k
        if k >= MOST_TRAININGS:
            break
    raise BadInput("the law of K has too heavy a tail", where="selection")


def draw_candidate(event: RandomCountSelection, seed: PrivacySeed, training: int) -> int:
    """Return the index of the candidate of a training (from 0): uniform, independent, secret."""
    word = int.from_bytes(seed.derive("selection candidate", training)[: _BITS // 8], "big")
    return word * len(event.candidates) >> _BITS


def training_seed(seed: PrivacySeed, training: int) -> PrivacySeed:
    """Return the seed of one training's batches and noise, independent of all other seeds."""
    secret, salt = (seed.derive(f"selection training {use}", training) for use in ("seed", "salt"))
    return PrivacySeed(secret, salt[:16], known=seed.known)


def selection_of(
    candidates: Sequence[MechanismEvent], law: Law, mean: float, delta: float
) -> RandomCountSelection:
    """Return the selection among candidates, each training's drawn uniformly from them.

    Args:
        candidates: the mechanism of each point.
        law: of K: `geometric` (η = 1) or `logarithmic` (η = 0, a little less ε, a longer tail), on
            1, 2, …; or `poisson`, which may be 0.
        mean: E[K]; above 1, for Poisson above 0.
        delta: δ at which the Rényi bound is stated where it meets a PLD.
    """
    unit, chosen = candidates[0].unit, tuple(candidates)
    if law == "poisson":
        return RandomCountSelection(chosen, law, delta, mean=mean, unit=unit)
    if not mean > 1:
        raise BadInput(f"{mean} is not above 1", where="selection mean")
    name = "truncated-negative-binomial"
    if law == "geometric":
        return RandomCountSelection(chosen, name, delta, eta=1.0, gamma=1 / mean, unit=unit)
    gamma = scipy.optimize.brentq(lambda g: negative_binomial_mean(0.0, g) - mean, 1e-12, 1 - 1e-9)
    return RandomCountSelection(chosen, name, delta, eta=0.0, gamma=float(gamma), unit=unit)


def _probabilities(event: RandomCountSelection) -> Iterator[tuple[int, float]]:
    """Yield (k, Pr[K = k]) from the smallest k."""
    if event.count == "poisson":
        log, k = -event.mean, 0
    else:
        first = (1 - event.gamma) / math.log(1 / event.gamma)
        if event.eta != 0:
            first = (1 - event.gamma) * event.eta / math.expm1(-event.eta * math.log(event.gamma))
        log, k = math.log(first), 1
    while True:
        yield k, math.exp(log)
        # Pr[K = k+1]/Pr[K = k] is μ/(k + 1), or (1 − γ)(k + η)/(k + 1) (Definition 1).
        ratio = event.mean if event.count == "poisson" else (1 - event.gamma) * (k + event.eta)
        k += 1
        log += math.log(ratio / k)
