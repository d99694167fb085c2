"""Tests of texts with a class: their documents and patients, and scores by definition."""

import itertools

import numpy as np
import pytest

from dp_core.data.labelled_text import LabelledText, Sentence, class_scores, fold_of, owner_of


def test_pairs_of_one_premise_are_one_document_where_the_source_names_none() -> None:
    one, other, third = (LabelledText(a, b) for a, b in (("x", "y"), ("x", "z"), ("y", "y")))
    assert one.document_id == other.document_id != third.document_id
    assert LabelledText("x", document_id=" 7.0 ").document_id == "7"
    assert {fold_of(text, 1000) for text in (one, other)} == {fold_of(one, 1000)}


def test_a_patient_owns_all_of_its_documents() -> None:
    texts = [LabelledText("x", document_id=name, patient_id="p") for name in "ab"]
    assert {owner_of(text) for text in texts} == {"p"}
    assert owner_of(Sentence(("a",), ("O",), "d")) == "d"


def test_class_scores_equal_their_definition() -> None:
    rng = np.random.default_rng(0)
    expected, predicted = ([str(c) for c in rng.integers(0, n, 200)] for n in (3, 4))
    found = class_scores(expected, predicted)
    pairs = list(zip(expected, predicted, strict=True))
    assert found.accuracy == sum(a == b for a, b in pairs) / 200
    f1s = []
    for c in "0123":  # class 3 is predicted and never expected
        hits = sum(a == b == c for a, b in pairs)
        precision, recall = (
            hits / max(1, sum(x == c for x in side)) for side in zip(*pairs, strict=True)
        )
        f1s.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    assert found.macro_f1 == pytest.approx(sum(f1s) / 4)
    assert list(found.f1_by_class.values()) == pytest.approx(f1s)


def test_scores_without_texts_are_zero_and_different_lengths_are_refused() -> None:
    assert (class_scores([], []).accuracy, class_scores([], []).macro_f1) == (0, 0)
    with pytest.raises(ValueError, match="is shorter"):
        class_scores(["a"], [])


def test_accuracy_is_micro_f1_of_one_prediction_each() -> None:
    for labels in itertools.product("ab", repeat=3):
        found = class_scores(labels, ["a", "a", "b"])
        assert found.accuracy == 2 * found.right / (3 + 3)
