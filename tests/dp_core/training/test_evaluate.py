"""Accuracy of models with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from dp_core.models.parameters import fresh
from dp_core.training.objectives import mlm_accuracy


@pytest.fixture()
def model(config):
    """A model whose logits are its output bias: 0 except for three words."""
    model = fresh(config, 0)
    model.parameters["mlm/norm/gain"][:] = 0
    model.parameters["mlm/bias"][[7, 8, 9]] = [3.0, 2.0, -1.0]
    return model


def test_accuracy_counts_first_guesses(model, store):
    """The model always predicts word 7, so its accuracy is the share of masked 7s."""
    counts = np.bincount(store.tokens.ravel(), minlength=40)
    shares = counts[5:] / counts[5:].sum()
    accuracy = mlm_accuracy(model, store, seed=0)
    assert abs(accuracy - shares[2]) < 0.12
    model.parameters["mlm/bias"][5] = 9.0  # a word that does not occur
    assert mlm_accuracy(model, store, seed=0) == 0


def test_accuracy_is_determined_by_its_seed(config, store):
    model = fresh(config, 3)
    model.parameters["mlm/bias"][8:14:2] = 1.0
    values = [mlm_accuracy(model, store, seed=s, max_rows=30) for s in (0, 0, 1, 2, 3)]
    assert values[0] == values[1]
    assert len(set(values)) > 1
