from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_core.data import corpus, privacy_units
from dp_core.data.corpus import Document, open_corpus, shards_of, write_corpus
from dp_core.data.privacy_units import Unit, bounded_sample, is_held_out, units_of
from dp_core.data.tokens import BERT, bert_segmentation, split_words
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary.subwords import UnitWords
from dp_core.vocabulary.tokenizer_files import GPT2


@pytest.fixture(scope="module", autouse=True)
def few_parts() -> Iterator[None]:
    """Spread the rows of these small corpora over few ranges to run ten times faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_PARTS", 2)
        yield


CASED = bert_segmentation(lowercase=False, strip_accents=False, placeholders=("[**Age**]", "___"))
WORDS = st.lists(
    st.sampled_from(["pain", "Denies", "120/80", "café", "[**Age**].", "."]), max_size=12
)
DOCUMENTS = st.lists(
    st.builds(
        Document,
        document_id=st.sampled_from(["a", "b", "c", "a/b", "1"]),
        patient_id=st.sampled_from(["p", "q", "pa", "1:p"]),
        text=WORDS.map(" ".join),
    ),
    min_size=1,
    max_size=12,
)


def units(folder: Path, docs: list[Document], unit: PrivacyUnit, n: int = 4) -> list[Unit]:
    write_corpus(docs, folder)
    return list(units_of(open_corpus(folder), unit, n))


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS, st.sampled_from(PrivacyUnit))
def test_every_word_is_in_exactly_one_unit(tmp_path_factory, docs, unit):
    of_docs = units(tmp_path_factory.mktemp("c"), docs, unit)
    if unit is PrivacyUnit.EXAMPLE:  # copies of an example share an id
        assert len({u.unit_id for u in of_docs}) == len({(u.unit_id, *u.texts) for u in of_docs})
    else:
        assert len({u.unit_id for u in of_docs}) == len(of_docs)
    in_units = sorted(w for u in of_docs for t in u.texts for w in split_words(t))
    assert in_units == sorted(w for d in docs for w in split_words(d.text))
    if unit is PrivacyUnit.EXAMPLE:
        assert all(len(split_words(t)) <= 4 for u in of_docs for t in u.texts)


@settings(max_examples=60, deadline=None)
@given(
    DOCUMENTS, st.sampled_from(PrivacyUnit), st.sampled_from([1, 2, 16]),
    st.sampled_from([BERT, CASED, GPT2]), st.sampled_from([1, 20, 1 << 22]),
)  # fmt: skip
def test_many_units_at_once_are_the_same_units_with_the_same_words(
    tmp_path_factory, docs, unit, shards, split, together
):
    folder = tmp_path_factory.mktemp("c")
    write_corpus(docs, folder, shards)
    one_by_one = [
        (u.unit_id, {word for text in u.texts for word in split.split(text)})
        for u in units_of(open_corpus(folder), unit, 4)
    ]
    at_once = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(privacy_units, "_TOGETHER", together)
        for shard in shards_of(folder):
            for block in UnitWords(unit, 4, split)(shard):
                items = block.items.to_pylist()
                for name, a, b in zip(block.unit_ids, block.starts, block.starts[1:], strict=False):
                    at_once.append((name, {items[m] for m in block.members[a:b]}))
    assert at_once == one_by_one


def test_a_unit_longer_than_a_row_group_is_one_unit(tmp_path, monkeypatch):
    monkeypatch.setattr("dp_core.data.corpus._ROW_GROUP", 40)
    docs = [Document(str(i), f"p{i % 3}", f"word{i} pain") for i in range(60)]
    write_corpus(docs, tmp_path, 1)
    (shard,) = shards_of(tmp_path)
    with pq.ParquetFile(tmp_path / shard.name) as file:
        assert file.num_row_groups > 10
    lengths = {
        name: end - start
        for block in UnitWords(PrivacyUnit.PATIENT, 1)(shard)
        for name, start, end in zip(block.unit_ids, block.starts, block.starts[1:], strict=False)
    }
    assert lengths == {"p0": 21, "p1": 21, "p2": 21}


def test_the_three_units(tmp_path):
    docs = [
        Document("1", "p", "a b c d e"),
        Document("2", "p", "f"),
        Document("1", "q", "g"),
        Document("1", "p", "h i"),  # the rest of p's document 1
    ]
    by = {u: sorted(sorted(x.texts) for x in units(tmp_path / u, docs, u)) for u in PrivacyUnit}
    assert by == {
        PrivacyUnit.PATIENT: [["a b c d e", "f", "h i"], ["g"]],
        PrivacyUnit.DOCUMENT: [["a b c d e", "h i"], ["f"], ["g"]],
        PrivacyUnit.EXAMPLE: [["a b c d "], ["e"], ["f"], ["g"], ["h i"]],
    }


def test_patient_units_need_patients(tmp_path):
    write_corpus([Document("1", "", "secretword")], tmp_path)
    with pytest.raises(BadInput, match="without a patient id") as caught:
        list(units_of(open_corpus(tmp_path), PrivacyUnit.PATIENT, 4))
    assert "secretword" not in str(caught.value)
    assert len(list(units_of(open_corpus(tmp_path), PrivacyUnit.DOCUMENT, 4))) == 1


def test_a_tuple_has_a_word(tmp_path):
    write_corpus([Document("1", "p", "a")], tmp_path)
    with pytest.raises(BadInput, match="0 words"):
        list(units_of(open_corpus(tmp_path), PrivacyUnit.EXAMPLE, 0))


@given(st.lists(st.integers(), max_size=30), st.integers(1, 10), st.text(max_size=5))
def test_at_most_the_limit_and_in_order(items, limit, unit):
    chosen = bounded_sample(items, limit, unit, b"k")
    assert len(chosen) == min(limit, len(items))
    rest = iter(items)
    assert all(any(x == y for y in rest) for x in chosen)  # `chosen` is a subsequence


@pytest.mark.statistical
def test_every_item_is_as_likely():
    counts = np.zeros(10)
    for unit in range(20_000):
        counts[bounded_sample(range(10), 3, str(unit), b"k")] += 1
    # Binomial(20000, 0.3): standard deviation 64.8.
    assert np.abs(counts - 6000).max() < 6 * 64.8


@pytest.mark.statistical
def test_held_out_share():
    held = sum(is_held_out(str(i), 0.05, b"k") for i in range(40_000))
    assert abs(held - 2000) < 6 * np.sqrt(40_000 * 0.05 * 0.95)
    assert not any(is_held_out(str(i), 0.0, b"k") for i in range(100))
