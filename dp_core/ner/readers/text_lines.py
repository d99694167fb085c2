"""The lines of an annotation file, as text; numbers in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dp_core.corpus.readers.files import BOM, bounded_lines, open_bytes
from dp_core.corpus.readers.quarantine import Reason

_DIGITS = 9  # of an offset, a line or a token: more lie beyond any document


def text_lines(file: Path) -> Iterator[tuple[int, str | Reason]]:
    """Yield (line number from 1, the line or why it cannot be read).

    Raises:
        UNREADABLE, TooMuch: one of these; the file is damaged, half-written, or a bomb.
    """
    with open_bytes(file) as stream:
        for number, raw in enumerate(bounded_lines(stream), 1):
            if raw is None:
                yield number, Reason.TOO_LONG
                continue
            try:
                line = raw.decode()
            except UnicodeDecodeError:
                yield number, Reason.ENCODING
                continue
            yield number, line.removeprefix(BOM) if number == 1 else line


def offset(digits: str) -> int | None:
    """Return a whole number of a file; None if it lies beyond any document."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _DIGITS else None
