"""The last step of a run: cancel the planned releases that have not begun."""

from __future__ import annotations

from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import GiveBackSpec
from tasks.releases.deployment_ledger import open_ledger
from tasks.runtime.log import log


def run(spec: GiveBackSpec, context: StepContext) -> StepOutput:
    """Cancel the run's planned releases, unless one of them has begun."""
    given_back = open_ledger(context.deployment, context.store).give_back(context.run.run_key)
    if given_back:
        log(f"{len(given_back)} planned releases are given back: nothing was read for them")
    return StepOutput(outputs={}, facts={"given_back": len(given_back)})
