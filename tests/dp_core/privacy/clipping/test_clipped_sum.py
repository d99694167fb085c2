from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from clipped_models import UNITS, losses_of, model_of, split

from benchmarks.clipping_reference import ENGINES, naive_clipped_grad_sum
from dp_core.config.privacy import LEAST_CLIP
from dp_core.errors import BadInput, PlanError
from dp_core.nn import Layers
from dp_core.privacy.clipping import layer_rules as linear
from dp_core.privacy.clipping.book_keeping import (
    CLIP_FACTORS,
    STABILITY,
    ClippedSum,
    automatic_factors,
    clipped_grad_sum,
)
from dp_core.privacy.execution_plan import RANGE
from dp_core.training.objectives import UnitBatch, ordinary_sum


def flat(sums: dict[str, tf.Tensor]) -> np.ndarray:
    return np.concatenate([sums[n].numpy().astype(np.float64).ravel() for n in sorted(sums)])


@cache
def compiled(engine, model, **options):
    """Return one graph for all clip norms and batches of a model, as in the trainer."""

    def call(clip, batch):
        p = problem_of(model)
        losses = replace(p.losses, batch=batch)
        r = ENGINES[engine](losses, p.parameters, p.units, clip, **options)
        return r.sums, r.norms, r.losses

    return tf.function(call, autograph=False)


def run(engine, losses, model, clip=1.0, **options) -> ClippedSum:
    return ClippedSum(*compiled(engine, model, **options)(tf.constant(clip), losses.batch))


class Problem(NamedTuple):
    """Losses of units with padding, lost answers and repeated words, and parameters of a BERT."""

    losses: UnitBatch
    parameters: dict[str, tf.Variable]
    units: int = UNITS

    def with_share(self, unit: int, share: float) -> UnitBatch:
        """Return the losses with another share of a unit's rows; share 0 makes them padding."""
        *rows, shares = self.losses.batch
        changed = shares.numpy()
        changed[unit] = share
        return replace(self.losses, batch=(*rows, tf.constant(changed)))


@cache
def problem_of(name: str) -> Problem:
    model = model_of(name, seed=3)
    return Problem(losses_of(name, 11), split(model, model.parameters)[0])


DEEP = "deep BERT"


@pytest.fixture()
def problem() -> Problem:
    return problem_of(DEEP)


def dense_layer(rng: np.random.Generator, *shape: int) -> dict[str, tf.Variable]:
    kernel, bias = rng.standard_normal(shape).astype("f"), np.zeros(shape[1], "f")
    return {"a/kernel": tf.Variable(kernel), "a/bias": tf.Variable(bias)}


class ClippingEngineConformance:
    """Conformance tests: every clipping engine must return the clipped sum by its definition."""

    engine: str
    styles = ("flat", "automatic")

    @pytest.mark.parametrize(("clip", "style"), [(0.3, "flat"), (1e6, "flat"), (0.7, "automatic")])
    def test_it_equals_one_unit_at_a_time(self, problem, clip, style):
        """Automatic clipping is Σ C·g/(‖g‖ + γ) (Bu et al. 2022)."""
        for array in problem.losses.batch[-2:]:  # weights and shares
            assert 0 < np.count_nonzero(array) < tf.size(array)
        if style not in self.styles:
            pytest.skip(f"{self.engine} has no {style} clipping")
        factors = CLIP_FACTORS[style]
        result = run(self.engine, problem.losses, DEEP, clip, clip_factors=factors)
        expected, norms = np.zeros(flat(result.sums).shape), []
        for unit in range(problem.units):
            g = gradient_of(problem, unit)
            norms.append(np.linalg.norm(g))
            flat_factor = min(1.0, clip / max(norms[-1], 1e-30))
            expected += g * (flat_factor if style == "flat" else clip / (norms[-1] + STABILITY))
        np.testing.assert_allclose(flat(result.sums), expected, atol=3e-5)
        np.testing.assert_allclose(result.norms, norms, rtol=2e-4, atol=1e-6)
        assert np.linalg.norm(expected) > 0.3
        for wrong in (2 / 3, 3 / 2):  # the tolerance detects a scale error
            assert not np.allclose(flat(result.sums), wrong * expected, atol=3e-5)

    def test_a_unit_that_is_not_finite_contributes_nothing(self):
        problem = problem_of("BERT")
        rest = run("book-keeping", problem.with_share(1, 0.0), "BERT")
        assert np.linalg.norm(flat(rest.sums)) > 0.5
        for share in (np.nan, np.inf, 1e30):  # at 1e30 only the gradient's squared norm is infinite
            clipped = run(self.engine, problem.with_share(1, share), "BERT")
            np.testing.assert_allclose(flat(clipped.sums), flat(rest.sums), atol=2e-5)

    def test_bfloat16_gives_nearly_the_same(self, problem):
        exact = run("book-keeping", problem.losses, DEEP, 0.5)
        rough = run(self.engine, problem.losses, DEEP, 0.5, precision="bfloat16")
        assert all(s.dtype == tf.float32 for s in rough.sums.values())
        assert rough.norms.dtype == tf.float32
        error = np.linalg.norm(flat(rough.sums) - flat(exact.sums))
        assert 1e-6 < error < 0.03 * np.linalg.norm(flat(exact.sums))  # not float32


def gradient_of(problem, unit) -> np.ndarray:
    """Return one unit's gradient by automatic differentiation of this unit's loss."""
    with tf.GradientTape() as tape:
        loss = problem.losses(Layers(problem.parameters))[unit]
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(loss, problem.parameters, unconnected_gradients=zero)
    return flat({name: tf.convert_to_tensor(g) for name, g in gradients.items()})


class TestBookKeeping(ClippingEngineConformance):
    engine = "book-keeping"


class TestNaive(ClippingEngineConformance):
    engine = "naive"


class TestTensorflowPrivacy(ClippingEngineConformance):
    engine = "tensorflow-privacy"
    styles = ("flat",)


def test_conformance_class_covers_every_engine():
    tested = {cls.engine for cls in ClippingEngineConformance.__subclasses__()}
    assert tested == set(ENGINES)


def test_tensorflow_privacy_cannot_clip_automatically(problem):
    with pytest.raises(BadInput, match="supports flat clipping only"):
        run("tensorflow-privacy", problem.losses, DEEP, clip_factors=automatic_factors)


@pytest.mark.parametrize("style", ["flat", "automatic"])
def test_no_factor_lets_more_through_than_the_clip_norm(style):
    norms = np.concatenate([[0.0], np.logspace(-30, 18, 500)]).astype(np.float32)
    factors = CLIP_FACTORS[style](tf.constant(norms), tf.constant(0.3)).numpy()
    assert (factors * norms.astype(np.float64) <= 0.3 * (1 + 2**-22)).all()
    assert (np.diff(factors) <= 0).all()  # so an upper bound of the norm is safe
    assert factors[-1] * norms[-1] > 0.29


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens,d_in", [(128, 64), (16, 64)], ids=["explicitly", "by Gram"])
def test_nearly_equal_tokens_cannot_pass_more_than_the_clip_norm(precision, tokens, d_in):
    """Their sum is far below its terms, so a rounded norm would let the sum exceed the bound."""
    rng = np.random.default_rng(1)
    units, clip = 4, 1.0
    base = rng.standard_normal((units, 1, d_in))
    x = (base + 2e-2 * rng.standard_normal((units, tokens, d_in))).astype(np.float32)
    g = rng.standard_normal((units, tokens, 32))
    g = (30 * (g - g.mean(1, keepdims=True))).astype(np.float32)
    parameters = dense_layer(rng, d_in, 32)
    for unit in range(units):
        mask = (np.arange(units) == unit).astype(np.float32)

        def losses(layers, mask=mask):
            y = layers.linear("a", tf.constant(x.reshape(-1, d_in)))
            return tf.reduce_sum(tf.reshape(y, g.shape) * g, axis=(1, 2)) * mask

        alone = clipped_grad_sum(losses, parameters, units, clip, precision=precision)
        size = np.linalg.norm(flat(alone.sums))
        assert 0.5 < size <= clip * (1 + 1e-5)


def test_norms_are_never_below_the_true_ones(problem):
    fast = clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0)
    slow = naive_clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0)
    assert (fast.norms.numpy() >= slow.norms.numpy() * (1 - 1e-6)).all()


def test_a_gradient_whose_squares_are_0_in_float32_is_within_the_least_clip_norm():
    parameters, x = {"m/kernel": tf.Variable(tf.zeros((64, 64)))}, tf.fill((1, 64), 1e-3)

    def losses(layers: Layers) -> tf.Tensor:
        return tf.reduce_sum(layers.dense("m", x), axis=1) * 1e-19

    clipped = clipped_grad_sum(losses, parameters, 1, LEAST_CLIP)
    assert clipped.norms == 0 < np.linalg.norm(flat(clipped.sums)) < LEAST_CLIP / RANGE


def test_an_infinite_clip_gives_the_ordinary_gradient(problem):
    clipped = clipped_grad_sum(problem.losses, problem.parameters, problem.units, float("inf"))
    ordinary, _ = ordinary_sum(problem.losses, problem.parameters)
    np.testing.assert_allclose(flat(clipped.sums), flat(ordinary), rtol=1e-3, atol=2e-6)


def test_one_unit_moves_the_sum_by_at_most_the_clip_norm(problem):
    clip = 0.5
    whole = flat(clipped_grad_sum(problem.losses, problem.parameters, problem.units, clip).sums)
    moved = []
    for unit in range(problem.units):
        rest = problem.with_share(unit, 0.0)
        part = flat(clipped_grad_sum(rest, problem.parameters, problem.units, clip).sums)
        moved.append(np.linalg.norm(whole - part))
    assert max(moved) <= clip * (1 + 1e-5)
    assert max(moved) > 0.99 * clip  # clipping is active and not too strict


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tokens", [2, 40], ids=["by Gram", "explicitly"])
def test_activations_that_are_not_finite_contribute_nothing(monkeypatch, value, tokens):
    monkeypatch.setattr(linear, "_LARGEST_PART", 2 * 4 * 6 * 5)  # parts of two units
    assert linear.explicit_is_cheaper(tokens, 6, 5) == (tokens == 40)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3 * tokens, 6)).astype(np.float32)
    x[1] = value  # a token of unit 0
    parameters = dense_layer(rng, 6, 5)

    def losses(layers):
        y = tf.tanh(layers.linear("a", tf.constant(x)))
        return tf.reduce_sum(tf.reshape(y, (3, -1)), axis=1)

    clipped = clipped_grad_sum(losses, parameters, 3, 1.0)
    assert not np.isfinite(clipped.norms[0])
    x[:tokens] = 0  # differentiation cannot keep 0·NaN out of a shared product
    without = naive_clipped_grad_sum(
        lambda layers: losses(layers) * np.array([0, 1, 1], np.float32), parameters, 3, 1.0
    )
    np.testing.assert_allclose(flat(clipped.sums), flat(without.sums), atol=1e-5)
    assert np.linalg.norm(flat(without.sums)) > 0.5


def test_a_parameter_without_a_rule_is_an_error_that_names_it(problem):
    parameters = problem.parameters | {"forgotten": tf.Variable([1.0])}
    with pytest.raises(PlanError, match="'forgotten' has no clipping rule"):
        clipped_grad_sum(problem.losses, parameters, problem.units, 1.0)


def test_a_parameter_read_past_the_rules_is_an_error(problem):
    def losses(layers):
        return problem.losses(layers) * tf.reduce_sum(layers.parameters["mlm/bias"])

    with pytest.raises(AttributeError, match="through a layer rule"):
        clipped_grad_sum(losses, problem.parameters, problem.units, 1.0)


def test_a_kernel_used_twice_is_an_error_that_names_it():
    parameters = {"a/kernel": tf.Variable(tf.eye(3)), "a/bias": tf.Variable(tf.zeros(3))}

    def losses(layers):
        y = layers.linear("a", layers.linear("a", tf.ones((4, 3))))
        return tf.reduce_sum(tf.reshape(y, (2, -1)), axis=1)

    with pytest.raises(
        PlanError, match=r"'a/(kernel|bias)' is shared by LinearRecord and LinearRecord"
    ):
        clipped_grad_sum(losses, parameters, 2, 1.0)


def test_norms_wait_for_the_backward_pass_in_late_layers_but_not_in_early_ones(problem):
    @tf.function(autograph=False)
    def sums():
        return clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0).norms

    operations = sums.get_concrete_function().graph.get_operations()
    # TensorFlow also makes the results wait until all variables are read.
    waits = [
        (op, before)
        for op in operations
        for before in op.control_inputs
        if before.type not in ("ReadVariableOp", "NoOp")
    ]
    records = 1 + 1 + 6 * 2 + 3  # embeddings and their norm, blocks, head
    assert len({before.name for _, before in waits}) == records - 14
    # No operation of the backward pass waits.
    assert not [op.name for op, _ in waits if op.name.startswith("gradient_tape/")]
