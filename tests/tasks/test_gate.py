"""The gate: the verdict of audits on a claim decides registration, promotion and export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from command_line import Confide
from evidence_examples import (
    EARLIER,
    TRAINING,
    audits_in,
    pack_of,
    released_model,
    settled,
    store_of,
)
from mlflow.tracking import MlflowClient  # noqa: TID251
from pydantic import ValidationError
from step_outputs import publish_findings

from dp_core.audit.one_run import LOWER_BOUND, Claim, Guesses, audit_claim, bound_finding
from dp_core.audit.protocol import (
    COIN_BOUND,
    Audit,
    AuditRecord,
    Finding,
    NullDistribution,
    verdict_of,
)
from dp_core.errors import BadInput, Contradicted
from dp_core.labels import Label
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.seed_store import PrivacySeed
from tasks.commands import export_command
from tasks.context import StepContext, StepOutput
from tasks.evidence import audits
from tasks.evidence.audits import JUDGED, judge, verdict_on
from tasks.execution import contract
from tasks.protocol import PrivacyAuditSpec, PromoteSpec, ReportSpec, RunContext, StepResult
from tasks.protocol.messages import Judged
from tasks.releases.provenance import find_origin, origin_of_export
from tasks.results import SUBJECT, Input, read_result
from tasks.runtime.deployment import Deployment
from tasks.steps import privacy_audit_step as privacy_audit
from tasks.steps import promote_step as promote
from tasks.tracking.event_log import EventLog, LoggedModel
from tasks.tracking.mlflow import ALIAS, Delivery, send_all

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow and SQLAlchemy.

RUN = RunContext(run_key="run-1", run_name="dp_bert today", task="report")
NAME = "confide-notes"


def record(
    verdict: str, *, bound: bool = True, label: Label = Label.DP, name: str = "Bound"
) -> Any:
    if verdict == "not run":
        return Audit("bound", name, "ε").not_run("nobody did")
    low = 9.0 if verdict == "contradicted" else 0.5
    return Audit("bound", name, "ε").finding(
        level="patient",
        value=low,
        interval=(low, 20.0),
        confidence=0.95,
        ceiling=4.0,
        power="up to 9",
        null_control=NullDistribution(of="noise", low=0, high=1, alarm_rate=0.001),
        bounds_claim=bound,
        verdict=verdict,
        finding="found",
        label=label,
    )


def invalid_record(*, right: int = 30, key: str = LOWER_BOUND.key, label: Label = Label.DP) -> Any:
    """Return the record that the audit writes when all of its null controls raise an alarm."""
    claim = Claim(1.0, 1e-6, PrivacyProfile.of_claim(1.0, 1e-6))
    coins, same_coins = np.zeros((2, 400), np.bool_)
    coins[:right] = same_coins[:60] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dp_core.audit.one_run.throw_coins", lambda *_: same_coins)
        scores, seed = -np.arange(400.0), PrivacySeed.fixed("a test")
        verdict = audit_claim(claim, [scores], coins, Guesses(60, 0), seed)
    assert (verdict.null.alarms, verdict.null.repeats) == (1000, 1000)
    return bound_finding(Audit(key, "Bound", "ε"), verdict, claim, label)


GOOD, BAD, WEAK = record("consistent"), record("contradicted"), record("inconclusive")
INVALID = invalid_record()
LOOK = record("inconclusive", bound=False, name="Exposure")
ASIDE = record("consistent", bound=False)
SECRET = record("inconclusive", bound=False, label=Label.OPERATOR, name="Membership")


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ([], "not audited"),
        ([record("not run")], "not audited"),
        ([ASIDE, LOOK], "not audited"),
        ([GOOD], "consistent"),
        ([GOOD, ASIDE, record("not run")], "consistent"),
        ([GOOD, LOOK], "inconclusive"),
        ([GOOD, SECRET], "consistent"),
        ([GOOD, WEAK], "invalid"),
        ([INVALID], "invalid"),
        ([GOOD, INVALID], "invalid"),
        ([invalid_record(right=60)], "invalid"),
        ([invalid_record(label=Label.OPERATOR)], "invalid"),
        *[([GOOD] * at + [BAD] + [GOOD] * (3 - at), "contradicted") for at in range(4)],
        ([INVALID, BAD], "contradicted"),
        ([record("contradicted", label=Label.OPERATOR), GOOD], "contradicted"),
    ],
)
def test_worst_record_decides_the_verdict(records: list[AuditRecord], word: str) -> None:
    verdict = verdict_of("ε = 4", records)
    assert verdict.word == word
    assert verdict.sentence.startswith("ε = 4: ")


# --- a model of the store


@pytest.fixture
def uri(tracked: Deployment) -> str:
    return released_model(tracked, settled(tracked, EARLIER, TRAINING), model=NAME)


@pytest.fixture
def audit_records(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """The records that the only registered audit returns for every audited model."""
    records: list[Finding] = []
    registered = Audit("bound", "Bound", "ε", "audit", several=True)
    monkeypatch.setattr(audits, "AUDITS", (registered,))
    monkeypatch.setattr(audits, "read_findings", lambda *_: tuple(records))
    return records


def audited(deployment: Deployment, uri: str, name: str = "a" * 16) -> None:
    store = store_of(deployment)
    result = read_result(store, uri)
    assert result is not None
    weights = {SUBJECT: result.facts["weights_digest"]}
    folder = deployment.home / f"audit-{name}"
    publish_findings(store, f"store://audit/{name}", folder, [], **weights, made_up=False)


def judged(deployment: Deployment, uri: str, rule: Any = "audited") -> dict[str, Any]:
    store = store_of(deployment)
    result = read_result(store, uri)
    assert result is not None
    (judgement,) = judge(store, {"dp": Input(result, Path())}, {"dp": uri}, rule)
    return judgement


def test_verdict_uses_audits_of_the_same_weights_only(
    tracked: Deployment, uri: str, audit_records: list[Finding]
) -> None:
    result = read_result(store_of(tracked), uri)
    assert result is not None
    other = released_model(tracked, result.releases, name="b" * 16, weights=b"others")
    audited(tracked, uri)
    audit_records.append(BAD)
    store = store_of(tracked)
    words = {
        model: verdict_on(store, model, read_result(store, model)).word for model in (uri, other)
    }  # type: ignore[arg-type]
    assert words == {uri: "contradicted", other: "not audited"}


def test_audit_of_the_nonprivate_control_does_not_affect_the_verdict(
    tracked: Deployment, uri: str, audit_records: list[Finding]
) -> None:
    audited(tracked, uri)
    audit_records += [GOOD, BAD.model_copy(update={"subject": audits.CONTROL})]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.evidence.audits.audits_of", lambda *_, **__: tuple(audit_records))
        assert judged(tracked, uri)["verdict"] == "consistent"


@pytest.mark.parametrize(
    ("record", "audited_rule", "unaudited_rule"),
    [
        (GOOD, True, True),
        (None, False, True),
        (WEAK, False, False),
        (INVALID, False, False),
        (BAD, False, False),
    ],
)
def test_promotion_follows_the_verdict_and_the_rule(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    record: AuditRecord | None,
    audited_rule: bool,
    unaudited_rule: bool,
) -> None:
    if record is not None:
        audited(tracked, uri)
        audit_records.append(record)
    promoted = {rule: judged(tracked, uri, rule)["promoted"] for rule in
                ("audited", "unaudited", "approved")}  # fmt: skip
    assert promoted == {"audited": audited_rule, "unaudited": unaudited_rule, "approved": False}


def test_model_with_a_known_seed_is_not_promoted(
    tracked: Deployment, audit_records: list[Finding]
) -> None:
    releases = [
        r.model_copy(update={"seed_known": True}) for r in settled(tracked, EARLIER, TRAINING)
    ]
    known = released_model(tracked, releases, model=NAME)
    audited(tracked, known)
    audit_records.append(GOOD)
    assert not judged(tracked, known)["promoted"]


def test_unreadable_audit_output_does_not_hide_other_audits(
    tracked: Deployment, uri: str, audit_records: list[Finding]
) -> None:
    store = store_of(tracked)
    store.write(f"store://audit/{'0' * 16}/result.json", b'{"version": 1}')
    audited(tracked, uri)
    audit_records.append(BAD)
    assert judged(tracked, uri)["verdict"] == "contradicted"


def test_finding_that_no_registered_audit_covers_is_refused(tracked: Deployment, uri: str) -> None:
    """An unknown finding may contradict the claim, so the gate must not ignore it."""
    result, store = read_result(store_of(tracked), uri), store_of(tracked)
    assert result is not None
    unknown = BAD.model_copy(update={"key": "of_another_version"})
    weights = {SUBJECT: result.facts["weights_digest"]}
    folder = tracked.home / "unknown"
    publish_findings(store, f"store://audit/{'a' * 16}", folder, [unknown], **weights)
    with pytest.raises(BadInput, match="no registered audit covers the finding of_another_version"):
        verdict_on(store, uri, result)


# --- registration in MLflow


def report_of(
    deployment: Deployment,
    uri: str,
    monkeypatch: pytest.MonkeyPatch,
    title: str = "t",
    run: RunContext = RUN,
) -> ReportSpec:
    """Run a report step whose only output is the verdict, as a process would."""
    spec = ReportSpec(made_up=False, title=title, results={"dp": uri}, settings={})

    def judging(spec: ReportSpec, context: StepContext) -> StepOutput:
        results = {name: context.input(uri) for name, uri in spec.results.items()}
        verdicts = judge(context.store, results, spec.results, spec.promotion)
        return StepOutput(outputs={}, facts={JUDGED: verdicts, "created": "2026-01-01"})

    monkeypatch.setattr(contract, "_module", lambda _: SimpleNamespace(run=judging))
    contract.run_step(spec, deployment, run)
    return spec


def approve(deployment: Deployment, report: ReportSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the step `promote` on a report, as an approval does."""
    spec = PromoteSpec(made_up=False, report_uri=report.output)
    monkeypatch.setattr(contract, "_module", lambda _: promote)
    contract.run_step(spec, deployment, RUN.model_copy(update={"task": "promote"}))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    messages: list[Any] = []
    monkeypatch.setattr(contract, "send", messages.append)
    yield messages


def test_consistent_model_is_registered_with_its_verdict_and_promoted(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    monkeypatch: pytest.MonkeyPatch,
    sent: list[Any],
) -> None:
    audited(tracked, uri)
    audit_records.append(GOOD)
    for _ in range(2):  # the second run reuses the result and sends the same message
        report_of(tracked, uri, monkeypatch)
    client = MlflowClient(tracked.tracking)
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    result = read_result(store_of(tracked), uri)
    assert result is not None
    assert version.tags["confide.verdict"] == "consistent"
    assert version.tags["confide.spec_hash"] == result.spec_hash
    assert float(version.tags["confide.epsilon"]) > 0
    assert float(version.tags["confide.delta"]) == 2e-6
    assert version.tags["confide.unit"] == "patient"
    assert client.get_registered_model(NAME).aliases == {ALIAS: version.version}
    assert [m.verdict for m in sent if isinstance(m, Judged)] == ["consistent"] * 2


def test_model_of_a_private_selection_is_not_registered(
    tracked: Deployment, uri: str, audit_records: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry stamps each version with a time that would reveal the end of the selection."""
    audited(tracked, uri)
    audit_records.append(GOOD)
    report_of(tracked, uri, monkeypatch, run=RUN.model_copy(update={"hides_count": True}))
    assert MlflowClient(tracked.tracking).search_registered_models() == []


def test_contradicted_model_is_recorded_fails_the_step_and_is_not_promoted(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    monkeypatch: pytest.MonkeyPatch,
    sent: list[Any],
) -> None:
    audited(tracked, uri)
    audit_records += [GOOD, BAD]
    for _ in range(2):
        with pytest.raises(Contradicted, match="contradicted by Bound") as refused:
            report_of(tracked, uri, monkeypatch)
        assert refused.value.exit_code == 4
    client = MlflowClient(tracked.tracking)
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    assert version.tags["confide.verdict"] == "contradicted"
    assert client.get_registered_model(NAME).aliases == {}
    experiment = client.get_experiment_by_name("confide")
    assert experiment is not None
    assert {r.info.status for r in client.search_runs([experiment.experiment_id])} == {"FAILED"}
    assert EventLog.all(tracked.events) == []  # every event was delivered to MLflow
    assert [m.verdict for m in sent if isinstance(m, Judged)] == ["contradicted"] * 2


def test_later_contradiction_removes_the_alias_permanently(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audited(tracked, uri)
    audit_records.append(GOOD)
    report_of(tracked, uri, monkeypatch)
    client = MlflowClient(tracked.tracking)
    assert ALIAS in client.get_registered_model(NAME).aliases
    audit_records.append(BAD)
    with pytest.raises(Contradicted):
        report_of(tracked, uri, monkeypatch, "later")
    assert client.get_registered_model(NAME).aliases == {}
    audit_records.remove(BAD)  # an earlier run whose events are delivered later
    report_of(tracked, uri, monkeypatch, "late")
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    assert version.tags["confide.verdict"] == "contradicted"
    assert client.get_registered_model(NAME).aliases == {}


def test_verdict_and_alias_are_delivered_once_after_an_outage(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audited(tracked, uri)
    audit_records.append(GOOD)
    report_of(replace(tracked, tracking="http://127.0.0.1:9"), uri, monkeypatch)
    client = MlflowClient(tracked.tracking)
    assert client.search_model_versions(f"name = '{NAME}'") == []
    with monkeypatch.context() as patch:  # every event is delivered, then the process is killed
        patch.setattr(EventLog, "confirm", _raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            Delivery(tracked).deliver(EventLog.all(tracked.events)[0])
    assert send_all(tracked) == 0
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    assert client.get_registered_model(NAME).aliases == {ALIAS: version.version}


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("verdict", ["contradicted", "invalid", None])
def test_event_with_an_alias_against_the_verdict_is_refused(verdict: str | None) -> None:
    tags = {"confide.verdict": verdict} if verdict else {}
    with pytest.raises(ValidationError, match="the verdict is"):
        LoggedModel(name=NAME, files=[], description="", tags=tags, alias=ALIAS)


def test_approved_model_is_judged_again_and_promoted(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = report_of(tracked, uri, monkeypatch)
    client = MlflowClient(tracked.tracking)
    assert client.get_registered_model(NAME).aliases == {}
    approve(tracked, report, monkeypatch)
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    assert client.get_registered_model(NAME).aliases == {ALIAS: version.version}
    assert version.tags["confide.approved"] == "by a person"


@pytest.mark.parametrize("right", [30, 60])
def test_model_with_an_invalid_audit_is_never_promoted(
    tracked: Deployment, uri: str, right: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The audit writes the record, and the registry of audits reads it from the store."""
    store = store_of(tracked)
    result = read_result(store, uri)
    assert result is not None
    weights = {SUBJECT: result.facts["weights_digest"]}
    uri_of_audit, findings = f"{store.root}/audit/{'a' * 16}", [invalid_record(right=right)]
    publish_findings(store, uri_of_audit, tmp_path / "audit", findings, **weights, made_up=False)
    for rule in ("audited", "unaudited", "approved"):
        judgement = judged(tracked, uri, rule)
        assert (judgement["verdict"], judgement["promoted"]) == ("invalid", False)
    report = report_of(tracked, uri, monkeypatch)
    approve(tracked, report, monkeypatch)
    client = MlflowClient(tracked.tracking)
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    assert version.tags["confide.verdict"] == "invalid"
    assert client.get_registered_model(NAME).aliases == {}
    pack = pack_of(tracked, uri, tmp_path / "pack")
    audits = audits_in(pack)
    (shown,) = [audit for audit in audits if audit.key == LOWER_BOUND.key]
    assert (shown.verdict, shown.ceiling) == ("invalid", None)
    assert "An audit of the claim is invalid" in (pack / "evidence.html").read_text()


def test_invalid_audit_from_outside_withdraws_the_model(
    tracked: Deployment, uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = report_of(tracked, uri, monkeypatch)
    approve(tracked, report, monkeypatch)
    client = MlflowClient(tracked.tracking)
    assert ALIAS in client.get_registered_model(NAME).aliases
    outside(
        tracked, uri, monkeypatch, tmp_path, invalid_record(key=COIN_BOUND, label=Label.OPERATOR)
    )
    assert client.get_registered_model(NAME).aliases == {}
    assert judged(tracked, uri, "unaudited")["verdict"] == "invalid"


def test_model_contradicted_before_its_approval_is_not_promoted(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = report_of(tracked, uri, monkeypatch)
    audited(tracked, uri)
    audit_records.append(BAD)
    with pytest.raises(Contradicted):
        approve(tracked, report, monkeypatch)
    assert MlflowClient(tracked.tracking).get_registered_model(NAME).aliases == {}


# --- audits from outside, at any time


def given(verdict: str) -> Finding:
    """Return a record of an audit by texts that, as its user states, fair coins divided."""
    coin_record = record(verdict, label=Label.OPERATOR, name="Given coins")
    return cast(Finding, coin_record.model_copy(update={"key": COIN_BOUND}))


def outside(
    deployment: Deployment,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcome: Finding,
) -> StepResult:
    """Run the step `privacy_audit` on a model, as a process would, with this record as result."""
    monkeypatch.setattr(contract, "_module", lambda _: privacy_audit)
    monkeypatch.setattr("dp_core.audit.black_box.audit_files", lambda *_: [outcome])
    canaries = tmp_path / f"{outcome.verdict}.txt"
    canaries.write_text("her number is [[seven]]")
    spec = PrivacyAuditSpec(made_up=False, audited_model=model, given_canaries=str(canaries))
    context = RUN.model_copy(update={"run_key": "later", "task": "privacy_audit"})
    return contract.run_step(spec, deployment, context)


@pytest.mark.parametrize("copied", [False, True])
def test_contradiction_from_outside_withdraws_the_model_and_is_in_its_pack(
    tracked: Deployment,
    uri: str,
    copied: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    report = report_of(tracked, uri, monkeypatch)
    approve(tracked, report, monkeypatch)
    client, store = MlflowClient(tracked.tracking), store_of(tracked)
    assert ALIAS in client.get_registered_model(NAME).aliases
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(
        (store.local_copy(uri) / "model.safetensors").read_bytes()
    )
    model = str(folder) if copied else uri
    for _ in range(2):  # the second run reuses the result and fails alike
        with pytest.raises(Contradicted, match="contradicted by Given coins"):
            outside(tracked, model, monkeypatch, tmp_path, given("contradicted"))
    (version,) = client.search_model_versions(f"name = '{NAME}'")
    assert version.tags["confide.verdict"] == "contradicted"
    assert client.get_registered_model(NAME).aliases == {}
    assert judged(tracked, uri, "unaudited")["promoted"] is False
    audits = audits_in(pack_of(tracked, uri, tmp_path / "pack"))
    (contradiction,) = [audit for audit in audits if audit.verdict == "contradicted"]
    assert (contradiction.key, contradiction.subject) == (COIN_BOUND, "the released model")


@pytest.mark.parametrize("kind", ["kept on the way", "fine-tuned"])
def test_contradicted_copy_prevents_the_export_of_every_model_of_its_claim(
    deployment: Deployment,
    no_mlflow: None,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The audited copy is a model of an earlier epoch, or a fine-tuned model."""
    releases, store = settled(deployment, EARLIER, TRAINING), store_of(deployment)
    if kind == "fine-tuned":
        uri = released_model(deployment, releases, step="finetune", weights_digest="")
        inside, subject = "", "the released model"
    else:
        inside, subject = "after/50/", "the model after 50 updates of its training"
        uri = released_model(deployment, releases, kept={"after/50": b"early"}, updates=100)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("model.safetensors", "PRIVACY.md"):
        (copy / name).write_bytes((store.local_copy(uri) / inside / name).read_bytes())
    assert find_origin(store, copy) == uri
    with pytest.raises(Contradicted, match="contradicted by Given coins"):
        outside(deployment, str(copy), monkeypatch, tmp_path, given("contradicted"))
    result = read_result(store, uri)
    assert result is not None and verdict_on(store, uri, result).word == "contradicted"
    with pytest.raises(Contradicted):
        export_command._released_files(store, uri)
    audits = audits_in(pack_of(deployment, uri, tmp_path / "pack"))
    assert [a.subject for a in audits if a.verdict == "contradicted"] == [subject]
    (copy / "PRIVACY.md").write_text("another")
    with pytest.raises(BadInput, match="was changed after the export"):
        find_origin(store, copy)


def test_evidence_for_an_intermediate_model_is_refused_with_the_last_model(
    deployment: Deployment, tmp_path: Path
) -> None:
    releases, store = settled(deployment, EARLIER, TRAINING), store_of(deployment)
    uri = released_model(deployment, releases, kept={"after/50": b"early"}, updates=100)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes(b"early")
    with pytest.raises(BadInput, match=f"saved this model before the end.*--uri {uri}"):
        origin_of_export(store, copy)


def test_audit_from_outside_never_promotes_a_model(
    tracked: Deployment, uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The coins were not bound before the training, so they may be chosen to hide leakage."""
    for verdict in ("consistent", "inconclusive"):
        result = outside(tracked, uri, monkeypatch, tmp_path, given(verdict))
        assert result.facts[JUDGED] == []
    assert judged(tracked, uri)["verdict"] == "not audited"
    assert MlflowClient(tracked.tracking).search_registered_models() == []
    audits = audits_in(pack_of(tracked, uri, tmp_path / "pack"))
    (summary,) = [audit for audit in audits if audit.key == "from_outside"]
    assert "for the operator only" in summary.finding
    audits = audits_in(pack_of(tracked, uri, tmp_path / "whole", operator=True))
    shown = {audit.verdict for audit in audits if audit.key == COIN_BOUND}
    assert shown == {"consistent", "inconclusive"}


def test_contradicted_third_party_model_is_not_registered(
    tracked: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"of somebody else")
    with pytest.raises(Contradicted, match="the claim, as given: contradicted by Given coins"):
        outside(tracked, str(folder), monkeypatch, tmp_path, given("contradicted"))
    assert MlflowClient(tracked.tracking).search_registered_models() == []


def test_step_result_alone_registers_no_model(
    tracked: Deployment, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = ReportSpec(made_up=False, title="t", results={}, settings={})
    output = StepOutput(outputs={}, facts={}, model=NAME)
    monkeypatch.setattr(contract, "_module", lambda _: SimpleNamespace(run=lambda *_: output))
    contract.run_step(report, tracked, RUN)
    assert MlflowClient(tracked.tracking).search_registered_models() == []


@pytest.mark.usefixtures("at_home")
def test_contradicted_model_is_not_exported(
    tracked: Deployment,
    uri: str,
    audit_records: list[Finding],
    confide: Confide,
    tmp_path: Path,
) -> None:
    audited(tracked, uri)
    audit_records.append(BAD)
    code, _, err = confide("export", str(tmp_path / "out"), "--uri", uri)
    assert code == 4
    assert "contradicted by Bound" in err
    assert not (tmp_path / "out").exists()
