"""The i2b2/VA 2010 form: `name.txt`, a tokenised sentence a line, and `name.con`, its concepts.

A concept is `c="chest pain" 3:1 3:2||t="problem"`: line from 1, token from 0, both ends included.
Lines that share a concept are one sentence. The two files lie side by side, or in folders of their
own (`txt/` and `concept/`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dp_core.data.ner import Sentence
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    DAMAGED,
    LONGEST,
    bare_name,
    damage_told,
    input_files,
    offset,
    text_lines,
)
from dp_core.errors import BadInput

_FOLDERS = ("txt", "concept")
_CONCEPT = re.compile(r'c="(.*)" (\d+):(\d+) (\d+):(\d+)\|\|t="([^"\s]+)"\s*')


@dataclass(frozen=True)
class _Concept:
    text: str
    begin: tuple[int, int]  # line and token
    end: tuple[int, int]
    kind: str


def read_i2b2(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of all documents under a folder; see `read_sentences`.

    A concept whose offsets do not give its own text puts its sentence into quarantine, every line
    of it; a text without concepts file (or the reverse), or with two of them, the document.
    """
    texts = _by_name(path, ".txt", quarantine, ".con")
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
            with damage_told(path, text, quarantine):
                try:
                    yield from _document(name, text, con, quarantine)
                except DAMAGED:
                    quarantine.reject(Reason.UNREADABLE, name)


def _by_name(path: Path, suffix: str, quarantine: Quarantine, other: str) -> dict[str, list[Path]]:
    found = defaultdict(list)
    for file in input_files(path, suffix, quarantine, other):
        found[_name(file, path)].append(file)
    return found


def _name(file: Path, folder: Path) -> str:
    """Return what a text and its concepts have in common.

    It is `beth/record-13` for `beth/txt/record-13.txt` and `beth/concept/record-13.con`: hospitals
    of the i2b2 corpus number their records alike.
    """
    inside = file.relative_to(folder).parent
    if inside.name.lower() in _FOLDERS:
        inside = inside.parent
    return (inside / Path(bare_name(file)).stem).as_posix()


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
    """Return concepts by the first of their lines in the text; None for more than a text has."""
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
    """The lines of one sentence: one, or all on which a concept lies."""

    def __init__(self) -> None:
        self.last = 0  # line
        self._tokens: list[str] = []
        self._of_line: dict[int, range] = {}  # the tokens of each line
        self._concepts: list[_Concept] = []
        self._problem: Reason | None = None
        self._size = 0  # characters

    def add(self, number: int, line: str | Reason, concepts: list[_Concept]) -> None:
        """Add a line, or why it cannot be read, and the concepts that begin there."""
        self._concepts += concepts
        # One that ends before it begins, or where nothing is, claims all lines between and fits
        # none: what they should be labelled, nobody knows.
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
        tags = None if self._problem else self._tags()
        if tags is None:
            for number in self._of_line:
                quarantine.reject(self._problem or Reason.OFFSETS, f"{name}.txt:{number}")
        elif tags:
            quarantine.take()
            yield Sentence(tuple(self._tokens), tags, name)

    def _tags(self) -> tuple[str, ...] | None:
        """Return the tags, or None if a concept does not fit or overlaps another."""
        tags = ["O"] * len(self._tokens)
        for c in self._concepts:
            span = range(self._index(c.begin), self._index(c.end) + 1)
            if span.start < 0 or not span or any(tags[i] != "O" for i in span):
                return None
            if " ".join(self._tokens[i] for i in span).lower() != " ".join(c.text.split()).lower():
                return None
            for i in span:
                tags[i] = f"{'B' if i == span.start else 'I'}-{c.kind}"
        return tuple(tags)

    def _index(self, where: tuple[int, int]) -> int:
        """Return the index in the sentence of a line's token; -1 if there is none."""
        line, token = where
        tokens = self._of_line.get(line, range(0))
        return tokens[token] if token < len(tokens) else -1
