"""What a run says about itself while it goes on: about once a second, and at points of its curve.

Where the points lie follows from the number of updates alone, and what is said there holds for the
updates since the point before. So a run that was killed and went on says what an undisturbed one
says, and nothing of it tells how fast the training goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dp_core.bert.parameters import Arrays
from dp_core.training.trainer import Trainer

REPORT_SECONDS = 1.0
CURVE_POINTS = 40
_STATE = "since-the-last-point"


@dataclass(frozen=True)
class Progress:
    """How far a run is. `loss`, `batch` and `clipped` are `operator` numbers in private training.

    Attributes:
        update: updates done.
        updates: of how many.
        loss: mean unit loss since the last point of the curve, in nats; NaN if no unit was drawn.
        batch: mean realised batch size since that point, in units.
        clipped: share of units whose gradient was clipped since that point.
        clip_norm: bound of the next update; a released number where it is learned.
        at_point: whether this is a point of the curve.
    """

    update: int
    updates: int
    loss: float
    batch: float
    clipped: float
    clip_norm: float
    at_point: bool


@dataclass(frozen=True)
class Probe:
    """A look at the weights on the way. In private training they are released ones.

    Attributes:
        at: numbers of updates done, fixed beforehand: a point that followed the clock would tell
            how fast, and so on how many units, the training goes.
        look: given (updates done, weights by name). A run that goes on may look once more at
            where it goes on from, and sees the same.
    """

    at: frozenset[int]
    look: Callable[[int, Arrays], None]


def curve_points(updates: int) -> list[int]:
    """Return the points of a run's curve: 40 numbers of updates done, or all if there are fewer."""
    return sorted({max(1, round(updates * i / CURVE_POINTS)) for i in range(CURVE_POINTS + 1)})


class Reporter:
    """Gathers counts and reports them: reading them waits for the devices.

    Args:
        trainer: that counts.
        updates: of the whole run.
        progress: is told.
    """

    def __init__(
        self, trainer: Trainer, updates: int, progress: Callable[[Progress], None]
    ) -> None:
        self._trainer, self._updates, self._progress = trainer, updates, progress
        self._points, self._at = frozenset(curve_points(updates)), time.monotonic()
        self._begin(0)

    def tell(self, done: int, clip_norm: float, *, last: bool) -> None:
        """Report, if this is a point of the curve, or it is time, or the run ends here."""
        now, at_point = time.monotonic(), done in self._points
        if not at_point and not last and now - self._at < REPORT_SECONDS:
            return
        self._read()
        units, since = self._units, done - self._since
        self._progress(
            Progress(
                update=done,
                updates=self._updates,
                loss=self._loss / units if units else float("nan"),
                batch=units / since if since else 0.0,
                clipped=self._clipped / units if units else 0.0,
                clip_norm=clip_norm,
                at_point=at_point,
            )
        )
        self._at = now
        if at_point:
            self._begin(done)

    def state(self) -> Arrays:
        """Return what a checkpoint needs: the counts since the last point."""
        self._read()
        counts = (self._since, self._loss, self._units, self._clipped)
        return {_STATE: np.array(counts, np.float64)}

    def restore(self, state: Arrays) -> None:
        """Set what `state` returned."""
        since, loss, units, clipped = state[_STATE].tolist()
        self._since, self._loss = int(since), loss
        self._units, self._clipped = int(units), int(clipped)

    def _begin(self, done: int) -> None:
        self._since, self._loss, self._units, self._clipped = done, 0.0, 0, 0

    def _read(self) -> None:
        tallies = self._trainer.read_tallies()
        self._loss += tallies.loss
        self._units += tallies.units
        self._clipped += tallies.clipped
