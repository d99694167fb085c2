"""Documents from tables whose columns have names: CSV, Parquet and JSON lines.

A column has a role: `text`, `patient`, `document`, `admission`, `date` (of the note) or `error` (a
mark of withdrawn notes). The settings name columns; common English and German names of the other
roles, except `date`, are recognised. If several columns could have a role, the table is refused.

The date is part of a document's name. With a column of documents, two dates are two documents,
since some hospitals number their documents anew each year. Without one, all text of a patient with
the same date is one document.

What a file means depends on its header and the settings alone, never on its rows: otherwise the
note of one patient could change the text or the ids of another.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dp_core.data.corpus import Document, id_in_cell
from dp_core.data.readers import sources
from dp_core.data.readers.quarantine import FIXES, Quarantine, Reason
from dp_core.errors import BadInput, PrivateTextRefusal

SUFFIXES = {
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet", ".pq"),
    "jsonl": (".jsonl", ".ndjson"),
    "noteevents": (".csv",),
}
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
COMMON_NAMES: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("column_names.toml").read_text("utf-8")
)
NOTEEVENTS = "text:TEXT,patient:SUBJECT_ID,delimiter:comma"
_ERROR_MARKS = frozenset({"1", "1.0", "true", "t"})
_LONGEST_ROW = 2 * sources.LONGEST  # bytes; a longer row means broken quoting, not a long note
_OBJECTS = 1000  # JSON lines whose keys are the columns of a file
_ROWS = 256  # rows of Parquet in memory
_Numbered = Iterator[tuple[int, Document | Reason | None]]
_Alike = Callable[[Iterable[tuple[str, str]]], dict[str, str]]  # see `ids_alike`
_DAMAGED = (pa.ArrowException, ValueError, KeyError, TypeError, OverflowError)
# A word of the name of a column: anything else may be a text, in a file without a header.
_NAME = re.compile(r"[^\W\d][\w./()#-]{0,39}(?: [\w./()#-]{1,39}){0,2}")


@dataclass(frozen=True)
class Layout:
    """The columns of a table, and the form of a CSV file.

    Attributes:
        columns: the columns of some roles; those of others are recognised by common names.
        delimiter: between the cells of CSV; empty for the one that the header has most often.
        encoding: of CSV; `utf-8` or `windows-1252`.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    delimiter: str = ""
    encoding: str = "utf-8"

    @classmethod
    def parse(cls, setting: str) -> Layout:
        """Return the layout that a setting describes: `text:Note,patient:PatNr,delimiter:tab`."""
        parts = dict(part.split(":", 1) for part in setting.split(",")) if setting else {}
        delimiter = DELIMITERS.get(parts.pop("delimiter", ""), "")
        encoding = parts.pop("encoding", "utf-8")
        return cls(parts, delimiter=delimiter, encoding=encoding)

    def roles(self, names: Sequence[str], needed: Collection[str] | None = None) -> dict[str, str]:
        """Return the column of each role in a header.

        Args:
            names: the columns of the header.
            needed: roles that must have a column; None for the text and every named column.

        Raises:
            BadInput: a column is missing, or several columns could have a role.
        """
        candidates = recognised(names) | {"date": []}
        for role, column in self.columns.items():
            candidates[role] = [name for name in names if _same(name) == _same(column)]
        required = dict.fromkeys(("text", *self.columns)) if needed is None else needed
        missing = [role for role in required if not candidates[role]]
        several = next((role for role in candidates if len(candidates[role]) > 1), None)
        if missing:
            lacks = " and ".join(self.columns.get(role, f"a column of {role}") for role in missing)
            raise PrivateTextRefusal(f"a header lacks {lacks}", fix=self._fix(names, missing[0]))
        if several:
            what = f"several columns could hold the {several}: {', '.join(candidates[several])}"
            raise PrivateTextRefusal(what, fix=f"Name one of them: {several}:COLUMN.")
        return {role: columns[0] for role, columns in candidates.items() if columns}

    def with_date(self, names: Sequence[str]) -> dict[str, str]:
        """Return `roles`, with the date if exactly one column has a common name of dates.

        Raises:
            BadInput: as `roles`.
        """
        dates = recognised(names)["date"]
        date = {"date": dates[0]} if len(dates) == 1 else {}
        return Layout(date | dict(self.columns)).roles(names)

    def _fix(self, names: Sequence[str], role: str) -> str:
        """Return a remedy with the names of the columns, unless they may be a row of text.

        The first line of a file without a header is private. Names are shown only if all of them
        are short words, and at least one of them is a common name or is among those of the layout.
        """
        if not names:
            return "It is empty, or its first line has broken quotes or line ends: save it again."
        named = {_same(column) for column in self.columns.values()}
        is_known = any(recognised(names).values()) or any(_same(name) in named for name in names)
        if is_known and all(map(_NAME.fullmatch, names)):
            return f"Its columns: {', '.join(names)}. Name those to read: {role}:COLUMN."
        return "It may have no header: its first line must name the columns."


def _same(name: str) -> str:
    return name.strip().casefold()


def recognised(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns that may have each role, by their common names."""
    plain = ["".join(filter(str.isalnum, name.casefold())) for name in names]
    candidates = {}
    for role, common in COMMON_NAMES.items():
        first, *others = common
        wanted = [first] if first in plain else others
        candidates[role] = [n for n, word in zip(names, plain, strict=True) if word in wanted]
    return candidates


def read_table(
    path: Path, quarantine: Quarantine, *, format: str, layout: Layout
) -> Iterator[Document]:
    """Yield the documents of a file or folder; see `read_source`.

    A row without a patient is rejected if it has a column of patients, or the layout names one.
    Columns of ids are checked by `ids_alike`.

    A note must not become several rows, and its words must not become patients. After a stray
    quote the beginning of the next row is unknown, so CSV is read as RFC 4180 defines it or not at
    all. A misplaced quote, a quote that is not closed, an id over two lines, or a row with more or
    fewer cells than the header (as the lines of a note without its quotes have) refuses the source.
    """
    alike = ids_alike(str(path), "Rename them, or name one: {role}:COLUMN.")

    def documents_of(file: Path) -> _Numbered:
        try:
            yield from _ROWS_OF[format](file, layout, alike)
        except _Broken as broken:
            quarantine.reject(Reason.WRONG_COLUMNS, f"{sources.bare_name(file)}:{broken.args[0]}")
            what = "a row has broken quoting, or not as many cells as the header"
            fix = "Write it as RFC 4180 requires: quotes around a text, doubled inside it."
            raise PrivateTextRefusal(what, where=str(path), fix=fix) from None
        except BadInput as error:
            quarantine.reject(Reason.WRONG_COLUMNS, sources.location_of(file, path))
            raise PrivateTextRefusal(error.what, where=str(path), fix=error.fix) from None

    return sources.read_items(path, SUFFIXES[format], quarantine, documents_of)


def ids_alike(where: str, remedy: str) -> _Alike:
    """Return a function of (role, column) that returns the column of each role, or refuses.

    All files and objects of a source must have the ids of a role in a column of one name: two
    columns, as `patient` and `mrn`, may name one person differently, who would be two units.

    Args:
        where: the source, for the error.
        remedy: for the error; `{role}` is replaced.
    """
    first_names: dict[str, str] = {}  # of each role

    def refuse_others(columns: Iterable[tuple[str, str]]) -> dict[str, str]:
        roles = {}
        for role, name in columns:
            roles[role] = name
            first = first_names.setdefault(role, name)
            if role != "text" and _same(name) != _same(first):
                what = f"it has the {role} under several names: {first}, {name}"
                raise PrivateTextRefusal(what, where=where, fix=remedy.format(role=role))
        return roles

    return refuse_others


def layout_of(format: str, columns: str = "") -> Layout:
    """Return the layout of a table from its format and the setting that names its columns."""
    return Layout.parse(NOTEEVENTS if format == "noteevents" else columns)


def header_of(path: Path, format: str, layout: Layout) -> list[str]:
    """Return the names of the columns of a file, or of the first file of a folder.

    Only the header is read; of JSON lines, the keys of the first objects.

    Raises:
        BadInput: the file cannot be read, or its header has another encoding.
    """
    file = sources.input_files(path, SUFFIXES[format], Quarantine())[0]
    with sources.refuse_damaged_file(path, file, Quarantine()):
        if format == "jsonl":
            first = itertools.islice(sources.json_objects(file), _OBJECTS)
            keys = (row for _, row in first if not isinstance(row, Reason))
            return list(dict.fromkeys(itertools.chain.from_iterable(keys)))
        if format == "parquet":
            with _parquet(file) as table:
                return list(table.schema_arrow.names)
        with sources.open_bytes(file) as stream, suppress(_Broken):
            return _csv(stream, layout)[0]
    return []


def _document(cells: Mapping[str, Any], roles: Mapping[str, str]) -> Document | Reason | None:
    """Return a row's document, the reason why there is none, or None for a withdrawn note.

    Args:
        cells: the row, by name of the column.
        roles: the column of each role; an object may lack it.
    """
    row = {role: cells.get(column) for role, column in roles.items()}
    if str(row.get("error", "")).strip().lower() in _ERROR_MARKS:
        return None
    text = row.get("text")
    try:
        document, patient, admission = (
            id_in_cell(row.get(role)) for role in ("document", "patient", "admission")
        )
        date = id_in_cell(str(row.get("date") or ""))  # Parquet has dates as dates
    except ValueError:
        return Reason.WRONG_FIELD
    if not isinstance(text, str):
        return Reason.WRONG_FIELD
    if problem := sources.text_problem(text, document, patient, admission, date):
        return problem
    if "patient" in row and not patient:
        return Reason.NO_PATIENT
    if date and (document or (patient and "document" not in row)):
        document = f"{date} {document}".strip()
    return Document(document, patient, text.replace("\r\n", "\n"), admission)


# --- JSON lines


def _json_rows(file: Path, layout: Layout, alike: _Alike) -> _Numbered:
    roles_of = lru_cache(partial(_roles_of_object, layout))
    for number, row in sources.json_objects(file):
        if isinstance(row, Reason):
            yield number, row
        elif roles := roles_of(tuple(row)):
            yield number, _document(row, {**layout.columns, **alike(roles.items())})
        else:
            yield number, Reason.WRONG_FIELD


def _roles_of_object(layout: Layout, keys: tuple[str, ...]) -> dict[str, str]:
    """Return the key of each role in one object, by its own keys alone; none without a text.

    An object may lack the key of any other role. No other key replaces a named one.
    """
    try:
        return layout.roles(keys, needed=("text",))
    except BadInput:
        return {}


# --- CSV


class _Broken(Exception):
    """Quoting that violates RFC 4180; the argument is the line at which the row begins."""


def _csv_rows(file: Path, layout: Layout, alike: _Alike) -> _Numbered:
    with sources.open_bytes(file) as stream:
        names, rows = _csv(stream, layout)
        roles = alike(layout.roles(names).items())
        ids = [column for role, column in roles.items() if role != "text"]
        for number, cells in rows:
            row = dict(zip(names, cells, strict=False))
            if len(cells) != len(names) or any("\n" in row[column] for column in ids):
                raise _Broken(number)
            yield number, _document(row, roles)


def _csv(stream: IO[bytes], layout: Layout) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of the columns, and (number of its first line, cells) of each row.

    Raises:
        BadInput: the header has another encoding.
        _Broken: the header has broken quoting.
    """
    rows = _whole_rows(stream, layout.encoding)
    number, header = next(rows, (1, ""))
    if not sources.is_unicode(header) or "\0" in header:
        fixes = {"UTF-16": "Save it as UTF-8.", "not UTF-8": FIXES[Reason.ENCODING]}
        kind = "UTF-16" if "\0" in header else "not UTF-8"
        raise PrivateTextRefusal(f"a header is {kind}", fix=fixes[kind])
    delimiter = layout.delimiter or max(DELIMITERS.values(), key=partial(_divided, header))
    names = [name.strip() for name in _cells(header, number, delimiter)] if header else []
    return names, ((number, _cells(row, number, delimiter)) for number, row in rows)


def _divided(header: str, delimiter: str) -> int:
    """Return the number of cells into which a delimiter divides a header; 0 for broken quoting."""
    return len(_cells(header, 1, delimiter)) if _row_pattern(delimiter).fullmatch(header) else 0


def _whole_rows(stream: IO[bytes], encoding: str) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, text) of each row.

    In CSV of this form, a row ends with the first line that closes every quote.

    Raises:
        _Broken: the file is not of this form, or the last row does not end.
    """
    lines: list[bytes] = []
    begin, size, is_open = 1, 0, False
    for number, line in enumerate(sources.bounded_lines(stream, _LONGEST_ROW, keep_ends=True), 1):
        if not lines:
            begin, size = number, 0
        if line is None:
            raise _Broken(begin)
        lines.append(line)
        size += len(line)
        is_open ^= line.count(b'"') % 2 == 1
        if size > _LONGEST_ROW:
            raise _Broken(begin)
        if not is_open:
            # Bytes of another encoding become lone surrogates, so that only their own row is lost.
            row = b"".join(lines).decode(encoding, "surrogateescape")
            lines = []
            row = (row.removeprefix(sources.BOM) if begin == 1 else row).removesuffix("\n")
            row = row.removesuffix("\r")
            if row.strip():
                yield begin, row
    if lines:
        raise _Broken(begin)


@lru_cache
def _row_pattern(delimiter: str) -> re.Pattern[str]:
    """Return the form of a row: quotes enclose a whole cell; a quote inside a cell is doubled.

    RFC 4180, section 2.
    """
    cell = rf'(?:"[^"]*+(?:""[^"]*+)*+"|[^"{re.escape(delimiter)}\r\n]*+)'
    return re.compile(rf"{cell}(?:{re.escape(delimiter)}{cell})*+")


def _cells(row: str, number: int, delimiter: str) -> list[str]:
    if not _row_pattern(delimiter).fullmatch(row):
        raise _Broken(number)
    csv.field_size_limit(_LONGEST_ROW)
    return next(csv.reader([row], delimiter=delimiter, strict=True))


# --- Parquet


def _parquet_rows(file: Path, layout: Layout, alike: _Alike) -> _Numbered:
    with _parquet(file) as table:
        roles = alike(layout.roles(table.schema_arrow.names).items())

        def rows() -> Iterator[dict[str, Any]]:
            try:
                columns = [*roles.values()]
                for batch in table.iter_batches(_ROWS, columns=columns, use_threads=False):
                    yield from batch.to_pylist()
            except _DAMAGED:
                raise EOFError from None  # the cause may quote private text

        for number, row in enumerate(rows(), 1):
            yield number, _document(row, roles)


@contextmanager
def _parquet(file: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; a packed one is unpacked into memory.

    Raises:
        EOFError: the file is damaged.
        TooMuch: the file unpacks to far more than text does.
    """
    with sources.open_bytes(file) as packed:
        stream = packed if packed.seekable() else io.BytesIO(packed.read())
        size = stream.seek(0, io.SEEK_END)
        try:
            table = pq.ParquetFile(stream)
            groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
            unpacked = sum(group.total_byte_size for group in groups)
        except _DAMAGED:
            raise EOFError from None
        if unpacked > max(sources.ALWAYS_ALLOWED, sources.LARGEST_RATIO * size):
            raise sources.TooMuch
        yield table


_ROWS_OF = {
    "csv": _csv_rows,
    "noteevents": _csv_rows,
    "parquet": _parquet_rows,
    "jsonl": _json_rows,
}
