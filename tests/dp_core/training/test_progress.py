"""A stopped and resumed run reports the same as an uninterrupted run."""

from __future__ import annotations

from typing import Any, cast

from dp_core.training.loop import Progress, ProgressReporter, curve_points
from dp_core.training.trainer import Tallies, Trainer

UPDATES = 400  # a point of the curve every ten


class Counting:
    """Replaces a trainer: each reading returns the counts of one update."""

    def read_tallies(self) -> Tallies:
        return Tallies(loss=6.0, units=3, clipped=2)


def reporter(reports: list[Progress]) -> ProgressReporter:
    trainer = cast(Trainer, cast(Any, Counting()))
    return ProgressReporter(trainer, UPDATES, curve_points(UPDATES), reports.append)


def test_counts_since_the_last_point_survive_a_stop() -> None:
    reports: list[Progress] = []
    first, second = reporter(reports), reporter(reports)
    kept = first.state()  # one reading, for example after 7 updates
    first.report(10, 1.0, last=False)
    second.restore(kept)
    second.report(10, 1.0, last=False)
    undisturbed, resumed = reports
    assert resumed == undisturbed
    assert (resumed.loss, resumed.batch, resumed.clipped) == (2.0, 6 / 10, 4 / 6)
