"""A Llama-style decoder: against a reference in NumPy, its folders, and what is refused."""

from __future__ import annotations

import contextlib
import json
import math

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from dp_core.errors import BadInput
from dp_core.models.causal import causal_logits, causal_row_losses
from dp_core.models.config import LlamaConfig
from dp_core.models.hugging_face import load_model, load_with_vocabulary, save
from dp_core.models.parameters import Llama, fresh
from dp_core.nn.layers import Layers

SIZES = {
    "vocab_size": 30, "hidden": 16, "layers": 2, "heads": 4, "intermediate": 24,
    "max_positions": 12,
}  # fmt: skip
GROUPED = LlamaConfig(**SIZES, key_heads=2, rope_theta=50.0)
IDS = np.array([2, 7, 7, 9, 29, 3], np.int32)


def random_model(config: LlamaConfig, seed: int = 0) -> Llama:
    rng, start = np.random.default_rng(seed), fresh(config, 0)
    for value in start.parameters.values():
        value += 0.3 * rng.standard_normal(value.shape).astype("f")
    return start


def logits(model: Llama, ids: np.ndarray) -> np.ndarray:
    out = causal_logits(Layers(model.parameters), model.config, tf.constant(ids))
    return out.numpy().reshape(*ids.shape, -1)


def reference(model: Llama, ids: np.ndarray) -> np.ndarray:
    """The logits of a row in float64, written out: Touvron et al. 2023, Su et al. 2021."""
    c, p = model.config, {n: a.astype(np.float64) for n, a in model.parameters.items()}
    width, s = c.hidden // c.heads, len(ids)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        mean_square = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + c.layer_norm_epsilon) * p[f"{name}/gain"]

    def rotated(x: np.ndarray) -> np.ndarray:
        """Turn each pair (i, i + W/2), as one complex number, by position · θ^(−2i/W)."""
        pairs = x[:, : width // 2] + 1j * x[:, width // 2 :]
        angles = np.arange(s)[:, None] * c.rope_theta ** (-2 * np.arange(width // 2) / width)
        turned = pairs * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], 1)

    x = p["embeddings/word"][ids]
    for i in range(c.layers):
        name = f"layer_{i}"
        normed = norm(f"{name}/attention_norm", x)
        q, k, v = (normed @ p[f"{name}/{part}/kernel"] for part in ("query", "key", "value"))
        heads = []
        for h in range(c.heads):
            own = h * c.key_heads // c.heads  # the group's key and value
            mine, theirs = slice(h * width, (h + 1) * width), slice(own * width, (own + 1) * width)
            scores = rotated(q[:, mine]) @ rotated(k[:, theirs]).T / math.sqrt(width)
            shares = np.tril(np.exp(scores))
            heads.append(shares / shares.sum(1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(heads, 1) @ p[f"{name}/attention_output/kernel"]
        normed = norm(f"{name}/intermediate_norm", x)
        gate = normed @ p[f"{name}/gate/kernel"]
        inner = gate / (1 + np.exp(-gate)) * (normed @ p[f"{name}/intermediate/kernel"])
        x = x + inner @ p[f"{name}/output/kernel"]
    head = p["embeddings/word"].T if c.tied else p["head/kernel"]
    return norm("final_norm", x) @ head


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        GROUPED,
        LlamaConfig(**SIZES, key_heads=1),
        LlamaConfig(**SIZES, tied=True),
    ],
    ids=["as many keys", "two groups", "one group", "tied"],
)
def test_it_equals_the_reference(config: LlamaConfig) -> None:
    model = random_model(config)
    np.testing.assert_allclose(logits(model, IDS[None])[0], reference(model, IDS), atol=2e-4)


def test_rows_do_not_meet_and_nothing_is_known_of_what_lies_ahead() -> None:
    model = random_model(GROUPED)
    ids = np.random.default_rng(1).integers(0, 30, (3, 6)).astype(np.int32)
    changed = ids.copy()
    changed[0], changed[1, 4:] = 5, 5
    before, after = logits(model, ids), logits(model, changed)
    np.testing.assert_array_equal(before[2], after[2])
    np.testing.assert_array_equal(before[1, :4], after[1, :4])
    assert np.abs(before[1, 4:] - after[1, 4:]).max() > 0.01


def test_asking_for_some_places_gives_their_logits() -> None:
    model, ids = random_model(GROUPED), tf.constant(IDS[None])
    asked = tf.constant([[4, 0]])
    some = causal_logits(Layers(model.parameters), GROUPED, ids, asked).numpy()
    np.testing.assert_allclose(some, logits(model, IDS[None])[0, [4, 0]], atol=1e-5)


def test_a_rows_loss_is_the_mean_over_its_own_predictions() -> None:
    model, ids = random_model(GROUPED), tf.constant([[2, 5, 6, 3]] * 2)
    weights = tf.constant([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    arrays = (ids, tf.constant([4, 4]), tf.zeros((2, 3), tf.int32), ids[:, 1:], weights)
    both, none = causal_row_losses(Layers(model.parameters), GROUPED, *arrays).numpy()
    table = reference(model, ids.numpy()[0])
    own = [np.log(np.exp(r).sum()) - r[label] for r, label in zip(table, (5, 6), strict=False)]
    assert both == pytest.approx(np.mean(own), rel=1e-5)
    assert none == 0


# --- folders


@pytest.mark.parametrize("config", [GROUPED, LlamaConfig(**SIZES, tied=True)])
def test_a_folder_holds_the_model(tmp_path, config) -> None:
    model = random_model(config)
    save(model, tmp_path)
    read = load_model(tmp_path)
    assert read.config == config
    assert read.parameters.keys() == model.parameters.keys()
    for name, value in model.parameters.items():
        np.testing.assert_array_equal(read.parameters[name], value)


def test_shards_of_bfloat16_are_read(tmp_path) -> None:
    """As larger models are published: in parts, in a format that NumPy has not."""
    model = random_model(GROUPED)
    save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for file, names in {"a": sorted(stored)[::2], "b": sorted(stored)[1::2]}.items():
        # The upper half of a float32 is a bfloat16; written as U16, then called by its name.
        halves = {n: (stored[n].view(np.uint32) >> 16).astype(np.uint16) for n in names}
        path = tmp_path / f"{file}.safetensors"
        save_file(halves, path)
        path.write_bytes(path.read_bytes().replace(b'"dtype":"U16"', b'"dtype":"BF16"'))
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little") + len(names)
        path.write_bytes(size.to_bytes(8, "little") + content[8:])
        weight_map |= dict.fromkeys(names, path.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = load_model(tmp_path)
    for name, value in model.parameters.items():
        np.testing.assert_allclose(read.parameters[name], value, rtol=2**-7)
        assert not (read.parameters[name].view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type"),
        ({"head_dim": 8}, "head_dim"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"rope_theta": "a", "rope_parameters": None}, "rope_theta"),
    ],
)
def test_another_decoder_is_refused(changed, what) -> None:
    with pytest.raises(BadInput, match=what):
        LlamaConfig.from_hf(GROUPED.to_hf() | changed)


@pytest.mark.parametrize("value", [None, -1, 0, "8", [8], {}, 10**12, 0.5, True])
def test_a_damaged_config_is_refused_or_read_but_never_breaks(value) -> None:
    about = GROUPED.to_hf()
    for key in about:
        with contextlib.suppress(BadInput):
            LlamaConfig.from_hf(about | {key: value})


@pytest.mark.parametrize("tied", [False, True])
def test_its_vocabulary_is_exchanged_in_table_and_head(tmp_path, tied) -> None:
    """Pieces with SentencePiece's mark begin a word; markers are known by their ids."""
    config = LlamaConfig(**(SIZES | {"vocab_size": 6}), tied=tied, begin=1, end=2)
    old = random_model(config)
    save(old, tmp_path)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁pain": 3, "pain": 4, "ing": 5}
    whole = {"model": {"type": "BPE", "vocab": vocabulary}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    new = load_with_vocabulary(tmp_path, ["new", "[CLS]", "pain", "##ing", "##pain"], seed=0)
    kept, before = [1, 2, 3, 4], [1, 3, 5, 4]
    word = "embeddings/word"
    np.testing.assert_array_equal(new.parameters[word][kept], old.parameters[word][before])
    if not tied:
        head = new.parameters["head/kernel"]
        assert head.shape == (16, 5)
        np.testing.assert_array_equal(head[:, kept], old.parameters["head/kernel"][:, before])
        assert np.isfinite(head).all()
