"""Tests of exposure on a decoder, which shows memory of secrets with tokens before them."""

from __future__ import annotations

import numpy as np
import pytest
from learned_by_heart import by_heart

from dp_core.audit.canaries import Canary, plant
from dp_core.audit.exposure import ALONE, EMBEDDED, ExposureRow, measure
from dp_core.audit.ranking import ranker
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.data.tokens import SpecialIds
from dp_core.models.config import Gpt2Config
from dp_core.models.parameters import AnyModel, fresh

PIECES, S, UNITS = 125, 12, 40
CANDIDATES = list(range(5, PIECES))
SHAPE = Gpt2Config(
    vocab_size=PIECES, hidden=32, layers=1, heads=2, intermediate=64, max_positions=S
)


def _canaries(pattern: str, rate: float, count: int, seed: int) -> list[Canary]:
    coins = np.random.default_rng(seed)
    return [
        Canary(
            f"{pattern}-{rate}-{i}",
            pattern,
            rate,
            tuple(coins.choice(CANDIDATES, len(pattern), replace=False).tolist()),
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
        writer.add_unit(f"unit {unit}", plant(rows, PLANTED, f"unit {unit}", 0, S))
    return writer.finish()


@pytest.fixture(scope="module")
def trained(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> AnyModel:
    folder = tmp_path_factory.mktemp("checkpoints")
    return by_heart(SHAPE, store, folder, updates=300, rows=40)


def _exposures(model: AnyModel) -> dict[tuple[str, str], ExposureRow]:
    rows = measure(
        ranker(model, CANDIDATES),
        PLANTED,
        REFERENCES,
        special=SpecialIds(),
        candidates=CANDIDATES,
        declared_units=UNITS,
        sequence_length=S,
        repeats=4,
        seed=3,
    )
    return {(row.pattern, row.context): row for row in rows}


def test_a_decoder_that_learned_the_canaries_ranks_their_secrets_first(trained: AnyModel) -> None:
    found = _exposures(trained)
    for context in (ALONE, EMBEDDED):
        row = found["HS", context]
        assert row.remembers
        assert row.exposure > np.log2(len(CANDIDATES)) - 2.5
        assert row.p_value < 1e-4


def test_a_secret_with_nothing_before_it_is_not_found(trained: AnyModel) -> None:
    """A causal model's memory of it would show in later tokens, which are not predicted."""
    row = _exposures(trained)["SH", EMBEDDED]
    assert not row.remembers
    assert row.exposure < row.null_high


def test_an_untrained_decoder_reads_like_the_null() -> None:
    for row in _exposures(fresh(SHAPE, 5)).values():
        assert not row.remembers
