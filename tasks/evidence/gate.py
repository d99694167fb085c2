"""The gate: models are judged by their audits, and registered and promoted by the verdict.

A verdict rests on every record of the registry (`audits.AUDITS`) of the model's weights, whichever
run's audit left it, and on those of the operator too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dp_core.audit.record import COIN_BOUND, AuditRecord
from dp_core.audit.verdict import ModelVerdict, verdict_of
from dp_core.privacy.accounting import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.evidence.audits import CONTROL, audits_of, subjects_of
from tasks.protocol import Promotion, ReleaseRecord, StepResult
from tasks.results.inputs import Input
from tasks.results.statements import statement_of, totals
from tasks.storage import Store
from tasks.tracking.event_log import VERDICT

JUDGED = "judged"  # the fact by which a last step hands its models to whoever registers them
_RULES: Mapping[Promotion, tuple[str, ...]] = {  # verdicts with which a model is promoted
    "audited": ("consistent", "inconclusive"),
    "unaudited": ("consistent", "inconclusive", "not audited"),
    "approved": (),  # by the step `promote`, after a person
}


def claim_of(releases: Sequence[ReleaseRecord]) -> str:
    """Return what is claimed of a model that was made from these releases, in words."""
    parts = []
    for total in totals(releases):
        unit = "a unit" if total.unit is None else f"one {total.unit}"
        epsilon = "no total ε" if total.epsilon is None else f"ε = {total.epsilon:.5g}"
        parts.append(f"{epsilon} at δ = {total.delta:.3g} for {unit} of “{total.dataset}”")
    return "; ".join(parts) or "no private text went into it"


def profile_of(releases: Sequence[ReleaseRecord]) -> PrivacyProfile | None:
    """Return what the claim leaves to attacks on one text; None where it claims nothing of one.

    So with an infinite ε or none, a unit smaller than a text, or several data sets.
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
    """Return the record of every audit of a training step's models, for the operator.

    What comparisons without privacy show is none of these models.
    """
    records = audits_of(store, subjects_of(store, uri, result), operator=True)
    return tuple(record for record in records if record.subject != CONTROL)


def bearing(records: Iterable[AuditRecord]) -> list[AuditRecord]:
    """Return the records that bear on the verdict on a model of this deployment.

    Bounds by given texts bear on it only if they block promotion: their coins were not bound before
    the training, and could have been chosen so that a model is promoted.
    """
    return [r for r in records if r.key != COIN_BOUND or r.blocks_promotion]


def verdict_on(
    store: Store, uri: str, result: StepResult, more: Sequence[AuditRecord] = ()
) -> ModelVerdict:
    """Return the verdict on what a training step released, from every audit of these weights.

    Args:
        store: where the audits' steps left their results.
        uri: of the training step's output.
        result: of the training step.
        more: records that no result holds yet.
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
    """Judge those of a job's outputs that are models to be registered.

    Args:
        store: where the audits' steps left their results.
        models: outputs by the name that they have in the job.
        uris: of the outputs, by the same names.
        rule: with which verdict a model is promoted.
        more: records of these models that no result holds yet.

    Returns:
        Of each model as JSON data: its `name` in the job, `uri`, the `model` under which it is
        registered, `verdict`, `sentence`, the `tags` of its version, whether it is `promoted`.
    """
    found = []
    for name, output in models.items():
        result = output.result
        if not result.facts.get("model"):
            continue
        verdict = verdict_on(store, uris[name], result, more)
        statement = statement_of(result.releases, made_up=bool(result.facts.get("made_up")))
        found.append(
            {
                "name": name,
                "uri": uris[name],
                "model": result.facts["model"],
                "verdict": verdict.word,
                "sentence": verdict.sentence,
                "tags": _tags(result, verdict),
                "promoted": verdict.word in _RULES[rule] and bool(statement.record["private"]),
            }
        )
    return found


def _tags(result: StepResult, verdict: ModelVerdict) -> dict[str, str]:
    """Return the tags of the model's version: the claim in full digits, and the verdict on it."""
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
