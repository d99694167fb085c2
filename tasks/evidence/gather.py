"""Gathers the evidence of a model from its training step, the ledger and the audits.

The sources must agree: the statement in the model's folder must follow from the releases of its
result, and the ledger must contain each of these releases.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.privacy.accounting import tpr_ceiling
from dp_core.privacy.ledger import Entry, Ledger, State
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    PrivacyUnit,
    RandomCountSelection,
    compose,
)
from tasks.evidence import check_evidence
from tasks.evidence.audits import audits_of, subjects_of
from tasks.evidence.pack_contents import (
    DatasetClaim,
    Evidence,
    LedgerEntry,
    LedgerExtract,
    LedgerFile,
    MadeBy,
    ModelIdentity,
    OperatorWords,
    Rederivation,
    ReleaseEvidence,
    StepMeasure,
    TprCeiling,
    TrainedBy,
)
from tasks.protocol import ReleaseRecord, StepResult
from tasks.releases.deployment_ledger import entry_of, open_ledger
from tasks.releases.provenance import releasable_model
from tasks.results import STATEMENT_DATA, of_last_model, released_after, statement_of
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

_EXACT = (  # fields of a statement that are equal in all versions
    "dataset",
    "unit",
    "neighbours",
    "delta",
    "declared_units",
    "private",
    "seed_known",
    "made_up",
    "one_plan",
    "ledger_ids",
    "released_after_updates",
)
_RUN_AGAIN = "Delete the folder and run its step again; existing releases are not charged again."


@dataclass(frozen=True)
class Gathered:
    """Evidence of a model before it is written, with empty `evidence.files`."""

    evidence: Evidence
    ledger: LedgerFile
    statement: dict[str, Any]
    folder: Path  # folder of the model and its statement


def gather(
    deployment: Deployment, store: Store, uri: str, *, operator: bool, words: OperatorWords
) -> Gathered:
    """Return the evidence of a model in the store.

    Args:
        deployment: the deployment whose ledger contains its releases.
        store: the store that contains the model.
        uri: address of a training step's output.
        operator: whether to include values for the operator only.
        words: statements by the operator on model and data.

    Raises:
        BadInput: there is no model, or no guarantee; or its statement, its releases and the ledger
            disagree.
    """
    result = _model_of(store, uri)
    folder = store.local_copy(uri)
    statement = _true_statement(result, folder, uri)
    ledger = open_ledger(deployment, store)
    entries = _entries(ledger, result, uri)
    release_id = _release_of_step(ledger, result, uri)
    of_files = store.digests(uri)
    digests = {n: of_files[n] for n in of_last_model(of_files) if n not in result.operator_files}
    statements = [statement, *statement.get("others", ())]
    claims = tuple(
        _claim(part, [r for r in result.releases if r.dataset == part["dataset"]])
        for part in statements
    )
    made_up = bool(result.facts.get("made_up"))
    evidence = Evidence(
        edition="operator" if operator else "publishable",
        made_up=made_up,
        created=datetime.now(UTC).date().isoformat(),
        model=_identity(result, digests),
        claims=claims,
        trained_by=_trained_by(result, release_id),
        audits=audits_of(store, subjects_of(store, uri, result), operator=operator),
        measures=_measures(result, operator),
        operator_words=words,
        made_by=MadeBy(spec_hash=result.spec_hash, output=uri.rstrip("/").split("/")[-1]),
        versions=result.versions or {"versions": "not recorded by the step"},
        files={},
    )
    extracts = tuple(_extract(ledger, claim.dataset, set(entries), operator) for claim in claims)
    return Gathered(evidence, LedgerFile(extracts=extracts), statement, folder)


# --- agreement of the sources


def _model_of(store: Store, uri: str) -> StepResult:
    result = releasable_model(store, uri)
    if not result.releases:
        raise BadInput(
            "the model was made without private text, so there is no claim to prove",
            where=uri,
            fix="Give a model that was trained with DP.",
        )
    return result


def _true_statement(result: StepResult, folder: Path, uri: str) -> dict[str, Any]:
    """Return the statement in the model's folder, after a comparison with its releases.

    Raises:
        BadInput: the statement does not follow from the releases, or makes no claim.
    """
    try:
        written = json.loads((folder / STATEMENT_DATA).read_text())
        parts = [written, *written.get("others", ())]
    except (OSError, ValueError, AttributeError):
        raise BadInput("no privacy statement there", where=uri, fix=_RUN_AGAIN) from None
    made_up = bool(result.facts.get("made_up"))
    after = released_after(result)
    true = dict(statement_of(result.releases, made_up=made_up, released_after=after).data)
    expected = [true, *true.get("others", ())]
    if len(parts) != len(expected) or not all(map(_same_claim, parts, expected)):
        raise BadInput(
            "its privacy statement does not follow from its releases",
            where=uri,
            fix=_RUN_AGAIN,
        )
    for part in parts:
        if not part["private"] and part["epsilon"] is not None:
            raise BadInput(
                f"its statement makes no claim for the data set {part['dataset']}",
                where=uri,
                fix="PRIVACY.md in the model's folder states the reason.",
            )
    return dict(written)


def _same_claim(written: Any, true: Mapping[str, Any]) -> bool:
    """Return whether two statements make the same claim, up to wording and rounding."""
    if not isinstance(written, dict) or any(written.get(n) != true.get(n) for n in _EXACT):
        return False
    fields = ("ledger_id", "unit", "event", "delta")
    claimed, made = (
        [{name: release.get(name) for name in fields} for release in part.get("releases", ())]
        for part in (written, true)
    )
    return claimed == made and _alike(written.get("epsilon"), true["epsilon"])


def _alike(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=check_evidence.TOLERANCE)
    return bool(value == other)


def _entries(ledger: Ledger, result: StepResult, uri: str) -> dict[str, Entry]:
    """Return the ledger entries of all releases of a result.

    Raises:
        BadInput: an entry is missing, not settled, or has another mechanism.
    """
    return {r.ledger_id: entry_of(ledger, r, uri) for r in result.releases}


def _release_of_step(ledger: Ledger, result: StepResult, uri: str) -> str:
    """Return the ledger id of the release by the model's step, or an empty text without one.

    Raises:
        BadInput: the ledger settled a release for this step that the result does not name.
    """
    made = [
        entry.id
        for dataset in ledger.datasets()
        for entry in ledger.history(dataset)
        if entry.spec_hash == result.spec_hash and entry.accounted and entry.state is State.SETTLED
    ]
    named = [record.ledger_id for record in result.releases if record.ledger_id in made]
    if made and not named:
        raise BadInput(
            f"the ledger settled a release of this step ({made[-1]}) that its result does not name",
            where=uri,
            fix=_RUN_AGAIN,
        )
    return named[-1] if named else ""


# --- the claims


def _claim(statement: Mapping[str, Any], records: Sequence[ReleaseRecord]) -> DatasetClaim:
    releases = tuple(
        _release(record, written["epsilon"])
        for record, written in zip(records, statement["releases"], strict=True)
    )
    epsilon, delta = statement["epsilon"], statement["delta"]
    rederived: Rederivation | None = None
    ceilings: tuple[TprCeiling, ...] = ()
    if epsilon is not None:
        rederived = _rederivation([record.event for record in records], delta)
        events = [MechanismEvent.from_json(r.event).stating(PrivacyUnit(r.unit)) for r in records]
        whole = compose(*events)
        ceilings = tuple(
            TprCeiling(fpr=rate, tpr=tpr_ceiling(whole, rate))
            for rate in check_evidence.FALSE_POSITIVE_RATES
        )
    return DatasetClaim(
        dataset=statement["dataset"],
        unit=statement["unit"],
        neighbours=statement["neighbours"],
        declared_units=statement["declared_units"],
        epsilon=epsilon,
        delta=delta,
        one_plan=statement["one_plan"],
        assumptions=tuple(statement["assumptions"]),
        releases=releases,
        rederived=rederived,
        tpr_ceilings=ceilings,
    )


def _release(record: ReleaseRecord, epsilon: float) -> ReleaseEvidence:
    return ReleaseEvidence(
        ledger_id=record.ledger_id,
        event=record.event,
        unit=record.unit,
        neighbours=MechanismEvent.from_json(record.event).relation.value,
        delta=record.delta,
        epsilon=epsilon,
        rederived=_rederivation([record.event], record.delta),
    )


def _rederivation(events: Sequence[dict[str, Any]], delta: float) -> Rederivation:
    return Rederivation(
        tool=f"dp-accounting {metadata.version('dp-accounting')}",
        epsilon=check_evidence.derive(events, delta).epsilon,
    )


# --- the model


def _identity(result: StepResult, digests: dict[str, str]) -> ModelIdentity:
    shape = result.facts.get("shape") or {}
    return ModelIdentity(
        step=result.step,
        kind=shape.get("kind"),
        layers=shape.get("layers"),
        hidden=shape.get("hidden"),
        parameters=result.facts.get("parameters"),
        head=result.facts.get("head"),
        files=digests,
    )


def _trained_by(result: StepResult, ledger_id: str) -> TrainedBy | None:
    plan = result.facts.get("plan")
    if not plan or not ledger_id:
        return None
    return TrainedBy(
        ledger_id=ledger_id,
        sampling=plan["sampling"]["kind"],
        declared_units=plan["declared_units"],
        phases=tuple(plan["schedule"]),
        noise_multiplier=plan["noise_multiplier"],
        clip_norm=plan["clip_norm"],
        clipping=plan["clipping"],
        examples_per_step=plan["examples_per_step"],
        max_examples_per_unit=plan["max_examples_per_unit"],
        noise_bands=len(plan["strategy"]["coefficients"]),
    )


def _measures(result: StepResult, operator: bool) -> tuple[StepMeasure, ...]:
    """Return the last value of each metric of the model's step that the edition may show."""
    last = {m.name: m for m in sorted(result.metrics, key=lambda m: m.step)}
    return tuple(
        StepMeasure(name=name, value=m.value, label=m.label)
        for name, m in sorted(last.items())
        if (operator or Label(m.label) is not Label.OPERATOR)
        and not name.startswith(("epsilon", "delta"))
    )


# --- the ledger


def _extract(ledger: Ledger, dataset: str, made_of: set[str], operator: bool) -> LedgerExtract:
    remaining, entries = ledger.remaining(dataset), ledger.history(dataset)
    shown = [entry for entry in entries if entry.accounted or operator]
    plans: dict[str, int] = {}
    for entry in shown:
        if entry.whole_plan and entry.plan_key:
            plans.setdefault(entry.plan_key, len(plans) + 1)
    shares = any(
        name != dataset and budget.name == remaining.budget.name
        for name, budget in ledger.datasets().items()
    )
    left_out = (
        "nothing"
        if operator
        else "uses of the data without a guarantee, whose results are for the operator only; times"
        " of day; names of runs"
    )
    budget = remaining.budget
    selections = [n for n, e in enumerate(shown, 1) if isinstance(e.event, RandomCountSelection)]
    dated = (
        math.inf if operator or not selections else selections[0]
    )  # later days would reveal its count
    return LedgerExtract(
        dataset=dataset,
        budget_unit=None if budget.unit is None else budget.unit.value,
        budget_neighbours=None if budget.relation is None else budget.relation.value,
        budget_epsilon=budget.epsilon,
        budget_delta=budget.delta,
        share_spent=None if budget.made_up else remaining.share,
        shares_budget=shares,
        entries=tuple(
            _line(number, entry, dataset, made_of, plans, operator, dated)
            for number, entry in enumerate(shown, 1)
        ),
        left_out=left_out,
    )


def _line(
    number: int,
    entry: Entry,
    dataset: str,
    made_of: set[str],
    plans: Mapping[str, int],
    operator: bool,
    dated: float,
) -> LedgerEntry:
    # Times of day would reveal the size of the data.
    until = None if operator else len("2026-01-01")
    return LedgerEntry(
        number=number,
        id=entry.id,
        of_this_data_set=entry.dataset == dataset,
        in_this_model=entry.id in made_of and entry.dataset == dataset,
        event=entry.event.to_json(),
        unit=entry.unit.value,
        neighbours=entry.event.relation.value,
        delta=entry.delta,
        state=entry.state.value,
        accounted=entry.accounted,
        plan=plans.get(entry.plan_key, 0) if entry.whole_plan else 0,
        known_seed=entry.known_seed,
        seed_hash=entry.seed_hash,
        released_hash=entry.released_hash,
        reserved=entry.reserved_at[:until] if number <= dated else "",
        settled=(entry.settled_at or "")[:until] if number < dated else "",
    )
