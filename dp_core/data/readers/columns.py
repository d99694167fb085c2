"""Token and tag in columns, with blank lines between sentences: IOB or IOB2, tabs or spaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dp_core.data.labelled_text import Sentence
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    LONGEST,
    read_items,
    text_lines,
    unpacked_name,
)
from dp_core.errors import PrivateTextRefusal

_TAG = re.compile(r"O|[BI]-\S+")
_DOCUMENT = "-DOCSTART-"


@dataclass(frozen=True)
class ColumnsReader:
    """Reads token and tag in columns.

    A document is named by its file and the number of lines `-DOCSTART-` before it in that file.

    Attributes:
        public: whether a line `-DOCSTART-` may begin another document within a file. The word can
            occur in a text, so it must not make privacy units: a private file is one document.
    """

    public: bool = False

    def __call__(self, path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
        """Yield sentences; the first column is the token, the last the tag (see `read_sentences`).

        IOB tags become IOB2. A sentence with a bad line is quarantined as a whole: training
        and scores would otherwise use a sentence with a gap.

        Raises:
            PrivateTextRefusal: as `read_sentences`; or a private file is divided.
        """

        def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
            name = unpacked_name(file, path)
            documents = set()
            for number, sentence in _sentences(file, name):
                if isinstance(sentence, Sentence):
                    documents.add(sentence.document_id)
                if len(documents) > 1 and not self.public:
                    raise PrivateTextRefusal(
                        "a private file is divided into documents by -DOCSTART-",
                        where=str(path),
                        fix="Give each document a separate file: the text of a file must not"
                        " decide its number of privacy units.",
                    )
                yield number, sentence

        return read_items(path, ".tsv", quarantine, sentences_of)


def _sentences(file: Path, name: str) -> Iterator[tuple[int, Sentence | Reason]]:
    document = 0
    tokens: list[str] = []
    tags: list[str] = []
    problem: tuple[int, Reason] | None = None
    size = 0  # characters of the sentence's lines
    # `_with_end` adds a blank line, which ends the last sentence.
    for number, line in _with_end(file):
        if isinstance(line, str) and not line.strip():
            if problem:
                yield problem
            elif tokens:
                yield number, Sentence(tuple(tokens), iob2(tags), f"{name}#{document}")
            tokens, tags, problem, size = [], [], None, 0
            continue
        size += len(line)
        read = line if isinstance(line, Reason) else _token_and_tag(line)
        if size > LONGEST:
            read, tokens, tags = Reason.TOO_LONG, [], []
        if isinstance(read, Reason):
            if problem is None or read is Reason.TAG:  # an unknown tag refuses the whole source
                problem = number, read
        elif read[0] == _DOCUMENT:
            document += 1
        else:
            tokens.append(read[0])
            tags.append(read[1])


def _with_end(file: Path) -> Iterator[tuple[int, str | Reason]]:
    yield from text_lines(file)
    yield 0, ""


def _token_and_tag(line: str) -> tuple[str, str] | Reason:
    parts = line.split("\t") if "\t" in line else line.split()
    token, tag = parts[0].strip(), parts[-1].strip()
    if token == _DOCUMENT:
        return token, "O"
    if len(parts) < 2 or not token:
        return Reason.WRONG_COLUMNS
    return (token, tag) if _TAG.fullmatch(tag) else Reason.TAG


def iob2(tags: list[str]) -> tuple[str, ...]:
    """Return IOB or IOB2 tags as IOB2: every entity starts with `B-`."""
    out: list[str] = []
    before = "O"
    for tag in tags:
        starts = tag.startswith("I-") and before[2:] != tag[2:]
        out.append(f"B-{tag[2:]}" if starts else tag)
        before = tag
    return tuple(out)
