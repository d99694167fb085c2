"""Imports every mechanism class, and thereby registers its kind.

Import mechanisms from here: reading a ledger's entries needs every kind to be registered.
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
