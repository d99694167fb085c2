"""Fine-tuning on PRIVATE labels: without privacy for the operator alone, or by DP-SGD."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import model_validator

from tasks.protocol.fields import ADVANCED, TRAINING, TYPES_OR_NONE, setting
from tasks.protocol.privacy_settings import LEAST_DELTA, LEAST_NOISE
from tasks.protocol.specs import Frozen


class FinetuneSettings(Frozen):
    """What matters only where the labels are private; a charge of its own."""

    finetune_privacy: Literal["none", "dp"] = setting(
        "none",
        ADVANCED,
        "Private fine-tuning",
        "none: a model fine-tuned on private labels stays with the operator. dp: the DP model is "
        "fine-tuned by DP-SGD, charged, and may be released (its F1 on private sentences may not).",
    )
    entities_unit: Literal["example", "document", "patient"] = setting(
        "document",
        ADVANCED,
        "Private labels: unit",
        "What private fine-tuning protects. example: a sentence; patient: with a list of whose "
        "each document is (entities_patients). Labels charged to the private data set have its "
        "unit.",
    )
    entities_declared_units: int = setting(
        0,
        ADVANCED,
        "Private fine-tuning: declared units",
        "A public, rounded upper bound on the units with labels; 0 without it.",
        ge=0,
        le=1_000_000_000,
    )
    entity_types: str = setting(
        "",
        ADVANCED,
        "Private fine-tuning: entity types",
        "Comma-separated, from public knowledge: which types occur is private too.",
        pattern=TYPES_OR_NONE,
    )
    finetune_noise_multiplier: float = setting(
        1.0,
        ADVANCED,
        "Private fine-tuning: σ",
        "Effective noise of one update of private fine-tuning, in units of its clip norm.",
        ge=LEAST_NOISE,
        le=1000,
    )
    finetune_clip_norm: float = setting(
        1.0,
        ADVANCED,
        "Private fine-tuning: clip norm",
        "Bound on one unit's gradient in private fine-tuning.",
        gt=0,
        le=1e6,
    )
    finetune_delta: float = setting(
        1e-6,
        ADVANCED,
        "Private fine-tuning: δ",
        "δ of private fine-tuning, beside those of vocabulary and pre-training; far below one in "
        "the number of units with labels.",
        ge=LEAST_DELTA,
        le=0.01,
    )
    finetune_rows_per_unit: int = setting(
        4,
        ADVANCED,
        "Private fine-tuning: sentences per unit",
        "Sentences of a drawn unit that one update reads; clipped together.",
        ge=1,
        le=256,
    )
    finetune_epochs: int = setting(
        3,
        TRAINING,
        "Fine-tuning: epochs",
        "Passes of fine-tuning over the labelled sentences.",
        ge=1,
        le=1000,
    )
    finetune_batch_size: int = setting(
        32,
        TRAINING,
        "Fine-tuning: batch size",
        "Sentences per update of fine-tuning; expected units where it is private.",
        ge=1,
        le=4096,
    )
    finetune_learning_rate: float = setting(
        5e-4,
        TRAINING,
        "Fine-tuning: learning rate",
        "Peak learning rate of fine-tuning.",
        gt=0,
        le=10,
    )

    @property
    def finetune_updates(self) -> int:
        """Number of updates of private fine-tuning: epochs over the declared units."""
        passes = self.finetune_epochs * self.entities_declared_units
        return max(1, math.ceil(passes / self.finetune_batch_size))

    @model_validator(mode="after")
    def _private_fine_tuning_is_told_what_it_needs(self) -> Self:
        if self.finetune_privacy == "none":
            return self
        if not self.entity_types or not self.entities_declared_units:
            raise ValueError("private fine-tuning needs entity_types and entities_declared_units")
        if self.finetune_batch_size > self.entities_declared_units:
            raise ValueError("finetune_batch_size is above entities_declared_units")
        return self
