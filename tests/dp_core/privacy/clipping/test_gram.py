import numpy as np
import pytest
import tensorflow as tf

from dp_core.privacy.clipping import layer_rules as linear
from dp_core.privacy.clipping.layer_rules import (
    EmbeddingRecord,
    LinearRecord,
    TiedProjectionRecord,
    cross_term,
    gram_squared_norms,
)


def truth(x: np.ndarray, g: np.ndarray) -> np.ndarray:
    products = np.einsum("uti,utj->uij", x.astype(np.float64), g.astype(np.float64))
    return np.square(products).sum((1, 2))


def nearly_equal_tokens(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nearly equal tokens and gradients that cancel, so the sum is far below its terms."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, 1, 64)) + 1e-4 * rng.standard_normal((8, 128, 64))
    g = rng.standard_normal((8, 128, 32))
    g -= g.mean(1, keepdims=True)
    return x.astype(np.float32), g.astype(np.float32)


def test_on_ordinary_tokens_it_is_tight():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 20, 8)).astype(np.float32)
    g = rng.standard_normal((4, 20, 16)).astype(np.float32)
    bound = gram_squared_norms(tf.constant(x), tf.constant(g)).numpy()
    assert (bound >= truth(x, g)).all()
    np.testing.assert_allclose(bound, truth(x, g), rtol=2e-3)


def test_on_nearly_equal_tokens_it_is_still_a_bound_and_needs_its_rounding_term():
    below = 0
    for seed in range(5):
        x, g = nearly_equal_tokens(seed)
        bound = gram_squared_norms(tf.constant(x), tf.constant(g)).numpy()
        assert (bound >= truth(x, g)).all()
        grams = [np.einsum("uti,usi->uts", a, a) for a in (x, g)]
        below += int(((grams[0] * grams[1]).sum((1, 2)) < truth(x, g)).sum())
    assert below > 0  # without the rounding term, some norms are too small


@pytest.mark.parametrize("tokens,d_in,d_out", [(1, 5, 3), (3, 40, 30), (50, 4, 6)])
@pytest.mark.parametrize("units_of_a_part", [1, 2, 9])
def test_both_forms_of_the_linear_rule_are_the_definition(
    monkeypatch, tokens, d_in, d_out, units_of_a_part
):
    monkeypatch.setattr(linear, "_LARGEST_PART", 4 * d_in * d_out * units_of_a_part)
    rng = np.random.default_rng(tokens)
    units = 3
    x = rng.standard_normal((units, tokens, d_in)).astype(np.float32)
    g = rng.standard_normal((units, tokens, d_out)).astype(np.float32)
    factors = np.array([0.5, 0.0, 2.0], np.float32)
    record = LinearRecord("a", units, tf.constant(x.reshape(-1, d_in)), tf.constant(0.0))
    products = np.einsum("uti,utj->uij", x, g)
    biases = g.sum(1)
    norms = np.square(products).sum((1, 2)) + np.square(biases).sum(1)
    for form in (record._explicit, record._implicit):
        gradients = form(tf.constant(x), tf.constant(g))
        np.testing.assert_allclose(gradients.squared_norms, norms, rtol=2e-3)
        if form == record._explicit:
            assert len(gradients.parts) == {1: 4, 2: 3, 9: 2}[units_of_a_part]
        sums = gradients.combine(tf.constant(factors), gradients.parts)
        expected = np.einsum("u,uij->ij", factors, products)
        np.testing.assert_allclose(sums["a/kernel"], expected, atol=1e-4)
        np.testing.assert_allclose(sums["a/bias"], factors @ biases, atol=1e-4)


def test_the_cross_term_is_a_bound_also_where_it_cancels():
    """The gradients of lookup and projection are nearly opposite."""
    rng = np.random.default_rng(3)
    units, tokens, words, width = 3, 6, 9, 16
    ids = np.stack([rng.permutation(words)[:tokens] for _ in range(units)]).astype(np.int32)
    g = rng.standard_normal((units, tokens, width)).astype(np.float32)
    h = -g + 1e-4 * rng.standard_normal(g.shape).astype(np.float32)
    # Each prediction has its whole mass at the word of the same token.
    logits = np.zeros((units, tokens, words), np.float32)
    np.put_along_axis(logits, ids[:, :, None], 1.0, axis=2)
    flat_ids = tf.constant(ids)
    lookup = EmbeddingRecord(
        "word", "position", None, units, flat_ids, None, {"word": words}, tf.constant(g)
    )
    projection = TiedProjectionRecord(
        "word", None, units, tf.constant(h.reshape(-1, width)), tf.constant(0.0)
    )
    cross = cross_term(
        lookup, tf.constant(g), projection, tf.constant(logits.reshape(-1, words))
    ).numpy()
    g, h = g.astype(np.float64), h.astype(np.float64)
    exact = 2 * np.einsum("utd,utd->u", g, h)
    parts = np.square(g).sum((1, 2)) + np.square(h).sum((1, 2))
    assert (cross >= exact).all()
    assert (parts + exact < 1e-6 * parts).all()  # the gradients cancel
    np.testing.assert_allclose(cross, exact, rtol=1e-4)
