"""Tests of ranks by masked and causal models with known logits."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dp_core.audit.ranking import ranker
from dp_core.models.causal import causal_logits
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.parameters import fresh
from dp_core.nn import Layers

IDS = np.tile(np.arange(10, dtype=np.int32), (3, 1))
LENGTHS, POSITIONS = np.full(3, 10, np.int32), np.array([1, 2, 3], np.int32)
GPT2 = Gpt2Config(vocab_size=40, hidden=16, layers=2, heads=2, intermediate=32, max_positions=12)


BERT = BertConfig.of_size(vocab_size=40, hidden=64, layers=1, max_positions=12)


@pytest.fixture()
def model():
    """Return a model whose logits are its output bias for any input: 0 except for three words."""
    model = fresh(BERT, 0)
    model.parameters["mlm/norm/gain"][:] = 0
    model.parameters["mlm/bias"][[7, 8, 9]] = [3.0, 2.0, -1.0]
    return model


def test_ranks_equal_the_order_of_the_logits(model):
    secrets = np.array([7, 8, 9], np.int32)
    assert ranker(model)(IDS, LENGTHS, POSITIONS, secrets).tolist() == [1, 2, 40]


def test_ties_are_averaged(model):
    ranks = ranker(model)(IDS, LENGTHS, POSITIONS, np.array([0, 20, 39], np.int32))
    assert ranks.tolist() == [(3 + 39) / 2] * 3


def test_ranks_among_candidates(model):
    among = ranker(model, candidates=[8, 9, 11])
    assert among(IDS, LENGTHS, POSITIONS, np.array([8, 9, 11], np.int32)).tolist() == [1, 3, 2]


def test_an_answer_that_is_not_a_number_has_no_rank(model):
    model.parameters["mlm/bias"][30] = np.nan
    assert np.isnan(ranker(model)(IDS, LENGTHS, POSITIONS, POSITIONS)).all()


@pytest.mark.parametrize("candidates", [None, list(range(6, 40, 2))])
def test_a_causal_model_ranks_the_secret_as_the_next_piece(candidates):
    model, secrets = fresh(GPT2, 3), np.array([8, 20, 38], np.int32)
    logits = causal_logits(Layers(model.parameters), GPT2, tf.constant(IDS)).numpy()
    logits = logits.reshape(3, 10, 40)
    among = range(40) if candidates is None else candidates
    expected = [
        1 + sum(logits[i, POSITIONS[i] - 1, v] > logits[i, POSITIONS[i] - 1, secret] for v in among)
        for i, secret in enumerate(secrets)
    ]
    found = ranker(model, candidates)(IDS, LENGTHS, POSITIONS, secrets)
    assert found.tolist() == expected
    assert len(set(expected)) > 1


def test_neither_what_hides_the_secret_nor_what_follows_reaches_a_causal_model():
    rank, secrets = ranker(fresh(GPT2, 3)), np.array([8, 20, 38], np.int32)
    changed = IDS.copy()
    for row, place in enumerate(POSITIONS):
        changed[row, place:] = np.random.default_rng(row).integers(0, 40, 10 - place)
    before, after = (rank(ids, LENGTHS, POSITIONS, secrets) for ids in (IDS, changed))
    assert before.tolist() == after.tolist()
