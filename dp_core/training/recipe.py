"""How a model is trained, apart from privacy: batch, length, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from dp_core.errors import BadInput


@dataclass(frozen=True)
class Recipe:
    """Settings of one pre-training.

    Attributes:
        batch_size: units an update reads; with a privacy plan, expected units.
        updates: number of updates.
        learning_rate: peak, of AdamW.
        examples_per_step: rows R of a unit that one update reads.
        warmup: share of the updates in which the rate rises linearly; it falls linearly after.
        weight_decay: decoupled, on kernels and tables only.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        micro_rows: rows that one device works on at a time; memory and speed only.
        checkpoint_every: updates between checkpoints.
    """

    batch_size: int
    updates: int
    learning_rate: float
    examples_per_step: int = 1
    warmup: float = 0.1
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    micro_rows: int = 64
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "updates",
            "examples_per_step",
            "micro_rows",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise BadInput(f"{getattr(self, name)} is below 1", where=name)
        if not self.learning_rate > 0:
            raise BadInput(f"{self.learning_rate} is not positive", where="learning_rate")
        if not 0 <= self.warmup <= 1:
            raise BadInput(f"{self.warmup} is not a share", where="warmup")

    def rate(self, t: int) -> float:
        """Return the learning rate of update t (from 0): linear warm-up, then linear decay to 0."""
        rising = max(1, round(self.warmup * self.updates))
        if t < rising:
            return self.learning_rate * (t + 1) / rising
        return self.learning_rate * (self.updates - t) / max(1, self.updates - rising)
