"""The format of i2b2/VA 2010 and 2011: `name.txt`, a tokenised sentence a line, and its concepts.

A concept is `c="chest pain" 3:1 3:2||t="problem"`: line from 1, token from 0, both ends included.
Lines that share a concept are one sentence. The two files are in the same folder or in separate
folders: `txt/name.txt` and `concept/name.con` in 2010, `docs/name.txt` and `concepts/name.txt.con`
in 2011. The coreference files of 2011 (`chains/`, `pairs/`) are skipped. Concepts may overlap (in
2011, persons and pronouns within problems); see `annotated`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dp_core.data.labelled_text import Entity, Sentence, annotated
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    DAMAGED,
    LONGEST,
    bare_name,
    input_files,
    offset,
    refuse_damaged_file,
    text_lines,
)
from dp_core.errors import BadInput

_FOLDERS = ("txt", "concept", "docs", "concepts")
_COREFERENCE = (".chains", ".pairs")  # of 2011
_CONCEPT = re.compile(r'c="(.*)" (\d+):(\d+) (\d+):(\d+)\|\|t="([^"\s]+)"\s*')


@dataclass(frozen=True)
class _Concept:
    text: str
    begin: tuple[int, int]  # line and token
    end: tuple[int, int]
    kind: str


def read_i2b2(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of all documents under a folder; see `read_sentences`.

    A concept that differs from the text at its offsets puts all lines of its sentence into
    quarantine. A text without a concepts file, a concepts file without a text, and a duplicate file
    put the document into quarantine.
    """
    texts = _by_name(path, ".txt", quarantine, ".con", *_COREFERENCE)
    concepts = _by_name(path, ".con", Quarantine(), ".txt")
    if not path.is_dir():
        raise BadInput("i2b2 is read from a folder", where=str(path), fix="Give the folder.")
    for name in sorted(texts.keys() | concepts.keys()):
        if name not in texts or name not in concepts:
            quarantine.reject(Reason.UNREADABLE, f"{name}: .txt or .con is missing")
        elif len(texts[name]) + len(concepts[name]) > 2:
            quarantine.reject(Reason.TWICE, name)
        else:
            [text], [con] = texts[name], concepts[name]
            with refuse_damaged_file(path, text, quarantine):
                try:
                    yield from _document(name, text, con, quarantine)
                except DAMAGED:
                    quarantine.reject(Reason.UNREADABLE, name)


def _by_name(
    path: Path, suffix: str, quarantine: Quarantine, *others: str
) -> dict[str, list[Path]]:
    files = defaultdict(list)
    for file in input_files(path, suffix, quarantine, *others):
        files[_name(file, path)].append(file)
    return files


def _name(file: Path, folder: Path) -> str:
    """Return the common name of a text and its concepts, with their folder.

    It is `beth/record-13` for `beth/txt/record-13.txt` and `beth/concept/record-13.con` (or
    `record-13.txt.con`): the hospitals of the i2b2 corpus use the same record numbers.
    """
    inside = file.relative_to(folder).parent
    if inside.name.lower() in _FOLDERS:
        inside = inside.parent
    name = Path(bare_name(file)).stem
    if name.lower().endswith(".txt"):  # of `name.txt.con`
        name = name[: -len(".txt")]
    return (inside / name).as_posix()


def _document(name: str, text: Path, concepts: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    by_line = _concepts(name, concepts, quarantine)
    if by_line is None:
        return
    sentence = _Lines()
    number = 0
    for number, line in text_lines(text):
        sentence.add(number, line, by_line.pop(number, []))
        if number >= sentence.last:
            yield from sentence.end(name, quarantine)
            sentence = _Lines()
    yield from sentence.end(name, quarantine)  # the text ended before its last concept
    for beyond in by_line:
        quarantine.reject(Reason.OFFSETS, f"{name}.con, line {beyond} of the text")


def _concepts(name: str, file: Path, quarantine: Quarantine) -> dict[int, list[_Concept]] | None:
    """Return concepts by their first line in the text, or None if the file is too long."""
    by_line: defaultdict[int, list[_Concept]] = defaultdict(list)
    size = 0
    for number, line in text_lines(file):
        size += len(line)
        if size > LONGEST:
            quarantine.reject(Reason.TOO_LONG, f"{name}.con")
            return None
        if isinstance(line, str) and not line.strip():
            continue
        concept = line if isinstance(line, Reason) else _concept(line)
        if isinstance(concept, Reason):
            quarantine.reject(concept, f"{name}.con:{number}")
        else:
            by_line[min(concept.begin[0], concept.end[0])].append(concept)
    return by_line


def _concept(line: str) -> _Concept | Reason:
    match = _CONCEPT.fullmatch(line)
    if match is None:
        return Reason.WRONG_FIELD
    numbers = [offset(digits) for digits in match.groups()[1:5]]
    begin, first, end, last = (-1 if number is None else number for number in numbers)
    if -1 in (begin, first, end, last):
        return Reason.OFFSETS
    return _Concept(match[1], (begin, first), (end, last), match[6])


class _Lines:
    """The lines of one sentence: a single line, or all lines of a concept."""

    def __init__(self) -> None:
        self.last = 0  # line
        self._tokens: list[str] = []
        self._of_line: dict[int, range] = {}  # the tokens of each line
        self._concepts: list[_Concept] = []
        self._problem: Reason | None = None
        self._size = 0  # characters

    def add(self, number: int, line: str | Reason, concepts: list[_Concept]) -> None:
        """Add a line, or the reason why it cannot be read, and the concepts that begin there."""
        self._concepts += concepts
        # A concept that ends before it begins, or outside the text, puts all lines between its two
        # ends into quarantine, because their right labels are unknown.
        self.last = max([self.last, *(max(c.begin[0], c.end[0]) for c in concepts)])
        if isinstance(line, Reason):
            self._problem = self._problem or line
        elif not line.strip() and not concepts:
            return
        self._size += len(line)
        if self._size > LONGEST:
            self._problem = self._problem or Reason.TOO_LONG
        before = len(self._tokens)
        if self._problem:
            self._tokens = []
        else:
            self._tokens += line.split()
        self._of_line[number] = range(before, len(self._tokens))

    def end(self, name: str, quarantine: Quarantine) -> Iterator[Sentence]:
        """Yield the sentence, or put its lines into quarantine."""
        found = None if self._problem else self._entities()
        if found is None:
            for number in self._of_line:
                quarantine.reject(self._problem or Reason.OFFSETS, f"{name}.txt:{number}")
        elif self._tokens:
            quarantine.take()
            yield annotated(self._tokens, found, name)

    def _entities(self) -> list[Entity] | None:
        """Return the entities, or None if a concept does not fit."""
        found = []
        for c in self._concepts:
            span = range(self._index(c.begin), self._index(c.end) + 1)
            if span.start < 0 or not span or not self._holds(span, c):
                return None
            found.append((c.kind, span.start, span.stop))
        return found

    def _holds(self, span: range, concept: _Concept) -> bool:
        """Return whether the text at the offsets equals the concept; 2011 may omit line breaks."""
        text, expected = " ".join(self._tokens[i] for i in span), " ".join(concept.text.split())
        if concept.begin[0] != concept.end[0]:
            text, expected = text.replace(" ", ""), expected.replace(" ", "")
        return text.lower() == expected.lower()

    def _index(self, where: tuple[int, int]) -> int:
        """Return the index in the sentence of a line's token; -1 if there is none."""
        line, token = where
        tokens = self._of_line.get(line, range(0))
        return tokens[token] if token < len(tokens) else -1
