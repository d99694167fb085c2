"""PubTator: `id|t|title`, `id|a|abstract`, then `id, start, end, mention, type, …` between tabs.

Offsets count characters of the title, one separator, and the abstract. Lines of another shape
(relations such as BC5CDR's `CID`) are not entities, and skipped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from dp_core.data.labelled_text import Sentence, annotated, sentence_spans, token_spans
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    LONGEST,
    offset,
    read_items,
    text_lines,
)

_TEXT = re.compile(r"([^|\t]+)\|([ta])\|(.*)", re.DOTALL)
_SPACES = re.compile(r"\s")

Span = tuple[int, int]


@dataclass
class _Article:
    number: int  # of its first line
    parts: dict[str, str] = field(default_factory=dict)  # "t" and "a"
    spans: dict[Span, str] = field(default_factory=dict)
    text: str = ""  # both parts, once the first entity closes them
    document_id: str = ""
    problem: Reason | None = None
    size: int = 0  # characters of its lines


def read_pubtator(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder; see `read_sentences`.

    The longer of overlapping entities is kept, and the first of equally long ones. An entity that
    differs from the text at its offsets puts its article into quarantine.
    """
    return read_items(
        path, ".txt", quarantine, lambda file: chain.from_iterable(map(_sentences, _articles(file)))
    )


def _articles(file: Path) -> Iterator[_Article]:
    article: _Article | None = None
    for number, line in text_lines(file):
        if isinstance(line, str) and not line.strip():
            if article:
                yield article
            article = None
            continue
        article = article or _Article(number)
        _read_line(article, line)
    if article:
        yield article


def _read_line(article: _Article, line: str | Reason) -> None:
    """Add a line to its article, or record the first problem, after which lines are ignored."""
    if article.problem:
        return
    if isinstance(line, Reason):
        article.problem = line
        return
    article.size += len(line)
    if article.size > LONGEST:
        article.problem = Reason.TOO_LONG
        return
    if not article.spans and (match := _TEXT.fullmatch(line)):
        article.document_id, article.parts[match[2]] = match[1], match[3]
        return
    cells = line.split("\t")
    if len(cells) >= 5 and cells[1].isdecimal() and cells[2].isdecimal():
        if not article.spans:
            article.text = _whole(article)
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


def _whole(article: _Article) -> str:
    return f"{article.parts.get('t', '')} {article.parts.get('a', '')}"


def _sentences(article: _Article) -> Iterator[tuple[int, Sentence | Reason]]:
    text = _whole(article)
    if article.problem is None and not text.strip():
        article.problem = Reason.EMPTY
    if article.problem is not None:
        yield article.number, article.problem
        return
    spans = _without_overlaps(article.spans)
    first = 0
    for begin, end in sentence_spans(text, spans, [len(article.parts.get("t", "")) + 1]):
        # No sentence cuts an entity, so the entities of a sentence are those that begin in it.
        first = bisect_left(spans, (begin, begin), first)
        inside = spans[first : bisect_left(spans, (end, end), first)]
        tokens = token_spans(text, begin, end, inside)
        starts = [start for start, _ in tokens]
        entities = [
            (article.spans[a, b].replace(" ", "_"), bisect_left(starts, a), bisect_left(starts, b))
            for a, b in inside
        ]
        yield (
            article.number,
            annotated(
                [text[a:b] for a, b in tokens],
                [(kind, a, b) for kind, a, b in entities if a < b],
                article.document_id,
            ),
        )


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
