"""Phrases in rounds: bounded by unit, chosen by released values alone, noised, cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.data.privacy_units import Unit
from dp_core.errors import PlanError
from dp_core.phrases import ngram_release
from dp_core.phrases.calibration import PhrasePlan, calibrate
from dp_core.phrases.ngram_release import (
    Candidates,
    aggregate,
    contribution,
    count_shard,
    merged,
    release_phrases,
)
from dp_core.privacy.accounting.profiles import upper_tail
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.dp_histogram import release

SEED = PrivacySeed.fixed(7)
LETTERS = "abcdef"
WORDS = dict.fromkeys(LETTERS, 1)
TEXTS = st.lists(
    st.lists(st.sampled_from(LETTERS), max_size=14).map(" ".join), min_size=1, max_size=2
)
UNITS = st.lists(TEXTS, min_size=1, max_size=6).map(
    lambda texts: [Unit(str(i), t) for i, t in enumerate(texts)]
)


def loose(lengths: tuple[int, ...], n: int, sigma: float, threshold: int) -> PhrasePlan:
    """A plan that claims next to nothing: these tests are about what is counted and drawn."""
    return PhrasePlan(lengths, n, sigma, threshold, 1e6, 0.99)


def all_runs(units: Iterable[Unit], length: int) -> Counter[str]:
    """Count, by brute force, the units that hold each run of words."""
    counts: Counter[str] = Counter()
    for unit in units:
        held = set()
        for text in unit.texts:
            words = text.split()
            held |= {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}
        counts.update(held)
    return counts


@given(UNITS, st.integers(2, 4))
def test_every_unit_counts_once_towards_each_of_its_phrases(units: list[Unit], n: int) -> None:
    counts = count_shard(units, Candidates(n, 1, WORDS), 100, b"k")
    assert counts == all_runs(units, n)


@given(UNITS, st.integers(1, 4), st.sets(st.sampled_from([*itertools.product(LETTERS, repeat=2)])))
def test_a_unit_moves_at_most_n_counts_by_one_whatever_was_released(
    units: list[Unit], n: int, released: set[tuple[str, str]]
) -> None:
    """Given any outputs of the earlier rounds, of which adaptive composition makes the total."""
    parts = {" ".join(pair): 3 + len(released) % 5 for pair in released}
    for candidates in (Candidates(2, 1, WORDS), Candidates(3, 2, parts)):
        whole = count_shard(units, candidates, n, b"k")
        for i in range(len(units)):
            rest = count_shard(units[:i] + units[i + 1 :], candidates, n, b"k")
            difference = {w: whole[w] - rest[w] for w in whole.keys() | rest.keys()}
            assert set(difference.values()) <= {0, 1}
            assert sum(difference.values()) <= n


@given(UNITS, st.integers(0, 5), st.integers(1, 5))
def test_shards_add_up_to_the_whole(units: list[Unit], cut: int, n: int) -> None:
    candidates = Candidates(2, 1, WORDS)
    shards = [count_shard(part, candidates, n, b"k") for part in (units[:cut], units[cut:])]
    assert merged(shards) == count_shard(units, candidates, n, b"k")
    assert merged(shards).words_per_unit == n


def test_released_in_shards_or_whole_is_the_same() -> None:
    units = [Unit(str(i), ["a b c d", "b c d"]) for i in range(60)]
    plan = loose((2, 3), 3, 2.0, 20)
    whole = release_phrases(lambda: [units], plan, WORDS, SEED, b"x")
    parts = release_phrases(lambda: [units[:17], units[17:]], plan, WORDS, SEED, b"x")
    assert whole == parts
    assert whole == release_phrases(lambda: [units], plan, WORDS, SEED, b"x")
    assert whole != release_phrases(lambda: [units], plan, WORDS, PrivacySeed.fixed(8), b"x")
    assert whole != release_phrases(lambda: [units], plan, WORDS, SEED, b"y")


def test_shards_of_unlike_bounds_are_refused() -> None:
    one, two = aggregate([["a b"]], 3), aggregate([["a b"]], 4)
    with pytest.raises(PlanError, match="no one bound"):
        merged([one, two])
    with pytest.raises(PlanError, match="no one bound"):
        merged([])


@pytest.mark.parametrize(("items", "n"), [(["a b", "b c"], 1), (["a b", "a b"], 2)])
def test_unbounded_items_are_refused(items: list[str], n: int) -> None:
    with pytest.raises(PlanError, match="not bounded"):
        aggregate([items], n)


def test_a_candidate_needs_every_part_released() -> None:
    parts = {"a b": 5, "b c": 9, "d e": 4}
    found = Candidates(3, 2, parts).of(["a b c d e", "a b x b c"])
    assert found == {"a b c": 5}
    # and the count is that of its rarest part
    assert Candidates(3, 1, {"a": 7, "b": 2, "c": 5}).of(["a b c"]) == {"a b c": 2}


def test_words_that_nobody_released_stand_in_no_phrase() -> None:
    assert Candidates(2, 1, {"a": 0}).of(["a a secret a", "a a"]) == {"a a": 0}


def test_what_its_parts_released_most_of_counts_first() -> None:
    found = {f"p {i}": 100 - i for i in range(50)}
    assert set(contribution(found, 10, "u", b"k")) == {f"p {i}" for i in range(10)}
    assert set(contribution(found, 100, "u", b"k")) == set(found)


@pytest.mark.statistical
def test_equals_are_drawn_alike_by_the_units_own_coins() -> None:
    found = dict.fromkeys((f"p {i}" for i in range(10)), 4)
    drawn = Counter(p for i in range(4000) for p in contribution(found, 3, str(i), b"k"))
    expected, spread = 1200, (4000 * 0.3 * 0.7) ** 0.5
    assert all(abs(count - expected) < 6 * spread for count in drawn.values())
    backwards = dict(reversed(found.items()))  # in which order a unit's texts said them
    assert contribution(found, 3, "7", b"k") == contribution(backwards, 3, "7", b"k")


def test_later_rounds_see_released_values_and_not_the_counts_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A phrase that noise kept back in one round is no part of a candidate in the next."""

    def kept_back(*arguments: Any) -> dict[str, int]:
        return {p: n for p, n in release(*arguments).items() if p != "c d"}

    monkeypatch.setattr(ngram_release, "release", kept_back)
    units = [Unit(str(i), ["a b c d"]) for i in range(60)]
    out = release_phrases(lambda: [units], loose((2, 3), 4, 1.0, 30), WORDS, SEED, b"x")
    assert set(out[2]) == {"a b", "b c"}
    assert set(out[3]) == {"a b c"}


@pytest.mark.statistical
@pytest.mark.parametrize(("sigma", "threshold"), [(2.0, 5), (3.0, 6)])
def test_a_phrase_of_one_unit_comes_out_as_often_as_its_tail_says(
    sigma: float, threshold: int
) -> None:
    """Four thousand units, each with a phrase of its own: as many draws of the same coin."""
    units = [Unit(str(i), [f"x{i} y{i}"]) for i in range(4000)]
    words = {word: 1 for u in units for word in u.texts[0].split()}
    out = release_phrases(lambda: [units], loose((2,), 1, sigma, threshold), words, SEED, b"x")

    def fits(tail: float) -> bool:
        spread = (4000 * tail * (1 - tail)) ** 0.5
        return abs(len(out[2]) - 4000 * tail) < 5 * spread

    assert fits(upper_tail(threshold - 1, sigma))
    assert not fits(upper_tail(threshold, sigma))
    assert not fits(upper_tail(threshold - 2, sigma))


def test_a_phrase_of_one_unit_does_not_come_out_of_a_calibrated_plan() -> None:
    """At δ = 1e-9 none of a thousand lone phrases passes; what all hold does."""
    plan = calibrate(4.0, 1e-9, (2, 3), 20)
    units = [Unit(str(i), [f"every one says this x{i} y{i} z{i}"]) for i in range(1000)]
    words = {word: 1 for u in units for word in u.texts[0].split()}
    out = release_phrases(lambda: [units], plan, words, SEED, b"x")
    assert set(out[2]) == {"every one", "one says", "says this"}
    assert set(out[3]) == {"every one says", "one says this"}


def test_rounds_draw_noise_of_their_own() -> None:
    units = [Unit(str(i), ["a a a a"]) for i in range(500)]
    out = release_phrases(lambda: [units], loose((2, 3, 4), 1, 40.0, 200), WORDS, SEED, b"x")
    noised = [counts[phrase] for counts in out.values() for phrase in counts]
    assert len(set(noised)) == 3


@pytest.mark.parametrize(
    "text",
    ["", " \n\t ", "a\x00b\x1b[31m", "w" * 10_000, "\ud800 a b", "a\u2028b\u00a0c", "[CLS] [MASK]"],
)
def test_hostile_text_is_text(text: str) -> None:
    units = [Unit(str(i), [text, "a b c"]) for i in range(40)]
    out = release_phrases(lambda: [units], loose((2, 3), 5, 1.0, 30), WORDS, SEED, b"x")
    assert {"a b", "b c"} <= set(out[2]) <= {"a b", "b c", "c d"}
    assert all(set(phrase.split(" ")) <= set(WORDS) for c in out.values() for phrase in c)
