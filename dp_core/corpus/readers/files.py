"""The one door to every source: which entries it has, opened so that none hangs or fills memory.

A source is a file, or a folder of files and folders at any depth. Nothing else in it is passed
over: a link, a pipe, a device, a folder or a name that cannot be read refuses the whole source,
for a patient may be behind it. What is digested, what is checked before a run and what is read go
through `entries` alike.
"""

from __future__ import annotations

import errno
import lzma
import os
import shlex
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dp_core.corpus.readers.packed import PACKED, TooMuch, unpacked
from dp_core.corpus.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput

# What a damaged or half-written file raises while it is read.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
LONGEST = 8_000_000  # bytes of a line, characters of a note: longer is no text, but a broken file
BOM = "\ufeff"


def entries(source: Path, where: str = "") -> list[Path]:
    """Return the file itself, or every file of a folder at any depth, sorted.

    The source itself may be a link, for a person named it; in it, none is followed.

    Args:
        source: a file or folder.
        where: what the error names; by default the source.

    Raises:
        BadInput: there is no such file or folder, or something in it is neither, or cannot be
            read. What it is called is not said, it may be a patient's name: a command that lists
            it is.
    """
    where = where or str(source)
    try:
        mode = source.stat().st_mode
    except (OSError, ValueError) as error:  # also a name that no file system holds
        what = "no such file or folder"
        if isinstance(error, PermissionError):
            what = "it may not be read"
        raise BadInput(what, where=where, fix="Check the path.") from None
    if stat.S_ISREG(mode):
        return [source]
    if not stat.S_ISDIR(mode):
        raise BadInput("neither a file nor a folder", where=where, fix="Give one of these.")
    return sorted(_files(source, where))


def _files(source: Path, where: str) -> Iterator[Path]:
    named = shlex.quote(str(source))
    folders = [source]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                inside = [
                    (e, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False))
                    for e in found
                ]
        except OSError:
            raise BadInput(
                "a folder in it may not be read",
                where=where,
                fix=f"`find {named} -type d ! -readable` lists it.",
            ) from None
        for entry, is_folder, is_file in inside:
            if not is_unicode(entry.name):
                raise BadInput(
                    "a name in it is not UTF-8",
                    where=where,
                    fix=f"Rename it; `find {named} | grep -naxv '.*'` lists it.",
                )
            if is_folder:
                folders.append(Path(entry.path))
            elif is_file:
                yield Path(entry.path)
            else:
                raise BadInput(
                    "something in it is a link, a pipe or a device",
                    where=where,
                    fix="Only files and folders are read. Copy it with `cp -rL`, or take it out;"
                    f" `find {named}/ ! -type f ! -type d` lists it.",
                )


def input_files(path: Path, suffix: str, quarantine: Quarantine, *others: str) -> list[Path]:
    """Return a file itself, or a folder's files of the given suffix (plain or packed), sorted.

    Files of another suffix are listed in the quarantine as passed over.

    Args:
        path: a file or folder.
        suffix: for example `.txt`.
        quarantine: keeps account of what is passed over.
        others: suffixes that another call is for.

    Raises:
        BadInput: as `entries`; or the folder has no such file.
    """
    found = entries(path)
    if found == [path]:
        return found
    wanted = [f for f in found if _ends_in(f, suffix)]
    for file in found:
        if not any(_ends_in(file, known) for known in (suffix, *others)):
            quarantine.pass_over(place_of(file, path))
    if not wanted:
        raise BadInput(
            f"the folder has no {suffix} file", where=str(path), fix="Check path and format."
        )
    return wanted


def _ends_in(file: Path, suffix: str) -> bool:
    return file.name.lower().endswith((suffix, *(suffix + p for p in PACKED)))


def bare_name(path: Path) -> str:
    """Return a file's name without `.gz` or `.xz`."""
    return path.stem if path.suffix.lower() in PACKED else path.name


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; never wait, as a pipe would make one.

    Raises:
        OSError: it cannot be read, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacking it by its suffix as far as it is asked for."""
    return unpacked(open_regular(path), path.name)


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
    except TooMuch:
        quarantine.reject(Reason.TOO_MUCH, place_of(file, source))
        raise BadInput(
            "a packed file unpacks to far more than text does",
            where=str(source),
            fix="Give it unpacked, if it is what it should be.",
        ) from None


def place_of(file: Path, source: Path) -> str:
    """Return where a file lies within its source."""
    return file.relative_to(source).as_posix() if file != source else file.name


def bounded_lines(
    stream: IO[bytes], longest: int = LONGEST, *, keep_ends: bool = False
) -> Iterator[bytes | None]:
    """Yield lines; None for one that is too long, skipped over.

    Args:
        stream: where they are read.
        longest: bytes of a line.
        keep_ends: with their line ends.
    """
    while line := stream.readline(longest + 2):
        if len(line) <= longest or line.endswith(b"\n"):
            yield line if keep_ends else line.rstrip(b"\r\n")
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(longest)
        yield None
