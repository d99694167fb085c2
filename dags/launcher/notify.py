"""Who is told that a claim was contradicted, a budget refused, or a job failed.

`CONFIDE_NOTIFY` holds addresses with spaces between them: `mailto:someone@example.org` (by
Airflow's SMTP provider, over its connection `smtp_default`), or a webhook's `https://…`, which gets
`{"text": …}`. A webhook's address is a secret: it is never logged.
"""

from __future__ import annotations

import html
import logging
import os
from typing import Any
from urllib.parse import urlsplit

VARIABLE = "CONFIDE_NOTIFY"
BUDGET_EXCEEDED, CONTRADICTED = 3, 4  # exit codes whose reason is figures and names alone
_HEADS = {
    BUDGET_EXCEEDED: "Privacy budget refused",
    CONTRADICTED: "An audit contradicts a privacy claim",
}
_PATIENCE = 10.0  # seconds
_LOG = logging.getLogger("airflow.task")


def addresses() -> tuple[str, ...]:
    """Return the addresses that the deployment names.

    Raises:
        ValueError: one that is neither; which one is not told, for it may be a secret.
    """
    found = tuple(os.environ.get(VARIABLE, "").split())
    for number, address in enumerate(found, 1):
        parts = urlsplit(address)
        mail = parts.scheme == "mailto" and "@" in parts.path
        if not mail and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError(f"{VARIABLE}: address {number} is neither mailto: nor https:")
    return found


def message(context: Any) -> tuple[str, str]:
    """Return what is told of a failed task, as subject and text: names, ids and public values.

    Why it failed is told of a refused budget and of a contradicted claim alone, of which every
    word is public. Of any other fault the log knows, and the log is for the operator.
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
    """Tell everybody who is to be told of a failed task; Airflow calls it when no try is left.

    Nobody's silence fails anything: what could not be told is a line in the log.
    """
    subject, text = message(context)
    for number, address in enumerate(addresses(), 1):
        try:
            if address.startswith("mailto:"):
                _mail(address.removeprefix("mailto:"), subject, text, context)
            else:
                _post(address, text)
        except Exception as error:  # noqa: BLE001 - a callback that fails would hide the failure
            _LOG.warning("%s: address %d was not told (%s)", VARIABLE, number, type(error).__name__)


def _mail(to: str, subject: str, text: str, context: Any) -> None:
    from airflow.providers.smtp.notifications.smtp import SmtpNotifier

    body = html.escape(text).replace("\n", "<br>\n")
    # Not called as a callback: nothing of the text is a template.
    SmtpNotifier(to=to, subject=subject, html_content=body).notify(context)


def _post(address: str, text: str) -> None:
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs addresses
    httpx.post(address, json={"text": text}, timeout=_PATIENCE).raise_for_status()
