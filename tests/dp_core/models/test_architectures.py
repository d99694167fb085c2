from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
from random_models import random_model
from scipy.special import erf

from dp_core.errors import BadInput
from dp_core.models.bert import encode, mlm_logits
from dp_core.models.causal import causal_logits, causal_row_losses
from dp_core.models.config import (
    BertConfig,
    FeedForwardConfig,
    Gpt2Config,
    LanguageModelConfig,
    LlamaConfig,
    RopeScaling,
)
from dp_core.models.hugging_face import load, load_model, save
from dp_core.models.parameters import AnyModel, Bert, fresh
from dp_core.nn import Layers

SIZES = {
    "vocab_size": 30, "hidden": 8, "layers": 2, "heads": 2, "intermediate": 16, "max_positions": 12,
}  # fmt: skip


class Reference:
    """Layers of one row in float64, without TensorFlow."""

    def __init__(self, model: AnyModel) -> None:
        self.config = model.config
        self.p = {n: a.astype(np.float64) for n, a in model.parameters.items()}

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(x.var(-1, keepdims=True) + self.config.layer_norm_epsilon)
        return scaled * self.p[f"{name}/gain"] + self.p[f"{name}/bias"]

    def rms_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean_square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.layer_norm_epsilon) * self.p[f"{name}/gain"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.p[f"{name}/kernel"] + self.p[f"{name}/bias"]

    def attention(self, name: str, x: np.ndarray, *, causal: bool) -> np.ndarray:
        """Vaswani et al. 2017, 3.2: head by head."""
        width = self.config.hidden // self.config.heads
        q, k, v = np.split(self.linear(f"{name}/qkv", x), 3, axis=1)
        heads = []
        for h in range(self.config.heads):
            part = slice(h * width, (h + 1) * width)
            shares = np.exp(q[:, part] @ k[:, part].T / math.sqrt(width))
            shares = np.tril(shares) if causal else shares
            heads.append(shares / shares.sum(1, keepdims=True) @ v[:, part])
        return self.linear(f"{name}/attention_output", np.concatenate(heads, 1))

    def bert(self, ids: np.ndarray) -> np.ndarray:
        """Return the states of an unpadded row (Devlin et al. 2019)."""
        p = self.p
        x = p["embeddings/word"][ids] + p["embeddings/position"][: len(ids)]
        x = self.norm("embeddings/norm", x + p["embeddings/type"][0])
        for i in range(self.config.layers):
            name = f"layer_{i}"
            x = self.norm(f"{name}/attention_norm", x + self.attention(name, x, causal=False))
            inner = self.linear(f"{name}/intermediate", x)
            inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
            x = self.norm(f"{name}/output_norm", x + self.linear(f"{name}/output", inner))
        return x

    def gpt2(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits of a row (Radford et al. 2019, and their code)."""
        p = self.p
        x = p["embeddings/word"][ids] + p["embeddings/position"][: len(ids)]
        for i in range(self.config.layers):
            name = f"layer_{i}"
            x = x + self.attention(name, self.norm(f"{name}/attention_norm", x), causal=True)
            inner = self.linear(f"{name}/intermediate", self.norm(f"{name}/intermediate_norm", x))
            bent = np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3))
            x = x + self.linear(f"{name}/output", 0.5 * inner * (1 + bent))
        return self.norm("final_norm", x) @ p["embeddings/word"].T

    def wavelength(self, i: int) -> float:
        """2π·θ^(2i/W), scaled by Llama 3's published rule with its three cases."""
        c = self.config
        plain, r = 2 * math.pi * c.rope_theta ** (2 * i / c.head_width), c.rope_scaling
        if r is None:
            return plain
        context, low, high = (
            r.original_max_position_embeddings, r.low_freq_factor, r.high_freq_factor
        )  # fmt: skip
        if plain < context / high:
            return plain
        if plain > context / low:
            return plain * r.factor
        smooth = (context / plain - low) / (high - low)
        return 1 / ((1 - smooth) / (plain * r.factor) + smooth / plain)

    def rotated(self, x: np.ndarray) -> np.ndarray:
        """Turn each pair (i, i + W/2), as one complex number, by position · 2π/wavelength."""
        half = self.config.head_width // 2
        lengths = [self.wavelength(i) for i in range(half)]
        pairs = x[:, :half] + 1j * x[:, half:]
        turned = pairs * np.exp(2j * math.pi * np.arange(len(x))[:, None] / lengths)
        return np.concatenate([turned.real, turned.imag], 1)

    def llama(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits of a row (Touvron et al. 2023, Su et al. 2021)."""
        c, p, width = self.config, self.p, self.config.head_width
        x = p["embeddings/word"][ids]
        for i in range(c.layers):
            name = f"layer_{i}"
            normed = self.rms_norm(f"{name}/attention_norm", x)
            q, k, v = (normed @ p[f"{name}/{part}/kernel"] for part in ("query", "key", "value"))
            heads = []
            for h in range(c.heads):
                kv = h * c.key_heads // c.heads  # the group's key and value head
                mine = slice(h * width, (h + 1) * width)
                theirs = slice(kv * width, (kv + 1) * width)
                scores = self.rotated(q[:, mine]) @ self.rotated(k[:, theirs]).T / math.sqrt(width)
                shares = np.tril(np.exp(scores))
                heads.append(shares / shares.sum(1, keepdims=True) @ v[:, theirs])
            x = x + np.concatenate(heads, 1) @ p[f"{name}/attention_output/kernel"]
            normed = self.rms_norm(f"{name}/intermediate_norm", x)
            gate = normed @ p[f"{name}/gate/kernel"]
            inner = gate / (1 + np.exp(-gate)) * (normed @ p[f"{name}/intermediate/kernel"])
            x = x + inner @ p[f"{name}/output/kernel"]
        head = p["embeddings/word"].T if c.tied else p["head/kernel"]
        return self.rms_norm("final_norm", x) @ head

    def feed_forward(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits of a row, token by token (Bengio et al. 2003, Kerrigan et al. 2020)."""
        c, p = self.config, self.p
        logits = []
        for i in range(len(ids)):
            seen = [*[c.begin] * c.window, *ids[: i + 1]][-c.window :]
            x = np.concatenate([p["embeddings/word"][token] for token in seen])
            for j in range(len(c.units)):
                x = np.maximum(self.linear(f"layer_{j}/intermediate", x), 0)
            logits.append(self.linear("head", x))
        return np.stack(logits)


class ArchitectureContract:
    """Rules for every architecture."""

    CONFIG: ClassVar[LanguageModelConfig]
    TOLERANCE: ClassVar[float]

    def output(self, model: AnyModel, ids: np.ndarray) -> np.ndarray:
        """Return the model's output for each token: (M, S, ·)."""
        raise NotImplementedError

    def reference(self, model: AnyModel, ids: np.ndarray) -> np.ndarray:
        """Return the reference output of one row: (S, ·)."""
        raise NotImplementedError

    @pytest.fixture
    def model(self) -> AnyModel:
        return random_model(self.CONFIG)

    def test_model_equals_the_numpy_reference(self, model: AnyModel) -> None:
        ids = np.array([2, 7, 7, 9, 29, 3], np.int32)
        np.testing.assert_allclose(
            self.output(model, ids[None])[0], self.reference(model, ids), atol=self.TOLERANCE
        )

    def test_rows_do_not_influence_each_other(self, model: AnyModel) -> None:
        rng = np.random.default_rng(1)
        ids = rng.integers(0, 30, (3, 6)).astype(np.int32)
        before = self.output(model, ids)
        ids[1] = rng.integers(0, 30, 6)
        after = self.output(model, ids)
        np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
        assert np.abs(before[1] - after[1]).max() > 0.01

    def test_saved_folder_is_read_back(self, model: AnyModel, tmp_path) -> None:
        save(model, tmp_path)
        again = load_model(tmp_path)
        assert again.config == self.CONFIG
        assert again.parameters.keys() == model.parameters.keys()
        for name, value in model.parameters.items():
            np.testing.assert_array_equal(value, again.parameters[name])


class TestBert(ArchitectureContract):
    CONFIG = BertConfig(**SIZES)
    TOLERANCE = 2e-5

    def output(self, model: Bert, ids: np.ndarray) -> np.ndarray:
        lengths = tf.fill(len(ids), ids.shape[1])
        return encode(Layers(model.parameters), BERT, tf.constant(ids), lengths).numpy()

    def reference(self, model: Bert, ids: np.ndarray) -> np.ndarray:
        return Reference(model).bert(ids)

    def test_padding_tokens_do_not_change_the_output(self, model):
        layers = Layers(model.parameters)
        ids = np.array([[2, 7, 8, 3, 0, 0], [2, 7, 8, 3, 11, 12], [2, 9, 9, 9, 9, 3]], np.int32)
        states = encode(layers, BERT, tf.constant(ids), tf.constant([4, 4, 6])).numpy()
        np.testing.assert_allclose(states[0, :4], states[1, :4], atol=1e-6)
        np.testing.assert_allclose(states[0, :4], self.reference(model, ids[0, :4]), atol=2e-5)

    def test_requested_positions_have_their_hidden_states(self, model):
        rng = np.random.default_rng(2)
        layers = Layers(model.parameters)
        ids, lengths = tf.constant(rng.integers(0, 30, (3, 6)), tf.int32), tf.constant([6, 4, 5])
        places = np.array([[1, 3], [0, 0], [4, 2]], np.int32)
        every = encode(layers, BERT, ids, lengths).numpy()
        asked = encode(layers, BERT, ids, lengths, positions=tf.constant(places)).numpy()
        np.testing.assert_allclose(
            asked, np.take_along_axis(every, places[:, :, None], 1), atol=1e-5
        )

    def test_logits_use_the_word_table(self, model):
        ids, lengths = tf.constant([[2, 5, 3]]), tf.constant([3])
        layers = Layers(model.parameters)
        logits = mlm_logits(layers, BERT, ids, lengths, tf.constant([[1]])).numpy()
        raised = model.parameters | {"embeddings/word": model.parameters["embeddings/word"].copy()}
        raised["embeddings/word"][17] *= 2  # not in the input, so only its logit may change
        changed = mlm_logits(Layers(raised), BERT, ids, lengths, tf.constant([[1]])).numpy()
        assert np.flatnonzero(logits != changed).tolist() == [17]


class CausalContract(ArchitectureContract):
    """Rules for every causal model."""

    def output(self, model: AnyModel, ids: np.ndarray) -> np.ndarray:
        logits = causal_logits(Layers(model.parameters), self.CONFIG, tf.constant(ids))
        return logits.numpy().reshape(*ids.shape, -1)

    def test_later_tokens_do_not_change_earlier_logits(self, model):
        ids = np.random.default_rng(1).integers(0, 30, (1, 6)).astype(np.int32)
        changed = ids.copy()
        changed[0, 4:] = 5
        before, after = self.output(model, ids)[0], self.output(model, changed)[0]
        np.testing.assert_array_equal(before[:4], after[:4])
        assert np.abs(before[4:] - after[4:]).max() > 0.01

    def test_causal_model_folder_is_not_read_as_bert(self, model, tmp_path):
        save(model, tmp_path)
        with pytest.raises(BadInput, match="causal"):
            load(tmp_path)

    def test_requested_positions_have_their_logits(self, model):
        ids, asked = np.array([[2, 7, 7, 9, 29, 3]], np.int32), tf.constant([[4, 0]])
        some = causal_logits(Layers(model.parameters), self.CONFIG, tf.constant(ids), asked).numpy()
        np.testing.assert_allclose(some, self.output(model, ids)[0, [4, 0]], atol=1e-5)

    def test_loss_of_a_row_is_the_mean_over_its_predictions(self, model):
        ids = tf.constant([[2, 5, 6, 3]] * 3)
        labels, places = ids[:, 1:], tf.zeros((3, 3), tf.int32)
        weights = tf.constant([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        arrays = (ids, tf.constant([4, 4, 4]), places, labels, weights)
        losses = causal_row_losses(Layers(model.parameters), self.CONFIG, *arrays)
        both, second, none = losses.numpy()
        logits = self.reference(model, ids.numpy()[0])
        expected = [
            np.log(np.exp(r).sum()) - r[label] for r, label in zip(logits, (5, 6), strict=False)
        ]
        assert both == pytest.approx(np.mean(expected), rel=1e-5)
        assert second == pytest.approx(expected[1], rel=1e-5)
        assert none == 0


class TestGpt2(CausalContract):
    CONFIG = Gpt2Config(**SIZES)
    TOLERANCE = 5e-5

    def reference(self, model: AnyModel, ids: np.ndarray) -> np.ndarray:
        return Reference(model).gpt2(ids)


class LlamaContract(CausalContract):
    TOLERANCE = 2e-4

    def reference(self, model: AnyModel, ids: np.ndarray) -> np.ndarray:
        return Reference(model).llama(ids)


LLAMA = SIZES | {"hidden": 16, "heads": 4, "intermediate": 24}


class TestLlama(LlamaContract):
    CONFIG = LlamaConfig(**LLAMA)


class TestLlamaOfTwoGroups(LlamaContract):
    CONFIG = LlamaConfig(**LLAMA, key_heads=2, rope_theta=50.0)


class TestLlamaOfOneGroup(LlamaContract):
    CONFIG = LlamaConfig(**LLAMA, key_heads=1)


class TestTiedLlama(LlamaContract):
    CONFIG = LlamaConfig(**LLAMA, tied=True)


class TestStretchedLlamaOfWideHeads(LlamaContract):
    CONFIG = LlamaConfig(
        **LLAMA,
        key_heads=2,
        head_width=16,
        rope_theta=50.0,
        rope_scaling=RopeScaling(8.0, 0.5, 2.0, 24),
    )


class TestFeedForward(CausalContract):
    CONFIG = FeedForwardConfig(30, 8, 4, (16, 12, 10), max_positions=12)
    TOLERANCE = 2e-5

    def reference(self, model: AnyModel, ids: np.ndarray) -> np.ndarray:
        return Reference(model).feed_forward(ids)

    def test_tokens_beyond_the_window_do_not_change_logits(self, model):
        ids = np.random.default_rng(1).integers(0, 30, (1, 8)).astype(np.int32)
        changed = ids.copy()
        changed[0, 1] = (changed[0, 1] + 1) % 30
        same = (self.output(model, ids) == self.output(model, changed)).all(axis=2)[0]
        assert same.tolist() == [True, False, False, False, False, True, True, True]


class TestFeedForwardOfABigram(TestFeedForward):
    CONFIG = FeedForwardConfig(30, 8, 1, (16,), max_positions=12)

    def test_tokens_beyond_the_window_do_not_change_logits(self, model):
        ids = np.array([[2, 7, 5, 7]], np.int32)
        logits = self.output(model, ids)[0]
        np.testing.assert_array_equal(logits[1], logits[3])


BERT, GPT2 = TestBert.CONFIG, TestGpt2.CONFIG


def test_initial_residual_kernels_shrink_with_the_number_of_layers():
    deep = Gpt2Config(vocab_size=9, hidden=64, layers=8, heads=1, intermediate=64)
    values = fresh(deep, 0).parameters
    for name in ("layer_3/attention_output/kernel", "layer_7/output/kernel"):
        assert values[name].std() == pytest.approx(values["layer_3/qkv/kernel"].std() / 4, rel=0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("activation_function", "relu"), ("scale_attn_by_inverse_layer_idx", True)],
)
def test_unsupported_decoder_config_is_refused(field, value):
    with pytest.raises(BadInput, match=field):
        Gpt2Config.from_hf(GPT2.to_hf() | {field: value})


def test_missing_config_field_is_named():
    about = GPT2.to_hf()
    del about["n_embd"]
    with pytest.raises(BadInput, match="n_embd is missing"):
        Gpt2Config.from_hf(about)


def test_layer_norm_epsilon_of_distilbert_is_fixed():
    with pytest.raises(BadInput, match="layer_norm_epsilon"):
        BertConfig(**SIZES, type_vocab=0, layer_norm_epsilon=1e-5)


def test_initial_dense_layers_preserve_variance():
    values = fresh(FeedForwardConfig(50, 64, 20, (500, 250)), 0).parameters
    for name, inputs in (("layer_0/intermediate", 1280), ("layer_1/intermediate", 500)):
        deviation = values[f"{name}/kernel"].std() / 0.88  # cut at two deviations
        assert deviation == pytest.approx(math.sqrt(2 / inputs), rel=0.02)
    assert values["embeddings/word"].std() == pytest.approx(0.088, rel=0.05)


@pytest.mark.parametrize("units", [(), (0,), (5, -1), (2.5,), [5]])
def test_dense_layers_without_size_are_refused(units):
    with pytest.raises(BadInput, match="units"):
        FeedForwardConfig(30, 8, 4, units)
