"""Calibration of all rounds of a phrase release together to one target (ε, δ).

Every round is the same partition selection. The ε of all rounds is computed by PLD, like the
ledger's charge.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from dp_core.config.privacy import MechanismName
from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.mechanisms import PhraseRounds, PrivacyUnit
from dp_core.vocabulary.partition_selection import PartitionSelection, refuse_unearned
from dp_core.vocabulary.selection_calibration import check_target, selection_plan

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


def calibrate(
    epsilon: float,
    delta: float,
    lengths: tuple[int, ...],
    per_unit: int,
    *,
    unit: PrivacyUnit | None = None,
    declared_units: int,
    mechanism: MechanismName = "elimination",
) -> PhrasePlan:
    """Return the plan with approximately the least noise at which all rounds cost at most ε.

    Args:
        epsilon: target ε > 0. delta: target δ in (0, 1).
        lengths: words of a phrase in each round, increasing.
        per_unit: N, the largest number of distinct phrases of a unit that count in one round.
        unit: the unit that is added or removed. declared_units: public upper bound on the number
            of units.
        mechanism: the mechanism of every round; not `paper`, which is not calibrated.

    Raises:
        BadInput: a target is out of range, or no noise reaches it.
        PlanError: δ is not below 1/declared_units.
    """
    check_target(epsilon, delta, per_unit)
    if mechanism == "paper":
        raise BadInput("the paper's histogram is not calibrated", where="mechanism of phrases")
    return _least_noise(mechanism, epsilon, delta, lengths, per_unit, unit, declared_units)


@functools.lru_cache(maxsize=64)  # several steps of a run need the same plan
def _least_noise(
    mechanism: MechanismName,
    epsilon: float,
    delta: float,
    lengths: tuple[int, ...],
    per_unit: int,
    unit: PrivacyUnit | None,
    declared_units: int,
) -> PhrasePlan:
    """Return rounds whose ε is as large as the ε of all rounds permits.

    The charge of all rounds is nearly proportional to the ε of one, so a few trials find it. Basic
    composition bounds the ε of one from below. A single round spends its δ on new phrases; noise
    that hides shared phrases in all rounds together needs a part of δ too.
    """
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
