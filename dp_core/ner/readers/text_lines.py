"""The lines of an annotation file, as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dp_core.corpus.readers.files import BOM, UNREADABLE, bounded_lines, open_bytes, unreadable
from dp_core.corpus.readers.quarantine import Reason


def text_lines(file: Path) -> Iterator[tuple[int, str | Reason]]:
    """Yield (line number from 1, the line or why it cannot be read).

    Raises:
        BadInput: the file is damaged or half-written.
    """
    try:
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
    except UNREADABLE as error:
        raise unreadable(file) from error
