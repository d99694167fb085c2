import json
import os
from collections import Counter
from pathlib import Path

import pytest
from reader_contract import read_corpus, read_labelled_texts, read_sentences

from dp_core.data.labelled_text import entities
from dp_core.data.readers.quarantine import Quarantine

pytestmark = pytest.mark.skipif(
    not os.environ.get("CONFIDE_DATA"), reason="CONFIDE_DATA does not name a folder of data sets"
)


def data(name: str) -> Path:
    path = Path(os.environ["CONFIDE_DATA"]) / name
    if not path.exists():
        pytest.skip(f"CONFIDE_DATA has no {name}")
    return path


def test_notes_in_noteevents_columns():
    q = Quarantine()
    docs = list(read_corpus("noteevents", data("noteevents_format/NOTEEVENTS_derived.csv.xz"), q))
    assert (q.taken, q.left_out, q.rejected) == (5173 - 11, 11, 0)
    assert len({d.document_id for d in docs}) == len(docs)
    assert len({d.patient_id for d in docs}) in (1152, 1153)  # one patient may have only error rows
    by_patient: dict[str, set[str]] = {}
    for d in docs:
        by_patient.setdefault(d.text, set()).add(d.patient_id)
    assert max(map(len, by_patient.values())) == 1  # no two patients share a text
    assert sum(len(d.text.split()) for d in docs) == 2_394_141  # 2,399,943 with the error rows


@pytest.mark.cases
def test_wikitext_2(file, tokens, articles):
    docs = list(read_corpus("text", data(f"wikitext-2/{file}"), public=True))
    assert sum(len(d.text.split()) for d in docs) == tokens
    assert abs(len(docs) - articles) <= 3  # the published number of titles is approximate
    assert len({d.document_id for d in docs}) == len(docs)


def read(kind: str, name: str) -> tuple[int, int, Counter[str], Quarantine]:
    """Return sentences, tokens, entities by type, and the quarantine."""
    q = Quarantine()
    sentences = list(read_sentences(kind, data(name), q))
    by_type = Counter(k for s in sentences for k, _, _ in entities(s.tags))
    return len(sentences), sum(len(s.tokens) for s in sentences), by_type, q


# Kind and file, with the numbers of sentences, tokens, and entities by type.
PUBLISHED = json.loads((Path(__file__).parent / "published_entities.json").read_text())


@pytest.mark.parametrize(("kind", "file", "sentences", "tokens", "expected"), PUBLISHED)
def test_sentences_and_entities(kind, file, sentences, tokens, expected):
    n, t, by_type, q = read(kind, file)
    assert (n, t, by_type) == (sentences, tokens, expected)
    assert q.rejected == 0


@pytest.mark.cases
def test_pubtator_gives_the_entities_of_the_columns(part, expected):
    sentences, tokens, by_type, q = read("pubtator", f"ner_bc5cdr/pubtator_{part}.txt")
    assert by_type == expected
    assert q.rejected == 0
    columns = read("columns", f"ner_bc5cdr/{part}.tsv")
    assert abs(sentences - columns[0]) < 0.01 * columns[0]
    assert abs(tokens - columns[1]) < 0.01 * columns[1]


def test_a_wrong_offset_in_a_published_corpus_is_quarantined() -> None:
    # One article of the NCBI training set has an annotation that does not fit its text.
    _, _, by_type, q = read("pubtator", "ner_ncbi_disease/pubtator_train.txt")
    assert q.counts.total() == 1
    assert by_type.total() > 5100


@pytest.mark.cases
def test_sentence_pairs(part, pairs, articles):
    q = Quarantine()
    path = data(f"evidence_inference_pairs/{part}.tsv")
    texts = list(read_labelled_texts("tsv", path, q, pairs=True))
    assert (len(texts), q.rejected, q.left_out) == (pairs, 0, 0)
    assert len({text.document_id for text in texts}) == articles
    assert len({text.label for text in texts}) == 3
