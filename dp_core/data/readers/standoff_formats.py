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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path

from dp_core.data.labelled_text import Sentence, annotated, sentence_spans, token_spans
from dp_core.data.readers.entity_formats import blocks_of, read_pairs
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import LONGEST, offset, read_items, text_lines, unpacked_name

_SPACES = re.compile(r"\s")

Span = tuple[int, int]
Mark = tuple[int, int, str]  # start, end and type


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


def _fitted(text: str, mentions: Sequence[_Mention]) -> tuple[str, list[Mark]] | None:
    """Return the text and the marks of all mentions, or None if their offsets do not fit it.

    Line ends may count as one or two characters, and offsets may begin at 0 or 1.
    """
    for variant in dict.fromkeys((text, text.replace("\r\n", "\n"))):
        for shift in (0, 1):
            if all(mention.is_in(variant, shift) for mention in mentions):
                spans = ((m.fragments[0][0], m.fragments[-1][1], m.kind) for m in mentions)
                return variant, [(a - shift, b - shift, kind) for a, b, kind in spans]
    return None


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


def _sentences_of_lines(
    text: str, mentions: Sequence[_Mention], document_id: str
) -> Iterator[Sentence | Reason]:
    """Yield the sentences of a text in which each line begins a sentence."""
    fitted = _fitted(text, mentions)
    if not text.strip() or fitted is None:
        yield Reason.OFFSETS if text.strip() else Reason.EMPTY
        return
    text, marks = fitted
    yield from _sentences(text, marks, [m.end() for m in re.finditer("\n", text)], document_id)


def _text_in(file: Path) -> str | Reason:
    """Return the content of a file with its line ends, or the reason why it cannot be read."""
    lines: list[str] = []
    size = 0
    for _, line in text_lines(file, keep_ends=True):
        if isinstance(line, Reason):
            return line
        size += len(line)
        if size > LONGEST:
            return Reason.TOO_LONG
        lines.append(line)
    return "".join(lines)


# --- brat

_ENTITY = re.compile(r"T\S*\t(\S+) (\d+ \d+(?:;\d+ \d+)*)\t(.*)")
_NO_ENTITY = ("R", "E", "A", "M", "N", "#", "*")  # first characters of other annotations


def read_brat(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of all documents under a folder; see `read_sentences`."""
    return read_pairs(path, quarantine, (".ann",), _brat_document)


def _brat_document(
    name: str, file: Path, annotations: Path, quarantine: Quarantine
) -> Iterator[Sentence]:
    text, listed = _text_in(file), _text_in(annotations)
    for content, suffix in ((text, "txt"), (listed, "ann")):
        if isinstance(content, Reason):
            quarantine.reject(content, f"{name}.{suffix}")
            return
    mentions: list[_Mention] = []
    for number, line in enumerate(listed.split("\n"), 1):
        mention = None if line.startswith(_NO_ENTITY) else _brat_mention(line.rstrip("\r"))
        if isinstance(mention, Reason):
            quarantine.reject(mention, f"{name}.ann:{number}")
            return
        mentions += [mention] if mention else []
    for sentence in _sentences_of_lines(text, mentions, name):
        if isinstance(sentence, Reason):
            quarantine.reject(sentence, f"{name}.ann")
        else:
            quarantine.taken += 1
            yield sentence


def _brat_mention(line: str) -> _Mention | Reason | None:
    if not line.strip():
        return None
    match = _ENTITY.fullmatch(line)
    if match is None:
        return Reason.WRONG_FIELD
    fragments = [_span(*fragment.split()) for fragment in match[2].split(";")]
    return _Mention(match[1], fragments, match[3])


def _span(start: str, end: str) -> Span:
    """Return a span; a number that no document has fits nowhere."""
    begin, stop = offset(start), offset(end)
    return (-1, -1) if begin is None or stop is None else (begin, stop)


# --- i2b2 2012

_TEXT = re.compile(r"<TEXT><!\[CDATA\[(.*?)\]\]></TEXT>", re.DOTALL)
_TAG = re.compile(
    r'\s*<(EVENT|TIMEX3)\s+id="[^"]*"\s+start="(\d+)"\s+end="(\d+)"\s+text="(.*?)"\s'
    r'(?:.*\s)?type="([^"\s]*)".*'
)


def read_i2b2_xml(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder of i2b2 2012; see `read_sentences`."""

    def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
        name = unpacked_name(file, path)
        for sentence in _i2b2_document(file, name[: -len(".xml")]):
            yield 0, sentence

    return read_items(path, ".xml", quarantine, sentences_of)


def _i2b2_document(file: Path, name: str) -> Iterator[Sentence | Reason]:
    content = _text_in(file)
    text = _TEXT.search(content)
    if isinstance(content, Reason) or text is None:
        problem = Reason.WRONG_FIELD if content.strip() else Reason.EMPTY
        yield content if isinstance(content, Reason) else problem
        return
    mentions: list[_Mention] = []
    for line in content[text.end() :].split("\n"):
        if line.lstrip().startswith(("<EVENT", "<TIMEX3")):
            tag = _TAG.fullmatch(line)
            if tag is None:
                yield Reason.WRONG_FIELD
                return
            kind = tag[5] or tag[1]  # some events have no type
            mentions.append(_Mention(kind, [_span(tag[2], tag[3])], tag[4]))
    yield from _sentences_of_lines(text[1], mentions, name)


# --- PubTator

_PART = re.compile(r"([^|\t]+)\|([ta])\|(.*)", re.DOTALL)


@dataclass
class _Article:
    number: int  # of its first line
    parts: dict[str, str] = field(default_factory=dict)  # "t" and "a"
    spans: dict[Span, str] = field(default_factory=dict)
    text: str = ""  # both parts, once the first entity closes them
    document_id: str = ""
    problem: Reason | None = None


def read_pubtator(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder; see `read_sentences`.

    The longer of overlapping entities is kept, and the first of equally long ones. An entity that
    differs from the text at its offsets puts its article into quarantine.
    """

    def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
        for block in blocks_of(file):
            article = _Article(block[0][0])
            for _, line in block:
                _read_line(article, line)
            yield from _sentences_of_article(article)

    return read_items(path, ".txt", quarantine, sentences_of)


def _read_line(article: _Article, line: str | Reason) -> None:
    """Add a line to its article, or record the first problem, after which lines are ignored."""
    if article.problem:
        return
    if isinstance(line, Reason):
        article.problem = line
        return
    if not article.spans and (match := _PART.fullmatch(line)):
        article.document_id, article.parts[match[2]] = match[1], match[3]
        return
    cells = line.split("\t")
    if len(cells) >= 5 and cells[1].isdecimal() and cells[2].isdecimal():
        if not article.spans:
            article.text = _text_of(article)
        start, end = offset(cells[1]), offset(cells[2])
        if start is None or end is None or not _is_at(article.text, start, end, cells[3]):
            article.problem = Reason.OFFSETS
            return
        article.spans.setdefault((start, end), cells[4].strip())
    elif len(cells) < 3:
        article.problem = Reason.WRONG_COLUMNS


def _is_at(text: str, start: int, end: int, mention: str) -> bool:
    if not mention or min(end, len(text)) - start != len(mention):
        return False
    return _SPACES.sub(" ", text[start:end]) == _SPACES.sub(" ", mention)


def _text_of(article: _Article) -> str:
    return f"{article.parts.get('t', '')} {article.parts.get('a', '')}"


def _sentences_of_article(article: _Article) -> Iterator[tuple[int, Sentence | Reason]]:
    text = _text_of(article)
    if article.problem is None and not text.strip():
        article.problem = Reason.EMPTY
    if article.problem is not None:
        yield article.number, article.problem
        return
    kept = _without_overlaps(article.spans)
    marks = [(a, b, article.spans[a, b].replace(" ", "_")) for a, b in kept]
    abstract = len(article.parts.get("t", "")) + 1
    for sentence in _sentences(text, marks, [abstract], article.document_id):
        yield article.number, sentence


def _without_overlaps(spans: dict[Span, str]) -> list[Span]:
    """Return the spans that are kept, sorted and without overlaps."""
    kept: list[Span] = []
    for start, end in sorted(spans, key=lambda s: (s[0] - s[1], s[0])):  # longest first
        place = bisect_left(kept, (start, end))
        if (not place or kept[place - 1][1] <= start) and (
            place == len(kept) or end <= kept[place][0]
        ):
            kept.insert(place, (start, end))
    return kept
