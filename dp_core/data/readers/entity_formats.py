"""Sentences of tokens with entities: the concepts of i2b2, and columns of tokens and tags.

*i2b2 2010, 2011 and 2012.* `name.txt` has a tokenised sentence a line, and a second file its
concepts. A concept is `c="chest pain" 3:1 3:2||t="problem"`: line from 1, token from 0, both ends
included. Lines that share a concept are one sentence. The two files are in the same folder or in
separate folders: `txt/name.txt` and `concept/name.con` in 2010, `docs/name.txt` and
`concepts/name.txt.con` in 2011. In 2012, `name.xml.extent` lists events and times of
`name.xml.txt`, as `EVENT="chest pain" 3:1 3:2||type="PROBLEM"||…` and `TIMEX3=…`. Files of
relations and `SECTIME`, which repeats a time, are skipped. Concepts may overlap (in 2011, persons
and pronouns within problems); see `annotated`.

*Columns.* The first column is the token and the last the tag. Tabs or spaces separate columns, and
blank lines separate sentences. A sentence may begin with lines of comments, `# …`.

A tag is `O`, or a prefix and a type, such as `B-problem`. Prefixes are `B` (first word of an
entity), `I` (within), `E` or `L` (last) and `S` or `U` (the only word). The schemes differ in
the prefixes that they use (Ratinov and Roth 2009):

| scheme | one word | first | within | last |
| --- | --- | --- | --- | --- |
| IOB1 | I, or B directly after an entity of the same type | as one word | I | I |
| IOB2, also called BIO | B | B | I | I |
| IOBES, also called BIOES | S | B | I | E |
| BILOU | U | B | I | L |
| BIOS | S | B | I | I |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from dp_core.config.data import TagScheme
from dp_core.data.labelled_text import Entity, Sentence, annotated
from dp_core.data.readers import sources
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput, PrivateTextRefusal

# --- i2b2

_FOLDERS = ("txt", "concept", "docs", "concepts")
_CONCEPTS = (".con", ".extent")
_OTHERS = (".chains", ".pairs", ".tlink", ".xml")  # coreference, relations, and the same in XML
_CONCEPT = re.compile(
    r'(c|EVENT|TIMEX3)="(.*)" (\d+):(\d+) (\d+):(\d+)'
    r'\|\|(?:t="([^"\s]+)"|type="([^"\s]*)"(?:\|\|.*)?)\s*'
)


@dataclass(frozen=True)
class _Concept:
    text: str
    begin: tuple[int, int]  # line and token
    end: tuple[int, int]
    kind: str


def read_i2b2(path: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    """Yield the sentences of all documents under a folder; see `read_source`.

    A concept that differs from the text at its offsets puts all lines of its sentence into
    quarantine.
    """

    def document(name: str, text: Path, concepts: Path) -> Iterator[Sentence]:
        return _document(name, text, concepts, quarantine)

    return read_pairs(path, quarantine, _CONCEPTS, document, *_OTHERS)


def read_pairs(
    path: Path,
    quarantine: Quarantine,
    suffixes: tuple[str, ...],
    document: Callable[[str, Path, Path], Iterator[Sentence | Reason]],
    *others: str,
) -> Iterator[Sentence]:
    """Yield the sentences of all documents under a folder: texts with files of annotations.

    A text without annotations, annotations without a text, and a duplicate file put the document
    into quarantine.

    Args:
        path: the folder.
        quarantine: counts the unusable items.
        suffixes: of the annotations; texts are `.txt`.
        document: name, text and annotations of a document -> its sentences, or the reason why it
            has none.
        others: further suffixes that are not listed as passed over.
    """
    texts = _by_name(path, (".txt",), quarantine, *suffixes, *others)
    annotations = _by_name(path, suffixes, Quarantine(), ".txt")
    if not path.is_dir():
        raise BadInput(
            "texts and their annotations are read from a folder",
            where=str(path),
            fix="Give the folder.",
        )
    for name in sorted(texts.keys() | annotations.keys()):
        if name not in texts or name not in annotations:
            missing = f".txt or {' or '.join(suffixes)} is missing"
            quarantine.reject(Reason.UNREADABLE, f"{name}: {missing}")
        elif len(texts[name]) + len(annotations[name]) > 2:
            quarantine.reject(Reason.TWICE, name)
        else:
            [text], [notes] = texts[name], annotations[name]
            with sources.refuse_damaged_file(path, text, quarantine):
                try:
                    for sentence in document(name, text, notes):
                        if isinstance(sentence, Reason):
                            quarantine.reject(sentence, name)
                        else:
                            quarantine.taken += 1
                            yield sentence
                except sources.DAMAGED:
                    quarantine.reject(Reason.UNREADABLE, name)


def _by_name(
    path: Path, suffixes: tuple[str, ...], quarantine: Quarantine, *others: str
) -> dict[str, list[Path]]:
    files = defaultdict(list)
    for file in sources.input_files(path, suffixes, quarantine, *others):
        files[_name(file, path)].append(file)
    return files


def _name(file: Path, folder: Path) -> str:
    """Return the common name of a text and its annotations, with their folder.

    It is `beth/record-13` for `beth/txt/record-13.txt` and `beth/concept/record-13.con` (or
    `record-13.txt.con`): the hospitals of the i2b2 corpus use the same record numbers.
    """
    inside = file.relative_to(folder).parent
    if inside.name.lower() in _FOLDERS:
        inside = inside.parent
    name = Path(sources.bare_name(file)).stem
    if name.lower().endswith((".txt", ".xml")):  # of `name.txt.con` and `name.xml.extent`
        name = name[: -len(".txt")]
    return (inside / name).as_posix()


def _document(name: str, text: Path, concepts: Path, quarantine: Quarantine) -> Iterator[Sentence]:
    by_line = _concepts(name, concepts, quarantine)
    if by_line is None:
        return
    sentence = _Lines()
    for number, line in sources.text_lines(text):
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
    for number, line in sources.text_lines(file):
        size += len(line)
        if size > sources.LONGEST:
            quarantine.reject(Reason.TOO_LONG, f"{name}.con")
            return None
        if isinstance(line, str) and (not line.strip() or line.startswith("SECTIME=")):
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
    numbers = [sources.offset(digits) for digits in match.groups()[2:6]]
    begin, first, end, last = (-1 if number is None else number for number in numbers)
    if -1 in (begin, first, end, last):
        return Reason.OFFSETS
    kind = match[7] or match[8] or match[1]  # some events of 2012 have no type
    return _Concept(match[2], (begin, first), (end, last), kind)


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
        if self._size > sources.LONGEST:
            self._problem = self._problem or Reason.TOO_LONG
        before = len(self._tokens)
        if self._problem:
            self._tokens = []
        else:
            self._tokens += line.split()
        self._of_line[number] = range(before, len(self._tokens))

    def end(self, name: str, quarantine: Quarantine) -> Iterator[Sentence]:
        """Yield the sentence, or put its lines into quarantine."""
        entities_of_tokens = None if self._problem else self._entities()
        if entities_of_tokens is None:
            for number in self._of_line:
                quarantine.reject(self._problem or Reason.OFFSETS, f"{name}.txt:{number}")
        elif self._tokens:
            yield annotated(self._tokens, entities_of_tokens, name)

    def _entities(self) -> list[Entity] | None:
        """Return the entities, or None if a concept does not fit."""
        extents = []
        for c in self._concepts:
            span = range(self._index(c.begin), self._index(c.end) + 1)
            if span.start < 0 or not span or not self._holds(span, c):
                return None
            extents.append((c.kind, span.start, span.stop))
        return extents

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

COLUMNS = (".tsv", ".conll", ".txt", ".iob", ".bio")  # suffixes
_DOCUMENT = "-DOCSTART-"


def read_columns(
    path: Path, quarantine: Quarantine, *, public: bool = False, scheme: TagScheme | None = None
) -> Iterator[Sentence]:
    """Yield sentences; the first column is the token, the last the tag (see `read_source`).

    A document is named by its file and the number of lines `-DOCSTART-` before it in that file.
    Tags become IOB2. A sentence with a bad line is quarantined as a whole: training and scores
    would otherwise use a sentence with a gap.

    Args:
        path: a file or folder.
        quarantine: counts the unusable sentences, and lists the schemes that fit all of the others.
        scheme: refuses tags that are not well-formed in this scheme; None: each scheme is read.
        public: whether a line `-DOCSTART-` may begin another document within a file. The word can
            occur in a text, so it must not make privacy units: a private file is one document.

    Raises:
        PrivateTextRefusal: as `read_source`; or a private file is divided.
    """

    quarantine.schemes = [*get_args(TagScheme)]

    def tags_in_scheme(tags: list[str]) -> tuple[str, ...] | None:
        if scheme and not fits(tags, scheme):
            return None
        quarantine.schemes = [known for known in quarantine.schemes if fits(tags, known)]
        return tuple(tags_of(entities_of(tags), len(tags)))

    def sentences_of(file: Path) -> Iterator[tuple[int, Sentence | Reason]]:
        name = sources.unpacked_name(file, path)
        documents = set()
        for number, sentence in _sentences_of_columns(file, name, tags_in_scheme):
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

    return sources.read_items(path, COLUMNS, quarantine, sentences_of)


def _sentences_of_columns(
    file: Path, name: str, tags_in_scheme: Callable[[list[str]], tuple[str, ...] | None]
) -> Iterator[tuple[int, Sentence | Reason]]:
    document = 0
    for block in blocks_of(file):
        tokens: list[str] = []
        tags: list[str] = []
        problem: tuple[int, Reason] | None = None
        for number, line in block:
            read = line if isinstance(line, Reason) else _token_and_tag(line)
            if not tokens and isinstance(line, str) and _is_comment(line):
                continue
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
            iob2 = tags_in_scheme(tags)
            whole = iob2 and Sentence(tuple(tokens), iob2, f"{name}#{document}")
            yield block[0][0], whole or Reason.TAG


def blocks_of(file: Path) -> Iterator[list[tuple[int, str | Reason]]]:
    """Yield the numbered lines between blank lines; a block ends with the line that is too much."""
    block: list[tuple[int, str | Reason]] = []
    size = 0  # characters
    for number, line in sources.text_lines(file):
        if not line.strip():
            if block:
                yield block
            block, size = [], 0
        elif size <= sources.LONGEST:
            size += len(line)
            block.append((number, Reason.TOO_LONG if size > sources.LONGEST else line))
    if block:
        yield block


def _token_and_tag(line: str) -> tuple[str, str] | Reason:
    parts = line.split("\t") if "\t" in line else line.split()
    token, tag = parts[0].strip(), parts[-1].strip()
    if token == _DOCUMENT:
        return token, "O"
    if len(parts) < 2 or not token:
        return Reason.WRONG_COLUMNS
    return (token, tag) if TAG.fullmatch(tag) else Reason.TAG


def _is_comment(line: str) -> bool:
    """Return whether a line is a comment, and not the token `#` with its tag."""
    return line.startswith("#") and "\t" not in line and not TAG.fullmatch(line.split()[-1])


# --- schemes of tags

TAG = re.compile(r"O|[BIESLU]-\S+")
_PREFIXES: dict[TagScheme, tuple[str, str, str, str]] = {  # in the order of the table
    "iob1": ("I", "I", "I", "I"),
    "iob2": ("B", "B", "I", "I"),
    "iobes": ("S", "B", "I", "E"),
    "bilou": ("U", "B", "I", "L"),
    "bios": ("S", "B", "I", "I"),
}


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence's tags in any scheme.

    An entity ends before `O`, another type, or a prefix that begins one, and after a prefix that
    ends one. Every tag but `O` belongs to an entity, as in the scorer of CoNLL-2000.
    """
    out: list[Entity] = []
    is_open = False
    for i, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        if prefix == "O":
            is_open = False
            continue
        if is_open and prefix in "IEL" and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1], i + 1)
        else:
            out.append((kind, i, i + 1))
        is_open = prefix in "BI"
    return out


def tags_of(entities: Iterable[Entity], length: int, scheme: TagScheme = "iob2") -> list[str]:
    """Return the tags of a sentence.

    Args:
        entities: entities in the order of the sentence, without overlaps.
        length: number of words.
        scheme: the scheme of the tags.
    """
    tags, before = ["O"] * length, ("", 0, 0)
    only, first, within, last = _PREFIXES[scheme]
    for kind, begin, end in entities:
        prefixes = only if end - begin == 1 else first + within * (end - begin - 2) + last
        if scheme == "iob1" and before[::2] == (kind, begin):
            prefixes = "B" + prefixes[1:]
        tags[begin:end] = [f"{prefix}-{kind}" for prefix in prefixes]
        before = kind, begin, end
    return tags


def fits(tags: Sequence[str], scheme: TagScheme) -> bool:
    """Return whether the tags of a sentence are well-formed in a scheme."""
    return tags_of(entities_of(tags), len(tags), scheme) == list(tags)
