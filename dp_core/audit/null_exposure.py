"""What exposure looks like when nothing was remembered: the null that readings are held against.

A secret drawn uniformly from V candidates, by coins that the model has not seen, has a rank that is
uniform on {1, …, V} whatever the model is. So the mean rank over n canaries follows the
discrete Irwin–Hall law, and the exposure log2 V − log2(mean rank) has a known distribution: about
1 bit in the middle (the mean rank is V/2), and wide for few canaries.

Exact for one context each. A canary's ranks averaged over several contexts have the same
expectation and, whatever their dependence, no larger spread (in convex order), so the law is then
on the wide side. A secret that must differ from its h hints is off by at most h ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_LATTICE_POINTS = 1 << 21  # exact up to n·V of two million; above that, ranks are binned
_RESOLUTION = 1e-12  # floating-point error of the convolution stays below it


@dataclass(frozen=True)
class NullExposure:
    """Exposure, in bits, of a model that remembers nothing: expectation and central 95% band."""

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
    # Cell k of `cells` stands for the ranks around (k + 1/2)·V/cells + 1/2; exact for cells = V.
    sums = np.arange(law.size) / canaries
    ranks = (sums + 0.5) * (candidates / cells) + 0.5
    return ranks, np.minimum(np.cumsum(law), 1.0)


def null_exposure(candidates: int, canaries: int, groups: int = 1) -> NullExposure:
    """Return what the largest exposure of `groups` independent groups is under the null.

    Args:
        candidates: V, the number of pieces that a secret is drawn from and ranked among.
        canaries: n, the number of canaries whose ranks are averaged in each group.
        groups: how many groups the reader picks the largest exposure from; 1 for a single group.

    Raises:
        ValueError: an argument below 1.
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

    By exchangeability its place among R = references + 1 is uniform, so this is the mean of
    log2 R − log2 k over k = 1 … R (Carlini et al. 2019, definition 4): about log2 e = 1.44 bits.
    """
    size = references + 1
    return math.log2(size) - float(np.log2(np.arange(1, size + 1)).mean())
