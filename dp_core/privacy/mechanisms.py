"""The mechanisms that read private data: one class each, all of them imported from here.

Only then is every kind registered, by which a ledger's entries are read.
"""

from dp_core.privacy.mechanism_event import (
    Composed,
    ConvertedRelation,
    MechanismEvent,
    NeighboringRelation,
    PrivacyUnit,
    RandomCountSelection,
    Unaccounted,
    compose,
    under,
)
from dp_core.privacy.sampled_gaussian import (
    CyclicPoissonGaussian,
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)
from dp_core.privacy.thresholded_counts import NoisedWeights, PhraseRounds, ThresholdedHistogram

__all__ = [
    "Composed",
    "ConvertedRelation",
    "CyclicPoissonGaussian",
    "FixedSizeGaussian",
    "Gaussian",
    "MechanismEvent",
    "NeighboringRelation",
    "NoisedWeights",
    "PhraseRounds",
    "PoissonGaussian",
    "PrivacyUnit",
    "RandomCountSelection",
    "ShuffledGaussian",
    "ThresholdedHistogram",
    "TruncatedPoissonGaussian",
    "Unaccounted",
    "compose",
    "under",
]
