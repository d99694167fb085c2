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

from dp_core.audit.exposure import EMBEDDED, ExposureRow, summarise
from dp_core.audit.record import AuditRecord, Level, NullControl, not_run
from dp_core.errors import BadInput
from dp_core.labels import Label
from tasks.protocol import StepResult
from tasks.releases.provenance import operator_only
from tasks.report.results import AUDIT_FILE, EXPOSURE_FILE, MEMBERSHIP_FILE
from tasks.runtime.context import read_result
from tasks.storage import Store

# Facts by which a step's output says which model it looked at, and by what it probed it.
SUBJECT, PROBES = "audited_weights", "canaries_digest"
_LEVELS: dict[str, Level] = {  # an admission is neither a document nor a patient
    "sample": "example",
    "example": "example",
    "document": "document",
    "admission": "group",
    "patient": "patient",
}
CONTROL = "the same training without privacy, for comparison"


@dataclass(frozen=True)
class Finding:
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
    read: Callable[[Audit, Finding], Sequence[AuditRecord]] | None = None


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
        shown = [record for record in run if operator or record.label is not Label.OPERATOR]
        if run and not shown:
            why = "It was run; what it found reads private text, and is for the operator alone."
        elif audit.step:
            why = "No output of the audit's step names this model, or one that it was made from."
        else:
            why = "No step of this version measures it."
        records += shown or [not_run(audit.key, audit.name, audit.measured, why)]
    return tuple(records)


def _findings(
    store: Store, audit: Audit, subjects: dict[str, str], operator: bool
) -> list[Finding]:
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
            found.append(Finding(store, uri, result, subject))
        elif operator and operator_only(result.releases):
            others.append(Finding(store, uri, result, CONTROL))
    probes = {one.result.facts.get(PROBES) for one in found} - {None}
    return found + [one for one in others if one.result.facts.get(PROBES) in probes]


def _exposure(audit: Audit, finding: Finding) -> list[AuditRecord]:
    """Return the exposure of canaries among random tokens, the mean over all of them."""
    label = Label.OPERATOR if operator_only(finding.result.releases) else Label.DP
    rows = [ExposureRow(**row) for row in json.loads(finding.text(EXPOSURE_FILE))]
    shown = [row for row in rows if row.context == EMBEDDED]
    summary = summarise(rows, EMBEDDED)
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
            null_control=NullControl(
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
            rows=tuple(asdict(row) for row in rows),
        )
    ]


def _membership(audit: Audit, finding: Finding) -> list[AuditRecord]:
    """Return at each level the attack that leaks most, of all that were made there."""
    rows = json.loads(finding.text(MEMBERSHIP_FILE))["rows"]
    most = {row["level"]: row for row in sorted(rows, key=lambda r: float(r["leakage"]["value"]))}
    return [_membership_at(audit, finding, row) for row in most.values()]


def _membership_at(audit: Audit, finding: Finding, row: dict[str, Any]) -> AuditRecord:
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
        null_control=NullControl(
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


def _lower_bound(audit: Audit, finding: Finding) -> list[AuditRecord]:
    """Return what the audit of the model's own training found."""
    return [
        AuditRecord.model_validate(record | {"subject": finding.subject})
        for record in json.loads(finding.text(AUDIT_FILE))
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
        "exposure",
        "Canary exposure",
        "log2 of the candidates less log2 of the mean rank of a canary's masked secret, in bits:"
        " the group with the largest, among random tokens, public coins (Carlini et al. 2019;"
        " Hoory et al. 2021, 5.2)",
        "exposure",
        _exposure,
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
        "extraction_discoverable",
        "Extraction, discoverable: from a prefix of the text to what followed it",
        "share of suffixes that greedy decoding gives word for word (Carlini et al. 2023)",
    ),
    Audit(
        "extraction_targeted",
        "Extraction, targeted: from a canary's prefix to its secret",
        "share of secrets found by top-k and by sampling, settings fixed before training",
    ),
    Audit(
        "epsilon_lower_bound_white_box",
        "Empirical lower bound on ε from the noised sums",
        "ε that gradient canaries in the sums of the updates refute, at 95% (Nasr et al. 2023)",
    ),
)
