"""The registry of audits, the findings of their steps, and the gate that judges models by them.

Each audit is one entry of `AUDITS`. Steps store its findings, and evidence packs and the gate read
them. An audit without findings on the model is recorded as not run. A verdict decides on a model's
registration and promotion. It uses all records of the model's weights, from audits of any run,
including records for the operator only.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dp_core.audit import protocol
from dp_core.audit.exposure import EXPOSURE, EXPOSURE_IN_ROWS
from dp_core.audit.extraction import DISCOVERABLE, TARGETED
from dp_core.audit.membership_sample import MEMBERSHIP
from dp_core.audit.one_run import LOWER_BOUND, WHITE_BOX_BOUND
from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput
from dp_core.labels import Label, Public
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import operator_only, privacy_statement, totals
from tasks import results
from tasks.context import StepContext, StepOutput
from tasks.protocol.messages import StepResult
from tasks.protocol.settings_file import Promotion
from tasks.storage.store import Store
from tasks.tracking.event_log import VERDICT

WEIGHTS = "model.safetensors"
CONTROL = "the same training without privacy, for comparison"
AUDITS: tuple[protocol.Audit, ...] = (
    EXPOSURE,
    EXPOSURE_IN_ROWS,
    LOWER_BOUND,
    MEMBERSHIP,
    DISCOVERABLE,
    TARGETED,
    protocol.Audit.registered("from_outside"),
    WHITE_BOX_BOUND,
)


def run_audits(step: str, data: Any) -> list[protocol.Finding]:
    """Return the findings of all audits of a step, in the order of the registry."""
    return [
        finding
        for audit in AUDITS
        if audit.step == step and audit.run is not None
        for finding in audit.run(data)
    ]


def store_findings(
    context: StepContext,
    findings: Sequence[protocol.Finding],
    *,
    facts: dict[str, Any],
    artifacts: Mapping[str, Label] = MappingProxyType({}),
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
            context.measure(name, results.TYPES[finding.label](value), finding.updates)
    written = results.write_findings(context.out, findings)
    shown = {**written, **artifacts}
    return StepOutput({file.removesuffix(".json"): file for file in shown}, facts, shown)


def audits_of(
    store: Store, subjects: dict[str, str], *, operator: bool = False
) -> tuple[protocol.AuditRecord, ...]:
    """Return the records of all audits, including those that were not run.

    Args:
        store: the store with the results of the audit steps.
        subjects: SHA-256 of the weights -> the model in words, for the released model and the
            models from which it was made.
        operator: whether to include values for the operator only, and the audits of models
            trained without privacy, which show the results for a model that remembers.

    Raises:
        BadInput: no registered audit covers a finding on one of the models.
    """
    steps = {audit.step for audit in AUDITS if audit.step}
    findings = {step: _findings_of(store, step, subjects, operator) for step in steps}
    records: list[protocol.AuditRecord] = []
    for audit in AUDITS:
        run = [each.record for each in findings.get(audit.step, ()) if audit.covers(each)]
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
        if name == WEIGHTS or (name.startswith(f"{results.KEPT}/") and name.endswith(f"/{WEIGHTS}"))
    }
    if began_with := result.facts.get("began_with"):
        subjects[began_with] = "the model from which it was fine-tuned"
    return subjects


def _findings_of(
    store: Store, step: str, subjects: dict[str, str], operator: bool
) -> list[protocol.Finding]:
    """Return a step's findings on the subjects; refuse those that no registered audit covers."""
    findings = []
    registered = [audit for audit in AUDITS if audit.step == step]
    for output, subject in _outputs(store, step, subjects, operator):
        for finding in results.read_findings(output.result, output.folder):
            if not any(audit.covers(finding) for audit in registered):
                raise BadInput(
                    f"no registered audit covers the finding {finding.key}",
                    where=f"{step} of {subject}",
                    fix="Judge the model with the version of Confide that audited it.",
                )
            if finding.subject == protocol.RELEASED:
                findings.append(finding.model_copy(update={"subject": subject}))
    return findings


def _outputs(
    store: Store, step: str, subjects: dict[str, str], operator: bool
) -> list[tuple[results.Input, str]]:
    """Return the outputs of a step with their subjects, for the operator also the controls."""
    outputs, controls = [], []
    for uri in store.outputs(step):
        try:
            result = results.read_result(store, uri)
        except BadInput:  # an output of another version, which audits no model of this version
            continue
        if result is None:
            continue
        if subject := subjects.get(str(result.facts.get(results.SUBJECT) or "-")):
            outputs.append((results.Input(result, store.local_copy(uri)), subject))
        elif operator and operator_only(result.releases) and not result.facts.get("model_updates"):
            controls.append((results.Input(result, store.local_copy(uri)), CONTROL))
    probes = {output.facts.get(results.PROBES) for output, _ in outputs} - {None}
    return outputs + [each for each in controls if each[0].facts.get(results.PROBES) in probes]


JUDGED = "judged"  # fact of a last step that lists the models to register
_RULES: Mapping[Promotion, tuple[str, ...]] = {  # verdicts that allow promotion
    "audited": ("consistent", "inconclusive"),
    "unaudited": ("consistent", "inconclusive", "not audited"),
    "approved": (),  # the step `promote` promotes it after a person's approval
}


def claim_of(releases: Sequence[ReleaseRecord]) -> str:
    """Return the privacy claim of a model that was made from these releases, in words."""
    parts = []
    for total in totals(releases):
        unit = "a unit" if total.unit is None else f"one {total.unit}"
        epsilon = "no total ε" if total.epsilon is None else f"ε = {total.epsilon:.5g}"
        parts.append(f"{epsilon} at δ = {total.delta:.3g} for {unit} of “{total.dataset}”")
    return "; ".join(parts) or "no private text went into it"


def profile_of(releases: Sequence[ReleaseRecord]) -> PrivacyProfile | None:
    """Return the privacy profile of the claim for one text, or None if there is no such claim.

    There is none if ε is infinite or missing, if the unit is smaller than a text, or if there are
    several budgets.
    """
    of_datasets = totals(releases)
    if len(of_datasets) != 1:
        return None
    (total,) = of_datasets
    if total.unit in (None, PrivacyUnit.EXAMPLE) or total.epsilon is None:
        return None
    if not math.isfinite(total.epsilon):
        return None
    return PrivacyProfile.of_claim(total.epsilon, total.delta)


def records_of(store: Store, uri: str, result: StepResult) -> tuple[protocol.AuditRecord, ...]:
    """Return the audit records of a training step's models, including those for the operator.

    Records of the non-private controls are left out.
    """
    records = audits_of(store, subjects_of(store, uri, result), operator=True)
    return tuple(record for record in records if record.subject != CONTROL)


def verdict_on(
    store: Store, uri: str, result: StepResult, more: Sequence[protocol.AuditRecord] = ()
) -> protocol.ModelVerdict:
    """Return the verdict on the models of a training step, from all audits of their weights.

    Args:
        store: the store with the results of the audit steps.
        uri: address of the training step's output.
        result: result of the training step.
        more: records that are not stored yet.
    """
    return verdict_from(result, [*records_of(store, uri, result), *more])


def verdict_from(
    result: StepResult, records: Iterable[protocol.AuditRecord]
) -> protocol.ModelVerdict:
    """Return the verdict on the models of a training step from these records.

    Bounds by given texts count only if they block promotion. Their coins were not fixed in the
    ledger before the training, so they could be chosen to promote a model. No audit measures
    private fine-tuning: audits of the training before it can only contradict the claim of both.
    """
    counted = [r for r in records if r.key != protocol.COIN_BOUND or r.blocks_promotion]
    claim = claim_of(result.releases)
    verdict = protocol.verdict_of(claim, counted)
    private = result.step == "finetune" and result.facts.get("epsilon_training") is not None
    if not private or verdict.word not in ("consistent", "inconclusive"):
        return verdict
    reason = f"its private fine-tuning was not audited; the training before it is {verdict.word}"
    return protocol.ModelVerdict("not audited", f"{claim}: not audited, {reason}.")


def judge(
    store: Store,
    models: Mapping[str, results.Input],
    rule: Promotion,
    more: Sequence[protocol.AuditRecord] = (),
) -> list[dict[str, Any]]:
    """Judge the outputs of a job that are models for registration.

    Args:
        store: the store with the results of the audit steps.
        models: outputs by their name in the job.
        rule: the rule of promotion.
        more: records of these models that are not stored yet.

    Returns:
        One JSON object per model: its `name` in the job, `uri`, registered name (`model`),
        `verdict`, `sentence`, the `tags` of its version, and whether it is `promoted`.
    """
    judged = []
    for name, output in models.items():
        result = output.result
        if not result.facts.get("model"):
            continue
        verdict = verdict_on(store, output.uri, result, more)
        statement = privacy_statement(result.releases, made_up=bool(result.facts.get("made_up")))
        judged.append(
            {
                "name": name,
                "uri": output.uri,
                "model": result.facts["model"],
                "verdict": verdict.word,
                "sentence": verdict.sentence,
                "tags": _tags(result, verdict),
                "promoted": verdict.word in _RULES[rule] and bool(statement.data["private"]),
            }
        )
    return judged


def _tags(result: StepResult, verdict: protocol.ModelVerdict) -> dict[str, str]:
    """Return the tags of the model's version: the unrounded claim and the verdict."""
    tags = {f"ledger.{i}": r.ledger_id for i, r in enumerate(result.releases)}
    of_datasets = totals(result.releases)
    for total in of_datasets:
        name = f"/{total.dataset}" if len(of_datasets) > 1 else ""
        tags[f"confide.epsilon{name}"] = (
            "no total" if total.epsilon is None else repr(total.epsilon)
        )
        tags[f"confide.delta{name}"] = repr(total.delta)
        tags[f"confide.unit{name}"] = "several" if total.unit is None else str(total.unit)
    return {**tags, "confide.spec_hash": result.spec_hash, VERDICT: verdict.word}
