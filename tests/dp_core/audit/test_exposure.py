import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dp_core.audit.canaries import (
    Canary,
    Floats,
    MaskedContexts,
    Ranker,
    alone,
    counted_occurrences,
    embedded,
)
from dp_core.audit.exposure import (
    ALARM_RATE,
    ALONE,
    CLEAR_RATE,
    EMBEDDED,
    EXPOSURE,
    IN_ROWS,
    CanaryData,
    ExposureRow,
    exposure_finding,
    in_rows,
    interval,
    measure,
    measure_in_rows,
    null_exposure,
    null_rank_exposure,
    rows_from_ranks,
    summarise,
)
from dp_core.audit.observations import ranker
from dp_core.data.token_store import TokenStoreWriter
from dp_core.data.tokens import SpecialIds
from dp_core.labels import Label
from dp_core.models.config import BertConfig
from dp_core.models.parameters import MLM_BIAS, fresh

V, UNITS, S = 1000, 4000, 16
CANDIDATES = range(5, 5 + V)


def _draw(
    count: int, rate: float, seed: int, pattern: str = "HSH", pool: Sequence[int] = CANDIDATES
) -> list[Canary]:
    coins = np.random.default_rng(seed)
    drawn = [coins.choice(pool, len(pattern)).tolist() for _ in range(count)]
    return [Canary(f"{rate}-{i}", pattern, rate, tuple(drawn[i])) for i in range(count)]


def _model(memory: dict[int, int], seed: int) -> Ranker:
    """Return a model whose ranks are a fixed random permutation for each token left of the mask.

    Secrets in `memory` have the rank that it gives.
    """
    coins = np.random.default_rng(seed)
    permutations = coins.permuted(np.tile(np.arange(1, V + 1), (V + 5, 1)), axis=1)

    def rank(shown: MaskedContexts) -> Floats:
        rows = np.arange(shown.positions.size)
        assert (shown.input_ids[rows, shown.positions] == 4).all()
        assert (shown.lengths <= S).all()
        left = shown.input_ids[rows, shown.positions - 1]
        ranks = permutations[left, shown.secrets - 5].astype(float)
        for secret, known in memory.items():
            ranks[shown.secrets == secret] = known
        return ranks

    return rank


def _data(
    rank: Ranker, canaries: list[Canary], store: Any = None, candidates: Sequence[int] = CANDIDATES
) -> CanaryData:
    return CanaryData(
        rank=rank,
        canaries=canaries,
        special=SpecialIds(),
        candidates=candidates,
        sequence_length=S,
        train=store,
        declared_units=UNITS,
        label=Label.DP,
        seed=0,
    )


def _rows(
    planted: list[Canary],
    ranks: Any,
    references: Sequence[Canary] = (),
    reference_ranks: Any = None,
    context: str = ALONE,
) -> list[ExposureRow]:
    ranks = np.asarray(ranks, np.float64)
    others = np.zeros((0, ranks.shape[1])) if reference_ranks is None else reference_ranks
    return rows_from_ranks(
        planted, ranks, references, others, context=context, candidates=V, declared_units=UNITS
    )


def test_exposure_is_the_papers_formula():
    planted = _draw(4, 0.01, 1)
    ranks = np.array([[2.0, 4.0], [1.0, 1.0], [8.0, 2.0], [7.0, 3.0]])
    (row,) = _rows(planted, ranks)
    assert row.exposure == pytest.approx(math.log2(V) - math.log2(ranks.mean()))
    assert row.expected_occurrences == pytest.approx(40)
    assert (row.canaries, row.contexts_per_canary, row.references) == (4, 2, 0)
    assert row.rank_exposure_null == 0.0
    (once,), (often,) = _rows(planted, ranks[:, :1]), _rows(planted, np.repeat(ranks[:, :1], 50, 1))
    assert (often.low, often.high) == (once.low, once.high)  # contexts do not count as canaries


def test_a_memorising_model_is_caught_and_an_ignorant_one_is_not():
    common, rare, references = _draw(4, 0.1, 1), _draw(4, 0.001, 2), _draw(32, 0.0, 3)
    memory = {canary.secret: 1 for canary in common}
    rows = measure(_data(_model(memory, 9), [*rare, *common, *references]))
    assert [(row.context, row.canary_rate) for row in rows] == [
        (ALONE, 0.001),
        (ALONE, 0.1),
        (EMBEDDED, 0.001),
        (EMBEDDED, 0.1),
    ]
    for row in rows:
        assert row.remembers == (row.canary_rate == 0.1)
        assert row.low <= row.exposure <= row.high
    learned = rows[-1]
    assert learned.exposure == pytest.approx(math.log2(V))
    assert learned.high == pytest.approx(math.log2(V))
    assert learned.low < learned.exposure - 1  # the interval of four equal ranks is not empty
    assert learned.p_value < 1e-9
    assert learned.rank_exposure == pytest.approx(learned.rank_exposure_ceiling)
    assert learned.rank_exposure_ceiling == pytest.approx(math.log2(33))
    summary = summarise(rows)
    assert summary.remembers
    assert summary.largest == learned
    assert summary.largest_null_high > rows[-1].null_high  # maximum of two groups


def test_models_without_memory_are_hardly_ever_accused():
    """15 of 3,000 are expected."""
    accused, above_band, trials = 0, 0, 3000
    coins = np.random.default_rng(5)
    planted = _draw(4, 0.1, 1)
    for _ in range(trials):
        (row,) = _rows(planted, coins.integers(1, V + 1, (4, 1)))
        accused += row.remembers
        above_band += row.exposure > row.null_high
    assert accused == pytest.approx(CLEAR_RATE * trials, abs=19)  # five standard deviations
    assert 0.015 < above_band / trials < 0.035


@pytest.mark.statistical
def test_mean_and_largest_exposure_together_alarm_at_the_stated_rate():
    """0.025 of models without memory, and 0.05 if each figure alone had this rate."""
    coins, trials = np.random.default_rng(6), 2000
    planted = [canary for n in range(4) for canary in _draw(4, (n + 1) / 100, n)]
    ranks = coins.integers(1, V + 1, (trials, len(planted), 1))
    alarms = sum(summarise(_rows(planted, of_model), ALONE).above_chance for of_model in ranks)
    assert alarms == pytest.approx(ALARM_RATE * trials, abs=35)  # five standard deviations


def test_groups_of_different_sizes_are_compared_by_their_p_values():
    """A single canary has the largest exposure by chance; the other group is remembered."""
    planted = [*_draw(1, 0.1, 1), *_draw(4, 0.2, 2)]
    rows = _rows(planted, [[3.0], *[[10.0]] * 4], context=EMBEDDED)
    assert [row.remembers for row in rows] == [False, True]  # the first: 2·3/1,000
    summary = summarise(rows)
    assert summary.largest == rows[1]
    assert summary.largest_p_value == pytest.approx(2 * rows[1].p_value, rel=1e-6)
    finding = exposure_finding(EXPOSURE, rows, EMBEDDED, Label.DP)
    assert finding.verdict == "inconclusive" and "remembers canaries" in finding.finding


def test_first_ranks_are_memory_and_more_models_need_more_exposure():
    assert all(_rows(_draw(n, 0.1, 1), np.ones((n, 1)))[0].remembers for n in (1, 2, 4))
    rows = _rows(_draw(4, 0.1, 1), [[55.0]] * 4, context=EMBEDDED)
    one, many = summarise(rows), summarise(rows, models=100)
    assert one.remembers and not many.remembers and one.mean == many.mean
    assert many.largest_p_value == pytest.approx(100 * one.largest_p_value, rel=0.1)
    assert (
        many.mean_null_high > one.mean_null_high and many.largest_null_high > one.largest_null_high
    )


@pytest.mark.statistical
@pytest.mark.cases
def test_the_interval_covers_as_often_as_it_says(kind, canaries, least, most):
    draw, size = np.random.default_rng(canaries), (2000, canaries)
    ranks, truth = draw.integers(1, V + 1, size).astype(float), (V + 1) / 2  # without memory
    if kind == "half bit":
        ranks = 2.0 ** draw.normal(5, 0.5, size)
        truth = 2.0**5 * math.exp((0.5 * math.log(2)) ** 2 / 2)
    elif kind == "rare failure":  # nine in ten remembered, one forgotten
        ranks = np.where(draw.random(size) < 0.9, 1.0, ranks)
        truth = 0.9 + 0.1 * truth
    exposure, intervals = math.log2(V) - math.log2(truth), [interval(r, V) for r in ranks]
    assert least <= np.mean([low <= exposure <= high for _, low, high in intervals]) <= most


def test_an_interval_from_one_canary_bounds_nothing_and_from_more_shrinks():
    assert interval(np.array([1.0]), V) == (pytest.approx(math.log2(V)), 0.0, math.log2(V))
    widths = []
    for canaries in (2, 4, 8, 32):
        _, low, high = interval(np.tile([20.0, 40.0], canaries // 2), V)
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[1] > 2  # bits, with four canaries
    agreeing = interval(np.full(4, 30.0), V)
    assert agreeing[2] - agreeing[1] > 2  # plain t interval and bootstrap: width 0


def test_rank_exposure_is_a_place_among_references_with_ties_shared():
    planted = _draw(1, 0.1, 1)
    references = _draw(7, 0.0, 2)
    others = np.array([[5.0], [10.0], [10.0], [40.0], [50.0], [60.0], [70.0]])
    (row,) = _rows(planted, [[10.0]], references, others)
    assert row.rank_exposure == pytest.approx(math.log2(8) - math.log2(1 + 1 + 2 / 2))
    assert row.rank_exposure_ceiling == 3.0
    elsewhere = [dataclasses.replace(r, pattern="HS") for r in references]
    (row,) = _rows(planted, [[10.0]], elsewhere, others)
    assert (row.references, row.rank_exposure) == (0, 0.0)  # other patterns do not count


def test_the_mean_is_over_canaries_not_groups():
    few, many = _draw(1, 0.1, 1), _draw(3, 0.2, 2)
    rows = _rows([*few, *many], [[400.0], [1.0], [1.0], [2.0]], context=EMBEDDED)
    summary = summarise(rows)
    assert summary.mean == pytest.approx(math.log2(V) - math.log2(404 / 4))
    with pytest.raises(ValueError, match="alone"):
        summarise(rows, ALONE)


def test_invalid_measurements_are_refused():
    planted, references = _draw(2, 0.1, 1), _draw(2, 0.0, 2)
    with pytest.raises(ValueError, match="no canaries"):
        measure(_data(_model({}, 1), references))
    stranger = Canary("", "HS", 0.1, (7, 4999))
    with pytest.raises(ValueError, match="not among the candidates"):
        _data(_model({}, 1), [stranger, *references])
    for wrong in (0.0, V + 1.0, math.nan):
        with pytest.raises(ValueError, match="not within 1"):
            measure(_data(lambda s, w=wrong: np.full(s.secrets.size, w), [*planted, *references]))


BERT_CANDIDATES = range(200, 400, 2)  # a quarter of all tokens
OTHERS = [i for i in range(400) if i not in BERT_CANDIDATES]


def _alone_in_bert(favour_others: float, ranked: Sequence[int] = BERT_CANDIDATES) -> ExposureRow:
    """Return the exposure of an untrained encoder that prefers tokens other than the candidates."""
    shape = BertConfig.of_size(vocab_size=400, hidden=64, layers=1, max_positions=S)
    model = fresh(shape, 5)
    model.parameters[MLM_BIAS][OTHERS] += favour_others
    canaries = [*_draw(48, 0.1, 1, pool=BERT_CANDIDATES), *_draw(32, 0.0, 2, pool=BERT_CANDIDATES)]
    rows = measure(_data(ranker(model, ranked), canaries, candidates=BERT_CANDIDATES))
    (row,) = (row for row in rows if row.context == ALONE)
    return row


def test_an_untrained_encoder_reads_like_the_null_whatever_else_it_prefers():
    neutral, greedy = map(_alone_in_bert, (0.0, 50.0))
    assert not neutral.remembers
    # About 1 bit; five standard deviations for 48 canaries are less than half a bit.
    expected = null_exposure(len(BERT_CANDIDATES), 48).expected
    assert neutral.exposure == pytest.approx(expected, abs=0.5)
    assert greedy == neutral  # other tokens have no effect
    with pytest.raises(ValueError, match="not within 1 … 100"):
        _alone_in_bert(50.0, range(400))


# --- contexts without private text

HSH = Canary("", "HSH", 0.1, (11, 12, 13))
HS = Canary("", "HS", 0.1, (21, 22))


def test_alone_is_the_canary_between_cls_and_sep_with_its_secret_masked():
    shown = alone([HSH, HS], SpecialIds(), 8)
    assert shown.input_ids.tolist() == [[2, 11, 4, 13, 3, 0, 0, 0], [2, 21, 4, 3, 0, 0, 0, 0]]
    assert shown.lengths.tolist() == [5, 4]
    assert shown.positions.tolist() == [2, 2]
    assert shown.secrets.tolist() == [12, 22]
    assert {a.dtype for a in (shown.input_ids, shown.positions, shown.secrets)} == {np.dtype("i4")}


def test_embedded_rows_are_full_and_hold_the_whole_canary_at_random_places():
    filler, repeats = range(100, 200), 64
    shown = embedded([HSH, HS], SpecialIds(), 12, filler=filler, repeats=repeats, seed=3)
    assert shown.lengths.tolist() == [12] * 2 * repeats
    for row, canary in enumerate([HSH] * repeats + [HS] * repeats):
        ids, position = shown.input_ids[row], int(shown.positions[row])
        assert (ids[0], ids[-1]) == (2, 3)
        assert ids[position] == 4
        assert shown.secrets[row] == canary.tokens[canary.secret_index]
        start = position - canary.secret_index
        hints = [p for i, p in enumerate(canary.tokens) if i != canary.secret_index]
        around = np.delete(ids[1:-1], np.arange(start - 1, start - 1 + len(canary.tokens)))
        tokens = np.delete(ids[start : start + len(canary.tokens)], canary.secret_index)
        assert tokens.tolist() == hints
        assert set(around.tolist()) <= set(filler)
    assert len(set(shown.positions[:repeats].tolist())) == 8  # every position of HSH in ten tokens


def test_a_canarys_contexts_do_not_depend_on_the_others_but_do_on_the_seed():
    both, single, other = (
        embedded(canaries, SpecialIds(), 12, filler=range(100, 200), repeats=4, seed=seed)
        for canaries, seed in (([HSH, HS], 3), ([HS], 3), ([HS], 4))
    )
    np.testing.assert_array_equal(both.input_ids[4:], single.input_ids)
    assert (single.input_ids != other.input_ids).any()
    for context in (alone, partial(embedded, filler=range(100, 200), repeats=1, seed=0)):
        with pytest.raises(ValueError, match="canary of 3 tokens"):
            context([HSH], SpecialIds(), 4)


# --- the null, against brute force, simulation and closed forms


def _exposures(candidates: int, canaries: int) -> list[float]:
    ranks = itertools.product(range(1, candidates + 1), repeat=canaries)
    return [math.log2(candidates) - math.log2(sum(r) / canaries) for r in ranks]


def _rank_exposures(references: int, canaries: int) -> list[float]:
    """Without memory all orders of n canaries among R references are equally likely."""
    means = []
    for places in itertools.combinations(range(references + canaries), canaries):
        ahead = [place - number for number, place in enumerate(places)]
        means.append(math.log2(references + 1) - float(np.mean(np.log2(np.array(ahead) + 1))))
    return means


@pytest.mark.parametrize(
    ("make_law", "enumerated"),
    [
        *((partial(null_exposure, v, n), _exposures(v, n)) for v, n in ((7, 1), (7, 2), (5, 4))),
        *(
            (partial(null_rank_exposure, references, n), _rank_exposures(references, n))
            for references, n in ((0, 2), (3, 1), (4, 2), (2, 4), (5, 3))
        ),
    ],
)
def test_laws_without_memory_equal_enumeration(make_law, enumerated):
    law = make_law()
    assert law.expected == pytest.approx(np.mean(enumerated), abs=1e-9)
    for value in np.unique(np.round(enumerated, 9)):
        exact = float((np.array(enumerated) >= value - 1e-6).mean())
        assert law.p_value(value) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("canaries", [1, 4, 24])
def test_the_band_holds_95_percent_of_simulated_models(canaries):
    candidates, trials = 4000, 40_000
    coins = np.random.default_rng(canaries)
    ranks = coins.integers(1, candidates + 1, (trials, canaries)).mean(axis=1)
    bits = math.log2(candidates) - np.log2(ranks)
    null = null_exposure(candidates, canaries)
    assert bits.mean() == pytest.approx(null.expected, abs=0.03)
    # Five standard errors of a share of 2.5% in 40,000 trials are 0.4 points.
    assert (bits < null.low).mean() == pytest.approx(0.025, abs=0.004)
    assert (bits > null.high).mean() == pytest.approx(0.025, abs=0.004)


def test_large_cases_equal_closed_forms_down_to_the_resolution():
    assert null_exposure(100_000, 1).expected == pytest.approx(math.log2(math.e), abs=1e-3)
    many = null_exposure(30_000, 1000)
    assert many.expected == pytest.approx(1.0, abs=2e-3)
    # Central limit: the mean of n uniforms has standard deviation 1/√(12n).
    edge = 0.5 - 1.959964 / math.sqrt(12 * 1000)
    assert many.high == pytest.approx(-math.log2(edge), abs=2e-3)
    most = math.log2(4000)
    assert null_exposure(4000, 2).p_value(most) == pytest.approx(1 / 4000**2, rel=1e-3)
    assert null_exposure(4000, 8).p_value(most) == 1e-12
    assert null_exposure(4000, 8).p_value(most + 1) == 1e-12
    assert null_exposure(4000, 8).p_value(0.0) == pytest.approx(1.0)
    exact = 1 / math.comb(36, 4)
    assert null_rank_exposure(32, 4).p_value(math.log2(33)) == pytest.approx(exact, rel=1e-6)
    with pytest.raises(ValueError, match="canaries=0"):
        null_exposure(100, 0)
    with pytest.raises(ValueError, match="references=-1"):
        null_rank_exposure(-1, 4)


@pytest.mark.parametrize("canaries", [1, 4, 64, 1000])
def test_the_rank_band_holds_95_percent_of_simulated_models(canaries):
    """All canaries are compared with the same 32 references, as in a measurement."""
    trials, coins = 4000, np.random.default_rng(canaries)
    planted, references = _draw(canaries, 0.1, 1), _draw(32, 0.0, 2)
    scores = coins.random((trials, canaries + 32))
    order = np.sort(scores[:, canaries:], axis=1)
    bits = np.empty(trials)
    for trial in range(trials):
        ahead = np.searchsorted(order[trial], scores[trial, :canaries])
        bits[trial] = math.log2(33) - np.log2(1 + ahead).mean()
    (row,) = _rows(
        planted, 1 + scores[0, :canaries, None], references, 1 + scores[0, canaries:, None]
    )
    assert row.rank_exposure == pytest.approx(bits[0])
    null, spread = null_rank_exposure(32, canaries), float(bits.std())
    band = (row.rank_exposure_null_low, row.rank_exposure_null_high)
    assert band == (null.low, null.high)
    assert bits.mean() == pytest.approx(null.expected, abs=5 * spread / trials**0.5)
    # Five standard errors. For one canary, an end of the band is one of 33 ranks, with 3%.
    allowed = 5 * (0.025 / trials) ** 0.5 + (0.02 if canaries == 1 else 0)
    assert (bits < null.low - 1e-3).mean() == pytest.approx(0.025, abs=allowed)
    assert (bits > null.high + 1e-3).mean() == pytest.approx(0.025, abs=allowed)
    values = np.quantile(bits, [0.5, 0.95, 0.999])
    for value in values:
        share = (bits >= value - 1e-9).mean()
        error = (share * (1 - share) / trials) ** 0.5
        assert null.p_value(value) == pytest.approx(share, abs=5 * error + 0.002)


# --- canaries in the rows of the training


def _planted_store(folder: Path, canaries: list[Canary], units: int = 40):
    """Write rows of S other tokens; unit i carries canary i mod their number from token 3 on."""
    coins, writer = np.random.default_rng(0), TokenStoreWriter(folder, S, V + 5)
    for unit in range(units):
        body = coins.integers(905, 905 + 100, S - 2).tolist()
        carried = canaries[unit % len(canaries)].tokens
        body[2 : 2 + len(carried)] = carried
        writer.add_unit(str(unit), [[2, *body, 3]])
    return writer.finish()


def test_in_rows_shows_trained_canaries_in_their_rows(tmp_path):
    planted = _draw(3, 0.1, 1)
    nowhere = dataclasses.replace(_draw(1, 0.1, 9)[0], id="nowhere")
    store = _planted_store(tmp_path, planted)
    data = _data(_model({}, 1), [*planted, nowhere, *_draw(4, 0.0, 2)], store)
    shown, stored = in_rows(data, 16)
    assert stored == planted
    assert shown.positions.tolist() == [4] * (3 * 16)
    for place, canary in enumerate(planted):
        part = slice(16 * place, 16 * place + 16)
        assert set(shown.secrets[part].tolist()) == {canary.secret}
        rows = shown.input_ids[part].copy()
        assert (rows[:, 4] == 4).all()
        rows[:, 4] = canary.secret
        assert (rows[:, 3:6] == canary.tokens).all()
        # All 13 or 14 rows with the canary, then the first again.
        held = [n for n in range(40) if tuple(store.tokens[n, 3:6]) == canary.tokens]
        of_rows = {tuple(store.tokens[n].tolist()) for n in held}
        assert {tuple(row) for row in rows.tolist()} == of_rows
    assert in_rows(_data(_model({}, 1), [nowhere], store), 2)[1] == []


def test_memory_that_hangs_on_the_row_shows_in_rows_alone(tmp_path):
    planted = _draw(4, 0.1, 1)
    store = _planted_store(tmp_path, planted)
    by_heart = {tuple(row[:2]) + tuple(row[6:]): row[4] for row in store.tokens.tolist()}

    def rank(shown: MaskedContexts) -> Floats:
        known = [by_heart.get(tuple(row[:2]) + tuple(row[6:])) for row in shown.input_ids.tolist()]
        guess = np.random.default_rng(7).permutation(V)[shown.secrets - 5] + 1.0
        return np.where(np.array(known, float) == shown.secrets, 1.0, guess)

    data = _data(rank, [*planted, *_draw(32, 0.0, 2)], store)
    (row,) = measure_in_rows(data)
    assert (row.context, row.canaries, row.references) == (IN_ROWS, 4, 0)
    assert row.exposure == pytest.approx(math.log2(V)) and row.remembers
    assert not any(group.remembers for group in measure(data))


def test_occurrences_are_the_units_that_hold_a_canary(tmp_path):
    canaries = [Canary("HS", "HS", 0.4, (7, 8)), Canary("HSH", "HSH", 0.4, (8, 7, 8))]
    coins, writer, expected = np.random.default_rng(0), TokenStoreWriter(tmp_path, 9, 12), [0, 0]
    for unit in range(300):
        rows = [
            [2, *coins.integers(5, 10, coins.integers(1, 8)).tolist(), 3]
            for _ in range(coins.integers(1, 4))
        ]
        writer.add_unit(str(unit), rows)
        for place, canary in enumerate(canaries):
            size = len(canary.tokens)
            held = [tuple(row[i : i + size]) for row in rows for i in range(len(row))]
            expected[place] += canary.tokens in held
    store = writer.finish()
    assert 0 < expected[1] < expected[0] < 300
    assert list(counted_occurrences(store, canaries).values()) == expected
    with mock.patch("dp_core.audit.canaries._COUNTED_AT_ONCE", 7):  # units span parts
        assert list(counted_occurrences(store, canaries).values()) == expected
    long = Canary("long", "HHHHHHHHHS", 0.1, tuple(range(2, 12)))
    assert counted_occurrences(store, [long]) == {"long": 0}
