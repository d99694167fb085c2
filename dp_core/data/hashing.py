"""Names and coins of privacy units: keyed, stable hashes of a unit's own content.

Every choice about private text is drawn by the name of a unit and a key: whether the unit is held
out, which of its rows are kept, which canaries it carries, how its rows are masked, in which fold
it lies. These choices must be drawn *for each unit independently of all other data*. Otherwise
adding one unit could change the contribution of another unit, and no sensitivity bound would hold.
So a coin is a keyed hash of the unit's name, the same on every machine and in every order of
reading, and a name is a function of the named content alone: adding or removing one unit leaves the
name of every other unit as it was. No name holds a number of a line, row, article or tuple.

1. An id that the source gives (`document_id`, ROW_ID, the path of a file) is part of the unit's own
   content. All text of a patient with the same id is one document.
2. A document without an id is named by a digest of its patient, its admission and its text.
3. Exact copies of such a document are separate documents: the digest is followed by the number of
   the copy. The copies are equal, so removing one copy removes only the last name.
4. An example is named by a digest of its patient, of its document's id where the source gives one,
   and of its words. Exact copies are separate units that share their name, and so their coins.

docs/proofs.md states the assumption that these rules establish, and proves it.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def digest64(key: bytes, purpose: str, *parts: str) -> int:
    """Return 64 bits, uniform over keys, of the given parts (BLAKE2b, parts length-prefixed).

    Args:
        key: any number of bytes; a key of more than 64 bytes is hashed first.
        purpose: separates uses of one key.
        parts: the subject of the draw, for example a unit's id.
    """
    short = key if len(key) <= 64 else hashlib.sha256(key).digest()
    return int.from_bytes(_blake2b((purpose, *parts), 8, short), "little")


def _blake2b(parts: Iterable[str], size: int, key: bytes = b"") -> bytes:
    """Return the BLAKE2b digest of length-prefixed parts."""
    h = hashlib.blake2b(key=key, digest_size=size)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.digest()


def coin(key: bytes, purpose: str, *parts: str) -> float:
    """Return a number in [0, 1), uniform over keys; see `digest64` for the arguments."""
    return (digest64(key, purpose, *parts) >> 11) * 2.0**-53


def generator(key: bytes, purpose: str, *parts: str) -> random.Random:
    """Return a generator of public coins; never use it for noise or sampling."""
    return random.Random(digest64(key, purpose, *parts))  # noqa: S311


def seed_key(seed: int) -> bytes:
    """Return the key of a public seed."""
    return b"public seed " + str(seed).encode()


U64 = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


def mix(z: U64) -> U64:
    """Return a bijective scrambling of 64-bit words, elementwise."""
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def bits(keys: U64, stream: int, width: int) -> U64:
    """Return uint64 `[len(keys), width]`: column j depends on (key, stream, j) alone.

    Args:
        keys: uint64 `[n]`.
        stream: separates uses of the same keys, 0 to 2^32 - 1.
        width: counters 0 to width - 1.
    """
    # Scramble the key first, because close keys would otherwise use shifted copies of one sequence.
    start = mix(keys ^ mix(np.array([stream + 1], np.uint64) * _GAMMA))
    counters = np.arange(1, width + 1, dtype=np.uint64) * _GAMMA
    return mix(start[:, None] + counters[None, :])


def fold(keys: U64, *numbers: int) -> U64:
    """Return keys bound to further numbers, for example an epoch or a step."""
    for number in numbers:
        keys = mix(keys ^ mix(np.array([number], np.uint64) + _GAMMA))
    return keys


def drawn(size: int, number: int, key: bytes, purpose: str, *parts: str) -> Places:
    """Return places drawn uniformly without replacement by public coins, in ascending order.

    Args:
        size: number of places to draw from.
        number: number of places drawn, at most `size`.
        key: as for `digest64`.
        purpose: as for `digest64`.
        parts: the subject of the draw, for example a unit's id.
    """
    coins = bits(np.array([digest64(key, purpose, *parts)], np.uint64), 0, size)[0]
    # Taking the places with the smallest coins makes every set of places equally likely.
    return np.sort(np.argsort(coins, kind="stable")[:number])


_ROUNDS = 10  # four suffice for large halves, but small halves mix slowly


class ShuffledRange:
    """A pseudo-random permutation of range(size).

    Args:
        size: number of items, 1 or more.
        seed: a public seed.
        epoch: every epoch has a different permutation.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))  # bits of each half
        self._keys = fold(np.arange(_ROUNDS, dtype=np.uint64), seed, epoch)

    def items(self, places: Places) -> Places:
        """Return the items at these places of the order.

        Args:
            places: (n,) from 0 to size - 1.
        """
        values = self._network(places.astype(np.uint64))
        while (beyond := values >= self._size).any():  # at most 3 of 4 numbers are out of range
            values[beyond] = self._network(values[beyond])
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for key in self._keys:
            left, right = right, left ^ (fold(right ^ key, 0) & mask)
        return (left << self._half) | right


_DERIVED = "content:"  # prefix of every derived name; ids of a source with this prefix are ignored


def content_name(kind: str, *parts: str) -> str:
    """Return a name for content: 128 bits of BLAKE2b, the same on every machine.

    Args:
        kind: separates the kinds of named content.
        parts: the content; equal parts have the same name, and different parts different names.
    """
    return _DERIVED + _blake2b((kind, *parts), 16).hex()


def given_id(document_id: str) -> str:
    """Return an id that a source has given, or an empty string for a derived name.

    A source whose id looks like a derived name could otherwise join the document of another
    source.
    """
    return "" if document_id.startswith(_DERIVED) else document_id


def document_name(patient_id: str, document_id: str, admission_id: str, text: str) -> str:
    """Return the document's id in the source, or a name derived from the content without an id."""
    return given_id(document_id) or content_name("document", patient_id, admission_id, text)


def document_unit_id(patient_id: str, document_id: str) -> str:
    """Return the unit id of a document; document ids may repeat across patients."""
    # The length makes the pair unambiguous whatever characters the ids hold.
    return f"{len(patient_id)}:{patient_id}/{document_id}"


def example_name(patient_id: str, document_id: str, words: str) -> str:
    """Return the name of an example.

    The digest omits a derived document name, which would change with other examples of the text.
    """
    return content_name("example", patient_id, given_id(document_id), words)


def with_copies_numbered(names: Iterable[str]) -> list[str]:
    """Append `#1`, `#2`, … to each repetition of a derived name."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        copy = "" if given_id(name) or not seen[name] else f"#{seen[name]}"
        seen[name] += 1
        numbered.append(name + copy)
    return numbered
