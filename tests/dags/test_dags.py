"""The structure of the DAGs, which must agree with the specs of their steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowFailException

from dags.launcher.outcome import refuse
from tasks.protocol.job import POINT_STEPS, job_steps, names_of, point_and_task, point_steps
from tasks.protocol.points import first_private
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import RunContext
from tasks.protocol.sweep import SweepSettings

CHECKOUT = Path(__file__).resolve().parents[2]
NAMES = {"dp_bert", "dp_sweep", "new_corpus", "privacy_audit"}
HEAVY = ("pretraining", *POINT_STEPS)


def own_name(task_id: str) -> str:
    return task_id.rpartition(".")[2]


def inputs_of(specs) -> dict[str, set[str]]:
    """Return the tasks whose outputs each step's spec names, by task."""
    owner = {spec.output: name for name, spec in specs.items()}
    return {
        name: {task for uri, task in owner.items() if uri in spec.model_dump_json()}
        for name, spec in specs.items()
        if name not in ("budget", "reserve")  # both only name the charged steps
    }


# Settings with which no step is skipped.
KEPT = JobSettings(
    phrases_epsilon=2.0,
    vocabulary_source="checkpoint+private",
    public_model="/a/bert",
    membership_units=50,
    audit_canaries=40,
)


def upstream_of(dag, group: str = "") -> dict[str, set[str]]:
    """Return the upstream tasks of each task in a group, or of each task not for baselines."""
    return {
        own_name(task.task_id): {own_name(t) for t in task.get_flat_relative_ids(upstream=True)}
        for task in dag.tasks
        if (task.task_id.startswith(group) if group else not is_of_baselines(task))
    }


OF_GRAPH = {"settings", "trainings", "fine_tunings", "measured", "models"}
OF_GRAPH |= {"budget", "reserve", "report", "give_back", "outcome"}
OF_SWEEP = {"next_page", "start_page"}


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_graph_has_a_task_for_every_step_of_a_model_and_no_other(dags, name):
    kind, more = (JobSettings, set()) if name == "dp_bert" else (SweepSettings, OF_SWEEP)
    settings = kind(**KEPT.model_dump())
    steps = point_steps(settings, first_private(settings.points()))
    found = {task.task_id for task in dags[name].tasks if not is_of_baselines(task)}
    assert {own_name(task) for task in found} == {*OF_GRAPH, *more, *steps}


def test_dp_bert_has_a_task_for_every_step_of_a_further_training(dags):
    settings = KEPT.model_copy(
        update={"more_trainings": "noise_multiplier=3;epochs=1", "audit_canaries": 0}
    )
    steps = job_steps(settings)
    points = [point for point in settings.points() if point.noise_multiplier is not None]
    assert [(point.noise_multiplier, point.epochs) for point in points] == [(3, 6), (0.875, 1)]
    mapped = {own_name(t.task_id): t for t in dags["dp_bert"].tasks if "." in t.task_id}
    assert set(mapped) == set(POINT_STEPS)
    for point in points:
        for task, name in names_of(point).items():
            if task in mapped and task != "audit":
                assert mapped[task].plan(settings.model_dump(), point)[task] == steps[name]
                assert steps[name].output in steps["report"].results.values()
        training = steps[names_of(point)["pretraining"]]
        assert steps["budget"].charged.count(training) == 1
    first = {"public_pretraining", "phrases_pretraining", "entities"}
    upstream = upstream_of(dags["dp_bert"])
    assert all(first <= upstream[task] for task in mapped)
    assert set(mapped) <= upstream["report"]


def is_of_baselines(task) -> bool:
    """Whether the task is only for baselines with a vocabulary other than the sweep's."""
    return task.task_id.startswith("baseline.")


def test_a_baseline_of_another_vocabulary_has_a_task_for_each_step_that_is_its_own(dags):
    settings = SweepSettings(sweep_baselines="public,nonprivate", sweep_checkpoints="/a/bert")
    points = settings.points()
    shared = {s.output for s in point_steps(settings, points[0]).values()}
    tasks = {task.task_id for task in dags["dp_sweep"].tasks if is_of_baselines(task)}
    upstream = upstream_of(dags["dp_sweep"], "baseline.")
    found = set()
    for front in {p.front for p in points if p.has_separate_front}:
        steps = point_steps(settings, front)
        own = {name: spec for name, spec in steps.items() if spec.output not in shared}
        own = {name: spec for name, spec in own.items() if name not in POINT_STEPS}
        found |= {f"baseline.{name}" for name in own}
        for task, inputs in inputs_of(own).items():
            assert inputs <= upstream[task], task
    assert found == tasks


@pytest.mark.parametrize(
    "settings",
    [JobSettings(), KEPT, SweepSettings(phrases_epsilon=2.0)],
    ids=["job", "all", "sweep"],
)
def test_every_step_runs_after_the_steps_whose_outputs_it_reads(dags, settings):
    steps = point_steps(settings, first_private(settings.points()))
    upstream = upstream_of(dags["dp_sweep" if isinstance(settings, SweepSettings) else "dp_bert"])
    for task, inputs in inputs_of(steps).items():
        assert inputs <= upstream[task], task
    read = {point_and_task(name)[1] for name in job_steps(settings)["report"].results}
    assert read <= upstream["report"]


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_nothing_is_charged_before_text_and_labels_are_checked(dags, name):
    upstream = upstream_of(dags[name])
    read = {"private_corpus", "public_corpus", "entities", "checkpoint"}
    assert read <= upstream["reserve"]
    assert all("budget" in upstream[task] for task in (*read, "reserve"))
    later = set(upstream) - upstream["reserve"] - {"reserve"}
    assert all("reserve" in upstream[task] for task in later)


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_run_that_was_reserved_ends_by_giving_back(dags, name):
    """`give_back` is a teardown: it always runs, and does not turn a failed run into a success."""
    dag = dags[name]
    give_back, reserve = dag.get_task("give_back"), dag.get_task("reserve")
    assert give_back.is_teardown and not give_back.on_failure_fail_dagrun
    assert reserve.is_setup  # if a failed task is cleared, the run is registered again
    upstream = upstream_of(dag)["give_back"]
    assert {"pretraining", "vocabulary", "report"} <= upstream


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_last_task_decides_the_state_of_the_run(dags, name):
    """A teardown without setups always runs, and its failure makes the run fail."""
    outcome = dags[name].get_task("outcome")
    assert outcome.is_teardown and outcome.on_failure_fail_dagrun
    assert not any(task.is_setup for task in outcome.upstream_list)
    assert not outcome.downstream_list
    decided_by = {"report", "give_back"} | ({"next_page"} if name == "dp_sweep" else set())
    assert decided_by <= upstream_of(dags[name])["outcome"]


LAST = ("report", "next_page")


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ({"report": "success", "promote": "skipped", "outcome": "running"}, None),
        ({"report": "skipped", "next_page": "success"}, None),
        ({"report": "success", "model.exposure_1": "failed"}, "failed: model.exposure_1"),
        ({"report": "upstream_failed", "vocabulary": "failed"}, "failed: vocabulary"),
        (
            {"report": "skipped", "vocabulary": "skipped"},
            "cancelled before report or next_page",
        ),
        ({}, "cancelled before report or next_page"),
    ],
)
def test_run_without_a_report_or_with_a_failed_task_is_refused(states, reason):
    if reason is None:
        refuse(states, LAST)
        return
    with pytest.raises(AirflowFailException, match=reason):
        refuse(states, LAST)


@pytest.mark.parametrize(("run_id", "ended"), [("first", True), ("second", False)])
def test_earlier_runs_of_a_dag_have_ended_when_the_next_one_starts(run_id, ended):
    """This holds because max_active_runs is 1, which another test checks."""
    context = RunContext(run_key="dp_bert/second", run_name="", task="reserve", ended="dp_bert/")
    assert context.has_ended(f"dp_bert/{run_id}") is ended
    assert not context.has_ended(f"cli/dp_bert/{run_id}")
    assert not context.model_copy(update={"ended": ""}).has_ended("dp_bert/first")


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_heavy_steps_take_turns_and_light_ones_do_not_wait_for_them(dags, name):
    for task in dags[name].tasks:
        heavy = own_name(task.task_id).endswith(HEAVY)
        assert task.pool == ("training" if heavy else "default_pool"), task.task_id


def test_a_newcomer_finds_words_on_every_dag_and_task(dags):
    assert set(dags) == NAMES
    for dag in dags.values():
        assert dag.doc_md and dag.description and dag.tags
        for task in dag.tasks:
            named = task.task_display_name
            assert named != task.task_id and named[0].isupper(), task.task_id
    for task in dags["dp_bert"].tasks:
        assert task.doc_md, task.task_id
    groups = ("point.", "model.", "baseline.")
    mapped = [task for task in dags["dp_sweep"].tasks if any(g in task.task_id for g in groups)]
    assert len(mapped) == 3 + 6
    assert all(task.map_index_template == "{{ point_name }}" for task in mapped)


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep", "privacy_audit"])
def test_a_form_is_the_dags_and_no_copy_of_it_is_in_any_task(dags, name):
    from airflow.serialization.serialized_objects import DagSerialization

    assert len(dags[name].params) > 10
    kept = DagSerialization.to_dict(dags[name])["dag"]
    assert {field for field, _ in kept["params"]} == set(dags[name].params)
    assert [task.task_id for task in dags[name].tasks if task.params] == []


def test_overlapping_runs_and_catching_up_are_off(dags):
    for dag in dags.values():
        assert dag.max_active_runs == 1
        assert all(task.retries == 2 for task in dag.tasks if hasattr(task, "plan"))
        assert dag.catchup is False


def test_reading_the_dags_loads_nothing_heavy_and_no_provider_that_is_not_chosen():
    unwanted = (
        "tensorflow mlflow numpy dp_core.privacy dp_core.training pandas docker kubernetes google "
        "airflow.providers.docker.operators airflow.providers.cncf.kubernetes.operators"
    )
    program = (
        "import sys, runpy\n"
        f"for name in {sorted(NAMES)!r}: runpy.run_path(f'dags/{{name}}.py')\n"
        f"print([m for m in {unwanted.split()!r} if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.splitlines()[-1] == "[]"


def test_searched_sweep_is_refused_by_airflow(dags):
    from dags.dp_sweep import PLAN

    asked = {"sweep_search": "optuna", "sweep_noise_multipliers": "1,2", "sweep_batch_sizes": "256"}
    with pytest.raises(AirflowFailException, match="sweep_search: mapped tasks cannot"):
        PLAN.settings(asked)
    points, number, last = PLAN.page({"sweep_batch_sizes": "256", "page": 1})
    assert (points, number, last) == (SweepSettings(sweep_batch_sizes="256").points(), 1, True)
    with pytest.raises(AirflowFailException, match="page: 2 of 1"):
        PLAN.page({"sweep_batch_sizes": "256", "page": 2})
