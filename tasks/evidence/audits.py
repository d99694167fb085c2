"""The registry of audits, and the records of a model's audits.

Each audit is one entry of `AUDITS`, with its key, its name, a description of the measured quantity,
the step that writes its results, and the function that reads them. An audit without results for the
model is recorded as not run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from dp_core.audit.exposure import EMBEDDED, IN_ROWS, ExposureRow, summarise
from dp_core.audit.extraction import (
    FROM_CANARIES,
    FROM_ROWS,
    ExtractionRow,
    Sought,
    extraction_record,
)
from dp_core.audit.protocol import AuditRecord, Level, NullDistribution, not_run
from dp_core.config.audit_settings import ExtractionConfig
from dp_core.errors import BadInput
from dp_core.labels import Label
from tasks.protocol import StepResult
from tasks.releases.provenance import operator_only
from tasks.report.job_results import (
    AUDIT_FILE,
    DISCOVERABLE,
    EXPOSURE,
    EXPOSURE_IN_ROWS,
    GIVEN_FILE,
    MEMBERSHIP_FILE,
    TARGETED,
)
from tasks.results import KEPT, read_result
from tasks.storage import Store

# Facts of an audit step's output that identify the audited model and the canaries.
SUBJECT, PROBES = "audited_weights", "canaries_digest"
WEIGHTS = "model.safetensors"
_LEVELS: dict[str, Level] = {  # an admission is neither a document nor a patient
    "sample": "example",
    "example": "example",
    "document": "document",
    "admission": "group",
    "patient": "patient",
}
CONTROL = "the same training without privacy, for comparison"


@dataclass(frozen=True)
class AuditOutput:
    """The output of an audit's step.

    Attributes:
        store: the store that contains the output.
        uri: address of the output.
        result: result of the step.
        subject: the audited model, in words.
    """

    store: Store
    uri: str
    result: StepResult
    subject: str

    def text(self, name: str) -> str:
        """Return the text of a file of the output, after a check of its checksum."""
        return (self.store.local_copy(self.uri) / name).read_text()


@dataclass(frozen=True)
class Audit:
    """One kind of audit.

    Attributes:
        key, name, measured: fields of its records.
        step: the step that writes its results; empty if this version has no such step.
        read: returns the records of one output.
    """

    key: str
    name: str
    measured: str
    step: str = ""
    read: Callable[[Audit, AuditOutput], Sequence[AuditRecord]] | None = None


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
            record
            for finding in _findings(store, audit, subjects, operator)
            if audit.read is not None
            for record in audit.read(audit, finding)
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
        records += shown or [not_run(audit.key, audit.name, audit.measured, why)]
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


def _findings(
    store: Store, audit: Audit, subjects: dict[str, str], operator: bool
) -> list[AuditOutput]:
    """Return the audit's outputs for these models, and for the operator also for their controls."""
    outputs, controls = [], []
    for uri in store.outputs(audit.step) if audit.step else ():
        try:
            result = read_result(store, uri)
        except BadInput:  # an output of another version, which audits no model of this version
            continue
        if result is None:
            continue
        if subject := subjects.get(str(result.facts.get(SUBJECT) or "-")):
            outputs.append(AuditOutput(store, uri, result, subject))
        elif operator and operator_only(result.releases) and not result.facts.get("model_updates"):
            controls.append(AuditOutput(store, uri, result, CONTROL))
    probes = {output.result.facts.get(PROBES) for output in outputs} - {None}
    return outputs + [o for o in controls if o.result.facts.get(PROBES) in probes]


def _exposure(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the exposure of canaries among random tokens."""
    label = Label.OPERATOR if operator_only(finding.result.releases) else Label.DP
    return _exposure_of(audit, finding, EXPOSURE, EMBEDDED, label)


def _exposure_in_rows(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the exposure of canaries in the training rows, which are private."""
    return _exposure_of(audit, finding, EXPOSURE_IN_ROWS, IN_ROWS, Label.OPERATOR)


def _exposure_of(
    audit: Audit, finding: AuditOutput, key: str, context: str, label: Label
) -> list[AuditRecord]:
    """Return a record of the group with the largest exposure in a context, if any was measured."""
    if key not in finding.result.outputs:  # written by a version without this measurement
        return []
    rows = [ExposureRow(**row) for row in json.loads(finding.text(f"{key}.json"))]
    shown = [row for row in rows if row.context == context]
    if not shown:
        why = "The training rows contain no canary."
        none = not_run(audit.key, audit.name, audit.measured, why)
        return [none.model_copy(update={"label": label})]
    summary = summarise(rows, context)
    largest = max(shown, key=lambda row: row.exposure)
    count = sum(row.canaries for row in shown)
    if summary.remembers:
        result = "The model remembers canaries"
    elif summary.above_chance:
        result = "Exposure is above chance, but no single group is clearly remembered"
    else:
        result = "No exposure is above chance"
    return [
        AuditRecord(
            key=audit.key,
            name=audit.name,
            subject=finding.subject,
            level="canary",
            measured=audit.measured,
            value=largest.exposure,
            interval=(largest.low, largest.high),
            confidence=0.95,
            ceiling=math.log2(largest.candidates),
            ceiling_of=f"log2 of {largest.candidates} candidates, if every secret is ranked first."
            " The claim does not bound the exposure of canaries that many units contain",
            power=f"{count} canaries in {len(shown)} groups, expected up to"
            f" {max(row.expected_occurrences for row in shown):,.0f} times in the text; a group"
            f" whose interval lies above {largest.null_high:.2f} bits counts as remembered",
            null_control=NullDistribution(
                of=f"the largest of {len(shown)} groups if the rank of every secret is uniform",
                low=0.0,
                high=summary.largest_null_high,
                alarm_rate=0.025,
                p_value=1 - (1 - largest.p_value) ** len(shown),
            ),
            verdict="consistent" if not summary.above_chance else "inconclusive",
            finding=f"{result}: at most {largest.exposure:.2f} bits ({summary.largest_group}),"
            f" {summary.mean:.2f} on average. Without memory they are below"
            f" {summary.largest_null_high:.2f} and {summary.mean_null_high:.2f} in 97.5% of cases.",
            label=label,
            rows=tuple(_with_rank_null(row) for row in rows),
        )
    ]


def _with_rank_null(row: ExposureRow) -> dict[str, float | str]:
    """Return the figures of a group, with the null distribution of its rank exposure."""
    figures = asdict(row)
    if row.references:
        null = row.rank_null
        figures |= {"rank_exposure_null_low": null.low, "rank_exposure_null_high": null.high}
        figures |= {"rank_exposure_p_value": row.rank_p_value}
    return figures


def _membership(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the record of the attack with the largest leakage at each level."""
    rows = json.loads(finding.text(MEMBERSHIP_FILE))["rows"]
    by_leakage = sorted(rows, key=lambda row: float(row["leakage"]["value"]))
    largest = {row["level"]: row for row in by_leakage}
    return [_membership_at(audit, finding, row) for row in largest.values()]


def _membership_at(audit: Audit, finding: AuditOutput, row: dict[str, Any]) -> AuditRecord:
    leakage, ceiling = row["leakage"], row["leakage_ceiling"]
    value, low, high = leakage["value"], leakage["low"], leakage["high"]
    return AuditRecord(
        key=audit.key,
        name=audit.name,
        subject=finding.subject,
        level=_LEVELS[row["level"]],
        measured=audit.measured,
        value=value,
        interval=(low, high),
        confidence=0.95,
        ceiling=ceiling,
        ceiling_of="the claim's (e^ε − 1 + 2δ)/(e^ε + 1), over its whole profile"
        if ceiling
        else "",
        power=f"{row['members']} members and {row['others']} held out; an advantage above"
        f" {high - value:.3f} would exceed chance",
        null_control=NullDistribution(
            of="an attack without advantage, with the spread of these groups",
            low=low - value,
            high=high - value,
            alarm_rate=0.025,
        ),
        verdict="inconclusive" if row["above"] else "consistent",
        finding=f"The attack by {row['attack']} has an advantage of {value:.3f}"
        + ("; its interval lies above the ceiling and needs review." if row["above"] else "."),
        label=Label.OPERATOR,
    )


def _discoverable(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the share of training rows that greedy decoding extracts."""
    return _extraction(audit, finding, FROM_ROWS, Label.OPERATOR)


def _targeted(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the share of secrets among the k likeliest tokens."""
    label = Label.OPERATOR if operator_only(finding.result.releases) else Label.DP
    return _extraction(audit, finding, FROM_CANARIES, label)


_EXTRACTION: TypeAdapter[tuple[ExtractionRow, ...]] = TypeAdapter(tuple[ExtractionRow, ...])


def _extraction(
    audit: Audit, finding: AuditOutput, sought: Sought, label: Label
) -> list[AuditRecord]:
    """Return the record of one protocol, or none if the settings did not request it."""
    if audit.key not in finding.result.outputs:
        return []
    extraction = json.loads(finding.text(f"{audit.key}.json"))
    fixed = extraction["fixed_before_training"]
    record = extraction_record(
        _EXTRACTION.validate_python(extraction["rows"]),
        ExtractionConfig.model_validate(extraction["settings"]),
        sought,
        when="fixed before the training" if fixed else "chosen after it",
        label=label,
        key=audit.key,
        name=audit.name,
        measured=audit.measured,
    )
    return [record.model_copy(update={"subject": finding.subject})]


def _lower_bound(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the records of the audit of the model's training."""
    return _kept(finding, AUDIT_FILE)


def _from_outside(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the records of audits by given canaries and texts."""
    return _kept(finding, GIVEN_FILE)


def _kept(finding: AuditOutput, file: str) -> list[AuditRecord]:
    """Return the records that a step wrote."""
    return [
        AuditRecord.model_validate(record | {"subject": finding.subject})
        for record in json.loads(finding.text(file))
    ]


LOWER_BOUND = Audit(
    "epsilon_lower_bound",
    "Empirical lower bound on ε, one run",
    "the largest ε refuted at 95% by guesses about the inclusion of whole-unit canaries, which"
    " independent coins decide (Steinke, Nasr and Jagielski 2023)",
    "audit",
    _lower_bound,
)
AUDITS: tuple[Audit, ...] = (
    Audit(
        EXPOSURE,
        "Canary exposure",
        "log2 of the number of candidates minus log2 of the mean rank of a canary's masked secret,"
        " in bits, for the group with the largest value, among random tokens from a public seed"
        " (Carlini et al. 2019; Hoory et al. 2021, 5.2)",
        "exposure",
        _exposure,
    ),
    Audit(
        EXPOSURE_IN_ROWS,
        "Canary exposure in training rows",
        "canary exposure, measured as in the papers on the private training rows that contain the"
        " canaries, for the group with the largest value",
        "exposure",
        _exposure_in_rows,
    ),
    LOWER_BOUND,
    Audit(
        "membership",
        "Membership inference",
        "largest advantage, TPR − FPR, of all attacks by losses, references, attention and"
        " gradient norms (Jagannatha et al. 2021; docs/membership.md)",
        "membership",
        _membership,
    ),
    Audit(
        DISCOVERABLE,
        "Extraction, discoverable: from a prefix of the text to its continuation",
        "share of suffixes that greedy decoding reproduces exactly (Carlini et al. 2023)",
        "exposure",
        _discoverable,
    ),
    Audit(
        TARGETED,
        "Extraction, targeted: from a canary's prefix to its secret",
        "share of secrets among the k likeliest next tokens, with a public seed (after Carlini et"
        " al. 2019)",
        "exposure",
        _targeted,
    ),
    Audit(
        "from_outside",
        "Audits by given canaries and texts",
        "exposure, membership, extraction, and, if coins divided the texts, a lower bound on ε,"
        " from the model's predictions alone (docs/audits.md)",
        "privacy_audit",
        _from_outside,
    ),
    Audit(
        "epsilon_lower_bound_white_box",
        "Empirical lower bound on ε from the noised sums",
        "the largest ε that gradient canaries in the sums of the updates refute, at 95% (Nasr et"
        " al. 2023)",
    ),
)
