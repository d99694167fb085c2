"""Sentences to rows and back: no word is lost, wherever a sentence is cut."""

from __future__ import annotations

import numpy as np
import pytest

from dp_core.data.ner import Sentence
from dp_core.training.finetune import rows_of, tags_of
from dp_core.vocabulary import wordpiece

LABELS = ("O", "B-drug", "I-drug")


@pytest.fixture(scope="module")
def tokenizer():
    return wordpiece.learn({"pain": 50, "aspirin": 40, "a": 5, "b": 5}, 60)


def sentence(words, tags=None):
    return Sentence(tuple(words), tuple(["O"] * len(words) if tags is None else tags))


def echo(rows):
    """Answer each row with its own labels."""
    answers = []
    for row in rows:
        answer = np.zeros(len(row.ids), np.int32)
        answer[list(row.firsts)] = row.labels
        answers.append(answer)
    return answers


def test_labels_stand_at_first_pieces(tokenizer):
    s = sentence(["pain", "aspirinaspirin", "b"], ["O", "B-drug", "I-drug"])
    (row,) = rows_of([s], LABELS, tokenizer, 32)
    pieces = [tokenizer.id_to_token(i) for i in row.ids]
    assert (pieces[0], pieces[-1]) == ("[CLS]", "[SEP]")
    assert [pieces[f][0] for f in row.firsts] == ["p", "a", "b"]
    assert all(not pieces[f].startswith("##") for f in row.firsts)
    assert row.labels == (0, 1, 2)


@pytest.mark.parametrize("max_length", [4, 7, 16, 64])
def test_tags_survive_any_cut(tokenizer, max_length):
    rng = np.random.default_rng(0)
    words = ["pain", "aspirin", "aabbaabb", "b"]
    sentences = [sentence(rng.choice(words, n), rng.choice(LABELS, n)) for n in (1, 5, 30, 2)]
    rows = rows_of(sentences, LABELS, tokenizer, max_length)
    assert max(len(r.ids) for r in rows) <= max_length
    assert tags_of(sentences, rows, echo(rows), LABELS) == [s.tags for s in sentences]


def test_a_word_without_pieces_is_outside(tokenizer):
    s = sentence(["\u200b", "pain"], ["B-drug", "B-drug"])
    rows = rows_of([s], LABELS, tokenizer, 32)
    assert tags_of([s], rows, echo(rows), LABELS) == [("O", "B-drug")]


def test_an_unknown_tag_counts_as_outside(tokenizer):
    (row,) = rows_of([sentence(["pain"], ["B-other"])], LABELS, tokenizer, 32)
    assert row.labels == (0,)


def test_special_tokens_written_in_text_are_text(tokenizer):
    (row,) = rows_of([sentence(["[SEP]", "pain"])], LABELS, tokenizer, 32)
    assert tokenizer.token_to_id("[SEP]") not in row.ids[1:-1]
