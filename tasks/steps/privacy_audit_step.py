"""Audit one model from outside, by canaries and texts that the operator provides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dp_core.audit import black_box
from dp_core.audit.protocol import AuditRecord, verdict_of
from dp_core.errors import BadInput
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import JUDGED, WEIGHTS, claim_of, judge, profile_of, store_findings
from tasks.protocol.specs import PrivacyAuditSpec
from tasks.releases.declarations import open_for_operator
from tasks.releases.provenance import MODELS, find_origin
from tasks.results import SUBJECT, Input
from tasks.storage.store import sha256_of

AUDITED = "audited_model"  # the name of the audited model among the models of a run


def run(spec: PrivacyAuditSpec, context: StepContext) -> StepOutput:
    """Write the records of all findings, and withdraw a model whose promotion they block.

    All findings are computed from private text, and are for the operator. A model of this
    deployment is recognised by its weights, even as a copy; its own claim is then audited.
    """
    opened = {source.field: open_for_operator(source, context) for source in spec.sources}
    uri = spec.model_uri
    folder = context.input(uri).folder if uri else opened["audited_model"].path
    uri = uri or find_origin(context.store, folder) or ""
    model = context.input(uri) if uri else None
    ceiling: PrivacyProfile | None = None
    if model is not None:
        if model.result.step not in MODELS:
            raise BadInput("not a model", where="audited_model", fix="Give a training's output.")
        if spec.given_epsilon:
            raise BadInput("the model says itself what it claims", where="given_epsilon")
        ceiling = profile_of(model.result.releases)
    elif spec.given_epsilon:
        ceiling = PrivacyProfile.of_claim(spec.given_epsilon, spec.given_delta)
    files = {name.removeprefix("given_"): source.path for name, source in opened.items()}
    files.pop(AUDITED, None)
    findings = black_box.audit_files(folder, files, "given_{}".format, ceiling, spec)
    weights = sha256_of(folder / WEIGHTS) if (folder / WEIGHTS).exists() else ""
    facts = {SUBJECT: weights, JUDGED: _blocked(context, model, findings)}
    return store_findings(context, findings, facts=facts)


def _blocked(
    context: StepContext, model: Input | None, records: Sequence[AuditRecord]
) -> list[dict[str, Any]]:
    """Return the verdict on a model whose promotion these records block; otherwise nothing.

    Other records are not judged here, because an audit from outside never promotes a model.
    """
    if not any(record.blocks_promotion for record in records):
        return []
    if model is not None and model.result.facts.get("model"):
        return judge(context.store, {AUDITED: model}, "approved", records)
    claim = claim_of(model.result.releases) if model is not None else "the claim, as given"
    verdict = verdict_of(claim, records)
    return [{"name": AUDITED, "model": "", "verdict": verdict.word, "sentence": verdict.sentence}]
