"""Tracking by a real MLflow: labels by type, runs made once, nothing lost and nothing doubled."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.entities import Run  # noqa: TID251 - looks at what tracking.py left there
from mlflow.exceptions import MlflowException  # noqa: TID251
from mlflow.tracking import MlflowClient  # noqa: TID251

from dp_core.labels import Dp, Label, Operator, Public
from tasks.runtime import messages as lines
from tasks.runtime.deployment import Deployment
from tasks.storage import CHECKSUMS, RESULT
from tasks.tracking.mlflow import (
    KEY_TAG,
    OPERATOR,
    PUBLIC,
    Delivery,
    Tracker,
    TrackingDown,
    send_all,
    shown_name,
)
from tasks.tracking.outbox import Identity, Outbox

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's and SQLAlchemy's own

PRIVATE = Identity("run-1", "dp_bert today", "dp_pretraining", "", "pretrain", "a" * 64, False)
MADE_UP = replace(PRIVATE, made_up=True)
AT_A_POINT = replace(PRIVATE, point="σ=1 · B=2")


def _runs(deployment: Deployment, experiment: str) -> dict[str, Run]:
    client = MlflowClient(deployment.tracking)
    found = client.get_experiment_by_name(experiment)
    runs = client.search_runs([found.experiment_id]) if found else []
    assert len({r.info.run_name for r in runs}) == len(runs), "a run was made twice"
    return {r.info.run_name: r for r in runs}


def _history(deployment: Deployment, run: Run, key: str) -> list[tuple[int, float]]:
    client = MlflowClient(deployment.tracking)
    return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, key))


def test_a_type_decides_who_sees_a_number(tracked: Deployment) -> None:
    tracker = Tracker(tracked, PRIVATE)
    tracker.publishable({"epsilon": Public(1.5), "exposure": Dp(0.9)}, 3)
    tracker.operator({"loss": Operator(2.5)}, 3)
    tracker.finish("FINISHED")
    public = _runs(tracked, PUBLIC)["dp_pretraining"]
    restricted = _runs(tracked, OPERATOR)["dp_pretraining"]
    assert public.data.metrics == {"epsilon": 1.5, "exposure": 0.9}
    assert restricted.data.metrics == {"loss": 2.5}
    assert public.info.status == restricted.info.status == "FINISHED"


@pytest.mark.parametrize("value", [Operator(1.0), 1.0])
def test_an_operator_value_is_refused_as_publishable(untracked: Deployment, value: object) -> None:
    tracker = Tracker(untracked, PRIVATE)
    with pytest.raises(TypeError, match="loss"):
        tracker.publishable({"loss": value}, 1)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="ε"):
        tracker.operator({"ε": Dp(1.0)}, 1)  # type: ignore[dict-item]


def test_an_operator_artifact_stays_in_the_restricted_experiment(
    tracked: Deployment, tmp_path: Path
) -> None:
    tracker = Tracker(tracked, PRIVATE)
    for label in (Label.DP, Label.OPERATOR):
        (tmp_path / f"{label}.html").write_text(label)
        tracker.artifact(tmp_path / f"{label}.html", label)
    tracker.finish("FINISHED")
    client = MlflowClient(tracked.tracking)
    for experiment, name in ((PUBLIC, "dp.html"), (OPERATOR, "operator.html")):
        run = _runs(tracked, experiment)["dp_pretraining"]
        assert [a.path for a in client.list_artifacts(run.info.run_id)] == [name]


def test_made_up_data_shares_one_experiment_and_says_so(tracked: Deployment) -> None:
    tracker = Tracker(tracked, MADE_UP)
    tracker.operator({"loss": Operator(2.5)})
    tracker.finish("FINISHED")
    runs = _runs(tracked, PUBLIC)
    assert runs["dp_pretraining"].data.metrics == {"loss": 2.5}
    assert all(run.data.tags["data"] == "made-up" for run in runs.values())
    assert _runs(tracked, OPERATOR) == {}


def test_mlflow_shows_training_and_tells_its_makers_nothing(tracked: Deployment) -> None:
    from mlflow.telemetry.utils import is_telemetry_disabled  # noqa: TID251

    Tracker(tracked, MADE_UP).finish("FINISHED")
    found = MlflowClient(tracked.tracking).get_experiment_by_name(PUBLIC)
    assert found is not None
    assert found.tags["mlflow.experimentKind"] == "custom_model_development"
    assert is_telemetry_disabled()


def test_points_stand_between_the_run_and_its_steps(tracked: Deployment) -> None:
    tracker = Tracker(tracked, AT_A_POINT)
    tracker.publishable({"f1": Dp(0.8)}, target="point")
    tracker.publishable({"epsilon": Public(2.0)}, 7)
    tracker.finish("FINISHED", also=("point",))
    runs = _runs(tracked, PUBLIC)
    parent, point, step = (
        runs[n] for n in (shown_name(PRIVATE, PUBLIC), "σ=1 · B=2", "dp_pretraining")
    )
    assert step.data.tags["mlflow.parentRunId"] == point.info.run_id
    assert point.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert point.data.metrics == {"f1": 0.8}
    assert (parent.info.status, point.info.status) == ("RUNNING", "FINISHED")


def test_a_retry_continues_its_run(tracked: Deployment) -> None:
    first = Tracker(tracked, PRIVATE)
    first.begin()
    for step in range(5):
        first.publishable({"epsilon": Public(step)}, step)
    first.settings({"batch": 1})
    first.finish("FAILED")
    again = Tracker(tracked, PRIVATE)
    again.begin()
    for step in range(3, 9):
        again.publishable({"epsilon": Public(step)}, step)
    again.settings({"batch": 1})
    again.finish("FINISHED")
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert _history(tracked, run, "epsilon") == [(s, float(s)) for s in range(9)]
    assert run.info.status == "FINISHED"


def test_steps_that_begin_at_once_share_one_parent(tracked: Deployment) -> None:
    def work(number: int) -> None:
        own = replace(PRIVATE, task=f"task {number}", spec_hash=f"{number}" * 64)
        tracker = Tracker(tracked, own)
        tracker.publishable({"epsilon": Public(number)})
        tracker.finish("FINISHED")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = _runs(tracked, PUBLIC)
    assert sorted(runs) == [shown_name(PRIVATE, PUBLIC), *(f"task {n}" for n in range(4))]


def test_what_cannot_be_sent_is_kept_and_sent_later(
    tracked: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = replace(tracked, tracking="http://127.0.0.1:9")
    (tmp_path / "page.html").write_text("page")
    tracker = Tracker(down, PRIVATE)
    for step in range(50):
        tracker.publishable({"epsilon": Public(step)}, step)
        tracker.operator({"loss": Operator(-step)}, step)
    tracker.artifact(tmp_path / "page.html", Label.DP)
    tracker.finish("FINISHED")
    (tmp_path / "page.html").unlink()
    assert "kept on disk" in capsys.readouterr().err
    assert send_all(down) == 1
    assert send_all(tracked) == 0
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert _history(tracked, run, "epsilon") == [(s, float(s)) for s in range(50)]
    restricted = _runs(tracked, OPERATOR)["dp_pretraining"]
    assert len(_history(tracked, restricted, "loss")) == 50
    assert [a.path for a in MlflowClient(tracked.tracking).list_artifacts(run.info.run_id)] == [
        "page.html"
    ]
    assert Outbox.all(tracked.outbox) == []


def test_a_later_step_sends_what_an_earlier_one_could_not(tracked: Deployment) -> None:
    earlier = Tracker(replace(tracked, tracking="http://127.0.0.1:9"), PRIVATE)
    earlier.publishable({"epsilon": Public(1.0)}, 1)
    earlier.finish("FINISHED")
    later = Tracker(tracked, replace(PRIVATE, task="report", spec_hash="b" * 64))
    later.finish("FINISHED")
    later.send_left_behind()
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert _history(tracked, run, "epsilon") == [(1, 1.0)]
    assert Outbox.all(tracked.outbox) == []


def test_one_model_is_one_version_whoever_uses_it(tracked: Deployment, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    for run_key in ("run-1", "run-2"):
        tracker = Tracker(tracked, replace(PRIVATE, run_key=run_key, run_name=run_key))
        tracker.model("confide-notes", [file], "ε = 1", {"ledger.0": "abc"})
        tracker.finish("FINISHED")
    client = MlflowClient(tracked.tracking)
    (version,) = client.search_model_versions("name = 'confide-notes'")
    assert version.description == "ε = 1"
    assert version.tags["ledger.0"] == "abc"


def test_what_an_earlier_version_kept_beside_a_model_is_not_shown(
    tracked: Deployment, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("config.json", RESULT, CHECKSUMS)]
    for file in files:
        file.write_text("{}")
    tracker = Tracker(tracked, PRIVATE)
    tracker.model("confide-notes", files, "ε = 1", {})
    tracker.finish("FINISHED")
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    shown = MlflowClient(tracked.tracking).list_artifacts(run.info.run_id, "model")
    assert [a.path for a in shown] == ["model/config.json"]


def test_what_arrived_without_confirmation_is_not_doubled(
    tracked: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox.create(tracked.outbox, PRIVATE)
    for step in range(20):
        outbox.add(
            kind="metric", experiment=PUBLIC, target="step", key="epsilon", value=1.0, step=step
        )
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "confirm", _dies)  # everything arrives, then the process is killed
        with pytest.raises(KeyboardInterrupt):
            Delivery(tracked).deliver(outbox)
    assert outbox.unsent()[0] == 0
    Delivery(tracked).deliver(outbox)
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert len(_history(tracked, run, "epsilon")) == 20
    assert outbox.unsent() == (20, [])


def _dies(self: Outbox, sent: int) -> None:
    raise KeyboardInterrupt


def test_a_run_whose_making_was_not_confirmed_is_found_again(
    tracked: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, asked = MlflowClient.create_run, []

    def unanswered(client: MlflowClient, *arguments: object, **named: object) -> Run:
        made = true(client, *arguments, **named)  # type: ignore[arg-type]
        asked.append(made.info.run_id)
        if len(asked) < 3:
            raise MlflowException("the server was ended before it could answer")
        return made

    monkeypatch.setattr(MlflowClient, "create_run", unanswered)
    outbox = Outbox.create(tracked.outbox, PRIVATE)
    outbox.add(kind="metric", experiment=PUBLIC, target="step", key="ε", value=1.0, step=1)
    for _ in range(2):
        with pytest.raises(TrackingDown):
            Delivery(tracked).deliver(outbox)
    Delivery(tracked).deliver(outbox)
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert _history(tracked, run, "ε") == [(1, 1.0)]
    assert len(asked) == 2  # the parent and the step: none is asked for twice


def test_of_runs_made_twice_the_first_stays_and_what_was_written_into(tracked: Deployment) -> None:
    outbox = Outbox.create(tracked.outbox, PRIVATE)
    outbox.add(kind="begin", experiment=PUBLIC, target="step")
    Delivery(tracked).deliver(outbox)
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
    outbox.add(kind="metric", experiment=PUBLIC, target="step", key="ε", value=1.0, step=1)
    Delivery(tracked).deliver(outbox)
    stages = [client.get_run(run).info.lifecycle_stage for run in (first.run_id, empty, written)]
    assert stages == ["active", "deleted", "active"]
    assert client.get_run(first.run_id).data.metrics == {"ε": 1.0}


def test_what_is_said_while_the_sent_is_removed_is_not_lost(tmp_path: Path) -> None:
    outbox = Outbox.create(tmp_path, PRIVATE)
    outbox.add(kind="end", status="KILLED")
    outbox.confirm(1)
    again = Outbox.create(tmp_path, PRIVATE)  # the next try, before its first line
    outbox.remove()
    again.add(kind="begin", key="a")
    assert Outbox.all(tmp_path)[0].identity == PRIVATE
    assert [line["key"] for line in again.unsent()[1]] == ["a"]
    outbox.remove()  # and once there is a line, nothing is removed
    assert [line["key"] for line in again.unsent()[1]] == ["a"]


def test_a_line_that_waits_for_a_file_that_goes_away_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines.append(file, "1")
    waiting = threading.Thread(target=lines.append, args=(file, "2"))
    with lines.alone(file):
        waiting.start()
        time.sleep(0.2)  # it has opened the file, most likely
        file.rename(tmp_path / "gone")
    waiting.join()
    assert lines.read(file) == ["2"]


def test_a_half_written_line_is_left_for_later(tmp_path: Path) -> None:
    outbox = Outbox.create(tmp_path, PRIVATE)
    outbox.add(kind="tag", key="a", value="b")
    with (outbox.folder / "lines.jsonl").open("a") as stream:
        stream.write('{"kind": "ta')
    assert [line["key"] for line in outbox.unsent()[1]] == ["a"]


def test_infinity_is_a_word_and_not_a_large_number(tracked: Deployment) -> None:
    tracker = Tracker(tracked, PRIVATE)
    tracker.publishable({"epsilon": Public(float("inf"))})
    tracker.finish("FINISHED")
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert run.data.metrics == {}
    assert run.data.tags["epsilon"] == "inf"


def test_tags_by_which_runs_are_found_hold_no_names(tracked: Deployment) -> None:
    awkward = replace(PRIVATE, run_key="it's \"quoted\" `so` = '1'")
    Tracker(tracked, awkward).finish("FINISHED")
    Tracker(tracked, awkward).finish("FINISHED")
    run = _runs(tracked, PUBLIC)["dp_pretraining"]
    assert run.data.tags[KEY_TAG] == awkward.key("step")
