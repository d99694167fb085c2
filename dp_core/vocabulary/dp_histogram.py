"""The differentially private word histogram (Hoory et al. 2021, section 3.2; privacy.md).

h'(x) = number of units that contain word x, each word once per unit and at most N distinct words
per unit; discrete Gaussian noise on every x present; what stays below the threshold is gone.
Contribution is bounded, and units are held to the declared number, where sets of items are made
(`partition_selection`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dp_core.privacy.discrete_gaussian import discrete_gaussian

if TYPE_CHECKING:
    from dp_core.privacy.seed_store import PrivacySeed
    from dp_core.vocabulary.calibration import HistogramPlan


def release(
    counts: Mapping[str, int], plan: HistogramPlan, seed: PrivacySeed, context: bytes
) -> dict[str, int]:
    """Return the noised counts that reach the threshold, sorted by word.

    Only this result is released; its privacy is `plan`'s. The same seed and context give the
    same noise, so that a retry of the same release reveals nothing more.

    Args:
        counts: how many units hold each word; no unit moved more of them than the plan assumes,
            and none by more than 1. Private.
        plan: σ, threshold and the bound N they were calibrated for.
        seed: the privacy seed of this reservation.
        context: what the noise is bound to (a digest of data and plan).
    """
    words = sorted(counts)
    noise = discrete_gaussian(plan.sigma, len(words), seed, context)
    noised = np.fromiter((counts[w] for w in words), np.int64, len(words)) + noise
    kept = np.flatnonzero(noised >= plan.threshold)
    return {words[i]: int(noised[i]) for i in kept}
