"""Which of a scheduler's variables its containers and pods are given: these, and no others."""

from __future__ import annotations

from collections.abc import Mapping

HANDED_ON = (
    "CONFIDE_STORE",
    "CONFIDE_LEDGER",
    "CONFIDE_TRACKING",
    "CONFIDE_TRACKING_UI",
    "CONFIDE_DEBUG",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "STORAGE_EMULATOR_HOST",
    "GOOGLE_CLOUD_PROJECT",
)


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment a step is given: nothing of Airflow's, its secrets least."""
    more = environment.get("CONFIDE_HANDED_ON", "").split()  # names, separated by spaces
    return {name: environment[name] for name in (*HANDED_ON, *more) if environment.get(name)}
