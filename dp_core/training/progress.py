"""What a run says about itself while it goes on, about once a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dp_core.bert.parameters import Arrays
from dp_core.training.trainer import Tallies, Trainer

REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a run is. All but the first two are `operator` numbers in private training.

    Attributes:
        update: updates done.
        updates: of how many.
        loss: mean unit loss since the last report, in nats; NaN if no unit was drawn.
        batch: mean realised batch size since the last report, in units.
        clipped: share of units whose gradient was clipped since the last report.
        clip_norm: bound of the next update; a released number where it is learned.
    """

    update: int
    updates: int
    loss: float
    batch: float
    clipped: float
    clip_norm: float


@dataclass(frozen=True)
class Probe:
    """A look at the weights on the way. In private training they are released ones.

    Attributes:
        at: numbers of updates done, fixed beforehand: a point that followed the clock would tell
            how fast, and so on how many units, the training goes.
        look: given (updates done, weights by name).
    """

    at: frozenset[int]
    look: Callable[[int, Arrays], None]


class Reporter:
    """Gathers counts and reports them about once a second: reading them waits for the devices.

    Args:
        trainer: that counts.
        updates: of the whole run.
        progress: is told.
        done: updates done before.
    """

    def __init__(
        self, trainer: Trainer, updates: int, progress: Callable[[Progress], None], done: int
    ) -> None:
        self._trainer, self._updates, self._progress = trainer, updates, progress
        self._reported, self._at = done, time.monotonic()
        self._loss, self._units, self._clipped = 0.0, 0, 0

    def read(self) -> Tallies:
        """Return the counts since the last reading, and keep them for the next report."""
        tallies = self._trainer.read_tallies()
        self._loss += tallies.loss
        self._units += tallies.units
        self._clipped += tallies.clipped
        return tallies

    def tell(self, done: int, clip_norm: float, *, last: bool) -> None:
        """Report, if it is time or the run ends here."""
        now = time.monotonic()
        if not last and now - self._at < REPORT_SECONDS:
            return
        self.read()
        units = self._units
        self._progress(
            Progress(
                update=done,
                updates=self._updates,
                loss=self._loss / units if units else float("nan"),
                batch=units / (done - self._reported),
                clipped=self._clipped / units if units else 0.0,
                clip_norm=clip_norm,
            )
        )
        self._reported, self._at = done, now
        self._loss, self._units, self._clipped = 0.0, 0, 0
