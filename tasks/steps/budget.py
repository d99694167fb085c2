"""Register every charged release of a run at once, before the first of them."""

from __future__ import annotations

from dp_core.labels import Public
from dp_core.privacy.statement import total_epsilon
from tasks.protocol import BudgetSpec, PretrainSpec
from tasks.releases.advice import Spending, how_it_is_known, verdict
from tasks.releases.charge import register_plan
from tasks.releases.declarations import record_sources
from tasks.releases.plans import planned_release
from tasks.runtime.context import StepContext, StepOutput
from tasks.runtime.log import log


def run(spec: BudgetSpec, context: StepContext) -> StepOutput:
    """Ask the ledger for the whole run: it fits as a whole, or nothing is spent (exit code 3).

    What the run calls public and the operator has not declared so is refused before that; what it
    reads as private is written down here, for the steps that parse files may not write the ledger.
    """
    record_sources(spec.reads, context)
    planned = {charged.digest(): planned_release(charged) for charged in spec.charged}
    register_plan(context, planned)
    for dataset in dict.fromkeys(release.dataset for release in planned.values()):
        charges = [release for release in planned.values() if release.dataset == dataset]
        delta = sum(release.delta for release in charges)
        total = total_epsilon([release.event.stating(release.unit) for release in charges], delta)
        if total is not None:
            context.measure(f"planned_epsilon/{dataset}", Public(total))
            context.measure(f"planned_delta/{dataset}", Public(delta))
    _advise(spec)
    return StepOutput(
        outputs={},
        facts={
            "planned": [
                {
                    "dataset": release.dataset,
                    "unit": release.unit.value,
                    "release": release.event.title,
                    "delta": release.delta,
                }
                for release in planned.values()
            ]
        },
    )


def _advise(spec: BudgetSpec) -> None:
    """Say what the run's one private pre-training lets one expect, by its settings alone."""
    trainings = [one for one in spec.charged if isinstance(one, PretrainSpec)]
    if len(trainings) != 1:  # a sweep's points are compared by their figures
        return
    spending = Spending.of_charged(spec.charged)
    known = how_it_is_known(spending.recipe)
    log(f"{verdict(spending.expected())} {known} confide advise says which settings do better.")
