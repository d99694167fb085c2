"""What a person reads first when a task has failed for good: one line, at the end of its log."""

from __future__ import annotations

import logging
from typing import Any

_LOG = logging.getLogger("airflow.task")


def say_what_failed(context: Any) -> None:
    """Log what failed, why, and where the log is; Airflow calls it when no try is left."""
    _LOG.error("%s", one_line(context))


def one_line(context: Any) -> str:
    """Return that line. The reason is the step's own last line, which never holds private text."""
    ti = context["ti"]
    index = f" [{context.get('point_name') or ti.map_index}]" if ti.map_index >= 0 else ""
    reason = " ".join(str(context.get("exception") or "its process was lost").split())
    place = getattr(ti, "log_url", "")
    log = f" Log: {place}" if place else ""
    return f"FAILED {ti.dag_id} · {ti.task_id}{index}, run {ti.run_id}: {reason}.{log}"
