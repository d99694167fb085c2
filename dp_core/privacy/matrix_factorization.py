"""Banded matrix factorisation: correlated noise whose sum over many updates is smaller.

The weights that training goes through are AG, G being the clipped sums of its updates and A its
`Workload`. A strategy C, lower triangular and Toeplitz, splits A = (AC⁻¹)·C. The release is
equivalent to releasing CG + z with independent Gaussian noise z for every update. So update t gets
the noise (C⁻¹z)_t, and the weights get AC⁻¹z (Choquette-Choo et al. 2023, arXiv:2306.08153;
McKenna 2024, arXiv:2405.15913). C has b bands, and a unit's updates are at least b apart
(`cyclic-poisson` in `batch_selection`). Its updates therefore change disjoint rows of CG, each by
at most the clip norm times the norm of a column of C. With one band C is the identity: DP-SGD.

The coefficients come from the series of (1 − λx)^−γ, cut at b bands, with the least error in the
weights; γ = ½ and λ = 1 is the square root of the prefix sums. The least error over γ and λ is
within 0.2% of the least over all banded Toeplitz strategies (measured for 2 to 16 bands). The
search is over a fixed grid, so its result is the same on every machine. The privacy guarantee does
not depend on the workload.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from dp_core.errors import PlanError

Floats = NDArray[np.float64]

COEFFICIENT_BITS = 16  # coefficients are whole multiples of 2⁻¹⁶, so that recursions are exact
LARGEST_UPDATE = 4.0  # deviations of z: the most noise in one update that a strategy may have
LARGEST_SUM = 64  # of the absolute coefficients: float64 adds up such rows exactly
_ONE = 1 << COEFFICIENT_BITS
_ITERATES = 8  # of a run: the mean over them is within 1% of the mean over all
_EXPONENTS = [i / 50 for i in range(10, 61)]  # γ
_DAMPING = (1.0, 0.99, 0.98, 0.96, 0.93, 0.9, 0.85, 0.8)  # λ


@dataclass(frozen=True)
class ToeplitzStrategy:
    """A lower-triangular banded Toeplitz strategy C, by its first column.

    Attributes:
        coefficients: (b,) c₀, c₁, … in multiples of 2⁻¹⁶; the first is 1, that is 2¹⁶.

    Raises:
        PlanError: no such strategy.
    """

    coefficients: tuple[int, ...] = (_ONE,)

    def __post_init__(self) -> None:
        plain = tuple(self.coefficients)
        if not plain or plain[0] != _ONE or any(type(c) is not int for c in plain):
            raise PlanError("the first coefficient is not 1", where="plan.strategy")
        if sum(map(abs, plain)) >= LARGEST_SUM * _ONE:
            raise PlanError(
                f"coefficients of {LARGEST_SUM} and more together", where="plan.strategy"
            )
        object.__setattr__(self, "coefficients", plain)

    @classmethod
    def of(cls, coefficients: Floats) -> ToeplitzStrategy:
        """Return the strategy with these coefficients, rounded, the first of them 1."""
        return cls(tuple(round(float(c) * _ONE) for c in coefficients))

    @property
    def bands(self) -> int:
        """Number of bands b: an update's clipped sum enters b rows of CG."""
        return len(self.coefficients)

    @property
    def values(self) -> Floats:
        """The coefficients (b,) as float64, exactly."""
        return np.array(self.coefficients, np.float64) / _ONE

    @property
    def norm(self) -> float:
        """The largest ℓ₂ norm of a column of C: the sensitivity to one clipped gradient of norm 1.

        A clipped gradient in every b-th update does not raise it: its columns share no row.
        """
        return math.sqrt(sum(c * c for c in self.coefficients)) / _ONE

    def noising(self, updates: int) -> Floats:
        """Return the first column (updates,) of C⁻¹: the noise of update t is Σ dᵢ·z_{t−i}."""
        first = np.zeros(updates)
        first[0] = 1.0
        return np.asarray(scipy.signal.lfilter([1.0], self.values, first))

    def sum_deviation(self, updates: int) -> float:
        """Return the deviation of the noise in the sum of all updates, at noise multiplier 1.

        It is in clip norms, and √n if the updates' noise is independent.
        """
        return float(np.linalg.norm(np.cumsum(self.noising(updates)))) * self.norm

    def loudness(self, updates: int) -> float:
        """Return the ratio of an update's noise to its share of the noise in the sum.

        √n·√(Σdᵢ²) / (deviation of the sum, for columns as they are): 1 for independent noise.
        """
        noising = self.noising(updates)
        left = np.linalg.norm(np.cumsum(noising)) / math.sqrt(updates)
        return float(np.linalg.norm(noising) / left)

    def is_calm(self, updates: int) -> bool:
        """Whether no update has more noise than `LARGEST_UPDATE`: √Σdᵢ², in deviations of z."""
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.sum(self.noising(updates) ** 2) <= LARGEST_UPDATE**2)


INDEPENDENT = ToeplitzStrategy()  # the identity: the updates' noise is independent


@dataclass(frozen=True)
class Workload:
    """The linear map A from updates G to the optimiser's weights AG.

    With learning rates η_t and momentum β (AdamW's β₁, assuming a constant second moment),

        A[t, s] = Σ_{u = s … t} η_u · (1 − β)·β^(u−s) / (1 − β^(u+1)).

    Constant rates without momentum give the prefix sums.

    Attributes:
        learning_rates: (n,), one for each update; only their ratios matter.
        momentum: β, 0 or more and below 1.
    """

    learning_rates: tuple[float, ...]
    momentum: float = 0.0

    @property
    def updates(self) -> int:
        """Number of updates n."""
        return len(self.learning_rates)

    @functools.cached_property
    def iterates(self) -> tuple[int, ...]:
        """Numbers of updates after which the error is measured: evenly spaced, up to the last."""
        n = self.updates
        return tuple(sorted({-(-n * i // _ITERATES) for i in range(1, _ITERATES + 1)}))

    def error(self, strategy: ToeplitzStrategy) -> float:
        """Return the root mean square noise of the weights, at noise multiplier 1.

        √(mean over `iterates` of ‖row of AC⁻¹‖²)·‖c‖, in clip norms times learning rate.

        Args:
            strategy: C, calm.
        """
        beta, noising = self.momentum, strategy.noising(self.updates)
        filtered = scipy.signal.lfilter([1 - beta], [1.0, -beta], noising)
        transform = scipy.fft.rfft(filtered, self._size)
        rows = scipy.fft.irfft(self._rates * np.conj(transform), self._size)[:, : self.updates]
        return math.sqrt(float(np.sum(rows * rows)) / len(rows)) * strategy.norm

    @functools.cached_property
    def _size(self) -> int:
        return int(scipy.fft.next_fast_len(2 * self.updates))

    @functools.cached_property
    def _rates(self) -> NDArray[np.complex128]:
        """Transforms of the rates up to each iterate, whose row of AC⁻¹ correlates with them."""
        t = np.arange(self.updates)
        rates = np.array(self.learning_rates) / (1 - self.momentum ** (t + 1))
        cut = (np.where(t < end, rates, 0.0) for end in self.iterates)
        return np.stack([scipy.fft.rfft(row, self._size) for row in cut])


def power_coefficients(bands: int, exponent: float, damping: float = 1.0) -> Floats:
    """Return the coefficients of (1 − λx)^−γ cut at b bands: cᵢ = cᵢ₋₁·λ(γ + i − 1)/i.

    Args:
        bands: b.
        exponent: γ; ½ with λ = 1 is the square root of the prefix sums (Fichtenberger, Henzinger
            and Upadhyay 2022, arXiv:2202.11205).
        damping: λ.
    """
    i = np.arange(1, bands)
    return np.cumprod([1.0, *(damping * (exponent + i - 1) / i)])


@functools.lru_cache(maxsize=64)
def least_error_strategy(bands: int, workload: Workload) -> ToeplitzStrategy:
    """Return the strategy of b bands with the least error of a workload, on a fixed grid.

    Args:
        bands: b.
        workload: of the whole run.
    """
    if bands == 1:
        return INDEPENDENT
    powers = (power_coefficients(bands, g, damping) for g in _EXPONENTS for damping in _DAMPING)
    small = (ToeplitzStrategy.of(c) for c in powers if c.sum() < LARGEST_SUM - 1)
    calm = [strategy for strategy in small if strategy.is_calm(workload.updates)]
    return min(calm, key=workload.error)
