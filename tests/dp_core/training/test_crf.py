"""The CRF against enumeration of all paths: log Z, probabilities, best tags, and gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from dp_core.models.bert import crf_row_losses
from dp_core.models.config import BertConfig
from dp_core.models.parameters import TRANSITIONS, fresh
from dp_core.nn import best_tags, chain_losses
from dp_core.privacy.clipping.book_keeping import clipped_grad_sum
from dp_core.privacy.clipping.reference import naive_clipped_grad_sum
from dp_core.training.heads import TaggingHead
from dp_core.training.objectives import UnitBatch

TAGS = 3


def score(emissions: np.ndarray, transitions: np.ndarray, path: tuple[int, ...]) -> float:
    words = sum(emissions[k, tag] for k, tag in enumerate(path))
    return float(words + sum(transitions[a, b] for a, b in itertools.pairwise(path)))


def chain(words: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (words, TAGS), (TAGS, TAGS)
    emissions, transitions = (rng.normal(0, 2, s).astype(np.float32) for s in shapes)
    return emissions, transitions


@pytest.mark.parametrize("words", [1, 2, 5])
def test_loss_equals_enumeration_of_all_paths(words: int) -> None:
    emissions, transitions = chain(words, words)
    paths = list(itertools.product(range(TAGS), repeat=words))
    scores = np.array([score(emissions, transitions, path) for path in paths])
    log_z = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
    room = 6  # padding after the chain, which must have no effect
    shown = np.full((len(paths), room, TAGS), 7.0, np.float32)
    shown[:, :words] = emissions
    tags, weights = np.ones((len(paths), room), np.int32), np.zeros((len(paths), room), np.float32)
    tags[:, :words], weights[:, :words] = paths, 1
    copies = np.tile(transitions, (len(paths), 1, 1))
    losses = chain_losses(*(tf.constant(a) for a in (shown, copies, tags, weights))).numpy()
    np.testing.assert_allclose(losses, log_z - scores, rtol=1e-4, atol=1e-4)
    assert np.exp(-losses.astype(np.float64)).sum() == pytest.approx(1, abs=1e-4)
    none = np.zeros_like(weights)
    empty = chain_losses(*(tf.constant(a) for a in (shown, copies, tags, none))).numpy()
    assert (empty == 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_best_tags_equal_enumeration_of_allowed_paths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = int(rng.integers(1, 6))
    emissions, transitions = chain(words, seed)
    begins, follows = np.array([True, True, False]), rng.random((TAGS, TAGS)) < 0.6
    follows[0, 0] = True  # some path is always allowed
    allowed = [
        path
        for path in itertools.product(range(TAGS), repeat=words)
        if begins[path[0]] and all(follows[a, b] for a, b in itertools.pairwise(path))
    ]
    best = max(allowed, key=lambda path: score(emissions, transitions, path))
    assert tuple(best_tags(emissions, transitions, begins, follows)) == best


def test_clipping_includes_gradients_of_transitions_per_unit() -> None:
    """Units with several rows of different lengths, one of padding, against one unit at a time."""
    rng = np.random.default_rng(0)
    units, rows, length, words = 4, 2, 8, 6
    config = BertConfig(
        vocab_size=9, hidden=8, layers=1, heads=2, intermediate=12, max_positions=length
    )
    head = TaggingHead(("O", "B-a", "I-a"), crf=True)
    start = head.begin(fresh(config, 0), 0)
    parameters = {
        name: tf.Variable(a + 0.3 * rng.standard_normal(a.shape).astype(np.float32))
        for name, a in start.parameters.items()
    }
    counts = rng.integers(1, words + 1, (units, rows))
    weights = (np.arange(words) < counts[..., None]).astype(np.float32)
    shares = np.full((units, rows), 0.5, np.float32)
    weights[3, 1], shares[3] = 0, (1, 0)
    batch = UnitBatch(
        crf_row_losses,
        config,
        tuple(
            tf.constant(a)
            for a in (
                rng.integers(0, 9, (units, rows, length)).astype(np.int32),
                np.full((units, rows), length, np.int32),
                np.broadcast_to(np.arange(1, words + 1, dtype=np.int32), weights.shape),
                rng.integers(0, 3, weights.shape).astype(np.int32),
                weights,
                shares,
            )
        ),
    )
    whole = naive_clipped_grad_sum(batch, parameters, units, 1e6)
    clip = float(np.median(whole.norms))
    for norm in (1e6, clip):
        fast, slow = (
            f(batch, parameters, units, norm) for f in (clipped_grad_sum, naive_clipped_grad_sum)
        )
        np.testing.assert_allclose(fast.norms, slow.norms, rtol=2e-4)
        for name, expected in slow.sums.items():
            scale = float(tf.reduce_max(tf.abs(expected)))
            np.testing.assert_allclose(fast.sums[name], expected, atol=3e-4 * scale + 1e-9)
    assert np.abs(whole.sums[TRANSITIONS]).max() > 0.01
    # The norm includes the transitions: without them it would be too small.
    alone = {TRANSITIONS: parameters[TRANSITIONS]}
    frozen = {n: v for n, v in parameters.items() if n != TRANSITIONS}
    norms_without_transitions = clipped_grad_sum(
        batch, alone, units, clip, frozen=frozen
    ).norms.numpy()
    rest = clipped_grad_sum(batch, frozen, units, clip, frozen=alone).norms.numpy()
    np.testing.assert_allclose(np.hypot(norms_without_transitions, rest), whole.norms, rtol=2e-4)
