"""What a mechanism did, as data: a closed registry of events; every ε is a function of them."""

from dp_core.privacy.events.base import MechanismEvent, Relation
from dp_core.privacy.events.derived import Composed, RandomCountSelection, Restated, Unaccounted
from dp_core.privacy.events.histogram import ThresholdedHistogram
from dp_core.privacy.events.training import (
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)

__all__ = [
    "Composed",
    "FixedSizeGaussian",
    "Gaussian",
    "MechanismEvent",
    "PoissonGaussian",
    "RandomCountSelection",
    "Relation",
    "Restated",
    "ShuffledGaussian",
    "ThresholdedHistogram",
    "TruncatedPoissonGaussian",
    "Unaccounted",
]
