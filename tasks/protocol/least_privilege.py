"""Least privilege: the environment of a step, without the secrets that it does not need.

Each spec lists the privileges of its step (`StepSpec.privileges`). Their rule: **a step that reads
files from outside holds neither a seed nor the ledger's password**. A flaw in a parser then gives
away the parsed text, and not the noise of every release. (`budget` computes digests of the files,
and parses none.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tasks.protocol.specs import Need, StepSpec

LEDGER, LEDGER_READER, SEEDS = "CONFIDE_LEDGER", "CONFIDE_LEDGER_READER", "CONFIDE_SEEDS"
CLUSTER = "CONFIDE_CLUSTER"  # where functions of shards run: here, or on a Ray cluster
# The folder of a cluster's secrets: its readers can run code on the cluster's workers.
CLUSTER_SECRETS = "CONFIDE_CLUSTER_SECRETS"
HOSTS = "CONFIDE_HOSTS"  # over how many hosts of the cluster a pre-training is spread
_THIS_MACHINE = re.compile(r"|in-process|pool|local:[0-9]+")
# Where nothing can be, and nothing be made: whoever asks there fails, and makes no ledger anew.
WITHHELD = "/dev/null/withheld-from-this-step"


def needs(spec: StepSpec) -> frozenset[Need]:
    """Return the privileges that the step of this spec receives."""
    return spec.needs


_ORCHESTRATORS = re.compile(
    r"_*AIRFLOW_.*|PYTHONPATH|PYTHONHOME|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV"
)


def without_orchestrator(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Airflow's variables, its secrets among them, and its Python."""
    return {n: value for n, value in environment.items() if not _ORCHESTRATORS.fullmatch(n)}


class NoReader(ValueError):
    """A ledger is named, but nobody who may read it without writing."""


def uses_cluster(spec: StepSpec, environment: Mapping[str, str]) -> bool:
    """Return whether the step uses the cluster of other machines that an environment names."""
    other_machines = not _THIS_MACHINE.fullmatch(environment.get(CLUSTER, ""))
    return other_machines and Need.CLUSTER in needs(spec)


_NOT_FOR_WORKERS = re.compile(
    r"MLFLOW_.*|CONFIDE_(LEDGER.*|TRACKING.*|MESSAGES|RUN_CONTEXT|CLUSTER.*|HOSTS)"
)


def for_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for the Ray processes that a step starts on its machine.

    Workers read the rows of private units and return counts and sums without noise, so they have
    the store. The seeds, the ledger, the key of content digests and MLflow stay with the step.
    """
    kept = {n: v for n, v in environment.items() if not _NOT_FOR_WORKERS.fullmatch(n)}
    return kept | {LEDGER: f"sqlite:///{WITHHELD}", SEEDS: WITHHELD, "CONFIDE_KEYS": WITHHELD}


def environment_for(
    spec: StepSpec, environment: Mapping[str, str], *, apart: bool
) -> dict[str, str]:
    """Return an environment with the secrets taken out of it that the step does not need.

    Args:
        spec: of the step.
        environment: what the step would be told.
        apart: the step is kept apart from who starts it (a container, a pod). As another process
            of the same user it could look the password up all the same.

    Raises:
        NoReader: `apart`, and the step reads a ledger for which there is no reader.
    """
    told = {name: value for name, value in environment.items() if name != LEDGER_READER}
    held = needs(spec)
    if not uses_cluster(spec, environment):
        told.pop(CLUSTER_SECRETS, None)
        if not _THIS_MACHINE.fullmatch(environment.get(CLUSTER, "")):
            told.pop(CLUSTER)
            told.pop(HOSTS, None)
    if Need.CHARGING in held:
        return told
    told[SEEDS] = WITHHELD
    if Need.LEDGER not in held:
        told[LEDGER] = f"sqlite:///{WITHHELD}"
    elif reader := environment.get(LEDGER_READER):
        told[LEDGER] = reader
    elif apart and told.get(LEDGER):
        raise NoReader(
            f"{LEDGER} is set and {LEDGER_READER} is not: the step {spec.step} reads files from "
            "outside, and needs a user of the ledger's database who cannot write"
        )
    return told
