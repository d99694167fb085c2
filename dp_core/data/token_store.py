"""Rows of token ids on disk, memory-mapped, with random access by privacy unit.

Each file of a store holds one array, row-major and little-endian: `tokens.bin` (`[rows, S]`,
uint16, or uint32 for large vocabularies), `lengths.bin`, `unit_rows.bin` and `unit_keys.bin`.
`store.json` is written last, so an interrupted writer leaves a folder that is not a store.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, PositiveInt
from tokenizers import Tokenizer

from dp_core.data.corpus import Shard, read_shard
from dp_core.data.hashing import bits, digest64
from dp_core.data.privacy_units import Unit, bounded_sample, is_held_out, units_of
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.privacy.mechanisms import PrivacyUnit

_VERSION: Literal[2] = 2
_MARK = "store.json"
_COLUMNS = {"lengths": "<i4", "unit_rows": "<i8", "unit_keys": "<u8"}
_FLUSH_BYTES = 1 << 23  # bytes per write to a file
_CHECKED = 1 << 16  # values checked at once
_DEVELOPMENT = 8  # stream of the generator that chooses the development part
# Exceptions that reading damaged files can raise.
_DAMAGED = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of some units in the layout of a store. Private.

    Attributes:
        tokens: `[rows, S]` ids, padded with [PAD].
        lengths: int32 `[rows]`, the number of ids of each row without padding.
        unit_rows: int64 `[units + 1]`; rows of unit u are `unit_rows[u]` to `unit_rows[u + 1]`.
        unit_keys: uint64 `[units]`, a stable hash of each unit's id. Masks and dropout are keyed
            by it, so that they do not depend on a unit's place among others.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    unit_rows: npt.NDArray[np.int64]
    unit_keys: npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class TokenStore(PackedRows):
    """An open store; `tokens` is a memory map.

    Attributes:
        sequence_length: S.
        vocabulary_size: every id is below it.
        digest: SHA-256 of the content in hex. The digest of private text is private: publish only
            a keyed digest (HMAC) of it.
    """

    sequence_length: int
    vocabulary_size: int
    digest: str

    @property
    def n_units(self) -> int:
        """Number of units with at least one row. Private: never print it for private text."""
        return len(self.unit_keys)

    @property
    def n_rows(self) -> int:
        """Number of rows. Private, as `n_units`."""
        return len(self.lengths)

    def rows_of(self, unit: int) -> range:
        """Return the row numbers of a unit."""
        return range(int(self.unit_rows[unit]), int(self.unit_rows[unit + 1]))

    @classmethod
    def open(cls, folder: Path | str) -> TokenStore:
        """Open a finished store.

        Raises:
            BadInput: no store, an unfinished store, or files that are inconsistent.
        """
        folder = Path(folder)
        try:
            about = _About.model_validate_json((folder / _MARK).read_bytes())
            rows = _mapped(folder, about.dtype, about.sequence_length)
            _check_rows(rows)
        except _DAMAGED as error:
            raise BadInput(
                "not a finished token store",
                where=str(folder),
                fix="Run the token_store step again.",
            ) from error
        return cls(
            **vars(rows),
            sequence_length=about.sequence_length,
            vocabulary_size=about.vocabulary_size,
            digest=about.digest,
        )

    def content_digest(self) -> str:
        """Return the digest of the files' present content, to compare with `digest`."""
        return _digest(self.sequence_length, self.vocabulary_size, self)


class _About(BaseModel):
    """The content of `store.json`."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: Literal[2]
    sequence_length: PositiveInt
    vocabulary_size: PositiveInt
    dtype: Literal["<u2", "<u4"]
    digest: str


class RowPacker:
    """Packs rows, unit by unit, into the arrays of a store.

    Args:
        sequence_length: S.
        vocabulary_size: every id must be below it.
        key: keys the hash of the unit ids; any stable bytes.
        pad: the id of [PAD].
    """

    def __init__(
        self, sequence_length: int, vocabulary_size: int, *, key: bytes = b"", pad: int = 0
    ) -> None:
        self._length, self._vocabulary = sequence_length, vocabulary_size
        self._key, self._pad = key, pad
        self.dtype: Literal["<u2", "<u4"] = "<u2" if vocabulary_size <= 1 << 16 else "<u4"
        self._tokens, self._lengths = bytearray(), bytearray()
        self._unit_rows, self._unit_keys = [0], list[int]()

    def add_unit(self, unit_id: str, rows: Sequence[Sequence[int]]) -> None:
        """Append a unit's rows; a unit without rows is ignored.

        Raises:
            BadInput: a row that is empty or too long, or an id outside the vocabulary.
        """
        if not rows:
            return
        lengths = [len(row) for row in rows]
        if min(lengths) < 1 or max(lengths) > self._length:
            raise BadInput(
                f"a row must have 1 to {self._length} ids", where="token store", fix="Cut rows."
            )
        block = np.full((len(rows), self._length), self._pad, np.int64)
        for i, row in enumerate(rows):
            block[i, : lengths[i]] = row
        if block.min() < 0 or block.max() >= self._vocabulary:
            raise BadInput(
                f"an id is outside the vocabulary of {self._vocabulary}",
                where="token store",
                fix="Use the tokenizer of this vocabulary.",
            )
        self._tokens += block.astype(self.dtype).tobytes()
        self._lengths += np.array(lengths, "<i4").tobytes()
        self._unit_rows.append(self._unit_rows[-1] + len(rows))
        self._unit_keys.append(digest64(self._key, "unit", unit_id))

    def take(self) -> PackedRows:
        """Return the rows added since the previous call."""
        packed = PackedRows(
            np.frombuffer(self._tokens, self.dtype).reshape(-1, self._length),
            np.frombuffer(self._lengths, "<i4"),
            np.array(self._unit_rows, np.int64),
            np.array(self._unit_keys, np.uint64),
        )
        self._tokens, self._lengths = bytearray(), bytearray()
        self._unit_rows, self._unit_keys = [0], []
        return packed


class TokenStoreWriter(RowPacker):
    """Writes a store, unit by unit, and replaces an older store in the folder.

    Args:
        folder: output folder.
        sequence_length: S.
        vocabulary_size: every id must be below it.
        key: keys the hash of the unit ids; any stable bytes.
        pad: the id of [PAD].
    """

    def __init__(
        self,
        folder: Path | str,
        sequence_length: int,
        vocabulary_size: int,
        *,
        key: bytes = b"",
        pad: int = 0,
    ) -> None:
        super().__init__(sequence_length, vocabulary_size, key=key, pad=pad)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / _MARK).unlink(missing_ok=True)
        for name in ("tokens", *_COLUMNS):
            _file(self._folder, name).write_bytes(b"")
        _file(self._folder, "unit_rows").write_bytes(bytes(8))  # the first unit begins at row 0
        self._rows = 0

    def add_unit(self, unit_id: str, rows: Sequence[Sequence[int]]) -> None:
        """Append a unit's rows; see `RowPacker.add_unit`."""
        super().add_unit(unit_id, rows)
        if len(self._tokens) >= _FLUSH_BYTES:
            self._append(self.take())

    def add_packed(self, rows: PackedRows) -> None:
        """Append packed rows of the same sequence length and vocabulary."""
        self._append(self.take())
        self._append(rows)

    def add_units_of(self, store: TokenStore, first: int, last: int) -> None:
        """Append units `first` to `last` − 1 of another store, with their keys.

        Raises:
            BadInput: the other store has another sequence length or vocabulary size.
        """
        if (store.sequence_length, store.vocabulary_size) != (self._length, self._vocabulary):
            raise BadInput(
                "two stores differ in sequence length or vocabulary size", where="token store"
            )
        start, end = int(store.unit_rows[first]), int(store.unit_rows[last])
        self.add_packed(
            PackedRows(
                store.tokens[start:end],
                store.lengths[start:end],
                store.unit_rows[first : last + 1] - start,
                store.unit_keys[first:last],
            )
        )

    def _append(self, rows: PackedRows) -> None:
        arrays = vars(rows) | {"unit_rows": rows.unit_rows[1:] + self._rows}
        for name, dtype in {"tokens": self.dtype, **_COLUMNS}.items():
            with _file(self._folder, name).open("ab") as file:
                file.write(arrays[name].astype(dtype).tobytes())
        self._rows += len(rows.lengths)

    def finish(self) -> TokenStore:
        """Complete the store and open it.

        Raises:
            BadInput: no unit had a row.
        """
        self._append(self.take())
        if not self._rows:
            raise PrivateTextRefusal(
                "there is no text", where="token store", fix="Check the corpus."
            )
        rows = _mapped(self._folder, self.dtype, self._length)
        about = _About(
            version=_VERSION,
            sequence_length=self._length,
            vocabulary_size=self._vocabulary,
            dtype=self.dtype,
            digest=_digest(self._length, self._vocabulary, rows),
        )
        mark = self._folder / f"{_MARK}.partial"
        mark.write_text(about.model_dump_json() + "\n")
        mark.replace(self._folder / _MARK)
        return TokenStore.open(self._folder)


def joined(folder: Path, store: TokenStore, more: TokenStore, units: Iterable[int]) -> TokenStore:
    """Write a store that holds all units of one store, followed by some units of another.

    Args:
        folder: output folder; an older store there is replaced.
        store: the store of which all units are written.
        more: the other store, of the same sequence length and vocabulary.
        units: numbers of the units of `more`.

    Raises:
        BadInput: the stores differ in sequence length or vocabulary size.
    """
    writer = TokenStoreWriter(folder, store.sequence_length, store.vocabulary_size)
    for first in range(0, store.n_units, _CHECKED):  # in parts, to bound memory
        writer.add_units_of(store, first, min(first + _CHECKED, store.n_units))
    for unit in units:
        writer.add_units_of(more, unit, unit + 1)
    return writer.finish()


def divided(store: TokenStore, share: float) -> tuple[TokenStore, TokenStore]:
    """Return the units of a development part, and all other units, as two stores in memory.

    The part of a unit is a function of its key, so adding or removing other units does not change
    it. A part may have no unit.

    Args:
        store: the rows of held-out units.
        share: share of the development part.
    """
    coins = (bits(store.unit_keys, _DEVELOPMENT, 1)[:, 0] >> np.uint64(11)) * 2.0**-53
    rows_of_unit = np.diff(store.unit_rows)

    def units_where(chosen: npt.NDArray[np.bool_]) -> TokenStore:
        rows = np.repeat(chosen, rows_of_unit)
        packed = PackedRows(
            store.tokens[rows],
            store.lengths[rows],
            np.concatenate([[0], np.cumsum(rows_of_unit[chosen])]),
            store.unit_keys[chosen],
        )
        digest = _digest(store.sequence_length, store.vocabulary_size, packed)
        return replace(store, **vars(packed), digest=digest)

    return units_where(coins < share), units_where(coins >= share)


def _check_rows(rows: PackedRows) -> None:
    """Check that the arrays are consistent, before they are used as indices.

    Raises:
        ValueError: the arrays are inconsistent.
    """
    lengths, unit_rows, units = rows.lengths, rows.unit_rows, len(rows.unit_keys)
    if len(rows.tokens) != len(lengths) or len(unit_rows) != units + 1:
        raise ValueError("shapes")
    if unit_rows[0] != 0 or unit_rows[-1] != len(lengths):
        raise ValueError("rows")
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= rows.tokens.shape[1]:
        raise ValueError("lengths")
    for start in range(0, units, _CHECKED):  # in parts, to bound memory
        if not (np.diff(unit_rows[start : start + _CHECKED + 1]) > 0).all():
            raise ValueError("units")


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.bin"


def _mapped(folder: Path, dtype: str, length: int) -> PackedRows:
    """Return memory maps of the arrays of a store."""
    arrays = {}
    for name, of_array in {"tokens": dtype, **_COLUMNS}.items():
        path = _file(folder, name)
        if path.stat().st_size % np.dtype(of_array).itemsize:
            raise ValueError("size")
        arrays[name] = np.asarray(np.memmap(path, of_array, "r"))
    return PackedRows(**arrays | {"tokens": arrays["tokens"].reshape(-1, length)})


def _digest(length: int, vocabulary: int, rows: PackedRows) -> str:
    h = hashlib.sha256(f"token store {_VERSION} {length} {vocabulary}".encode())
    for array in (rows.tokens, rows.lengths, rows.unit_rows, rows.unit_keys):
        h.update(f"{array.dtype.str}{array.shape}".encode())
        step = max(1, _FLUSH_BYTES // max(1, array[:1].nbytes))
        for start in range(0, len(array), step):
            h.update(np.ascontiguousarray(array[start : start + step]).data)
    return h.hexdigest()


_UNITS_PER_CALL = 256  # enough to keep the tokenizer's threads busy


def rows_of_units(
    units: Iterable[Unit],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    max_examples_per_unit: int,
    key: bytes,
) -> Iterator[tuple[Unit, list[tuple[int, list[int]]]]]:
    """Yield every unit with its rows, at most `max_examples_per_unit`.

    A row comes with the number of the text from which it is cut.

    Args:
        units: the privacy units.
        tokenizer: from `dp_core.vocabulary.tokenizer_files.load`.
        sequence_length: S, the largest number of ids in a row, including [CLS] and [SEP].
        max_examples_per_unit: number of rows kept, drawn for each unit independently of all others.
        key: public coins for that draw.
    """
    if sequence_length < 3:
        raise BadInput("no room between [CLS] and [SEP]", where="sequence_length", fix="Use 3+.")
    special = SpecialIds.of(tokenizer)
    source = iter(units)
    while batch := list(itertools.islice(source, _UNITS_PER_CALL)):
        texts = [text for unit in batch for text in unit.texts]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for unit in batch:
            rows = [
                (number, [special.cls, *part, special.sep])
                for number, encoding in enumerate(itertools.islice(encoded, len(unit.texts)))
                for part in _even_parts(encoding.ids, sequence_length - 2)
            ]
            yield unit, bounded_sample(rows, max_examples_per_unit, unit.unit_id, key)


def _even_parts(ids: list[int], room: int) -> list[list[int]]:
    """Cut ids into as few parts of at most `room` as possible, of nearly equal length."""
    n = -(-len(ids) // room)
    cuts = [len(ids) * i // n for i in range(n + 1)] if n else []
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]


Planted = Callable[[str, list[list[int]]], list[list[int]]]


@dataclass(frozen=True)
class ShardRows:
    """Cuts the units of a shard into rows, separately for training and held-out units.

    Attributes:
        unit: the protected unit.
        words_per_unit: N, for the unit `example`.
        tokenizer: the tokenizer as JSON (`Tokenizer.to_str`).
        sequence_length: S.
        max_examples_per_unit: largest number of rows of a unit.
        key: public coins.
        holdout: share of held-out units.
        plant: adds canaries to the rows of a training unit, given its id.
        noted: number of held-out units for which the texts are returned, too.
    """

    unit: PrivacyUnit
    words_per_unit: int
    tokenizer: str
    sequence_length: int
    max_examples_per_unit: int
    key: bytes
    holdout: float
    plant: Planted
    noted: int = 0

    def __call__(self, shard: Shard) -> CutShard:
        """Return the rows of the shard's units."""
        tokenizer = Tokenizer.from_str(self.tokenizer)
        tokenizer.encode_special_tokens = True  # "[MASK]" in a note is text; JSON omits this flag
        train, held_out = (
            RowPacker(self.sequence_length, tokenizer.get_vocab_size(), key=self.key)
            for _ in range(2)
        )
        texts: list[list[str]] = []
        count = 0
        cut = rows_of_units(
            units_of(read_shard(shard), self.unit, self.words_per_unit),
            tokenizer,
            sequence_length=self.sequence_length,
            max_examples_per_unit=self.max_examples_per_unit,
            key=self.key,
        )
        for unit, located in cut:
            count += 1
            rows = [row for _, row in located]
            if is_held_out(unit.unit_id, self.holdout, self.key):
                held_out.add_unit(unit.unit_id, rows)
                if len(texts) < self.noted:
                    texts.append(unit.texts)
            else:
                train.add_unit(unit.unit_id, self.plant(unit.unit_id, rows))
        return CutShard(count, train.take(), held_out.take(), texts)


@dataclass(frozen=True)
class CutShard:
    """The rows of a shard, cut by `ShardRows`. Private.

    Attributes:
        units: number of units, including units without rows.
        train: rows of the units that train.
        held_out: rows of the held-out units.
        texts: texts of the first held-out units.
    """

    units: int
    train: PackedRows
    held_out: PackedRows
    texts: list[list[str]]
