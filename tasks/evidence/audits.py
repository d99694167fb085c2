"""The registry of audits: steps store their findings, and evidence and gate read them.

Each audit is one entry of `AUDITS`. An audit without findings on the model is recorded as not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dp_core.audit.exposure import EXPOSURE, EXPOSURE_IN_ROWS
from dp_core.audit.extraction import DISCOVERABLE, TARGETED
from dp_core.audit.membership_sample import MEMBERSHIP
from dp_core.audit.one_run import LOWER_BOUND, WHITE_BOX_BOUND
from dp_core.audit.protocol import RELEASED, Audit, AuditRecord, Finding
from dp_core.errors import BadInput
from dp_core.labels import Label, Public
from tasks.context import StepArtifact, StepContext, StepOutput
from tasks.protocol import StepResult
from tasks.releases.provenance import operator_only
from tasks.results.findings import PROBES, SUBJECT, read_findings, write_findings
from tasks.results.inputs import TYPES, Input, read_result
from tasks.results.statements import KEPT
from tasks.storage import Store

WEIGHTS = "model.safetensors"
CONTROL = "the same training without privacy, for comparison"
AUDITS: tuple[Audit, ...] = (
    EXPOSURE,
    EXPOSURE_IN_ROWS,
    LOWER_BOUND,
    MEMBERSHIP,
    DISCOVERABLE,
    TARGETED,
    Audit(
        "from_outside",
        "Audits by given canaries and texts",
        "exposure, membership, extraction, and, if coins divided the texts, a lower bound on ε,"
        " from the model's predictions alone (docs/audits.md)",
        "privacy_audit",
        several=True,
    ),
    WHITE_BOX_BOUND,
)


def run_audits(step: str, data: Any) -> list[Finding]:
    """Return the findings of all audits of a step, in the order of the registry."""
    return [
        finding
        for audit in AUDITS
        if audit.step == step and audit.run is not None
        for finding in audit.run(data)
    ]


def store_findings(
    context: StepContext,
    findings: Sequence[Finding],
    *,
    facts: dict[str, Any],
    artifacts: Sequence[StepArtifact] = (),
) -> StepOutput:
    """Record the findings' metrics, and write the findings in one file for each audience.

    Args:
        context: the context of the step.
        findings: findings of all audits of the step.
        facts: facts of the output; `SUBJECT` is the digest of the audited weights.
        artifacts: further files that the step wrote, named after their output.
    """
    for finding in findings:
        for name, value in finding.public_metrics.items():
            context.measure(name, Public(value))
        for name, value in finding.metrics.items():
            context.measure(name, TYPES[finding.label](value), finding.updates)
    written = write_findings(context.out, findings)
    shown = [*(StepArtifact(file, label) for file, label in written.items()), *artifacts]
    outputs = {each.file.removesuffix(".json"): each.file for each in shown}
    return StepOutput(outputs, facts, shown)


def audits_of(
    store: Store, subjects: dict[str, str], *, operator: bool = False
) -> tuple[AuditRecord, ...]:
    """Return the records of all audits, including those that were not run.

    Args:
        store: the store with the results of the audit steps.
        subjects: SHA-256 of the weights -> the model in words, for the released model and the
            models from which it was made.
        operator: whether to include values for the operator only, and the audits of models
            trained without privacy, which show the results for a model that remembers.
    """
    records: list[AuditRecord] = []
    for audit in AUDITS:
        run = [
            finding.model_copy(update={"subject": subject}).record
            for output, subject in _outputs(store, audit, subjects, operator)
            for finding in read_findings(output.result, output.folder)
            if finding.subject == RELEASED and audit.covers(finding)
        ]
        # Records that block promotion are published even if they were computed from private text.
        shown = [
            record
            for record in run
            if operator
            or record.label is not Label.OPERATOR
            or (record.blocks_promotion and record.subject != CONTROL)
        ]
        if run and not shown:
            why = "It was run on private text; its results are for the operator only."
        elif audit.step:
            why = "No audit step measured it for this model or for a model it was made from."
        else:
            why = "No step of this version measures it."
        records += shown or [audit.not_run(why).record]
    return tuple(records)


def subjects_of(store: Store, uri: str, result: StepResult) -> dict[str, str]:
    """Return the models of a training step by the SHA-256 of their weights, in words.

    They are the last model, the models saved during the training, which the same claim covers, and
    the model from which it was fine-tuned.
    """
    subjects = {
        digest: "the released model"
        if name == WEIGHTS
        else f"the model after {name.split('/')[1]} updates of its training"
        for name, digest in store.digests(uri).items()
        if name == WEIGHTS or (name.startswith(f"{KEPT}/") and name.endswith(f"/{WEIGHTS}"))
    }
    if began_with := result.facts.get("began_with"):
        subjects[began_with] = "the model from which it was fine-tuned"
    return subjects


def _outputs(
    store: Store, audit: Audit, subjects: dict[str, str], operator: bool
) -> list[tuple[Input, str]]:
    """Return the outputs of an audit's step with their subjects, for the operator also controls."""
    outputs, controls = [], []
    for uri in store.outputs(audit.step) if audit.step else ():
        try:
            result = read_result(store, uri)
        except BadInput:  # an output of another version, which audits no model of this version
            continue
        if result is None:
            continue
        if subject := subjects.get(str(result.facts.get(SUBJECT) or "-")):
            outputs.append((Input(result, store.local_copy(uri)), subject))
        elif operator and operator_only(result.releases) and not result.facts.get("model_updates"):
            controls.append((Input(result, store.local_copy(uri)), CONTROL))
    probes = {output.facts.get(PROBES) for output, _ in outputs} - {None}
    return outputs + [each for each in controls if each[0].facts.get(PROBES) in probes]
