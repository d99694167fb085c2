"""How a model is trained, apart from its batches: optimizer, masking, and how a run is kept."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dp_core.errors import BadInput

_COUNTS = ("micro_rows", "checkpoint_every", "keep_checkpoints")
_HOUSEKEEPING = ("checkpoint_every", "keep_checkpoints", "stop_after_seconds")


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of one training, private or not.

    Batches and their number are the update rule's (`dp_core.training.loop`).

    Attributes:
        learning_rate: peak, of AdamW.
        warmup: share of the updates in which the learning rate rises linearly.
        decay_power: how it falls after: as (share of the updates left)^power; 0 keeps the peak.
        weight_decay: decoupled, on kernels and tables only. Anil et al. 2021 take values near 1
            where 0.01 is usual: under DP the noise makes the norms of weights that a LayerNorm
            follows grow, which slows learning down.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        whole_words: mask all pieces of a word together (needs the vocabulary's continuations).
        precision: of the factors of products, `float32` or `bfloat16`.
        micro_rows: rows that one device works on at a time; memory and speed only.
        checkpoint_every: updates between checkpoints.
        keep_checkpoints: how many of the newest are kept.
        stop_after_seconds: end after the first update past this time, with a checkpoint, to go on
            when run again; None never does.

    Raises:
        BadInput: an impossible value.
    """

    learning_rate: float
    warmup: float = 0.1
    decay_power: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    whole_words: bool = False
    precision: str = "float32"
    micro_rows: int = 64
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    stop_after_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise BadInput(f"{getattr(self, name)} is below 1", where=name)
        for name in ("learning_rate", "weight_decay", "decay_power"):
            if not math.isfinite(getattr(self, name)):
                raise BadInput(f"{getattr(self, name)} is not a number", where=name)
        if self.learning_rate <= 0:
            raise BadInput(f"{self.learning_rate} is not positive", where="learning_rate")
        if not 0 <= self.warmup <= 1:
            raise BadInput(f"{self.warmup} is not a share", where="warmup")
        if self.decay_power < 0:
            raise BadInput(f"{self.decay_power} is negative", where="decay_power")
        if not 0 <= self.weight_decay * self.learning_rate < 1:
            raise BadInput(
                f"{self.weight_decay} at a learning rate of {self.learning_rate} would not shrink "
                "the weights but turn them round",
                where="weight_decay",
                fix="Keep weight_decay times learning_rate within 0 and 1.",
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"{getattr(self, name)} is not in [0, 1)", where=name)
        if self.stop_after_seconds is not None and not self.stop_after_seconds > 0:
            raise BadInput(f"{self.stop_after_seconds} is not positive", where="stop_after_seconds")

    def learning_rate_at(self, step: int, updates: int) -> float:
        """Return the learning rate of an update: linear warm-up, then polynomial decay.

        Args:
            step: number of the update, from 0.
            updates: of the whole run.
        """
        rising = max(1, round(self.warmup * updates))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        left = (updates - step) / max(1, updates - rising)
        return float(self.learning_rate * left**self.decay_power)

    def identity(self) -> dict[str, Any]:
        """Return the settings that the trained weights depend on: part of a run's manifest."""
        return {k: v for k, v in asdict(self).items() if k not in _HOUSEKEEPING}
