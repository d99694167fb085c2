"""Identity: the names of privacy units and documents, each a function of the named content alone.

Every choice about private text is drawn by the name of a unit and a key: whether the unit is held
out, which of its rows are kept, which canaries it carries, how its rows are masked, in which fold
it lies. A sensitivity bound compares a data set with its neighbour, so adding or removing one unit
must leave the name of every other unit as it was. No name holds a number of a line, row, article or
tuple.

1. An id that the source gives (`document_id`, ROW_ID, the path of a file) is part of the unit's own
   content. All text of one patient that bears one id is one document.
2. A document without an id is named by a digest of its patient, its admission and its text.
3. Exact copies of such a document are separate documents: the digest is followed by the number of
   the copy. The copies are equal, so a data set with one copy less has the same names but the last.
4. An example is named by a digest of its patient, of its document's id where the source gives one,
   and of its words. Exact copies are separate units that share their name, and so their coins.

docs/proofs.md states the assumption that these rules establish, and proves it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

_DERIVED = "content:"  # begins every derived name; an id of a source that begins so is not used


def content_name(kind: str, *parts: str) -> str:
    """Return a name for content: 128 bits of BLAKE2b, the same on every machine.

    Args:
        kind: separates the kinds of named content.
        parts: the content; equal parts, and only these, have the same name.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for part in (kind, *parts):
        raw = part.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "little"))
        hashed.update(raw)
    return _DERIVED + hashed.hexdigest()


def given_id(document_id: str) -> str:
    """Return the id if a source can have given it, and nothing if it is a derived name.

    A source whose id looks like a derived name could otherwise join the document of another
    source.
    """
    return "" if document_id.startswith(_DERIVED) else document_id


def document_name(patient_id: str, document_id: str, admission_id: str, text: str) -> str:
    """Return the id that the source gives a document, or else a name for its content."""
    return given_id(document_id) or content_name("document", patient_id, admission_id, text)


def document_unit_id(patient_id: str, document_id: str) -> str:
    """Return the unit id of a document: two patients may use one document id for two documents."""
    # The length makes the pair unambiguous whatever characters the ids hold.
    return f"{len(patient_id)}:{patient_id}/{document_id}"


def example_name(patient_id: str, document_id: str, words: str) -> str:
    """Return the name of an example.

    A derived name of its document is left out: it would change with the other examples there.
    """
    return content_name("example", patient_id, given_id(document_id), words)


def with_copies_numbered(names: Iterable[str]) -> list[str]:
    """Return the names, with `#1`, `#2`, … behind the derived ones that were there before."""
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        copy = "" if given_id(name) or not seen[name] else f"#{seen[name]}"
        seen[name] += 1
        numbered.append(name + copy)
    return numbered
