"""The texts for measuring vocabularies: units of private text, counts of public words.

Real text is in the folder that CONFIDE_DATA names.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.real_text import ARTICLES, NOTES, PUBLIC
from dp_core.data.privacy_units import Unit
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers, read_source
from dp_core.data.tokens import HeldItems, split_words
from dp_core.vocabulary.item_sets import BoundedSets, ItemSets

Held = list[tuple[str, set[str]]]  # each unit and its distinct items


@dataclass(frozen=True)
class Corpus:
    """A private corpus of CONFIDE_DATA.

    Attributes:
        file: path below the folder.
        abstracts: path of the same documents, shortened, for trainings.
        format: one of `corpus_readers`.
        unit: the protected unit.
        declared_units: a bound on the number of units.
        columns: the columns of a table, as the setting `private_columns` names them.
    """

    file: str
    abstracts: str
    format: str
    unit: str
    declared_units: int
    columns: str = ""


CORPORA = {
    "noteevents_format": Corpus(NOTES, NOTES, "noteevents", "patient", 1200),
    # Five articles name no author, and 37 authors have several articles, so the unit is the
    # article.
    "pmc_rct_articles": Corpus(
        ARTICLES,
        "pmc_rct_articles/abstracts.jsonl.xz",
        "jsonl",
        "document",
        3000,
        "text:text,document:doc_id",
    ),
}


def units(name: str, folder: Path) -> list[Unit]:
    """Return the units of a private corpus, each with its texts."""
    corpus = CORPORA[name]
    by_unit: dict[str, list[str]] = {}
    readers, file = corpus_readers(corpus.columns), folder / corpus.file
    for document in read_source(readers, corpus.format, file, Quarantine()):
        unit = document.patient_id if corpus.unit == "patient" else document.document_id
        by_unit.setdefault(unit, []).append(document.text)
    return [Unit(unit, texts) for unit, texts in by_unit.items()]


def held_by(units: Iterable[Unit]) -> Held:
    """Return the distinct words of each unit."""
    return [(u.unit_id, {w for text in u.texts for w in split_words(text)}) for u in units]


def public_counts(folder: Path) -> Counter[str]:
    """Return the number of articles of wikitext-2 that contain each word."""
    readers = corpus_readers(public=True)
    articles = read_source(readers, "text", folder / PUBLIC, Quarantine())
    return document_counts((Unit(a.document_id, [a.text]) for a in articles), split_words)


def novels_counts(folder: Path) -> Counter[str]:
    """Return the number of pieces of 1,000 characters of the novels that contain each word."""
    readers = corpus_readers("text:text,document:doc_id")
    file = folder / "english_novels_100/novels.jsonl.xz"
    novels = read_source(readers, "jsonl", file, Quarantine())
    pieces = (n.text[i : i + 1000] for n in novels for i in range(0, len(n.text), 1000))
    return document_counts((Unit("", [piece]) for piece in pieces), split_words)


def tuples(units: Iterable[Unit], length: int, words: int) -> Iterator[tuple[str, set[str]]]:
    """Yield the first `words` words of a corpus as tuples of `length`: the unit `example`."""
    left = words
    for unit in units:
        for number, text in enumerate(unit.texts):
            split = split_words(text)[:left]
            left -= len(split)
            for start in range(0, len(split), length):
                yield f"{unit.unit_id} {number} {start}", set(split[start : start + length])


def made_up(units: int = 5000, items: int = 200_000, seed: int = 0) -> Held:
    """Return sets of items: Zipf's law with exponent 1.1, log-normal lengths of about 250 words."""
    rng = np.random.default_rng(seed)
    mass = np.cumsum(1 / (np.arange(items) + 2.7) ** 1.1)
    lengths = rng.lognormal(5.5, 0.8, units).astype(int) + 5
    return [
        (str(u), {f"w{i}" for i in np.searchsorted(mass, rng.random(n) * mass[-1])})
        for u, n in enumerate(lengths)
    ]


def document_counts(units: Iterable[Unit], split: Callable[[str], Iterable[str]]) -> Counter[str]:
    """Return the number of units that hold each word, without bounds; for public text only."""
    counts: Counter[str] = Counter()
    for unit in units:
        counts.update({word for text in unit.texts for word in split(text)})
    return counts


def item_sets(
    units: Iterable[tuple[str, Iterable[str]]],
    items_per_unit: int,
    key: bytes,
    *,
    declared_units: int | None = None,
    exclude: Collection[str] = frozenset(),
) -> ItemSets:
    """Return the bounded sets of units, given their items; see `BoundedSets`."""
    return BoundedSets(_held, items_per_unit, key, declared_units, exclude)(units)


def _held(units: Iterable[tuple[str, Iterable[str]]]) -> Iterator[HeldItems]:
    """Yield the distinct items of units in blocks of a thousand units."""
    source = iter(units)
    while block := [(unit_id, set(items)) for unit_id, items in itertools.islice(source, 1000)]:
        every = [item for _, items in block for item in items]
        numbered = pa.array(every, pa.large_string()).dictionary_encode()
        yield HeldItems(
            [unit_id for unit_id, _ in block],
            numbered.dictionary,
            np.cumsum([0, *(len(items) for _, items in block)]),
            numbered.indices.to_numpy(),
        )
