"""The measured models and micro-batches, as plain numbers for engines of any kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A BERT and one micro-batch: `units` of `rows_per_unit` rows of `length` tokens."""

    layers: int
    hidden: int
    words: int
    units: int
    rows_per_unit: int
    length: int
    predictions: int

    @property
    def rows(self) -> int:
        return self.units * self.rows_per_unit


CASES = {
    "2x128": Case(2, 128, 4096, 32, 2, 64, 10),  # the model of the demo
    "4x256": Case(4, 256, 8192, 32, 1, 128, 20),
    "12x768": Case(12, 768, 30522, 4, 1, 128, 20),
}
