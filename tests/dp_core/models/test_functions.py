import numpy as np
import pytest
import tensorflow as tf

from dp_core.nn import Layers, cross_entropy, gelu, gelu_new, standardise

RNG = np.random.default_rng(0)
X = (RNG.standard_normal((6, 9)) * 3).astype(np.float32)  # NumPy: TensorFlow is not set up yet
LABELS = np.array([0, 3, 8, 8, 1, 5], np.int32)


def plain_standardise(x: tf.Tensor) -> tf.Tensor:
    centred = x - tf.reduce_mean(x, -1, keepdims=True)
    return centred * tf.math.rsqrt(tf.reduce_mean(centred**2, -1, keepdims=True) + 1e-3)


@pytest.mark.parametrize(
    "ours,plain",
    [
        (gelu, tf.nn.gelu),
        (gelu_new, lambda x: tf.nn.gelu(x, approximate=True)),
        (lambda x: standardise(x, 1e-3), plain_standardise),
        (
            lambda x: cross_entropy(x, LABELS),
            lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, x),
        ),
    ],
    ids=["gelu", "gelu_new", "standardise", "cross_entropy"],
)
def test_functions_and_derivatives_equal_plain_tensorflow(ours, plain):
    results = []
    x = tf.constant(X)
    for f in (ours, plain):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
            places = tf.reshape(tf.range(tf.size(y)), y.shape)
            weighted = tf.reduce_sum(y * tf.cast(places, tf.float32))
        results.append((y.numpy(), tape.gradient(weighted, x).numpy()))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=2e-6, rtol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=2e-4, rtol=1e-4)


def test_cross_entropy_of_extreme_logits_is_finite():
    logits = tf.constant([[1000.0, -1000.0], [-1000.0, 1000.0]])
    np.testing.assert_allclose(cross_entropy(logits, tf.constant([0, 0])), [0, 2000])


def test_dropout_keeps_the_mean_and_its_masks_are_independent():
    """Masks of other rows, layers and places share a bit as often as chance has it."""
    rate, rows, values = 0.3, 6, 40_000
    layers, x = Layers({}), tf.ones((rows * 4, values // 4))
    assert layers.dropout(x) is x  # in evaluation
    layers.drop(rate, tf.cast(tf.range(rows), tf.uint32))
    masks = np.concatenate([layers.dropout(x).numpy().reshape(rows, values) for _ in range(3)])
    assert set(np.unique(masks)) == {0.0, np.float32(1 / (1 - rate))}
    kept = (masks > 0).astype(np.float64) - (1 - rate)
    slack = 6 / values**0.5  # six deviations
    assert np.abs(kept.mean(1)).max() < slack * 0.5
    correlations = np.corrcoef(kept) - np.eye(len(kept))
    assert np.abs(correlations).max() < slack
    assert max(abs(np.corrcoef(row[1:], row[:-1])[0, 1]) for row in kept) < slack
