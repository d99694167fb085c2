"""End-to-end runs of both DAGs in Airflow's runner, with fake steps."""

import json
import os
from pathlib import Path

import pytest
from airflow.sdk import DagRunState, TaskInstanceState

from tasks.protocol import settings

CHECKOUT = Path(__file__).resolve().parents[2]
SUCCESS, FAILED = TaskInstanceState.SUCCESS, TaskInstanceState.FAILED
SKIPPED, UPSTREAM = TaskInstanceState.SKIPPED, TaskInstanceState.UPSTREAM_FAILED
GRID = {"sweep_noise_multipliers": "1,2", "sweep_batch_sizes": "256", "sweep_epochs": "5"}


@pytest.fixture
def run(database, dags):
    return runner(dags)


@pytest.fixture
def own_run(database):
    """Run freshly imported DAGs, because Airflow remembers the expansion of a DAG that has run."""
    from airflow.dag_processing.dagbag import DagBag

    return runner(DagBag(CHECKOUT / "dags").dags)


def runner(dags):
    from airflow.dag_processing.bundles.manager import DagBundlesManager

    DagBundlesManager().sync_bundles_to_db()

    def run_dag(name, conf):
        done = dags[name].test(run_conf=conf)
        return done, {(t.task_id, t.map_index): t for t in done.get_task_instances()}

    return run_dag


def states(tasks):
    return {task_id: task.state for (task_id, _), task in tasks.items()}


def mapped(tasks):
    """Return the points and states of each mapped task."""
    of = {}
    for (task_id, index), task in tasks.items():
        if index >= 0:
            of.setdefault(task_id, []).append((task.rendered_map_index, task.state))
    return of


def test_no_task_of_a_job_is_skipped_and_every_instance_has_a_name(run):
    done, tasks = run("dp_bert", {"nonprivate": False, "kept_epochs": "2"})
    assert done.state == DagRunState.SUCCESS
    assert set(states(tasks).values()) == {SUCCESS}
    models = ["Public text only", "With DP", "With DP · epochs=2 of 6"]
    measured = [f"{name} · {model}" for name in ("Exposure", "Fine-tuning") for model in models]
    assert mapped(tasks) == {
        "read": named("Private corpus", "Public corpus", "Entities"),
        "start": named(models[0]),
        "pretraining": named(models[1]),
        "measurement": named(*measured),
    }
    answer = tasks["pretraining", 0].xcom_pull(task_ids="pretraining", map_indexes=0)
    assert set(answer) == {"outputs", "metrics"}
    assert answer["outputs"][0].startswith("store://")
    assert answer["metrics"] == {"epsilon": 1.5}


def test_optional_steps_are_further_instances(own_run):
    conf = {"phrases_epsilon": 2.0, "membership_units": 50, "audit_canaries": 1000}
    done, tasks = own_run("dp_bert", conf)
    assert done.state == DagRunState.SUCCESS
    assert set(states(tasks).values()) == {SUCCESS}
    of = mapped(tasks)
    assert of["start"] == named("Public text only · Released phrases only")
    answer = tasks["start", 0].xcom_pull(task_ids="start", map_indexes=0)
    made = [output.removeprefix("store://").partition("/")[0] for output in answer["outputs"]]
    assert made == ["pretrain", "phrases", "written_text", "token_store", "pretrain"]
    assert ("Audit · With DP", SUCCESS) in of["measurement"]
    assert ("Membership · Released phrases only", SUCCESS) in of["measurement"]


def test_run_that_only_plans_ends_after_the_budget(own_run):
    done, tasks = own_run("dp_bert", {"plan_only": True})
    assert done.state == DagRunState.SUCCESS
    ended = {name for name, state in states(tasks).items() if state == SUCCESS}
    assert ended == {"settings", "budget", "outcome"}
    assert {state for name, state in states(tasks).items() if name not in ended} == {SKIPPED}


def named(*names):
    return [(name, SUCCESS) for name in names]


def test_a_failing_point_stops_no_other_and_the_run_does_not_hide_it(run, monkeypatch):
    monkeypatch.setenv("FAKE_EXIT", "pretraining@2=2")  # the point σ=2 fails with bad input
    done, tasks = run("dp_sweep", GRID)
    assert done.state == DagRunState.FAILED
    of = mapped(tasks)
    finished = "σ=1 · B=256 · epochs=5"
    assert of["pretraining"] == [(finished, SUCCESS), ("σ=2 · B=256 · epochs=5", FAILED)]
    assert of["measurement"] == named(f"Exposure · {finished}", f"Fine-tuning · {finished}")
    assert tasks["report", -1].state == SUCCESS
    assert tasks["outcome", -1].state == FAILED
    assert tasks["pretraining", 1].try_number == 1  # bad input is not retried
    read = json.loads(_spec_of(tasks["report", -1].xcom_pull(task_ids="report")["outputs"][0]))
    assert set(read["points"]) == {"σ=1 · B=256 · epochs=5", "σ=2 · B=256 · epochs=5"}


def test_points_that_differ_in_fine_tuning_share_one_training(run, monkeypatch):
    monkeypatch.setenv("FAKE_EXIT", "exposure=2")  # fine-tuning does not depend on exposure
    conf = GRID | {
        "sweep_noise_multipliers": "1",
        "entities_folds": 2,
        "sweep_finetune_epochs": "1,2",
        "sweep_baselines": "public-training",
    }
    _, tasks = run("dp_sweep", conf)
    of = mapped(tasks)
    shared = "σ=1 · B=256 · epochs=5"
    assert of["start"] == named("public training")  # the whole sweep has one vocabulary
    assert of["pretraining"] == named(shared)
    assert sorted(of["measurement"]) == [
        *((f"Exposure · {name}", FAILED) for name in ("public training", shared)),
        *named(
            *(
                f"Fine-tuning · {start} · tuning epochs={epochs} · fold={fold}"
                for start in ("public training", shared)
                for epochs in (1, 2)
                for fold in (1, 2)
            )
        ),
    ]
    assert tasks["report", -1].state == SUCCESS


def test_baselines_run_with_the_points_and_a_failed_one_stops_no_other(own_run, monkeypatch):
    monkeypatch.setenv("FAKE_POINT_FAILS", "vocabulary · checkpoint bert")
    conf = GRID | {
        "sweep_noise_multipliers": "1",
        "sweep_baselines": "nonprivate",
        "sweep_checkpoints": "gs://models/bert",
    }
    done, tasks = own_run("dp_sweep", conf)
    of = mapped(tasks)
    red = "without privacy"
    assert of["start"] == [*named("public training", red), ("checkpoint bert", FAILED)]
    trained = ["σ=1 · B=256 · epochs=5", f"{red} · epochs=5"]
    assert of["pretraining"] == named(*trained)
    assert of["measurement"] == named(
        *(f"{measured} · {name}" for measured in ("Exposure", "Fine-tuning") for name in trained)
    )
    assert tasks["report", -1].state == SUCCESS
    assert done.state == DagRunState.FAILED and tasks["outcome", -1].state == FAILED


def test_a_causal_sweep_reads_no_labels_fine_tunes_nothing_and_still_reports(own_run):
    conf = GRID | {"model_kind": "gpt2", "sweep_baselines": "nonprivate"}
    done, tasks = own_run("dp_sweep", conf)
    assert done.state == DagRunState.SUCCESS
    assert set(states(tasks).values()) == {SUCCESS}
    names = ["σ=1 · B=256 · epochs=5", "σ=2 · B=256 · epochs=5", "without privacy · epochs=5"]
    of = mapped(tasks)
    assert of["measurement"] == named(*(f"Exposure · {name}" for name in names))
    assert of["read"] == named("Private corpus", "Public corpus")


def test_large_sweep_continues_page_by_page_and_the_last_page_reports_all(own_run, monkeypatch):
    monkeypatch.setattr(settings, "PAGE", 2)
    conf = GRID | {"sweep_noise_multipliers": "1,2,3", "seed": 5}
    done, tasks = own_run("dp_sweep", conf)
    assert done.state == DagRunState.SUCCESS
    assert trained(tasks) == ["σ=1 · B=256 · epochs=5", "σ=2 · B=256 · epochs=5"]
    assert tasks["report", -1].state == SKIPPED
    following = started_by(done)
    assert following.run_id == f"{done.run_id}__page_2"
    assert following.conf["page"] == 2
    again, tasks = own_run("dp_sweep", following.conf)
    assert trained(tasks) == ["σ=3 · B=256 · epochs=5"]
    assert set(states(tasks).values()) == {SUCCESS}
    assert started_by(again) is None
    read = json.loads(_spec_of(tasks["report", -1].xcom_pull(task_ids="report")["outputs"][0]))
    assert set(read["points"]) == {f"σ={n} · B=256 · epochs=5" for n in (1, 2, 3)}


def trained(tasks):
    return sorted(name for name, _ in mapped(tasks)["pretraining"])


def started_by(done):
    from airflow.models import DagRun
    from airflow.utils.session import create_session

    with create_session() as session:
        return session.query(DagRun).filter(DagRun.run_id.like(f"{done.run_id}__%")).one_or_none()


# Must follow the other sweeps: in one process, Airflow expands no points after a grid has failed.
@pytest.mark.cases
def test_wrong_settings_are_refused_before_the_budget_is_checked(run, dag, first, conf):
    done, tasks = run(dag, conf)
    assert done.state == DagRunState.FAILED
    by_task = states(tasks)
    assert (by_task[first], by_task["outcome"], by_task["budget"]) == (FAILED, FAILED, UPSTREAM)


def _spec_of(output: str) -> str:
    return (
        Path(os.environ["CONFIDE_HOME"]) / "store" / output.removeprefix("store://") / "spec.json"
    ).read_text()
