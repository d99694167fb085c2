"""Clipping with only a part of the parameters trained, compared with one unit at a time.

The tests cover every model, every choice of the settings, and parts that no setting names. Norms
are over the trained parameters only, every trained parameter has a clipping rule, and no weight of
a frozen layer is differentiated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any, get_args

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.clipping_reference import (
    naive_clipped_grad_sum,
    tensorflow_privacy_clipped_grad_sum,
)
from dp_core.config.training import AdapterConfig, TrainedParameters
from dp_core.errors import PlanError
from dp_core.models.adapters import prepared, trained_names
from dp_core.models.bert import mlm_row_losses, tag_row_losses
from dp_core.models.causal import causal_row_losses
from dp_core.models.config import (
    BertConfig,
    CausalConfig,
    FeedForwardConfig,
    Gpt2Config,
    LlamaConfig,
)
from dp_core.models.parameters import AnyModel, Model, fresh
from dp_core.nn import LORA_SCALE, Layers
from dp_core.privacy.clipping.book_keeping import RecordingLayers, clipped_grad_sum
from dp_core.privacy.clipping.layer_rules import BlockwiseRecord
from dp_core.training.heads import TaggingHead
from dp_core.training.objectives import UnitBatch, ordinary_sum

UNITS, ROWS, LENGTH, WORDS, TAGS = 3, 2, 6, 9, 4  # few words, so that they repeat within a unit
SIZES = {
    "vocab_size": WORDS, "hidden": 8, "layers": 1, "heads": 2, "intermediate": 12,
    "max_positions": LENGTH + 1,
}  # fmt: skip
KINDS = get_args(TrainedParameters)
MODELS = {
    "BERT": BertConfig(**SIZES),
    "DistilBERT": BertConfig(**SIZES, type_vocab=0),
    "GPT-2": Gpt2Config(**SIZES),
    "Llama": LlamaConfig(**SIZES, key_heads=1),
    "tied Llama": LlamaConfig(**SIZES, tied=True),
    "feed-forward": FeedForwardConfig(WORDS, 8, 4, (12, 6)),
    "BERT tags": BertConfig(**SIZES),
    "deep BERT": BertConfig(**(SIZES | {"layers": 2})),
}
LORA = AdapterConfig(trained_parameters="lora", lora_rank=2, lora_alpha=3.0)


def model_of(name: str, config: AdapterConfig, seed: int = 0) -> AnyModel:
    """Return a model with random offsets, so that no gradient vanishes by symmetry."""
    rng = np.random.default_rng(seed)
    start: Any = fresh(MODELS[name], seed)
    if name == "BERT tags":
        start = TaggingHead(tuple("OABC")).begin(start, seed)
    start = prepared(start, config, seed)
    scale = {LORA_SCALE: 0.0}
    values = {
        n: a + np.float32(scale.get(n, 0.2)) * rng.standard_normal(a.shape).astype("f")
        for n, a in start.parameters.items()
    }
    return Model(start.config, values, start.labels)


def losses_of(name: str, seed: int = 0) -> UnitBatch:
    """Return losses of rows with repeated words, of all lengths, some padding or unanswered."""
    causal = isinstance(MODELS[name], CausalConfig)
    rng = np.random.default_rng(seed)
    shape, answers = (UNITS, ROWS), LENGTH - 1 if causal else 3
    lengths = rng.integers(2, LENGTH + 1, shape)
    real = np.ones(shape, bool)
    real[0, 1] = False
    arrays = (
        rng.integers(0, WORDS, (*shape, LENGTH)).astype(np.int32),
        lengths.astype(np.int32),
        rng.integers(0, lengths[:, :, None], (*shape, answers)).astype(np.int32),
        rng.integers(0, TAGS, (*shape, answers)).astype(np.int32),
        (rng.random((*shape, answers)) < 0.8).astype(np.float32),
        (real / real.sum(1, keepdims=True)).astype(np.float32),
    )
    losses = causal_row_losses if causal else tag_row_losses if "tags" in name else mlm_row_losses
    return UnitBatch(losses, MODELS[name], tuple(tf.constant(a) for a in arrays))


def split(model: AnyModel, trained: Collection[str]) -> tuple[dict, dict]:
    """Return the trained and the frozen parameters as variables."""
    variables = {n: tf.Variable(a) for n, a in model.parameters.items()}
    own = {n: v for n, v in variables.items() if n in trained}
    return own, {n: v for n, v in variables.items() if n not in trained}


def assert_same(fast: Any, slow: Any, norms: np.ndarray) -> None:
    np.testing.assert_allclose(fast.losses, slow.losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fast.norms, norms, rtol=2e-4, atol=1e-6)
    assert fast.sums.keys() == slow.sums.keys()
    for name, expected in slow.sums.items():
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(
            fast.sums[name], expected, atol=3e-4 * scale + 1e-9, err_msg=name
        )


def check(name: str, model: AnyModel, trained: Collection[str], seed: int = 0) -> Any:
    """Compare book-keeping with the definition, at a clip norm that clips only some units."""
    own, frozen = split(model, trained)
    losses = losses_of(name, seed)
    norms = naive_clipped_grad_sum(losses, own, UNITS, 1e6, frozen=frozen).norms.numpy()
    clip = float(np.median(norms))
    fast, slow = (
        f(losses, own, UNITS, clip, frozen=frozen)
        for f in (clipped_grad_sum, naive_clipped_grad_sum)
    )
    assert norms.max() > 1.001 * clip > 0
    assert_same(fast, slow, norms)
    assert (fast.norms.numpy() >= norms * (1 - 1e-5)).all()  # both are float32
    return slow


CASES = [
    *((name, "lora") for name in MODELS),
    ("deep BERT", "top-layer"),
    *(("BERT", kind) for kind in KINDS if kind not in ("all", "lora")),
    *(("Llama", kind) for kind in KINDS if kind != "lora"),
    *(("feed-forward", kind) for kind in KINDS if kind not in ("all", "lora")),
    ("GPT-2", "no-embeddings"),
    ("tied Llama", "no-embeddings"),
    ("BERT tags", "biases-and-norms"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_it_equals_one_unit_at_a_time(name: str, kind: TrainedParameters) -> None:
    config = LORA.model_copy(update={"trained_parameters": kind})
    model = model_of(name, config)
    trained = trained_names(model, config)
    slow = check(name, model, trained)
    assert slow.sums.keys() == trained
    for parameter, value in slow.sums.items():  # every one has a gradient
        assert np.abs(value).max() > 0 or parameter == "embeddings/type", parameter


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_any_part_equals_one_unit_at_a_time(name: str, seed: int) -> None:
    """Try a kernel without its bias, one table without the other two, and an A without its B."""
    model = model_of(name, LORA, seed)
    rng = np.random.default_rng(seed)
    names = [n for n in model.parameters if n != LORA_SCALE]
    check(name, model, {n for n in names if rng.random() < 0.4}, seed)


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow_privacy"), reason="no tensorflow-privacy here"
)
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_tensorflow_privacy_gives_the_same(name: str) -> None:
    model = model_of(name, LORA)
    own, frozen = split(model, trained_names(model, LORA))
    losses = losses_of(name)
    slow = naive_clipped_grad_sum(losses, own, UNITS, 0.05, frozen=frozen)
    other = tensorflow_privacy_clipped_grad_sum(losses, own, UNITS, 0.05, frozen=frozen)
    assert_same(other, slow, slow.norms.numpy())


def test_a_trained_parameter_that_no_rule_covers_is_an_error_that_names_it() -> None:
    """The scale of adapters is a constant, so training it would leave its gradient unclipped."""
    model = model_of("BERT", LORA)
    own, frozen = split(model, {*trained_names(model, LORA), LORA_SCALE})
    with pytest.raises(PlanError, match="'lora/scale' has no clipping rule"):
        clipped_grad_sum(losses_of("BERT"), own, UNITS, 1.0, frozen=frozen)


def test_blocks_of_an_adapter_are_the_definition() -> None:
    rng = np.random.default_rng(0)
    units, tokens, blocks, rank, out = 3, 5, 3, 2, 4
    x = rng.standard_normal((units, tokens, blocks, rank)).astype("f")
    g = rng.standard_normal((units, tokens, blocks, out)).astype("f")
    factors = np.array([0.5, 0.0, 2.0], np.float32)
    record = BlockwiseRecord(
        "b", units, blocks, tf.constant(x.reshape(-1, blocks * rank)), tf.constant(0.0)
    )
    gradients = record.gradients(tf.constant(g.reshape(-1, blocks * out)))
    each = np.einsum("utpi,utpj->uipj", x, g).reshape(units, rank, blocks * out)
    np.testing.assert_allclose(gradients.squared_norms, np.square(each).sum((1, 2)), rtol=1e-5)
    sums = gradients.combine(tf.constant(factors), gradients.parts)
    np.testing.assert_allclose(sums["b"], np.einsum("u,uij->ij", factors, each), atol=1e-5)


# --- no unused gradient is computed


DEPTH = MODELS["deep BERT"].layers


def products(kind: TrainedParameters, private: bool) -> int:
    """Return the number of matrix products in the pruned graph of a gradient sum."""
    config = LORA.model_copy(update={"trained_parameters": kind})
    model = model_of("deep BERT", config)
    own, frozen = split(model, trained_names(model, config))
    losses = losses_of("deep BERT")

    def sums() -> list[Any]:
        if private:
            return list(clipped_grad_sum(losses, own, UNITS, 1.0, frozen=frozen).sums.values())
        return list(ordinary_sum(losses, own, UNITS, frozen=frozen)[0].values())

    graph = tf.function(sums, autograph=False).get_concrete_function()
    needed, waiting = set(), [t.op for t in graph.outputs]
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [*(t.op for t in op.inputs), *op.control_inputs]
    ops = [op for op in graph.graph.get_operations() if op.name in needed]
    return sum(op.type == "MatMul" and op.inputs[0].shape[0] != 1 for op in ops)


def test_ordinary_training_of_a_part_has_no_product_for_the_weights_of_frozen_layers() -> None:
    """Each frozen matrix has two products, forward and for its input's gradient, but no third."""
    layers, all_of_them = 4 * DEPTH + 2, products("all", private=False)
    assert all_of_them >= 3 * layers
    assert products("biases-and-norms", private=False) <= 2 * layers + 1
    assert products("top-layer", private=False) <= all_of_them - 2 * 4


def test_private_training_of_a_part_has_no_product_for_the_weights_of_frozen_layers() -> None:
    whole, part = products("all", private=True), products("biases-and-norms", private=True)
    assert part <= 2 * (4 * DEPTH + 2) + 1
    assert whole > part


def test_the_backward_pass_ends_where_nothing_below_is_trained() -> None:
    model = model_of("deep BERT", AdapterConfig(trained_parameters="top-layer"))
    own, frozen = split(model, trained_names(model, AdapterConfig(trained_parameters="top-layer")))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        layers = RecordingLayers(own, UNITS, tape, frozen=frozen)
        losses_of("deep BERT")(layers)
    recorded = {name for record in layers.records for name in record.parameters}
    assert recorded == own.keys()
    assert not any(name.startswith(("layer_0", "embeddings")) for name in recorded)


def test_model_with_zero_adapters_equals_model_without_adapters() -> None:
    for name, config in MODELS.items():
        start: Any = fresh(config, 1)
        if name == "BERT tags":
            continue
        adapted = prepared(start, LORA, 1)
        assert len(adapted.parameters) > len(start.parameters)
        losses = losses_of(name)
        np.testing.assert_array_equal(
            losses(Layers(adapted.parameters)), losses(Layers(start.parameters)), err_msg=name
        )
