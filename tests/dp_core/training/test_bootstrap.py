import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from dp_core.training.bootstrap import (
    Difference,
    Replicate,
    f1_difference,
    mean_f1,
    mean_over_seeds,
)

RIGHT, WRONG = (1, 1, 1), (0, 1, 1)  # one entity per document: F1 is the share of right ones


def replicate(seed: str, fold: int, right: int, of: int) -> Replicate:
    """Return a model that is right about the first documents of a fold."""
    counts = {f"{fold}-{i}": RIGHT if i < right else WRONG for i in range(of)}
    return Replicate(seed, fold, counts)


def difference_of(*models: Iterable[bool]) -> Difference:
    """Return the difference of two models that are right about the given documents."""
    first, second = (
        [Replicate("a", 0, {str(i): RIGHT if right else WRONG for i, right in enumerate(model)})]
        for model in models
    )
    difference = f1_difference(first, second)
    return difference


def test_mean_and_deviations_equal_a_hand_computed_table() -> None:
    # seed a: folds 0.8, 0.6; seed b: folds 0.7, 0.3
    table = [("a", 0, 8), ("a", 1, 6), ("b", 0, 7), ("b", 1, 3)]
    f1 = mean_f1([replicate(seed, fold, right, 10) for seed, fold, right in table])
    assert f1.mean == pytest.approx(0.6)
    assert (f1.replicates, f1.seeds, f1.folds) == (4, 2, 2)
    assert f1.seed_deviation == pytest.approx(statistics.stdev([0.7, 0.5]))
    assert f1.fold_deviation == pytest.approx(statistics.stdev([0.75, 0.45]))


def test_f1_counts_all_entities_of_a_fold():
    counts = {"long": (9, 10, 12), "short": (0, 2, 1), "empty": (0, 0, 0)}
    f1 = mean_f1([Replicate("a", 0, counts)])
    assert f1.mean == pytest.approx(2 * 9 / (12 + 13))
    assert (f1.seed_deviation, f1.fold_deviation) == (None, None)
    assert f1.interval is None  # three documents are too few


@pytest.mark.parametrize("seeds", ["a", "abc"])
def test_interval_of_equal_models_is_the_interval_of_a_share(seeds):
    low, high = mean_f1([replicate(seed, 0, 280, 400) for seed in seeds]).interval or (0.0, 0.0)
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(0.7 * 0.3 / 400), rel=0.1)
    assert (high + low) / 2 == pytest.approx(0.7, abs=0.01)


def test_two_seeds_rarely_miss_their_mean_and_rarely_seem_to_differ(monkeypatch):
    """F1 varies far more by seed than by document. Resampling two seeds would miss it in half."""
    monkeypatch.setattr("dp_core.training.bootstrap.RESAMPLES", 400)
    missed = differ = 0
    for models in np.random.default_rng(1).normal(240, 40, (100, 2, 2)).round().astype(int):
        first, second = ([replicate(str(i), 0, n, 400) for i, n in enumerate(m)] for m in models)
        low, high = mean_f1(first).interval or (0.0, 0.0)
        missed += not low < 0.6 < high
        difference = f1_difference(first, second)
        differ += difference is not None and difference.p_value < 0.05
    assert missed <= 11 and differ <= 11  # 5 are expected at most


def test_fine_tunings_of_one_model_are_drawn_together():
    """The second of two models is better; each is fine-tuned ten times with the same result."""
    every = [replicate(f"{n} {i}", 0, n, 400) for n in (200, 360) for i in range(10)]
    loose, of_two = mean_f1(every), mean_f1([replace(r, start=r.seed.split()[0]) for r in every])
    assert loose.mean == pytest.approx(of_two.mean) == pytest.approx(0.7)
    assert (of_two.replicates, of_two.seeds, loose.seeds) == (20, 2, 20)
    assert of_two.seed_deviation == pytest.approx(statistics.stdev([0.5, 0.9]))
    widths = [high - low for low, high in (loose.interval or (0, 0), of_two.interval or (0, 0))]
    assert widths[1] > 2 * widths[0]


@pytest.mark.parametrize("left", [[], [("a", 0), ("a", 1), ("b", 0)], [("a", 0), ("a", 0)]])
def test_incomplete_table_of_replicates_is_refused(left):
    with pytest.raises(ValueError, match="each seed and fold"):
        mean_f1([replicate(seed, fold, 5, 10) for seed, fold in left])


def test_difference_of_a_model_from_itself_is_zero():
    same = [replicate("a", fold, 15, 30) for fold in (0, 1)]
    difference = f1_difference(same, same)
    assert (difference.value, difference.interval, difference.p_value) == (0.0, (0.0, 0.0), 1.0)


def test_difference_is_paired_by_document_and_signed():
    """The better model is right wherever the other is, so only the difference varies."""
    worse, better = ([True] * right + [False] * (400 - right) for right in (200, 220))
    difference, back = difference_of(worse, better), difference_of(better, worse)
    assert difference.value == pytest.approx(0.05) and back.value == pytest.approx(-0.05)
    low, high = difference.interval
    assert (high - low) / 2 == pytest.approx(1.96 * math.sqrt(0.05 * 0.95 / 400), rel=0.1)
    assert difference.p_value == pytest.approx(back.p_value) and difference.p_value < 0.01


def test_p_value_is_two_sided():
    """Of 400 documents only one model is right on 30, and only the other on 18: z = 1.74."""
    pairs = [(True, False)] * 18 + [(False, True)] * 30 + [(True, True)] * 352
    difference = difference_of(*zip(*pairs, strict=True))
    z = 12 / 400 / math.sqrt((48 / 400 - (12 / 400) ** 2) / 400)
    assert difference.p_value == pytest.approx(2 * statistics.NormalDist().cdf(-z), rel=0.25)


def test_p_value_is_rarely_small_without_a_difference():
    drawn = np.random.default_rng(1)
    small = 0
    for _ in range(200):
        small += difference_of(*drawn.random((2, 60)) < 0.7).p_value < 0.05
    assert 2 <= small <= 22  # 10 are expected


def test_models_tested_on_other_documents_or_folds_cannot_be_compared():
    replicates = [replicate("a", 0, 15, 30)]
    assert f1_difference(replicates, [replicate("a", 0, 15, 29)]) is None
    assert f1_difference(replicates, [replicate("a", 1, 15, 30)]) is None
    assert f1_difference(replicates, []) is None
    few = [replicate("a", 0, 3, 9)]
    assert f1_difference(few, few) is None


def test_interval_over_few_seeds_covers_the_mean_at_its_level():
    stats = mean_over_seeds([310.0, 330.0, 350.0])
    assert (stats.mean, stats.seeds, stats.folds, stats.seed_deviation) == (330.0, 3, 1, 20.0)
    assert stats.interval == pytest.approx((330 - 49.683, 330 + 49.683), abs=1e-3)
    drawn = np.random.default_rng(1).normal(330.0, 20.0, (1000, 3))
    intervals = [mean_over_seeds(values.tolist()).interval or (0.0, 0.0) for values in drawn]
    share = sum(low < 330 < high for low, high in intervals) / len(intervals)
    assert 0.92 < share < 0.98
    alone = mean_over_seeds([330.0])
    assert (alone.mean, alone.seed_deviation, alone.interval) == (330.0, None, None)
    with pytest.raises(ValueError, match="no value"):
        mean_over_seeds([])
