"""The book-keeping engine against the definition of the clipped sum, and its sensitivity."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.clipping_reference import naive_clipped_grad_sum
from dp_core.errors import PlanError
from dp_core.privacy.clipping import layer_rules as linear
from dp_core.privacy.clipping.book_keeping import ClippedSum, clipped_grad_sum
from dp_core.training.objectives import ordinary_sum


def flat(sums: dict[str, tf.Tensor]) -> np.ndarray:
    return np.concatenate([sums[n].numpy().astype(np.float64).ravel() for n in sorted(sums)])


def assert_same(a: ClippedSum, b: ClippedSum) -> None:
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a.norms, b.norms, rtol=2e-4, atol=1e-6)
    for name in b.sums:
        scale = float(tf.reduce_max(tf.abs(b.sums[name]))) + 1e-6
        np.testing.assert_allclose(a.sums[name], b.sums[name], atol=3e-4 * scale, err_msg=name)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10_000),
    units=st.integers(1, 3),
    rows=st.integers(1, 3),
    length=st.integers(2, 8),
    predictions=st.integers(1, 4),
    layers=st.integers(1, 2),
    words=st.integers(3, 30),
    clip=st.sampled_from([0.01, 1.0, 3.0, 1e6]),
)
def test_equals_one_unit_at_a_time(
    problem_of, seed, units, rows, length, predictions, layers, words, clip
):
    p = problem_of(seed, units, rows, length, predictions, layers, words)
    fast = clipped_grad_sum(p.losses, p.parameters, p.units, clip)
    slow = naive_clipped_grad_sum(p.losses, p.parameters, p.units, clip)
    assert_same(fast, slow)


def test_norms_are_never_below_the_true_ones(problem):
    fast = clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0)
    slow = naive_clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0)
    assert (fast.norms.numpy() >= slow.norms.numpy() * (1 - 1e-6)).all()


def test_an_infinite_clip_gives_the_ordinary_gradient(problem):
    clipped = clipped_grad_sum(problem.losses, problem.parameters, problem.units, float("inf"))
    ordinary, _, _ = ordinary_sum(problem.losses, problem.parameters, problem.units)
    np.testing.assert_allclose(flat(clipped.sums), flat(ordinary), rtol=1e-3, atol=2e-6)


def test_one_unit_moves_the_sum_by_at_most_the_clip_norm(problem):
    clip = 0.5
    whole = flat(clipped_grad_sum(problem.losses, problem.parameters, problem.units, clip).sums)
    moved = []
    for unit in range(problem.units):
        rest = problem.without(unit)
        part = flat(clipped_grad_sum(rest.losses, rest.parameters, rest.units, clip).sums)
        moved.append(np.linalg.norm(whole - part))
    assert max(moved) <= clip * (1 + 1e-5)
    assert max(moved) > 0.99 * clip  # clipping is active and not too strict


def test_gradient_of_a_unit_does_not_depend_on_other_units(problem):
    """The sum without unit 1's contribution is the same before and after unit 1 is replaced."""
    other = problem.with_other_unit(1, seed=9)
    rests = []
    for p in (problem, other):
        alone = [u for u in range(p.units) if u != 1]
        own = p
        for u in alone:
            own = own.without(u)
        whole = clipped_grad_sum(p.losses, p.parameters, p.units, 1.0)
        mine = clipped_grad_sum(own.losses, own.parameters, own.units, 1.0)
        rests.append((flat(whole.sums) - flat(mine.sums), whole.norms.numpy()[alone]))
        assert np.linalg.norm(flat(mine.sums)) > 0.9
    np.testing.assert_allclose(rests[0][0], rests[1][0], atol=2e-6)
    np.testing.assert_array_equal(rests[0][1], rests[1][1])


def test_rows_of_a_unit_share_one_clip(problem_of):
    """Two rows of one unit are clipped to C together, whereas two units are clipped to C each."""
    p = problem_of(5, units=1, rows=2, length=6, predictions=2, layers=1, words=9)
    p.shares[:] = 1
    p.weights[:] = 1
    clip = 0.1
    together = flat(clipped_grad_sum(p.losses, p.parameters, 1, clip).sums)
    assert np.linalg.norm(together) == pytest.approx(clip, rel=1e-4)


def test_padding_alone_gives_zero(problem):
    for unit in range(problem.units):
        problem = problem.without(unit)
    nothing = clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0)
    assert not flat(nothing.sums).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_a_unit_that_is_not_finite_contributes_nothing(problem, value):
    factors = np.ones(problem.units, np.float32)
    factors[2] = value  # at 1e30 the gradient is finite but its squared norm is not

    def losses(layers):
        return problem.losses(layers) * factors

    clipped = clipped_grad_sum(losses, problem.parameters, problem.units, 1.0)
    rest = problem.without(2)
    expected = clipped_grad_sum(rest.losses, rest.parameters, rest.units, 1.0)
    np.testing.assert_allclose(flat(clipped.sums), flat(expected.sums), atol=1e-6)
    assert np.abs(flat(expected.sums)).max() > 0.01


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("tokens", [2, 40], ids=["by Gram", "explicitly"])
def test_activations_that_are_not_finite_contribute_nothing(monkeypatch, value, tokens):
    monkeypatch.setattr(linear, "_LARGEST_PART", 2 * 4 * 6 * 5)  # parts of two units
    assert linear.explicit_is_cheaper(tokens, 6, 5) == (tokens == 40)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3 * tokens, 6)).astype(np.float32)
    x[1] = value  # a token of unit 0
    parameters = {
        "a/kernel": tf.Variable(rng.standard_normal((6, 5)).astype(np.float32)),
        "a/bias": tf.Variable(np.zeros(5, np.float32)),
    }

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


def test_xla_compiles_it_to_the_same(problem):
    def run():
        r = clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0)
        return r.sums, r.norms, r.losses

    compiled = ClippedSum(*tf.function(run, jit_compile=True, autograph=False)())
    assert_same(compiled, ClippedSum(*run()))


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
