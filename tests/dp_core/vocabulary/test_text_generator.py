import itertools
from collections import Counter
from random import Random

import pytest

from dp_core.data.corpus import Document
from dp_core.data.tokens import split_words
from dp_core.errors import BadInput
from dp_core.vocabulary.text_generator import BackOffModel, draw_public_documents, write_documents

PHRASES = {
    2: {"the chest": 40, "chest was": 30, "was clear": 30, "clear .": 9},
    3: {"the chest was": 25, "chest was clear": 20},
}


def test_written_pairs_of_words_are_released_or_begin_a_phrase():
    model = BackOffModel(PHRASES)
    pairs = {("the", "chest"), ("chest", "was"), ("was", "clear"), ("clear", ".")}
    starts = {phrase.split()[0] for counts in PHRASES.values() for phrase in counts}
    for seed in range(50):
        text = model.write(30, Random(seed))
        assert len(text) == 30
        for one, two in itertools.pairwise(text):
            assert (one, two) in pairs or two in starts


def test_more_frequent_phrases_are_written_more_often():
    model = BackOffModel({2: {"a b": 900, "a c": 100, "b a": 500, "c a": 500}})
    text = model.write(20_000, Random(3))
    after_a = [two for one, two in itertools.pairwise(text) if one == "a"]
    assert 0.85 < after_a.count("b") / len(after_a) < 0.95


def continuations(model: BackOffModel, *context: str) -> Counter[str]:
    text = model.write(60_000, Random(3))
    size = len(context)
    return Counter(
        text[i + size] for i in range(len(text) - size) if tuple(text[i : i + size]) == context
    )


def test_model_backs_off_with_the_share_that_counts_do_not_explain():
    pairs = {"x a": 80, "a b": 1000, "b x": 100, "c x": 100, "d x": 100}
    all_explained = continuations(BackOffModel({2: pairs, 3: {"x a c": 80}}), "x", "a")
    assert all_explained["c"] / all_explained.total() > 0.95  # except for the least back-off
    half = continuations(BackOffModel({2: pairs, 3: {"x a c": 20, "x a d": 20}}), "x", "a")
    assert (half["c"] + half["d"]) / half.total() == pytest.approx(0.5, abs=0.05)
    assert half["b"] / half.total() == pytest.approx(0.5, abs=0.05)  # the rest by pairs


def test_unreleased_context_is_bounded_by_its_rarest_part():
    phrases = {
        2: {"w x": 90, "x y": 90, "y z": 40, "z e": 40, "z f": 40, "e w": 90, "f w": 90},
        5: {"w x y z e": 10},
    }
    after = continuations(BackOffModel(phrases), "w", "x", "y", "z")
    # Of at most 40 units with "y z", 10 continued with e; otherwise e and f are equally likely.
    assert after["e"] / after.total() == pytest.approx(0.25 + 0.75 / 2, abs=0.06)


def test_released_word_is_written_as_phrase_of_one_word():
    phrases = {1: {"alone": 500}, 2: {"a b": 10, "b c": 10}}
    text = BackOffModel(phrases).write(2000, Random(1))
    assert text.count("alone") > 500 and {"a", "b", "c"} < set(text)


def test_documents_are_determined_by_phrases_and_public_seed():
    docs = list(write_documents(PHRASES, 5, 40, 1))
    backwards = {n: dict(reversed(c.items())) for n, c in reversed(PHRASES.items())}
    assert docs == list(write_documents(backwards, 5, 40, 1))
    assert docs != list(write_documents(PHRASES, 5, 40, 2))
    assert len({d.document_id for d in docs}) == 5 and {d.patient_id for d in docs} == {""}
    assert len({d.text for d in docs}) > 1
    for words in (d.text.split(" ") for d in docs):
        assert split_words(" ".join(words)) == words and len(words) == 40


def test_writing_text_without_released_phrases_is_refused():
    for phrases in ({2: {}, 3: {}}, {1: {"alone": 5}, 2: {}}):  # single words are not enough
        with pytest.raises(BadInput, match="no phrase was released"):
            BackOffModel(phrases)


def test_phrases_with_negative_counts_are_still_written():
    assert BackOffModel({2: {"a b": -3}}).write(4, Random(0)) == ["a", "b", "a", "b"]


PUBLIC = [Document(f"{n}", "", " ".join(["word"] * 10)) for n in range(400)]


@pytest.mark.parametrize("times", [0.25, 1.0, 2.5])
def test_public_documents_have_the_wanted_number_of_words_and_equal_shares(times):
    drawn = list(draw_public_documents(lambda: PUBLIC, times * 4000, 1))
    words = sum(len(d.text.split()) for d in drawn)
    assert words == pytest.approx(times * 4000, abs=5 * 10 * (400 * 0.25) ** 0.5)  # 5 deviations
    copies = Counter(d.document_id.split("-")[1] for d in drawn)
    assert len({d.document_id for d in drawn}) == len(drawn)
    assert set(copies.values()) <= {int(times), int(times) + 1}
    assert drawn == list(draw_public_documents(lambda: PUBLIC, times * 4000, 1))
    assert (drawn == list(draw_public_documents(lambda: PUBLIC, times * 4000, 2))) == (times == 1)


def test_empty_public_text_is_refused():
    with pytest.raises(BadInput, match="public text is empty"):
        list(draw_public_documents(lambda: [Document("1", "", " ")], 10, 1))
