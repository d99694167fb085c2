"""The histogram: contribution bounded first, noise on what is present, threshold, sorted."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.data.privacy_units import Unit
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.calibration import HistogramPlan
from dp_core.vocabulary.dp_histogram import SetCounts, release, set_counts

SEED = PrivacySeed.fixed(7)
TEXTS = st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=20).map(" ".join), max_size=3)
UNITS = st.lists(TEXTS, max_size=8).map(
    lambda texts: [Unit(str(i), t) for i, t in enumerate(texts)]
)


def plan(sigma: float, threshold: int, n: int = 10) -> HistogramPlan:
    """A plan that claims nothing (δ = 1): these tests are about what is drawn."""
    return HistogramPlan(words_per_unit=n, sigma=sigma, threshold=threshold, epsilon=1, delta=1)


@given(UNITS, st.integers(1, 12))
def test_sensitivity(units: list[Unit], n: int) -> None:
    """Without a unit, at most N counts are lower, each by 1, and no other one changes."""
    whole = set_counts(units, n, b"k")
    for i in range(len(units)):
        rest = set_counts(units[:i] + units[i + 1 :], n, b"k")
        difference = {w: whole[w] - rest[w] for w in whole.keys() | rest.keys()}
        assert set(difference.values()) <= {0, 1}
        assert sum(difference.values()) <= n


@given(UNITS)
def test_each_word_once_per_unit(units: list[Unit]) -> None:
    expected = Counter(w for u in units for w in set(" ".join(u.texts).split()))
    assert set_counts(units, 10, b"k") == expected


def test_the_words_that_count_are_drawn_alike_for_rare_and_common() -> None:
    # Ten thousand units share 9 words; each has one of its own. Bounded to 5 of 10.
    units = [Unit(str(i), [f"a b c d e f g h i own{i}"]) for i in range(10_000)]
    counts = set_counts(units, 5, b"k")
    own = sum(n for w, n in counts.items() if w.startswith("own"))
    for n in (own, counts["a"], counts["i"]):
        assert abs(n - 5000) < 6 * 50
    assert counts.total() == 50_000


def test_too_many_units_are_refused_without_saying_how_many() -> None:
    def units() -> Iterator[Unit]:
        for i in range(12345):
            yield Unit(str(i), ["secretword"])

    with pytest.raises(BadInput, match="declared bound of 100") as caught:
        set_counts(units(), 5, b"k", declared_units=100)
    assert "12345" not in str(caught.value)
    assert "101" not in str(caught.value)
    assert "secretword" not in str(caught.value)
    assert set_counts(list(units())[:100], 5, b"k", declared_units=100)["secretword"] == 100


def test_release_is_sorted_and_thresholded() -> None:
    counts = set_counts([Unit(str(i), ["b a", "c" if i < 3 else ""]) for i in range(500)], 10, b"k")
    released = release(counts, plan(2.0, 100), SEED, b"x")
    assert list(released) == ["a", "b"]
    assert all(abs(n - 500) < 20 for n in released.values())


def test_threshold_is_inclusive() -> None:
    counts = set_counts([Unit(str(i), ["a"]) for i in range(100)], 10, b"k")
    noised = release(counts, plan(1.0, 1), SEED, b"x")["a"]
    assert release(counts, plan(1.0, noised), SEED, b"x") == {"a": noised}
    assert release(counts, plan(1.0, noised + 1), SEED, b"x") == {}


@pytest.mark.statistical
def test_noise_has_the_plans_sigma_and_not_another() -> None:
    """Variance of the noise, at six standard errors: σ passes, 2/3 σ and 3/2 σ do not."""
    words = [f"w{i}" for i in range(4000)]
    counts = SetCounts(dict.fromkeys(words, 1000))
    counts.words_per_unit = 10
    noise = np.array(list(release(counts, plan(20.0, 1), SEED, b"x").values())) - 1000
    assert len(noise) == 4000

    def fits(sigma: float) -> bool:
        return bool(abs(noise.var() / sigma**2 - 1) < 6 * np.sqrt(2 / 4000))

    assert fits(20.0)
    assert not fits(20.0 * 2 / 3)
    assert not fits(20.0 * 3 / 2)
    assert abs(noise.mean()) < 6 * 20 / np.sqrt(4000)


def test_noise_is_bound_to_seed_and_context() -> None:
    counts = set_counts([Unit(str(i), ["a b c d e f g"]) for i in range(900)], 10, b"k")

    def noised(seed: PrivacySeed, context: bytes) -> dict[str, int]:
        return release(counts, plan(50.0, 1), seed, context)

    assert noised(SEED, b"x") == noised(SEED, b"x")
    assert noised(SEED, b"x") != noised(SEED, b"y")
    assert noised(SEED, b"x") != noised(PrivacySeed.fixed(8), b"x")


def test_counts_bounded_more_loosely_than_the_plan_are_refused() -> None:
    counts = set_counts([Unit("1", ["a"])], 11, b"k")
    with pytest.raises(PlanError, match="11 words per unit"):
        release(counts, plan(1.0, 5, n=10), SEED, b"x")
    with pytest.raises(PlanError):
        release(SetCounts({"a": 1}), plan(1.0, 5), SEED, b"x")  # bounded by nobody


def test_nothing_present_releases_nothing() -> None:
    assert release(set_counts([], 10, b"k"), plan(1.0, 1), SEED, b"x") == {}


def test_the_plans_bound_on_units_must_have_been_checked() -> None:
    units = [Unit("1", ["a"])]
    bound = HistogramPlan(10, 40.0, 300, epsilon=2.0, delta=1e-3, declared_units=100)
    with pytest.raises(PlanError, match="bound of 100"):
        release(set_counts(units, 10, b"k"), bound, SEED, b"x")
    with pytest.raises(PlanError, match="bound of 100"):
        release(set_counts(units, 10, b"k", declared_units=200), bound, SEED, b"x")
    counts = set_counts(units, 10, b"k", declared_units=100)
    assert set(release(counts, bound, SEED, b"x")) <= {"a"}
