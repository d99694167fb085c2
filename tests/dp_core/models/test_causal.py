"""The decoder: against a reference in NumPy, and what must not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from dp_core.errors import BadInput
from dp_core.models.config import Gpt2Config
from dp_core.models.gpt2 import causal_logits, causal_row_losses
from dp_core.models.hugging_face import load, load_model, save
from dp_core.models.parameters import Gpt2, fresh
from dp_core.nn.layers import Layers, gelu_new

CONFIG = Gpt2Config(vocab_size=30, hidden=8, layers=2, heads=2, intermediate=16, max_positions=12)


@pytest.fixture(scope="module")
def model() -> Gpt2:
    rng = np.random.default_rng(0)
    start = fresh(CONFIG, 0).parameters
    return Gpt2(
        CONFIG, {n: a + 0.3 * rng.standard_normal(a.shape).astype("f") for n, a in start.items()}
    )


def reference_logits(model: Gpt2, ids: np.ndarray) -> np.ndarray:
    """GPT-2 of one row in float64, written out from Radford et al. 2019 and their code."""
    p = {n: a.astype(np.float64) for n, a in model.parameters.items()}

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return scaled * p[f"{name}/gain"] + p[f"{name}/bias"]

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]

    x = p["embeddings/word"][ids] + p["embeddings/position"][: len(ids)]
    width = CONFIG.hidden // CONFIG.heads
    for i in range(CONFIG.layers):
        q, k, v = np.split(linear(f"layer_{i}/qkv", norm(f"layer_{i}/attention_norm", x)), 3, 1)
        heads = []
        for h in range(CONFIG.heads):
            part = slice(h * width, (h + 1) * width)
            shares = np.exp(q[:, part] @ k[:, part].T / math.sqrt(width))
            shares = np.tril(shares)
            heads.append(shares / shares.sum(1, keepdims=True) @ v[:, part])
        x = x + linear(f"layer_{i}/attention_output", np.concatenate(heads, 1))
        inner = linear(f"layer_{i}/intermediate", norm(f"layer_{i}/intermediate_norm", x))
        bent = np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))
        x = x + linear(f"layer_{i}/output", 0.5 * inner * (1 + bent))
    return norm("final_norm", x) @ p["embeddings/word"].T


def test_equals_the_reference(model):
    ids = np.array([2, 7, 7, 9, 29, 3])
    logits = causal_logits(Layers(model.parameters), CONFIG, tf.constant([ids], tf.int32))
    np.testing.assert_allclose(logits, reference_logits(model, ids), atol=5e-5)


def test_nothing_is_known_of_what_lies_ahead_nor_of_other_rows(model):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 30, (3, 6)).astype(np.int32)
    changed = ids.copy()
    changed[0, 4:], changed[1] = 5, rng.integers(0, 30, 6)
    before, after = (
        causal_logits(Layers(model.parameters), CONFIG, tf.constant(i)).numpy().reshape(3, 6, -1)
        for i in (ids, changed)
    )
    np.testing.assert_array_equal(before[0, :4], after[0, :4])
    np.testing.assert_array_equal(before[2], after[2])
    assert np.abs(before[0, 4:] - after[0, 4:]).max() > 0.01


def test_a_rows_loss_is_the_mean_over_its_own_predictions(model):
    ids = tf.constant([[2, 5, 6, 3]] * 3)
    labels, places = ids[:, 1:], tf.zeros((3, 3), tf.int32)
    weights = tf.constant([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    arrays = (ids, tf.constant([4, 4, 4]), places, labels, weights)
    both, second, none = causal_row_losses(Layers(model.parameters), CONFIG, *arrays).numpy()
    logits = reference_logits(model, ids.numpy()[0])
    own = [np.log(np.exp(r).sum()) - r[label] for r, label in zip(logits, (5, 6), strict=False)]
    assert both == pytest.approx(np.mean(own), rel=1e-5)
    assert second == pytest.approx(own[1], rel=1e-5)
    assert none == 0


def test_gelu_new_and_its_derivative():
    x = tf.constant(np.linspace(-6, 6, 61, dtype=np.float32))
    results = []
    for f in (gelu_new, lambda x: tf.nn.gelu(x, approximate=True)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        results.append((y.numpy(), tape.gradient(y, x).numpy()))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=2e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=2e-6)


def test_what_a_layer_adds_starts_smaller_the_more_layers_there_are():
    deep = Gpt2Config(vocab_size=9, hidden=64, layers=8, heads=1, intermediate=64)
    values = fresh(deep, 0).parameters
    for name in ("layer_3/attention_output/kernel", "layer_7/output/kernel"):
        assert values[name].std() == pytest.approx(values["layer_3/qkv/kernel"].std() / 4, rel=0.1)


def test_its_folder_is_read_back_and_is_no_bert(model, tmp_path):
    save(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == CONFIG
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(value, again.parameters[name])
    with pytest.raises(BadInput, match="causal"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("activation_function", "relu"), ("scale_attn_by_inverse_layer_idx", True)],
)
def test_another_decoder_is_refused(field, value):
    with pytest.raises(BadInput, match=field):
        Gpt2Config.from_hf(CONFIG.to_hf() | {field: value})


def test_a_missing_number_is_named():
    about = CONFIG.to_hf()
    del about["n_embd"]
    with pytest.raises(BadInput, match="n_embd is missing"):
        Gpt2Config.from_hf(about)
