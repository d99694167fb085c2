"""Evidence packs: the evidence of a model from its training step, the ledger and the audits.

A pack is a folder with the data, the pages generated from them, and the script that checks both.

The sources must agree: the statement in the model's folder must follow from the releases of its
result, and the ledger must contain each of these releases.
"""

import json
import math
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.privacy import check_evidence
from dp_core.privacy.ledger import Entry, Ledger, State
from dp_core.privacy.mechanisms import RandomCountSelection
from dp_core.privacy.statement import privacy_statement
from tasks.evidence.audits import audits_of, subjects_of
from tasks.protocol.messages import StepResult
from tasks.releases.deployment_ledger import confirm_releases, open_ledger
from tasks.releases.provenance import releasable_model
from tasks.results import of_last_model, released_after
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store, sha256_of

_ROUNDING = 1e-6  # relative difference of numbers that two machines compute
_RUN_AGAIN = "Delete the folder and run its step again; existing releases are not charged again."


def write_pack(
    deployment: Deployment,
    store: Store,
    uri: str,
    folder: Path,
    *,
    operator: bool,
    words: Mapping[str, str],
) -> None:
    """Write the pack of a model; evidence.json, with the digests of all other files, comes last.

    Args:
        deployment: the deployment whose ledger contains its releases.
        store: the store that contains the model.
        uri: address of a training step's output.
        folder: an empty folder.
        operator: whether to include values for the operator only.
        words: statements by the operator on model and data, by `check_evidence.OPERATOR_WORDS`.

    Raises:
        BadInput: there is no model, or no guarantee; or its statement, its releases and the ledger
            disagree.
    """
    result = releasable_model(store, uri)
    if not result.releases:
        what = "the model was made without private text, so there is no claim to prove"
        raise BadInput(what, where=uri, fix="Give a model that was trained with DP.")
    model = store.local_copy(uri)
    statement = _true_statement(result, model, uri)
    claims = check_evidence.claims_of(statement)
    ledger = open_ledger(deployment, store)
    confirm_releases(ledger, result.releases, uri)
    extracts = [_extract(ledger, claim, operator) for claim in claims]
    content = {
        "version": 3,
        "edition": "operator" if operator else "publishable",
        "created": datetime.now(UTC).date().isoformat(),
        "model": _identity(store, uri, result),
        "derived": [check_evidence.recorded(claim) for claim in claims],
        "derived_by": f"dp-accounting {metadata.version('dp-accounting')}",
        "trained_by": _trained_by(result, _release_of_step(ledger, result, uri)),
        "audits": [
            record.model_dump(mode="json")
            for record in audits_of(store, subjects_of(store, uri, result), operator=operator)
        ],
        "measures": _measures(result, operator),
        "operator_words": {
            name: " ".join(words.get(name, "").split()) or check_evidence.NOT_STATED
            for name in check_evidence.OPERATOR_WORDS
        },
        "made_by": {"spec_hash": result.spec_hash, "output": uri.rstrip("/").split("/")[-1]},
        "versions": result.versions or {"versions": "not recorded by the step"},
        "files": {},
    }
    evidence = _plain(content, check_evidence.EVIDENCE)
    charges = _plain({"version": 3, "extracts": extracts}, check_evidence.LEDGER)
    for name in (check_evidence.STATEMENT, check_evidence.WORDS):
        shutil.copyfile(model / name, folder / name)
    shutil.copyfile(check_evidence.__file__, folder / check_evidence.SCRIPT)
    _write_json(folder / check_evidence.LEDGER, charges)
    pages = check_evidence.pages(evidence, charges, statement)
    if (folder / check_evidence.WORDS).read_text(encoding="utf-8") != pages[check_evidence.WORDS]:
        what = f"{check_evidence.WORDS} and {check_evidence.STATEMENT} of the model differ"
        fix = "Make the pack with the version of Confide that made the model."
        raise BadInput(what, where=str(model), fix=fix)
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    evidence["files"] = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
    _write_json(folder / check_evidence.EVIDENCE, evidence)


_CARD_WORDS = ("license", "language")  # of the operator's words, in a hub's metadata


def _plain(content: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return data as JSON values of the shape that the script requires of a file.

    Raises:
        ValueError: the data have another shape.
    """
    plain: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    for fault in check_evidence.misshapen(plain, check_evidence.SHAPES[file], file):
        raise ValueError(fault)
    return plain


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# --- agreement of the sources


def _true_statement(result: StepResult, folder: Path, uri: str) -> dict[str, Any]:
    """Return the statement in the model's folder, after a comparison with its releases.

    Raises:
        BadInput: the statement does not follow from the releases, or makes no claim.
    """
    try:
        written = json.loads((folder / check_evidence.STATEMENT).read_text())
    except (OSError, ValueError):
        raise BadInput("no privacy statement there", where=uri, fix=_RUN_AGAIN) from None
    made_up = bool(result.facts.get("made_up"))
    after = released_after(result)
    true = dict(privacy_statement(result.releases, made_up=made_up, released_after=after).data)
    if not _same(written, json.loads(json.dumps(true))):
        raise BadInput(
            "its privacy statement does not follow from its releases", where=uri, fix=_RUN_AGAIN
        )
    for claim in check_evidence.claims_of(true):
        if not claim["private"] and claim["epsilon"] is not None:
            what = f"its statement makes no claim for the data set {claim['dataset']}"
            fix = "PRIVACY.md in the model's folder states the reason."
            raise BadInput(what, where=uri, fix=fix)
    return dict(written)


def _same(written: Any, true: Any) -> bool:
    """Return whether two JSON values are equal, up to the last digits of numbers."""
    if isinstance(written, dict) and isinstance(true, dict):
        return written.keys() == true.keys() and all(_same(written[n], true[n]) for n in true)
    if isinstance(written, list) and isinstance(true, list):
        return len(written) == len(true) and all(map(_same, written, true))
    if isinstance(written, float) and isinstance(true, float):
        return math.isclose(written, true, rel_tol=_ROUNDING)
    return bool(written == true)


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


# --- the model


def _identity(store: Store, uri: str, result: StepResult) -> dict[str, Any]:
    shape, digests = result.facts.get("shape") or {}, store.digests(uri)
    exported = [name for name in of_last_model(digests) if name not in result.operator_files]
    return {
        "step": result.step,
        **{name: shape.get(name) for name in ("kind", "layers", "hidden")},
        **{name: result.facts.get(name) for name in ("parameters", "head")},
        "files": {name: digests[name] for name in exported},
    }


def _trained_by(result: StepResult, ledger_id: str) -> dict[str, Any] | None:
    """Return the public settings of the model's private training."""
    plan = result.facts.get("plan")
    if not plan or not ledger_id:
        return None
    same = (
        "declared_units",
        "noise_multiplier",
        "clip_norm",
        "clipping",
        "examples_per_step",
        "max_examples_per_unit",
    )
    return {
        "ledger_id": ledger_id,
        "sampling": plan["sampling"]["kind"],
        "phases": list(plan["schedule"]),
        "noise_bands": len(plan["strategy"]["coefficients"]),
        **{name: plan[name] for name in same},
    }


def _measures(result: StepResult, operator: bool) -> list[dict[str, Any]]:
    """Return the last value of each metric of the model's step that the edition may show."""
    last = {m.name: m for m in sorted(result.metrics, key=lambda m: m.step)}
    return [
        {"name": name, "value": m.value, "label": m.label}
        for name, m in sorted(last.items())
        if (operator or Label(m.label) is not Label.OPERATOR)
        and not name.startswith(("epsilon", "delta"))
    ]


def model_card(
    result: StepResult, statement: Mapping[str, Any], *, words: Mapping[str, str], measured: bool
) -> str:
    """Return the model card of an exported model: a hub's metadata, the claim, released figures.

    Args:
        result: of the step that made the model.
        statement: the model's privacy statement.
        words: the operator's `model_name`, `license`, `language` and `base_model`, where given.
        measured: whether the result's metrics are those of this model, not of a later one.
    """
    stated = {name: words.get(name, "") or check_evidence.NOT_STATED for name in _CARD_WORDS}
    shape = result.facts.get("shape") or {}
    model = {"kind": shape.get("kind"), "step": result.step, "head": result.facts.get("head")}
    evidence = {"model": model, "operator_words": stated}
    metadata = check_evidence.card_metadata(evidence, statement)
    measures = _measures(result, operator=False) if measured else []
    if base := words.get("base_model"):
        metadata += f"base_model: {json.dumps(base)}\n"
    if measures:
        metadata += f"metrics: {json.dumps([measure['name'] for measure in measures])}\n"
    rows = [(m["name"], f"{m['value']:.6g}", m["label"]) for m in measures]
    figures: list[check_evidence.Block] = [
        ("h1", words.get("model_name") or "A model trained by Confide"),
        *([("table", (("figure", "value", "label"), rows))] if rows else []),
    ]
    privacy = check_evidence.statement_words(statement).replace("# Privacy", "## Privacy")
    return f"---\n{metadata}---\n\n{check_evidence.markdown(figures)}\n{privacy}"


# --- the ledger


def _extract(ledger: Ledger, claim: Mapping[str, Any], operator: bool) -> dict[str, Any]:
    """Return the account of one claim: its budget and all releases charged to it."""
    made_of = [release["ledger_id"] for release in claim["releases"]]
    dataset = ledger.entry(made_of[0]).dataset  # the others share its budget
    remaining, entries = ledger.remaining(dataset), ledger.history(dataset)
    shown = [entry for entry in entries if entry.accounted or operator]
    budget = remaining.budget
    # Later days would reveal the number of trainings of a private selection.
    secret = (n for n, e in enumerate(shown, 1) if isinstance(e.event, RandomCountSelection))
    dated = math.inf if operator else next(secret, math.inf)
    plans: dict[str, int] = {}
    lines = []
    for number, entry in enumerate(shown, 1):
        line = _line(number, entry, operator, dated)
        line["in_this_model"] = entry.id in made_of
        planned = entry.whole_plan and entry.plan_key
        line["plan"] = plans.setdefault(entry.plan_key, len(plans) + 1) if planned else 0
        lines.append(line)
    return {
        "dataset": claim["dataset"],
        "budget_unit": budget.unit,
        "budget_neighbours": budget.relation,
        "budget_epsilon": budget.epsilon,
        "budget_delta": budget.delta,
        "share_spent": None if budget.made_up else remaining.share,
        "left_out": "nothing"
        if operator
        else "uses of the data without a guarantee, whose results are for the operator only; times"
        " of day; names of runs",
        "entries": lines,
    }


def _line(number: int, entry: Entry, operator: bool, dated: float) -> dict[str, Any]:
    """Return one entry of the ledger, without withheld fields."""
    # Times of day would reveal the size of the data.
    until = None if operator else len("2026-01-01")
    shown = entry.to_json()
    same = ("id", "event", "unit", "delta", "state", "accounted", "known_seed")
    return {
        "number": number,
        "neighbours": shown["relation"],
        **{name: shown[name] for name in (*same, "seed_hash", "released_hash")},
        "reserved": entry.reserved_at[:until] if number <= dated else "",
        "settled": (entry.settled_at or "")[:until] if number < dated else "",
    }
