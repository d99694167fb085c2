"""The gate: a verdict from a model's audits decides on its registration and promotion.

A verdict uses all records (`audits.AUDITS`) of the model's weights, from audits of any run,
including records for the operator only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dp_core.audit.protocol import COIN_BOUND, AuditRecord, ModelVerdict, verdict_of
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.evidence.audits import CONTROL, audits_of, subjects_of
from tasks.protocol import Promotion, ReleaseRecord, StepResult
from tasks.results import Input, statement_of, totals
from tasks.storage import Store
from tasks.tracking.event_log import VERDICT

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
    several data sets.
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


def records_of(store: Store, uri: str, result: StepResult) -> tuple[AuditRecord, ...]:
    """Return the audit records of a training step's models, including those for the operator.

    Records of the non-private controls are left out.
    """
    records = audits_of(store, subjects_of(store, uri, result), operator=True)
    return tuple(record for record in records if record.subject != CONTROL)


def bearing(records: Iterable[AuditRecord]) -> list[AuditRecord]:
    """Return the records on which the verdict on a model of this deployment is based.

    Bounds by given texts count only if they block promotion. Their coins were not fixed in the
    ledger before the training, so they could be chosen to promote a model.
    """
    return [r for r in records if r.key != COIN_BOUND or r.blocks_promotion]


def verdict_on(
    store: Store, uri: str, result: StepResult, more: Sequence[AuditRecord] = ()
) -> ModelVerdict:
    """Return the verdict on the models of a training step, from all audits of their weights.

    Args:
        store: the store with the results of the audit steps.
        uri: address of the training step's output.
        result: result of the training step.
        more: records that are not stored yet.
    """
    records = bearing([*records_of(store, uri, result), *more])
    return verdict_of(claim_of(result.releases), records)


def judge(
    store: Store,
    models: Mapping[str, Input],
    uris: Mapping[str, str],
    rule: Promotion,
    more: Sequence[AuditRecord] = (),
) -> list[dict[str, Any]]:
    """Judge the outputs of a job that are models for registration.

    Args:
        store: the store with the results of the audit steps.
        models: outputs by their name in the job.
        uris: addresses of the outputs by the same names.
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
        verdict = verdict_on(store, uris[name], result, more)
        statement = statement_of(result.releases, made_up=bool(result.facts.get("made_up")))
        judged.append(
            {
                "name": name,
                "uri": uris[name],
                "model": result.facts["model"],
                "verdict": verdict.word,
                "sentence": verdict.sentence,
                "tags": _tags(result, verdict),
                "promoted": verdict.word in _RULES[rule] and bool(statement.data["private"]),
            }
        )
    return judged


def _tags(result: StepResult, verdict: ModelVerdict) -> dict[str, str]:
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
