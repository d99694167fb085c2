"""Whole-unit canaries in a job's private training, and the lower bound on ε from its model.

A canary is a whole privacy unit: one row of random tokens of the released vocabulary, drawn with
public coins, so that its place among the units is independent of the private text. An independent
secret coin decides whether the training includes it (`dp_core.audit.coins`), and the audit guesses
the coins from the trained model alone (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846). The
score of a canary is the decrease of its loss since the model before the first update. To first
order this is the inner product of the change of the weights with the canary's gradient, which a
white-box audit reads from the noised sums (Nasr et al. 2023, arXiv:2302.07956). Tokens come from
shuffled decks of the whole vocabulary, each token equally often, so that the gradients of canaries
overlap little.

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
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from scipy import stats

from dp_core.audit.canaries import UNIT_TOKENS
from dp_core.audit.lower_bounds import GuessOutcome, TradeOffBound, trade_off_refuted
from dp_core.audit.one_run import SIGNIFICANCE, AuditVerdict, Claim, Guesses, Scores
from dp_core.audit.record import AuditRecord, NullDistribution
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import AnyModel
from dp_core.nn import Layers, Tensor
from dp_core.training.objectives import causal_examples, objective_for

_LEAST_SHARE, _MOST_SHARE = 0.04, 0.25  # of the canaries that are guessed to be in
_ROWS_AT_ONCE = 256


def planned_guesses(canaries: int, epsilon: float) -> Guesses:
    """Return the number of canaries guessed to be in, which depends on m and the claim alone.

    It is twice the number that would refute ε if all were right, but at least 4% of the canaries
    and at most a quarter of them, because less certain guesses are worth less.
    """
    needed = math.log(SIGNIFICANCE) / -float(np.logaddexp(0.0, -epsilon))
    least, most = (max(1, round(share * canaries)) for share in (_LEAST_SHARE, _MOST_SHARE))
    return Guesses(int(min(max(2 * math.ceil(needed), least), most)), 0)


def canary_scores(start: AnyModel, trained: AnyModel, canaries: TokenStore) -> Scores:
    """Return the decrease of each canary's loss due to the training, in nats, (m,).

    Args:
        start: the model before the first update.
        trained: the audited model.
        canaries: all canaries, included or not, one row each.

    Raises:
        BadInput: a model's losses are not finite.
    """
    scores = _losses(start, canaries) - _losses(trained, canaries)
    if not np.isfinite(scores).all():
        raise BadInput("a model's losses are not finite", where="audit")
    return scores


def _losses(model: AnyModel, canaries: TokenStore) -> Scores:
    """Return the summed loss of each canary, (m,), with one token masked or predicted at a time."""
    row_losses, found = _row_losses(model), np.zeros(canaries.n_rows)
    for first in range(0, canaries.n_rows, _ROWS_AT_ONCE):
        numbers = np.arange(first, first + _ROWS_AT_ONCE) % canaries.n_rows  # batches of one shape
        total = np.zeros(_ROWS_AT_ONCE)
        for made in _asked(model, canaries, numbers):
            arrays = (made.input_ids, canaries.lengths[numbers], made.positions, made.labels)
            means = row_losses(*map(tf.constant, (*arrays, made.weights))).numpy()
            total += means.astype(np.float64) * made.weights.sum(1)
        found[first : first + _ROWS_AT_ONCE] = total[: canaries.n_rows - first]
    return found


def _asked(model: AnyModel, canaries: TokenStore, numbers: NDArray[np.int64]) -> list[MaskedRows]:
    """Return the predictions to make for each canary, one pass for each masked token."""
    if isinstance(model.config, CausalConfig):
        return [causal_examples(canaries, numbers, np.zeros(len(numbers), np.uint64))]
    ids, mask = canaries.tokens[numbers].astype(np.int32), SpecialIds().mask
    passes = []
    for place in range(1, 1 + UNIT_TOKENS):
        hidden = ids.copy()
        hidden[:, place] = mask
        positions = np.full((len(ids), 1), place, np.int32)
        weights = np.ones((len(ids), 1), np.float32)
        passes.append(MaskedRows(hidden, positions, ids[:, place : place + 1], weights))
    return passes


def _row_losses(model: AnyModel) -> Callable[..., Tensor]:
    layers = Layers({name: tf.constant(array) for name, array in model.parameters.items()})
    losses = objective_for(model.config).row_losses

    def compute(*arrays: Tensor) -> Tensor:
        return losses(layers, model.config, *arrays)

    compiled: Callable[..., Tensor] = tf.function(compute, autograph=False)
    return compiled


def most_right(claim: Claim, canaries: int, guesses: int) -> int:
    """Return the largest number of right guesses that does not contradict the claim."""
    low, high = guesses // 2, guesses  # half of them are right by chance
    while low < high:
        middle = (low + high + 1) // 2
        outcome = GuessOutcome(canaries, guesses, middle)
        if trade_off_refuted(outcome, claim.trade_off, SIGNIFICANCE):
            high = middle - 1
        else:
            low = middle
    return low


def audit_record(verdict: AuditVerdict, claim: Claim, label: Label, **names: str) -> AuditRecord:
    """Return the record of a verdict: its value is the lower bound at 95%, its interval at 99.9%.

    The ceiling is the bound from the largest number of right guesses that does not contradict the
    whole curve of the claim. It is at most the claimed ε. A bound contradicts the claim if and only
    if it exceeds the ceiling. An audit whose null control alarms is invalid, and has no ceiling.

    Args:
        verdict: verdict of the audit.
        claim: the audited claim.
        label: label of the bound, which is the label of the model (see the module's docstring).
        names: `key`, `name` and `measured` of the record.
    """
    bound, sure = TradeOffBound(), 1 - SIGNIFICANCE
    m, r = verdict.canaries, verdict.guesses

    def at(right: int, confidence: float = sure) -> float:
        return bound.epsilon(GuessOutcome(m, r, right), claim.delta, confidence)

    allowed, low, power = most_right(claim, m, r), at(verdict.right), at(r)
    ceiling: float | None = at(allowed)
    if verdict.contradicted:  # the bound must exceed the ceiling
        ceiling = min(at(allowed), low - 1e-6)
    by_chance = int(stats.binom.isf(SIGNIFICANCE, r, 0.5))
    value = at(verdict.right, verdict.confidence)
    said = f"{verdict.right} of {r} guesses were right: ε is at least {value:.2f}"
    could = f"{m} canaries, {r} guesses fixed beforehand: "
    if not verdict.null.sound:
        word, ceiling = "invalid", None
        finding = f"Invalid: {verdict.null.alarms} of {verdict.null.repeats} null controls alarm."
    elif verdict.contradicted:
        word = "contradicted"
        finding = f"{said}; more than {allowed} contradict ε = {claim.epsilon:.2f}."
    elif allowed == r:
        word, finding = "inconclusive", f"{said}; so few guesses could contradict no such claim."
    else:
        word, finding = "consistent", f"{said}; more than {allowed} would have contradicted."
    return AuditRecord(
        level="canary",
        value=value,
        interval=(low, max(power, value)),
        confidence=sure,
        ceiling=ceiling,
        ceiling_of=f"the largest bound that does not contradict ε = {claim.epsilon:.4g} at δ ="
        f" {claim.delta:g}, the claim"
        if ceiling is not None
        else "",
        power=could
        + (
            f"all right, they prove ε ≥ {power:.2f} at 99.9%; more than {allowed} right contradict"
            if allowed < r
            else "even if all are right they contradict nothing; more canaries could"
        ),
        null_control=NullDistribution(
            of=f"{verdict.null.repeats} sets of fresh coins that no training saw, of which"
            f" {verdict.null.alarms} alarm",
            low=0.0,
            high=at(by_chance),
            alarm_rate=SIGNIFICANCE,
            p_value=float(stats.binom.sf(verdict.right - 1, r, 0.5)),
        ),
        bounds_claim=True,
        verdict=word,
        finding=finding,
        label=label,
        **names,
    )
