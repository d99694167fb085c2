"""How far a step is: JSON lines for programs, and now and then a line for people."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tasks.lines import append
from tasks.speech import say

_PATIENCE = 10.0  # seconds between lines for people


class Progress:
    """Reports progress; notes must be fit for publication.

    Args:
        label: the step's name in lines for people.
        file: where programs read JSON lines `{"done", "total", "note"}`; none if None.
    """

    def __init__(self, label: str, file: Path | None) -> None:
        self._label, self._file = label, file
        self._next = 0.0

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` pieces of work are behind us."""
        if self._file is not None:
            try:
                append(self._file, {"done": done, "total": total, "note": note})
            except OSError as error:  # no reason to end a training
                self._file = None
                say(f"progress is not kept ({os.strerror(error.errno or 0)})", "warning")
        now = time.monotonic()
        if now >= self._next or done >= total:
            self._next = now + _PATIENCE
            say(f"{self._label}: {done}/{total} {note}".rstrip())
