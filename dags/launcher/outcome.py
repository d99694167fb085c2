"""What a step's exit code means to Airflow."""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException, AirflowFailException

BAD_INPUT, BUDGET_EXCEEDED = 2, 3
_NEVER_RETRIED = {BAD_INPUT: "bad input", BUDGET_EXCEEDED: "privacy budget exceeded"}


def failure(step: str, exit_code: int, last_line: str) -> AirflowException:
    """Return the exception for a step that did not answer 0: with or without another try."""
    last_line = last_line.removeprefix("confide: ")
    if exit_code in _NEVER_RETRIED:
        return AirflowFailException(
            f"{step}: {_NEVER_RETRIED[exit_code]} (exit code {exit_code}, not retried): {last_line}"
        )
    how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return AirflowException(f"{step}: fault ({how}): {last_line}")
