import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dp_core.data.privacy_units import Unit, in_blocks
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld, gaussian_epsilon
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    NoisedWeights,
    PhraseRounds,
    PrivacyUnit,
    ThresholdedHistogram,
    compose,
)
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.item_sets import BoundedSets, GatheredSets, ItemSets
from dp_core.vocabulary.ngram_release import Candidates, PhrasePlan, calibrate, release_phrases
from dp_core.vocabulary.partition_selection import PartitionSelection

SEED = PrivacySeed.fixed(7)
LETTERS = "abcdef"
WORDS = frozenset(LETTERS)
TEXTS = st.lists(
    st.lists(st.sampled_from(LETTERS), max_size=14).map(" ".join), min_size=1, max_size=2
)
UNITS = st.lists(TEXTS, min_size=1, max_size=6).map(
    lambda texts: [Unit(str(i), t) for i, t in enumerate(texts)]
)


@dataclass(frozen=True)
class Exact(PartitionSelection):
    """Counts without noise above a threshold, which show the counts of a round to these tests."""

    least: int = 1
    hidden: str = ""  # a phrase that is never released

    def event(self) -> ThresholdedHistogram:
        return ThresholdedHistogram(self.items_per_unit, 1e9, 10**12)

    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        counts = sum(np.bincount(s.members, minlength=sets.distinct) for s in sets)
        kept = np.flatnonzero(np.asarray(counts) >= self.least)
        named = zip(sets.named(kept), np.asarray(counts)[kept].tolist(), strict=True)
        return {p: n for p, n in named if p != self.hidden}


def exact(lengths: tuple[int, ...], n: int, least: int = 1, hidden: str = "") -> PhrasePlan:
    return PhrasePlan(lengths, Exact(n, 1.0, 1e-5, None, 10_000, least, hidden), 1.0, 1e-5)


def counted(shards: Iterable[ItemSets]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for shard in shards:
        held = np.bincount(shard.members, minlength=len(shard.items)).tolist()
        counts.update(dict(zip(shard.items.to_pylist(), held, strict=True)))
    return counts


def candidates(length: int, part_length: int, parts: Collection[str]) -> Candidates:
    return Candidates(length, part_length, parts, in_blocks)


def held_by(candidates: Candidates, texts: list[str]) -> set[str]:
    (block,) = candidates([Unit("", texts)])
    return set(block.items.to_pylist())


def released(
    plan: PhrasePlan,
    *shards: list[Unit],
    words: Collection[str] = WORDS,
    seed: PrivacySeed = SEED,
    context: bytes = b"x",
) -> dict[int, dict[str, int]]:
    def gather(sets: BoundedSets) -> list[ItemSets]:
        return [sets(units) for units in shards]

    return release_phrases(gather, in_blocks, plan, words, seed, context)


def all_runs(units: Iterable[Unit], length: int) -> Counter[str]:
    """Count by brute force the units that contain each run of words."""
    counts: Counter[str] = Counter()
    for unit in units:
        held = set()
        for text in unit.texts:
            words = text.split()
            held |= {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}
        counts.update(held)
    return counts


@given(UNITS, st.integers(1, 4), st.sets(st.sampled_from([*itertools.product(LETTERS, repeat=2)])))
def test_unit_changes_at_most_n_counts_by_one_for_any_earlier_release(units, n, pairs):
    """Holds for any outputs of earlier rounds, as adaptive composition requires."""
    parts = {" ".join(pair) for pair in pairs}
    for held in (candidates(2, 1, WORDS), candidates(3, 2, parts)):
        sets = BoundedSets(held, n, b"k")
        whole = counted([sets(units)])
        for i in range(len(units)):
            rest = counted([sets(units[:i] + units[i + 1 :])])
            difference = {w: whole[w] - rest[w] for w in whole.keys() | rest.keys()}
            assert set(difference.values()) <= {0, 1}
            assert sum(difference.values()) <= n


def test_release_does_not_depend_on_shards():
    units = [Unit(str(i), ["a b c d", "b c d"]) for i in range(60)]
    plan = calibrate(6.0, 1e-3, (2, 3), 3, declared_units=100)
    whole = released(plan, units)
    assert whole == released(plan, units[:17], units[17:]) and whole[2] and whole[3]
    assert whole == released(plan, units)
    assert whole != released(plan, units, seed=PrivacySeed.fixed(8))
    assert whole != released(plan, units, context=b"y")


def test_round_is_one_selection_of_the_bounded_candidates():
    """So phrases of one unit pass with the probability of the coin (test_partition_selection)."""
    units = [Unit(str(i), [f"a b c x{i % 9} y{i}"]) for i in range(60)]
    words = {word for u in units for word in u.texts[0].split()}
    plan = calibrate(6.0, 1e-3, (2, 3), 3, declared_units=100)
    key, out = SEED.derive("contribution bounding"), released(plan, units, words=words)
    for length, part_length, parts in ((2, 1, words), (3, 2, out[2])):
        sets = BoundedSets(candidates(length, part_length, parts), 3, key, 100)(units)
        context = f"x phrases of {length} words".encode()
        assert out[length] == plan.each_round.release([sets], SEED, context)


def test_more_units_than_declared_are_refused_in_one_shard_or_many():
    units = [Unit(str(i), ["a b c"]) for i in range(11)]
    plan = calibrate(6.0, 1e-3, (2, 3), 3, declared_units=10)
    for shards in ([units], [units[:6], units[6:]]):
        with pytest.raises(BadInput, match="declared bound of 10"):
            released(plan, *shards)


def test_candidate_needs_all_its_parts_released():
    parts = {"a b", "b c", "d e"}
    assert held_by(candidates(3, 2, parts), ["a b c d e", "a b x b c"]) == {"a b c"}
    assert held_by(candidates(4, 2, parts), ["a b c d e"]) == set()
    assert held_by(candidates(3, 1, {"a", "b"}), ["a b x a b a b"]) == {"a b a", "b a b"}


def test_phrases_contain_only_released_words():
    assert held_by(candidates(2, 1, {"a"}), ["a a secret a", "a a"]) == {"a a"}


ROUNDS = st.sampled_from([(1, 2), (1, 5), (2, 3), (2, 4), (2, 6), (3, 8), (4, 8)])


@given(UNITS, ROUNDS, st.integers(0, 10))
@example([Unit("u", ["a b a b a b"])], (2, 6), 1)  # fewer released parts than a phrase has
@example([Unit("u", ["a b c d e f a"])], (4, 8), 3)
def test_candidates_equal_brute_force(units, lengths, tenths):
    part_length, length = lengths
    runs = sorted(all_runs(units, part_length))
    parts = {run for i, run in enumerate(runs) if i % 10 < tenths}
    wanted = {
        phrase: count
        for phrase, count in all_runs(units, length).items()
        if all_runs([Unit("", [phrase])], part_length).keys() <= parts
    }
    sets = BoundedSets(candidates(length, part_length, parts), 100, b"k")(units)
    assert counted([sets]) == wanted


def test_round_counts_at_most_its_bound_of_phrases_per_unit():
    units = [Unit(str(i), ["a b c d e f"]) for i in range(40)]
    out = released(exact((2, 3), 2), units)
    assert sum(out[2].values()) == 80 and sum(out[3].values()) <= 80
    assert len(out[2]) == 5  # units sample with different coins


def test_later_rounds_depend_only_on_released_values():
    """A phrase that noise suppressed in one round is not part of any later candidate."""
    units = [Unit(str(i), ["a b c d"]) for i in range(60)]
    out = released(exact((2, 3), 4, 30, "c d"), units)
    assert set(out[2]) == {"a b", "b c"}
    assert set(out[3]) == {"a b c"}


def test_calibrated_plan_does_not_release_phrase_of_one_unit():
    """At δ = 1e-9 none of a thousand unique phrases is released, but the common one is."""
    plan = calibrate(4.0, 1e-9, (2, 3), 20, declared_units=1000)
    units = [Unit(str(i), [f"every one says this x{i} y{i} z{i}"]) for i in range(1000)]
    words = {word for u in units for word in u.texts[0].split()}
    out = released(plan, units, words=words)
    assert set(out[2]) == {"every one", "one says", "says this"}
    assert set(out[3]) == {"every one says", "one says this"}
    assert all(abs(n - 1000) < 150 for counts in out.values() for n in counts.values())


def test_rounds_draw_independent_noise():
    units = [Unit(str(i), ["a b a b a b"]) for i in range(900)]
    plan = calibrate(0.25, 1e-4, (2, 3, 4), 2, declared_units=1000, mechanism="gaussian")
    out = released(plan, units)
    noised = {tuple(counts.values()) for counts in out.values()}
    assert len(noised) == 3 and all(len(counts) == 2 for counts in noised)


@pytest.mark.cases
def test_charged_epsilon_is_close_to_the_target_and_not_above(
    epsilon, delta, lengths, n, mechanism
):
    plan = calibrate(epsilon, delta, tuple(lengths), n, declared_units=5000, mechanism=mechanism)
    charged = epsilon_pld(plan.event(), delta)
    assert 0.99 * epsilon <= charged <= epsilon
    # equals the composition of its rounds, each a separate selection
    event = plan.each_round.event()
    assert isinstance(event, NoisedWeights | ThresholdedHistogram)
    assert charged == pytest.approx(epsilon_pld(compose(*[event] * len(lengths)), delta), rel=1e-9)
    # and is at least the ε of the Gaussian on weights of shared phrases
    assert charged >= 0.999 * gaussian_epsilon(delta, math.sqrt(len(lengths)) * event.mu)


def test_plan_that_claims_too_much_is_refused():
    plan = calibrate(2.0, 1e-6, (2, 3), 50, declared_units=5000)
    with pytest.raises(PlanError, match=r"not 1\.9"):
        replace(plan, epsilon=1.9)
    with pytest.raises(PlanError, match="not 2"):
        replace(plan, lengths=(2, 3, 4))
    with pytest.raises(PlanError, match="1/10000000"):
        calibrate(2.0, 1e-6, (2, 3), 50, declared_units=10_000_000)


def test_target_out_of_range_is_refused():
    with pytest.raises(BadInput):
        calibrate(0.0, 1e-6, (2,), 50, declared_units=5000)


def test_event_contains_all_rounds_in_order():
    plan = calibrate(4.0, 1e-6, (3, 5), 30, unit=PrivacyUnit.PATIENT, declared_units=5000)
    event = plan.event()
    assert MechanismEvent.from_json(event.to_json()) == event
    said = event.describe()
    assert "of 3 words" in said and "of 5 words" in said and "at most 30 items" in said
    assert sum(times for _, times in event.steps()) == 2
    rho, coin = event.approximate_rdp(8.0, 1e-9)
    one_rho, one_coin = event.rounds[0].approximate_rdp(8.0, 1e-9)
    assert (rho, coin) == pytest.approx((2 * one_rho, 2 * one_coin))


def test_rounds_with_different_units_are_refused():
    same = ThresholdedHistogram(3, 9.0, 30, unit=PrivacyUnit.PATIENT)
    other = ThresholdedHistogram(3, 9.0, 30, unit=PrivacyUnit.DOCUMENT)
    for rounds, lengths in (((same, other), (2, 3)), ((same,), (2, 3)), ((), ()), ((same,), (1,))):
        with pytest.raises(BadInput):
            PhraseRounds(rounds, lengths, unit=PrivacyUnit.PATIENT)
