"""The histogram of Hoory et al. 2021, Corollary 1, as printed, and what it really gives.

The paper sets C = 1 + σ·erf⁻¹(1 − δ/N) and takes the normal tail beyond it for δ/N. But the
standard normal's quantile is √2·erf⁻¹(2p − 1), not erf⁻¹: at that C a word that one unit alone
holds is released far more often, and that probability is given away at *every* ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcinv, ndtr, ndtri

from dp_core.privacy.accounting.gaussian import gaussian_delta
from dp_core.privacy.units import PrivacyUnit
from dp_core.vocab.calibration import HistogramPlan, check_target, delta_of


@dataclass(frozen=True)
class PaperHistogram:
    """Corollary 1's figures for (N, σ, δ), with continuous noise as in the paper.

    Attributes:
        epsilon: ε_V as printed. claimed_delta: δ as printed.
        threshold: C as printed. true_delta: the δ that this C gives at that ε.
        right_threshold: C = 1 + σ·Φ⁻¹(1 − δ/N), at which the paper's own proof gives δ.
        right_delta: the δ that `right_threshold` gives at that ε.
        lone_word: probability that a word of one unit alone passes the printed C.
    """

    words_per_unit: int
    sigma: float
    epsilon: float
    claimed_delta: float
    threshold: float
    true_delta: float
    right_threshold: float
    right_delta: float
    lone_word: float

    def plan(
        self, *, unit: PrivacyUnit | None = None, declared_units: int | None = None
    ) -> HistogramPlan:
        """Return the printed mechanism as it would be drawn, claiming only the δ it earns.

        The noise is discrete and the threshold rounded up to a whole number.
        """
        threshold = math.ceil(self.threshold)
        earned = delta_of(self.words_per_unit, self.sigma, threshold, self.epsilon)
        return HistogramPlan(
            self.words_per_unit,
            self.sigma,
            threshold,
            self.epsilon,
            earned,
            unit=unit,
            declared_units=declared_units,
        )


def paper_parameters(
    sigma: float = 200.0, delta: float = 1e-9, words_per_unit: int = 256
) -> PaperHistogram:
    """Return Corollary 1 for these parameters; the defaults are the paper's."""
    epsilon = math.sqrt(words_per_unit) / sigma * math.sqrt(2 * math.log(1.25 / delta))
    printed = 1 + sigma * float(erfcinv(delta / words_per_unit))
    right = 1 - sigma * float(ndtri(delta / words_per_unit))
    return PaperHistogram(
        words_per_unit,
        sigma,
        epsilon,
        delta,
        printed,
        continuous_delta(words_per_unit, sigma, printed, epsilon),
        right,
        continuous_delta(words_per_unit, sigma, right, epsilon),
        float(ndtr(-(printed - 1) / sigma)),
    )


def paper_sigma(epsilon: float, delta: float, words_per_unit: int) -> float:
    """Return the σ at which Corollary 1 has this ε_V at δ.

    Raises:
        BadInput: a target or N out of range.
    """
    check_target(epsilon, delta, words_per_unit)
    return math.sqrt(words_per_unit) / epsilon * math.sqrt(2 * math.log(1.25 / delta))


def continuous_delta(words_per_unit: int, sigma: float, threshold: float, epsilon: float) -> float:
    """Return δ at ε with continuous Gaussian noise: the larger of the two directions.

    Adding: max over ℓ of δ_G(ε; √(N−ℓ)/σ) + 1 − (1−τ)^ℓ, τ the tail beyond C − 1. Removing:
    max over ℓ of δ_G(ε + ℓ ln(1−τ); √(N−ℓ)/σ).
    """
    stay = math.log1p(-float(ndtr(-(threshold - 1) / sigma)))
    worst = 0.0
    for lone in range(words_per_unit + 1):
        mu = math.sqrt(words_per_unit - lone) / sigma
        adding = float(gaussian_delta(epsilon, mu)) - math.expm1(lone * stay)
        removing = float(np.asarray(gaussian_delta(epsilon + lone * stay, mu)))
        worst = max(worst, adding, removing)
    return worst
