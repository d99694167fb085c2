"""Differentially private n-gram extraction in rounds (DPNE: Kim et al. 2021, arXiv:2108.02831).

A phrase is a run of n words of one text, in BERT's word segmentation (punctuation marks are words).
In the first round every word of a candidate must be known from an earlier release. In each later
round every shorter phrase within a candidate must have been released in the previous round. The
set of candidates is therefore a function of released values.

A round is a partition selection (`dp_core.vocabulary.partition_selection`) whose items are the
candidates. A unit contributes at most N of them, sampled by the unit's coins.

*Theorem.* Given the outputs of the earlier rounds, a unit's items are a function of that unit only.
For any such outputs, the privacy loss of a round is therefore dominated by the loss of its
mechanism, and all rounds together are dominated by the composition (adaptive composition of
dominating pairs: Zhu, Dong and Wang 2022, arXiv:2106.08567, Theorem 10). `calibrate` computes the ε
of all rounds by PLD, like the ledger's charge.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dp_core.data.privacy_units import UnitTexts
from dp_core.data.tokens import HeldItems, WordCodes, encode_bert_words, held_once
from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.mechanisms import PhraseRounds, PrivacyUnit
from dp_core.vocabulary.item_sets import BoundedSets, GatheredSets, ItemSets
from dp_core.vocabulary.partition_selection import PartitionSelection, refuse_unearned
from dp_core.vocabulary.selection_calibration import check_target, selection_plan

if TYPE_CHECKING:
    from dp_core.privacy.seed_store import PrivacySeed

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Counts = Mapping[str, int]  # phrase (words joined by spaces) -> estimated number of its units


@dataclass(frozen=True)
class Candidates:
    """The candidates of a round: phrases whose parts were all released before.

    Attributes:
        length: words of a phrase.
        part_length: words of a part: 1 in the first round, else the length of the previous round.
        parts: released (or public) parts.
        read: yields the units of a shard with their texts, in blocks of whole units.
    """

    length: int
    part_length: int
    parts: Collection[str]
    read: Callable[[Any], Iterable[UnitTexts]]

    def __call__(self, shard: Any) -> Iterator[HeldItems]:
        """Yield the distinct candidates of the shard's units."""
        return map(self.held, self.read(shard))

    def held(self, block: UnitTexts) -> HeldItems:
        """Return the distinct candidates of each of many units."""
        words = encode_bert_words(block.texts)
        ends = np.repeat(words.starts[1:], np.diff(words.starts))  # end of the text of each word
        begins = np.flatnonzero(self._released_parts(words, ends))
        inner = self.length - self.part_length + 1  # parts within a phrase
        # A candidate has `inner` parts at consecutive words. The first and the last of them are
        # `inner` − 1 apart exactly if all parts between them are present.
        last = min(inner - 1, len(begins))  # a block may hold fewer released parts
        in_a_row = begins[last:] - begins[: len(begins) - last] == last
        begins = begins[: len(begins) - last][in_a_row]
        begins = begins[begins + self.length <= ends[begins]]  # and within one text
        numbers, phrases = _numbered(words, begins, self.length)
        owners = np.searchsorted(words.starts[block.rows], begins, "right") - 1
        return held_once(block.unit_ids, phrases, owners, numbers)

    def _released_parts(self, words: WordCodes, ends: Ints) -> Flags:
        """Return whether a released part begins at each word."""
        number = {word: i for i, word in enumerate(words.words.to_pylist())}
        spelled = [part.split(" ") for part in self.parts]
        parts = [[number[w] for w in part] for part in spelled if number.keys() >= set(part)]
        flags = np.zeros(len(words.codes), np.bool_)
        if not parts:
            return flags
        places = np.flatnonzero(np.arange(len(ends)) + self.part_length <= ends)
        # Extend word by word: number the prefixes of the parts, and match them in the text.
        table = np.array(parts, np.int64)
        beginnings, here = np.zeros(len(parts), np.int64), np.zeros(len(places), np.int64)
        for k in range(self.part_length):
            known_pairs = beginnings * len(number) + table[:, k]
            distinct, beginnings = np.unique(known_pairs, return_inverse=True)
            pairs = here * len(number) + words.codes[places + k]
            positions = np.searchsorted(distinct, pairs)
            there = distinct[np.minimum(positions, len(distinct) - 1)] == pairs
            places, here = places[there], positions[there]
        flags[places] = True
        return flags


def _numbered(words: WordCodes, begins: Ints, length: int) -> tuple[Ints, pa.Array]:
    """Return the number of the phrase that begins at each word, and the distinct phrases."""
    numbers, first = words.codes[begins], np.arange(len(begins))
    for k in range(1, length):
        pairs = numbers * max(1, len(words.words)) + words.codes[begins + k]
        _, first, numbers = np.unique(pairs, return_index=True, return_inverse=True)
    columns = [words.words.take(pa.array(words.codes[begins[first] + k])) for k in range(length)]
    return numbers, pc.binary_join_element_wise(*columns, pa.scalar(" ", pa.large_string()))


def release_phrases(
    gather: Callable[[BoundedSets], GatheredSets | Iterable[ItemSets]],
    read: Callable[[Any], Iterable[UnitTexts]],
    plan: PhrasePlan,
    words: Collection[str],
    seed: PrivacySeed,
    context: bytes,
) -> dict[int, dict[str, int]]:
    """Return the released phrases of each round by length, with estimates of their unit counts.

    Only this result is released; `plan` states its privacy. The same seed and context give the same
    noise, so a retry of the same release reveals nothing more.

    Args:
        gather: returns the sets of every shard, for any division into shards that contains each
            unit once. It is called in every round with the function of a shard of that round.
        read: yields the units of a shard with their texts, in blocks of whole units.
        plan: rounds and their mechanism.
        words: words that phrases may contain; released or public. They must not come from
            private text in any other way.
        seed: the privacy seed of this reservation.
        context: digest of data and plan, to which the noise is bound.

    Raises:
        BadInput: more units than declared. (The message does not state their private number.)
    """
    key = seed.derive("contribution bounding")
    each = plan.each_round
    released: dict[int, dict[str, int]] = {}
    parts, part_length = words, 1
    for length in plan.lengths:
        candidates = Candidates(length, part_length, parts, read)
        sets = gather(BoundedSets(candidates, each.items_per_unit, key, each.declared_units))
        round_context = context + f" phrases of {length} words".encode()
        released[length] = each.release(sets, seed, round_context)
        parts, part_length = released[length], length
    return released


# --- calibration of all rounds together

_TRIALS = 12  # usually two or three suffice, but few noise values make the charge jump
_CLOSE, _NEARLY = 0.995, 0.999  # shares of the target: accepted; aimed at
_OF_ROUNDS = 0.6  # share of δ for the separate rounds, which they spend mostly on their coins


@dataclass(frozen=True)
class PhrasePlan:
    """A phrase release in rounds: the mechanism, and the (ε, δ) that it provides for all rounds.

    *Formal guarantee.* The joint output of all rounds is (ε, δ)-DP for adding or removing one unit,
    which contributes at most `each_round.items_per_unit` phrases to each round.

    Attributes:
        lengths: words of a phrase in each round, increasing.
        each_round: the mechanism of every round, with the (ε, δ) of a single round.
        epsilon, delta: claimed for all rounds together.

    Raises:
        PlanError: the rounds do not provide (ε, δ), or δ is not below 1/declared_units.
    """

    lengths: tuple[int, ...]
    each_round: PartitionSelection
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        refuse_unearned(self.event(), self.epsilon, self.delta, self.each_round.declared_units)

    def event(self) -> PhraseRounds:
        """Return all rounds as one mechanism, for the ledger."""
        return _rounds(self.each_round, self.lengths)


@functools.lru_cache(maxsize=64)  # several steps of a run need the same plan
def calibrate(
    epsilon: float,
    delta: float,
    lengths: tuple[int, ...],
    per_unit: int,
    *,
    unit: PrivacyUnit | None = None,
    declared_units: int,
    mechanism: Literal["elimination", "gaussian"] = "elimination",
) -> PhrasePlan:
    """Return the plan with approximately the least noise at which all rounds cost at most ε.

    Args:
        epsilon: target ε > 0. delta: target δ in (0, 1).
        lengths: words of a phrase in each round, increasing.
        per_unit: N, the largest number of distinct phrases of a unit that count in one round.
        unit: the unit that is added or removed. declared_units: public upper bound on the number
            of units.
        mechanism: the mechanism of every round.

    Raises:
        BadInput: a target is out of range, or no noise reaches it.
        PlanError: δ is not below 1/declared_units.
    """
    check_target(epsilon, delta, per_unit)
    # The charge of all rounds is nearly proportional to the ε of one, so a few trials find it.
    # Basic composition bounds the ε of one from below. A single round spends its δ on new phrases;
    # noise that hides shared phrases in all rounds together needs a part of δ too.
    rounds = len(lengths)
    share = _OF_ROUNDS / rounds if rounds > 1 else 1.0
    alone, best = epsilon / math.sqrt(rounds) if rounds > 1 else epsilon, 0.0
    chosen: PartitionSelection | None = None
    for _ in range(_TRIALS):
        selection = selection_plan(
            mechanism, alone, delta * share, per_unit, unit=unit, declared_units=declared_units
        )
        charged = epsilon_pld(_rounds(selection, lengths), delta)
        if best < charged <= epsilon:
            best, chosen = charged, selection
        if best > _CLOSE * epsilon:
            break
        alone = max(epsilon / rounds, alone * _NEARLY * epsilon / charged)
    if chosen is None:
        raise BadInput(
            f"no noise reaches ε={epsilon:g} at δ={delta:g}",
            where="phrases_epsilon, phrases_delta",
            fix="Choose a larger ε or δ, or fewer phrases per unit.",
        )
    return PhrasePlan(lengths, chosen, epsilon, delta)


def _rounds(selection: PartitionSelection, lengths: tuple[int, ...]) -> PhraseRounds:
    return PhraseRounds((selection.event(),) * len(lengths), lengths, unit=selection.unit)
