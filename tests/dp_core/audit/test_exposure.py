"""Exposure against the paper's formula, its interval's coverage, and models made to remember."""

import dataclasses
import json
import math

import numpy as np
import pytest

from dp_core.audit.exposure import (
    ALONE,
    EMBEDDED,
    ExposureRow,
    Floats,
    Ints,
    Rank,
    interval,
    measure,
    rows_from_ranks,
    summarise,
)

V, UNITS, S = 1000, 4000, 16
CANDIDATES = range(5, 5 + V)


@dataclasses.dataclass(frozen=True)
class Specials:
    pad: int = 0
    cls: int = 2
    sep: int = 3
    mask: int = 4


@dataclasses.dataclass(frozen=True)
class Planted:
    pattern: str
    rate: float
    pieces: tuple[int, ...]
    secret_index: int


def _draw(count: int, rate: float, seed: int, pattern: str = "HSH") -> list[Planted]:
    coins = np.random.default_rng(seed)
    return [
        Planted(pattern, rate, tuple(coins.choice(CANDIDATES, len(pattern)).tolist()), 1)
        for _ in range(count)
    ]


def _model(memory: dict[int, int], seed: int) -> Rank:
    """A model whose ranks are a fixed random permutation for each left neighbour of the mask,

    save that it brings the secrets in `memory` to the rank given there.
    """
    coins = np.random.default_rng(seed)
    permutations = coins.permuted(np.tile(np.arange(1, V + 1), (V + 5, 1)), axis=1)

    def rank(input_ids: Ints, lengths: Ints, positions: Ints, secrets: Ints) -> Floats:
        rows = np.arange(positions.size)
        assert (input_ids[rows, positions] == 4).all()
        assert (lengths <= S).all()
        left = input_ids[rows, positions - 1]
        ranks = permutations[left, secrets - 5].astype(float)
        for secret, known in memory.items():
            ranks[secrets == secret] = known
        return ranks

    return rank


def _measure(
    rank: Rank, planted: list[Planted], references: list[Planted], seed: int = 0
) -> list[ExposureRow]:
    return measure(
        rank,
        planted,
        references,
        special=Specials(),
        candidates=CANDIDATES,
        declared_units=UNITS,
        sequence_length=S,
        repeats=5,
        seed=seed,
    )


def test_exposure_is_the_papers_formula() -> None:
    planted = _draw(4, 0.01, 1)
    ranks = np.array([[2.0, 4.0], [1.0, 1.0], [8.0, 2.0], [7.0, 3.0]])
    (row,) = rows_from_ranks(
        planted,
        ranks,
        [],
        np.zeros((0, 2)),
        context=ALONE,
        candidates=V,
        declared_units=UNITS,
    )
    assert row.exposure == pytest.approx(math.log2(V) - math.log2(ranks.mean()))
    assert row.expected_occurrences == pytest.approx(40)
    assert (row.canaries, row.contexts_per_canary, row.references) == (4, 2, 0)


def test_a_memorising_model_is_caught_and_an_ignorant_one_is_not() -> None:
    common, rare, references = _draw(4, 0.1, 1), _draw(4, 0.001, 2), _draw(32, 0.0, 3)
    memory = {canary.pieces[1]: 1 for canary in common}
    rows = _measure(_model(memory, 9), [*rare, *common], references)
    assert [(row.context, row.rate) for row in rows] == [
        (ALONE, 0.001),
        (ALONE, 0.1),
        (EMBEDDED, 0.001),
        (EMBEDDED, 0.1),
    ]
    for row in rows:
        assert row.remembers == (row.rate == 0.1)
        assert row.low <= row.exposure <= row.high
    learned = rows[-1]
    assert learned.exposure == pytest.approx(math.log2(V))
    assert learned.high == pytest.approx(math.log2(V))
    assert learned.low < learned.exposure - 1  # four canaries that agree still leave an interval
    assert learned.p_value < 1e-9
    assert learned.rank_exposure == pytest.approx(learned.rank_exposure_ceiling)
    assert learned.rank_exposure_ceiling == pytest.approx(math.log2(33))
    found = summarise(rows)
    assert found.remembers
    assert found.largest == learned.exposure
    assert found.largest_group == "HSH at p = 0.1"
    assert found.largest_null_high > rows[-1].null_high  # the largest of two groups


def test_models_without_memory_are_hardly_ever_accused() -> None:
    """A group of four is accused falsely in 0.06% of cases: 1.8 of 3,000 expected."""
    accused, above_band, trials = 0, 0, 3000
    coins = np.random.default_rng(5)
    planted = _draw(4, 0.1, 1)
    for _ in range(trials):
        (row,) = rows_from_ranks(
            planted,
            coins.integers(1, V + 1, (4, 1)).astype(float),
            [],
            np.zeros((0, 1)),
            context=ALONE,
            candidates=V,
            declared_units=UNITS,
        )
        accused += row.remembers
        above_band += row.exposure > row.null_high
    assert accused <= 8
    assert 0.015 < above_band / trials < 0.035


def _coverage(draw: "np.random.Generator", kind: str, canaries: int) -> float:
    trials = 2000
    size = (trials, canaries)
    if kind == "no memory":
        ranks, truth = draw.integers(1, V + 1, size).astype(float), (V + 1) / 2
    elif kind == "half bit":
        ranks = 2.0 ** draw.normal(5, 0.5, size)
        truth = 2.0**5 * math.exp((0.5 * math.log(2)) ** 2 / 2)
    else:  # nine in ten remembered, the tenth forgotten
        forgotten = draw.integers(1, V + 1, size).astype(float)
        ranks = np.where(draw.random(size) < 0.9, 1.0, forgotten)
        truth = 0.9 + 0.1 * (V + 1) / 2
    exposure = math.log2(V) - math.log2(truth)
    return float(
        np.mean([low <= exposure <= high for _, low, high in (interval(r, V) for r in ranks)])
    )


@pytest.mark.statistical
@pytest.mark.parametrize("canaries", [2, 4, 8, 24])
@pytest.mark.parametrize("kind", ["no memory", "half bit"])
def test_the_interval_covers(kind: str, canaries: int) -> None:
    assert _coverage(np.random.default_rng(canaries), kind, canaries) >= 0.94


@pytest.mark.statistical
def test_the_interval_is_no_wider_than_it_needs_and_fails_where_it_says() -> None:
    coins = np.random.default_rng(1)
    assert _coverage(coins, "no memory", 24) < 0.995
    rare = _coverage(coins, "rare failure", 24)
    assert 0.75 < rare < 0.93  # the docstring owns up to 0.85


def test_an_interval_from_one_canary_bounds_nothing_and_from_more_shrinks() -> None:
    assert interval(np.array([1.0]), V) == (pytest.approx(math.log2(V)), 0.0, math.log2(V))
    widths = []
    for canaries in (2, 4, 8, 32):
        _, low, high = interval(np.tile([20.0, 40.0], canaries // 2), V)
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[1] > 2  # bits, with four canaries
    agreeing = interval(np.full(4, 30.0), V)
    assert agreeing[2] - agreeing[1] > 2  # width zero by the plain t interval and the bootstrap


def test_contexts_of_one_canary_are_not_counted_as_canaries() -> None:
    planted, coins = _draw(4, 0.1, 1), np.random.default_rng(0)
    once = coins.integers(1, 60, (4, 1)).astype(float)
    shared = {"context": EMBEDDED, "candidates": V, "declared_units": UNITS}
    (one,) = rows_from_ranks(planted, once, [], np.zeros((0, 1)), **shared)
    (many,) = rows_from_ranks(planted, np.repeat(once, 50, 1), [], np.zeros((0, 50)), **shared)
    assert (many.low, many.high) == (one.low, one.high)


def test_rank_exposure_is_a_place_among_references_with_ties_shared() -> None:
    planted = _draw(1, 0.1, 1)
    references = _draw(7, 0.0, 2)
    shared = {"context": ALONE, "candidates": V, "declared_units": UNITS}
    others = np.array([[5.0], [10.0], [10.0], [40.0], [50.0], [60.0], [70.0]])
    (row,) = rows_from_ranks(planted, np.array([[10.0]]), references, others, **shared)
    assert row.rank_exposure == pytest.approx(math.log2(8) - math.log2(1 + 1 + 2 / 2))
    assert row.rank_exposure_ceiling == 3.0
    elsewhere = [dataclasses.replace(r, pattern="HS") for r in references]
    (row,) = rows_from_ranks(planted, np.array([[10.0]]), elsewhere, others, **shared)
    assert (row.references, row.rank_exposure) == (0, 0.0)  # other patterns are no reference


def test_the_mean_is_over_canaries_not_groups() -> None:
    few, many = _draw(1, 0.1, 1), _draw(3, 0.2, 2)
    ranks = np.array([[400.0], [1.0], [1.0], [2.0]])
    rows = rows_from_ranks(
        [*few, *many], ranks, [], np.zeros((0, 1)), context=EMBEDDED, candidates=V, declared_units=1
    )
    found = summarise(rows)
    assert found.mean == pytest.approx(math.log2(V) - math.log2(404 / 4))
    with pytest.raises(ValueError, match="alone"):
        summarise(rows, ALONE)


def test_rows_survive_json() -> None:
    rows = _measure(_model({}, 2), _draw(2, 0.1, 1), _draw(4, 0.0, 2))
    text = json.dumps([row.to_json() for row in rows])
    assert [ExposureRow.from_json(record) for record in json.loads(text)] == rows


def test_what_cannot_be_measured_is_refused() -> None:
    planted, references = _draw(2, 0.1, 1), _draw(2, 0.0, 2)
    with pytest.raises(ValueError, match="no canaries"):
        _measure(_model({}, 1), [], references)
    stranger = Planted("HS", 0.1, (7, 4999), 1)
    with pytest.raises(ValueError, match="not among the candidates"):
        _measure(_model({}, 1), [stranger], references)
    for wrong in (0.0, V + 1.0, math.nan):
        with pytest.raises(ValueError, match="not within 1"):
            _measure(lambda i, n, p, s, w=wrong: np.full(p.size, w), planted, references)


def test_batches_have_one_shape_whatever_the_number_of_rows() -> None:
    shapes = set()
    inner = _model({}, 1)

    def rank(input_ids: Ints, lengths: Ints, positions: Ints, secrets: Ints) -> Floats:
        shapes.add((input_ids.shape, positions.shape))
        return inner(input_ids, lengths, positions, secrets)

    _measure(rank, _draw(30, 0.1, 1), _draw(60, 0.0, 2))
    assert shapes == {((256, S), (256,))}
