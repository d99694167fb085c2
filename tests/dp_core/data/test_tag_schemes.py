"""Tests of the parser of tags, compared with seqeval's."""

import warnings
from collections.abc import Iterator, Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval import scheme as seqeval
from seqeval.metrics.sequence_labeling import get_entities

from dp_core.config.data import TagScheme
from dp_core.data.labelled_text import Entity, entities
from dp_core.data.tag_schemes import entities_of, fits, tags_of

SCHEMES = get_args(TagScheme)
OF_SEQEVAL = {
    "iob1": seqeval.IOB1, "iob2": seqeval.IOB2, "iobes": seqeval.IOBES, "bilou": seqeval.BILOU,
}  # fmt: skip


def sequences(prefixes: str) -> st.SearchStrategy[list[str]]:
    tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("a", "b-c"))]
    return st.lists(st.sampled_from(tags), min_size=1, max_size=9)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval names each unknown tag
        yield


def strict(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Return the entities that seqeval finds in its strict mode."""
    found = seqeval.Entities([list(tags)], OF_SEQEVAL[scheme]).entities[0]
    return [(entity.tag, entity.start, entity.end) for entity in found]


@given(sequences("BIES"))
def test_entities_without_a_scheme_are_those_of_seqeval(tags):
    assert entities_of(tags) == [(kind, a, b + 1) for kind, a, b in get_entities(tags)]
    bilou = [tag.replace("E-", "L-", 1).replace("S-", "U-", 1) for tag in tags]
    assert entities_of(bilou) == entities_of(tags)


@pytest.mark.parametrize(
    ("scheme", "prefixes"),
    [("iob1", "BI"), ("iob2", "BI"), ("iobes", "BIES"), ("bilou", "BILU")],
)
def test_tags_fit_a_scheme_if_the_strict_seqeval_explains_each_of_them(
    scheme: TagScheme, prefixes: str
) -> None:
    @given(sequences(prefixes))
    def compare(tags: list[str]) -> None:
        expected = strict(tags, scheme)
        explained = sum(end - begin for _, begin, end in expected)
        assert fits(tags, scheme) == (explained == sum(tag != "O" for tag in tags))
        if fits(tags, scheme):
            assert entities_of(tags) == expected

    compare()


@given(sequences("BIESLU"), st.sampled_from(SCHEMES))
def test_entities_survive_every_scheme_and_iob2_is_read_as_scores_read_it(tags, scheme):
    listed = entities_of(tags)
    assert sum(end - begin for _, begin, end in listed) == sum(tag != "O" for tag in tags)
    written = tags_of(listed, len(tags), scheme)
    assert entities_of(written) == listed
    assert fits(written, scheme)
    assert entities(tags_of(listed, len(tags))) == listed


def test_bios_has_a_tag_for_single_words_and_none_for_last_words():
    assert fits(["S-a", "B-a", "I-a", "O", "S-b"], "bios")
    for wrong in (["B-a", "O"], ["B-a", "E-a"], ["I-a"], ["S-a", "I-a"]):
        assert not fits(wrong, "bios")
