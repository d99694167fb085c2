"""PubTator: `id|t|title`, `id|a|abstract`, then `id, start, end, mention, type, …` between tabs.

Offsets count characters of the title, one separator, and the abstract. Lines of another shape
(relations such as BC5CDR's `CID`) are not entities, and skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dp_core.corpus.readers.files import bare_name, damage_told, input_files
from dp_core.corpus.readers.quarantine import Quarantine, Reason
from dp_core.ner.readers.text_lines import text_lines
from dp_core.ner.sentence import Sentence
from dp_core.ner.sentence_splitting import sentence_spans, token_spans

_TEXT = re.compile(r"([^|\t]+)\|([ta])\|(.*)", re.DOTALL)
_SPACES = re.compile(r"\s")


@dataclass
class _Article:
    place: str
    parts: dict[str, str] = field(default_factory=dict)  # "t" and "a"
    spans: dict[tuple[int, int], str] = field(default_factory=dict)
    document_id: str = ""
    problem: Reason | None = None


def read_pubtator(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder; see `read_sentences`.

    Of overlapping entities the longer one stays (on a tie the first). An entity whose offsets do
    not give its own text puts its article into quarantine.
    """
    for file in input_files(path, ".txt"):
        with damage_told(path, file, quarantine):
            for article in _articles(file):
                yield from _sentences(article, quarantine)


def _articles(file: Path) -> Iterator[_Article]:
    name = bare_name(file)
    article: _Article | None = None
    for number, line in text_lines(file):
        if isinstance(line, str) and not line.strip():
            if article:
                yield article
            article = None
            continue
        article = article or _Article(f"{name}:{number}")
        _read_line(article, line)
    if article:
        yield article


def _read_line(article: _Article, line: str | Reason) -> None:
    """Add a line to its article, or note what is wrong with it."""
    if isinstance(line, Reason):
        article.problem = article.problem or line
        return
    if not article.spans and (match := _TEXT.fullmatch(line)):
        article.document_id, article.parts[match[2]] = match[1], match[3]
        return
    cells = line.split("\t")
    if len(cells) >= 5 and cells[1].isdecimal() and cells[2].isdecimal():
        start, end = int(cells[1]), int(cells[2])
        if (
            _SPACES.sub(" ", _whole(article)[start:end]) != _SPACES.sub(" ", cells[3])
            or not cells[3]
        ):
            article.problem = article.problem or Reason.OFFSETS
        article.spans.setdefault((start, end), cells[4].strip())
    elif len(cells) < 3:
        article.problem = article.problem or Reason.WRONG_COLUMNS


def _whole(article: _Article) -> str:
    return f"{article.parts.get('t', '')} {article.parts.get('a', '')}"


def _sentences(article: _Article, quarantine: Quarantine) -> Iterator[Sentence]:
    text = _whole(article)
    if article.problem is None and not text.strip():
        article.problem = Reason.EMPTY
    if article.problem is not None:
        quarantine.reject(article.problem, article.place)
        return
    kinds = _without_overlaps(article.spans)
    entities = sorted(kinds)
    for begin, end in sentence_spans(text, entities, [len(article.parts.get("t", "")) + 1]):
        tokens = token_spans(text, begin, end, entities)
        tags = _tags(tokens, entities, kinds)
        quarantine.take()
        yield Sentence(tuple(text[a:b] for a, b in tokens), tags, article.document_id)


def _without_overlaps(spans: dict[tuple[int, int], str]) -> dict[tuple[int, int], str]:
    kept: dict[tuple[int, int], str] = {}
    for start, end in sorted(spans, key=lambda s: (s[0] - s[1], s[0])):  # longest first
        if all(end <= a or b <= start for a, b in kept):
            kept[start, end] = spans[start, end]
    return kept


def _tags(
    tokens: list[tuple[int, int]],
    entities: list[tuple[int, int]],
    kinds: dict[tuple[int, int], str],
) -> tuple[str, ...]:
    tags = []
    for start, end in tokens:
        inside = next((e for e in entities if e[0] <= start and end <= e[1]), None)
        if inside is None:
            tags.append("O")
        else:
            tags.append(f"{'B' if start == inside[0] else 'I'}-{kinds[inside].replace(' ', '_')}")
    return tuple(tags)
