"""The audits of a model, as records: which there are, and which were not run.

Each audit is one entry of `AUDITS`: its key, its name, what it measures, the step whose outputs
hold its results, and the function that reads them. A new audit is one entry more. One whose step
left nothing for the model stands in the pack as not run.
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
from dp_core.audit.record import AuditRecord, Level, NullDistribution, not_run
from dp_core.config.audit_settings import ExtractionConfig
from dp_core.errors import BadInput
from dp_core.labels import Label
from tasks.protocol import StepResult
from tasks.releases.provenance import operator_only
from tasks.report.results import (
    AUDIT_FILE,
    DISCOVERABLE,
    EXPOSURE,
    EXPOSURE_IN_ROWS,
    GIVEN_FILE,
    MEMBERSHIP_FILE,
    TARGETED,
)
from tasks.results.inputs import read_result
from tasks.results.statements import KEPT
from tasks.storage import Store

# Facts by which a step's output says which model it looked at, and by what it probed it.
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
        uri: of the output. result: what the step answered.
        subject: which model it is of, in words.
    """

    store: Store
    uri: str
    result: StepResult
    subject: str

    def text(self, name: str) -> str:
        """Return a file of the output, whose checksum holds."""
        return (self.store.local_copy(self.uri) / name).read_text()


@dataclass(frozen=True)
class Audit:
    """One kind of audit.

    Attributes:
        key, name, measured: as of its records.
        step: whose outputs hold its results; empty where this version has no such step.
        read: makes the records of one output.
    """

    key: str
    name: str
    measured: str
    step: str = ""
    read: Callable[[Audit, AuditOutput], Sequence[AuditRecord]] | None = None


def audits_of(
    store: Store, subjects: dict[str, str], *, operator: bool = False
) -> tuple[AuditRecord, ...]:
    """Return the records of every audit, run or not.

    Args:
        store: where the audits' steps left their results.
        subjects: SHA-256 of the weights -> which model that is, in words: the released one, and
            those that it was made from.
        operator: also what only the operator may see: the same audits of models trained without
            privacy, which show what memory looks like.
    """
    records: list[AuditRecord] = []
    for audit in AUDITS:
        run = [
            record
            for finding in _findings(store, audit, subjects, operator)
            if audit.read is not None
            for record in audit.read(audit, finding)
        ]
        # Records that block promotion are published, also if they were read from private text.
        shown = [
            record
            for record in run
            if operator
            or record.label is not Label.OPERATOR
            or (record.blocks_promotion and record.subject != CONTROL)
        ]
        if run and not shown:
            why = "It was run; what it found reads private text, and is for the operator alone."
        elif audit.step:
            why = "No output of the audit's step has it of this model, or of one it was made from."
        else:
            why = "No step of this version measures it."
        records += shown or [not_run(audit.key, audit.name, audit.measured, why)]
    return tuple(records)


def subjects_of(store: Store, uri: str, result: StepResult) -> dict[str, str]:
    """Return by which weights audits know a training step's models: SHA-256 -> which, in words.

    The last one; those that it kept on the way, which the same claim covers; and the one that it
    was fine-tuned from.
    """
    subjects = {
        digest: "the released model"
        if name == WEIGHTS
        else f"the model that its training had after {name.split('/')[1]} updates"
        for name, digest in store.digests(uri).items()
        if name == WEIGHTS or (name.startswith(f"{KEPT}/") and name.endswith(f"/{WEIGHTS}"))
    }
    if began_with := result.facts.get("began_with"):
        subjects[began_with] = "the model that it was fine-tuned from"
    return subjects


def _findings(
    store: Store, audit: Audit, subjects: dict[str, str], operator: bool
) -> list[AuditOutput]:
    """Return the audit's outputs of these models, and for the operator those of their controls."""
    found, others = [], []
    for uri in store.outputs(audit.step) if audit.step else ():
        try:
            result = read_result(store, uri)
        except BadInput:  # of another version, and so of no model of this one
            continue
        if result is None:
            continue
        if subject := subjects.get(str(result.facts.get(SUBJECT) or "-")):
            found.append(AuditOutput(store, uri, result, subject))
        elif operator and operator_only(result.releases) and not result.facts.get("model_updates"):
            others.append(AuditOutput(store, uri, result, CONTROL))
    probes = {one.result.facts.get(PROBES) for one in found} - {None}
    return found + [one for one in others if one.result.facts.get(PROBES) in probes]


def _exposure(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the exposure of canaries among random tokens."""
    label = Label.OPERATOR if operator_only(finding.result.releases) else Label.DP
    return _exposure_of(audit, finding, EXPOSURE, EMBEDDED, label)


def _exposure_in_rows(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return the exposure of canaries in the very rows that trained, which are private."""
    return _exposure_of(audit, finding, EXPOSURE_IN_ROWS, IN_ROWS, Label.OPERATOR)


def _exposure_of(
    audit: Audit, finding: AuditOutput, key: str, context: str, label: Label
) -> list[AuditRecord]:
    """Return the group with the largest exposure in a context; none if none was measured there."""
    if key not in finding.result.outputs:  # of a version that did not measure it
        return []
    rows = [ExposureRow(**row) for row in json.loads(finding.text(f"{key}.json"))]
    shown = [row for row in rows if row.context == context]
    if not shown:
        why = "No canary stands in the rows that trained."
        none = not_run(audit.key, audit.name, audit.measured, why)
        return [none.model_copy(update={"label": label})]
    summary = summarise(rows, context)
    largest = max(shown, key=lambda row: row.exposure)
    count = sum(row.canaries for row in shown)
    if summary.remembers:
        said = "It remembers canaries"
    elif summary.above_chance:
        said = "It is above chance, and no group shows memory beyond doubt"
    else:
        said = "Nothing is above chance"
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
            ceiling_of=f"log2 of {largest.candidates} candidates: every secret in first place."
            " The claim bounds no exposure of canaries that many units carry",
            power=f"{count} canaries in {len(shown)} groups, expected up to"
            f" {max(row.expected_occurrences for row in shown):,.0f} times in the text: a group's"
            f" mean rank whose interval lies above {largest.null_high:.2f} bits counts as memory",
            null_control=NullDistribution(
                of=f"the largest of {len(shown)} groups where every secret's rank is uniform",
                low=0.0,
                high=summary.largest_null_high,
                alarm_rate=0.025,
                p_value=1 - (1 - largest.p_value) ** len(shown),
            ),
            verdict="consistent" if not summary.above_chance else "inconclusive",
            finding=f"{said}: {largest.exposure:.2f} bits at most ({summary.largest_group}),"
            f" {summary.mean:.2f} on average; without memory, below"
            f" {summary.largest_null_high:.2f} and {summary.mean_null_high:.2f} in 97.5% of cases.",
            label=label,
            rows=tuple(_with_rank_null(row) for row in rows),
        )
    ]


def _with_rank_null(row: ExposureRow) -> dict[str, float | str]:
    """Return a group's figures, and what its rank exposure is without memory."""
    told = asdict(row)
    if row.references:
        null = row.rank_null
        told |= {"rank_exposure_null_low": null.low, "rank_exposure_null_high": null.high}
        told |= {"rank_exposure_p_value": row.rank_p_value}
    return told


def _membership(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return at each level the attack that leaks most, of all that were made there."""
    rows = json.loads(finding.text(MEMBERSHIP_FILE))["rows"]
    most = {row["level"]: row for row in sorted(rows, key=lambda r: float(r["leakage"]["value"]))}
    return [_membership_at(audit, finding, row) for row in most.values()]


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
        power=f"{row['members']} trained on and {row['others']} held out: an advantage above"
        f" {high - value:.3f} would be beyond chance",
        null_control=NullDistribution(
            of="a model that tells nobody apart: no advantage, with the spread of these groups",
            low=low - value,
            high=high - value,
            alarm_rate=0.025,
        ),
        verdict="inconclusive" if row["above"] else "consistent",
        finding=f"The attack by {row['attack']} has an advantage of {value:.3f}"
        + (", wholly above its ceiling: somebody should look." if row["above"] else "."),
        label=Label.OPERATOR,
    )


def _discoverable(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return how many rows that trained came out by greedy decoding."""
    return _extraction(audit, finding, FROM_ROWS, Label.OPERATOR)


def _targeted(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return how many secrets are among the k likeliest tokens."""
    own = Label.OPERATOR if operator_only(finding.result.releases) else Label.DP
    return _extraction(audit, finding, FROM_CANARIES, own)


_EXTRACTION: TypeAdapter[tuple[ExtractionRow, ...]] = TypeAdapter(tuple[ExtractionRow, ...])


def _extraction(
    audit: Audit, finding: AuditOutput, sought: Sought, label: Label
) -> list[AuditRecord]:
    """Return the record of one protocol; none of it where the settings did not ask for it."""
    if audit.key not in finding.result.outputs:
        return []
    told = json.loads(finding.text(f"{audit.key}.json"))
    record = extraction_record(
        _EXTRACTION.validate_python(told["rows"]),
        ExtractionConfig.model_validate(told["settings"]),
        sought,
        when="fixed before the training" if told["fixed_before_training"] else "chosen after it",
        label=label,
        key=audit.key,
        name=audit.name,
        measured=audit.measured,
    )
    return [record.model_copy(update={"subject": finding.subject})]


def _lower_bound(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return what the audit of the model's own training found."""
    return _kept(finding, AUDIT_FILE)


def _from_outside(audit: Audit, finding: AuditOutput) -> list[AuditRecord]:
    """Return what was found by canaries and texts that somebody gave."""
    return _kept(finding, GIVEN_FILE)


def _kept(finding: AuditOutput, file: str) -> list[AuditRecord]:
    """Return the records that a step left as they are."""
    return [
        AuditRecord.model_validate(record | {"subject": finding.subject})
        for record in json.loads(finding.text(file))
    ]


LOWER_BOUND = Audit(
    "epsilon_lower_bound",
    "Empirical lower bound on ε, one run",
    "ε that the guesses about whole-unit canaries refute, in or out by independent coins, at"
    " 95% (Steinke, Nasr and Jagielski 2023)",
    "audit",
    _lower_bound,
)
AUDITS: tuple[Audit, ...] = (
    Audit(
        EXPOSURE,
        "Canary exposure",
        "log2 of the candidates less log2 of the mean rank of a canary's masked secret, in bits:"
        " the group with the largest, among random tokens, public coins (Carlini et al. 2019;"
        " Hoory et al. 2021, 5.2)",
        "exposure",
        _exposure,
    ),
    Audit(
        EXPOSURE_IN_ROWS,
        "Canary exposure in the rows that trained",
        "the same, of canaries where they stand in the private rows that trained, as the papers"
        " measure it: the group with the largest",
        "exposure",
        _exposure_in_rows,
    ),
    LOWER_BOUND,
    Audit(
        "membership",
        "Membership inference",
        "advantage, TPR less FPR, of the attack that has most of it, by losses, references,"
        " attention and gradient norms (Jagannatha et al. 2021; docs/membership.md)",
        "membership",
        _membership,
    ),
    Audit(
        DISCOVERABLE,
        "Extraction, discoverable: from a prefix of the text to what followed it",
        "share of suffixes that greedy decoding gives word for word (Carlini et al. 2023)",
        "exposure",
        _discoverable,
    ),
    Audit(
        TARGETED,
        "Extraction, targeted: from a canary's prefix to its secret",
        "share of secrets among the k likeliest next tokens, public coins (after Carlini et al."
        " 2019)",
        "exposure",
        _targeted,
    ),
    Audit(
        "from_outside",
        "Audits by given canaries and texts",
        "exposure, membership, extraction, and a lower bound on ε where coins divided the texts, by"
        " the model's predictions alone (docs/audits.md)",
        "privacy_audit",
        _from_outside,
    ),
    Audit(
        "epsilon_lower_bound_white_box",
        "Empirical lower bound on ε from the noised sums",
        "ε that gradient canaries in the sums of the updates refute, at 95% (Nasr et al. 2023)",
    ),
)
