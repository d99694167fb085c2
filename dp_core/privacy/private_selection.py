"""Draws for private selection with a random number of runs (Papernot and Steinke 2022).

`mechanisms.RandomCountSelection` accounts for it. The number of trainings K and each training's
candidate are drawn from the reservation's secret seed, so that a retry repeats them. K must stay
secret: no log, metric, duration or file that leaves the operator may reveal it, and only the best
training may be shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal

from scipy.optimize import brentq

from dp_core.errors import BadInput
from dp_core.privacy.accounting.rdp import negative_binomial_mean
from dp_core.privacy.mechanisms import MechanismEvent, RandomCountSelection
from dp_core.privacy.seed_store import PrivacySeed

Law = Literal["geometric", "logarithmic", "poisson"]
_BITS = 128
MOST_TRAININGS = 1_000_000


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
    gamma = brentq(lambda g: negative_binomial_mean(0.0, g) - mean, 1e-12, 1 - 1e-9)
    return RandomCountSelection(chosen, name, delta, eta=0.0, gamma=float(gamma), unit=unit)


def _probabilities(event: RandomCountSelection) -> Iterator[tuple[int, float]]:
    """Yield (k, Pr[K = k]) from the smallest k."""
    if event.count == "poisson":
        log, k = -event.mean, 0
        while True:
            yield k, math.exp(log)
            k += 1
            log += math.log(event.mean / k)
    eta, gamma = event.eta, event.gamma
    # Pr[K = 1]; then Pr[K = k+1]/Pr[K = k] = (1 − γ)(k + η)/(k + 1)  (Definition 1)
    first = (1 - gamma) / math.log(1 / gamma)
    if eta != 0:
        first = (1 - gamma) * eta / math.expm1(-eta * math.log(gamma))
    log, k = math.log(first), 1
    while True:
        yield k, math.exp(log)
        log += math.log((1 - gamma) * (k + eta) / (k + 1))
        k += 1
