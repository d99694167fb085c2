"""Files packed by gzip or xz, unpacked piece by piece: a small one cannot become a huge one."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Protocol, cast

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
