"""The DAG of a sweep: trainings of `dp_bert` over a grid, seeds and folds (paper's Figs. 1, 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Param, TriggerRule, dag, get_current_context, task, task_group
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from dags import launcher
from dags.experiment import BY_POINT, each_point, front_half
from dags.launcher import TRAINING
from dags.launcher.step_operator import PAGE_MARK
from tasks.protocol import (
    GiveBackSpec,
    StepSpec,
    SweepPoint,
    SweepSettings,
    job_steps,
    point_steps,
)
from tasks.protocol.sweep import (
    PAGE,
    START,
    TRAINING_AXES,
    unique,
)

THIS_PAGE = "page"  # the field of the form that is no setting


def settings_of(params: Mapping[str, Any]) -> SweepSettings:
    """Return the settings of the whole sweep.

    Raises:
        AirflowFailException: the settings are invalid, or need an optimiser, which cannot run
            mapped tasks.
    """
    given = {name: value for name, value in params.items() if name != THIS_PAGE}
    settings = launcher.settings_from(SweepSettings, given)
    if settings.is_asked:
        raise AirflowFailException(
            "settings refused: sweep_search: mapped tasks cannot be asked for one after the other; "
            "run this sweep by ./confide run dp_sweep"
        )
    return settings


def page_of(params: Mapping[str, Any]) -> tuple[list[SweepPoint], int, bool]:
    """Return the points of this run, which page they are, and whether it is the last.

    Raises:
        AirflowFailException: the sweep has no such page.
    """
    pages, number = settings_of(params).pages(), int(params.get(THIS_PAGE) or 1)
    if number > len(pages):
        raise AirflowFailException(f"{THIS_PAGE}: {number} of {len(pages)}")
    return pages[number - 1], number, number == len(pages)


def plan(params: Mapping[str, Any], point: SweepPoint | None) -> dict[str, StepSpec]:
    """Return the specs of a point's steps and of the steps that all points share."""
    settings = settings_of(params)
    return point_steps(settings, point or settings.points()[0])


Steps = Mapping[str, StepSpec]


def start_of(steps: Steps) -> StepSpec:
    """Return the spec of a point's initial model, trained on public text or released phrases."""
    return steps.get("phrases_pretraining", steps["public_pretraining"])


def ready(
    part: Callable[[SweepPoint], SweepPoint],
    needed: Callable[[Steps], StepSpec],
    *tasks: str,
) -> list[dict[str, Any]]:
    """Return the points of this page whose input exists, so that a failed point stops no other.

    Args:
        part: returns the training, model or fine-tuning of a point, which points may share.
        needed: the step of a point whose output they read.
        tasks: the tasks that make these outputs, including every mapped instance.
    """
    context = get_current_context()
    settings, (points, _, _) = settings_of(context["params"]), page_of(context["params"])
    answers = context["ti"].xcom_pull(task_ids=list(tasks))
    outputs = {answer["output"] for answer in answers or () if answer}
    return [
        point.model_dump()
        for point in unique(map(part, points))
        if needed(point_steps(settings, point)).output in outputs
    ]


def plan_of_all(params: Mapping[str, Any], point: object) -> dict[str, StepSpec]:
    """Return the specs of steps about all points; only the last page has the report."""
    settings, (_, _, last) = settings_of(params), page_of(params)
    steps = job_steps(settings)
    if not last:
        del steps["report"]
    return steps | {"give_back": GiveBackSpec(made_up=settings.made_up)}


step = partial(launcher.step, plan=plan)
training = partial(step, pool=TRAINING)
PRETRAINING = "training_point.pretraining"
STARTS = ("public_pretraining", "phrases_pretraining", "baseline.public_pretraining")

FORM = launcher.form(SweepSettings, launcher.form_defaults("SWEEP"))
for coordinate in TRAINING_AXES:
    FORM[coordinate].description = (
        "Points of the grid take their value from the grid above. Only listed points that do not "
        "set it use this value."
    )
FORM[THIS_PAGE] = Param(
    1,
    type="integer",
    allOf=[{"minimum": 1}],
    title="Page",
    section=FORM["sweep_points"].schema["section"],
    description=f"A run holds {PAGE:,} points; a larger sweep continues in further runs, each "
    "started by the previous one. Leave it at 1.",
)


@dag(
    dag_id="dp_sweep",
    dag_display_name="dp_sweep · ε and F1 over a grid",
    description="Pre-training and fine-tuning over a grid, seeds and folds, charged per release",
    schedule=launcher.schedule("SWEEP"),
    catchup=False,
    max_active_runs=1,
    default_args=launcher.defaults(),
    tags=["confide", "differential privacy", "sweep"],
    doc_md="""
### Train over a grid, and draw ε and F1 against each setting

The grid is in the form's first section. All steps before the private training run once and are
shared by the points, and with `dp_bert` if the settings agree. **Every private training, with each
of its seeds, is a separate release and is charged.** Points that differ only in fine-tuning share
one training. With *Epochs from: checkpoints*, points that differ only in epochs share one, too.
Fine-tuning seeds and folds on public labels are free. The comparison models are fine-tuned and
measured in the same way and have no privacy cost: models of public text, unchanged checkpoints, and
models trained without privacy, which stay with the operator. Causal models are compared by the
perplexity of private text and are not fine-tuned. A point that fails does not stop the others: the
report shows the finished points, and the run is marked as failed.

A sweep of more than 1,024 points is divided into pages. Each run starts the next page at its end,
and the last run writes the report on all points. The pool limits how many models train at a time.

To run the sweep on a schedule, set `CONFIDE_SWEEP_SCHEDULE` (cron) and `CONFIDE_SWEEP_SETTINGS` (a
JSON file).
""",
)
def dp_sweep() -> None:
    """Define the graph of one page of the sweep."""

    @task(
        retries=0,
        task_display_name="Lay out the grid",
        doc_md="Checks the form's values again, and lists the baselines that need a separate "
        "vocabulary.",
    )
    def grid() -> list[dict[str, Any]]:
        params = get_current_context()["params"]
        settings = settings_of(params)
        launcher.settings_to_start(SweepSettings, settings.model_dump())
        points, _, _ = page_of(params)
        return [
            front.model_dump() for front in unique(p.front for p in points if p.has_separate_front)
        ]

    @task(
        retries=0,
        task_display_name="Lay out the trainings",
        trigger_rule=TriggerRule.ALL_DONE,
        doc_md="Lists the trainings: one per grid point and seed, and the baselines.",
    )
    def trainings() -> list[dict[str, Any]]:
        context = get_current_context()
        labelled = "entities" in plan(context["params"], None)
        if labelled and not context["ti"].xcom_pull(task_ids="entities"):
            raise AirflowFailException("there is no labelled text to fine-tune on")
        return ready(attrgetter("training"), start_of, *STARTS)

    @task(
        retries=0,
        task_display_name="Lay out the fine-tunings",
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Lists the fine-tunings: one per grid point, seed and fold.",
    )
    def fine_tunings() -> list[dict[str, Any]]:
        params = get_current_context()["params"]
        if "finetuning" not in plan(params, None):
            raise AirflowSkipException("a causal model is not fine-tuned")
        return ready(lambda point: point, itemgetter("pretraining"), PRETRAINING)

    @task(
        retries=0,
        task_display_name="Lay out the models",
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Lists the models of the trainings: one each, or one for each of several epochs.",
    )
    def models() -> list[dict[str, Any]]:
        return ready(attrgetter("model"), itemgetter("pretraining"), PRETRAINING)

    # All points share data, vocabulary, canaries, token stores and the public model.
    # After text and labels have been checked, all points are charged together or not at all.
    fronts = grid()
    front = front_half(fronts, plan, plan_of_all, START.model_dump())

    # A baseline with another vocabulary than the sweep needs these steps, too. They run after the
    # sweep's rows are written, so that shared outputs are made once.
    @task_group
    def baseline(coordinates: dict[str, Any]) -> None:
        named = {"point": coordinates, "map_index_template": BY_POINT}
        checkpoint = step("checkpoint", **named)
        vocabulary = step("vocabulary", trigger_rule=TriggerRule.NONE_FAILED, **named)
        canaries = step("canaries", **named)
        private_store, public_store = step("private_store", **named), step("public_store", **named)
        public_pretraining = training("public_pretraining", **named)
        checkpoint >> vocabulary >> canaries >> private_store
        vocabulary >> public_store
        [private_store, public_store] >> public_pretraining

    every_baseline = baseline.expand(coordinates=fronts)
    [front.private_store, front.public_store] >> every_baseline

    # Points that share a training have one task of it. Exposure is measured for each model; the
    # models of several epochs share one charge.
    starting_points = trainings()
    starts = [front.public_pretraining, front.phrases_pretraining, every_baseline]
    [*starts, front.entities] >> starting_points
    every_training = each_point("training_point", starting_points, plan, "pretraining")
    points, trained = fine_tunings(), models()
    every_training >> [points, trained]
    every_point = each_point("point", points, plan, "finetuning")
    # Without this task, the last tasks would be skipped when the fine-tunings are.
    fine_tuned = EmptyOperator(
        task_id="fine_tuned",
        task_display_name="All fine-tuned",
        trigger_rule=TriggerRule.NONE_FAILED,
        doc_md="Waits for all fine-tunings; succeeds, too, if causal models need none.",
    )
    every_point >> fine_tuned
    every_model = each_point("model", trained, plan, "exposure")

    of_all = partial(launcher.step, plan=plan_of_all)
    report = of_all("report", trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS)
    [every_training, every_model, fine_tuned] >> report

    @task(
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        retries=0,
        task_display_name="Lay out the next page",
        doc_md="Skipped if this run holds the last points.",
    )
    def next_page() -> dict[str, Any]:
        context = get_current_context()
        _, number, last = page_of(context["params"])
        if last:
            raise AirflowSkipException("these are the last of the points")
        first = context["run_id"].partition(PAGE_MARK)[0]
        return {
            "run_id": f"{first}{PAGE_MARK}{number + 1}",
            "conf": {**context["params"], THIS_PAGE: number + 1},
        }

    following = next_page()
    [every_training, every_model, fine_tuned] >> following
    TriggerDagRunOperator(
        task_id="start_page",
        task_display_name="Start the next page",
        trigger_dag_id="dp_sweep",
        trigger_run_id=following["run_id"],
        conf=following["conf"],
        logical_date=None,
        skip_when_already_exists=True,
        doc_md="Starts the sweep's next page, which waits for the end of this run.",
    )

    give_back = of_all("give_back", doc_md="Frees the planned budget if no release has begun.")
    [every_training, report] >> give_back.as_teardown(setups=front.reserve)

    # The report lists the points that did not fail; the run still fails.
    last = [every_training, every_model, every_point, report, following, give_back]
    [*starts, starting_points, *last] >> launcher.outcome("report", "next_page")


launcher.with_form(dp_sweep(), FORM)
