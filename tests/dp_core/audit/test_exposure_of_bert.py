"""Tests of exposure on an untrained encoder, which remembers nothing whatever it prefers."""

import dataclasses

import numpy as np
import pytest

from dp_core.audit.canaries import Canary
from dp_core.audit.exposure import ALONE, ExposureRow, Ranker, measure, null_exposure
from dp_core.audit.ranking import ranker
from dp_core.data.tokens import SpecialIds
from dp_core.models.config import BertConfig
from dp_core.models.parameters import MLM_BIAS, Bert, fresh

PIECES, S = 400, 16
CANDIDATES = list(range(200, PIECES, 2))  # a quarter of all tokens
OTHERS = [i for i in range(PIECES) if i not in set(CANDIDATES)]


def _bert(favour_others: float) -> Bert:
    """Return an untrained encoder with an output bias for tokens other than the candidates."""
    shape = BertConfig.of_size(vocab_size=PIECES, hidden=64, layers=1, max_positions=S)
    model = fresh(shape, 5)
    shifted = model.parameters[MLM_BIAS].copy()
    shifted[OTHERS] += favour_others
    return dataclasses.replace(model, parameters={**model.parameters, MLM_BIAS: shifted})


def _canaries(rate: float, count: int, seed: int) -> list[Canary]:
    coins = np.random.default_rng(seed)
    return [
        Canary(f"HSH-{i}", "HSH", rate, tuple(coins.choice(CANDIDATES, 3, False).tolist()))
        for i in range(count)
    ]


def _alone(rank: Ranker) -> ExposureRow:
    rows = measure(
        rank,
        _canaries(0.1, 48, 1),
        _canaries(0.0, 32, 2),
        special=SpecialIds(),
        candidates=CANDIDATES,
        declared_units=1000,
        sequence_length=S,
        repeats=2,
        seed=3,
    )
    (row,) = (r for r in rows if r.context == ALONE)
    return row


def test_an_untrained_encoder_reads_like_the_null_whatever_else_it_prefers() -> None:
    neutral, greedy = (_alone(ranker(_bert(bias), CANDIDATES)) for bias in (0.0, 50.0))
    assert not neutral.remembers
    # About 1 bit; five standard deviations for 48 canaries are less than half a bit.
    expected = null_exposure(len(CANDIDATES), 48).expected
    assert neutral.exposure == pytest.approx(expected, abs=0.5)
    assert greedy == neutral  # other tokens have no effect


def test_ranks_among_all_pieces_are_refused_where_they_pass_the_candidates() -> None:
    with pytest.raises(ValueError, match="not within 1 … 100"):
        _alone(ranker(_bert(50.0)))


def test_ranks_among_all_tokens_count_those_that_are_no_candidates() -> None:
    model = _bert(50.0)
    ids = np.array([[2, 210, 4, 220, 3] + [0] * (S - 5)], np.int32)
    asked = (ids, *(np.array([x], np.int32) for x in (5, 2, 300)))
    among = ranker(model, CANDIDATES)(*asked)
    assert ranker(model)(*asked) == among + len(OTHERS)  # the model prefers all others
