"""Notifications about contradicted claims, refused budgets and failed jobs.

`CONFIDE_NOTIFY` holds addresses separated by spaces: `mailto:someone@example.org` (sent by
Airflow's SMTP provider over its connection `smtp_default`), or a webhook's `https://…`, which
receives `{"text": …}`. A webhook's address is a secret and is never logged.
"""

from __future__ import annotations

import html
import logging
import os
from typing import Any
from urllib.parse import urlsplit

VARIABLE = "CONFIDE_NOTIFY"
BUDGET_EXCEEDED, CONTRADICTED = 3, 4  # exit codes whose reason has only figures and names
_HEADS = {
    BUDGET_EXCEEDED: "Privacy budget refused",
    CONTRADICTED: "An audit contradicts a privacy claim",
}
_PATIENCE = 10.0  # seconds
_LOG = logging.getLogger("airflow.task")


def addresses() -> tuple[str, ...]:
    """Return the configured addresses.

    Raises:
        ValueError: an address has another form; only its number is given, as it may be a secret.
    """
    found = tuple(os.environ.get(VARIABLE, "").split())
    for number, address in enumerate(found, 1):
        parts = urlsplit(address)
        mail = parts.scheme == "mailto" and "@" in parts.path
        if not mail and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(f"{VARIABLE}: address {number} is neither mailto: nor https:")
    return found


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
