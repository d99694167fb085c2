import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from mlflow.entities import Run  # noqa: TID251 - reads the runs that tracking wrote
from mlflow.exceptions import MlflowException  # noqa: TID251
from mlflow.tracking import MlflowClient  # noqa: TID251

from dp_core.config.data import CanaryConfig
from dp_core.labels import Dp, Label, Operator, Public
from tasks.protocol.job import job_steps
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import CanariesSpec
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store
from tasks.tracking.event_log import (
    INFINITE,
    AttemptEnded,
    Begun,
    ChargedDataset,
    Event,
    EventLog,
    Identity,
    LoggedArtifact,
    LoggedModel,
    Param,
    Tag,
    metric,
    rounded,
)
from tasks.tracking.mlflow import (
    KEY_TAG,
    OPERATOR,
    PUBLIC,
    Delivery,
    TrackingDown,
    send_all,
    shown_key,
    shown_name,
    shown_time,
)
from tasks.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow and SQLAlchemy.

PRIVATE = Identity("run-1", "dp_bert today", "dp_pretraining", "", "pretrain", "a" * 64, False)
MADE_UP = replace(PRIVATE, made_up=True)
OF_A_MODEL = replace(PRIVATE, model="σ=1 · B=2")


def _runs(deployment: Deployment, experiment: str) -> dict[str, Run]:
    client = MlflowClient(deployment.tracking)
    experiment_info = client.get_experiment_by_name(experiment)
    runs = client.search_runs([experiment_info.experiment_id]) if experiment_info else []
    assert len({r.info.run_name for r in runs}) == len(runs), "a run was made twice"
    return {r.info.run_name: r for r in runs}


def _history(deployment: Deployment, run: Run, key: str) -> list[tuple[int, float]]:
    client = MlflowClient(deployment.tracking)
    return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, key))


def show(tracker: Tracker, file: Path, label: Label) -> None:
    tracker.events.append(LoggedArtifact(file=tracker.events.keep(file), label=label))


def test_label_decides_the_experiment_of_metrics_and_files(tracked, tmp_path):
    awkward = replace(PRIVATE, run_key="it's \"quoted\" `so` = '1'")
    tracker = Tracker(tracked, awkward)
    tracker.measure("epsilon", Public(1.5), 3)
    tracker.measure("epsilon_training", Public(1.0))
    tracker.measure("delta/labels", Public(1e-6))
    tracker.measure("epsilon/labels", Public(float("inf")))
    tracker.measure("exposure", Dp(0.9), 3)
    tracker.measure("loss", Operator(2.5), 3)
    for label in (Label.DP, Label.OPERATOR):
        (tmp_path / f"{label}.html").write_text(label)
        show(tracker, tmp_path / f"{label}.html", label)
    tracker.end("FINISHED")
    costs = {"epsilon": 1.5, "delta/labels": 1e-6}
    for experiment, numbers, file in (
        (PUBLIC, {"exposure": 0.9, "epsilon_training": 1.0}, "dp.html"),
        (OPERATOR, {"loss": 2.5}, "operator.html"),
    ):
        run = _runs(tracked, experiment)["dp_pretraining"]
        assert run.data.metrics == costs | numbers
        assert (run.info.status, run.data.tags[KEY_TAG]) == ("FINISHED", awkward.key("step"))
        artifacts = MlflowClient(tracked.tracking).list_artifacts(run.info.run_id)
        assert [artifact.path for artifact in artifacts] == [file]
        # MLflow would store infinity as the largest float.
        assert run.data.tags.get("epsilon/labels") == ("inf" if experiment == PUBLIC else None)


@pytest.mark.parametrize("value", [1.0, None])
def test_metric_without_a_label_is_refused(untracked, value):
    tracker = Tracker(untracked, PRIVATE)
    with pytest.raises(TypeError, match="loss"):
        tracker.measure("loss", value, 1)  # type: ignore[arg-type]
    assert tracker.events.read()[0] == []


def test_telemetry_of_mlflow_is_disabled():
    from mlflow.telemetry.utils import is_telemetry_disabled  # noqa: TID251

    assert is_telemetry_disabled()


def test_model_runs_are_nested_between_run_and_steps(tracked):
    tracker = Tracker(tracked, OF_A_MODEL)
    tracker.events.append(metric("f1", Dp(0.8), target="model"))
    tracker.measure("epsilon", Public(2.0), 7)
    tracker.end("FINISHED", also=("model",))
    runs = _runs(tracked, PUBLIC)
    parent, point, step = (
        runs[n] for n in (shown_name(PRIVATE, PUBLIC), "σ=1 · B=2", "dp_pretraining")
    )
    assert step.data.tags["mlflow.parentRunId"] == point.info.run_id
    assert point.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert point.data.metrics == {"f1": 0.8}
    assert (parent.info.status, point.info.status) == ("RUNNING", "FINISHED")


def test_step_after_the_job_leaves_the_job_as_it_ended(tracked):
    report = Tracker(tracked, replace(PRIVATE, task="report", step="report", spec_hash="1" * 64))
    report.begin()
    report.end("FINISHED", also=("parent",))
    last = replace(PRIVATE, task="give_back", step="give_back", spec_hash="2" * 64)
    give_back = Tracker(tracked, last)
    give_back.begin(follows_run=True)
    give_back.end("FINISHED")
    runs = _runs(tracked, PUBLIC)
    assert runs["give_back"].info.status == "FINISHED"
    assert runs[shown_name(PRIVATE, PUBLIC)].info.status == "FINISHED"


def test_concurrent_steps_share_one_parent_run(tracked):
    def work(number: int) -> None:
        identity = replace(PRIVATE, task=f"task {number}", spec_hash=f"{number}" * 64)
        tracker = Tracker(tracked, identity)
        tracker.measure("epsilon", Public(number))
        tracker.end("FINISHED")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = _runs(tracked, PUBLIC)
    assert sorted(runs) == [shown_name(PRIVATE, PUBLIC), *(f"task {n}" for n in range(4))]


def test_undelivered_events_are_kept_and_sent_later(tracked, tmp_path, capsys):
    down = replace(tracked, tracking="http://127.0.0.1:9")
    (tmp_path / "page.html").write_text("page")
    tracker = Tracker(down, PRIVATE)
    for step in range(50):
        tracker.measure("epsilon", Public(step), step)
        tracker.measure("loss", Operator(-step), step)
    show(tracker, tmp_path / "page.html", Label.DP)
    tracker.end("FINISHED")
    (tmp_path / "page.html").unlink()
    assert "kept on disk" in capsys.readouterr().err
    assert send_all(down) == 1
    later = Tracker(tracked, replace(PRIVATE, task="report", spec_hash="b" * 64))
    later.end("FINISHED")
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert _history(tracked, run, "epsilon") == [(s, float(s)) for s in range(50)]
    restricted = _runs(tracked, OPERATOR)["dp_pretraining"]
    assert len(_history(tracked, restricted, "loss")) == 50
    assert [a.path for a in MlflowClient(tracked.tracking).list_artifacts(run.info.run_id)] == [
        "page.html"
    ]
    assert EventLog.all(tracked.events) == []


def test_model_used_by_two_runs_is_registered_once_without_the_result(tracked, tmp_path):
    files = [tmp_path / name for name in ("config.json", "result.json", "checksums.json")]
    for file in files:
        file.write_text("{}")
    for run_key in ("run-1", "run-2"):
        tracker = Tracker(tracked, replace(PRIVATE, run_key=run_key, run_name=run_key))
        kept = [tracker.events.keep(file) for file in files]
        tags = {"confide.spec_hash": PRIVATE.spec_hash, "ledger.0": "abc"}
        model = LoggedModel(name="confide-notes", files=kept, description="ε = 1", tags=tags)
        tracker.events.append(model)
        tracker.end("FINISHED")
    client = MlflowClient(tracked.tracking)
    (version,) = client.search_model_versions("name = 'confide-notes'")
    assert (version.description, version.tags["ledger.0"]) == ("ε = 1", "abc")
    shown = client.list_artifacts(version.run_id, "model")
    assert [artifact.path for artifact in shown] == ["model/config.json"]


def test_unconfirmed_delivery_is_not_repeated(tracked, monkeypatch):
    log = EventLog.of(tracked.events, PRIVATE)
    log.append(*(metric("epsilon", Public(1.0), step) for step in range(20)))
    log.append(Param(name="batch", value="1"))
    with monkeypatch.context() as patch:
        # every event is delivered, then the process is killed
        patch.setattr(EventLog, "confirm", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Delivery(tracked).deliver(log)
    assert len(log.undelivered()[0]) == 21
    log.append(metric("epsilon", Public(1.0), 19), metric("epsilon", Public(1.0), 20))
    Delivery(tracked).deliver(log)
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert _history(tracked, run, "epsilon") == [(step, 1.0) for step in range(21)]
    assert run.data.params == {"batch": "1"}
    assert log.undelivered()[0] == []


def test_run_with_an_unconfirmed_creation_is_reused(tracked, monkeypatch):
    original, created = MlflowClient.create_run, []

    def unanswered(client: MlflowClient, *arguments: object, **named: object) -> Run:
        made = original(client, *arguments, **named)  # type: ignore[arg-type]
        created.append(made.info.run_id)
        if len(created) < 3:
            raise MlflowException("the server was ended before it could answer")
        return made

    monkeypatch.setattr(MlflowClient, "create_run", unanswered)
    log = EventLog.of(tracked.events, PRIVATE)
    log.append(metric("ε", Public(1.0), 1))
    for _ in range(2):
        with pytest.raises(TrackingDown):
            Delivery(tracked).deliver(log)
    Delivery(tracked).deliver(log)
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert _history(tracked, run, "ε") == [(1, 1.0)]
    assert len(created) == 2  # one for the parent and one for the step, without repetition


def test_duplicate_runs_are_deleted_unless_they_have_content(tracked):
    log = EventLog.of(tracked.events, PRIVATE)
    log.append(Begun())
    Delivery(tracked).deliver(log)
    first = _runs(tracked, PUBLIC)["dp_pretraining"].info
    client = MlflowClient(tracked.tracking)
    empty, written = (
        client.create_run(
            first.experiment_id,
            start_time=first.start_time + later,
            tags={KEY_TAG: PRIVATE.key("step")},
            run_name="dp_pretraining",
        ).info.run_id
        for later in (1, 2)
    )
    client.log_param(written, "seen", "1")
    log.append(metric("ε", Public(1.0), 1))
    Delivery(tracked).deliver(log)
    stages = [client.get_run(run).info.lifecycle_stage for run in (first.run_id, empty, written)]
    assert stages == ["active", "deleted", "active"]
    assert client.get_run(first.run_id).data.metrics == {"ε": 1.0}


def test_last_value_of_a_repeated_measurement_counts(tmp_path):
    log = EventLog.of(tmp_path, PRIVATE)
    log.append(metric("b", Operator(1.0), 1), metric("a", Public(1.0), 2))
    log.append(metric("b", Operator(2.0), 1), metric("a", Dp(3.0), target="model"))
    numbers = [(m.name, m.step, m.value, m.label) for m in log.metrics()]
    assert numbers == [("a", 2, 1.0, "public"), ("b", 1, 2.0, "operator")]


def test_event_during_the_removal_of_its_log_is_not_lost(tmp_path):
    log = EventLog.of(tmp_path, PRIVATE)
    log.append(AttemptEnded(status="KILLED"))
    log.confirm(log.undelivered()[1])
    again = EventLog.of(tmp_path, PRIVATE)  # the next try, before its first event
    (late,) = EventLog.all(tmp_path)
    log.remove_if_delivered()
    with late.delivering() as ours:  # its folder would belong to no run
        assert not ours
    assert not log.folder.exists()
    again.append(Tag(name="a", value=""))
    (successor,) = EventLog.all(tmp_path)
    assert successor.identity == PRIVATE
    for _ in range(2):
        assert [event.name for event in again.undelivered()[0]] == ["a"]
        log.remove_if_delivered()  # a log with an event is not removed


@pytest.mark.parametrize("made_up", [False, True])
def test_runs_of_a_private_selection_are_in_the_operator_experiment_only(
    tracked, tmp_path, made_up
):
    if made_up:  # a stack's administrator creates the experiments without MLflow's tags
        MlflowClient(tracked.tracking).create_experiment(PUBLIC, tmp_path.as_uri())
    tracker = Tracker(tracked, replace(OF_A_MODEL, hides_count=not made_up, made_up=made_up))
    tracker.begin()
    tracker.measure("epsilon", Public(1.5))
    tracker.measure("mlm_accuracy_public", Dp(0.5))
    tracker.measure("loss", Operator(2.5))
    (tmp_path / "report.html").write_text("report")
    show(tracker, tmp_path / "report.html", Label.DP)
    tracker.end("FINISHED", also=("model", "parent"))
    shown, other = (PUBLIC, OPERATOR) if made_up else (OPERATOR, PUBLIC)
    assert _runs(tracked, other) == {}
    runs = _runs(tracked, shown)
    assert len(runs) == 3 and {run.info.status for run in runs.values()} == {"FINISHED"}
    numbers = runs["dp_pretraining"].data.metrics
    assert numbers == {"epsilon": 1.5, "mlm_accuracy_public": 0.5, "loss": 2.5}
    assert all(
        run.data.tags.get("data") == ("made-up" if made_up else None) for run in runs.values()
    )
    experiment = MlflowClient(tracked.tracking).get_experiment_by_name(shown)
    assert experiment is not None
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert "metrics.`epsilon`" in experiment.tags["mlflow.sharedViewState.models"]


NOON = 1_795_260_000_123


def test_only_the_public_experiment_rounds_times_to_the_day():
    shown = {shown_time(NOON + later, PRIVATE, PUBLIC) for later in (0, 1, 3_000, 3_600_000)}
    assert shown == {NOON - NOON % 86_400_000}  # the duration of a step is not visible
    assert shown_time(NOON, PRIVATE, OPERATOR) == NOON
    assert shown_time(NOON, MADE_UP, PUBLIC) == NOON


def test_public_name_and_key_of_a_run_hide_its_start_time():
    run = replace(PRIVATE, run_key="dp_bert/manual__2026-11-22T13:07:59.385211+00:00",
                  run_name="dp_bert 2026-11-22 13:07:59")  # fmt: skip
    later = replace(run, run_key="dp_bert/manual__2026-11-22T15:00:00+00:00")
    assert shown_name(run, PUBLIC).startswith("dp_bert 2026-11-22 · ")
    for shown in (shown_name(run, PUBLIC), shown_key(run, PUBLIC)):
        assert ":" not in shown
    # but the runs remain distinguishable
    assert shown_name(run, PUBLIC) != shown_name(later, PUBLIC)
    assert shown_key(run, PUBLIC) != shown_key(later, PUBLIC)
    # A guessed time cannot be confirmed, because names and keys depend on a secret of the
    # deployment.
    salted, other = (replace(run, salt=salt * 32) for salt in ("ab", "cd"))
    for shown in (shown_key, lambda i, _: i.key("parent"), lambda i, _: i.key("step")):
        assert len({shown(i, PUBLIC) for i in (run, salted, other)}) == 3
    assert (shown_name(run, OPERATOR), shown_key(run, OPERATOR)) == (run.run_name, run.run_key)
    made_up = replace(run, made_up=True)
    assert shown_name(made_up, PUBLIC) == run.run_name


def _parent_of(runs: dict[str, Run], name: str) -> str | None:
    by_id = {run.info.run_id: shown for shown, run in runs.items()}
    return by_id.get(runs[name].data.tags.get("mlflow.parentRunId", ""))


def test_shown_model_is_at_the_top_with_its_replicates_and_its_job_below(tracked):
    for fold in range(2):
        step = replace(
            PRIVATE, model=f"σ=1 · fold={fold}", task=f"{fold}", spec_hash=f"{fold}" * 64
        )
        Tracker(tracked, step).end("FINISHED", also=("model",))
    report = Tracker(tracked, replace(PRIVATE, task="report", spec_hash="f" * 64))
    row = {
        "model": "σ=1",
        "replicates": ["σ=1 · fold=0", "σ=1 · fold=1"],
        "name": "notes · σ=1 · ε 1.5",
        "holds_job": True,
        "numbers": [
            rounded(MetricRecord(name="epsilon", value=1.23410001, label="public", step=0)),
            rounded(MetricRecord(name="f1", value=0.56781, label="dp", step=0)),
            rounded(MetricRecord(name="mlm_accuracy_private", value=0.5, label="operator", step=0)),
        ],
        "verdict": "consistent",
        "description": "One patient changes little.",
    }
    row["numbers"] = [dict(number) for number in row["numbers"]]
    for _ in range(2):  # a repeated report finds the same rows
        report.events.append(*report.shown(row))
        report.end("FINISHED", also=("parent",))
    for experiment in (PUBLIC, OPERATOR):
        runs, job = _runs(tracked, experiment), shown_name(PRIVATE, experiment)
        top = runs["notes · σ=1 · ε 1.5"]
        assert "mlflow.parentRunId" not in top.data.tags
        assert _parent_of(runs, job) == "notes · σ=1 · ε 1.5"
        assert top.info.status == "FINISHED"
        # The privacy cost is rounded up, and a number for the operator is not public.
        scores = {"f1": 0.5678} if experiment == PUBLIC else {"mlm_accuracy_private": 0.5}
        assert top.data.metrics == {"epsilon": 1.235} | scores
    public = _runs(tracked, PUBLIC)
    top = public["notes · σ=1 · ε 1.5"]
    assert top.data.tags["confide.verdict"] == "consistent"
    assert "report/report.html" in top.data.tags["mlflow.note.content"]
    assert {_parent_of(public, f"σ=1 · fold={fold}") for fold in range(2)} == {top.info.run_name}


def test_refused_jobs_share_one_row_until_they_begin_again(tracked):
    jobs = [replace(MADE_UP, run_key=key, run_name=key) for key in ("first", "second", "third")]
    charged = Tracker(tracked, replace(jobs[2], task="charged", spec_hash="c" * 64))
    charged.events.append(ChargedDataset(name="notes", ledger_id="1"))
    charged.end("FINISHED")
    for number, job in enumerate(jobs):
        step = Tracker(tracked, replace(job, task=f"step {number}"))
        step.begin()
        step.end("FAILED", also=("parent",), refused=True)
    names = [shown_name(job, PUBLIC) for job in jobs]
    refused = "Refused before the first release"
    parents = [_parent_of(_runs(tracked, PUBLIC), name) for name in names]
    assert parents == [refused, refused, None]  # the third has made a release
    Tracker(tracked, replace(jobs[0], task="step 0")).begin()
    assert _parent_of(_runs(tracked, PUBLIC), names[0]) is None


def test_newest_private_job_is_first_without_its_time(tracked):
    jobs = [replace(PRIVATE, run_key=f"{number}", run_name=f"{number}") for number in range(3)]
    for number, job in enumerate(jobs):
        Tracker(tracked, replace(job, task=f"step {number}")).end("FINISHED", also=("parent",))
    runs = _runs(tracked, PUBLIC)
    starts = [runs[shown_name(job, PUBLIC)].info.start_time for job in jobs]
    assert [start % 86_400_000 for start in starts] == [0, 1, 2]


def test_infinite_epsilon_is_no_number_in_mlflow_unless_it_replaces_one(tracked):
    training = Tracker(tracked, MADE_UP)
    training.tag("epsilon", "inf")
    training.measure("epsilon", Public(INFINITE), 1)
    training.end("FINISHED")
    run = _runs(tracked, PUBLIC)["dp_pretraining"].data
    assert (run.metrics, run.tags["epsilon"]) == ({}, "inf")
    finetuning = Tracker(tracked, replace(MADE_UP, task="finetuning", spec_hash="b" * 64))
    finetuning.measure("epsilon", Public(2.0), 1)
    finetuning.measure("epsilon", Public(INFINITE), 2)
    finetuning.end("FINISHED")
    assert _runs(tracked, PUBLIC)["finetuning"].data.metrics == {"epsilon": INFINITE}


def test_run_of_a_model_shows_the_numbers_that_compare_models(tracked, tmp_path):
    names = ("epsilon", "delta/labels", "mlm_accuracy_public", "f1", "exposure")
    others = ("loss", "epsilon_training", "exposure_largest", "f1/problem", "mlm_public")
    numbers = [
        MetricRecord(name=name, value=0.5, label="public", step=0) for name in (*names, *others)
    ]
    spec = CanariesSpec(made_up=False, seed=1, vocabulary_uri="store://v/1", config=CanaryConfig())
    result = StepResult(
        step="canaries", spec_hash="a" * 64, outputs={}, metrics=numbers, releases=[],
        facts={"artifacts": {}}, seconds=0.0, versions={},
    )  # fmt: skip
    tracker = Tracker(tracked, OF_A_MODEL)
    tracker.record(spec, Store(f"file://{tmp_path}", tmp_path), result, done_before=False)
    tracker.end("FINISHED", also=("model",))
    assert set(_runs(tracked, PUBLIC)["σ=1 · B=2"].data.metrics) == set(names)


def test_paths_of_private_text_are_no_parameters(tracked, tmp_path, monkeypatch):
    private = {"private_format": "jsonl", "private_path": "/ward/n", "private_dataset": "ward"}
    steps = job_steps(JobSettings(**private, public_format="text", public_path="/wiki"))
    events, tracker = list[Event](), Tracker(tracked, PRIVATE)
    monkeypatch.setattr(tracker, "_add", lambda *more: events.extend(more))
    result = Mock(facts={"artifacts": {}}, releases=[], metrics=[])
    for task in ("budget", "private_corpus", "public_corpus"):
        spec = steps[task]
        tracker.record(spec, Store(f"file://{tmp_path}", tmp_path), result, done_before=False)
    shown = [event.value for event in events if isinstance(event, Param)]
    shown += map(str, steps["report"].run_settings.values())
    assert "/wiki" in shown and not any("/ward" in value for value in shown)
