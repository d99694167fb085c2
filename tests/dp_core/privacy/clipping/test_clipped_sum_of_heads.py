"""Clipped sums of every model and head equal their definition, computed one unit at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.clipping_reference import naive_clipped_grad_sum
from dp_core.errors import PlanError
from dp_core.models.bert import class_row_losses, mlm_row_losses, tag_row_losses
from dp_core.models.causal import causal_row_losses
from dp_core.models.config import BertConfig, FeedForwardConfig, Gpt2Config
from dp_core.models.parameters import CLASSIFIER, POOLER, TAGGER, Model, ModelConfig, fresh
from dp_core.privacy.clipping.book_keeping import clipped_grad_sum
from dp_core.training.objectives import UnitBatch
from examples.distillation import distilled_row_losses

UNITS, ROWS, LENGTH, WORDS, CLASSES = 3, 2, 7, 9, 4  # few words, so that they repeat within a unit
SIZES = {
    "vocab_size": WORDS,
    "hidden": 8,
    "layers": 2,
    "heads": 2,
    "intermediate": 12,
    "max_positions": LENGTH + 1,
}
BERT, DISTILBERT = BertConfig(**SIZES), BertConfig(**SIZES, type_vocab=0)
HEADS = {
    "mlm": {},
    "tags": {f"{TAGGER}/kernel": (8, CLASSES), f"{TAGGER}/bias": (CLASSES,)},
    "classes": {
        f"{POOLER}/kernel": (8, 8),
        f"{POOLER}/bias": (8,),
        f"{CLASSIFIER}/kernel": (8, CLASSES),
        f"{CLASSIFIER}/bias": (CLASSES,),
    },
}


def parameters_of(config: ModelConfig, head: str, seed: int) -> dict[str, np.ndarray]:
    """Return parameters with random offsets, so that no gradient vanishes by symmetry."""
    rng = np.random.default_rng(seed)
    values = fresh(config, seed).parameters
    if head != "mlm":
        values = {n: a for n, a in values.items() if not n.startswith("mlm/")}
        values |= {n: np.zeros(shape, np.float32) for n, shape in HEADS[head].items()}
    return {n: a + 0.2 * rng.standard_normal(a.shape).astype("f") for n, a in values.items()}


def batch_of(
    seed: int, answers: int, classes: int, units: int = UNITS, rows: int = ROWS
) -> tuple[tf.Tensor, ...]:
    """Return rows of various lengths with repeated words; some are padding or lack answers."""
    rng = np.random.default_rng(seed)
    shape = (units, rows)
    lengths = rng.integers(2, LENGTH + 1, shape)
    real = rng.random(shape) < 0.8
    arrays = (
        rng.integers(0, WORDS, (*shape, LENGTH)).astype(np.int32),
        lengths.astype(np.int32),
        rng.integers(0, lengths[:, :, None], (*shape, answers)).astype(np.int32),
        rng.integers(0, classes, (*shape, answers)).astype(np.int32),
        (rng.random((*shape, answers)) < 0.8).astype(np.float32),
        (real / np.maximum(real.sum(1, keepdims=True), 1)).astype(np.float32),
    )
    return tuple(tf.constant(a) for a in arrays)


CASES = {
    "GPT-2": (Gpt2Config(**SIZES), "mlm", causal_row_losses, LENGTH - 1, WORDS),
    # The window extends beyond the beginning of the row, and contains a word more than once.
    "feed-forward": (
        *(FeedForwardConfig(WORDS, 8, 5, (12, 6)), "mlm"),
        *(causal_row_losses, LENGTH - 1, WORDS),
    ),
    "DistilBERT": (DISTILBERT, "mlm", mlm_row_losses, 3, WORDS),
    "BERT tags": (BERT, "tags", tag_row_losses, 4, CLASSES),
    "DistilBERT tags": (DISTILBERT, "tags", tag_row_losses, 4, CLASSES),
    "BERT classes of pairs": (BERT, "classes", class_row_losses, 1, CLASSES),
    "DistilBERT classes": (DISTILBERT, "classes", class_row_losses, 1, CLASSES),
    "student of a teacher": (
        DISTILBERT,
        "mlm",
        lambda *a: distilled_row_losses(Model(BERT, parameters_of(BERT, "mlm", 9)), 0.7, 2.0)(*a),
        3,
        WORDS,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_one_unit_at_a_time(case: str, seed: int) -> None:
    config, head, row_losses, answers, classes = CASES[case]
    arrays = parameters_of(config, head, seed)
    variables = {n: tf.Variable(a) for n, a in arrays.items()}
    losses = UnitBatch(row_losses, config, batch_of(seed, answers, classes))
    slow = naive_clipped_grad_sum(losses, variables, UNITS, 1e6)
    norms = slow.norms.numpy()
    clip = float(np.median(norms))  # only some units are clipped
    fast, slow = (
        f(losses, variables, UNITS, clip) for f in (clipped_grad_sum, naive_clipped_grad_sum)
    )
    assert norms.max() > 1.001 * clip > 0
    np.testing.assert_allclose(fast.losses, slow.losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fast.norms, norms, rtol=2e-4, atol=1e-6)
    assert (fast.norms.numpy() >= norms * (1 - 1e-6)).all()
    for name, expected in slow.sums.items():
        scale = float(tf.reduce_max(tf.abs(expected)))
        assert scale > 0 or name.startswith("embeddings/type"), name  # has a gradient
        np.testing.assert_allclose(
            fast.sums[name], expected, atol=3e-4 * scale + 1e-9, err_msg=name
        )


@settings(max_examples=14, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(list(CASES)),
    seed=st.integers(2, 10_000),
    units=st.integers(1, 4),
    rows=st.integers(1, 3),
    answers=st.integers(1, 5),
    clip=st.sampled_from([0.01, 1.0, 1e6]),
)
def test_whatever_the_batch_it_equals_one_unit_at_a_time(
    case: str, seed: int, units: int, rows: int, answers: int, clip: float
) -> None:
    config, head, row_losses, most, classes = CASES[case]
    variables = {n: tf.Variable(a) for n, a in parameters_of(config, head, seed).items()}
    # A causal row has an answer at every token, and a classified row has one class.
    answers = most if row_losses is causal_row_losses or "classes" in case else answers
    losses = UnitBatch(row_losses, config, batch_of(seed, answers, classes, units, rows))
    fast, slow = (
        f(losses, variables, units, clip) for f in (clipped_grad_sum, naive_clipped_grad_sum)
    )
    np.testing.assert_allclose(fast.losses, slow.losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fast.norms, slow.norms, rtol=2e-4, atol=1e-6)
    for name, expected in slow.sums.items():
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(
            fast.sums[name], expected, atol=3e-4 * scale + 1e-9, err_msg=name
        )


def test_tokens_after_the_end_of_a_row_do_not_change_any_gradient() -> None:
    config, _, row_losses, answers, classes = CASES["GPT-2"]
    variables = {n: tf.Variable(a) for n, a in parameters_of(config, "mlm", 0).items()}
    ids, lengths, positions, labels, _, shares = batch_of(0, answers, classes)
    asked = tf.range(1, LENGTH)[None, None, :] < lengths[:, :, None]
    padding = tf.range(LENGTH)[None, None, :] >= lengths[:, :, None]
    results = []
    for fill in (0, 5):
        filled = tf.where(padding, fill, ids)
        batch = (filled, lengths, positions, labels, tf.cast(asked, tf.float32), shares)
        results.append(
            clipped_grad_sum(UnitBatch(row_losses, config, batch), variables, UNITS, 1.0)
        )
    for name, value in results[0].sums.items():
        np.testing.assert_array_equal(value, results[1].sums[name], err_msg=name)


def test_a_type_table_that_the_model_does_not_read_is_an_error_that_names_it() -> None:
    variables = {n: tf.Variable(a) for n, a in parameters_of(BERT, "mlm", 0).items()}
    losses: Callable[..., tf.Tensor] = UnitBatch(mlm_row_losses, DISTILBERT, batch_of(0, 3, WORDS))
    with pytest.raises(PlanError, match="'embeddings/type' has no clipping rule"):
        clipped_grad_sum(losses, variables, UNITS, 1.0)


@pytest.mark.parametrize("case", ["GPT-2", "BERT classes of pairs"])
def test_xla_compiles_it_to_the_same(case: str) -> None:
    config, head, row_losses, answers, classes = CASES[case]
    variables = {n: tf.Variable(a) for n, a in parameters_of(config, head, 0).items()}
    losses = UnitBatch(row_losses, config, batch_of(0, answers, classes))

    def run() -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        clipped = clipped_grad_sum(losses, variables, UNITS, 1.0)
        return clipped.sums, clipped.norms

    sums, norms = run()
    compiled_sums, compiled_norms = tf.function(run, jit_compile=True, autograph=False)()
    np.testing.assert_allclose(compiled_norms, norms, rtol=1e-4)
    for name, value in sums.items():
        np.testing.assert_allclose(compiled_sums[name], value, atol=1e-5, err_msg=name)
