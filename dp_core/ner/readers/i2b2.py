"""The i2b2/VA 2010 form: `name.txt`, a tokenised sentence a line, and `name.con`, its concepts.

A concept is `c="chest pain" 3:1 3:2||t="problem"`: line from 1, token from 0, both ends included.
The two files lie side by side, or in folders of their own (`txt/` and `concept/`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dp_core.corpus.readers.files import UNREADABLE, bare_name, input_files
from dp_core.corpus.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput
from dp_core.ner.readers.text_lines import text_lines
from dp_core.ner.sentence import Sentence

_FOLDERS = ("txt", "concept")
_CONCEPT = re.compile(r'c="(.*)" (\d+):(\d+) (\d+):(\d+)\|\|t="([^"\s]+)"\s*')


@dataclass(frozen=True)
class _Concept:
    text: str
    first: int
    last: int
    kind: str


def read_i2b2(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of all documents under a folder; see `read_sentences`.

    A concept whose offsets do not give its own text puts its sentence into quarantine, and a
    text without concepts file (or the reverse) the document.
    """
    if not path.is_dir():
        raise BadInput("i2b2 is read from a folder", where=str(path), fix="Give the folder.")
    texts = {_name(p, path): p for p in input_files(path, ".txt")}
    concepts = {_name(p, path): p for p in input_files(path, ".con")}
    for name in sorted(texts.keys() | concepts.keys()):
        if name not in texts or name not in concepts:
            quarantine.reject(Reason.UNREADABLE, f"{name}: .txt or .con is missing")
            continue
        try:
            yield from _document(name, texts[name], concepts[name], quarantine)
        except UNREADABLE:
            quarantine.reject(Reason.UNREADABLE, name)


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
    by_line, bad = _concepts(name, concepts, quarantine)
    number = 0
    for number, line in text_lines(text):
        place = f"{name}.txt:{number}"
        if isinstance(line, Reason):
            quarantine.reject(line, place)
        elif line.strip():
            tagged = None if number in bad else _tagged(line, by_line[number])
            if tagged is None:
                quarantine.reject(Reason.OFFSETS, place)
            else:
                quarantine.take()
                yield Sentence(*tagged, name)
    for beyond in by_line.keys() | bad:
        if beyond > number:
            quarantine.reject(Reason.OFFSETS, f"{name}.con, line {beyond} of the text")


def _concepts(
    name: str, file: Path, quarantine: Quarantine
) -> tuple[defaultdict[int, list[_Concept]], set[int]]:
    """Return concepts by line of the text, and the lines whose concepts cannot be used."""
    by_line: defaultdict[int, list[_Concept]] = defaultdict(list)
    bad: set[int] = set()
    for number, line in text_lines(file):
        if isinstance(line, str) and not line.strip():
            continue
        match = None if isinstance(line, Reason) else _CONCEPT.fullmatch(line)
        if match is None:
            reason = line if isinstance(line, Reason) else Reason.WRONG_FIELD
            quarantine.reject(reason, f"{name}.con:{number}")
            continue
        text, start, first, end, last, kind = match.groups()
        if start != end:
            bad |= {int(start), int(end)}
        else:
            by_line[int(start)].append(_Concept(text, int(first), int(last), kind))
    return by_line, bad


def _tagged(line: str, concepts: list[_Concept]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return tokens and tags, or None if a concept does not fit or overlaps another."""
    tokens = line.split()
    tags = ["O"] * len(tokens)
    for c in concepts:
        span = range(c.first, c.last + 1)
        if not span or c.last >= len(tokens) or any(tags[i] != "O" for i in span):
            return None
        if " ".join(tokens[i] for i in span).lower() != " ".join(c.text.split()).lower():
            return None
        for i in span:
            tags[i] = f"{'B' if i == c.first else 'I'}-{c.kind}"
    return tuple(tokens), tuple(tags)
