import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from dp_core.audit.canaries import Canary, plant
from dp_core.audit.exposure import ALONE, EMBEDDED, CanaryData, ExposureRow, measure
from dp_core.audit.extraction import (
    ALL,
    GREEDY,
    SAMPLING,
    TOP_K,
    ExtractionRow,
    Odds,
    compare,
    discoverable,
    draw_prompts,
    targeted,
)
from dp_core.audit.membership import clopper_pearson
from dp_core.audit.observations import ranker, suffix_odds
from dp_core.config.audit_settings import ExtractionConfig
from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.causal import causal_logits
from dp_core.models.config import FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.parameters import AnyModel, fresh
from dp_core.nn import Layers
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import OrdinaryUpdates, train
from dp_core.training.objectives import objective_for

V, S, CLS, SEP = 60, 16, 2, 3
POOL = list(range(5, V))
SHAPE = Gpt2Config(vocab_size=V, hidden=64, layers=1, heads=2, intermediate=128, max_positions=S)
SMALL = Gpt2Config(vocab_size=9, hidden=16, layers=2, heads=2, intermediate=32, max_positions=8)
FEED_FORWARD = FeedForwardConfig(vocab_size=9, hidden=16, window=3, units=(12,), max_positions=8)
LLAMA = LlamaConfig(
    vocab_size=9, hidden=16, layers=1, heads=2, key_heads=2, intermediate=32, max_positions=8
)
CONFIG = ExtractionConfig(
    extraction_rows=30, extraction_prefix=5, extraction_suffix=6, extraction_top_k=5,
    extraction_tries=50,
)  # fmt: skip
KEY = b"public"


def _canary(name: str, rate: float, *tokens: int, pattern: str = "HS") -> Canary:
    return Canary(name, pattern, rate, tokens)


# --- odds of suffixes


def _next_logits(model: AnyModel, ids: Sequence[int]) -> np.ndarray:
    layers = Layers(model.parameters)
    return causal_logits(layers, model.config, tf.constant([list(ids)], tf.int32)).numpy()[-1]


def _greedy(model: AnyModel, prefix: Sequence[int], length: int) -> list[int]:
    """Generate text greedily: one token after another, with a forward pass for each."""
    ids = list(prefix)
    for _ in range(length):
        ids.append(int(np.argmax(_next_logits(model, ids))))
    return ids[len(prefix) :]


@pytest.mark.parametrize("shape", [SMALL, LLAMA, FEED_FORWARD])
def test_greedy_decoding_extracts_exactly_the_generated_suffixes(shape):
    model, coins, length = fresh(shape, 3), np.random.default_rng(0), 3
    rows = []
    for number in range(24):
        prefix = [2, *coins.integers(0, 9, 3).tolist()]
        suffix = _greedy(model, prefix, length)
        if number % 2:  # change one token: the first, the second, or the last
            place = number // 2 % length
            suffix[place] = (suffix[place] + 1) % 9
        rows.append([*prefix, *suffix])
    odds = suffix_odds(model)(np.array(rows, np.int32), length, 4, None)
    assert odds.first.tolist() == [number % 2 == 0 for number in range(24)]


def test_predictions_within_the_prefix_do_not_affect_the_odds():
    model = fresh(SMALL, 3)
    prefix = [2, 4, 5, 6]
    row = [*prefix, *_greedy(model, prefix, 3)]
    assert _next_logits(model, prefix[:-1]).argmax() != prefix[-1]  # not the greedy prefix
    assert suffix_odds(model)(np.array([row], np.int32), 3, 4, None).first.all()
    assert not suffix_odds(model)(np.array([row], np.int32), 4, 4, None).first.any()


def test_chance_of_a_suffix_equals_the_probability_under_top_k_sampling():
    model, k, prefix = fresh(SMALL, 5), 4, [2, 7, 7]
    suffixes = list(itertools.product(range(9), repeat=2))
    rows = np.array([[*prefix, *suffix] for suffix in suffixes], np.int32)
    odds = suffix_odds(model)(rows, 2, k, None)

    def drawn(ids: list[int]) -> np.ndarray:
        logits = _next_logits(model, ids).astype(np.float64)
        chances = np.where(logits >= np.sort(logits)[-k], np.exp(logits), 0.0)
        return chances / chances.sum()

    first = drawn(prefix)
    second = [drawn([*prefix, token]) for token in range(9)]
    expected = [first[one] * second[one][two] for one, two in suffixes]
    np.testing.assert_allclose(odds.chance, expected, rtol=1e-5, atol=1e-12)
    assert odds.chance.sum() == pytest.approx(1.0)
    assert (odds.chance > 0).sum() == odds.within.sum() == k**2
    best = int(np.argmax(odds.first))
    assert odds.first.sum() == 1 and list(suffixes[best]) == _greedy(model, prefix, 2)


def test_only_allowed_tokens_are_drawn():
    model, among = fresh(SMALL, 5), [4, 6, 8]
    rows = np.array([[2, 7, token] for token in range(9)], np.int32)
    odds = suffix_odds(model)(rows, 1, 5, among)
    assert np.flatnonzero(odds.within).tolist() == among
    assert odds.chance.sum() == pytest.approx(1.0)
    logits = _next_logits(model, [2, 7])
    assert np.flatnonzero(odds.first).tolist() == [max(among, key=lambda token: logits[token])]


def test_a_suffix_counts_as_sampled_where_its_tries_give_it_as_often_as_not():
    chances = np.array([0.0, 1e-30, 0.00690, 0.00695, 0.5, 1.0])
    none = np.zeros(6, np.bool_)
    extracted = Odds(none, none, chances).extracted(100)[SAMPLING]
    assert (
        extracted.tolist() == (1 - (1 - chances) ** 100 >= 0.5).tolist() == [False] * 3 + [True] * 3
    )
    assert Odds(none, none, chances).extracted(1)[SAMPLING].tolist() == [False] * 4 + [True] * 2


def test_a_model_with_predictions_that_are_not_finite_is_refused():
    model = fresh(SMALL, 5)
    model.parameters["final_norm/gain"][0] = np.nan
    with pytest.raises(BadInput, match="not finite"):
        suffix_odds(model)(np.array([[2, 7, 8]], np.int32), 1, 2, None)


# --- choice of rows


def _store(folder: Path, units: Sequence[Sequence[Sequence[int]]]) -> TokenStore:
    writer = TokenStoreWriter(folder, S, V)
    for number, rows in enumerate(units):
        writer.add_unit(f"unit {number}", [[CLS, *row, SEP] for row in rows])
    return writer.finish()


def test_a_unit_has_one_row_at_most_that_is_long_enough_and_holds_no_canary(tmp_path):
    # Every row of the even units is one token too short, or holds a canary.
    long, short, carrier = [6] * 11, [7] * 10, [8, 8, 20, 21, 8, 8, 8, 8, 8, 8, 8, 8]
    units = [[long] * 3 if unit % 2 else [short, carrier] for unit in range(40)]
    store = _store(tmp_path, units)
    drawn = draw_prompts(store, CONFIG, [_canary("HS", 0.1, 20, 21)], KEY)
    assert drawn.tolist() == [[CLS, *long]] * 20
    few = CONFIG.model_copy(update={"extraction_rows": 7})
    assert len(draw_prompts(store, few, [], KEY)) == 7
    assert len(draw_prompts(store, CONFIG, [], KEY)) == 30
    none = CONFIG.model_copy(update={"extraction_suffix": 9})
    assert draw_prompts(store, none, [], KEY).shape == (0, 15)


def test_public_coins_choose_units_and_rows(tmp_path):
    units = [[[5 + unit, 5 + row, *[9] * 9] for row in range(4)] for unit in range(50)]
    store = _store(tmp_path, units)
    once, again, other = (draw_prompts(store, CONFIG, [], key) for key in (KEY, KEY, b"other"))
    assert once.tolist() == again.tolist() != other.tolist()
    assert len(set(once[:, 1].tolist())) == 30  # one row per unit
    assert len(set(once[:, 2].tolist())) == 4  # not always the first row


# --- counts


def test_intervals_and_chance_are_scipys():
    row = compare(GREEDY, ALL, np.arange(20) < 7, np.arange(50) < 4)
    assert (row.share, row.control_share) == (clopper_pearson(0.35, 20), clopper_pearson(0.08, 50))
    table = [[7, 13], [4, 46]]
    assert row.p_value == pytest.approx(stats.fisher_exact(table, alternative="greater").pvalue)
    assert (row.tried, row.found, row.control_tried, row.control_found) == (20, 7, 50, 4)
    assert row.above_chance
    assert not compare(GREEDY, ALL, np.zeros(20, bool), np.zeros(50, bool)).above_chance
    assert row.null_band[1] < row.share.value


def test_the_null_band_is_passed_no_more_often_than_it_says():
    coins = np.random.default_rng(0)
    rows = [
        compare(GREEDY, ALL, coins.random(40) < 0.2, coins.random(60) < 0.2) for _ in range(999)
    ]
    assert sum(row.share.value > row.null_band[1] for row in rows) < 25
    assert sum(row.above_chance for row in rows) < 25


# --- whole audits


@pytest.fixture(scope="module")
def planted() -> list[Canary]:
    coins = np.random.default_rng(5)
    drawn = [coins.choice(POOL, 3, replace=False).tolist() for _ in range(45)]
    rates = [0.2] * 5 + [0.0] * 40
    return [
        _canary(f"{number}", rate, *tokens, pattern="HSH")
        for number, (rate, tokens) in enumerate(zip(rates, drawn, strict=True))
    ]


@pytest.fixture(scope="module")
def sides(tmp_path_factory, planted) -> tuple[TokenStore, TokenStore]:
    """Write unpredictable rows: 80 units of the training, with canaries, and 80 held-out units."""
    coins = np.random.default_rng(0)
    stores = []
    for name in ("train", "held out"):
        writer = TokenStoreWriter(tmp_path_factory.mktemp(name), S, V)
        for unit in range(80):
            rows = [[CLS, *coins.choice(POOL, 11).tolist(), SEP]]
            if name == "train":
                rows = plant(f"unit {unit}", rows, planted, 0, S)
            writer.add_unit(f"{name} {unit}", rows)
        stores.append(writer.finish())
    return stores[0], stores[1]


@pytest.fixture(scope="module")
def learned(sides, tmp_path_factory) -> AnyModel:
    return train(
        fresh(SHAPE, 1),
        objective_for(SHAPE),
        store=sides[0],
        updates=OrdinaryUpdates(updates=400, batch_rows=80, seed=1),
        config=TrainingConfig(learning_rate=0.01, micro_rows=80),
        seed=1,
        checkpoints=LocalFolder(tmp_path_factory.mktemp("checkpoints")),
    )


def _discoverable(
    model: AnyModel,
    sides: tuple[TokenStore, TokenStore],
    planted: list[Canary],
    claim: PrivacyProfile | None = None,
) -> dict[str, ExtractionRow]:
    rows = discoverable(suffix_odds(model), sides, CONFIG, planted, KEY, claim)
    return {row.decoding: row for row in rows}


def _targeted(model: AnyModel, planted: list[Canary]) -> dict[tuple[str, str], ExtractionRow]:
    rows = targeted(suffix_odds(model), planted, begin=CLS, candidates=POOL, config=CONFIG)
    return {(row.group, row.decoding): row for row in rows}


def test_rows_learned_by_heart_come_out_and_rows_held_out_do_not(learned, sides, planted):
    for row in _discoverable(learned, sides, planted).values():
        assert row.share.value > 0.9 and row.above_chance
        assert row.control_share.value == 0 and row.control_tried == 30 > row.tried >= 20
        assert row.ceiling is None


def test_a_model_without_memory_extracts_no_more_than_the_control(sides, planted):
    for row in _discoverable(fresh(SHAPE, 5), sides, planted).values():
        assert row.found == row.control_found == 0 and not row.above_chance
    for row in _targeted(fresh(SHAPE, 5), planted).values():
        assert not row.above_chance


def test_the_claim_bounds_rows_by_those_held_out(learned, sides, planted):
    claim = PrivacyProfile.of_claim(1.0, 1e-6)
    row = _discoverable(learned, sides, planted, claim)[GREEDY]
    assert row.ceiling == pytest.approx(np.e * row.control_share.high + 1e-6)
    assert row.share.low > row.ceiling  # no such claim holds for this model
    long = CONFIG.model_copy(update={"extraction_suffix": 9})
    assert discoverable(suffix_odds(learned), sides, long, planted, KEY, claim) == ()


def test_planted_secrets_are_guessed_and_others_are_not(learned, planted):
    rows = _targeted(learned, planted)
    assert {group for group, _ in rows} == {ALL, "p = 0.2"}
    for decoding in (GREEDY, TOP_K, SAMPLING):
        row = rows[ALL, decoding]
        assert (row.tried, row.control_tried) == (5, 40)
        assert row.above_chance
    assert rows[ALL, TOP_K].found >= 4
    assert rows[ALL, GREEDY].found <= rows[ALL, TOP_K].found
    # Chance guesses 5 of 55 tokens of canaries that were never planted.
    assert rows[ALL, TOP_K].control_share.low < 5 / len(POOL) < rows[ALL, TOP_K].control_share.high


def test_a_secret_with_nothing_before_it_is_not_tried():
    model, drawn = fresh(SHAPE, 5), []
    for pattern in ("SH", "HS"):
        for rate in (0.1, 0.2, 0.0):
            drawn.append(_canary(f"{pattern} {rate}", rate, 9, 10, pattern=pattern))
    rows = targeted(suffix_odds(model), drawn, begin=CLS, candidates=POOL, config=CONFIG)
    tried = {row.group: (row.tried, row.control_tried) for row in rows}
    assert tried == {ALL: (2, 1), "p = 0.1": (1, 1), "p = 0.2": (1, 1)}
    only = [canary for canary in drawn if canary.pattern == "SH"]
    assert targeted(suffix_odds(model), only, begin=CLS, candidates=POOL, config=CONFIG) == ()


def _exposures(model: AnyModel, canaries: list[Canary]) -> dict[tuple[str, str], ExposureRow]:
    data = CanaryData(
        rank=ranker(model, POOL),
        canaries=canaries,
        special=SpecialIds(),
        candidates=POOL,
        sequence_length=S,
        train=cast(Any, None),  # only the exposure in rows reads it
        declared_units=80,
        label=Label.DP,
        seed=3,
    )
    return {(row.pattern, row.context): row for row in measure(data)}


def test_a_decoder_remembers_exactly_the_secrets_that_have_hints_before_them(learned, planted):
    """A causal model's memory of a first token would show in later tokens, not predicted here."""
    without_hint = [replace(canary, pattern="SHH") for canary in planted]
    exposures = _exposures(learned, [*planted, *without_hint])
    for context in (ALONE, EMBEDDED):
        row = exposures["HSH", context]
        assert row.remembers and row.exposure > np.log2(len(POOL)) - 2.5
        assert row.p_value < 1e-4
    row = exposures["SHH", EMBEDDED]
    assert not row.remembers and row.exposure < row.null_high
    for row in _exposures(fresh(SHAPE, 5), [*planted, *without_hint]).values():
        assert not row.remembers
