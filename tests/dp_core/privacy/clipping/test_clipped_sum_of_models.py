from collections.abc import Collection
from typing import Any, get_args

import numpy as np
import pytest
import tensorflow as tf
from clipped_models import (
    LENGTH,
    LORA,
    MODELS,
    TAGS,
    UNITS,
    assert_same,
    batch_of,
    losses_of,
    model_of,
    parts_of,
    split,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.clipping_reference import naive_clipped_grad_sum
from dp_core.config.training import TrainedParameters
from dp_core.errors import PlanError
from dp_core.models.adapters import trained_names
from dp_core.models.causal import causal_row_losses
from dp_core.models.parameters import AnyModel
from dp_core.nn import LORA_SCALE
from dp_core.privacy.clipping.book_keeping import (
    RecordingLayers,
    automatic_factors,
    clipped_grad_sum,
)
from dp_core.privacy.clipping.layer_rules import BlockwiseRecord
from dp_core.training.objectives import UnitBatch, ordinary_sum

CASES = [
    *((name, "all") for name in MODELS),
    *((name, "lora") for name, case in MODELS.items() if case.head in (None, TAGS)),
    *(
        (name, kind)
        for name in ("BERT", "Llama", "feed-forward")
        for kind in get_args(TrainedParameters)
        if kind not in ("all", "lora")
    ),
    *(("deep BERT", "top-layer"), ("BERT tags", "biases-and-norms")),
    *(("GPT-2", "no-embeddings"), ("tied Llama", "no-embeddings")),
]


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
def test_it_equals_one_unit_at_a_time(name, kind):
    model = model_of(name, parts_of(kind))
    trained = trained_names(model, parts_of(kind))
    slow = check(name, model, trained)
    assert slow.sums.keys() == trained
    for parameter, value in slow.sums.items():  # every one has a gradient
        assert np.abs(value).max() > 0 or parameter == "embeddings/type", parameter


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_any_part_equals_one_unit_at_a_time(name, seed):
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
def test_whatever_the_batch_it_equals_one_unit_at_a_time(name, seed, units, rows, answers, clip):
    variables, _ = split(model := model_of(name, seed=seed), model.parameters)
    losses = losses_of(name, seed, units, rows, answers)
    engines = clipped_grad_sum, naive_clipped_grad_sum
    assert_same(*(f(losses, variables, units, clip) for f in engines))


def keyed(name: str, keys: Any, rate: float = 0.4) -> UnitBatch:
    """Return the usual batch with dropout by these keys, (U, R)."""
    batch = (*batch_of(name), tf.constant(keys, tf.uint32))
    return UnitBatch(MODELS[name].losses, MODELS[name].config, batch, rate)


KEYS = np.random.default_rng(5).integers(0, 1 << 32, (UNITS, 2))


@pytest.mark.parametrize("kind", ["all", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_with_dropout_it_equals_one_unit_at_a_time(name, kind):
    """A unit alone is at another place of another batch, so its masks must follow its keys."""
    if kind == "lora" and MODELS[name].head not in (None, TAGS):
        return
    model = model_of(name, parts_of(kind))
    chosen, frozen = split(model, trained_names(model, parts_of(kind)))
    losses = keyed(name, KEYS)
    norms = naive_clipped_grad_sum(losses, chosen, UNITS, 1e6, frozen=frozen).norms.numpy()
    clip = float(np.median(norms))
    engines = clipped_grad_sum, naive_clipped_grad_sum
    assert_same(*(f(losses, chosen, UNITS, clip, frozen=frozen) for f in engines))
    without = UnitBatch(losses.row_losses, losses.config, losses.batch)
    plain = clipped_grad_sum(without, chosen, UNITS, clip, frozen=frozen)
    assert not np.allclose(plain.norms, norms, rtol=0.01)
    assert losses.row_losses is not causal_row_losses or norms.min() > 0


def test_other_units_do_not_change_a_units_dropout():
    chosen, _ = split(model := model_of("BERT"), model.parameters)
    others = KEYS.copy()
    others[1:] += 1
    first, second = (
        clipped_grad_sum(keyed("BERT", keys), chosen, UNITS, 1.0) for keys in (KEYS, others)
    )
    np.testing.assert_array_equal(first.losses[0], second.losses[0])
    np.testing.assert_allclose(first.norms[0], second.norms[0], rtol=1e-6)
    assert not np.allclose(first.losses[1:], second.losses[1:])


def test_tokens_after_the_end_of_a_row_do_not_change_any_gradient():
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


def test_a_trained_parameter_that_no_rule_covers_is_an_error_that_names_it():
    """The scale of adapters is a constant, so training it would leave its gradient unclipped."""
    model = model_of("BERT", LORA)
    chosen, frozen = split(model, {*trained_names(model, LORA), LORA_SCALE})
    with pytest.raises(PlanError, match="'lora/scale' has no clipping rule"):
        clipped_grad_sum(losses_of("BERT"), chosen, UNITS, 1.0, frozen=frozen)


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("GPT-2", {}, 1e-4),
        ("BERT classes of pairs", {}, 1e-4),
        # XLA rounds less often.
        ("BERT", {"precision": "bfloat16", "clip_factors": automatic_factors}, 0.02),
    ],
)
def test_xla_compiles_it_to_the_same(name, options, tolerance):
    variables, _ = split(model := model_of(name), model.parameters)

    def run(clip: Any) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        clipped = clipped_grad_sum(losses_of(name), variables, UNITS, clip, **options)
        return clipped.sums, clipped.norms

    sums, norms = run(tf.constant(0.5))
    compiled = tf.function(run, jit_compile=True, autograph=False)
    compiled_sums, compiled_norms = compiled(tf.constant(0.5))
    np.testing.assert_allclose(compiled_norms, norms, rtol=tolerance)
    size = np.sqrt(sum(np.square(value).sum() for value in sums.values()))
    for parameter, value in sums.items():
        error = np.linalg.norm(compiled_sums[parameter] - value)
        assert error < tolerance * size, parameter


def test_blocks_of_an_adapter_are_the_definition():
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


def test_training_of_a_part_has_no_product_for_the_weights_of_frozen_layers():
    """Each frozen matrix has two products, forward and for its input's gradient, but no third."""
    layers, all_of_them = 4 * DEPTH + 2, products("all", private=False)
    assert all_of_them >= 3 * layers
    assert products("top-layer", private=False) <= all_of_them - 2 * 4
    for private in (False, True):
        assert products("biases-and-norms", private) <= 2 * layers + 1
    assert products("all", private=True) > products("biases-and-norms", private=True)


def test_the_backward_pass_ends_where_nothing_below_is_trained():
    model = model_of("deep BERT", parts_of("top-layer"))
    chosen, frozen = split(model, trained_names(model, parts_of("top-layer")))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        layers = RecordingLayers(chosen, UNITS, tape, frozen=frozen)
        losses_of("deep BERT")(layers)
    recorded = {name for record in layers.records for name in record.parameters}
    assert recorded == chosen.keys()
    assert not any(name.startswith(("layer_0", "embeddings")) for name in recorded)
