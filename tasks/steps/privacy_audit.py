"""Audit one model from outside, by canaries and texts that somebody gives: for the operator."""

from __future__ import annotations

import json

from dp_core.audit import black_box
from dp_core.errors import BadInput
from dp_core.labels import Label, Operator
from dp_core.privacy.accounting import PrivacyProfile
from tasks.evidence.gate import profile_of
from tasks.protocol import PrivacyAuditSpec, StepResult
from tasks.releases.declarations import Opened, open_for_operator, refuse_other_digests
from tasks.releases.provenance import MODELS
from tasks.runtime.context import Artifact, StepContext, StepOutput

RECORDS = "audits.json"


def run(spec: PrivacyAuditSpec, context: StepContext) -> StepOutput:
    """Write the records of exposure and membership; everything is read off private text."""
    opened = _opened(spec, context)
    ceiling: PrivacyProfile | None = None
    if spec.model_uri:
        model = context.input(spec.model_uri)
        if model.result.step not in MODELS:
            raise BadInput("not a model", where="audited_model", fix="Give a training's output.")
        if spec.given_epsilon:
            raise BadInput("the model says itself what it claims", where="given_epsilon")
        folder, ceiling = model.folder, profile_of(model.result.releases)
    else:
        folder = opened["audited_model"].path
        if spec.given_epsilon:
            ceiling = PrivacyProfile.of_claim(spec.given_epsilon, spec.given_delta)
    audited, records = black_box.open_model(folder), []
    if spec.given_canaries:
        lines = black_box.lines_of(opened["given_canaries"].path, "given_canaries")
        records.append(black_box.canary_exposure(audited, lines))
    if spec.given_members:
        texts = [
            black_box.lines_of(opened[name].path, name)
            for name in ("given_members", "given_held_out")
        ]
        records += black_box.membership_records(
            audited, texts[0], texts[1], ceiling, masks=spec.given_masks, seed=spec.seed
        )
    for record in records:
        if record.value is not None:
            context.measure(record.key, Operator(record.value))
    told = [record.model_dump(mode="json") for record in records]
    (context.out / RECORDS).write_text(json.dumps(told, indent=1, ensure_ascii=False))
    return StepOutput(
        outputs={"audits": RECORDS},
        facts={"source_digests": [one.digest for one in opened.values()]},
        artifacts=[Artifact(RECORDS, Label.OPERATOR)],
    )


def refuse_if_changed(spec: PrivacyAuditSpec, result: StepResult, context: StepContext) -> None:
    """Refuse to answer with what was found in files that have changed since.

    Raises:
        BadInput: they have.
    """
    now = [one.digest for one in _opened(spec, context).values()]
    refuse_other_digests(spec, now, result.facts["source_digests"], spec.data_version)


def _opened(spec: PrivacyAuditSpec, context: StepContext) -> dict[str, Opened]:
    return {source.field: open_for_operator(source, context) for source in spec.sources}
