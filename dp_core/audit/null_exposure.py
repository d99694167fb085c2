"""Null distributions of exposure: the laws of ranks if a model remembers no canary.

Without memory the rank of a uniformly drawn secret is uniform, and the ranks of canaries and
references are exchangeable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

_LATTICE_POINTS = 1 << 21  # exact up to n·V of two million; above that, ranks are binned
_RESOLUTION = 1e-12  # floating-point error of the convolution stays below it
_CELLS, _CELLS_IN_ALL = 1 << 16, 1 << 22  # sizes of the lattice on which rank exposures are added
_EXACT_CANARIES = 8  # up to this number, each possible mean rank exposure has its exact probability


@dataclass(frozen=True, eq=False)
class NullExposure:
    """The law of an exposure, in bits, of a model without memory.

    Attributes:
        bits: [K] the possible exposures, descending.
        at_least: [K] the probability of at least this exposure.
        tolerance: values that are smaller by at most this count as equal.
    """

    bits: NDArray[np.float64]
    at_least: NDArray[np.float64]
    tolerance: float = 1e-9

    @cached_property
    def expected(self) -> float:
        """The expectation."""
        return float(np.diff(self.at_least, prepend=0.0) @ self.bits)

    @cached_property
    def low(self) -> float:
        """The lower end of the central 95% band."""
        return self._exceeded_by(0.975)

    @cached_property
    def high(self) -> float:
        """The upper end of the central 95% band."""
        return self._exceeded_by(0.025)

    def _exceeded_by(self, share: float) -> float:
        place = int(np.searchsorted(self.at_least, share))
        return float(self.bits[min(place, self.bits.size - 1)])

    def p_value(self, exposure: float) -> float:
        """Return the probability of at least this exposure, or 1e-12 where it is smaller."""
        smaller = int(np.searchsorted(self.bits[::-1], exposure - self.tolerance, side="left"))
        if smaller == self.bits.size:
            return _RESOLUTION
        return max(float(self.at_least[self.bits.size - smaller - 1]), _RESOLUTION)

    def largest_of(self, groups: int) -> NullExposure:
        """Return the law of the largest of several independent exposures: 1 − (1 − P)^groups."""
        return replace(self, at_least=1.0 - (1.0 - self.at_least) ** groups)


@lru_cache(maxsize=32)
def null_exposure(candidates: int, canaries: int) -> NullExposure:
    """Return the law of a group's exposure without memory.

    Args:
        candidates: V, the number of tokens among which a secret is drawn and ranked.
        canaries: n, the number of canaries whose ranks are averaged.

    Raises:
        ValueError: an argument is below 1.
    """
    if min(candidates, canaries) < 1:
        raise ValueError(f"need at least one of each: {candidates=}, {canaries=}")
    cells = min(candidates, max(64, _LATTICE_POINTS // canaries))
    size = canaries * (cells - 1) + 1
    one = np.fft.rfft(np.full(cells, 1 / cells), size)
    law = np.maximum(np.fft.irfft(one**canaries, size), 0.0)  # law of the sum: n-fold convolution
    # Cell k of `cells` represents ranks near (k + 1/2)·V/cells + 1/2, exactly if cells = V.
    sums = np.arange(law.size) / canaries
    ranks = (sums + 0.5) * (candidates / cells) + 0.5
    bits = math.log2(candidates) - np.log2(ranks)
    return NullExposure(bits, np.minimum(np.cumsum(law), 1.0))


@lru_cache(maxsize=32)
def null_rank_exposure(references: int, canaries: int) -> NullExposure:
    """Return the law of the mean rank exposure of n canaries with one set of R references.

    n canaries compared with the same references are not independent. Without memory all n + R
    scores are exchangeable, so every way to spread the canaries over the R + 1 gaps between the
    references is equally likely (Wilcoxon 1945). The sum of log2(1 + references ahead) has the
    generating function ∏ₖ 1/(1 − z·x^log2(1 + k)), of which the coefficient of zⁿ is computed on a
    lattice. A value between two lattice points is divided between them, which keeps means exact.

    The result is exact where no two of the n + R ranks are equal, except for the lattice, which
    spreads the law by 0.0003 bits for n up to 64, and by 0.03 for n = 1,000. A tie counts half.
    Values that the lattice cannot distinguish count as equal: dividing values between two points
    moves a sum by up to n cells. With many canaries the effect is negligible.

    Raises:
        ValueError: fewer than one canary, or a negative number of references.
    """
    if references < 0 or canaries < 1:
        raise ValueError(f"need canaries and references: {references=}, {canaries=}")
    steps = np.log2(np.arange(1, references + 2))  # (R + 1,) bits that a canary in gap k lacks
    cells = min(_CELLS, max(64, _CELLS_IN_ALL // canaries))
    cell = canaries * float(steps[-1]) / (cells - canaries - 2) if references else 1.0
    law = np.zeros((canaries + 1, cells))
    law[0, 0] = 1.0
    for step in steps / cell:
        whole, part = int(step), float(step - int(step))
        for count in range(1, canaries + 1):
            before = law[count - 1]
            law[count, whole:] += (1 - part) * before[: cells - whole]
            law[count, whole + 1 :] += part * before[: cells - whole - 1]
    of_sum = law[canaries] / law[canaries].sum()
    bits = steps[-1] - np.arange(cells) * cell / canaries
    moved = cell if canaries <= _EXACT_CANARIES else 0.0
    return NullExposure(bits, np.minimum(np.cumsum(of_sum), 1.0), moved + 1e-9)
