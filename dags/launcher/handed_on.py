"""Which of a scheduler's variables its containers and pods are given: these, and no others."""

from __future__ import annotations

from collections.abc import Mapping

PLACES = (
    "CONFIDE_STORE",
    "CONFIDE_TRACKING",
    "CONFIDE_TRACKING_UI",
    "CONFIDE_DEBUG",
    "CONFIDE_LOG",
    "GOOGLE_CLOUD_PROJECT",
    "STORAGE_EMULATOR_HOST",
)
SECRETS = (  # of these, a step gets what `tasks/protocol/least_privilege.py` says that it needs
    "CONFIDE_LEDGER",  # a database URL, with its password
    "CONFIDE_LEDGER_READER",  # the same database, by a user who cannot write
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
)


def handed_on(environment: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return what of an environment a step is given: nothing of Airflow's, its secrets least.

    Args:
        environment: the worker's own.
        names: what to hand on, besides the names in `CONFIDE_HANDED_ON`.
    """
    more = environment.get("CONFIDE_HANDED_ON", "").split()
    return {name: environment[name] for name in (*names, *more) if environment.get(name)}
