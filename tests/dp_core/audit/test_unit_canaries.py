import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from dp_core.audit.canaries import UNIT_TOKENS, Coins, coin_seed, throw_coins, unit_canary_rows
from dp_core.audit.engine_audit import audited_plan
from dp_core.audit.lower_bounds import TRADE_OFF, GuessOutcome, trade_off_refuted
from dp_core.audit.observations import canary_scores
from dp_core.audit.one_run import (
    SIGNIFICANCE,
    AuditVerdict,
    Claim,
    Guesses,
    Scores,
    audit_claim,
    bound_finding,
    most_right,
    planned_guesses,
)
from dp_core.audit.protocol import Audit
from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore, TokenStoreWriter, joined
from dp_core.data.tokens import SPECIAL_TOKENS
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.parameters import Model, fresh
from dp_core.nn import Layers
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import PrivateUpdates, train
from dp_core.training.objectives import objective_for

WORDS, LENGTH, CANARIES, PRIVATE = 200, 8, 128, 32
SIZE = len(SPECIAL_TOKENS) + WORDS
SEED = PrivacySeed.fixed("a release")
BOUND = Audit("bound", "A bound", "ε")


def tokenizer(words: int = WORDS) -> Any:
    tokens = (*SPECIAL_TOKENS, *(f"w{i}" for i in range(words)))
    return cast(Any, SimpleNamespace(get_vocab=lambda: {t: i for i, t in enumerate(tokens)}))


def rows_in(folder: Path, rows: list[list[int]], key: bytes = b"") -> TokenStore:
    writer = TokenStoreWriter(folder, LENGTH, SIZE, key=key)
    for number, row in enumerate(rows):
        writer.add_unit(str(number), [row])
    return writer.finish()


@cache
def claim_of(epsilon: float) -> Claim:
    return Claim(epsilon, 1e-6, PrivacyProfile.of_claim(epsilon, 1e-6))


def verdict_of(right: int, guesses: int, epsilon: float, canaries: int = 400) -> AuditVerdict:
    coins = np.zeros(canaries, np.bool_)
    coins[:right] = True
    scores = -np.arange(canaries, dtype=np.float64)
    return audit_claim(claim_of(epsilon), [scores], coins, Guesses(guesses, 0), SEED)


# --- rows


def test_public_coins_draw_distinct_canaries_that_use_all_tokens_alike():
    rows = unit_canary_rows(tokenizer(), 500, 1)
    assert len({tuple(row) for row in rows}) == len(rows) == 500
    assert all(row[0] == 2 and row[-1] == 3 and len(row) == UNIT_TOKENS + 2 for row in rows)
    used = np.bincount(np.array(rows)[:, 1:-1].ravel(), minlength=SIZE)
    assert not used[: len(SPECIAL_TOKENS)].any()
    assert set(used[len(SPECIAL_TOKENS) :]) <= {4, 5, 6}
    once, again, other = (unit_canary_rows(tokenizer(), 50, seed) for seed in (1, 1, 2))
    assert once == again != other
    with pytest.raises(BadInput, match="too small for 100 canaries"):
        unit_canary_rows(tokenizer(10), 100, 1)


# --- coins


def test_coins_follow_from_the_release_and_give_nothing_of_it_away():
    coins, again, other = (
        coin_seed(seed) for seed in (SEED, SEED, PrivacySeed.fixed("another release"))
    )
    assert (throw_coins(coins, 500) == throw_coins(again, 500)).all()
    assert (throw_coins(coins, 500) != throw_coins(other, 500)).any()
    assert coins.salted_hash() == again.salted_hash() != other.salted_hash()
    assert coins.salted_hash() != SEED.salted_hash()
    assert coins.derive("sampling") != SEED.derive("sampling")
    assert coins.known  # the seed is known
    assert not coin_seed(PrivacySeed.draw()).known


# --- guesses


def test_guesses_are_twice_what_would_refute_the_claim():
    for canaries, epsilon in ((200, 0.5), (200, 1.0), (1000, 2.0)):
        guesses = planned_guesses(canaries, epsilon).inside
        half = GuessOutcome(100_000, guesses // 2, guesses // 2)
        one_less = GuessOutcome(100_000, guesses // 2 - 1, guesses // 2 - 1)
        pure = PrivacyProfile.of_claim(epsilon, 0.0)
        assert trade_off_refuted(half, pure, SIGNIFICANCE)
        assert not trade_off_refuted(one_less, pure, SIGNIFICANCE)
    assert planned_guesses(1000, 9.0) == Guesses(250, 0)
    assert planned_guesses(100_000, 0.5) == Guesses(4000, 0)
    assert planned_guesses(1, 1.0) == Guesses(1, 0)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
def test_ceiling_is_the_bound_of_the_most_right_guesses_that_do_not_contradict(epsilon):
    claim = claim_of(epsilon)
    refuted = [
        trade_off_refuted(GuessOutcome(400, 100, v), claim.trade_off, SIGNIFICANCE)
        for v in range(101)
    ]
    most = max(v for v in range(101) if not refuted[v])
    assert most_right(claim, 400, 100, SIGNIFICANCE) == most
    record = bound_finding(BOUND, verdict_of(50, 100, epsilon), Label.DP)
    bound = TRADE_OFF.epsilon(GuessOutcome(400, 100, most), claim.delta, 1 - SIGNIFICANCE)
    assert record.ceiling == bound
    could = f"more than {most} right contradict" if most < 100 else "even if all are right"
    assert could in record.power


# --- scores


CLAIM = 0.5
PLAN = audited_plan(PRIVATE + CANARIES, CLAIM, 1e-5, sampling_rate=0.5, steps=40)


@cache
def audited(config: Any, noise: float, everybody: bool = False) -> tuple[Scores, Coins]:
    """Train with this multiple of the plan's noise; return scores and coins.

    With `everybody`, every canary is included regardless of the coins.
    """
    coins = throw_coins(coin_seed(SEED), CANARIES)
    rng = np.random.default_rng(0)
    random = [[2, *rng.integers(5, SIZE, LENGTH - 2).tolist(), 3] for _ in range(PRIVATE)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        canaries = rows_in(folder / "all", unit_canary_rows(tokenizer(), CANARIES, 1))
        included = np.flatnonzero(coins | everybody).tolist()
        store = joined(folder / "rows", rows_in(folder / "private", random), canaries, included)
        shape = config.of_size(vocab_size=SIZE, hidden=64, layers=1, max_positions=LENGTH)
        start = fresh(shape, 1)
        executed = replace(PLAN, noise_multiplier=noise * PLAN.noise_multiplier)
        out = train(
            start,
            objective_for(shape),
            store=store,
            updates=PrivateUpdates(executed, SEED, b"test"),
            config=TrainingConfig(learning_rate=0.01, noise_floor=0.0),
            seed=1,
            checkpoints=LocalFolder(folder / "checkpoints"),
            device="cpu",
            progress=lambda _: None,
        )
        return canary_scores(start, out, canaries), coins


def word(scores: Scores, coins: Coins) -> str:
    claim, guesses = Claim.of_event(PLAN.event(), PLAN.delta), planned_guesses(CANARIES, CLAIM)
    verdict = audit_claim(claim, [scores], coins, guesses, coin_seed(SEED))
    return bound_finding(BOUND, verdict, Label.DP).verdict


@pytest.mark.parametrize("config", [BertConfig, Gpt2Config])
def test_an_engine_that_forgets_its_noise_is_contradicted(config):
    assert word(*audited(config, 1e-3)) == "contradicted"


def test_a_kept_claim_and_a_training_that_ignores_the_coins_are_not_contradicted():
    assert word(*audited(Gpt2Config, 1.0)) == "consistent"
    assert word(*audited(Gpt2Config, 1e-3, everybody=True)) == "consistent"
    scores, _ = audited(Gpt2Config, 1e-3)
    assert word(scores, throw_coins(coin_seed(SEED), CANARIES, 7)) == "consistent"


def test_a_masked_models_score_is_of_each_token_hidden_alone(tmp_path):
    shape = BertConfig.of_size(vocab_size=SIZE, hidden=64, layers=1, max_positions=LENGTH)
    canaries = rows_in(tmp_path, unit_canary_rows(tokenizer(), 5, 1))
    start, other = fresh(shape, 1), fresh(shape, 2)
    other = Model(shape, {name: 5 * a for name, a in other.parameters.items()})

    def summed(model: Model[BertConfig], number: int) -> float:
        layers, total = Layers({n: tf.constant(a) for n, a in model.parameters.items()}), 0.0
        for place in (1, 2):
            ids = canaries.tokens[[number]].astype(np.int32)
            label = ids[:, place : place + 1].copy()
            ids[:, place] = 4
            where, lengths = np.array([[place]], np.int32), canaries.lengths[[number]]
            arrays = (ids, lengths, where, label, np.ones((1, 1), np.float32))
            losses = objective_for(shape).row_losses(layers, shape, *map(tf.constant, arrays))
            total += float(losses.numpy()[0])
        return total

    score = canary_scores(start, other, canaries)
    assert np.abs(score).min() > 0.01
    assert score == pytest.approx([summed(start, n) - summed(other, n) for n in range(5)], abs=1e-3)
    broken = Model(shape, {n: a * np.float32("nan") for n, a in start.parameters.items()})
    with pytest.raises(BadInput, match="not finite"):
        canary_scores(start, broken, canaries)


# --- the record


BORDER = 1.2341657  # 90 of 100 guesses on 1,000 canaries have a p-value just below 0.001


@pytest.mark.parametrize("right", [*range(40, 101, 6), 90])
def test_a_record_contradicts_where_the_verdict_does_and_nowhere_else(right):
    verdict = verdict_of(right, 100, BORDER, 1000)
    record = bound_finding(BOUND, verdict, Label.DP)
    contradicted = record.verdict == "contradicted"
    assert contradicted == (verdict.p_value <= SIGNIFICANCE) == (right > verdict.allowed)
    assert record.verdict in ("contradicted", "consistent")
    low, high = record.interval
    assert low <= record.value <= high
    assert record.ceiling <= BORDER
    assert (low > record.ceiling) == contradicted
    assert record.label == Label.DP


def test_an_audit_that_could_not_contradict_says_so():
    record = bound_finding(BOUND, verdict_of(20, 20, 6.0), Label.DP)
    assert record.verdict == "inconclusive"
    assert "could contradict no such claim" in record.finding
    assert "even if all are right" in record.power
