"""Tests of exposure on decoders and encoders that were trained on canaries, or never trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from learned_by_heart import by_heart

from dp_core.audit.canaries import Canary, plant
from dp_core.audit.exposure import ALONE, EMBEDDED, CanaryData, ExposureRow, Ranker, measure
from dp_core.audit.null_exposure import null_exposure
from dp_core.audit.observations import ranker
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.data.tokens import SpecialIds
from dp_core.labels import Label
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.parameters import MLM_BIAS, AnyModel, Bert, fresh

PIECES, S, UNITS = 125, 12, 40
CANDIDATES = list(range(5, PIECES))
SHAPE = Gpt2Config(
    vocab_size=PIECES, hidden=32, layers=1, heads=2, intermediate=64, max_positions=S
)


def _canaries(
    pattern: str, rate: float, count: int, seed: int, pool: Sequence[int] = CANDIDATES
) -> list[Canary]:
    coins = np.random.default_rng(seed)
    return [
        Canary(
            f"{pattern}-{rate}-{i}",
            pattern,
            rate,
            tuple(coins.choice(pool, len(pattern), replace=False).tolist()),
        )
        for i in range(count)
    ]


PLANTED = _canaries("HS", 0.3, 6, 1) + _canaries("SH", 0.3, 6, 2)
REFERENCES = _canaries("HS", 0.0, 16, 3) + _canaries("SH", 0.0, 16, 4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Write units of random tokens, with planted canaries."""
    coins = np.random.default_rng(0)
    writer = TokenStoreWriter(tmp_path_factory.mktemp("store"), S, PIECES)
    for unit in range(UNITS):
        rows = [[2, *coins.choice(CANDIDATES, 6).tolist(), 3] for _ in range(3)]
        writer.add_unit(f"unit {unit}", plant(f"unit {unit}", rows, PLANTED, 0, S))
    return writer.finish()


@pytest.fixture(scope="module")
def trained(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> AnyModel:
    folder = tmp_path_factory.mktemp("checkpoints")
    return by_heart(SHAPE, store, folder, updates=300, rows=40)


def _measure(
    rank: Ranker, canaries: list[Canary], candidates: list[int], length: int
) -> list[ExposureRow]:
    return measure(
        CanaryData(
            rank=rank,
            canaries=canaries,
            special=SpecialIds(),
            candidates=candidates,
            sequence_length=length,
            train=cast(Any, None),  # only the exposure in rows reads it
            declared_units=UNITS,
            label=Label.DP,
            seed=3,
        )
    )


def _exposures(model: AnyModel) -> dict[tuple[str, str], ExposureRow]:
    rows = _measure(ranker(model, CANDIDATES), [*PLANTED, *REFERENCES], CANDIDATES, S)
    return {(row.pattern, row.context): row for row in rows}


def test_a_decoder_finds_exactly_the_learned_secrets_that_have_hints_before_them(
    trained: AnyModel,
) -> None:
    """A causal model's memory of a first token would show in later tokens, not predicted here."""
    found = _exposures(trained)
    for context in (ALONE, EMBEDDED):
        row = found["HS", context]
        assert row.remembers
        assert row.exposure > np.log2(len(CANDIDATES)) - 2.5
        assert row.p_value < 1e-4
    row = found["SH", EMBEDDED]
    assert not row.remembers
    assert row.exposure < row.null_high


def test_an_untrained_decoder_reads_like_the_null() -> None:
    for row in _exposures(fresh(SHAPE, 5)).values():
        assert not row.remembers


BERT_PIECES, BERT_S = 400, 16
BERT_CANDIDATES = list(range(200, BERT_PIECES, 2))  # a quarter of all tokens
OTHERS = [i for i in range(BERT_PIECES) if i not in set(BERT_CANDIDATES)]


def _bert(favour_others: float) -> Bert:
    """Return an untrained encoder with an output bias for tokens other than the candidates."""
    shape = BertConfig.of_size(vocab_size=BERT_PIECES, hidden=64, layers=1, max_positions=BERT_S)
    model = fresh(shape, 5)
    shifted = model.parameters[MLM_BIAS].copy()
    shifted[OTHERS] += favour_others
    return dataclasses.replace(model, parameters={**model.parameters, MLM_BIAS: shifted})


def _alone(rank: Ranker) -> ExposureRow:
    canaries = [
        *_canaries("HSH", 0.1, 48, 1, BERT_CANDIDATES),
        *_canaries("HSH", 0.0, 32, 2, BERT_CANDIDATES),
    ]
    rows = _measure(rank, canaries, BERT_CANDIDATES, BERT_S)
    (row,) = (r for r in rows if r.context == ALONE)
    return row


def test_an_untrained_encoder_reads_like_the_null_whatever_else_it_prefers() -> None:
    neutral, greedy = (_alone(ranker(_bert(bias), BERT_CANDIDATES)) for bias in (0.0, 50.0))
    assert not neutral.remembers
    # About 1 bit; five standard deviations for 48 canaries are less than half a bit.
    expected = null_exposure(len(BERT_CANDIDATES), 48).expected
    assert neutral.exposure == pytest.approx(expected, abs=0.5)
    assert greedy == neutral  # other tokens have no effect


def test_ranks_among_all_pieces_are_refused_where_they_pass_the_candidates() -> None:
    with pytest.raises(ValueError, match="not within 1 … 100"):
        _alone(ranker(_bert(50.0)))
