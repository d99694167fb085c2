"""Null distributions of exposure: the laws of ranks if a model remembers no canary.

Without memory the rank of a uniformly drawn secret is uniform, and the ranks of canaries and
references are exchangeable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_LATTICE_POINTS = 1 << 21  # exact up to n·V of two million; above that, ranks are binned
_RESOLUTION = 1e-12  # floating-point error of the convolution stays below it
_CELLS, _CELLS_IN_ALL = 1 << 16, 1 << 22  # sizes of the lattice on which rank exposures are added
_EXACT_CANARIES = 8  # up to this number, each possible mean rank exposure has its exact probability


@dataclass(frozen=True)
class NullExposure:
    """Exposure, in bits, of a model without memory: expectation and central 95% band."""

    expected: float
    low: float
    high: float


@lru_cache(maxsize=32)
def _mean_rank_law(candidates: int, canaries: int) -> tuple[NDArray[np.float64], ...]:
    """Return (mean ranks [K] ascending, their cumulative probabilities [K])."""
    cells = min(candidates, max(64, _LATTICE_POINTS // canaries))
    size = canaries * (cells - 1) + 1
    one = np.fft.rfft(np.full(cells, 1 / cells), size)
    law = np.maximum(np.fft.irfft(one**canaries, size), 0.0)  # law of the sum: n-fold convolution
    # Cell k of `cells` represents ranks near (k + 1/2)·V/cells + 1/2, exactly if cells = V.
    sums = np.arange(law.size) / canaries
    ranks = (sums + 0.5) * (candidates / cells) + 0.5
    return ranks, np.minimum(np.cumsum(law), 1.0)


def null_exposure(candidates: int, canaries: int, groups: int = 1) -> NullExposure:
    """Return the null distribution of the largest exposure of `groups` independent groups.

    Args:
        candidates: V, the number of tokens among which a secret is drawn and ranked.
        canaries: n, the number of canaries whose ranks are averaged in each group.
        groups: number of groups from which the reader picks the largest exposure.

    Raises:
        ValueError: an argument is below 1.
    """
    if min(candidates, canaries, groups) < 1:
        raise ValueError(f"need at least one of each: {candidates=}, {canaries=}, {groups=}")
    ranks, below = _mean_rank_law(candidates, canaries)
    # The largest exposure belongs to the smallest mean rank: P(min ≤ r) = 1 − (1 − P(r))^groups.
    smallest = 1.0 - (1.0 - below) ** groups
    bits = math.log2(candidates) - np.log2(ranks)
    weights = np.diff(smallest, prepend=0.0)
    quantile = np.searchsorted(smallest, [0.025, 0.975])
    high, low = bits[np.minimum(quantile, bits.size - 1)]
    return NullExposure(expected=float(weights @ bits), low=float(low), high=float(high))


def null_p_value(mean_rank: float, candidates: int, canaries: int) -> float:
    """Return P(mean rank of n uniform secrets ≤ `mean_rank`), or 1e-12 where it is smaller."""
    ranks, below = _mean_rank_law(candidates, canaries)
    index = int(np.searchsorted(ranks, mean_rank + 1e-9, side="right")) - 1
    return max(float(below[index]), _RESOLUTION) if index >= 0 else _RESOLUTION


def null_rank_exposure(references: int) -> float:
    """Return the expected rank exposure of an unremembered canary among `references` others.

    By exchangeability the canary's rank among R = references + 1 is uniform, so this is the mean of
    log2 R − log2 k over k = 1 … R (Carlini et al. 2019, definition 4): about log2 e = 1.44 bits.
    """
    size = references + 1
    return math.log2(size) - float(np.log2(np.arange(1, size + 1)).mean())


@lru_cache(maxsize=32)
def _rank_exposure_law(references: int, canaries: int) -> tuple[NDArray[np.float64], ...]:
    """Return (mean rank exposures [K] descending, probabilities [K] of at least this exposure).

    n canaries compared with the same references are not independent. Without memory all n + R
    scores are exchangeable, so every way to spread the canaries over the R + 1 gaps between the
    references is equally likely (Wilcoxon 1945). The sum of log2(1 + references ahead) has the
    generating function ∏ₖ 1/(1 − z·x^log2(1 + k)), of which the coefficient of zⁿ is computed on a
    lattice. A value between two lattice points is divided between them, which keeps means exact.
    """
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
    return bits, np.minimum(np.cumsum(of_sum), 1.0)


def null_mean_rank_exposure(references: int, canaries: int) -> NullExposure:
    """Return the null distribution of the mean rank exposure of n canaries with one reference set.

    The result is exact where no two of the n + R ranks are equal, except for the lattice, which
    spreads the law by 0.0003 bits for n up to 64, and by 0.03 for n = 1,000. A tie counts half.

    Raises:
        ValueError: an argument is below 1.
    """
    if min(references, canaries) < 1:
        raise ValueError(f"need at least one of each: {references=}, {canaries=}")
    bits, above = _rank_exposure_law(references, canaries)
    high, low = bits[np.minimum(np.searchsorted(above, [0.025, 0.975]), bits.size - 1)]
    return NullExposure(float(np.diff(above, prepend=0.0) @ bits), float(low), float(high))


def null_rank_p_value(rank_exposure: float, references: int, canaries: int) -> float:
    """Return P(mean rank exposure of n unremembered canaries ≥ `rank_exposure`).

    Values that the lattice cannot distinguish from the measured value count as well: dividing
    values between two points moves a sum by up to n cells. With many canaries the effect is
    negligible.
    """
    bits, above = _rank_exposure_law(references, canaries)
    moved = canaries * float(bits[0] - bits[1]) if canaries <= _EXACT_CANARIES else 0.0
    index = int(np.searchsorted(-bits, moved - rank_exposure + 1e-9, side="right")) - 1
    return max(float(above[index]), _RESOLUTION) if index >= 0 else _RESOLUTION
