"""Real entity corpora, where CONFIDE_DATA says they are, against the counts they came with."""

import os
from collections import Counter
from pathlib import Path

import pytest

from dp_core.data.ner import entities
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_sentences

pytestmark = pytest.mark.skipif(
    not os.environ.get("CONFIDE_DATA"), reason="CONFIDE_DATA does not name a folder of data sets"
)


def read(kind: str, name: str) -> tuple[int, int, Counter[str], Quarantine]:
    """Return sentences, tokens, entities by type, and the quarantine."""
    path = Path(os.environ["CONFIDE_DATA"]) / name
    if not path.exists():
        pytest.skip(f"CONFIDE_DATA has no {name}")
    q = Quarantine()
    sentences = list(read_sentences(kind, path, q))
    found = Counter(k for s in sentences for k, _, _ in entities(s.tags))
    return len(sentences), sum(len(s.tokens) for s in sentences), found, q


@pytest.mark.parametrize(
    ("file", "sentences", "tokens", "found"),
    [
        ("ner_bc5cdr/train.tsv", 4560, 118_170, {"Chemical": 5203, "Disease": 4182}),
        ("ner_bc5cdr/dev.tsv", 4581, 117_453, {"Chemical": 5347, "Disease": 4246}),
        ("ner_bc5cdr/test.tsv", 4797, 124_750, {"Chemical": 5385, "Disease": 4424}),
        ("ner_ncbi_disease/train.tsv", 5424, 135_701, {"Disease": 5134}),
        ("ner_ncbi_disease/dev.tsv", 923, 23_969, {"Disease": 787}),
        ("ner_ncbi_disease/test.tsv", 940, 24_497, {"Disease": 960}),
    ],
)
def test_columns(file: str, sentences: int, tokens: int, found: dict[str, int]) -> None:
    n, t, by_type, q = read("columns", file)
    assert (n, t, by_type) == (sentences, tokens, found)
    assert q.rejected == 0


@pytest.mark.parametrize(
    ("part", "lines", "tokens", "found"),
    [
        ("train", 4541, 116_721, {"treatment": 5203, "problem": 4182}),
        ("dev", 4544, 115_656, {"treatment": 5347, "problem": 4244}),
        ("test", 4761, 122_473, {"treatment": 5385, "problem": 4424}),
    ],
)
def test_i2b2_layout(part: str, lines: int, tokens: int, found: dict[str, int]) -> None:
    n, t, by_type, q = read("i2b2", f"i2b2_2010_format/bc5cdr_derived/{part}")
    assert (n, t, by_type) == (lines, tokens, found)
    assert q.rejected == 0


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("train", {"Chemical": 5203, "Disease": 4182}),
        ("test", {"Chemical": 5385, "Disease": 4424}),
    ],
)
def test_pubtator_gives_the_entities_of_the_columns(part: str, found: dict[str, int]) -> None:
    sentences, tokens, by_type, q = read("pubtator", f"ner_bc5cdr/pubtator_{part}.txt")
    assert by_type == found
    assert q.rejected == 0
    columns = read("columns", f"ner_bc5cdr/{part}.tsv")
    assert abs(sentences - columns[0]) < 0.01 * columns[0]
    assert abs(tokens - columns[1]) < 0.01 * columns[1]


def test_a_wrong_offset_in_a_published_corpus_is_quarantined() -> None:
    # One article of the NCBI training set has an annotation that does not fit its text.
    _, _, found, q = read("pubtator", "ner_ncbi_disease/pubtator_train.txt")
    assert q.counts.total() == 1
    assert found.total() > 5100
