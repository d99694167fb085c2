"""The structure of the DAGs, which must agree with the specs of their steps."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException

from dags import experiment
from dags.experiment import RunPlan
from dags.launcher.outcome import refuse
from tasks.protocol import settings
from tasks.protocol.job import job_steps
from tasks.protocol.points import Point
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import RunContext
from tasks.protocol.sweep import SweepSettings

CHECKOUT = Path(__file__).resolve().parents[2]
NAMES = {"dp_bert", "dp_sweep", "new_corpus", "privacy_audit"}
HEAVY = {"start", "pretraining", "measurement"}
TRAINED_ON = ("vocabulary", "canaries", "private_store", "public_store")
GROUPS = {
    "data_group": {"settings", "budget", "read", "reserve"},
    "vocabulary_group": {*TRAINED_ON},
    "train_group": {"starts", "start", "trainings", "pretraining"},
    "measure_group": {"measurements", "measurement"},
    "report_group": {"report", "give_back", "outcome"},
}


# Settings with which a job has every step.
KEPT = JobSettings(
    phrases_epsilon=2.0,
    vocabulary_source="checkpoint+private",
    public_model="gs://a/bert",
    membership_units=50,
    audit_canaries=40,
)


def upstream_of(dag) -> dict[str, set[str]]:
    return {task.task_id: task.get_flat_relative_ids(upstream=True) for task in dag.tasks}


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_graph_has_five_groups(dags, name):
    groups = dags[name].task_group.get_task_group_dict()
    tasks = {key: set(group.children) for key, group in groups.items() if key}
    more = {"start_page"} if name == "dp_sweep" else set()
    assert tasks == GROUPS | {"report_group": GROUPS["report_group"] | more}
    named = [group.group_display_name for key, group in groups.items() if key]
    assert named == ["Data", "Vocabulary", "Train", "Measure", "Report"]


@pytest.fixture
def specs_of_tasks(monkeypatch):
    """Return a function from settings to the specs of each task's instances, in their order."""

    def list_specs(settings):
        plan = RunPlan(type(settings))
        params = settings.model_dump()
        tasks = {name: [[plan.of_point(params, None)[name]]] for name in TRAINED_ON}

        def outputs(task_ids):
            of_tasks = [spec.output for task in task_ids for specs in tasks[task] for spec in specs]
            return [{"outputs": of_tasks}]

        context = {"params": params, "ti": SimpleNamespace(xcom_pull=outputs)}
        monkeypatch.setattr(experiment, "get_current_context", lambda: context)
        for task, instances in {
            "read": plan.texts,
            "start": plan.starts,
            "pretraining": plan.trainings,
            "measurement": plan.measurements,
        }.items():
            tasks[task] = [
                [
                    plan.of_point(params, Point(**point) if point else None)[name]
                    for name, point in i
                ]
                for i in (instance["steps"] for instance in instances())
            ]
        return tasks

    return list_specs


@pytest.mark.parametrize(
    "settings",
    [
        JobSettings(),
        KEPT,
        JobSettings(more_trainings="noise_multiplier=3;epochs=1", kept_epochs="2"),
        JobSettings(model_kind="gpt2"),
        SweepSettings(phrases_epsilon=2.0),
        SweepSettings(sweep_baselines="public,nonprivate", sweep_checkpoints="gs://a/bert"),
    ],
    ids=["job", "all", "more", "causal", "sweep", "baselines"],
)
def test_every_step_of_a_job_runs_once_and_after_its_inputs(dags, specs_of_tasks, settings):
    tasks = specs_of_tasks(settings)
    upstream = upstream_of(dags["dp_sweep" if isinstance(settings, SweepSettings) else "dp_bert"])
    steps = job_steps(settings)
    of_run = {steps[name].output for name in ("budget", "reserve", "report")}
    made = [spec.output for instances in tasks.values() for specs in instances for spec in specs]
    assert sorted(made) == sorted({spec.output for spec in steps.values()} - of_run)
    for task, instances in tasks.items():
        before = {s.output for t in upstream[task] & set(tasks) for i in tasks[t] for s in i}
        for specs in instances:
            done = set(before)
            for spec in specs:
                assert {uri for uri in made if uri in spec.model_dump_json()} <= done, spec.step
                done.add(spec.output)
    assert set(tasks) <= upstream["report"]


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_nothing_is_charged_before_text_and_labels_are_checked(dags, name):
    upstream = upstream_of(dags[name])
    assert "read" in upstream["reserve"]
    assert all("budget" in upstream[task] for task in ("read", "reserve"))
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
    decided_by = {"report", "give_back"} | ({"start_page"} if name == "dp_sweep" else set())
    assert decided_by <= upstream_of(dags[name])["outcome"]


@pytest.mark.cases
def test_run_without_a_report_or_with_a_failed_task_is_refused(states, reason):
    if not reason:
        refuse(states, lambda: "report")
        return
    with pytest.raises(AirflowFailException, match=reason):
        refuse(states, lambda: "report")


def test_last_task_of_a_run_follows_from_its_form(dags, monkeypatch):
    from dags.dp_sweep import PLAN

    monkeypatch.setattr(settings, "PAGE", 1)
    grid = {"sweep_noise_multipliers": "1,2", "sweep_batch_sizes": "256", "sweep_epochs": "5"}
    assert PLAN.last_task(grid | {"plan_only": True}) == "budget"
    assert [PLAN.last_task(grid | {"page": page}) for page in (1, 2)] == ["start_page", "report"]


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
        heavy = task.task_id in HEAVY
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
    mapped = [dags["dp_sweep"].get_task(name) for name in ("read", *HEAVY)]
    assert {task.map_index_template for task in mapped} == {"{{ task.named.name }}"}


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
