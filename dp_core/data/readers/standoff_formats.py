"""Sentences of running text with entities at offsets of characters: brat, i2b2 2012 and PubTator.

The edges of entities cut tokens, and no sentence cuts an entity, so that none is lost. In brat and
i2b2 2012, the tags hold the longest of overlapping entities; see `annotated`. A span that differs
from the text at its offsets puts its document into quarantine.

*brat.* `name.txt`, and `name.ann` with a line `T1, type start end, mention` (tabs between) for each
entity or trigger of an event. A discontinuous entity, `start end;start end`, is the span from its
first to its last fragment, as in `standoff2conll`. Relations, events, attributes and notes are
skipped.

*i2b2 2012.* `name.xml` with the text and its tags `EVENT` and `TIMEX3`, of which `type` is the
entity's type. Some of the published files are not well-formed, so tags are read line by line. Tags
of relations, and `SECTIME`, which repeats a time, are skipped.

*PubTator.* `id|t|title`, `id|a|abstract`, then `id, start, end, mention, type, …` between tabs.
Offsets count characters of the title, one separator, and the abstract. Lines of another shape
(relations such as BC5CDR's `CID`) are not entities, and skipped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from dp_core.data.labelled_text import Sentence, annotated, sentence_spans, token_spans
from dp_core.data.readers.entity_formats import blocks_of, read_pairs
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import LONGEST, offset, read_items, text_lines, unpacked_name

_SPACES = re.compile(r"\s")

Span = tuple[int, int]
Mark = tuple[int, int, str]  # start, end and type


class _Unusable(Exception):
    """A document that cannot be used; its argument is the reason."""


@dataclass(frozen=True)
class _Mention:
    kind: str
    fragments: Sequence[Span]
    text: str

    def is_in(self, text: str, shift: int) -> bool:
        """Return whether the text at the offsets, minus a shift, equals the mention."""
        spans = [(a - shift, b - shift) for a, b in self.fragments]
        fitting = all(0 <= a < b <= len(text) for a, b in spans)
        return fitting and _plain(" ".join(text[a:b] for a, b in spans)) == _plain(self.text)


def _plain(text: str) -> str:
    return _SPACES.sub(" ", unescape(text))


def _fitted(text: str, mentions: Sequence[_Mention]) -> tuple[str, list[Mark]]:
    """Return the text and the marks of all mentions.

    Line ends may count as one or two characters, and offsets may begin at 0 or 1.

    Raises:
        _Unusable: the text is empty, or the offsets do not fit it.
    """
    if not text.strip():
        raise _Unusable(Reason.EMPTY)
    for variant in dict.fromkeys((text, text.replace("\r\n", "\n"))):
        for shift in (0, 1):
            if all(mention.is_in(variant, shift) for mention in mentions):
                spans = ((m.fragments[0][0], m.fragments[-1][1], m.kind) for m in mentions)
                return variant, [(a - shift, b - shift, kind) for a, b, kind in spans]
    raise _Unusable(Reason.OFFSETS)


def _span(start: str, end: str) -> Span:
    """Return a span; a number that no document has fits nowhere."""
    begin, stop = offset(start), offset(end)
    return (-1, -1) if begin is None or stop is None else (begin, stop)


def _sentences(
    text: str, marks: Iterable[Mark], breaks: Sequence[int], document_id: str
) -> Iterator[Sentence]:
    """Yield the sentences of a text.

    Args:
        text: the text.
        marks: the entities, which may overlap.
        breaks: offsets at which a sentence begins, unless an entity is there.
        document_id: the document.
    """
    listed = sorted(marks)
    spans = [(a, b) for a, b, _ in listed]
    first = 0
    for begin, end in sentence_spans(text, spans, breaks):
        # No sentence cuts an entity, so the entities of a sentence are those that begin in it.
        first = bisect_left(spans, (begin, begin), first)
        last = bisect_left(spans, (end, end), first)
        tokens = token_spans(text, begin, end, spans[first:last])
        starts = [start for start, _ in tokens]
        entities = [
            (kind, bisect_left(starts, a), bisect_left(starts, b))
            for a, b, kind in listed[first:last]
        ]
        words = [text[a:b] for a, b in tokens]
        yield annotated(words, [(kind, a, b) for kind, a, b in entities if a < b], document_id)


def _sentences_of_file(
    parsed: Callable[..., tuple[str, list[_Mention]]], document_id: str, *files: Path
) -> Iterator[Sentence | Reason]:
    """Yield the sentences of a document in which each line begins a sentence."""
    try:
        text, marks = _fitted(*parsed(*map(_text_in, files)))
    except _Unusable as error:
        yield error.args[0]
    else:
        yield from _sentences(text, marks, [m.end() for m in re.finditer("\n", text)], document_id)


def _text_in(file: Path) -> str:
    """Return the content of a file with its line ends."""
    lines: list[str] = []
    size = 0
    for _, line in text_lines(file, keep_ends=True):
        size += len(line)
        if isinstance(line, Reason) or size > LONGEST:
            raise _Unusable(line if isinstance(line, Reason) else Reason.TOO_LONG)
        lines.append(line)
    return "".join(lines)


# --- brat

_ENTITY = re.compile(r"T\S*\t(\S+) (\d+ \d+(?:;\d+ \d+)*)\t(.*)")
_NO_ENTITY = ("R", "E", "A", "M", "N", "#", "*")  # first characters of other annotations


def read_brat(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of all documents under a folder; see `read_source`."""

    def document(name: str, text: Path, annotations: Path) -> Iterator[Sentence | Reason]:
        return _sentences_of_file(_parsed_brat, name, text, annotations)

    return read_pairs(path, quarantine, (".ann",), document)


def _parsed_brat(text: str, annotations: str) -> tuple[str, list[_Mention]]:
    mentions = []
    for line in annotations.replace("\r\n", "\n").split("\n"):
        if line.strip() and not line.startswith(_NO_ENTITY):
            match = _ENTITY.fullmatch(line)
            if match is None:
                raise _Unusable(Reason.WRONG_FIELD)
            fragments = [_span(*fragment.split()) for fragment in match[2].split(";")]
            mentions.append(_Mention(match[1], fragments, match[3]))
    return text, mentions


# --- i2b2 2012

_TEXT = re.compile(r"<TEXT><!\[CDATA\[(.*?)\]\]></TEXT>", re.DOTALL)
_TAG = re.compile(
    r'\s*<(EVENT|TIMEX3)\s+id="[^"]*"\s+start="(\d+)"\s+end="(\d+)"\s+text="(.*?)"\s'
    r'(?:.*\s)?type="([^"\s]*)".*'
)


def read_i2b2_xml(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder of i2b2 2012; see `read_source`."""

    def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
        name = unpacked_name(file, path)[: -len(".xml")]
        for sentence in _sentences_of_file(_parsed_xml, name, file):
            yield 0, sentence

    return read_items(path, ".xml", quarantine, sentences_of)


def _parsed_xml(content: str) -> tuple[str, list[_Mention]]:
    text = _TEXT.search(content)
    if text is None:
        raise _Unusable(Reason.WRONG_FIELD if content.strip() else Reason.EMPTY)
    mentions = []
    for line in content[text.end() :].split("\n"):
        if line.lstrip().startswith(("<EVENT", "<TIMEX3")):
            tag = _TAG.fullmatch(line)
            if tag is None:
                raise _Unusable(Reason.WRONG_FIELD)
            kind = tag[5] or tag[1]  # some events have no type
            mentions.append(_Mention(kind, [_span(tag[2], tag[3])], tag[4]))
    return text[1], mentions


# --- PubTator

_PART = re.compile(r"([^|\t]+)\|([ta])\|(.*)", re.DOTALL)


def read_pubtator(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder; see `read_source`.

    The longer of overlapping entities is kept, and the first of equally long ones. An entity that
    differs from the text at its offsets puts its article into quarantine.
    """

    def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
        for block in blocks_of(file):
            try:
                sentences = _article([line for _, line in block])
            except _Unusable as error:
                yield block[0][0], error.args[0]
            else:
                for sentence in sentences:
                    yield block[0][0], sentence

    return read_items(path, ".txt", quarantine, sentences_of)


def _article(lines: Sequence[str | Reason]) -> Iterator[Sentence]:
    """Return the sentences of an article; the first problem of its lines makes it unusable."""
    name, parts = "", {"t": "", "a": ""}
    mentions: list[_Mention] = []
    for line in lines:
        cells = line.split("\t")
        if isinstance(line, Reason):
            raise _Unusable(line)
        if not mentions and (match := _PART.fullmatch(line)):
            name, parts[match[2]] = match[1], match[3]
        elif len(cells) >= 5 and cells[1].isdecimal() and cells[2].isdecimal():
            kind = cells[4].strip().replace(" ", "_")
            mentions.append(_Mention(kind, [_span(cells[1], cells[2])], cells[3]))
        elif len(cells) < 3:
            raise _Unusable(Reason.WRONG_COLUMNS)
    text, marks = _fitted(f"{parts['t']} {parts['a']}", mentions)
    return _sentences(text, _without_overlaps(marks), [len(parts["t"]) + 1], name)


def _without_overlaps(marks: Iterable[Mark]) -> list[Mark]:
    """Return the marks that are kept, sorted and without overlaps."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda m: (m[0] - m[1], m[0])):  # longest first
        place = bisect_left(kept, mark)
        if (not place or kept[place - 1][1] <= mark[0]) and (
            place == len(kept) or mark[1] <= kept[place][0]
        ):
            kept.insert(place, mark)
    return kept
