"""Least privilege: the environment of a step, without the secrets that it does not need.

Each spec lists the privileges of its step (`StepSpec.privileges`), by this rule: **a step that
reads files from outside holds neither a seed nor the ledger's password**. A flaw in a parser can
then reveal the parsed text, but not the noise of every release. (`budget` computes digests of the
files, but parses none.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dp_core.errors import BadInput
from tasks.protocol.specs import Need, StepSpec

LEDGER, LEDGER_READER, SEEDS = "CONFIDE_LEDGER", "CONFIDE_LEDGER_READER", "CONFIDE_SEEDS"
CLUSTER = "CONFIDE_CLUSTER"  # where functions of shards run: this machine or a Ray cluster
# The folder of a cluster's secrets: its readers can run code on the cluster's workers.
CLUSTER_SECRETS = "CONFIDE_CLUSTER_SECRETS"
HOSTS = "CONFIDE_HOSTS"  # number of the cluster's hosts that one pre-training uses
_THIS_MACHINE = re.compile(r"|in-process|pool|local:[0-9]+")
# A path at which no file can exist or be created, so that a step without the privilege fails
# instead of creating a new ledger.
WITHHELD = "/dev/null/withheld-from-this-step"


_ORCHESTRATORS = re.compile(
    r"_*AIRFLOW_.*|PYTHONPATH|PYTHONHOME|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV|MPLBACKEND"
)


def without_orchestrator(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of Airflow (and its secrets) and its Python.

    A notebook's backend of matplotlib goes too: the environment of the steps may not have it.
    """
    return {n: value for n, value in environment.items() if not _ORCHESTRATORS.fullmatch(n)}


def needs_in(spec: StepSpec, environment: Mapping[str, str]) -> frozenset[Need]:
    """Return the step's needs; the cluster only if the environment names other machines."""
    alone = _THIS_MACHINE.fullmatch(environment.get(CLUSTER, ""))
    return spec.needs - {Need.CLUSTER} if alone else spec.needs


_NOT_FOR_WORKERS = re.compile(
    r"MLFLOW_.*|CONFIDE_(LEDGER.*|TRACKING.*|MESSAGES|RUN_CONTEXT|CLUSTER.*|HOSTS)"
)


def for_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for the Ray processes that a step starts on its machine.

    Workers read the rows of private units and return counts and sums without noise, so they have
    access to the store. They receive no seeds, no ledger, no key of content digests and no MLflow.
    """
    kept = {n: v for n, v in environment.items() if not _NOT_FOR_WORKERS.fullmatch(n)}
    return kept | {LEDGER: f"sqlite:///{WITHHELD}", SEEDS: WITHHELD, "CONFIDE_KEYS": WITHHELD}


def environment_for(
    spec: StepSpec, environment: Mapping[str, str], *, apart: bool
) -> dict[str, str]:
    """Return an environment without the secrets that the step does not need.

    Args:
        spec: spec of the step.
        environment: the environment with all secrets.
        apart: whether the step is isolated from the process that starts it, as in a container or a
            pod. Another process of the same user could look up the password anyway.

    Raises:
        BadInput: the step is isolated and reads a ledger that has no read-only user.
    """
    variables = {name: value for name, value in environment.items() if name != LEDGER_READER}
    held = needs_in(spec, environment)
    if Need.CLUSTER not in held:
        variables.pop(CLUSTER_SECRETS, None)
        if not _THIS_MACHINE.fullmatch(environment.get(CLUSTER, "")):
            variables.pop(CLUSTER)
            variables.pop(HOSTS, None)
    if Need.CHARGING in held:
        return variables
    variables[SEEDS] = WITHHELD
    if Need.LEDGER not in held:
        variables[LEDGER] = f"sqlite:///{WITHHELD}"
    elif reader := environment.get(LEDGER_READER):
        variables[LEDGER] = reader
    elif apart and variables.get(LEDGER):
        raise BadInput(
            f"{LEDGER} is set and {LEDGER_READER} is not: the step {spec.step} reads files from "
            "outside, and needs a user of the ledger's database who cannot write"
        )
    return variables
