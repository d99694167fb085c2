"""The first step of a run: record the run's sources, and refuse a run that exceeds a budget."""

from __future__ import annotations

from dp_core.labels import Public
from dp_core.privacy.statement import total_epsilon
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import BudgetSpec, PretrainSpec
from tasks.releases.charge import refuse_unfit_plans
from tasks.releases.declarations import record_sources
from tasks.releases.training_advice import RunReleases, how_it_is_known, verdict
from tasks.runtime.log import log


def run(spec: BudgetSpec, context: StepContext) -> StepOutput:
    """Refuse a run that exceeds a budget (exit code 3), or that calls undeclared text public.

    Private sources are recorded here, because the steps that parse files may not write the ledger.
    The step also logs the gain that the run's only private pre-training can be expected to bring.
    Nothing is charged or planned: the step `reserve` does that, once the files have been read.
    """
    plans = refuse_unfit_plans(context, spec.charged)
    record_sources(spec.reads, context)
    for budget, plan in plans.items():
        delta = sum(release.delta for release in plan)
        total = total_epsilon([release.event for release in plan], delta)
        if total is not None:
            context.measure(f"planned_epsilon/{budget}", Public(total))
            context.measure(f"planned_delta/{budget}", Public(delta))
            log(f"{budget}: ε = {total:.4g} at δ = {delta:.3g} is planned and fits the budget.")
    trainings = [charged for charged in spec.charged if isinstance(charged, PretrainSpec)]
    if len(trainings) == 1:  # the points of a sweep are compared by their own figures
        spending = RunReleases.of_charged(spec.charged)
        known = how_it_is_known(spending.recipe)
        log(f"{verdict(spending.expected())} {known} confide advise says which settings do better.")
    titles = [release.event.title for plan in plans.values() for release in plan]
    return StepOutput(outputs={}, facts={"planned": titles})
