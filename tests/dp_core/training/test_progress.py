"""What a run that was stopped says of itself is what an undisturbed one says."""

from __future__ import annotations

from typing import Any, cast

from dp_core.training.loop import Progress, ProgressReporter, curve_points
from dp_core.training.trainer import Tallies, Trainer

UPDATES = 400  # a point of the curve every ten


class Counting:
    """Stands in for a trainer: each reading finds the counts of one update."""

    def read_tallies(self) -> Tallies:
        return Tallies(loss=6.0, units=3, clipped=2)


def reporter(told: list[Progress]) -> ProgressReporter:
    trainer = cast(Trainer, cast(Any, Counting()))
    return ProgressReporter(trainer, UPDATES, curve_points(UPDATES), told.append)


def test_counts_since_the_last_point_outlive_a_stop() -> None:
    told: list[Progress] = []
    first, second = reporter(told), reporter(told)
    kept = first.state()  # 7 updates in, say: one reading
    first.report(10, 1.0, last=False)
    second.restore(kept)
    second.report(10, 1.0, last=False)
    undisturbed, resumed = told
    assert resumed == undisturbed
    assert (resumed.loss, resumed.batch, resumed.clipped) == (2.0, 6 / 10, 4 / 6)
