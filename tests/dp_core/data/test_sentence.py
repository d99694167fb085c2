"""Sentences and their label sets."""

import pytest

from dp_core.data.ner import Sentence, label_set


def test_a_sentence_has_a_tag_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 tags"):
        Sentence(("a", "b"), ("O",))


def test_labels_do_not_depend_on_the_order_of_sentences() -> None:
    one, two = Sentence(("a",), ("B-test",)), Sentence(("b", "c"), ("O", "I-problem"))
    expected = ("O", "B-problem", "I-problem", "B-test", "I-test")
    assert label_set([one, two]) == label_set([two, one]) == expected
    assert label_set([]) == ("O",)
