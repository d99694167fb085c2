from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.clipping_reference import (
    naive_clipped_grad_sum,
    tensorflow_privacy_clipped_grad_sum,
)
from dp_core.config.training import AdapterConfig, TrainedParameters
from dp_core.errors import PlanError
from dp_core.models.adapters import prepared, trained_names
from dp_core.models.bert import class_row_losses, crf_row_losses, mlm_row_losses, tag_row_losses
from dp_core.models.causal import causal_row_losses
from dp_core.models.config import BertConfig, FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.parameters import AnyModel, Model, ModelConfig, fresh
from dp_core.nn import LORA_SCALE, RowLosses
from dp_core.privacy.clipping.book_keeping import RecordingLayers, clipped_grad_sum
from dp_core.privacy.clipping.layer_rules import BlockwiseRecord
from dp_core.training.heads import ClassHead, Head, TaggingHead
from dp_core.training.objectives import UnitBatch, ordinary_sum
from examples.distillation import distilled_row_losses

UNITS, ROWS, LENGTH, WORDS = 3, 2, 7, 9  # few words, so that they repeat within a unit
SIZES = {
    "vocab_size": WORDS, "hidden": 8, "layers": 1, "heads": 2, "intermediate": 12,
    "max_positions": LENGTH + 1,
}  # fmt: skip
BERT, DISTILBERT = BertConfig(**SIZES), BertConfig(**SIZES, type_vocab=0)
TAGS, CRF = TaggingHead(tuple("OABC")), TaggingHead(tuple("OABC"), crf=True)
CLASSES = ClassHead(tuple("ABCD"))
KINDS = get_args(TrainedParameters)
WHOLE = AdapterConfig()
LORA = AdapterConfig(trained_parameters="lora", lora_rank=2, lora_alpha=3.0)


class Case(NamedTuple):
    """A model, its head, and its losses with K answers in each row."""

    config: ModelConfig
    losses: RowLosses = mlm_row_losses
    answers: int = 3
    head: Head[Any, Any] | None = None

    @property
    def varies(self) -> bool:
        """Whether rows may have any number of answers."""
        return self.losses is not causal_row_losses and self.answers > 1


def causal(config: ModelConfig) -> Case:
    return Case(config, causal_row_losses, LENGTH - 1)


def distilled(*arguments: Any) -> tf.Tensor:
    return distilled_row_losses(model_of("BERT", seed=9), 0.7, 2.0)(*arguments)


MODELS = {
    "BERT": Case(BERT),
    "DistilBERT": Case(DISTILBERT),
    "GPT-2": causal(Gpt2Config(**SIZES)),
    "Llama": causal(LlamaConfig(**SIZES, key_heads=1)),
    "tied Llama": causal(LlamaConfig(**SIZES, tied=True)),
    # The window extends beyond the beginning of the row, and contains a word more than once.
    "feed-forward": causal(FeedForwardConfig(WORDS, 8, 5, (12, 6))),
    "BERT tags": Case(BERT, tag_row_losses, 4, TAGS),
    "DistilBERT tags": Case(DISTILBERT, tag_row_losses, 4, TAGS),
    "BERT tags with a CRF": Case(BERT, crf_row_losses, 5, CRF),
    "BERT classes of pairs": Case(BERT, class_row_losses, 1, CLASSES),
    "DistilBERT classes": Case(DISTILBERT, class_row_losses, 1, CLASSES),
    "deep BERT": Case(BertConfig(**SIZES | {"layers": 2})),
    "student of a teacher": Case(DISTILBERT, distilled),
}
CASES = [
    *((name, "all") for name in MODELS),
    *((name, "lora") for name, case in MODELS.items() if case.head in (None, TAGS)),
    *(
        (name, kind)
        for name in ("BERT", "Llama", "feed-forward")
        for kind in KINDS
        if kind not in ("all", "lora")
    ),
    *(("deep BERT", "top-layer"), ("BERT tags", "biases-and-norms")),
    *(("GPT-2", "no-embeddings"), ("tied Llama", "no-embeddings")),
]


def parts_of(kind: Any) -> AdapterConfig:
    return LORA.model_copy(update={"trained_parameters": kind})


def model_of(name: str, config: AdapterConfig = WHOLE, seed: int = 0) -> AnyModel:
    """Return a model with random offsets, so that no gradient vanishes by symmetry."""
    rng, case = np.random.default_rng(seed), MODELS[name]
    start: Any = fresh(case.config, seed)
    start = prepared(case.head.begin(start, seed) if case.head else start, config, seed)
    values = {
        n: a if n == LORA_SCALE else a + 0.2 * rng.standard_normal(a.shape).astype("f")
        for n, a in start.parameters.items()
    }
    return Model(start.config, values, start.labels)


def batch_of(
    name: str, seed: int = 0, units: int = UNITS, rows: int = ROWS, answers: int = 0
) -> tuple[tf.Tensor, ...]:
    """Return rows of various lengths with repeated words; some are padding or lack answers."""
    rng, case = np.random.default_rng(seed), MODELS[name]
    answers = answers if answers and case.varies else case.answers
    shape = (units, rows)
    lengths = rng.integers(2, LENGTH + 1, shape)
    real = rng.random(shape) < 0.8
    classes = len(case.head.labels) if case.head else WORDS
    arrays = (
        rng.integers(0, WORDS, (*shape, LENGTH)).astype(np.int32),
        lengths.astype(np.int32),
        rng.integers(0, lengths[:, :, None], (*shape, answers)).astype(np.int32),
        rng.integers(0, classes, (*shape, answers)).astype(np.int32),
        (rng.random((*shape, answers)) < 0.8).astype(np.float32),
        (real / np.maximum(real.sum(1, keepdims=True), 1)).astype(np.float32),
    )
    if case.head is CRF:  # the words of a chain come before its padding
        arrays[4][:] = -np.sort(-arrays[4])
    return tuple(tf.constant(a) for a in arrays)


def losses_of(name: str, *size: int) -> UnitBatch:
    return UnitBatch(MODELS[name].losses, MODELS[name].config, batch_of(name, *size))


def split(model: AnyModel, trained: Collection[str]) -> tuple[dict, dict]:
    """Return the trained and the frozen parameters as variables."""
    variables = {n: tf.Variable(a) for n, a in model.parameters.items()}
    chosen = {n: v for n, v in variables.items() if n in trained}
    return chosen, {n: v for n, v in variables.items() if n not in trained}


def assert_same(fast: Any, slow: Any) -> None:
    np.testing.assert_allclose(fast.losses, slow.losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fast.norms, slow.norms, rtol=2e-4, atol=1e-6)
    assert fast.sums.keys() == slow.sums.keys()
    for name, expected in slow.sums.items():
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(
            fast.sums[name], expected, atol=3e-4 * scale + 1e-9, err_msg=name
        )


def check(name: str, model: AnyModel, trained: Collection[str], seed: int = 0) -> Any:
    """Compare book-keeping with the definition, at a clip norm that clips only some units."""
    chosen, frozen = split(model, trained)
    losses = losses_of(name, seed)
    norms = naive_clipped_grad_sum(losses, chosen, UNITS, 1e6, frozen=frozen).norms.numpy()
    clip = float(np.median(norms))
    fast, slow = (
        f(losses, chosen, UNITS, clip, frozen=frozen)
        for f in (clipped_grad_sum, naive_clipped_grad_sum)
    )
    assert norms.max() > 1.001 * clip > 0
    assert_same(fast, slow)
    assert (fast.norms.numpy() >= norms * (1 - 1e-5)).all()  # both are float32
    return slow


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_it_equals_one_unit_at_a_time(name: str, kind: TrainedParameters) -> None:
    model = model_of(name, parts_of(kind))
    trained = trained_names(model, parts_of(kind))
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


@settings(max_examples=14, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(list(MODELS)),
    seed=st.integers(2, 10_000),
    units=st.integers(1, 4),
    rows=st.integers(1, 3),
    answers=st.integers(1, 5),
    clip=st.sampled_from([0.01, 1.0, 1e6]),
)
def test_whatever_the_batch_it_equals_one_unit_at_a_time(
    name: str, seed: int, units: int, rows: int, answers: int, clip: float
) -> None:
    variables, _ = split(model := model_of(name, seed=seed), model.parameters)
    losses = losses_of(name, seed, units, rows, answers)
    engines = clipped_grad_sum, naive_clipped_grad_sum
    assert_same(*(f(losses, variables, units, clip) for f in engines))


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow_privacy"), reason="no tensorflow-privacy here"
)
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_tensorflow_privacy_gives_the_same(name: str) -> None:
    model = model_of(name, LORA)
    chosen, frozen = split(model, trained_names(model, LORA))
    engines = tensorflow_privacy_clipped_grad_sum, naive_clipped_grad_sum
    assert_same(*(f(losses_of(name), chosen, UNITS, 0.05, frozen=frozen) for f in engines))


def test_tokens_after_the_end_of_a_row_do_not_change_any_gradient() -> None:
    variables, _ = split(model := model_of("GPT-2"), model.parameters)
    ids, lengths, positions, labels, _, shares = batch_of("GPT-2")
    asked = tf.range(1, LENGTH)[None, None, :] < lengths[:, :, None]
    padding = tf.range(LENGTH)[None, None, :] >= lengths[:, :, None]
    results = []
    for fill in (0, 5):
        filled = tf.where(padding, fill, ids)
        batch = (filled, lengths, positions, labels, tf.cast(asked, tf.float32), shares)
        losses = UnitBatch(causal_row_losses, MODELS["GPT-2"].config, batch)
        results.append(clipped_grad_sum(losses, variables, UNITS, 1.0))
    for name, value in results[0].sums.items():
        np.testing.assert_array_equal(value, results[1].sums[name], err_msg=name)


def test_a_trained_parameter_that_no_rule_covers_is_an_error_that_names_it() -> None:
    """The scale of adapters is a constant, so training it would leave its gradient unclipped."""
    model = model_of("BERT", LORA)
    chosen, frozen = split(model, {*trained_names(model, LORA), LORA_SCALE})
    with pytest.raises(PlanError, match="'lora/scale' has no clipping rule"):
        clipped_grad_sum(losses_of("BERT"), chosen, UNITS, 1.0, frozen=frozen)


@pytest.mark.parametrize("name", ["GPT-2", "BERT classes of pairs"])
def test_xla_compiles_it_to_the_same(name: str) -> None:
    variables, _ = split(model := model_of(name), model.parameters)

    def run() -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        clipped = clipped_grad_sum(losses_of(name), variables, UNITS, 1.0)
        return clipped.sums, clipped.norms

    sums, norms = run()
    compiled_sums, compiled_norms = tf.function(run, jit_compile=True, autograph=False)()
    np.testing.assert_allclose(compiled_norms, norms, rtol=1e-4)
    for parameter, value in sums.items():
        np.testing.assert_allclose(compiled_sums[parameter], value, atol=1e-5, err_msg=parameter)


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

DEPTH = MODELS["deep BERT"].config.layers


def products(kind: TrainedParameters, private: bool) -> int:
    """Return the number of matrix products in the pruned graph of a gradient sum."""
    model = model_of("deep BERT", parts_of(kind))
    chosen, frozen = split(model, trained_names(model, parts_of(kind)))
    losses = losses_of("deep BERT")

    def sums() -> list[Any]:
        if private:
            return list(clipped_grad_sum(losses, chosen, UNITS, 1.0, frozen=frozen).sums.values())
        return list(ordinary_sum(losses, chosen, frozen=frozen)[0].values())

    graph = tf.function(sums, autograph=False).get_concrete_function()
    needed, waiting = set(), [t.op for t in graph.outputs]
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [*(t.op for t in op.inputs), *op.control_inputs]
    ops = [op for op in graph.graph.get_operations() if op.name in needed]
    return sum(op.type == "MatMul" and op.inputs[0].shape[0] != 1 for op in ops)


def test_training_of_a_part_has_no_product_for_the_weights_of_frozen_layers() -> None:
    """Each frozen matrix has two products, forward and for its input's gradient, but no third."""
    layers, all_of_them = 4 * DEPTH + 2, products("all", private=False)
    assert all_of_them >= 3 * layers
    assert products("top-layer", private=False) <= all_of_them - 2 * 4
    for private in (False, True):
        assert products("biases-and-norms", private) <= 2 * layers + 1
    assert products("all", private=True) > products("biases-and-norms", private=True)


def test_the_backward_pass_ends_where_nothing_below_is_trained() -> None:
    model = model_of("deep BERT", parts_of("top-layer"))
    chosen, frozen = split(model, trained_names(model, parts_of("top-layer")))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        layers = RecordingLayers(chosen, UNITS, tape, frozen=frozen)
        losses_of("deep BERT")(layers)
    recorded = {name for record in layers.records for name in record.parameters}
    assert recorded == chosen.keys()
    assert not any(name.startswith(("layer_0", "embeddings")) for name in recorded)
