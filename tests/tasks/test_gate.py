import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from evidence_examples import (
    EARLIER,
    TRAINING,
    audits_in,
    pack_of,
    publish_audit,
    released_model,
    settled,
    store_of,
)
from mlflow.tracking import MlflowClient  # noqa: TID251
from pydantic import ValidationError
from step_outputs import output_folder

from dp_core.audit.one_run import LOWER_BOUND, Claim, Guesses, audit_claim, bound_finding
from dp_core.audit.protocol import COIN_BOUND, Audit, Finding, NullDistribution, verdict_of
from dp_core.errors import BadInput, Contradicted
from dp_core.labels import Label
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.seed_store import PrivacySeed
from tasks.commands import export_command
from tasks.context import StepContext, StepOutput
from tasks.evidence import audits
from tasks.evidence.audits import JUDGED, judge
from tasks.execution import contract
from tasks.protocol.messages import Judged, StepResult
from tasks.protocol.specs import PrivacyAuditSpec, PromoteSpec, ReportSpec, RunContext
from tasks.releases.provenance import find_origin, origin_of_export
from tasks.results import MODEL_RUNS, Input, read_result
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
        return Audit(LOWER_BOUND.key, name, "ε").not_run("nobody did")
    low = 9.0 if verdict == "contradicted" else 0.5
    return Audit(LOWER_BOUND.key, name, "ε").finding(
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
    assert verdict.null_alarms == 1000
    return bound_finding(Audit(key, "Bound", "ε"), verdict, label)


GOOD, BAD, WEAK = record("consistent"), record("contradicted"), record("inconclusive")
INVALID = invalid_record()
LOOK = record("inconclusive", bound=False, name="Exposure")
RECORDS = {
    **{"good": GOOD, "bad": BAD, "weak": WEAK, "invalid": INVALID, "look": LOOK},
    "not run": record("not run"),
    "aside": record("consistent", bound=False),
    "secret": record("inconclusive", bound=False, label=Label.OPERATOR, name="Membership"),
    "invalid at 60": invalid_record(right=60),
    "invalid of the operator": invalid_record(label=Label.OPERATOR),
    "contradicted of the operator": record("contradicted", label=Label.OPERATOR),
}


@pytest.mark.cases
def test_worst_record_decides_the_verdict(records, word):
    verdict = verdict_of("ε = 4", [RECORDS[name] for name in records])
    assert verdict.word == word
    assert verdict.sentence.startswith("ε = 4: ")


def without_rows(context: StepContext) -> None:
    """Write the report's rows for MLflow's list: none."""
    (context.out / MODEL_RUNS).parent.mkdir()
    (context.out / MODEL_RUNS).write_text("[]")


@dataclass(frozen=True)
class Gate:
    """A released model of a deployment, with its audits, reports and registered version."""

    deployment: Deployment
    uri: str
    patch: pytest.MonkeyPatch

    @property
    def result(self) -> StepResult:
        result = read_result(store_of(self.deployment), self.uri)
        return result

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.deployment.tracking)

    @property
    def aliases(self) -> dict[str, str]:
        return dict(self.client.get_registered_model(NAME).aliases)

    @property
    def version(self) -> Any:
        """The only registered version of the model."""
        (version,) = self.client.search_model_versions(f"name = '{NAME}'")
        return version

    def audited(self, *findings: Finding, name: str = "a") -> str:
        weights = self.result.facts["weights_digest"]
        return publish_audit(self.deployment, findings, weights, name=name)

    def judged(self, rule: Any = "audited") -> dict[str, Any]:
        """Return the judgement on the model."""
        model = Input(self.result, Path(), self.uri)
        (judgement,) = judge(store_of(self.deployment), {"dp": model}, rule)
        return judgement

    def report(self, title: str = "t", run: RunContext = RUN, **changes: Any) -> ReportSpec:
        """Run a report step whose only output is the verdict, as a process would."""
        results = {"With DP / pretraining": self.uri}
        spec = ReportSpec(made_up=False, title=title, results=results, points={}, settings={})

        def judging(spec: ReportSpec, context: StepContext) -> StepOutput:
            results = {name: context.input(uri) for name, uri in spec.results.items()}
            verdicts = judge(context.store, results, spec.promotion)
            without_rows(context)
            return StepOutput(outputs={}, facts={JUDGED: verdicts, "created": "2026-01-01"})

        self.patch.setattr(contract, "_module", lambda _: SimpleNamespace(run=judging))
        contract.run_step(spec, replace(self.deployment, **changes), run)
        return spec

    def approve(self, report: ReportSpec) -> None:
        """Run the step `promote` on a report, as an approval does."""
        spec = PromoteSpec(made_up=False, report_uri=report.output)
        self.patch.setattr(contract, "_module", lambda _: promote)
        contract.run_step(spec, self.deployment, RUN.model_copy(update={"task": "promote"}))

    def outside(self, outcome: Finding, model: str = "") -> StepResult:
        """Run the step `privacy_audit` on a model, as a process would, with this result."""
        self.patch.setattr(contract, "_module", lambda _: privacy_audit)
        self.patch.setattr("dp_core.audit.black_box.audit_files", lambda *_: [outcome])
        canaries = self.deployment.home / f"{outcome.verdict}.txt"
        canaries.write_text("her number is [[seven]]")
        spec = PrivacyAuditSpec(
            made_up=False, audited_model=model or self.uri, given_canaries=str(canaries)
        )
        context = RUN.model_copy(update={"run_key": "later", "task": "privacy_audit"})
        return contract.run_step(spec, self.deployment, context)


@pytest.fixture
def gate(tracked: Deployment, monkeypatch: pytest.MonkeyPatch) -> Gate:
    uri = released_model(tracked, settled(tracked, EARLIER, TRAINING), model=NAME)
    return Gate(tracked, uri, monkeypatch)


@pytest.fixture
def promoted(gate: Gate) -> Gate:
    """A model that a person approved, although no audit was run."""
    report = gate.report()
    assert gate.aliases == {}
    gate.approve(report)
    assert gate.aliases == {ALIAS: gate.version.version}
    return gate


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The folder of a copied model."""
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy"


def test_audit_of_the_nonprivate_control_does_not_affect_the_verdict(gate):
    records = GOOD, BAD.model_copy(update={"subject": audits.CONTROL})
    gate.patch.setattr(audits, "audits_of", lambda *_, **__: records)
    assert gate.judged()["verdict"] == "consistent"


@pytest.mark.cases
def test_promotion_follows_the_verdict_and_the_rule(gate, record, audited_rule, unaudited_rule):
    if record:
        gate.audited(RECORDS[record])
    rules = ("audited", "unaudited", "approved")
    promoted = {rule: gate.judged(rule)["promoted"] for rule in rules}
    assert promoted == {"audited": audited_rule, "unaudited": unaudited_rule, "approved": False}


def test_audits_of_the_training_before_do_not_promote_a_privately_fine_tuned_model(gate):
    gate.audited(GOOD)
    releases = [*gate.result.releases, *settled(gate.deployment, TRAINING, dataset="labels")]
    start, tuned = {"began_with": gate.result.facts["weights_digest"], "model": NAME}, []
    for name, epsilon in (("b" * 16, None), ("c" * 16, 2.0)):  # on public labels, on private ones
        facts = start | {"epsilon_training": epsilon, "step": "finetune", "name": name}
        tuned.append(replace(gate, uri=released_model(gate.deployment, releases, **facts)))
    judged = [model.judged() for model in tuned]
    assert [one["promoted"] for one in judged] == [True, False]
    assert [one["verdict"] for one in judged] == ["consistent", "not audited"]
    reason = "its private fine-tuning was not audited; the training before it is consistent."
    assert judged[1]["sentence"].endswith(reason)
    gate.audited(BAD, name="d")
    assert tuned[1].judged()["verdict"] == "contradicted"


def test_model_with_a_known_seed_is_not_promoted(gate):
    releases = [r.model_copy(update={"seed_known": True}) for r in gate.result.releases]
    uri = released_model(gate.deployment, releases, name="b" * 16, weights=b"known", model=NAME)
    known = replace(gate, uri=uri)
    known.audited(GOOD)
    assert known.judged()["verdict"] == "consistent" and not known.judged()["promoted"]


def test_unreadable_audit_output_does_not_hide_other_audits(gate):
    unreadable = f"store://audit/{'0' * 16}/result.json"
    store_of(gate.deployment).write(unreadable, b'{"version": 1}')
    gate.audited(BAD)
    assert gate.judged()["verdict"] == "contradicted"


def test_finding_that_no_registered_audit_covers_is_refused(gate):
    """An unknown finding may contradict the claim, so the gate must not ignore it."""
    gate.audited(GOOD, BAD.model_copy(update={"key": "of_another_version"}))
    with pytest.raises(BadInput, match="no registered audit covers the finding of_another_version"):
        gate.judged()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    messages: list[Any] = []
    monkeypatch.setattr(contract, "send", messages.append)
    return messages


def test_consistent_model_is_registered_with_its_verdict_and_promoted(gate, sent):
    gate.audited(GOOD)
    for _ in range(2):  # the second run reuses the result and sends the same message
        gate.report()
    tags = gate.version.tags
    assert (tags["confide.verdict"], tags["confide.unit"]) == ("consistent", "patient")
    assert tags["confide.spec_hash"] == gate.result.spec_hash
    assert float(tags["confide.epsilon"]) > 0 and float(tags["confide.delta"]) == 2e-6
    assert gate.aliases == {ALIAS: gate.version.version}
    assert [m.verdict for m in sent if isinstance(m, Judged)] == ["consistent"] * 2


def test_model_of_a_private_selection_is_not_registered(gate):
    """The registry stamps each version with a time that would reveal the end of the selection."""
    gate.audited(GOOD)
    gate.report(run=RUN.model_copy(update={"hides_count": True}))
    assert gate.client.search_registered_models() == []


def test_contradicted_model_is_recorded_fails_the_step_and_is_not_promoted(gate, sent):
    gate.audited(GOOD, BAD)
    for _ in range(2):
        with pytest.raises(Contradicted, match="contradicted by Bound") as refused:
            gate.report()
        assert refused.value.exit_code == 4
    assert gate.version.tags["confide.verdict"] == "contradicted"
    assert gate.aliases == {}
    experiment = gate.client.get_experiment_by_name("confide")
    runs = gate.client.search_runs([experiment.experiment_id])
    assert {run.info.status for run in runs} == {"FAILED"}
    assert EventLog.all(gate.deployment.events) == []  # every event was delivered to MLflow
    assert [m.verdict for m in sent if isinstance(m, Judged)] == ["contradicted"] * 2


def test_later_contradiction_removes_the_alias_permanently(gate):
    gate.audited(GOOD)
    gate.report()
    assert ALIAS in gate.aliases
    later = gate.audited(BAD, name="b")
    with pytest.raises(Contradicted):
        gate.report("later")
    assert gate.aliases == {}
    # An earlier run whose events are delivered later.
    shutil.rmtree(output_folder(gate.deployment, later))
    gate.report("late")
    assert gate.version.tags["confide.verdict"] == "contradicted"
    assert gate.aliases == {}


def test_verdict_and_alias_are_delivered_once_after_an_outage(gate):
    gate.audited(GOOD)
    gate.report(tracking="http://127.0.0.1:9")
    assert gate.client.search_model_versions(f"name = '{NAME}'") == []
    with gate.patch.context() as patch:  # every event is delivered, then the process is killed
        patch.setattr(EventLog, "confirm", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Delivery(gate.deployment).deliver(EventLog.all(gate.deployment.events)[0])
    assert send_all(gate.deployment) == 0
    assert gate.aliases == {ALIAS: gate.version.version}


@pytest.mark.parametrize("verdict", ["contradicted", "invalid", None])
def test_event_with_an_alias_against_the_verdict_is_refused(verdict):
    tags = {"confide.verdict": verdict} if verdict else {}
    with pytest.raises(ValidationError, match="the verdict is"):
        LoggedModel(name=NAME, files=[], description="", tags=tags, alias=ALIAS)


@pytest.mark.parametrize("right", [30, 60])
def test_model_with_an_invalid_audit_is_never_promoted(gate, right, tmp_path):
    """The audit writes the record, and the registry of audits reads it from the store."""
    gate.audited(invalid_record(right=right))
    for rule in ("audited", "unaudited", "approved"):
        judgement = gate.judged(rule)
        assert (judgement["verdict"], judgement["promoted"]) == ("invalid", False)
    gate.approve(gate.report())
    assert gate.version.tags["confide.verdict"] == "invalid"
    assert gate.aliases == {}
    pack = pack_of(gate.deployment, gate.uri, tmp_path / "pack")
    (shown,) = [audit for audit in audits_in(pack) if audit.key == LOWER_BOUND.key]
    assert (shown.verdict, shown.ceiling) == ("invalid", None)
    page = (pack / "evidence.html").read_text()
    assert "An audit of the claim is invalid" in page
    assert f"≥ {shown.interval[0]:.5g}<" in page  # a lower bound has no upper end


def test_invalid_audit_from_outside_withdraws_the_model(promoted):
    assert promoted.version.tags["confide.approved"] == "by a person"
    promoted.outside(invalid_record(key=COIN_BOUND, label=Label.OPERATOR))
    assert promoted.aliases == {}
    assert promoted.judged("unaudited")["verdict"] == "invalid"


def test_model_contradicted_before_its_approval_is_not_promoted(gate):
    report = gate.report()
    gate.audited(BAD)
    with pytest.raises(Contradicted):
        gate.approve(report)
    assert gate.aliases == {}


def given(verdict: str) -> Finding:
    """Return a record of an audit by texts that, as its user states, fair coins divided."""
    coin_record = record(verdict, label=Label.OPERATOR, name="Given coins")
    return cast(Finding, coin_record.model_copy(update={"key": COIN_BOUND}))


@pytest.mark.parametrize("copied", [False, True])
def test_contradiction_from_outside_withdraws_the_model_and_is_in_its_pack(
    promoted, copied, copy, tmp_path
):
    uri = promoted.uri
    shutil.copy(output_folder(promoted.deployment, uri) / "model.safetensors", copy)
    for _ in range(2):  # the second run reuses the result and fails alike
        with pytest.raises(Contradicted, match="contradicted by Given coins"):
            promoted.outside(given("contradicted"), str(copy) if copied else uri)
    assert promoted.version.tags["confide.verdict"] == "contradicted"
    assert promoted.aliases == {}
    assert promoted.judged("unaudited")["promoted"] is False
    audits = audits_in(pack_of(promoted.deployment, uri, tmp_path / "pack"))
    (contradiction,) = [audit for audit in audits if audit.verdict == "contradicted"]
    assert (contradiction.key, contradiction.subject) == (COIN_BOUND, "the released model")


@pytest.mark.parametrize("kind", ["kept on the way", "fine-tuned"])
def test_contradicted_copy_prevents_the_export_of_every_model_of_its_claim(
    deployment, no_mlflow, kind, monkeypatch, copy, tmp_path
):
    releases, store = settled(deployment, EARLIER, TRAINING), store_of(deployment)
    if kind == "fine-tuned":
        uri = released_model(deployment, releases, step="finetune", weights_digest="")
        inside, subject = "", "the released model"
    else:
        inside, subject = "after/50/", "the model after 50 updates of its training"
        uri = released_model(deployment, releases, kept={"after/50": b"early"}, updates=100)
    for name in ("model.safetensors", "PRIVACY.md"):
        shutil.copy(output_folder(deployment, uri) / inside / name, copy)
    assert find_origin(store, copy) == uri
    with pytest.raises(Contradicted, match="contradicted by Given coins"):
        Gate(deployment, uri, monkeypatch).outside(given("contradicted"), str(copy))
    with pytest.raises(Contradicted):
        export_command._released_files(store, uri, export_command.releasable_model(store, uri))
    audits = audits_in(pack_of(deployment, uri, tmp_path / "pack"))
    assert [a.subject for a in audits if a.verdict == "contradicted"] == [subject]
    (copy / "PRIVACY.md").write_text("another")
    with pytest.raises(BadInput, match="was changed after the export"):
        find_origin(store, copy)


def test_evidence_for_an_intermediate_model_is_refused_with_the_last_model(deployment, copy):
    releases, store = settled(deployment, EARLIER, TRAINING), store_of(deployment)
    uri = released_model(deployment, releases, kept={"after/50": b"early"}, updates=100)
    (copy / "model.safetensors").write_bytes(b"early")
    with pytest.raises(BadInput, match=f"saved this model before the end.*--uri {uri}"):
        origin_of_export(store, copy)


def test_audit_from_outside_never_promotes_a_model(gate, tmp_path):
    """The coins were not bound before the training, so they may be chosen to hide leakage."""
    for verdict in ("consistent", "inconclusive"):
        result = gate.outside(given(verdict))
        assert result.facts[JUDGED] == []
    assert gate.judged()["verdict"] == "not audited"
    assert gate.client.search_registered_models() == []
    audits = audits_in(pack_of(gate.deployment, gate.uri, tmp_path / "pack"))
    (summary,) = [audit for audit in audits if audit.key == "from_outside"]
    assert "for the operator only" in summary.finding
    audits = audits_in(pack_of(gate.deployment, gate.uri, tmp_path / "whole", operator=True))
    shown = {audit.verdict for audit in audits if audit.key == COIN_BOUND}
    assert shown == {"consistent", "inconclusive"}


def test_contradicted_third_party_model_is_not_registered(gate, copy):
    (copy / "model.safetensors").write_bytes(b"of somebody else")
    with pytest.raises(Contradicted, match="the claim, as given: contradicted by Given coins"):
        gate.outside(given("contradicted"), str(copy))
    assert gate.client.search_registered_models() == []


def test_step_result_alone_registers_no_model(gate):
    report = ReportSpec(made_up=False, title="t", results={}, points={}, settings={})

    def run(_: ReportSpec, context: StepContext) -> StepOutput:
        without_rows(context)
        return StepOutput(outputs={}, facts={}, model=NAME)

    gate.patch.setattr(contract, "_module", lambda _: SimpleNamespace(run=run))
    contract.run_step(report, gate.deployment, RUN)
    assert gate.client.search_registered_models() == []


@pytest.mark.usefixtures("at_home")
def test_contradicted_model_is_not_exported(gate, confide, tmp_path):
    gate.audited(BAD)
    code, _, err = confide("export", str(tmp_path / "out"), "--uri", gate.uri)
    assert code == 4
    assert "contradicted by Bound" in err
    assert not (tmp_path / "out").exists()
