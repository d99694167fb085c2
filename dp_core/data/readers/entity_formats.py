"""Sentences with entities, in the formats of i2b2/VA, in columns of tokens and tags, and PubTator.

*i2b2/VA 2010 and 2011.* `name.txt` has a tokenised sentence a line, and a second file its concepts.
A concept is `c="chest pain" 3:1 3:2||t="problem"`: line from 1, token from 0, both ends included.
Lines that share a concept are one sentence. The two files are in the same folder or in separate
folders: `txt/name.txt` and `concept/name.con` in 2010, `docs/name.txt` and `concepts/name.txt.con`
in 2011. The coreference files of 2011 (`chains/`, `pairs/`) are skipped. Concepts may overlap (in
2011, persons and pronouns within problems); see `annotated`.

*Columns.* Token and tag, between tabs or spaces, with blank lines between sentences: IOB or IOB2.

*PubTator.* `id|t|title`, `id|a|abstract`, then `id, start, end, mention, type, …` between tabs.
Offsets count characters of the title, one separator, and the abstract. Lines of another shape
(relations such as BC5CDR's `CID`) are not entities, and skipped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dp_core.data.labelled_text import (
    Entity,
    Sentence,
    annotated,
    sentence_spans,
    token_spans,
)
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    DAMAGED,
    LONGEST,
    bare_name,
    input_files,
    offset,
    read_items,
    refuse_damaged_file,
    text_lines,
    unpacked_name,
)
from dp_core.errors import BadInput, PrivateTextRefusal

# --- i2b2

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
            quarantine.taken += 1
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


# --- columns

_TAG = re.compile(r"O|[BI]-\S+")
_DOCUMENT = "-DOCSTART-"


def read_columns(path: Path, quarantine: Quarantine, *, public: bool = False) -> Iterator[Sentence]:
    """Yield sentences; the first column is the token, the last the tag (see `read_sentences`).

    A document is named by its file and the number of lines `-DOCSTART-` before it in that file.
    IOB tags become IOB2. A sentence with a bad line is quarantined as a whole: training
    and scores would otherwise use a sentence with a gap.

    Args:
        path: a file or folder.
        quarantine: counts the unusable sentences.
        public: whether a line `-DOCSTART-` may begin another document within a file. The word can
            occur in a text, so it must not make privacy units: a private file is one document.

    Raises:
        PrivateTextRefusal: as `read_sentences`; or a private file is divided.
    """

    def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
        name = unpacked_name(file, path)
        documents = set()
        for number, sentence in _sentences_of_columns(file, name):
            if isinstance(sentence, Sentence):
                documents.add(sentence.document_id)
            if len(documents) > 1 and not public:
                raise PrivateTextRefusal(
                    "a private file is divided into documents by -DOCSTART-",
                    where=str(path),
                    fix="Give each document a separate file: the text of a file must not"
                    " decide its number of privacy units.",
                )
            yield number, sentence

    return read_items(path, ".tsv", quarantine, sentences_of)


def _sentences_of_columns(file: Path, name: str) -> Iterator[tuple[int, Sentence | Reason]]:
    document = 0
    for block in _blocks(file):
        tokens: list[str] = []
        tags: list[str] = []
        problem: tuple[int, Reason] | None = None
        for number, line in block:
            read = line if isinstance(line, Reason) else _token_and_tag(line)
            if isinstance(read, Reason):
                if problem is None or read is Reason.TAG:  # an unknown tag refuses the source
                    problem = number, read
            elif read[0] == _DOCUMENT:
                document += 1
            else:
                tokens.append(read[0])
                tags.append(read[1])
        if problem:
            yield problem
        elif tokens:
            yield block[0][0], Sentence(tuple(tokens), iob2(tags), f"{name}#{document}")


def _blocks(file: Path) -> Iterator[list[tuple[int, str | Reason]]]:
    """Yield the numbered lines between blank lines; a block ends with the line that is too much."""
    block: list[tuple[int, str | Reason]] = []
    size = 0  # characters
    for number, line in text_lines(file):
        if not line.strip():
            if block:
                yield block
            block, size = [], 0
        elif size <= LONGEST:
            size += len(line)
            block.append((number, Reason.TOO_LONG if size > LONGEST else line))
    if block:
        yield block


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


# --- PubTator

_PART = re.compile(r"([^|\t]+)\|([ta])\|(.*)", re.DOTALL)
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


def read_pubtator(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of a file or folder; see `read_sentences`.

    The longer of overlapping entities is kept, and the first of equally long ones. An entity that
    differs from the text at its offsets puts its article into quarantine.
    """

    def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
        for block in _blocks(file):
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
