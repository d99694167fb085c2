"""Audit the claimed ε of a model by guessing from the model which canaries it was trained with.

The coins are derived from the release's seed. The audit throws them again only if the ledger shows
that this seed was bound to the release before the training began. The guesses, the bounds and the
verdict have the label `dp` if the model has it. The audit never writes the coins.
"""

from __future__ import annotations

from dp_core.audit.canaries import coin_seed
from dp_core.audit.one_run import Claim, CoinData
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import language_model
from dp_core.privacy.ledger import Entry
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.privacy.statement import operator_only
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import run_audits, store_findings
from tasks.protocol.measurements import AuditSpec
from tasks.releases.deployment_ledger import open_ledger
from tasks.releases.provenance import PRETRAINED, fact, model_at, rows_at
from tasks.results import SUBJECT, Input
from tasks.runtime.log import log
from tasks.steps.training_files import audit_canaries_of


def run(spec: AuditSpec, context: StepContext) -> StepOutput:
    """Score every canary, guess the coins, and compare the right guesses with the claim's bound."""
    model = model_at(context, spec.model_uri, field="model_uri", steps=PRETRAINED)
    start = model_at(context, spec.start_uri, field="start_uri", steps=PRETRAINED, vocabulary=model)
    rows = rows_at(context, spec.private_store_uri, "private", model, field="private_store_uri")
    canaries = audit_canaries_of(rows, context)
    entry, coins_of = _committed(model, context)
    data = CoinData(
        start=language_model(load_model(start.folder)),
        trained=language_model(load_model(model.folder)),
        canaries=canaries,
        claim=Claim.of_event(entry.event, entry.delta),
        seed=coins_of,
        label=Label.OPERATOR if operator_only(context.releases) else Label.DP,
    )
    findings = run_audits(spec.step, data)
    for finding in findings:
        log(f"audit: {finding.verdict}", "info" if finding.verdict == "consistent" else "warning")
    facts = {SUBJECT: fact(model, "weights_digest"), "verdict": findings[0].verdict}
    return store_findings(context, findings, facts=facts)


def _committed(model: Input, context: StepContext) -> tuple[Entry, PrivacySeed]:
    """Return the ledger's entry for the model's own training, and the seed of its coins.

    Raises:
        BadInput: the training had no canaries; or seed, model and ledger do not agree, so that the
            coins may have been chosen after the training.
    """
    recorded = fact(model, "audit")
    if recorded is None:
        raise BadInput(
            "its training held no audit canaries",
            where="model_uri",
            fix="Set audit_canaries before the training; only DP training is audited.",
        )
    if recorded["entry"] not in {release.ledger_id for release in model.result.releases}:
        raise BadInput("the audited release is none of the model's", where="model_uri")
    entry = open_ledger(context.deployment, context.store).entry(recorded["entry"])
    seed = context.seeds.get(entry.seed_key)
    coins = coin_seed(seed)
    if seed.salted_hash() != entry.seed_hash or coins.salted_hash() != recorded["coins"]:
        raise BadInput(
            "the coins are not those to which the ledger bound the training",
            where=f"ledger entry {entry.id}",
            fix="Nothing follows from them: restore seeds and ledger from one backup.",
        )
    return entry, coins
