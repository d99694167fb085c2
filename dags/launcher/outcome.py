"""How tasks and runs end: the state of a run, a person's approval, and notifications of failures.

`CONFIDE_NOTIFY` holds addresses separated by spaces: `mailto:someone@example.org` (sent by
Airflow's SMTP provider over its connection `smtp_default`), or a webhook's `https://…`, which
receives `{"text": …}`. A webhook's address is a secret and is never logged.
"""

import html
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from airflow.sdk import BaseOperator, get_current_context, task
from airflow.sdk.definitions.xcom_arg import XComArg
from airflow.sdk.exceptions import AirflowFailException

VARIABLE = "CONFIDE_NOTIFY"
BUDGET_EXCEEDED, CONTRADICTED = 3, 4  # exit codes whose reason has only figures and names
_HEADS = {
    BUDGET_EXCEEDED: "Privacy budget refused",
    CONTRADICTED: "An audit contradicts a privacy claim",
}
_PATIENCE = 10.0  # seconds
_LOG = logging.getLogger("airflow.task")
# The report passes only names, ids and public figures to this text.
_VERDICTS = """
{% for model, sentence in ((ti.xcom_pull(task_ids='report') or {}).get('verdicts') or {}).items() %}
- **{{ model }}**: {{ sentence }}
{% else %}
This run made no model that could be promoted.
{% endfor %}

*Approve* gives the model's version in MLflow the alias `promotable`, unless an audit has
contradicted its claim in the meantime. *Reject* leaves it registered without the alias.
"""


def outcome(last: Callable[[Mapping[str, Any]], str]) -> XComArg:
    """Return the task that decides the state of its run.

    Args:
        last: function from the run's parameters to the name of the task that succeeds if the run
            does, such as the report.

    Airflow derives a run's state from the last tasks that are no teardowns. If a person cancels a
    run that has a teardown, Airflow skips these tasks and calls the run a success. This task is a
    teardown itself, so it runs in every case, and Airflow counts its failure.
    """

    @task(task_id="outcome", task_display_name="Decide the run's state", retries=0)
    def fail_unless_succeeded() -> None:
        """Fail if a task of this run failed, or if the run was cancelled."""
        context = get_current_context()
        run, dag = context["run_id"], context["dag"].dag_id
        states = context["ti"].get_task_states(dag_id=dag, run_ids=[run]).get(run, {})
        refuse(states, partial(last, context["params"]))

    return fail_unless_succeeded().as_teardown(on_failure_fail_dagrun=True)


def refuse(states: Mapping[str, str | None], last: Callable[[], str]) -> None:
    """Raise if these states of a run's tasks are not those of a success.

    Args:
        states: by task.
        last: as for `outcome`; called only if no task failed.

    Raises:
        AirflowFailException: a task failed, or the last task did not succeed.
    """
    failed = sorted(name for name, state in states.items() if state == "failed")
    if failed:
        raise AirflowFailException(f"failed: {', '.join(failed)}; see the log of the first one")
    if states.get(name := last()) != "success":
        raise AirflowFailException(f"the run was cancelled before {name}")


def approval() -> BaseOperator:
    """Return the task that shows the report's verdicts and waits for an answer without limit."""
    from airflow.providers.standard.operators.hitl import ApprovalOperator

    return ApprovalOperator(
        task_id="approval",
        task_display_name="Wait for approval",
        subject="Promote the model of {{ dag_run.run_id }}?",
        body=_VERDICTS,
        doc_md="Shows the audits' verdict on the claim, and waits for a person to decide.",
    )


# --- failures


def log_failure(context: Any) -> None:
    """Log the failed task, the reason and the log's address after the last try has failed."""
    ti = context["ti"]
    name = getattr(ti, "rendered_map_index", None) or ti.map_index
    index = f" [{name}]" if ti.map_index >= 0 else ""
    reason = " ".join(str(context.get("exception") or "its process was lost").split())
    address = getattr(ti, "log_url", "")
    log = f" Log: {address}" if address else ""
    task = f"{ti.dag_id} · {ti.task_id}{index}, run {ti.run_id}"
    _LOG.error("FAILED %s: %s.%s", task, reason, log)


def addresses() -> tuple[str, ...]:
    """Return the configured addresses.

    Raises:
        ValueError: an address has another form; only its number is given, as it may be a secret.
    """
    listed = tuple(os.environ.get(VARIABLE, "").split())
    for number, address in enumerate(listed, 1):
        parts = urlsplit(address)
        mail = parts.scheme == "mailto" and "@" in parts.path
        if not mail and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(f"{VARIABLE}: address {number} is neither mailto: nor https:")
    return listed


def message(context: Any) -> tuple[str, str]:
    """Return subject and text about a failed task, with names, ids and public values only.

    The reason is included only for a refused budget and a contradicted claim, whose reasons are
    public. Other reasons are only in the log, which is for the operator.
    """
    ti, error = context["ti"], context.get("exception")
    code = getattr(error, "exit_code", None)
    head = _HEADS.get(code, "A job failed")
    subject = f"Confide: {head}: {ti.dag_id} · {ti.task_id}"
    lines = [f"{head}.", f"Task {ti.task_id} of {ti.dag_id}, run {ti.run_id}."]
    if code in _HEADS:
        lines.append(" ".join(str(error).split()))
    if address := getattr(ti, "log_url", ""):
        lines.append(f"Log: {address}")
    return subject, "\n".join(lines)


def notify(context: Any) -> None:
    """Send notifications to the configured addresses after a task's last try has failed.

    Notification errors are logged and ignored.
    """
    subject, text = message(context)
    for number, address in enumerate(addresses(), 1):
        try:
            if address.startswith("mailto:"):
                _mail(address.removeprefix("mailto:"), subject, text, context)
            else:
                _post(address, text)
        except Exception as error:  # noqa: BLE001 - a callback that fails would hide the failure
            reason = type(error).__name__
            _LOG.warning("%s: address %d was not notified (%s)", VARIABLE, number, reason)


def _mail(to: str, subject: str, text: str, context: Any) -> None:
    from airflow.providers.smtp.notifications.smtp import SmtpNotifier

    body = html.escape(text).replace("\n", "<br>\n")
    # Called as a function and not as a callback, so that the text is not rendered as a template.
    SmtpNotifier(to=to, subject=subject, html_content=body).notify(context)


def _post(address: str, text: str) -> None:
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses
    httpx.post(address, json={"text": text}, timeout=_PATIENCE).raise_for_status()
