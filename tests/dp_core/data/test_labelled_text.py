import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import classification_report
from seqeval.scheme import IOB2
from sklearn.metrics import accuracy_score, f1_score

from dp_core.data.labelled_text import (
    LabelledText,
    Sentence,
    TaskScores,
    all_entities,
    annotated,
    class_scores,
    entities,
    fold_of,
    joined,
    label_set,
    owner_of,
    tagging_errors,
    with_types,
)
from dp_core.data.labelled_text import score as score_of


def test_pairs_of_one_premise_are_one_document_where_the_source_names_none():
    first, other, third = (LabelledText(a, b) for a, b in (("x", "y"), ("x", "z"), ("y", "y")))
    assert first.document_id == other.document_id != third.document_id
    assert LabelledText("x", document_id=" 7.0 ").document_id == "7"
    assert {fold_of(text, 1000) for text in (first, other)} == {fold_of(first, 1000)}


def test_a_patient_owns_all_of_its_documents():
    texts = [LabelledText("x", document_id=name, patient_id="p") for name in "ab"]
    assert {owner_of(text) for text in texts} == {"p"}
    assert owner_of(Sentence(("a",), ("O",), "d")) == "d"


def test_class_scores_equal_scikit_learn():
    rng = np.random.default_rng(0)
    expected, predicted = ([str(c) for c in rng.integers(0, n, 200)] for n in (3, 4))
    scores = class_scores(expected, predicted)  # class 3 is predicted and never expected
    assert scores.micro.recall == accuracy_score(expected, predicted)
    assert scores.macro_f1 == pytest.approx(f1_score(expected, predicted, average="macro"))
    f1s = f1_score(expected, predicted, average=None)
    assert [score.f1 for score in scores.by_type.values()] == pytest.approx(f1s)


def score(expected: list[list[str]], predicted: list[list[str]]) -> TaskScores:
    words = [Sentence(("a",) * len(tags), tuple(tags)) for tags in expected]
    return score_of(words, predicted)


def test_a_sentence_has_a_tag_for_each_token():
    with pytest.raises(ValueError, match="2 tokens but 1 tags"):
        Sentence(("a", "b"), ("O",))


def test_labels_do_not_depend_on_the_order_of_sentences():
    one, two = Sentence(("a",), ("B-test",)), Sentence(("b", "c"), ("O", "I-problem"))
    expected = ("O", "B-problem", "I-problem", "B-test", "I-test")
    assert label_set([one, two]) == label_set([two, one]) == expected
    assert label_set([]) == ("O",)


def test_a_fold_is_a_function_of_the_document_alone_or_of_its_patient():
    names = [f"record-{n}" for n in range(1000)]
    folds = [fold_of(Sentence(("a",), ("O",), name), 5) for name in names]
    sizes = [folds.count(fold) for fold in range(5)]
    assert sum(sizes) == 1000
    assert all(150 < size < 250 for size in sizes)  # 200 ± 13
    # Fixed values detect a change of the folds.
    assert folds[:8] == [0, 0, 0, 3, 1, 4, 0, 0]
    together = {fold_of(Sentence(("a",), ("O",), name, "p7"), 5) for name in names}
    assert len(together) == 1


TAGS = st.sampled_from(["O", "B-problem", "I-problem", "B-test", "I-test"])
PAIRS = st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=8), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(PAIRS)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_as_seqeval(pairs):
    gold = [[g for g, _ in s] for s in pairs]
    guess = [[p for _, p in s] for s in pairs]
    scores = score(gold, guess)
    if not scores.by_type:
        assert scores.micro.f1 == scores.micro.precision == 0
        return
    theirs = classification_report(
        gold, guess, mode="strict", scheme=IOB2, output_dict=True, zero_division=0
    )
    for mine, name in [(scores.micro, "micro avg"), *((s, k) for k, s in scores.by_type.items())]:
        their = theirs[name]
        assert mine.f1 == pytest.approx(their["f1-score"])
        assert (mine.precision, mine.recall) == pytest.approx((their["precision"], their["recall"]))
        assert mine.expected == their["support"]


def test_scores_without_texts_are_zero_and_different_lengths_are_refused():
    assert (class_scores([], []).micro.recall, class_scores([], []).macro_f1) == (0, 0)
    with pytest.raises(ValueError, match="is shorter"):
        class_scores(["a"], [])
    with pytest.raises(ValueError, match="3 tags are expected, 2"):
        score([["O", "O", "O"]], [["O", "O"]])
    with pytest.raises(ValueError, match="zip"):
        score([["O"]], [])


def test_the_longest_of_overlapping_entities_is_learned_and_all_are_expected():
    spans = [("person", 1, 2), ("problem", 0, 3), ("problem", 0, 3), ("test", 2, 4)]
    sentence = annotated(("his", "left", "arm", "x"), spans, "d", "p")
    assert sentence.tags == ("B-problem", "I-problem", "I-problem", "O")
    assert sorted(all_entities(sentence)) == sorted(spans)
    assert (sentence.document_id, sentence.patient_id) == ("d", "p")
    micro = score_of([sentence], [sentence.tags]).micro
    assert (micro.correct, micro.predicted, micro.expected) == (1, 1, 4)
    missed = [e.expected for e in tagging_errors(sentence, sentence.tags)]
    assert missed == [("problem", 0, 3), ("person", 1, 2), ("test", 2, 4)]


def test_choosing_types_restores_entities_hidden_by_a_longer_one():
    sentence = annotated(("a", "b", "c"), [("person", 0, 3), ("problem", 1, 2)])
    (chosen,) = with_types([sentence], ["problem"])
    assert (chosen.tags, chosen.overlapped) == (("O", "B-problem", "O"), ())
    assert with_types([sentence], ["person", "problem"]) == [sentence]
    assert with_types([sentence], ["other"])[0].tags == ("O",) * 3


ENTITIES = st.lists(
    st.tuples(st.sampled_from("xyz"), st.integers(0, 7), st.integers(1, 4)).map(
        lambda e: (e[0], e[1], min(8, e[1] + e[2]))
    ),
    max_size=6,
)


@given(ENTITIES)
def test_no_entity_is_lost(spans):
    sentence = annotated(("w",) * 8, spans)
    assert sorted(all_entities(sentence)) == sorted(spans)
    for kind, begin, end in sentence.overlapped:
        kept = [e for e in entities(sentence.tags) if e[1] < end and begin < e[2]]
        assert any(e[2] - e[1] >= end - begin for e in kept), kind


@given(st.lists(st.integers(1, 4), max_size=5), ENTITIES)
def test_joined_documents_do_not_depend_on_the_sentence_splitter(sizes, spans):
    """This holds unless an entity crosses a cut, which no reader produces."""
    cuts = sorted({0, 8, *(c for c in itertools.accumulate(sizes) if c < 8)})
    whole = [e for e in spans if any(a <= e[1] and e[2] <= b for a, b in itertools.pairwise(cuts))]
    words = tuple("abcdefgh")
    parts = [
        annotated(words[a:b], [(k, s - a, e - a) for k, s, e in whole if a <= s and e <= b], "note")
        for a, b in itertools.pairwise(cuts)
    ]
    other = Sentence(("z",), ("O",), "another")
    (together, last) = joined([*parts[:1], other, *parts[1:]])
    assert last == other
    assert together.tokens == words
    assert sorted(all_entities(together)) == sorted(all_entities(annotated(words, whole)))
    assert together.tags == annotated(words, whole).tags


def test_sentences_without_a_document_stay_apart():
    alone = [Sentence(("a",), ("O",)), Sentence(("b",), ("O",))]
    assert joined(alone) == alone


def test_each_tagging_error_is_reported_once():
    right = Sentence(tuple("abcdefgh"), ("B-x", "I-x", "O", "B-y", "O", "B-x", "O", "B-y"))
    guess = ("B-x", "O", "O", "B-x", "B-z", "O", "O", "B-y")
    errors = {(e.kind, e.expected, e.predicted) for e in tagging_errors(right, guess)}
    assert errors == {
        ("wrong boundary", ("x", 0, 2), ("x", 0, 1)),
        ("wrong type", ("y", 3, 4), ("x", 3, 4)),
        ("spurious", None, ("z", 4, 5)),
        ("missed", ("x", 5, 6), None),
    }
    assert tagging_errors(right, right.tags) == []


@given(PAIRS)
def test_errors_and_right_ones_add_up(pairs):
    for sentence in pairs:
        gold, guess = (tuple(side) for side in zip(*sentence, strict=True))
        right = Sentence(("a",) * len(gold), gold)
        errors, micro = tagging_errors(right, guess), score_of([right], [guess]).micro
        assert sum(e.expected is not None for e in errors) == micro.expected - micro.correct
        assert sum(e.predicted is not None for e in errors) == micro.predicted - micro.correct
