"""Finding and opening input files: plain, .gz or .xz; a line without end fills no memory."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from dp_core.corpus.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput

# What a damaged or half-written file raises while it is read.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
LONGEST = 8_000_000  # characters of a line or a note: longer is no text, but a broken file
BOM = "\ufeff"
_COMPRESSED = (".gz", ".xz")


def input_files(path: Path, suffix: str) -> list[Path]:
    """Return the file itself, or a folder's files of the given suffix, sorted, at any depth.

    Raises:
        BadInput: the path does not exist, or the folder has no such file.
    """
    try:
        if path.is_file():
            return [path]
        folder = path.is_dir()
    except OSError:  # a name that the file system cannot hold
        folder = False
    if not folder:
        raise BadInput("no such file or folder", where=str(path), fix="Check the path.")
    endings = (suffix, *(suffix + c for c in _COMPRESSED))
    found = sorted(p for p in path.rglob("*") if p.name.lower().endswith(endings) and p.is_file())
    if not found:
        raise BadInput(
            f"the folder has no {suffix} file", where=str(path), fix="Check path and format."
        )
    return found


def bare_name(path: Path) -> str:
    """Return a file's name without `.gz` or `.xz`."""
    return path.stem if path.suffix.lower() in _COMPRESSED else path.name


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading, decompressing by its suffix."""
    match path.suffix.lower():
        case ".gz":
            return cast("IO[bytes]", gzip.open(path, "rb"))
        case ".xz":
            return cast("IO[bytes]", lzma.open(path, "rb"))
        case _:
            return path.open("rb")


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogate: a JSON escape can write one, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def damage_told(source: Path, file: Path, quarantine: Quarantine) -> Iterator[None]:
    """Read a file of a source within; one that ends early or is damaged refuses the source.

    Raises:
        BadInput: names the source. The file, which may be named after a patient, is listed in
            the quarantine alone.
    """
    try:
        yield
    except UNREADABLE:
        quarantine.reject(Reason.UNREADABLE, place_of(file, source))
        raise BadInput(
            "a file is unreadable, damaged or half-written",
            where=str(source),
            fix="Copy it again.",
        ) from None


def place_of(file: Path, source: Path) -> str:
    """Return where a file lies within its source."""
    return file.relative_to(source).as_posix() if file != source else file.name


def bounded_lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Yield lines without their line ends; None for a line above `LONGEST` bytes, skipped over."""
    while line := stream.readline(LONGEST + 2):
        if len(line) <= LONGEST or line.endswith(b"\n"):
            yield line.rstrip(b"\r\n")
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(LONGEST)
        yield None
