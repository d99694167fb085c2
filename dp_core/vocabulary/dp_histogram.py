"""The differentially private word histogram (Hoory et al. 2021, section 3.2; privacy.md).

h'(x) = number of units that contain word x, where each word counts once per unit and a unit counts
for at most N distinct words. Discrete Gaussian noise is added to every present x, and counts below
the threshold are dropped. `partition_selection` bounds the contributions and the number of units
where it makes the sets of items.
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

    Only this result is released; `plan` states its privacy. The same seed and context give the
    same noise, so a retry of the same release reveals nothing more.

    Args:
        counts: number of units with each word, in ascending order of words. A unit changes at most
            as many counts as the plan assumes, each by at most 1. Private.
        plan: σ, threshold and the bound N that they were calibrated for.
        seed: the privacy seed of this reservation.
        context: digest of data and plan, to which the noise is bound.
    """
    noised = counts + discrete_gaussian(plan.sigma, len(counts), seed, context)
    kept = np.flatnonzero(noised >= plan.threshold)
    return kept, noised[kept]
