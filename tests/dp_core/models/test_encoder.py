"""What the encoder computes: against a reference, and what must not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from scipy.special import erf

from dp_core.errors import BadInput
from dp_core.models.bert import encode, mlm_logits, mlm_row_losses
from dp_core.models.config import BertConfig
from dp_core.models.parameters import Bert, fresh
from dp_core.nn.layers import Layers

CONFIG = BertConfig(vocab_size=30, hidden=8, layers=2, heads=2, intermediate=16, max_positions=12)


@pytest.fixture(scope="module")
def model() -> Bert:
    rng = np.random.default_rng(0)
    start = fresh(CONFIG, 0).parameters
    return Bert(
        CONFIG, {n: a + 0.3 * rng.standard_normal(a.shape).astype("f") for n, a in start.items()}
    )


def reference_states(model: Bert, ids: np.ndarray) -> np.ndarray:
    """BERT of one unpadded row in float64, written out from Devlin et al. and Vaswani et al."""
    p = {n: a.astype(np.float64) for n, a in model.parameters.items()}

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(x.var(-1, keepdims=True) + CONFIG.layer_norm_epsilon)
        return scaled * p[f"{name}/gain"] + p[f"{name}/bias"]

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]

    x = p["embeddings/word"][ids] + p["embeddings/position"][: len(ids)] + p["embeddings/type"][0]
    x = norm("embeddings/norm", x)
    width = CONFIG.hidden // CONFIG.heads
    for i in range(CONFIG.layers):
        q, k, v = np.split(linear(f"layer_{i}/qkv", x), 3, axis=1)
        heads = []
        for h in range(CONFIG.heads):
            part = slice(h * width, (h + 1) * width)
            scores = q[:, part] @ k[:, part].T / math.sqrt(width)
            shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            heads.append(shares @ v[:, part])
        attended = linear(f"layer_{i}/attention_output", np.concatenate(heads, 1))
        x = norm(f"layer_{i}/attention_norm", x + attended)
        inner = linear(f"layer_{i}/intermediate", x)
        inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
        x = norm(f"layer_{i}/output_norm", x + linear(f"layer_{i}/output", inner))
    return x


def test_equals_the_reference(model):
    ids = np.array([2, 7, 7, 9, 29, 3])
    states = encode(
        Layers(model.parameters), CONFIG, tf.constant([ids], tf.int32), tf.constant([6])
    )
    np.testing.assert_allclose(states[0], reference_states(model, ids), atol=2e-5)


def test_what_stands_in_the_padding_does_not_matter(model):
    layers = Layers(model.parameters)
    ids = np.array([[2, 7, 8, 3, 0, 0], [2, 7, 8, 3, 11, 12]], np.int32)
    states = encode(layers, CONFIG, tf.constant(ids), tf.constant([4, 4])).numpy()
    np.testing.assert_allclose(states[0, :4], states[1, :4], atol=1e-6)
    np.testing.assert_allclose(states[0, :4], reference_states(model, ids[0, :4]), atol=2e-5)


def test_rows_do_not_meet(model):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 30, (3, 6)).astype(np.int32)
    before = encode(Layers(model.parameters), CONFIG, tf.constant(ids), tf.constant([6, 6, 6]))
    ids[1] = rng.integers(0, 30, 6)
    after = encode(Layers(model.parameters), CONFIG, tf.constant(ids), tf.constant([6, 2, 6]))
    np.testing.assert_array_equal(before.numpy()[[0, 2]], after.numpy()[[0, 2]])
    assert np.abs(before.numpy()[1] - after.numpy()[1]).max() > 0.01


def test_asking_for_places_gives_their_states(model):
    rng = np.random.default_rng(2)
    layers = Layers(model.parameters)
    ids, lengths = tf.constant(rng.integers(0, 30, (3, 6)), tf.int32), tf.constant([6, 4, 5])
    places = np.array([[1, 3], [0, 0], [4, 2]], np.int32)
    every = encode(layers, CONFIG, ids, lengths).numpy()
    asked = encode(layers, CONFIG, ids, lengths, asked=tf.constant(places)).numpy()
    np.testing.assert_allclose(asked, np.take_along_axis(every, places[:, :, None], 1), atol=1e-5)


def test_the_logits_are_tied_to_the_word_table(model):
    ids, lengths = tf.constant([[2, 5, 3]]), tf.constant([3])
    layers = Layers(model.parameters)
    logits = mlm_logits(layers, CONFIG, ids, lengths, tf.constant([[1]])).numpy()
    raised = model.parameters | {"embeddings/word": model.parameters["embeddings/word"].copy()}
    raised["embeddings/word"][17] *= 2  # not in the input: only its logit may change
    changed = mlm_logits(Layers(raised), CONFIG, ids, lengths, tf.constant([[1]])).numpy()
    assert np.flatnonzero(logits != changed).tolist() == [17]


def test_a_rows_loss_is_the_mean_over_its_own_predictions(model):
    layers = Layers(model.parameters)
    ids = tf.constant([[2, 5, 6, 3]] * 3)
    args = (layers, CONFIG, ids, tf.constant([4, 4, 4]), tf.constant([[1, 2]] * 3))
    labels = tf.constant([[5, 9]] * 3)
    weights = tf.constant([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    both, first, none = mlm_row_losses(*args, labels, weights).numpy()
    logits = mlm_logits(*args).numpy().reshape(3, 2, -1)[0]
    own = [np.log(np.exp(r).sum()) - r[label] for r, label in zip(logits, (5, 9), strict=True)]
    assert both == pytest.approx(np.mean(own), rel=1e-5)
    assert first == pytest.approx(own[0], rel=1e-5)
    assert none == 0


def test_a_distilberts_epsilon_cannot_be_another():
    with pytest.raises(BadInput, match="layer_norm_epsilon"):
        BertConfig(
            vocab_size=9,
            hidden=8,
            layers=1,
            heads=1,
            intermediate=8,
            type_vocab=0,
            layer_norm_epsilon=1e-5,
        )
