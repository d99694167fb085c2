"""How every reader finds and opens the files of a source, packed by gzip or xz or plain.

A source holds regular files and folders, or it is refused. Files are unpacked piece by piece: a
small one cannot become a huge one. Errors name the source alone: files may be named after patients.
"""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import shlex
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol, cast

from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput, PrivateTextRefusal

PACKED = (".gz", ".xz")
# What a damaged or half-written package raises while it is read.
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
# Text is packed to a third or a tenth of its size, tables of repeated words to a fiftieth; zeros
# become a thousandth in gzip and less in xz.
LARGEST_RATIO = 250
ALWAYS_ALLOWED = 16_000_000  # bytes unpacked, whatever the ratio: a small file is no danger
_DICTIONARY = 256_000_000  # bytes that xz may hold to unpack: `xz -9` needs 65 million
_PIECE = 1 << 16  # bytes read at once


class TooMuch(Exception):
    """A package that unpacks to far more than text does."""


class _Unpacker(Protocol):
    """What `lzma.LZMADecompressor` is."""

    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most so many bytes."""


class _Gzip:
    """One member of a gzip file; zlib checks its checksum and length."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


class _Unpacked(io.RawIOBase):
    """The bytes in a package of one or more members, one after the other."""

    def __init__(self, raw: IO[bytes], kind: str) -> None:
        self._raw, self._kind = raw, kind
        self._member = self._next_member()
        self._taken = self._given = 0

    def _next_member(self) -> _Unpacker:
        if self._kind == ".gz":
            return cast("_Unpacker", _Gzip())
        return cast("_Unpacker", lzma.LZMADecompressor(memlimit=_DICTIONARY))

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast("bytearray", buffer)).cast("B")
        if not len(view):
            return 0  # "at most 0 bytes" means "any number" to zlib
        found = self._some(min(len(view), _PIECE))
        view[: len(found)] = found
        self._given += len(found)
        if self._given > max(ALWAYS_ALLOWED, LARGEST_RATIO * self._taken):
            raise TooMuch
        return len(found)

    def _some(self, most: int) -> bytes:
        """Return at least one byte, or none at the end."""
        while True:
            data, ended = b"", False
            if self._member.eof:
                # Between members, and after the last, zeros may stand for padding.
                data = self._member.unused_data.lstrip(b"\0")
                while not data:
                    piece = self._read()
                    if not piece:
                        return b""
                    data = piece.lstrip(b"\0")
                self._member = self._next_member()
            elif self._member.needs_input:
                data = self._read()
                ended = not data
            if found := self._member.decompress(data, most):
                return found
            if ended and not self._member.eof:
                raise EOFError

    def _read(self) -> bytes:
        data = self._raw.read(_PIECE)
        self._taken += len(data)
        return data


def unpacked(raw: IO[bytes], name: str) -> IO[bytes]:
    """Return what a file holds, unpacked if its name ends in `.gz` or `.xz`.

    Reading raises `TooMuch`, or one of `DAMAGED`, of which a caller may make what it likes.
    """
    kind = Path(name).suffix.lower()
    return io.BufferedReader(_Unpacked(raw, kind)) if kind in PACKED else raw


UNREADABLE = (OSError, *DAMAGED)
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
            raise PrivateTextRefusal(
                "a folder in it may not be read",
                where=where,
                fix=f"`find {named} -type d ! -readable` lists it.",
            ) from None
        for entry, is_folder, is_file in inside:
            if not is_unicode(entry.name):
                raise PrivateTextRefusal(
                    "a name in it is not UTF-8",
                    where=where,
                    fix=f"Rename it; `find {named} | grep -naxv '.*'` lists it.",
                )
            if is_folder:
                folders.append(Path(entry.path))
            elif is_file:
                yield Path(entry.path)
            else:
                raise PrivateTextRefusal(
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
            quarantine.pass_over(location_of(file, path))
    if not wanted:
        raise PrivateTextRefusal(
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
        quarantine.reject(Reason.UNREADABLE, location_of(file, source))
        raise PrivateTextRefusal(
            "a file is unreadable, damaged or half-written",
            where=str(source),
            fix="Copy it again.",
        ) from None
    except TooMuch:
        quarantine.reject(Reason.TOO_MUCH, location_of(file, source))
        raise PrivateTextRefusal(
            "a packed file unpacks to far more than text does",
            where=str(source),
            fix="Give it unpacked, if it is what it should be.",
        ) from None


def location_of(file: Path, source: Path) -> str:
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


_DIGITS = 9  # of an offset, a line or a token: more lie beyond any document


def text_lines(file: Path, *, keep_ends: bool = False) -> Iterator[tuple[int, str | Reason]]:
    """Yield (line number from 1, the line or why it cannot be read), as `bounded_lines`.

    Raises:
        UNREADABLE, TooMuch: one of these; the file is damaged, half-written, or a bomb.
    """
    with open_bytes(file) as stream:
        for number, raw in enumerate(bounded_lines(stream, keep_ends=keep_ends), 1):
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
