import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from scipy.special import erf
from small_models import SHAPES, SIZES, logits_of, random_model

from dp_core.models.bert import class_logits, mlm_logits
from dp_core.models.causal import causal_logits, causal_row_losses
from dp_core.models.config import FeedForwardConfig, Gpt2Config, LlamaConfig, RopeScaling
from dp_core.models.parameters import AnyModel, fresh
from dp_core.nn import Layers
from dp_core.training.heads import ClassHead


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + erf(x / math.sqrt(2)))


class Reference:
    """Layers of one row in float64, without TensorFlow."""

    def __init__(self, model: AnyModel) -> None:
        self.config = model.config
        self.p = {n: a.astype(np.float64) for n, a in model.parameters.items()}

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(x.var(-1, keepdims=True) + self.config.layer_norm_epsilon)
        return scaled * self.p[f"{name}/gain"] + self.p.get(f"{name}/bias", 0.0)

    def rms_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean_square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.layer_norm_epsilon) * self.p[f"{name}/gain"]

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.p[f"{name}/kernel"] + self.p.get(f"{name}/bias", 0.0)

    def mixed(
        self, q: Any, k: Any, v: Any, *, causal: bool = False, seen: Any = 1.0, turn: Any = np.array
    ) -> np.ndarray:
        """Vaswani et al. 2017, 3.2: head by head; several heads may share a key and a value."""
        heads, width = [], q.shape[1] // self.config.heads
        for h in range(self.config.heads):
            group = h * k.shape[1] // q.shape[1]
            mine, theirs = (slice(i * width, (i + 1) * width) for i in (h, group))
            shares = np.exp(turn(q[:, mine]) @ turn(k[:, theirs]).T / math.sqrt(width))
            shares = np.tril(shares) if causal else shares * seen
            heads.append(shares / shares.sum(1, keepdims=True) @ v[:, theirs])
        return np.concatenate(heads, 1)

    def attention(self, name: str, x: np.ndarray, *, causal: bool) -> np.ndarray:
        mixed = self.mixed(*np.split(self.linear(f"{name}/qkv", x), 3, axis=1), causal=causal)
        return self.linear(f"{name}/attention_output", mixed)

    def bert(self, ids: np.ndarray) -> np.ndarray:
        """Return the MLM logits of an unpadded row (Devlin et al. 2019, Sanh et al. 2019)."""
        p = self.p
        x = p["embeddings/word"][ids] + p["embeddings/position"][: len(ids)]
        x = self.norm("embeddings/norm", x + p.get("embeddings/type", np.zeros((1, 1)))[0])
        for i in range(self.config.layers):
            name = f"layer_{i}"
            x = self.norm(f"{name}/attention_norm", x + self.attention(name, x, causal=False))
            inner = gelu(self.linear(f"{name}/intermediate", x))
            x = self.norm(f"{name}/output_norm", x + self.linear(f"{name}/output", inner))
        x = self.norm("mlm/norm", gelu(self.linear("mlm/transform", x)))
        return x @ p["embeddings/word"].T + p["mlm/bias"]

    def modernbert(self, ids: np.ndarray) -> np.ndarray:
        """Return the MLM logits of an unpadded row (Warner et al. 2024, 3.1)."""
        c, p, places = self.config, self.p, np.arange(len(ids))
        x = self.norm("embeddings/norm", p["embeddings/word"][ids])
        for i in range(c.layers):
            name, local = f"layer_{i}", i % c.global_every > 0
            self.theta, self.width = c.local_theta if local else c.global_theta, c.hidden // c.heads
            normed = self.norm(f"{name}/attention_norm", x) if i else x
            qkv = np.split(self.linear(f"{name}/qkv", normed), 3, axis=1)
            seen = abs(places[:, None] - places) <= c.local_attention / 2 if local else 1.0
            mixed = self.mixed(*qkv, seen=seen, turn=self.rotated)
            x = x + self.linear(f"{name}/attention_output", mixed)
            normed = self.norm(f"{name}/intermediate_norm", x)
            inner, gates = np.split(self.linear(f"{name}/intermediate", normed), 2, axis=1)
            x = x + self.linear(f"{name}/output", gelu(inner) * gates)
        x = gelu(self.linear("prediction/transform", self.norm("final_norm", x)))
        return self.norm("prediction/norm", x) @ p["embeddings/word"].T + p["mlm/bias"]

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
        plain = 2 * math.pi * self.theta ** (2 * i / self.width)
        r = getattr(self.config, "rope_scaling", None)
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
        half = self.width // 2
        lengths = [self.wavelength(i) for i in range(half)]
        pairs = x[:, :half] + 1j * x[:, half:]
        turned = pairs * np.exp(2j * math.pi * np.arange(len(x))[:, None] / lengths)
        return np.concatenate([turned.real, turned.imag], 1)

    def llama(self, ids: np.ndarray) -> np.ndarray:
        """Return the logits of a row (Touvron et al. 2023, Su et al. 2021)."""
        c, p = self.config, self.p
        self.theta, self.width = c.rope_theta, c.head_width
        x = p["embeddings/word"][ids]
        for i in range(c.layers):
            name = f"layer_{i}"
            normed = self.rms_norm(f"{name}/attention_norm", x)
            q, k, v = (normed @ p[f"{name}/{part}/kernel"] for part in ("query", "key", "value"))
            mixed = self.mixed(q, k, v, causal=True, turn=self.rotated)
            x = x + mixed @ p[f"{name}/attention_output/kernel"]
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


LLAMA = SIZES | {"hidden": 16, "heads": 4, "intermediate": 24}
MODELS = {
    "bert": (SHAPES["bert"], Reference.bert),
    "distilbert": (SHAPES["distilbert"], Reference.bert),
    "roberta": (SHAPES["roberta"], Reference.bert),
    "modernbert": (SHAPES["modernbert"], Reference.modernbert),
    "gpt2": (SHAPES["gpt2"], Reference.gpt2),
    "llama": (LlamaConfig(**LLAMA), Reference.llama),
    "llama of one group": (LlamaConfig(**LLAMA, key_heads=1), Reference.llama),
    "llama of two groups": (LlamaConfig(**LLAMA, key_heads=2, rope_theta=50.0), Reference.llama),
    "tied llama": (LlamaConfig(**LLAMA, tied=True), Reference.llama),
    "stretched llama of wide heads": (
        LlamaConfig(
            **LLAMA, key_heads=2, head_width=16, rope_theta=50.0,
            rope_scaling=RopeScaling(8.0, 0.5, 2.0, 24),
        ),
        Reference.llama,
    ),
    "feed-forward": (SHAPES["feed-forward"], Reference.feed_forward),
    "bigram": (
        FeedForwardConfig(vocab_size=30, hidden=8, window=1, units=(16,), max_positions=12),
        Reference.feed_forward,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_padded_batch_equal_the_numpy_reference_of_each_row(name):
    """So rows are independent, padding has no effect, and no causal logit sees a later token."""
    config, reference = MODELS[name]
    model, lengths = random_model(config), [6, 4, 5]
    ids = np.array([[2, 7, 7, 9, 29, 3], [2, 5, 8, 3, 11, 12], [2, 9, 4, 4, 3, 0]], np.int32)
    expected = [reference(Reference(model), row[:n]) for row, n in zip(ids, lengths, strict=True)]
    logits = logits_of(model, ids, lengths)
    places = np.array([[4, 0], [3, 1], [2, 2]], np.int32)
    if "bert" in name:
        arguments = tf.constant(ids), tf.constant(lengths), tf.constant(places)
        some = mlm_logits(Layers(model.parameters), config, *arguments)
    else:
        some = causal_logits(
            Layers(model.parameters), config, tf.constant(ids), tf.constant(places)
        )
    for row, right, asked, positions in zip(
        logits, expected, some.numpy().reshape(3, 2, -1), places, strict=True
    ):
        np.testing.assert_allclose(row[: len(right)], right, rtol=2e-5, atol=3e-5)
        np.testing.assert_allclose(asked, right[positions], rtol=2e-5, atol=3e-5)


def test_loss_of_a_row_is_the_mean_over_its_predictions():
    model = random_model(SHAPES["gpt2"])
    ids = tf.constant([[2, 5, 6, 3]] * 3)
    labels, places = ids[:, 1:], tf.zeros((3, 3), tf.int32)
    weights = tf.constant([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    arrays = (ids, tf.constant([4, 4, 4]), places, labels, weights)
    losses = causal_row_losses(Layers(model.parameters), model.config, *arrays)
    logits = Reference(model).gpt2(ids.numpy()[0])
    first, second = (
        np.log(np.exp(r).sum()) - r[label] for r, label in zip(logits, (5, 6), strict=False)
    )
    np.testing.assert_allclose(losses, [(first + second) / 2, second, 0], rtol=1e-5)


def test_initial_residual_kernels_shrink_with_the_number_of_layers():
    deep = Gpt2Config(vocab_size=9, hidden=64, layers=8, heads=1, intermediate=64, max_positions=9)
    values = fresh(deep, 0).parameters
    for name in ("layer_3/attention_output/kernel", "layer_7/output/kernel"):
        assert values[name].std() == pytest.approx(values["layer_3/qkv/kernel"].std() / 4, rel=0.1)


def test_initial_dense_layers_preserve_variance():
    values = fresh(
        FeedForwardConfig(vocab_size=50, hidden=64, window=20, units=(500, 250), max_positions=9), 0
    ).parameters
    for name, inputs in (("layer_0/intermediate", 1280), ("layer_1/intermediate", 500)):
        deviation = values[f"{name}/kernel"].std() / 0.88  # cut at two deviations
        assert deviation == pytest.approx(math.sqrt(2 / inputs), rel=0.02)
    assert values["embeddings/word"].std() == pytest.approx(0.088, rel=0.05)


def test_second_text_of_a_roberta_has_its_only_token_type():
    model = ClassHead(tuple("AB")).begin(random_model(SHAPES["roberta"]), 0)
    ids, lengths = tf.constant([[2, 7, 3, 9, 3]]), tf.constant([5])
    alone, pair = (
        class_logits(Layers(model.parameters), model.config, ids, lengths, tf.constant([[place]]))
        for place in (0, 3)
    )
    np.testing.assert_array_equal(alone, pair)
