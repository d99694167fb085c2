"""A released model with its ledger entries and its statement, as a job would have left it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from release_examples import record
from step_outputs import publish_findings

from dp_core.audit.protocol import AuditRecord, Finding
from dp_core.config.release import ReleaseRecord
from dp_core.privacy import check_evidence
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanisms import MechanismEvent, PoissonGaussian, PrivacyUnit
from dp_core.privacy.seed_store import SeedStore
from tasks.evidence.pack import write_pack
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.results import PROBES, SUBJECT, write_statement
from tasks.runtime.deployment import Deployment
from tasks.storage.store import RESULT, Store

UNIT = PrivacyUnit.PATIENT
UNITS = 10_000
TRAINING = PoissonGaussian.single(0.1, 2.0, 100, unit=UNIT)
EARLIER = PoissonGaussian.single(1.0, 9.0, 4, unit=UNIT)
SPEC = "5" * 64
DATA_FILES = {
    "evidence": check_evidence.EVIDENCE,
    "statement": check_evidence.STATEMENT,
    "ledger": check_evidence.LEDGER,
}
# No publishable pack may contain this word, whether as operator metric, run name, error or file.
SECRET = "Quendoline"
PLAN = {
    "declared_units": UNITS,
    "sampling": {"kind": "poisson"},
    "clip_norm": 1.0,
    "noise_multiplier": 2.0,
    "schedule": [{"steps": 100, "expected_batch": 1000}],
    "clipping": "flat",
    "examples_per_step": 1,
    "max_examples_per_unit": 4,
    "strategy": {"coefficients": [65536]},
}


def store_of(deployment: Deployment) -> Store:
    return Store(deployment.store, deployment.cache)


def settled(
    deployment: Deployment,
    *events: MechanismEvent,
    dataset: str = "notes",
    spec_hash: str = SPEC,
    settle: bool = True,
    unit: PrivacyUnit = UNIT,
    budget: str | None = None,
) -> list[ReleaseRecord]:
    """Charge releases as one plan; the last release belongs to the step of the model."""
    ledger = Ledger.open(deployment.ledger)
    if dataset not in ledger.datasets():
        ledger.register_dataset(dataset, unit, 20.0, 1e-4, shares_budget_with=budget)
    seeds, key = SeedStore(deployment.seeds), f"{SECRET} 14:03:59 · {dataset}"
    hashes = [f"{number}" * 64 for number in range(len(events) - 1)] + [spec_hash]
    planned = [
        Entry(dataset, unit, event, 1e-6, hash_of_spec, key, key)
        for event, hash_of_spec in zip(events, hashes, strict=True)
    ]
    ledger.register_plan(planned)
    records = []
    for reservation in planned:
        entry = ledger.reserve(reservation)
        ledger.seed(entry, seeds, b"manifest")
        if settle:
            entry = ledger.settle(entry.id, released=b"what came out")
        more = {"plan": entry.plan_key, "released": entry.released_hash, "declared_units": UNITS}
        records.append(record(entry.id, entry.event, dataset, budget=budget or dataset, **more))
    return records


def released_model(
    deployment: Deployment,
    releases: Sequence[ReleaseRecord],
    *,
    name: str = "a" * 16,
    weights: bytes = b"weights",
    step: str = "pretrain",
    plan: Mapping[str, Any] | None = PLAN,
    kept: Mapping[str, bytes] = {},
    **facts: Any,
) -> str:
    """Publish a model that descends from these releases; `kept` has earlier weights by folder."""
    store, folder = store_of(deployment), deployment.home / "made" / name
    after = [int(name.split("/")[1]) for name in kept]
    if kept:
        facts["kept_updates"], after = after, [*after, facts["updates"]]
    for inside, content in {"": weights, **kept}.items():
        model_folder = folder / inside
        model_folder.mkdir(parents=True, exist_ok=True)
        (model_folder / "model.safetensors").write_bytes(content)
        (model_folder / "config.json").write_text("{}")
        write_statement(model_folder, releases, made_up=False, released_after=after)
    uri = f"store://{step}/{name}"
    store.publish(folder, uri)
    metrics = [
        MetricRecord(name="mlm_accuracy_public", value=0.25, label="dp"),
        MetricRecord(name=f"f1/{SECRET}", value=0.75, label="operator"),
    ]
    usual = {"plan": plan, "made_up": False, "parameters": 7}
    usual["shape"] = {"kind": "bert", "layers": 2, "hidden": 128}
    usual["weights_digest"] = hashlib.sha256(weights).hexdigest()
    result = StepResult(
        step=step, spec_hash=SPEC, outputs={}, metrics=metrics, releases=list(releases),
        facts=usual | facts, seconds=12345.678, versions={"python": "3.11.7"},
    )  # fmt: skip
    store.write(f"{uri}/{RESULT}", result.model_dump_json().encode())
    return uri


def publish_audit(
    deployment: Deployment,
    findings: Sequence[Finding],
    subject: str,
    *,
    step: str = "audit",
    name: str = "a",
) -> str:
    """Publish the findings of an audit step on the model with these weights."""
    folder, uri = deployment.home / "made" / f"{step}-{name}", f"store://{step}/{name * 16}"
    facts = {SUBJECT: subject, PROBES: "c", "made_up": False}
    return publish_findings(store_of(deployment), uri, folder, findings, **facts)


def pack_of(
    deployment: Deployment, uri: str, folder: Path, *, operator: bool = False, **words: str
) -> Path:
    """Write the evidence pack of a model."""
    folder.mkdir(parents=True)
    write_pack(deployment, store_of(deployment), uri, folder, operator=operator, words=words)
    return folder


def contents_of(pack: Path) -> tuple[dict[str, Any], ...]:
    """Return evidence, statement and ledger extract of a pack."""
    return tuple(json.loads((pack / name).read_text()) for name in DATA_FILES.values())


def audits_in(pack: Path) -> list[AuditRecord]:
    """Return the audit records of a pack."""
    return [AuditRecord.model_validate(record) for record in contents_of(pack)[0]["audits"]]


def altered(pack: Path, **changed: Any) -> check_evidence.Findings:
    """Change data of a pack, rewrite its pages and digests where possible, and check it.

    Args:
        pack: its folder.
        changed: `evidence`, `statement` or `ledger` -> a function that alters its content.
    """
    data = dict(zip(DATA_FILES, contents_of(pack), strict=True))
    for part, change in changed.items():
        change(data[part])
        (pack / DATA_FILES[part]).write_text(json.dumps(data[part]))
    with suppress(Exception):  # data of another shape: the old pages remain
        for name, text in check_evidence.pages(
            data["evidence"], data["ledger"], data["statement"]
        ).items():
            (pack / name).write_text(text)
    return signed_again(pack)


def signed_again(pack: Path) -> check_evidence.Findings:
    """Update the digests of changed files, as an attacker could, and check the pack."""
    evidence = json.loads((pack / check_evidence.EVIDENCE).read_text())
    for name in evidence.get("files", {}):
        if (pack / name).is_file():
            evidence["files"][name] = hashlib.sha256((pack / name).read_bytes()).hexdigest()
    (pack / check_evidence.EVIDENCE).write_text(json.dumps(evidence))
    return check_evidence.check(pack)
