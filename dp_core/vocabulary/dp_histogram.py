"""The differentially private word histogram (Hoory et al. 2021, section 3.2; privacy.md).

h'(x) = number of units that contain word x, each word once per unit and at most N distinct words
per unit; discrete Gaussian noise on every x present; what stays below the threshold is gone.
Contribution is bounded, and units are held to the declared number, where sets of items are made
(`partition_selection`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dp_core.privacy.discrete_gaussian import discrete_gaussian

if TYPE_CHECKING:
    from dp_core.privacy.seed_store import PrivacySeed
    from dp_core.vocabulary.vocabulary_calibration import HistogramPlan


def release(
    counts: NDArray[np.int64], plan: HistogramPlan, seed: PrivacySeed, context: bytes
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the words whose noised counts reach the threshold, and these counts.

    Only this result is released; its privacy is `plan`'s. The same seed and context give the
    same noise, so that a retry of the same release reveals nothing more.

    Args:
        counts: how many units hold each word, in ascending order of words; no unit moved more of
            them than the plan assumes, and none by more than 1. Private.
        plan: σ, threshold and the bound N they were calibrated for.
        seed: the privacy seed of this reservation.
        context: what the noise is bound to (a digest of data and plan).
    """
    noised = counts + discrete_gaussian(plan.sigma, len(counts), seed, context)
    kept = np.flatnonzero(noised >= plan.threshold)
    return kept, noised[kept]
