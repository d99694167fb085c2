"""The lines of an annotation file, as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dp_core.corpus.readers.files import BOM, bounded_lines, open_bytes
from dp_core.corpus.readers.quarantine import Reason


def text_lines(file: Path) -> Iterator[tuple[int, str | Reason]]:
    """Yield (line number from 1, the line or why it cannot be read).

    Raises:
        UNREADABLE: one of these; the file is damaged or half-written.
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
