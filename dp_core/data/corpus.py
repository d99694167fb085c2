"""Documents with normalised ids, and the normal form of a corpus.

A corpus in normal form is a set of shards: Parquet files, each with a contiguous range of a hash of
the patient, or of the document if it has no patient. So all text of a patient or a document is in
one shard. The name of a document is a function of the document's content (`hashing`). Rows are
sorted by hash, patient, document, admission and text, so the corpus is a function of the multiset
of its documents: the order of the source does not change a byte of it, and the number of shards
does not change the order of the documents. `corpus.json` holds the format and the digest of every
shard and is written last: a folder without it is not a complete corpus. File names do not contain
the number of shards, which is a setting.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dp_core.data.hashing import digest64, document_name, with_copies_numbered
from dp_core.data.readers.sources import UNREADABLE
from dp_core.errors import BadInput, PrivateTextRefusal

Item = TypeVar("Item")
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_ROUNDED = re.compile(r"-?[0-9]+(?:[.,][0-9]+)?[eE]\+[0-9]+")
_MISSING = frozenset(("NULL", "null", "\\N", "None", "nan", "NaN", "NaT", "<NA>", "NA", "N/A"))
_EXACT = 2**53  # below this limit every float represents a single integer


def normalised_id(value: object) -> str:
    """Return the canonical form of a patient, document or admission id; empty for a missing id.

    Every reader normalises its ids with this function, so that all spellings of a patient's id in
    a table or export are one privacy unit. Characters are in Unicode's normal form KC (Unicode
    Standard Annex #15), in which wide digits are digits. Invisible characters of format, as copied
    text contains, and surrounding white space are removed. A whole number has no decimal point,
    since tables that were once read as floats contain `7.0`. So `7`, `7.0`, "7", "7.0" and " 7 "
    are the same id. "07" is another id, because leading zeros can be part of a number on paper.
    Upper and lower case are kept.

    Raises:
        ValueError: the value is neither text nor a whole number, or it is a float too large to
            represent a single integer.
    """
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("not an id")
    text = str(value)
    if not text.isascii():
        visible = "".join(c for c in text if unicodedata.category(c) != "Cf")
        text = unicodedata.normalize("NFKC", visible)
    text = text.strip()
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


def id_in_cell(value: object) -> str:
    """Return the canonical form of an id in a table; empty for a missing id.

    A mark of missing values, as databases, pandas and R write them, is no id: all patients without
    one would be one unit. Nor is a number in scientific notation (1.23457E+11), of which a
    spreadsheet has kept six digits: it can be the id of many patients.

    Raises:
        ValueError: as `normalised_id`.
    """
    text = normalised_id(value)
    return "" if text in _MISSING or _ROUNDED.fullmatch(text) else text


@dataclass(frozen=True, slots=True)
class Document:
    """One note, article or message.

    The constructor normalises the ids (`normalised_id`).

    Args:
        document_id: the id that the source gives; texts of one patient that share it are one
            document. Empty where the source gives none: the corpus then names the document by its
            content, and each such text is a document.
        patient_id: the patient; empty where the source names none.
        text: the text as read, not normalised.
        admission_id: the hospital stay; empty where the source names none.
    """

    document_id: str
    patient_id: str
    text: str
    admission_id: str = ""

    def __post_init__(self) -> None:
        for name in ("document_id", "patient_id", "admission_id"):
            object.__setattr__(self, name, normalised_id(getattr(self, name)))


MARK = "corpus.json"  # the file that completes a corpus
_VERSION = 3
SHARDS = 16  # default of the setting `corpus_shards`, the minimum number of shards
SHARD_TEXT = 1 << 26  # largest average bytes of text per shard; more text makes more shards
# The key is public and constant, so that equal corpora are equal bytes.
_KEY = b"shards of a corpus"
_PARTS = 256  # minimum number of files over which rows are spread, by ranges of hashes
_PIECE_TEXT = 1 << 23  # average bytes of text that are sorted in memory at once
_TOGETHER = 1 << 21  # characters per table
_BUFFERED = 1 << 25  # bytes of tables in memory before they are spilled to files
_ROW_GROUP = 1 << 24  # bytes of text per row group, which a reader holds in memory
_TEXT = pa.large_string()
COLUMNS = pa.schema(
    [(name, _TEXT) for name in ("patient_id", "document_id", "admission_id", "text")]
)
_SCRATCH = pa.schema([("hash", pa.uint64()), *COLUMNS])
_DAMAGED = (*UNREADABLE, pa.ArrowException, ValueError, KeyError, TypeError)


@dataclass(frozen=True, slots=True)
class Shard:
    """The location and digest of one shard of a corpus, all that a reader needs.

    A subclass whose file is not on a local disk overrides `open` to fetch the file.

    Attributes:
        uri: URI of the shard's file; `file://` here, other schemes in subclasses.
        sha256: SHA-256 of the file in hex, as `corpus.json` records it.
    """

    uri: str
    sha256: str

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.uri.rpartition("/")[2]

    def open(self) -> BufferedReader:
        """Open the file as a seekable binary stream."""
        return Path(unquote(self.uri.removeprefix("file://"))).open("rb")


def write_corpus(documents: Iterable[Document], folder: Path, shards: int = SHARDS) -> None:
    """Write documents, in any order, as a corpus in normal form, and replace an older corpus.

    Memory holds some megabytes of the documents, whatever their number.

    Args:
        documents: the documents; a question mark replaces each lone surrogate, which UTF-8 cannot
            encode.
        folder: output folder.
        shards: minimum number of shards. The number is doubled until a shard holds at most
            `SHARD_TEXT` bytes of text on average, which bounds the memory of a worker that
            processes one shard. The order of the documents does not depend on the number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).unlink(missing_ok=True)
    for old in folder.glob(_name("*")):
        old.unlink()
    with _scratch(folder) as scratch:
        rows = _Rows(scratch, shards)
        for block in grouped_by_size(documents, lambda d: len(d.text) + 256, _TOGETHER):
            rows.add(_table(block))
        while rows.text > shards * SHARD_TEXT:
            shards *= 2
        digests = _write_shards(rows, folder, shards)
    mark = folder / f"{MARK}.partial"
    about = {"format": "confide-corpus", "version": _VERSION, "shards": digests}
    mark.write_text(json.dumps(about, indent=1) + "\n")
    mark.replace(folder / MARK)


def remake_shards(documents: Iterable[Document], folder: Path, names: Collection[str]) -> None:
    """Write some shards of a finished corpus again and leave all other files untouched.

    Args:
        documents: all documents of the source.
        folder: folder of the corpus, with its `corpus.json`.
        names: names of the shard files to write.

    Raises:
        BadInput: the folder holds no finished corpus, or a digest of a new shard differs from the
            digest in `corpus.json`. Shards with different digests are discarded.
    """
    expected = {shard.name: shard.sha256 for shard in shards_of(folder)}
    with _scratch(folder) as scratch:
        write_corpus(documents, scratch, len(expected))
        made = {shard.name: shard.sha256 for shard in shards_of(scratch)}
        if any(made.get(name) != expected[name] for name in names):
            raise PrivateTextRefusal(
                "its shards cannot be made again as they were",
                where=str(folder),
                fix="Delete the folder and run the corpus step again.",
            )
        for name in names:
            (scratch / name).replace(folder / name)


def is_shard(name: str) -> bool:
    """Return whether this is the file name of a shard."""
    return re.fullmatch(_name("[0-9]{4,}"), name) is not None


def is_corpus(folder: Path) -> bool:
    """Return whether a folder holds a finished corpus."""
    return (folder / MARK).is_file()


def shards_of(folder: Path) -> list[Shard]:
    """Return the shards of a corpus in normal form, in the order of its units.

    Raises:
        BadInput: the folder holds no finished corpus, or a corpus of another version.
    """
    try:
        return shards_of_mark((folder / MARK).read_bytes(), folder.resolve().as_uri())
    except OSError:
        raise _unfinished(str(folder)) from None


def shards_of_mark(mark: bytes, folder: str) -> list[Shard]:
    """Return the shards that a `corpus.json` names; see `shards_of`.

    Args:
        mark: content of `corpus.json`.
        folder: URI of the folder that contains the file.
    """
    try:
        about = json.loads(mark)
        version = about["version"]
        digests = dict(about["shards"]) if version == _VERSION else {}
        shards = [Shard(f"{folder}/{name}", str(digest)) for name, digest in digests.items()]
    except (ValueError, KeyError, TypeError):
        raise _unfinished(folder) from None
    if version != _VERSION:
        raise BadInput(
            f"corpus version {version} is not {_VERSION}", where=folder, fix="Import it again."
        )
    if not digests or [*digests] != [_name(f"{n:04d}") for n in range(len(digests))]:
        raise _unfinished(folder)
    return shards


def _unfinished(folder: str) -> BadInput:
    return BadInput("not a finished corpus", where=folder, fix="Run the corpus step.")


def open_corpus(folder: Path) -> Iterator[Document]:
    """Yield the documents of a corpus in normal form, grouped by patient and document.

    Raises:
        BadInput: no finished corpus, a corpus of another version, or a damaged shard.
    """
    return documents_of(shards_of(folder))


def documents_of(shards: Iterable[Shard]) -> Iterator[Document]:
    """Yield the documents of several shards in order; see `read_shard`."""
    return itertools.chain.from_iterable(map(read_shard, shards))


def read_shard(shard: Shard) -> Iterator[Document]:
    """Yield the documents of one shard, in its order.

    Raises:
        BadInput: the file is missing or damaged.
    """
    try:
        with shard.open() as source:
            if hashlib.file_digest(source, "sha256").hexdigest() != shard.sha256:
                raise ValueError("another digest")
            source.seek(0)
            with pq.ParquetFile(source) as file:
                for number in range(file.num_row_groups):
                    table = file.read_row_group(number, use_threads=False).cast(COLUMNS)
                    yield from (Document(**row) for row in table.to_pylist())
    except _DAMAGED:
        # `from None`: the message of the cause may quote private text.
        raise BadInput(
            "a shard of the corpus is missing or damaged",
            where=shard.uri.removeprefix("file://"),
            fix="Run the corpus step again: it makes this file anew.",
        ) from None


# --- writing


def _name(number: str) -> str:
    return f"shard-{number}.parquet"


def _private(path: Path) -> Path:
    """Create a file that only its owner can read, since it holds private text."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
        yield Path(scratch)


def grouped_by_size(
    items: Iterable[Item], size_of: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """Yield the items, in order, in lists whose sizes add up to about the limit."""
    total = 0

    def block_of(item: Item) -> int:
        nonlocal total
        total += size_of(item)
        return total // limit

    for _, block in itertools.groupby(items, key=block_of):
        yield list(block)


def _table(documents: Sequence[Document]) -> pa.Table:
    """Return documents as a table of `_SCRATCH`."""
    rows = [
        (
            d.patient_id,
            document_name(d.patient_id, d.document_id, d.admission_id, d.text),
            d.admission_id,
            d.text,
        )
        for d in documents
    ]
    # A document without a patient is a group by itself.
    groups = (("patient", row[0]) if row[0] else ("document", row[1]) for row in rows)
    hashes = pa.array((digest64(_KEY, *group) for group in groups), pa.uint64())
    columns = map(arrow_strings, zip(*rows, strict=True))
    return pa.Table.from_arrays([hashes, *columns], schema=_SCRATCH)


def _range_numbers(table: pa.Table, ranges: int) -> NDArray[np.int64]:
    """Return each row's range number among ranges of equal size: by the hash's first 32 bits."""
    high = table["hash"].to_numpy() >> np.uint64(32)
    numbers: NDArray[np.uint64] = high * np.uint64(ranges) >> np.uint64(32)
    return numbers.astype(np.int64)


class _Rows:
    """Rows sorted into ranges of hashes, in memory up to a limit and in files beyond it.

    Args:
        scratch: folder for the files.
        ranges: number of output ranges; doubled here until it reaches `_PARTS`.
    """

    def __init__(self, scratch: Path, ranges: int) -> None:
        while ranges < _PARTS:
            ranges *= 2
        self.scratch, self._ranges = scratch, ranges
        self._tables: dict[int, list[pa.Table]] = {}
        self._buffered = 0
        self.text = 0  # bytes

    def add(self, table: pa.Table) -> None:
        places = _range_numbers(table, self._ranges)
        order = np.argsort(places, kind="stable")
        table, places = table.take(pa.array(order)), places[order]
        numbers, starts = np.unique(places, return_index=True)
        ends = [*starts[1:], len(places)]
        for number, start, end in zip(numbers.tolist(), starts, ends, strict=True):
            self._tables.setdefault(number, []).append(table.slice(start, end - start))
        self._buffered += table.nbytes
        self.text += pc.sum(pc.binary_length(table["text"])).as_py() or 0
        if self._buffered > _BUFFERED:
            self._spill()

    def _spill(self) -> None:
        for number, tables in self._tables.items():
            path = self._file(number)
            if not path.exists():
                _private(path)
            with path.open("ab") as file, pa.ipc.new_stream(file, _SCRATCH) as out:
                out.write_table(pa.concat_tables(tables).combine_chunks())
        self._tables, self._buffered = {}, 0

    def _file(self, number: int) -> Path:
        return self.scratch / f"{number:06d}"

    def sorted_by(self, ranges: int) -> Iterator[Iterator[pa.Table]]:
        """Yield each range's rows in the order of `_sorted`.

        The caller must consume a range before it requests the next; consumed rows are deleted.

        Args:
            ranges: number of ranges; its ratio to the constructor's number is a power of two.
        """
        pieces = max(ranges, self._ranges)
        while self.text > pieces * _PIECE_TEXT:
            pieces *= 2
        each = self._pieces(pieces)
        for _ in range(ranges):
            yield itertools.islice(each, pieces // ranges)

    def _pieces(self, pieces: int) -> Iterator[pa.Table]:
        if pieces == self._ranges:
            for number in range(pieces):
                yield _sorted([*self._take(number)])
            return
        self._spill()
        of_one = pieces // self._ranges
        for number in range(self._ranges):
            with _scratch(self.scratch) as scratch:
                finer = _Rows(scratch, pieces)
                for table in self._take(number):
                    finer.add(table)
                for piece in range(number * of_one, (number + 1) * of_one):
                    yield _sorted([*finer._take(piece)])

    def _take(self, number: int) -> Iterator[pa.Table]:
        """Yield the rows of one range in the order of their arrival, and delete them."""
        path = self._file(number)
        if path.exists():
            with path.open("rb") as file:
                while file.tell() < path.stat().st_size:
                    yield pa.ipc.open_stream(file).read_all()
            path.unlink()
        yield from self._tables.pop(number, [])


def _sorted(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows sorted by all columns, with copies of documents numbered.

    All rows with the same hash must be in these tables; then all copies of a document are, too.
    """
    table = pa.concat_tables([_SCRATCH.empty_table(), *tables]).combine_chunks()
    by = [(name, "ascending") for name in _SCRATCH.names]
    table = table.take(pc.sort_indices(table, by)).select(COLUMNS.names)
    names = with_copies_numbered(table["document_id"].to_pylist())
    place = COLUMNS.get_field_index("document_id")
    return table.set_column(place, COLUMNS.field(place), [arrow_strings(names)])


def _write_shards(rows: _Rows, folder: Path, shards: int) -> dict[str, str]:
    """Write all shards; return the digest of each file by name."""
    digests = {}
    for number, tables in enumerate(rows.sorted_by(shards)):
        name = _name(f"{number:04d}")
        partial = _private(rows.scratch / name)
        _write_shard(partial, tables)
        with partial.open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        partial.replace(folder / name)
    return digests


def arrow_strings(values: Sequence[str]) -> pa.Array:
    """Return an Arrow array of strings, with a question mark for each lone surrogate."""
    try:
        return pa.array(values, _TEXT)
    except UnicodeEncodeError:
        return pa.array([v.encode("utf-8", "replace").decode() for v in values], _TEXT)


def _write_shard(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write rows in order, in row groups that are a function of the rows alone."""
    writer = pq.ParquetWriter(
        path, COLUMNS, compression="zstd", compression_level=1, use_dictionary=False,
        write_statistics=False, store_schema=False,
    )  # fmt: skip
    with writer:
        waiting, size = [COLUMNS.empty_table()], 0
        for table in tables:
            before = np.cumsum([0, *pc.binary_length(table["text"]).to_pylist()])  # bytes of text
            done = 0
            while done < len(table) and size + before[-1] - before[done] >= _ROW_GROUP:
                cut = int(np.searchsorted(before[1:], before[done] + _ROW_GROUP - size)) + 1
                waiting.append(table.slice(done, cut - done))
                writer.write_table(pa.concat_tables(waiting), row_group_size=1 << 30)
                waiting, size, done = [], 0, cut
            waiting.append(table.slice(done))
            size += int(before[-1] - before[done])
        if rest := pa.concat_tables(waiting):
            writer.write_table(rest, row_group_size=1 << 30)
