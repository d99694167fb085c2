"""Points over dp_bert's back half, with seeds and folds: the paper's Figs. 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Param, TriggerRule, dag, get_current_context, task, task_group
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from dags import configuration, launcher
from dags.launcher import TRAINING
from dags.launcher.step_operator import PAGE_MARK
from dags.names import NAMES
from tasks.protocol import (
    StepSpec,
    SweepPoint,
    SweepSettings,
    give_back_spec,
    sweep_budget,
    sweep_point_steps,
    sweep_report,
    sweep_reserve,
    sweep_start,
    sweep_training,
)
from tasks.protocol.sweep import (
    PAGE,
    START,
    TRAINING_AXES,
    fronts_of,
    models_of,
    trainings_of,
)

THIS_PAGE = "page"  # the field of the form that is no setting


def settings_of(params: Mapping[str, Any]) -> SweepSettings:
    """Return the settings of the whole sweep.

    Raises:
        AirflowFailException: they are wrong, or ask for what mapped tasks cannot do.
    """
    own = {name: value for name, value in params.items() if name != THIS_PAGE}
    settings = launcher.settings_from(SweepSettings, own)
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


def plan(params: Mapping[str, Any], point: SweepPoint | None) -> Mapping[str, StepSpec]:
    """Return the specs of a point's steps, and of what all points share."""
    settings = settings_of(params)
    return sweep_point_steps(settings, point or settings.points()[0])


def there(context: Mapping[str, Any], *tasks: str) -> set[str]:
    """Return the outputs of those of the tasks that have succeeded, mapped ones each."""
    answers = context["ti"].xcom_pull(task_ids=list(tasks))
    return {answer["output"] for answer in answers or () if answer}


def plan_of_all(params: Mapping[str, Any], point: object) -> dict[str, StepSpec]:
    """Return the specs of what is about all points; the last page alone has the report."""
    settings, (_, _, last) = settings_of(params), page_of(params)
    return {
        **plan(params, None),
        "budget": sweep_budget(settings),
        "reserve": sweep_reserve(settings),
        "give_back": give_back_spec(made_up=settings.made_up),
        **({"report": sweep_report(settings)} if last else {}),
    }


step = partial(launcher.step, plan=plan)
training = partial(step, pool=TRAINING)
BY_POINT = "{{ point_name }}"
PRETRAINING = "training_point.pretraining"
STARTS = ("public_pretraining", "phrases_pretraining", "baseline.public_pretraining")

FORM = launcher.form(SweepSettings, configuration.settings("SWEEP"))
for coordinate in TRAINING_AXES:
    FORM[coordinate].description = (
        "Each point takes its own from the grid, above; from here only points listed by themselves "
        "that do not name it."
    )
FORM[THIS_PAGE] = Param(
    1,
    type="integer",
    allOf=[{"minimum": 1}],
    title="Page",
    section=FORM["sweep_points"].schema["section"],
    description=f"Of the points, {PAGE:,} a run: a larger sweep goes on in runs that start each "
    "other. Leave it at 1.",
)


@dag(
    dag_id="dp_sweep",
    dag_display_name="dp_sweep · ε and F1 over a grid",
    description="Pre-training and fine-tuning over a grid, seeds and folds; releases are charged",
    schedule=configuration.schedule("SWEEP"),
    catchup=False,
    max_active_runs=1,
    default_args=launcher.defaults(),
    tags=["confide", "differential privacy", "sweep"],
    doc_md="""
### Train over a grid, and draw ε and F1 against each setting

The grid stands in the form's first section; everything before the private training is done once
and shared (and is shared with `dp_bert` where the settings agree). **Every private training is a
release of its own and is charged as such, each seed too**; points that differ in fine-tuning alone
share one, and so do, with *Epochs from: checkpoints*, points that differ in epochs alone.
Fine-tuning seeds and folds are free on public labels. Models to compare with are made,
fine-tuned and measured alike, and cost nothing: of public text, checkpoints as they are, or trained
without privacy, for the operator alone. Causal models are compared by perplexity of private text,
and nothing of them is fine-tuned. A point that fails does not stop the others: the report
holds those that finished, and the run ends as failed so that nobody overlooks it.

A sweep of more than 1,024 points goes on page by page: each run ends by starting the next, and the
last one writes the report of all. What runs at a time is the pool's to bound, as ever.

To run it by schedule: `CONFIDE_SWEEP_SCHEDULE` (cron) and `CONFIDE_SWEEP_SETTINGS` (a JSON file).
""",
)
def dp_sweep() -> None:
    """Describe the sweep."""

    @task(
        retries=0,
        task_display_name=NAMES["grid"],
        doc_md="Checks the form's values again, and lays out which baselines have a vocabulary of "
        "their own.",
    )
    def grid() -> list[dict[str, Any]]:
        params = get_current_context()["params"]
        settings = settings_of(params)
        launcher.settings_to_start(SweepSettings, settings.model_dump())
        points, _, _ = page_of(params)
        return [front.model_dump() for front in fronts_of(points)]

    @task(
        retries=0,
        task_display_name=NAMES["trainings"],
        trigger_rule=TriggerRule.ALL_DONE,
        doc_md="Lays out what is trained: each setting, by each seed, and the baselines.",
    )
    def trainings() -> list[dict[str, Any]]:
        context = get_current_context()
        settings, found = settings_of(context["params"]), there(context, *STARTS, "entities")
        points, _, _ = page_of(context["params"])
        labelled = plan(context["params"], None).get("entities")
        if labelled and labelled.output not in found:
            raise AirflowFailException("there is no labelled text to fine-tune on")
        return [
            point.model_dump()
            for point in trainings_of(points)
            if sweep_start(settings, point).output in found
        ]

    def of_what_is_trained(
        lay_out: Callable[[list[SweepPoint]], list[SweepPoint]],
    ) -> list[dict[str, Any]]:
        context = get_current_context()
        settings, trained = settings_of(context["params"]), there(context, PRETRAINING)
        points, _, _ = page_of(context["params"])
        return [
            point.model_dump()
            for point in lay_out(points)
            if sweep_training(settings, point).output in trained
        ]

    @task(
        retries=0,
        task_display_name=NAMES["fine_tunings"],
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Lays out what is fine-tuned: each setting, by each seed, on each fold.",
    )
    def fine_tunings() -> list[dict[str, Any]]:
        told = get_current_context()["params"]
        if "finetuning" not in plan(told, None):
            raise AirflowSkipException("a causal model is not fine-tuned")
        return of_what_is_trained(list)

    @task(
        retries=0,
        task_display_name=NAMES["models"],
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Lays out the models that the trainings have left: one each, or one after each of "
        "several epochs.",
    )
    def models() -> list[dict[str, Any]]:
        return of_what_is_trained(models_of)

    # What all points share: data, vocabulary, canaries, token stores, the public model.
    # Every point is charged at once, when text and labels have been checked: all fit, or none.
    fronts = grid()
    of_all = partial(launcher.step, plan=plan_of_all)
    budget = of_all("budget", doc_md="Records the sources; **refuses a sweep that does not fit.**")
    reserve = of_all(
        "reserve",
        trigger_rule=TriggerRule.NONE_FAILED,  # there may be no labels, and no checkpoint
        doc_md="Registers every point: **all, or none.**",
    )
    private_corpus, public_corpus = step("private_corpus"), step("public_corpus")
    entities, checkpoint, canaries = step("entities"), step("checkpoint"), step("canaries")
    vocabulary = step("vocabulary")
    private_store, public_store = step("private_store"), step("public_store")
    public_pretraining = training("public_pretraining", point=START.model_dump())
    phrases, written_text = step("phrases"), step("written_text")
    phrases_store = step("phrases_store")
    phrases_pretraining = training("phrases_pretraining")
    sources = [private_corpus, public_corpus, entities, checkpoint]
    fronts >> budget >> sources >> reserve >> vocabulary >> canaries >> private_store
    [vocabulary, public_corpus] >> public_store
    [public_store, private_store] >> public_pretraining
    canaries >> phrases >> written_text >> phrases_store
    [public_pretraining, phrases_store] >> phrases_pretraining

    # The same before the training of each baseline that has another vocabulary than the sweep:
    # after the sweep's own rows, so that what both have is made once.
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
    [private_store, public_store] >> every_baseline

    # Each training, however many points share it: train as the point has it.
    @task_group
    def training_point(coordinates: dict[str, Any]) -> None:
        training("pretraining", point=coordinates, map_index_template=BY_POINT)

    # What it remembers: each of its models, where points are checkpoints, covered by one charge.
    @task_group
    def model(coordinates: dict[str, Any]) -> None:
        training("exposure", point=coordinates, map_index_template=BY_POINT)

    @task_group
    def point(coordinates: dict[str, Any]) -> None:
        training("finetuning", point=coordinates, map_index_template=BY_POINT)

    starting_points = trainings()
    starts = [public_pretraining, phrases_pretraining, every_baseline]
    [*starts, entities] >> starting_points
    every_training = training_point.expand(coordinates=starting_points)
    points, trained = fine_tunings(), models()
    every_training >> [points, trained]
    every_point = point.expand(coordinates=points)
    # What comes last waits for all, failed or not, and would be skipped with a fine-tuning that is.
    fine_tuned = EmptyOperator(
        task_id="fine_tuned",
        task_display_name=NAMES["fine_tuned"],
        trigger_rule=TriggerRule.NONE_FAILED,
        doc_md="Also where there is nothing to fine-tune: of causal models.",
    )
    every_point >> fine_tuned
    every_model = model.expand(coordinates=trained)

    report = of_all("report", trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS)
    [every_training, every_model, fine_tuned] >> report

    @task(
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        retries=0,
        task_display_name=NAMES["next_page"],
        doc_md="Skipped where this run holds the last of the points.",
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
        task_display_name=NAMES["start_page"],
        trigger_dag_id="dp_sweep",
        trigger_run_id=following["run_id"],
        conf=following["conf"],
        logical_date=None,
        skip_when_already_exists=True,
        doc_md="Starts this sweep's next page, which waits until this run has ended.",
    )

    @task(
        trigger_rule=TriggerRule.ONE_FAILED,
        retries=0,
        task_display_name=NAMES["points_that_failed"],
    )
    def points_that_failed() -> None:
        raise AirflowFailException("a step or a point failed (red); the report holds the others")

    give_back = of_all("give_back", doc_md="If no release has begun, the budget is free again.")
    [every_training, report] >> give_back.as_teardown(setups=reserve)

    last = [every_training, every_model, every_point, report]
    [*starts, starting_points, *last] >> points_that_failed()


launcher.with_form(dp_sweep(), FORM)
