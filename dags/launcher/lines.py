"""The lines that a container says, each of them whole.

The engine sends standard output and standard error in pieces, as they come: between the two halves
of a line on one stream there may be a line of the other.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from typing import Literal

Stream = Literal["stdout", "stderr"]
_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


def whole_lines(
    pieces: Iterable[tuple[bytes | None, bytes | None]],
) -> Iterator[tuple[Stream, str]]:
    """Yield each line that is not empty with the stream it came on, once its end has come.

    Args:
        pieces: what came on standard output and on standard error, None for nothing; lines and
            UTF-8 characters may be cut anywhere.
    """
    decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in _STREAMS}
    begun = dict.fromkeys(_STREAMS, "")
    for both in pieces:
        for stream, piece in zip(_STREAMS, both, strict=True):
            *lines, begun[stream] = (begun[stream] + decoders[stream].decode(piece or b"")).split(
                "\n"
            )
            yield from ((stream, line.rstrip()) for line in lines if line.strip())
    for stream in _STREAMS:
        rest = begun[stream] + decoders[stream].decode(b"", final=True)
        if rest.strip():
            yield stream, rest.rstrip()
