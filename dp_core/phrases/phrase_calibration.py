"""Calibration of all rounds of a phrase release together, to one target (ε, δ).

Every round is the same partition selection. The ε of all rounds is computed by PLD, as the ledger
computes what it charges.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from dp_core.config.privacy import MechanismName
from dp_core.errors import BadInput
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.mechanisms import PhraseRounds, PrivacyUnit
from dp_core.vocabulary.mechanism_choice import selection_plan
from dp_core.vocabulary.partition_selection import PartitionSelection
from dp_core.vocabulary.vocabulary_calibration import check_target, refuse_unearned

_TRIALS = 12  # two or three do, but where noise of few values makes the charge jump
_CLOSE, _NEARLY = 0.995, 0.999  # of the target: near enough; aimed at
_OF_ROUNDS = 0.6  # of δ, for rounds taken alone: nearly all of it goes to their coins


@dataclass(frozen=True)
class PhrasePlan:
    """A phrase release in rounds: what is drawn, and the (ε, δ) that all rounds earn together.

    *Formal guarantee.* Adding or removing one unit, which in each round brings at most
    `each_round.items_per_unit` phrases: (ε, δ)-DP for all that the rounds release together.

    Attributes:
        lengths: words of a phrase in each round, rising.
        each_round: the mechanism of every round, with the (ε, δ) of one alone.
        epsilon, delta: claimed, of all rounds.

    Raises:
        PlanError: the rounds do not earn (ε, δ), or δ is not below 1/declared_units.
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
    """Return the plan with (nearly) the least noise whose rounds are charged at most ε together.

    Args:
        epsilon: target ε > 0. delta: target δ in (0, 1).
        lengths: words of a phrase in each round, rising.
        per_unit: N, the most distinct phrases of a unit that count in one round.
        unit: what is added or removed. declared_units: public upper bound on their number.
        mechanism: of every round; not `paper`, which is not calibrated.

    Raises:
        BadInput: a target out of range, or one that no noise reaches.
        PlanError: δ is not below 1/declared_units.
    """
    check_target(epsilon, delta, per_unit)
    if mechanism == "paper":
        raise BadInput("the paper's histogram is not calibrated", where="mechanism of phrases")
    return _least_noise(mechanism, epsilon, delta, lengths, per_unit, unit, declared_units)


@functools.lru_cache(maxsize=64)  # several steps of a run ask for the same plan
def _least_noise(
    mechanism: MechanismName,
    epsilon: float,
    delta: float,
    lengths: tuple[int, ...],
    per_unit: int,
    unit: PrivacyUnit | None,
    declared_units: int,
) -> PhrasePlan:
    """Return the rounds whose ε each is as large as the ε of all allows.

    What all are charged is nearly in proportion to the ε of one, so a few trials find it, and basic
    composition says below what it need not go. A round alone spends its δ on new phrases; noise
    that hides shared ones in all rounds together needs a part of it too.
    """
    rounds = len(lengths)
    share = _OF_ROUNDS / rounds if rounds > 1 else 1.0
    alone, best = epsilon / math.sqrt(rounds) if rounds > 1 else epsilon, 0.0
    chosen: PartitionSelection | None = None
    for _ in range(_TRIALS):
        one = selection_plan(
            mechanism, alone, delta * share, per_unit, unit=unit, declared_units=declared_units
        )
        charged = epsilon_pld(_rounds(one, lengths), delta)
        if best < charged <= epsilon:
            best, chosen = charged, one
        if best > _CLOSE * epsilon:
            break
        alone = max(epsilon / rounds, alone * _NEARLY * epsilon / charged)
    if chosen is None:
        raise BadInput(
            f"no noise reaches ε={epsilon:g} at δ={delta:g}",
            where="phrases_epsilon, phrases_delta",
            fix="Ask for more ε or δ, or for fewer phrases per unit.",
        )
    return PhrasePlan(lengths, chosen, epsilon, delta)


def _rounds(one: PartitionSelection, lengths: tuple[int, ...]) -> PhraseRounds:
    return PhraseRounds((one.event(),) * len(lengths), lengths, unit=one.unit)
