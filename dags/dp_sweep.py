"""Points over dp_bert's back half, with seeds and folds: the paper's Figs. 1 and 2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from airflow.sdk import TriggerRule, dag, get_current_context, task, task_group
from airflow.sdk.exceptions import AirflowFailException

from dags import configuration, launcher
from dags.launcher import TRAINING
from dags.names import NAMES
from tasks.protocol import (
    StepSpec,
    SweepPoint,
    SweepSettings,
    sweep_point_steps,
    sweep_report,
    sweep_training,
)
from tasks.protocol.sweep import TRAINING_AXES


def plan(params: Mapping[str, Any], root: str, point: SweepPoint | None) -> dict[str, StepSpec]:
    """Return the specs of a point's steps, and of what all points share."""
    settings = launcher.settings_from(SweepSettings, params)
    own = sweep_point_steps(settings, point or settings.points()[0], root)
    return {**own, "report": sweep_report(settings, root)}


step = partial(launcher.step, plan=plan)
training = partial(step, pool=TRAINING)
BY_POINT = "{{ point_name }}"
PRETRAINING = "training_point.dp_pretraining"

FORM = launcher.form(SweepSettings, configuration.settings("SWEEP"))
for coordinate in TRAINING_AXES:
    FORM[coordinate].description = (
        "Each point takes its own from the grid, above; from here only points listed by themselves "
        "that do not name it."
    )


@dag(
    dag_id="dp_sweep",
    dag_display_name="dp_sweep · ε and F1 over a grid",
    description="Pre-training and fine-tuning over a grid, seeds and folds; releases are charged",
    schedule=configuration.schedule("SWEEP"),
    catchup=False,
    max_active_runs=1,
    params=FORM,
    default_args=launcher.defaults(),
    tags=["confide", "differential privacy", "sweep"],
    doc_md="""
### Train over a grid, and draw ε and F1 against each setting

The grid stands in the form's first section; everything before the private training is done once
and shared (and is shared with `dp_bert` where the settings agree). **Every private training is a
release of its own and is charged as such, each seed too**; points that differ in fine-tuning alone
share one. Fine-tuning seeds and folds are free on public labels. A point that fails does not stop
the others: the report holds those that finished, and the run ends as failed so that nobody
overlooks it.

To run it by schedule: `CONFIDE_SWEEP_SCHEDULE` (cron) and `CONFIDE_SWEEP_SETTINGS` (a JSON file).
""",
)
def dp_sweep() -> None:
    """Describe the sweep."""

    @task(
        retries=0,
        task_display_name=NAMES["grid"],
        doc_md="Checks the form's values again, and lays out the grid.",
    )
    def grid() -> list[dict[str, float | None]]:
        settings = launcher.settings_to_start(SweepSettings, get_current_context()["params"])
        return [point.model_dump() for point in settings.trainings()]

    @task(
        retries=0,
        task_display_name=NAMES["fine_tunings"],
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Lays out what is fine-tuned: each setting, by each seed, on each fold.",
    )
    def fine_tunings() -> list[dict[str, float | None]]:
        context = get_current_context()
        settings = launcher.settings_from(SweepSettings, context["params"])
        answers = context["ti"].xcom_pull(task_ids=[PRETRAINING])
        there = {answer["output"] for answer in answers if answer}  # not of trainings that failed
        return [
            point.model_dump()
            for point in settings.points()
            if point.public or sweep_training(settings, point, launcher.store()).output in there
        ]

    # What all points share: data, vocabulary, canaries, token stores, the public model.
    # The budget is asked for every point at once: all of them fit, or nothing is spent.
    trainings, budget = grid(), step("budget", doc_md="Registers every point: **all, or none.**")
    private_corpus, public_corpus = step("private_corpus"), step("public_corpus")
    entities, checkpoint, canaries = step("entities"), step("checkpoint"), step("canaries")
    vocabulary = step("vocabulary", trigger_rule=TriggerRule.NONE_FAILED)  # without a checkpoint
    private_store, public_store = step("private_store"), step("public_store")
    public_pretraining = training("public_pretraining")
    phrases, written_text = step("phrases"), step("written_text")
    phrases_store = step("phrases_store")
    phrases_pretraining = training("phrases_pretraining")
    trainings >> budget >> [private_corpus, public_corpus, entities, checkpoint]
    [private_corpus, public_corpus, checkpoint] >> vocabulary >> canaries >> private_store
    [vocabulary, public_corpus] >> public_store
    [public_store, private_store] >> public_pretraining
    canaries >> phrases >> written_text >> phrases_store
    [public_pretraining, phrases_store] >> phrases_pretraining

    # Each private training, however many points share it: train with DP, measure.
    @task_group
    def training_point(coordinates: dict[str, float | None]) -> None:
        named = {"point": coordinates, "map_index_template": BY_POINT}
        dp_pretraining = training(
            "dp_pretraining",
            trigger_rule=TriggerRule.NONE_FAILED,  # the phrases may have been switched off
            **named,
        )
        dp_pretraining >> training("dp_exposure", **named)

    @task_group
    def point(coordinates: dict[str, float | None]) -> None:
        training("dp_finetuning", point=coordinates, map_index_template=BY_POINT)

    every_training = training_point.expand(coordinates=trainings)
    [public_pretraining, phrases_pretraining, entities] >> every_training
    points = fine_tunings()
    every_training.get_child_by_label("dp_pretraining") >> points
    every_point = point.expand(coordinates=points)

    report = step("report", trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS)
    [every_training, every_point] >> report

    @task(
        trigger_rule=TriggerRule.ONE_FAILED,
        retries=0,
        task_display_name=NAMES["points_that_failed"],
    )
    def points_that_failed() -> None:
        raise AirflowFailException("a step or a point failed (red); the report holds the others")

    [every_training, every_point, report] >> points_that_failed()


dp_sweep()
