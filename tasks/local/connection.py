"""Which Airflow a command talks to: the one that the environment names, or this machine's own.

`CONFIDE_AIRFLOW_API`       its address, for example http://127.0.0.1:8080
`CONFIDE_AIRFLOW_USER`      (default `confide`)
`CONFIDE_AIRFLOW_PASSWORD`
"""

from __future__ import annotations

import os

from dp_core.errors import BadInput
from tasks.local import stack as local
from tasks.local.airflow_api import AirflowApi
from tasks.runtime.deployment import Deployment


def named() -> str:
    """Return the address that the environment names, or ''."""
    return (os.environ.get("CONFIDE_AIRFLOW_API") or "").rstrip("/")


def connected(deployment: Deployment) -> AirflowApi | None:
    """Return a client of this deployment's Airflow, or None where there is none to be found.

    Raises:
        BadInput: an address without a password, or one that is not http.
    """
    if not named():
        stack = local.running(deployment)
        return stack.api() if stack else None
    if not named().startswith(("http://", "https://")):
        raise BadInput("not an http address", where="CONFIDE_AIRFLOW_API")
    password = os.environ.get("CONFIDE_AIRFLOW_PASSWORD", "")
    if not password:
        raise BadInput(
            "an Airflow is named, but no password for it",
            where="CONFIDE_AIRFLOW_PASSWORD",
            fix="In a compose stack it stands in .env as AIRFLOW_PASSWORD.",
        )
    return AirflowApi(named(), os.environ.get("CONFIDE_AIRFLOW_USER") or "confide", password)
