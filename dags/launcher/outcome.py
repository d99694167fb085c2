"""What a step's exit code means to Airflow."""

from __future__ import annotations

import json

from airflow.sdk.exceptions import AirflowException, AirflowFailException

BAD_INPUT, BUDGET_EXCEEDED = 2, 3
UNFINISHED = 75  # its time was up: started again, it goes on where it was
_NEVER_RETRIED = {BAD_INPUT: "bad input", BUDGET_EXCEEDED: "privacy budget exceeded"}


def message_of(line: str) -> str:
    """Return what a line of a step's log says, also where the log is JSON (`CONFIDE_LOG=json`)."""
    if line.startswith("{"):
        try:
            return str(json.loads(line)["message"])
        except (ValueError, KeyError, TypeError):
            return line
    return line


def failure(step: str, exit_code: int, last_line: str) -> AirflowException:
    """Return the exception for a step that did not answer 0: with or without another try.

    Args:
        step: the step's name; its last line begins with it, after the program's.
        exit_code: negative where a signal ended the process.
        last_line: what the step said last: the reason, in one line.
    """
    reason = message_of(last_line).removeprefix(f"confide: {step}: ")
    if exit_code in _NEVER_RETRIED:
        how = f"exit code {exit_code}: {_NEVER_RETRIED[exit_code]}, not tried again"
        return AirflowFailException(f"{reason} ({how})")
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return AirflowException(f"{reason} ({how})")
