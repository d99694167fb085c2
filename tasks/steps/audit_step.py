"""Audit the claimed ε of a model by guessing from the model which canaries it was trained with.

The coins are derived from the release's seed. The audit throws them again only if the ledger shows
that this seed was bound to the release before the training began. The guesses, the bounds and the
verdict have the label `dp` if the model has it. The audit never writes the coins.
"""

from __future__ import annotations

import json

from dp_core.audit.canaries import coin_seed, throw_coins
from dp_core.audit.observations import canary_scores
from dp_core.audit.one_run import Claim, audit_claim, audit_record, planned_guesses
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Operator, Public
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import language_model
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.ledger import Entry
from dp_core.privacy.seed_store import PrivacySeed
from tasks.context import StepArtifact, StepContext, StepOutput
from tasks.evidence.audits import LOWER_BOUND, SUBJECT
from tasks.protocol import AuditSpec
from tasks.releases.deployment_ledger import open_ledger
from tasks.releases.provenance import PRETRAINED, fact, model_at, operator_only, rows_at
from tasks.report.job_results import AUDIT_FILE
from tasks.results import Input
from tasks.runtime.log import log
from tasks.steps.training_inputs import audit_canaries_of


def run(spec: AuditSpec, context: StepContext) -> StepOutput:
    """Score every canary, guess the coins, and compare the right guesses with the claim's bound."""
    model = model_at(context, spec.model_uri, field="model_uri", steps=PRETRAINED)
    start = model_at(context, spec.start_uri, field="start_uri", steps=PRETRAINED, vocabulary=model)
    rows = rows_at(context, spec.private_store_uri, "private", model, field="private_store_uri")
    canaries = audit_canaries_of(rows, context)
    entry, coins_of = _committed(model, context)
    claim = Claim(
        epsilon_pld(entry.event, entry.delta), entry.delta, PrivacyProfile.of_event(entry.event)
    )
    guesses = planned_guesses(canaries.n_units, claim.epsilon)
    scores = canary_scores(
        language_model(load_model(start.folder)), language_model(load_model(model.folder)), canaries
    )
    coins = throw_coins(coins_of, canaries.n_units)
    verdict = audit_claim(claim, [scores], coins, guesses, coins_of)
    label = Operator if operator_only(context.releases) else Dp
    shown = Label(label.label)
    names = {"key": LOWER_BOUND.key, "name": LOWER_BOUND.name, "measured": LOWER_BOUND.measured}
    record = audit_record(verdict, claim, shown, **names)
    context.measure("audit/epsilon_lower_bound", label(verdict.lower_bounds["trade-off"]))
    context.measure("audit/power", Public(verdict.power["trade-off"]))
    context.measure("audit/claimed_epsilon", Public(claim.epsilon))
    context.measure("audit/guesses", Public(guesses.total))
    context.measure("audit/right_guesses", label(verdict.right))
    context.measure("audit/p_value", label(verdict.p_value))
    context.measure("audit/null_alarms", label(verdict.null.alarms))
    log(f"audit: {record.verdict}", "info" if record.verdict == "consistent" else "warning")
    (context.out / AUDIT_FILE).write_text(json.dumps([record.model_dump(mode="json")], indent=1))
    return StepOutput(
        outputs={"audit": AUDIT_FILE},
        facts={SUBJECT: fact(model, "weights_digest"), "verdict": record.verdict},
        artifacts=[StepArtifact(AUDIT_FILE, shown)],
    )


def _committed(model: Input, context: StepContext) -> tuple[Entry, PrivacySeed]:
    """Return the ledger's entry for the model's own training, and the seed of its coins.

    Raises:
        BadInput: the training had no canaries; or seed, model and ledger do not agree, so that the
            coins may have been chosen after the training.
    """
    told = fact(model, "audit")
    if told is None:
        raise BadInput(
            "its training held no audit canaries",
            where="model_uri",
            fix="Set audit_canaries before the training; only DP training is audited.",
        )
    if told["entry"] not in {release.ledger_id for release in model.result.releases}:
        raise BadInput("the audited release is none of the model's", where="model_uri")
    entry = open_ledger(context.deployment, context.store).entry(told["entry"])
    seed = context.seeds.get(entry.seed_key)
    coins = coin_seed(seed)
    if seed.salted_hash() != entry.seed_hash or coins.salted_hash() != told["coins"]:
        raise BadInput(
            "the coins are not those to which the ledger bound the training",
            where=f"ledger entry {entry.id}",
            fix="Nothing follows from them: restore seeds and ledger from one backup.",
        )
    return entry, coins
