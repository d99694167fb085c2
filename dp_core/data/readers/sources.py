"""Finding and opening the files of a source, plain or compressed with gzip or xz.

A source that holds anything but regular files and folders is refused. Files are unpacked piece by
piece, with a limit on the ratio. Errors name only the source: files may be named after patients.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import lzma
import os
import shlex
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput, PrivateTextRefusal

Item = TypeVar("Item")
PACKED = (".gz", ".xz")
# Exceptions raised while a damaged or half-written compressed file is read.
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
# Text is packed to a third or a tenth of its size, tables of repeated words to a fiftieth; zeros
# become a thousandth in gzip and less in xz.
LARGEST_RATIO = 250
ALWAYS_ALLOWED = 16_000_000  # bytes unpacked, whatever the ratio: small files are harmless
_DICTIONARY = 256_000_000  # bytes that xz may hold to unpack: `xz -9` needs 65 million
_PIECE = 1 << 16  # bytes read at once


class TooMuch(Exception):
    """A compressed file that unpacks to far more than text does."""


class _Gzip:
    """One member of a gzip file, as `lzma.LZMADecompressor`; zlib checks checksum and length."""

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
    """The unpacked bytes of a compressed file with one or more members."""

    def __init__(self, raw: IO[bytes], kind: str) -> None:
        self._raw, self._kind = raw, kind
        self._member = self._next_member()
        self._taken = self._given = 0

    def _next_member(self) -> _Gzip | lzma.LZMADecompressor:
        return _Gzip() if self._kind == ".gz" else lzma.LZMADecompressor(memlimit=_DICTIONARY)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast("bytearray", buffer)).cast("B")
        if not len(view):
            return 0  # "at most 0 bytes" means "any number" to zlib
        piece = self._some(min(len(view), _PIECE))
        view[: len(piece)] = piece
        self._given += len(piece)
        if self._given > max(ALWAYS_ALLOWED, LARGEST_RATIO * self._taken):
            raise TooMuch
        return len(piece)

    def _some(self, most: int) -> bytes:
        """Return at least one byte, or none at the end."""
        while True:
            data, ended = b"", False
            if self._member.eof:
                # Zeros between members, and after the last member, are padding.
                data = self._member.unused_data.lstrip(b"\0")
                while not data:
                    packed = self._read()
                    if not packed:
                        return b""
                    data = packed.lstrip(b"\0")
                self._member = self._next_member()
            elif self._member.needs_input:
                data = self._read()
                ended = not data
            if piece := self._member.decompress(data, most):
                return piece
            if ended and not self._member.eof:
                raise EOFError

    def _read(self) -> bytes:
        data = self._raw.read(_PIECE)
        self._taken += len(data)
        return data


def unpacked(raw: IO[bytes], name: str) -> IO[bytes]:
    """Return a file's content as a stream, unpacked if its name ends in `.gz` or `.xz`.

    Reading raises `TooMuch` or an exception of `DAMAGED`, which the caller must handle.
    """
    kind = Path(name).suffix.lower()
    return io.BufferedReader(_Unpacked(raw, kind)) if kind in PACKED else raw


UNREADABLE = (OSError, *DAMAGED)
LONGEST = 8_000_000  # bytes of a line, characters of a note; anything longer is a broken file
BOM = "\ufeff"


def entries(source: Path, where: str = "") -> list[Path]:
    """Return the file itself, or every file of a folder at any depth, sorted.

    The source itself may be a link, since the user named it. Links inside the source are refused.

    Args:
        source: a file or folder.
        where: the name of the source in errors; by default its path.

    Raises:
        BadInput: there is no such file or folder, or an entry of it is neither or cannot be read.
            The message does not name the entry, which may be a patient's name, but a command that
            lists it.
    """
    where = where or str(source)
    try:
        mode = source.stat().st_mode
    except (OSError, ValueError) as error:  # also a name that no file system holds
        problem = "no such file or folder"
        if isinstance(error, PermissionError):
            problem = "it may not be read"
        raise BadInput(problem, where=where, fix="Check the path.") from None
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
            with os.scandir(folders.pop()) as listing:
                inside = [
                    (e, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False))
                    for e in listing
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


def input_files(
    path: Path, suffix: str | tuple[str, ...], quarantine: Quarantine, *others: str
) -> list[Path]:
    """Return a file itself, or a folder's files of a given suffix (plain or packed), sorted.

    Files of another suffix are listed in the quarantine as passed over.

    Args:
        path: a file or folder.
        suffix: for example `.txt`, or several of them.
        quarantine: lists the files passed over.
        others: further suffixes that are not listed as passed over.

    Raises:
        BadInput: as `entries`; or the folder has no file with the suffix.
    """
    files = entries(path)
    if files == [path]:
        return files
    suffixes = (suffix,) if isinstance(suffix, str) else suffix
    wanted = [file for file in files if _ends_in(file, *suffixes)]
    for file in files:
        if not _ends_in(file, *suffixes, *others):
            quarantine.pass_over(location_of(file, path))
    if not wanted:
        what = f"the folder has no {' or '.join(suffixes)} file"
        raise PrivateTextRefusal(what, where=str(path), fix="Check path and format.")
    return wanted


def _ends_in(file: Path, *suffixes: str) -> bool:
    return bare_name(file).lower().endswith(suffixes)


def bare_name(path: Path) -> str:
    """Return a file's name without `.gz` or `.xz`."""
    return path.stem if path.suffix.lower() in PACKED else path.name


def csv_cells(line: str, delimiter: str = ",") -> list[str]:
    """Return the cells of a line of CSV; none if its quoting is broken."""
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True), [])
    except csv.Error:
        return []


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading, without blocking on a pipe.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
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
    """Open a file for reading; a compressed file is unpacked while it is read."""
    return unpacked(open_regular(path), path.name)


def is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogate, which JSON escapes can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_problem(text: str, *others: str) -> Reason | None:
    """Return the reason why an item's text cannot be used, or None.

    Args:
        text: the text.
        others: the item's ids and labels, which must be Unicode, too.
    """
    if not is_unicode("".join((text, *others))):
        return Reason.ENCODING
    if not text.strip():
        return Reason.EMPTY
    return Reason.TOO_LONG if len(text) > LONGEST else None


@contextmanager
def refuse_damaged_file(source: Path, file: Path, quarantine: Quarantine) -> Iterator[None]:
    """Context manager that refuses the source if reading one of its files fails.

    Raises:
        BadInput: names the source. The file, which may be named after a patient, is listed in
            the quarantine alone.
    """
    try:
        yield
    except UNREADABLE:
        quarantine.reject(Reason.UNREADABLE, location_of(file, source))
        raise PrivateTextRefusal(
            "a file is unreadable, damaged or half-written", where=str(source), fix="Copy it again."
        ) from None
    except TooMuch:
        quarantine.reject(Reason.TOO_MUCH, location_of(file, source))
        what = "a packed file unpacks to far more than text does"
        fix = "If the file is right, give it unpacked."
        raise PrivateTextRefusal(what, where=str(source), fix=fix) from None


def location_of(file: Path, source: Path) -> str:
    """Return the path of a file within its source."""
    return file.relative_to(source).as_posix() if file != source else file.name


def unpacked_name(file: Path, source: Path) -> str:
    """Return the path of a file within its source, without `.gz` or `.xz`."""
    return Path(location_of(file, source)).with_name(bare_name(file)).as_posix()


def bounded_lines(
    stream: IO[bytes], longest: int = LONGEST, *, keep_ends: bool = False
) -> Iterator[bytes | None]:
    """Yield lines, and None in the place of each line that is too long.

    Args:
        stream: a binary stream.
        longest: largest number of bytes in a line.
        keep_ends: whether lines keep their line ends.
    """
    while line := stream.readline(longest + 2):
        if len(line) <= longest or line.endswith(b"\n"):
            yield line if keep_ends else line.rstrip(b"\r\n")
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(longest)
        yield None


_DIGITS = 9  # most digits of an offset, a line or a token number in any document


def text_lines(file: Path, *, keep_ends: bool = False) -> Iterator[tuple[int, str | Reason]]:
    """Yield (line number from 1, the line or the reason why it cannot be read).

    Raises:
        UNREADABLE: the file is damaged or half-written.
        TooMuch: the file is a decompression bomb.
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


def json_objects(file: Path) -> Iterator[tuple[int, dict[str, Any] | Reason]]:
    """Yield (number, object or the reason why there is none) of each line that is not blank."""
    for number, line in text_lines(file):
        if isinstance(line, Reason):
            yield number, line
            continue
        line = line.removeprefix(BOM)  # of a file that was joined from several
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # also a number of thousands of digits
            row = None
        yield number, row if isinstance(row, dict) else Reason.NOT_JSON


def read_items(
    path: Path,
    suffix: str | tuple[str, ...],
    quarantine: Quarantine,
    items_of: Callable[[Path], Iterable[tuple[int, Item | Reason | None]]],
) -> Iterator[Item]:
    """Yield the items of a file, or of a folder's files of the given suffix, and count them.

    Args:
        path: a file or folder.
        suffix: for example `.jsonl`, or several of them.
        quarantine: counts accepted, rejected and omitted items.
        items_of: yields, for each item of a file, the number of its line (0: it is the whole file),
            and the item, the reason why it is rejected, or None if it is left out.

    Raises:
        BadInput: as `input_files` and `refuse_damaged_file`.
    """
    for file in input_files(path, suffix, quarantine):
        with refuse_damaged_file(path, file, quarantine):
            for number, item in items_of(file):
                if item is None:
                    quarantine.left_out += 1
                elif isinstance(item, Reason):
                    line = f"{unpacked_name(file, path)}:{number}"
                    quarantine.reject(item, line if number else location_of(file, path))
                else:
                    quarantine.taken += 1
                    yield item


def table_rows(
    file: Path, split: Callable[[str], list[str]], names_of: Callable[[list[str]], list[str]]
) -> Iterator[tuple[int, dict[str, str] | Reason]]:
    """Yield (number, cells by column name or the reason why there are none) of each row.

    Args:
        file: a table; blank lines are skipped, and the first other line is its header.
        split: line -> cells.
        names_of: header -> names of the columns; refuses a header that lacks a column.
    """
    columns: list[str] | None = None
    for number, line in text_lines(file):
        if isinstance(line, str) and not line.strip():
            continue
        cells = line if isinstance(line, Reason) else split(line)
        if columns is None:
            columns = names_of([] if isinstance(cells, Reason) else cells)
        elif isinstance(cells, Reason):
            yield number, cells
        elif len(cells) != len(columns):
            yield number, Reason.WRONG_COLUMNS
        else:
            yield number, dict(zip(columns, cells, strict=True))


def offset(digits: str) -> int | None:
    """Return the whole number, or None if it has too many digits for any document."""
    digits = digits.lstrip("0") or "0"
    return int(digits) if len(digits) <= _DIGITS else None
