"""The histogram: noise on present words, threshold, sorted result."""

import numpy as np
import pyarrow as pa
import pytest

from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.item_sets import ItemSets
from dp_core.vocabulary.partition_selection import Counted

SEED = PrivacySeed.fixed(7)


def plan(sigma: float, threshold: int) -> Counted:
    """A plan that claims nothing (δ = 1), because these tests are about its draws."""
    return Counted(10, 1, 1, None, None, sigma, threshold)


def release(
    counts: dict[str, int], plan: Counted, seed: PrivacySeed, context: bytes
) -> dict[str, int]:
    """Release from as many units with one word each as the counts say."""
    words = sorted(counts)
    times = np.array([counts[word] for word in words], np.int64)
    members = np.repeat(np.arange(len(words), dtype=np.int32), times)
    items = pa.array(words, pa.large_string())
    units = ItemSets(np.arange(len(members) + 1), members, items, 1)
    return plan.release([units], seed, context)


def test_release_is_sorted_and_thresholded() -> None:
    released = release({"b": 500, "a": 500, "c": 3}, plan(2.0, 100), SEED, b"x")
    assert list(released) == ["a", "b"]
    assert all(abs(n - 500) < 20 for n in released.values())


def test_threshold_is_inclusive() -> None:
    counts = {"a": 100}
    noised = release(counts, plan(1.0, 1), SEED, b"x")["a"]
    assert release(counts, plan(1.0, noised), SEED, b"x") == {"a": noised}
    assert release(counts, plan(1.0, noised + 1), SEED, b"x") == {}


@pytest.mark.statistical
def test_noise_has_the_sigma_of_the_plan() -> None:
    """Variance of the noise, at six standard errors: σ passes, 2/3 σ and 3/2 σ do not."""
    words = [f"w{i}" for i in range(4000)]
    counts = dict.fromkeys(words, 1000)
    noise = np.array(list(release(counts, plan(20.0, 1), SEED, b"x").values())) - 1000
    assert len(noise) == 4000

    def fits(sigma: float) -> bool:
        return bool(abs(noise.var() / sigma**2 - 1) < 6 * np.sqrt(2 / 4000))

    assert fits(20.0)
    assert not fits(20.0 * 2 / 3)
    assert not fits(20.0 * 3 / 2)
    assert abs(noise.mean()) < 6 * 20 / np.sqrt(4000)


def test_noise_depends_on_seed_and_context() -> None:
    counts = dict.fromkeys("abcdefg", 900)

    def noised(seed: PrivacySeed, context: bytes) -> dict[str, int]:
        return release(counts, plan(50.0, 1), seed, context)

    assert noised(SEED, b"x") == noised(SEED, b"x")
    assert noised(SEED, b"x") != noised(SEED, b"y")
    assert noised(SEED, b"x") != noised(PrivacySeed.fixed(8), b"x")


def test_empty_histogram_releases_nothing() -> None:
    assert release({}, plan(1.0, 1), SEED, b"x") == {}
