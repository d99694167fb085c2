"""The door to all readers of entities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dp_core.data.ner import Sentence
from dp_core.data.readers.columns import read_columns
from dp_core.data.readers.i2b2 import read_i2b2
from dp_core.data.readers.pubtator import read_pubtator
from dp_core.data.readers.quarantine import Quarantine
from dp_core.errors import BadInput


def read_sentences(
    format: str, path: Path | str, quarantine: Quarantine | None = None
) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder.

    Args:
        format: `i2b2` (folders of .txt and .con), `columns` (token and tag, .tsv in a folder) or
            `pubtator` (.txt in a folder); files of each may be .gz or .xz.
        path: a file, or a folder.
        quarantine: counts what is not taken; a new one by default.

    Raises:
        BadInput: a wrong path or format, or, at the end, too large a share in quarantine. Never
            with any text in it.
    """
    quarantine = Quarantine() if quarantine is None else quarantine
    path = Path(path)
    match format:
        case "i2b2":
            sentences = read_i2b2(path, quarantine)
        case "columns":
            sentences = read_columns(path, quarantine)
        case "pubtator":
            sentences = read_pubtator(path, quarantine)
        case _:
            raise BadInput(
                f"{format!r} is not an entities format",
                where="format",
                fix="Use i2b2, columns or pubtator.",
            )
    yield from sentences
    quarantine.finish(str(path))
