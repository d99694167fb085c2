"""Audit of a claim in one training run: coins, guesses, null control, and verdict.

The order of the steps makes the audit valid: the number of guesses and the significance are fixed,
the coins are thrown from a separate secret, the training reads only the included canaries, the
guesses are computed from the released model, and only then are they compared with the coins.

Audits of a job's private training use canaries that are whole privacy units: rows of random tokens
of the released vocabulary, drawn with public coins, so that a canary's place among the units is
independent of the private text. An independent secret coin decides whether the training includes a
canary, and the audit guesses the coins from the trained model alone (Steinke, Nasr and Jagielski
2023, arXiv:2305.08846). Tokens come from shuffled decks of the whole vocabulary, each token equally
often, so that the gradients of canaries overlap little.

*The guarantee to private units.* For each outcome of the coins, the included canaries are constant
and the same for neighbouring data sets D and D′. So D and D′ are still neighbours with these
canaries, and the training is (ε, δ)-DP for private units under the plan that declares private units
and all canaries together. The coins are independent of the data, so model and coins *together* are
(ε, δ)-DP for private units. A bound is a function of both, so its label is `dp` and it has no
further privacy cost. Only the operator may see the coins, for the sake of the audit alone: it is
void if the coins are published before the guesses are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.audit.canaries import Coins, throw_coins
from dp_core.audit.lower_bounds import (
    BOUNDS,
    TRADE_OFF,
    GuessOutcome,
    trade_off_p_value,
    trade_off_refuted,
)
from dp_core.audit.protocol import Audit, Finding, NullDistribution, Verdict
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.parameters import AnyModel
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.tradeoff import GaussianTradeOff, PrivacyProfile, TradeOff
from dp_core.privacy.mechanisms import MechanismEvent
from dp_core.privacy.seed_store import PrivacySeed

Indices = NDArray[np.int64]
Scores = NDArray[np.float64]
SIGNIFICANCE = 0.001  # largest probability that an audit contradicts a true claim
CONFIDENCE = 0.95  # confidence of lower bounds that is usual in the literature
NULL_REPEATS = 1000


@dataclass(frozen=True)
class Guesses:
    """The number of guesses, fixed before the training.

    Attributes:
        inside: number of canaries with the highest scores, which are guessed to be in.
        outside: number of canaries with the lowest scores, which are guessed to be out.

    Raises:
        BadInput: both numbers are 0, or a number is below 0.
    """

    inside: int
    outside: int

    def __post_init__(self) -> None:
        if min(self.inside, self.outside) < 0 or self.total == 0:
            raise BadInput(f"{self.inside} and {self.outside} guesses", where="audit guesses")

    @property
    def total(self) -> int:
        """The number of guesses r."""
        return self.inside + self.outside

    def right(self, scores: Scores, coins: Coins) -> int:
        """Return the number of right guesses.

        Args:
            scores: (m,) higher for canaries that are more likely in. Ties are broken by the
                canary's number, which must be independent of the coins.
            coins: (m,) whether each canary was included.

        Raises:
            BadInput: scores that are not finite, scores and coins of different lengths, or more
                guesses than canaries.
        """
        inside, outside = self.chosen(scores)
        if coins.shape != scores.shape:
            raise BadInput("there must be one coin for each score", where="audit scores")
        return _right(inside, outside, coins)

    def chosen(self, scores: Scores) -> tuple[Indices, Indices]:
        """Return the numbers of the canaries that are guessed to be in, and to be out."""
        if scores.ndim != 1 or not np.isfinite(scores).all():
            raise BadInput("scores must be finite, one for each canary", where="audit scores")
        if self.total > len(scores):
            raise BadInput(f"{self.total} guesses on {len(scores)} canaries", where="audit guesses")
        order = np.argsort(-scores, kind="stable")
        return order[: self.inside], order[len(order) - self.outside :]


def _right(inside: Indices, outside: Indices, coins: Coins) -> int:
    return int(coins[inside].sum() + (~coins[outside]).sum())


def null_alarms(scores: Scores, guesses: Guesses, seed: PrivacySeed) -> int:
    """Return the number of sets of coins on which the guesses contradict ε = 0.

    No training used these `NULL_REPEATS` sets. By chance a share `SIGNIFICANCE` of them alarms.

    Args:
        scores: scores of the audit.
        guesses: guesses of the audit.
        seed: seed of the audit; the fresh coins are drawn from other streams.
    """
    nothing_kept, (inside, outside) = GaussianTradeOff(0.0), guesses.chosen(scores)
    alarms, known = 0, dict[int, bool]()
    for stream in range(1, NULL_REPEATS + 1):
        right = _right(inside, outside, throw_coins(seed, len(scores), stream))
        if right not in known:
            outcome = GuessOutcome(len(scores), guesses.total, right)
            known[right] = trade_off_refuted(outcome, nothing_kept, SIGNIFICANCE)
        alarms += known[right]
    return alarms


@dataclass(frozen=True)
class Claim:
    """The claim that an audit tests.

    Attributes:
        epsilon: the stated ε at δ.
        delta: δ.
        trade_off: the whole trade-off curve, of which (ε, δ) is one point.
    """

    epsilon: float
    delta: float
    trade_off: TradeOff

    @classmethod
    def of_event(cls, event: MechanismEvent, delta: float) -> Claim:
        """Return the claim of a release: its ε at δ, and its whole privacy profile."""
        return cls(epsilon_pld(event, delta), delta, PrivacyProfile.of_event(event))


@dataclass(frozen=True)
class AuditVerdict:
    """The result of one audit of a claim.

    Attributes:
        claim: the audited claim.
        outcome: the guesses, whose number was fixed beforehand, and how many were right.
        allowed: largest number of right guesses that does not contradict the claim.
        lower_bounds: lower bounds on ε at `CONFIDENCE`, by the name of the bound.
        power: the largest ε that this audit could have refuted, by the name of the bound.
        p_value: the largest probability of as many right guesses under the claim.
        null_alarms: number of null controls that alarm, of `NULL_REPEATS`.
    """

    claim: Claim
    outcome: GuessOutcome
    allowed: int
    lower_bounds: dict[str, float]
    power: dict[str, float]
    p_value: float
    null_alarms: int

    @property
    def sound(self) -> bool:
        """Whether chance explains the null controls' alarms: their probability is above 10⁻⁶."""
        return float(stats.binom.sf(self.null_alarms - 1, NULL_REPEATS, SIGNIFICANCE)) > 1e-6

    @property
    def word(self) -> Verdict:
        """`invalid` without a sound null control; `inconclusive` if nothing could contradict."""
        if not self.sound:
            return "invalid"
        if self.outcome.right > self.allowed:
            return "contradicted"
        return "consistent" if self.allowed < self.outcome.guesses else "inconclusive"


def audit_claim(
    claim: Claim, scores: Sequence[Scores], coins: Coins, guesses: Guesses, seed: PrivacySeed
) -> AuditVerdict:
    """Compare guesses with coins, and return the verdict on a claim.

    Args:
        claim: the claim of the training.
        scores: one or several ways to score the m canaries, fixed beforehand and in an order that
            is independent of the coins. Each is tested at an equal share of both error
            probabilities. The verdict shows the smallest p-value.
        coins: (m,) whether each canary was included.
        guesses: number of guesses, fixed beforehand.
        seed: the seed of the coins, from which the coins of the null control are drawn, too.
    """
    if not scores:
        raise BadInput("an audit needs scores", where="audit scores")
    ways, m = len(scores), len(coins)
    outcomes = [GuessOutcome(m, guesses.total, guesses.right(way, coins)) for way in scores]
    best = int(np.argmax([outcome.right for outcome in outcomes]))  # smallest p-value
    outcome = outcomes[best]
    each = 1 - (1 - CONFIDENCE) / ways
    allowed = most_right(claim, m, guesses.total, SIGNIFICANCE / ways)
    # The p-value is rounded up, but not above the significance of a contradiction.
    most = SIGNIFICANCE if outcome.right > allowed else 1.0
    return AuditVerdict(
        claim,
        outcome,
        allowed,
        lower_bounds={b.name: b.epsilon(outcome, claim.delta, each) for b in BOUNDS},
        power={b.name: b.power(m, guesses.total, claim.delta, each) for b in BOUNDS},
        p_value=min(most, ways * trade_off_p_value(outcome, claim.trade_off)),
        null_alarms=null_alarms(scores[best], guesses, seed),
    )


_LEAST_SHARE, _MOST_SHARE = 0.04, 0.25  # of the canaries that are guessed to be in


def planned_guesses(canaries: int, epsilon: float) -> Guesses:
    """Return the number of canaries guessed to be in, which depends on m and the claim alone.

    It is twice the number that would refute ε if all were right, but at least 4% of the canaries
    and at most a quarter of them, because less certain guesses are worth less.
    """
    needed = math.log(SIGNIFICANCE) / -float(np.logaddexp(0.0, -epsilon))
    least, most = (max(1, round(share * canaries)) for share in (_LEAST_SHARE, _MOST_SHARE))
    return Guesses(int(min(max(2 * math.ceil(needed), least), most)), 0)


def most_right(claim: Claim, canaries: int, guesses: int, significance: float) -> int:
    """Return the largest number of right guesses that does not contradict the claim."""
    low, high = guesses // 2, guesses  # half of them are right by chance
    while low < high:
        middle = (low + high + 1) // 2
        outcome = GuessOutcome(canaries, guesses, middle)
        if trade_off_refuted(outcome, claim.trade_off, significance):
            high = middle - 1
        else:
            low = middle
    return low


def bound_finding(audit: Audit, verdict: AuditVerdict, label: Label) -> Finding:
    """Return the finding of a verdict: its value is the lower bound at 95%, the other one at 99.9%.

    The ceiling is the bound from the largest number of right guesses that does not contradict the
    whole curve of the claim. It is at most the claimed ε. A bound contradicts the claim if and only
    if it exceeds the ceiling. An audit whose null control alarms is invalid, and has no ceiling.

    Args:
        audit: the audit.
        verdict: its verdict.
        label: label of the bound, which is the label of the model (see the module's docstring).
    """
    bound, sure, claim = TRADE_OFF, 1 - SIGNIFICANCE, verdict.claim
    m, r, v = verdict.outcome.canaries, verdict.outcome.guesses, verdict.outcome.right

    def at(right: int, confidence: float = sure) -> float:
        return bound.epsilon(GuessOutcome(m, r, right), claim.delta, confidence)

    word, allowed, low, power = verdict.word, verdict.allowed, at(v), at(r)
    ceiling = at(allowed)
    if word == "contradicted":  # the bound must exceed the ceiling
        ceiling = min(ceiling, low - 1e-6)
    by_chance = int(stats.binom.isf(SIGNIFICANCE, r, 0.5))
    value = at(v, CONFIDENCE)
    said = f"{v} of {r} guesses were right: ε is at least {value:.2f}"
    could = f"{m} canaries, {r} guesses fixed beforehand: "
    findings = {
        "invalid": f"Invalid: {verdict.null_alarms} of {NULL_REPEATS} null controls alarm.",
        "contradicted": f"{said}; more than {allowed} contradict ε = {claim.epsilon:.2f}.",
        "inconclusive": f"{said}; so few guesses could contradict no such claim.",
        "consistent": f"{said}; more than {allowed} would have contradicted.",
    }
    return audit.finding(
        level="canary",
        value=value,
        interval=(low, max(power, value)),
        confidence=sure,
        ceiling=ceiling if verdict.sound else None,
        ceiling_of=f"the largest bound that does not contradict ε = {claim.epsilon:.4g} at δ ="
        f" {claim.delta:g}, the claim"
        if verdict.sound
        else "",
        power=could
        + (
            f"all right, they prove ε ≥ {power:.2f} at 99.9%; more than {allowed} right contradict"
            if allowed < r
            else "even if all are right they contradict nothing; more canaries could"
        ),
        null_control=NullDistribution(
            of=f"{NULL_REPEATS} sets of fresh coins that no training saw, of which"
            f" {verdict.null_alarms} alarm",
            low=0.0,
            high=at(by_chance),
            alarm_rate=SIGNIFICANCE,
            p_value=float(stats.binom.sf(v - 1, r, 0.5)),
        ),
        bounds_claim=True,
        verdict=word,
        finding=findings[word],
        label=label,
        metrics={
            "audit/epsilon_lower_bound": verdict.lower_bounds[bound.name],
            "audit/right_guesses": v,
            "audit/p_value": verdict.p_value,
            "audit/null_alarms": verdict.null_alarms,
        },
        public_metrics={
            "audit/power": verdict.power[bound.name],
            "audit/claimed_epsilon": claim.epsilon,
            "audit/guesses": r,
        },
    )


@dataclass(frozen=True)
class CoinData:
    """A model, and the canaries of its training, which secret coins included or left out.

    Attributes:
        start: the model before the first update.
        trained: the audited model.
        canaries: all canaries, included or not, one row each.
        claim: the claim of the training.
        seed: the seed of the coins, which the ledger bound to the training beforehand.
        label: label of the model.
    """

    start: AnyModel
    trained: AnyModel
    canaries: TokenStore
    claim: Claim
    seed: PrivacySeed
    label: Label


def _guess_coins(data: CoinData) -> list[Finding]:
    """Score every canary, guess the coins, and compare the right guesses with the claim's bound."""
    from dp_core.audit.observations import canary_scores  # imports TensorFlow

    m = data.canaries.n_units
    guesses = planned_guesses(m, data.claim.epsilon)
    scores = canary_scores(data.start, data.trained, data.canaries)
    verdict = audit_claim(data.claim, [scores], throw_coins(data.seed, m), guesses, data.seed)
    return [bound_finding(LOWER_BOUND, verdict, data.label)]


LOWER_BOUND = Audit.registered("epsilon_lower_bound", _guess_coins)
WHITE_BOX_BOUND = Audit.registered("epsilon_lower_bound_white_box")
