"""What is protected, and at what price."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import model_validator

from tasks.protocol.fields import PRIVACY, setting
from tasks.protocol.specs import Frozen

NeighboringRelation = Literal["add-or-remove-one", "zero-out-one", "replace-one"]
LEAST_NOISE = 0.01  # below it ε is in the thousands
LEAST_DELTA = 1e-30  # nobody lives to see it; tails beyond are not computed
_ROUNDING = 1 + 1e-5  # what the accounting adds to a restated δ
RELATIONS: dict[str, NeighboringRelation] = {
    "poisson": "add-or-remove-one",
    "truncated-poisson": "add-or-remove-one",
}


class PrivacySettings(Frozen):
    """Unit, bounds, noise and sampling; the same unit for vocabulary and training."""

    unit: Literal["example", "document", "patient"] = setting(
        "patient",
        PRIVACY,
        "Privacy unit",
        "What is protected as a whole, in vocabulary and training alike.",
    )
    declared_units: int = setting(
        6000,
        PRIVACY,
        "Declared number of units",
        "A public, rounded upper bound on the number of units (the true number is private). "
        "More units than this are refused.",
        ge=10,
        le=1_000_000_000,
    )
    words_per_unit: int = setting(
        128,
        PRIVACY,
        "Words per unit",
        "At most this many distinct words of a unit count towards the vocabulary; with the unit "
        "“example”, the length of a tuple (256 in the paper).",
        ge=1,
        le=100_000,
    )
    vocabulary_epsilon: float = setting(
        2.0, PRIVACY, "Vocabulary: ε", "Privacy loss of the word histogram.", ge=0.01, le=100
    )
    vocabulary_delta: float = setting(
        1e-7,
        PRIVACY,
        "Vocabulary: δ",
        "δ of the vocabulary's release; far below one in the number of units.",
        ge=LEAST_DELTA,
        le=0.01,
    )
    noise_multiplier: float = setting(
        1.0,
        PRIVACY,
        "Noise multiplier σ",
        "Effective noise of one update, in units of the clip norm.",
        ge=LEAST_NOISE,
        le=1000,
    )
    clip_norm: float = setting(
        1.0, PRIVACY, "Clip norm", "Bound on one unit's gradient.", gt=0, le=1e6
    )
    delta: float = setting(
        1e-6, PRIVACY, "Training: δ", "δ of the pre-training.", ge=LEAST_DELTA, le=0.01
    )
    sampling: Literal["poisson", "truncated-poisson"] = setting(
        "poisson",
        PRIVACY,
        "Sampling",
        "How batches are drawn, and so what ε is proven. poisson: least ε; truncated-poisson: no "
        "batch above the cap, a little more ε. Neighbours: add or remove one.",
    )
    batch_cap: int = setting(
        0,
        PRIVACY,
        "Batch cap",
        "Most units of a batch, with truncated-poisson only; 0 otherwise.",
        ge=0,
        le=1 << 26,
    )
    max_examples_per_unit: int = setting(
        4,
        PRIVACY,
        "Examples kept per unit",
        "Rows of a unit kept in the token store.",
        ge=1,
        le=1000,
    )
    examples_per_step: int = setting(
        1,
        PRIVACY,
        "Examples per unit and step",
        "Rows of a sampled unit that one step reads; they are clipped together.",
        ge=1,
        le=64,
    )

    @property
    def relation(self) -> NeighboringRelation:
        """Which data sets are neighbours: the sampling decides, and the vocabulary follows."""
        return RELATIONS[self.sampling]

    @model_validator(mode="after")
    def _sampling_has_its_cap(self) -> Self:
        if (self.sampling == "truncated-poisson") != (self.batch_cap > 0):
            raise ValueError("batch_cap belongs to truncated-poisson sampling, and to no other")
        return self

    @property
    def vocabulary_delta_stated(self) -> float:
        """δ of the vocabulary as it is stated: (1 + e^ε)·δ for replace-one neighbours."""
        if self.relation != "replace-one":
            return self.vocabulary_delta
        return (1 + math.exp(self.vocabulary_epsilon)) * self.vocabulary_delta * _ROUNDING

    def refuse_large_delta(self, models: int, tuning_delta: float, units: int) -> None:
        """Refuse settings whose δ, all released together, is not below one in the units.

        The steps, which know what is charged, refuse the same again.

        Args:
            models: how many DP models leave; each has its own training.
            tuning_delta: δ of fine-tuning each on labels charged to the same data set.
            units: public upper bound on the units.

        Raises:
            ValueError: one unit could be given away.
        """
        vocabulary = self.vocabulary_delta_stated
        total = vocabulary + models * (self.delta + tuning_delta)
        if not total * units < 1:
            parts = [f"{vocabulary:.3g} for the vocabulary", f"{self.delta:.3g} for training"]
            parts += [f"{tuning_delta:.3g} for fine-tuning"] if tuning_delta else []
            times = f", the last {len(parts) - 1} for each of {models} models" if models > 1 else ""
            restated = (
                " (replace-one neighbours: 1 + e^ε times vocabulary_delta)"
                if self.relation == "replace-one"
                else ""
            )
            raise ValueError(
                f"vocabulary_delta, delta: {total:.3g} in total is not below 1/declared_units, "
                f"{1 / units:.3g}: one unit could be given away. It is {' + '.join(parts)}{times}"
                f"{restated}"
            )
