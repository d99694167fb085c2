"""Sentences with entities, and their scores: worked out by hand, and as seqeval has them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import classification_report
from seqeval.scheme import IOB2

from dp_core.data.labelled_text import fold_of
from dp_core.data.ner import EntityScores, Sentence, entities, label_set
from dp_core.data.ner import score as score_of


def score(expected: list[list[str]], predicted: list[list[str]]) -> EntityScores:
    words = [Sentence(("a",) * len(tags), tuple(tags)) for tags in expected]
    return score_of(words, predicted)


def test_a_sentence_has_a_tag_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 tags"):
        Sentence(("a", "b"), ("O",))


def test_labels_do_not_depend_on_the_order_of_sentences() -> None:
    one, two = Sentence(("a",), ("B-test",)), Sentence(("b", "c"), ("O", "I-problem"))
    expected = ("O", "B-problem", "I-problem", "B-test", "I-test")
    assert label_set([one, two]) == label_set([two, one]) == expected
    assert label_set([]) == ("O",)


def test_a_fold_is_a_function_of_the_document_alone_or_of_its_patient() -> None:
    names = [f"record-{n}" for n in range(1000)]
    folds = [fold_of(Sentence(("a",), ("O",), name), 5) for name in names]
    sizes = [folds.count(fold) for fold in range(5)]
    assert sum(sizes) == 1000
    assert all(150 < size < 250 for size in sizes)  # 200 ± 13
    # Stated, so that nobody's folds move in silence.
    assert folds[:8] == [0, 0, 0, 3, 1, 4, 0, 0]
    together = {fold_of(Sentence(("a",), ("O",), name, "p7"), 5) for name in names}
    assert len(together) == 1


TAGS = st.sampled_from(["O", "B-problem", "I-problem", "B-test", "I-test"])
PAIRS = st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=8), min_size=1, max_size=5)


def test_strict_entities() -> None:
    assert entities(["B-a", "I-a", "O", "I-a", "B-b", "I-a", "B-a", "B-a"]) == [
        ("a", 0, 2),  # the lone I-a at 3 and the I-a after b belong to none
        ("b", 4, 5),
        ("a", 6, 7),
        ("a", 7, 8),
    ]
    assert entities(["B-a", "I-b", "I-a"]) == [("a", 0, 1)]
    assert entities([]) == []


def test_figures_worked_out_by_hand() -> None:
    # In conlleval's manner: 5 phrases, 6 found, 3 correct.
    gold = [
        ["B-problem", "I-problem", "O", "B-test", "O"],
        ["B-treatment", "O", "B-problem", "I-problem", "I-problem"],
        ["O", "B-test", "O"],
    ]
    guess = [
        ["B-problem", "I-problem", "O", "B-treatment", "O"],  # 1 right, 1 of the wrong type
        ["B-treatment", "O", "B-problem", "I-problem", "O"],  # 1 right, 1 too short
        ["B-problem", "B-test", "O"],  # 1 right, 1 out of nothing
    ]
    scores = score(gold, guess)
    assert (scores.micro.correct, scores.micro.predicted, scores.micro.expected) == (3, 6, 5)
    assert scores.micro.precision == pytest.approx(0.5)
    assert scores.micro.recall == pytest.approx(0.6)
    assert scores.micro.f1 == pytest.approx(0.545454545)
    by = scores.by_type
    assert list(by) == ["problem", "test", "treatment"]
    assert (by["problem"].precision, by["problem"].recall) == pytest.approx((1 / 3, 1 / 2))
    assert by["problem"].f1 == pytest.approx(0.4)
    assert by["test"].f1 == pytest.approx(2 / 3)
    assert by["treatment"].f1 == pytest.approx(2 / 3)


@settings(max_examples=150, deadline=None)
@given(PAIRS)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
def test_as_seqeval(pairs: list[list[tuple[str, str]]]) -> None:
    gold = [[g for g, _ in s] for s in pairs]
    guess = [[p for _, p in s] for s in pairs]
    scores = score(gold, guess)
    if not scores.by_type:
        assert scores.micro.f1 == 0
        return
    theirs = classification_report(
        gold, guess, mode="strict", scheme=IOB2, output_dict=True, zero_division=0
    )
    for mine, name in [(scores.micro, "micro avg"), *((s, k) for k, s in scores.by_type.items())]:
        their = theirs[name]
        assert mine.f1 == pytest.approx(their["f1-score"])
        assert (mine.precision, mine.recall) == pytest.approx((their["precision"], their["recall"]))
        assert mine.expected == their["support"]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="3 tags are expected, 2"):
        score([["O", "O", "O"]], [["O", "O"]])
    with pytest.raises(ValueError, match="zip"):
        score([["O"]], [])


def test_nothing_found_is_zero_not_an_error() -> None:
    assert score([["B-a"]], [["O"]]).micro.f1 == 0
    assert score([["O"]], [["O"]]).micro.precision == 0
