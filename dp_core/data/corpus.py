"""Documents with normalised ids, and the one form in which a corpus of them is kept.

`documents.jsonl.gz`: one JSON object a document, grouped by patient and, within a patient, by
document, so that units can be read in one pass with little memory; groups are in the order of a
hash of the patient's id, which says nothing about the order of the source. `corpus.json`, written
last, names the format: without it the corpus is not complete. Names of files hold no count.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dp_core.data.readers.sources import UNREADABLE
from dp_core.errors import BadInput

_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_EXACT = 2**53  # up to here a floating-point number stands for one integer alone


def normalised_id(value: object) -> str:
    """Return the one form of an id (of a patient, document, admission); empty where there is none.

    Every reader takes its ids through here, so that one patient is one privacy unit however a
    table or an export spelled it: without white space around it, in Unicode's normal form C
    (Unicode Standard Annex #15), and a whole number as an integer is written, since tables that
    were once read as floats say `7.0`. So `7`, `7.0`, "7", "7.0" and " 7 " are one id; "07" is
    another, for leading zeros can be part of a number on paper. Case is kept.

    Raises:
        ValueError: neither text nor a whole number, or one that a float cannot tell from others.
    """
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("not an id")
    text = unicodedata.normalize("NFC", str(value).strip())
    whole = _WHOLE.fullmatch(text)
    return whole[1] if whole else text


@dataclass(frozen=True, slots=True)
class Document:
    """One note, article or message.

    Its ids are normalised (`normalised_id`), whoever makes it.

    Args:
        document_id: names the document within its patient; texts that share it are one document.
        patient_id: names the person it is about; empty where the source does not say.
        text: the text itself, as read (not normalised).
        admission_id: names the hospital stay; empty where there is none.
    """

    document_id: str
    patient_id: str
    text: str
    admission_id: str = ""

    def __post_init__(self) -> None:
        for name in ("document_id", "patient_id", "admission_id"):
            object.__setattr__(self, name, normalised_id(getattr(self, name)))


_DOCUMENTS, _MARK = "documents.jsonl.gz", "corpus.json"
_VERSION = 1
_PARTITIONS = 16  # memory holds one of them at a time


def write_corpus(documents: Iterable[Document], folder: Path) -> None:
    """Write documents, in any order, as a corpus in normal form; an older one is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
        parts = _partition(documents, Path(scratch))
        whole = Path(scratch) / _DOCUMENTS
        # No name and no time in the header: equal corpora are equal bytes.
        with (
            _private(whole).open("wb") as raw,
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as out,
        ):
            for part in parts:
                out.writelines(_sorted_lines(part))
        whole.replace(folder / _DOCUMENTS)
    mark = folder / f"{_MARK}.partial"
    mark.write_text(json.dumps({"format": "confide-corpus", "version": _VERSION}) + "\n")
    mark.replace(folder / _MARK)


def open_corpus(folder: Path) -> Iterator[Document]:
    """Yield the documents of a corpus in normal form, grouped by patient and document.

    Raises:
        BadInput: no such corpus, an unfinished one, or one of another version.
    """
    try:
        version = json.loads((folder / _MARK).read_text())["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            "not a finished corpus", where=str(folder), fix="Run the corpus step."
        ) from error
    if version != _VERSION:
        raise BadInput(
            f"corpus version {version} is not {_VERSION}", where=str(folder), fix="Import it again."
        )
    return _read(folder / _DOCUMENTS)


def _read(path: Path) -> Iterator[Document]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield _document(json.loads(line))
    except (*UNREADABLE, ValueError, TypeError):
        # `from None`: the cause may quote the line, which is private
        raise BadInput(
            "the corpus is damaged", where=str(path), fix="Run the corpus step again."
        ) from None


def _document(row: object) -> Document:
    if not (isinstance(row, list) and len(row) == 4 and all(isinstance(x, str) for x in row)):
        raise TypeError("not a document")
    patient, document, admission, text = row
    return Document(document, patient, text, admission)


def _private(path: Path) -> Path:
    """Create the file readable by its owner alone: it holds private text."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def _group_hash(patient_id: str) -> bytes:
    return hashlib.blake2b(patient_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _partition(documents: Iterable[Document], scratch: Path) -> list[Path]:
    """Spread the documents over files by their patient's hash; return the files in hash order."""
    paths = [_private(scratch / f"{i:02d}") for i in range(_PARTITIONS)]
    with contextlib.ExitStack() as stack:
        files: list[IO[bytes]] = [stack.enter_context(p.open("wb")) for p in paths]
        for d in documents:
            line = json.dumps([d.patient_id, d.document_id, d.admission_id, d.text]).encode()
            files[_group_hash(d.patient_id)[0] * _PARTITIONS // 256].write(line + b"\n")
    return paths


def _sorted_lines(part: Path) -> list[bytes]:
    """Return a partition's lines by patient hash, patient and document; stable within those."""
    with part.open("rb") as lines:
        keyed = [(_sort_key(line), line) for line in lines]
    keyed.sort(key=lambda pair: pair[0])
    return [line for _, line in keyed]


def _sort_key(line: bytes) -> tuple[bytes, str, str]:
    patient, document, _, _ = json.loads(line)
    return _group_hash(patient), patient, document
