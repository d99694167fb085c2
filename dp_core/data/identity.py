"""Identity: the names of privacy units and documents, each a function of the named content alone.

Every choice about private text is drawn by the name of a unit and a key: whether the unit is held
out, which of its rows are kept, which canaries it carries, how its rows are masked, in which fold
it lies. A sensitivity bound compares a data set with its neighbour, so adding or removing one unit
must leave the name of every other unit as it was. No name holds a number of a line, row, article or
tuple.

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
from collections import Counter
from collections.abc import Iterable

_DERIVED = "content:"  # prefix of every derived name; ids of a source with this prefix are ignored


def content_name(kind: str, *parts: str) -> str:
    """Return a name for content: 128 bits of BLAKE2b, the same on every machine.

    Args:
        kind: separates the kinds of named content.
        parts: the content; equal parts have the same name, and different parts different names.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for part in (kind, *parts):
        raw = part.encode("utf-8", "surrogatepass")
        hashed.update(len(raw).to_bytes(8, "little"))
        hashed.update(raw)
    return _DERIVED + hashed.hexdigest()


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
