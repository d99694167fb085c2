"""The mechanism of the vocabulary: a thresholded histogram of words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dp_core.privacy.events.base import MechanismEvent, require


@dataclass(frozen=True)
class ThresholdedHistogram(MechanismEvent):
    """A word histogram with discrete Gaussian noise on the words present, cut at a threshold.

    Attributes:
        words_per_unit: most distinct words N that a unit counts towards, each once.
        sigma: parameter of the discrete Gaussian.
        threshold: whole number C; noised counts below it are not released.
    """

    kind = "thresholded_histogram"
    words_per_unit: int
    sigma: float
    threshold: int
    mechanism: str = "set-counts"
    noise: str = "discrete-gaussian"

    def __post_init__(self) -> None:
        require(self.words_per_unit >= 1, "words_per_unit must be 1 or more", self.kind)
        require(math.isfinite(self.sigma) and self.sigma > 0, "sigma must be above 0", self.kind)
        require(
            self.threshold >= 1 and self.threshold == int(self.threshold),
            "threshold must be a whole number, 1 or more",
            self.kind,
        )
        require(self.mechanism == "set-counts", f"unknown mechanism {self.mechanism!r}", self.kind)
        require(self.noise == "discrete-gaussian", f"unknown noise {self.noise!r}", self.kind)
