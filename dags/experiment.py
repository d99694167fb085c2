"""The graph that the DAGs of a job and of a sweep share.

It reads from top to bottom like the method section of Hoory et al. 2021: data, vocabulary, canaries
and rows; then the models, which are trained, fine-tuned and measured as mapped tasks; then the
report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import BaseOperator, TriggerRule, get_current_context, task, task_group
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from dags import launcher
from dags.launcher import TRAINING, step
from tasks.protocol.job import job_steps, point_steps
from tasks.protocol.points import Point, first_private, unique
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import promotion
from tasks.protocol.specs import GiveBackSpec, PromoteSpec, StepSpec
from tasks.protocol.sweep import SweepSettings

THIS_PAGE = "page"  # the field of a sweep's form that is no setting
BY_POINT = "{{ point_name }}"
DESCRIPTIONS = {  # of the steps that train or measure one model
    "pretraining": "Trains a model with DP-SGD, which is **charged: ε_T**, or a model to compare.",
    "finetuning": "Fine-tunes the model on labels and scores it.",
    "exposure": "Measures how well the model remembers its canaries.",
    "membership": "Attacks the model by membership inference.",
    "audit": "Estimates a lower bound on the model's ε from the canaries in its training.",
}
PRETRAINING = "training_point.pretraining"
STARTS = ("public_pretraining", "phrases_pretraining")
Steps = Mapping[str, StepSpec]


@dataclass(frozen=True)
class RunPlan:
    """The specs of a run's steps, which each task computes from the run's parameters.

    Args:
        kind: the class of the settings: of a job or of a sweep.
    """

    kind: type[JobSettings]

    def settings(self, params: Mapping[str, Any]) -> JobSettings:
        """Return the settings of the whole run.

        Raises:
            AirflowFailException: the settings are invalid, or need an optimiser, which cannot run
                mapped tasks.
        """
        given = {name: value for name, value in params.items() if name != THIS_PAGE}
        settings = launcher.settings_from(self.kind, given)
        if isinstance(settings, SweepSettings) and settings.is_asked:
            raise AirflowFailException(
                "settings refused: sweep_search: mapped tasks cannot be asked for one after the "
                "other; run this sweep by ./confide run dp_sweep"
            )
        return settings

    def page(self, params: Mapping[str, Any]) -> tuple[list[Point], int, bool]:
        """Return the points of this run, which page they are, and whether it is the last.

        Raises:
            AirflowFailException: the sweep has no such page.
        """
        pages, number = self.settings(params).pages(), int(params.get(THIS_PAGE) or 1)
        if number > len(pages):
            raise AirflowFailException(f"{THIS_PAGE}: {number} of {len(pages)}")
        return pages[number - 1], number, number == len(pages)

    def of_point(self, params: Mapping[str, Any], point: Point | None) -> Steps:
        """Return the specs of a point's steps, or of the steps that all points share."""
        settings = self.settings(params)
        return point_steps(settings, point or first_private(settings.points()))

    def of_run(self, params: Mapping[str, Any], point: object) -> Steps:
        """Return the specs of steps about all points; only the last page has the report."""
        settings, (_, _, last) = self.settings(params), self.page(params)
        steps = job_steps(settings, promotion())
        report = steps["report"]
        if not last:
            del steps["report"]
        return {
            **steps,
            "promote": PromoteSpec(made_up=settings.made_up, report_uri=report.output),
            "give_back": GiveBackSpec(made_up=settings.made_up),
        }

    def ready(
        self, part: Callable[[Point], Point], needed: Callable[[Steps], StepSpec], *tasks: str
    ) -> list[dict[str, Any]]:
        """Return the points of this page whose input exists, so that a failed point stops no other.

        Args:
            part: returns the training, model or fine-tuning of a point, which points may share.
            needed: the step of a point whose output they read.
            tasks: the tasks that make these outputs, including every mapped instance.
        """
        context = get_current_context()
        settings, (points, _, _) = self.settings(context["params"]), self.page(context["params"])
        answers = context["ti"].xcom_pull(task_ids=list(tasks))
        outputs = {answer["output"] for answer in answers or () if answer}
        return [
            point.model_dump()
            for point in unique(map(part, points))
            if needed(point_steps(settings, point)).output in outputs
        ]


@dataclass(frozen=True)
class Experiment:
    """The tasks that the tasks of a single DAG follow.

    Attributes:
        measured: the last tasks before the report.
        report: the task that writes the report.
        last: the tasks that decide the state of the run.
    """

    measured: list[Any]
    report: BaseOperator
    last: list[Any]


def experiment(plan: RunPlan, *measurements: str, more_fronts: bool) -> Experiment:
    """Draw the graph from the check of the settings to the report.

    Args:
        plan: the specs of the steps.
        measurements: names of the steps that measure each model before its fine-tuning.
        more_fronts: whether baselines may have another vocabulary than the job.
    """

    @task(
        retries=0,
        task_display_name="Check the settings",
        doc_md="Checks the form's values again (Airflow accepts unknown keys) and that the files "
        "exist; lists the baselines that need a separate vocabulary.",
    )
    def settings() -> list[dict[str, Any]]:
        params = get_current_context()["params"]
        launcher.settings_to_start(plan.kind, plan.settings(params).model_dump())
        points, _, _ = plan.page(params)
        return [
            front.model_dump() for front in unique(p.front for p in points if p.has_separate_front)
        ]

    @task(
        retries=0,
        task_display_name="Lay out the trainings",
        trigger_rule=TriggerRule.ALL_DONE,
        doc_md="Lists the trainings: with DP, one per setting and seed, and the baselines.",
    )
    def trainings() -> list[dict[str, Any]]:
        context = get_current_context()
        tasks = (*STARTS, *(["baseline.public_pretraining"] if more_fronts else []))
        points = plan.ready(attrgetter("training"), start_of, *tasks)
        labelled = "entities" in plan.of_point(context["params"], None)
        if points and labelled and not context["ti"].xcom_pull(task_ids="entities"):
            raise AirflowFailException("there is no labelled text to fine-tune on")
        return points

    @task(
        retries=0,
        task_display_name="Lay out the fine-tunings",
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Lists the fine-tunings: one per model, seed and fold.",
    )
    def fine_tunings() -> list[dict[str, Any]]:
        if "finetuning" not in plan.of_point(get_current_context()["params"], None):
            raise AirflowSkipException("there is no labelled text to fine-tune on")
        return plan.ready(lambda point: point, itemgetter("pretraining"), PRETRAINING)

    @task(
        retries=0,
        task_display_name="Lay out the models",
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Lists the models of the trainings: one each, or one for each of several epochs.",
    )
    def models() -> list[dict[str, Any]]:
        return plan.ready(attrgetter("model"), itemgetter("pretraining"), PRETRAINING)

    # All models share data, vocabulary, canaries, token stores and the public model.
    fronts = settings()
    front = front_half(fronts, plan)
    starts = [front.public_pretraining, front.phrases_pretraining]
    if more_fronts:
        every_baseline = baseline(plan).expand(coordinates=fronts)
        [front.private_store, front.public_store] >> every_baseline
        starts.append(every_baseline)

    # DP-SGD continues the training on private rows; each training is a release (ε_T). Models of
    # public text, of released phrases, and trained without privacy are compared with it. Points
    # that share a training have one task of it.
    starting_points = trainings()
    [*starts, front.entities] >> starting_points
    every_training = each_point("training_point", starting_points, plan, "pretraining")

    # Each model is measured by its usefulness (strict entity F1, or accuracy), its memorisation
    # (exposure) and, optionally, by membership inference against units that were held out, and by
    # guessing which canaries fair coins had put into the training. The models that a training
    # keeps after several epochs share its charge.
    points, trained = fine_tunings(), models()
    every_training >> [points, trained]
    every_point = each_point("point", points, plan, "finetuning")
    every_model = each_point("model", trained, plan, *measurements)
    # Without this task, the last tasks would be skipped when an optional measurement is.
    every_measurement = EmptyOperator(
        task_id="measured",
        task_display_name="All measured",
        trigger_rule=TriggerRule.NONE_FAILED,
        doc_md="Waits for all measurements; succeeds also if the settings skip some of them.",
    )
    [every_model, every_point] >> every_measurement
    measured = [every_training, every_measurement]

    report = step(
        "report",
        plan=plan.of_run,
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        doc_md="Writes one page with ε_V, ε_T, F1, exposure and the privacy statement, and "
        "registers the models with the audits' verdicts. **Fails if an audit contradicts the "
        "claim.**",
    )
    measured >> report
    # A run that fails before its first release gives its planned budget back.
    give_back = step(
        "give_back", plan=plan.of_run, doc_md="Frees the planned budget if no release has begun."
    )
    [every_training, report] >> give_back.as_teardown(setups=front.reserve)
    last = [*starts, starting_points, *measured, report, give_back]
    return Experiment(measured, report, last)


def start_of(steps: Steps) -> StepSpec:
    """Return the spec of a point's initial model, trained on public text or released phrases."""
    return steps.get("phrases_pretraining", steps["public_pretraining"])


@dataclass(frozen=True)
class Front:
    """The tasks of the front half that later tasks wait for."""

    reserve: BaseOperator
    entities: BaseOperator
    private_store: BaseOperator
    public_store: BaseOperator
    public_pretraining: BaseOperator
    phrases_pretraining: BaseOperator


def front_half(first: Any, plan: RunPlan) -> Front:
    """Draw the steps before the private trainings.

    Args:
        first: the task that checks the settings.
        plan: the specs of the steps.
    """
    light, of_run = partial(step, plan=plan.of_point), partial(step, plan=plan.of_run)

    training = partial(light, pool=TRAINING)
    # A run that does not fit its budget is refused before anything is read.
    budget = of_run("budget", doc_md="Records the sources; **refuses a run over the budget.**")

    # The data: confidential notes, public text, and labelled text.
    private_corpus = light("private_corpus", doc_md="Reads the notes and groups them by unit.")
    public_corpus = light("public_corpus", doc_md="Reads public text, which needs no privacy.")
    entities = light("entities", doc_md="Reads labelled text for training and test.")
    checkpoint = light("checkpoint", doc_md="Reads the tokens to keep from a public model.")
    sources = [private_corpus, public_corpus, entities, checkpoint]
    first >> budget >> sources

    # The whole run is charged only after text and labels have been read and checked.
    reserve = of_run(
        "reserve",
        trigger_rule=TriggerRule.NONE_FAILED,  # labels and checkpoint are optional
        doc_md="Registers all releases together: **either all of them fit, or the run ends.**",
    )
    sources >> reserve

    # The vocabulary consists of public words, which are free, and of private words that public
    # text lacks, chosen by noised counts: the first release (ε_V). Alternatively, the tokens of a
    # public model are kept.
    vocabulary = light(
        "vocabulary",
        doc_md="Learns tokens from public words and noised counts of private words. "
        "**Charged: ε_V.**",
    )
    reserve >> vocabulary

    # Canaries are drawn after the vocabulary, so that they cannot influence it, and are planted
    # by unit.
    canaries = light("canaries", doc_md="Draws canaries from the vocabulary with public coins.")
    private_store = light("private_store", doc_md="Writes private rows of tokens with canaries.")
    public_store = light("public_store", doc_md="Writes public rows of token ids.")
    vocabulary >> canaries >> private_store
    [vocabulary, public_corpus] >> public_store

    # Phrases that many units share, and text written from them, are optional and another release
    # (ε_P).
    phrases = light("phrases", doc_md="Counts phrases in rounds with noise. **Charged: ε_P.**")
    written_text = light(
        "written_text", doc_md="Writes text from released phrases, at no further privacy cost."
    )
    phrases_store = light("phrases_store", doc_md="Writes rows of tokens of the written text.")
    canaries >> phrases >> written_text >> phrases_store

    # Pre-training begins with public text, and continues on the written text.
    public_pretraining = training(
        "public_pretraining",
        point=plan.kind.starts["public_pretraining"].model_dump(),
        doc_md="Trains the language model on public text.",
    )
    phrases_pretraining = training(
        "phrases_pretraining", doc_md="Continues the training on the written text."
    )
    [public_store, private_store] >> public_pretraining
    [public_pretraining, phrases_store] >> phrases_pretraining
    return Front(
        reserve, entities, private_store, public_store, public_pretraining, phrases_pretraining
    )


def baseline(plan: RunPlan) -> Any:
    """Return the mapped group of steps that a baseline with another vocabulary needs.

    They run after the job's rows are written, so that shared outputs are made once.
    """

    @task_group(group_id="baseline")
    def of_baseline(coordinates: dict[str, Any]) -> None:
        named = {"plan": plan.of_point, "point": coordinates, "map_index_template": BY_POINT}
        checkpoint = step("checkpoint", **named)
        vocabulary = step("vocabulary", trigger_rule=TriggerRule.NONE_FAILED, **named)
        canaries = step("canaries", **named)
        private_store, public_store = step("private_store", **named), step("public_store", **named)
        public_pretraining = step("public_pretraining", pool=TRAINING, **named)
        checkpoint >> vocabulary >> canaries >> private_store
        vocabulary >> public_store
        [private_store, public_store] >> public_pretraining

    return of_baseline


def each_point(group: str, points: Any, plan: RunPlan, *names: str) -> Any:
    """Draw a mapped group of tasks that train or measure one model, and expand it over points.

    Args:
        group: name of the group.
        points: output of the task that lists the points.
        plan: the specs of the steps.
        names: names of the steps of each point.
    """

    @task_group(group_id=group)
    def of_point(coordinates: dict[str, Any]) -> None:
        for name in names:
            step(
                name,
                plan=plan.of_point,
                pool=TRAINING,
                point=coordinates,
                map_index_template=BY_POINT,
                doc_md=DESCRIPTIONS[name],
            )

    return of_point.expand(coordinates=points)
