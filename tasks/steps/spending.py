"""What a model has cost: its training's own ε as it goes on, and the totals of its ancestry."""

from __future__ import annotations

import math

from dp_core.labels import Public
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.statement import DatasetTotal
from dp_core.training.loop import Progress, curve_points
from tasks.releases.plans import plan_until
from tasks.report.results import totals
from tasks.runtime.context import StepContext

NO_TOTAL = "no total: unlike units or neighbours"


class Spending:
    """Measures the ε of a private training so far: `epsilon_training`, at points of its curve.

    It is this training's own. What the model has cost with all before it is `epsilon`, told once,
    when it is released (`measure_totals`).
    """

    def __init__(self, bench: StepContext, plan: ExecutionPlan | None, updates: int) -> None:
        self._bench, self._plan = bench, plan
        self._left, self._spent = curve_points(updates), 0.0

    def tell(self, now: Progress) -> str:
        """Measure the points that were passed; return a note on what is spent, '' without plan."""
        passed = [point for point in self._left if point <= now.update]
        self._left = self._left[len(passed) :]
        if self._plan is None:
            return ""
        for point in passed:
            self._spent = epsilon_pld(plan_until(self._plan, point).event(), self._plan.delta)
            self._bench.measure("epsilon_training", Public(self._spent), point)
        return f"ε {self._spent:.3g}"


def measure_totals(bench: StepContext) -> None:
    """Tell what the step's model has cost by its whole ancestry: `epsilon` and `delta`.

    Of several data sets each has its own, `epsilon/NAME` and `delta/NAME`: they hold other people,
    so no sum and no largest of them is anybody's guarantee. An infinite or missing total is no
    number: it is told in words.
    """
    found = totals(bench.releases)
    for total in found:
        measure_total(bench, total, f"/{total.dataset}" if len(found) > 1 else "")
    if not found:
        measure_total(bench, DatasetTotal("", None, 0.0, 0.0), "")


def measure_total(bench: StepContext, total: DatasetTotal, name: str) -> None:
    """Tell one data set's total, as `epsilon` and `delta` followed by `name`."""
    if total.epsilon is None or math.isinf(total.epsilon):
        bench.tracker.tag(f"epsilon{name}", NO_TOTAL if total.epsilon is None else "inf")
        return
    bench.measure(f"epsilon{name}", Public(total.epsilon))
    bench.measure(f"delta{name}", Public(total.delta))
