"""The graph that the DAGs of a job and of a sweep share.

It reads from top to bottom like the method section of Hoory et al. 2021: data; vocabulary, canaries
and rows; training; measurements; report. Each model, and each text that a run reads, is an instance
of a mapped task with its name. A step that the settings leave out is no instance.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from typing import Any

from airflow.sdk import BaseOperator, TaskGroup, TriggerRule, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from dags.launcher.form import PLAN_ONLY, THIS_PAGE, settings_from, settings_to_start
from dags.launcher.step_operator import TRAINING, NamedSteps, each, shown, step, title
from tasks.protocol.job import POINT_STEPS, job_steps, point_steps
from tasks.protocol.points import Point, first_private, unique
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import promotion
from tasks.protocol.specs import GiveBackSpec, PretrainSpec, PromoteSpec, StepSpec
from tasks.protocol.sweep import SweepSettings

READ = ("private_corpus", "public_corpus", "entities", "checkpoint")
ONE_IS_ENOUGH = TriggerRule.ALL_DONE_MIN_ONE_SUCCESS
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
        settings = settings_from(self.kind, params)
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
        budget, report = steps["budget"], steps["report"]
        if params.get(PLAN_ONLY):  # not even the digests of private files are computed
            steps["budget"] = budget.model_copy(update={"reads": budget.called_public})
        if not last:
            del steps["report"]
        return {
            **steps,
            "promote": PromoteSpec(made_up=settings.made_up, report_uri=report.output),
            "give_back": GiveBackSpec(made_up=settings.made_up),
        }

    def last_task(self, params: Mapping[str, Any]) -> str:
        """Return the task that ends a run which only plans, continues on a next page, or reports.

        Raises:
            AirflowFailException: as `page`.
        """
        _, _, last = self.page(params)
        return "budget" if params.get(PLAN_ONLY) else "report" if last else "start_page"

    def texts(self) -> list[NamedSteps]:
        """Check the settings and return the texts and checkpoints to read.

        A run that only plans reads none.
        """
        params = get_current_context()["params"]
        self.page(params)
        settings_to_start(self.kind, params)
        if params.get(PLAN_ONLY):
            return []
        steps, points = self.of_point(params, None), self.settings(params).points()
        compared = unique(point.front for point in points if point.checkpoint)
        return [
            *(_named([title(name)], [(name, None)]) for name in READ if name in steps),
            *(_named([point.name], [("checkpoint", point)]) for point in compared),
        ]

    def starts(self) -> list[NamedSteps]:
        """Return the steps to the models from which the trainings start.

        The job's trainings start from the model of public text or, if phrases are released, of the
        text written from them. A baseline with another vocabulary needs separate rows and a
        separate model of public text.
        """
        settings, points = self._page()
        front = self.of_point(get_current_context()["params"], None)
        shared = {spec.output for spec in front.values()}
        of_starts = dropwhile(lambda name: not isinstance(front[name], PretrainSpec), front)
        names = [name for name in of_starts if name not in POINT_STEPS]
        of_job = [(name, settings.starts.get(name)) for name in names]
        starts = [_named([point.name for _, point in of_job if point], of_job)]
        for point in unique(point.front for point in points if point.has_separate_front):
            steps = point_steps(settings, point)
            names = [name for name in steps if name not in (*READ, *POINT_STEPS)]
            separate = [(name, point) for name in names if steps[name].output not in shared]
            starts.append(_named([point.name], separate))
        return starts

    def trainings(self) -> list[NamedSteps]:
        """Return the trainings whose start exists, so that a failed start stops no other model."""
        settings, points = self._page()
        made, trainings = _outputs_of("start"), []
        for point in unique(point.training for point in points):
            steps = point_steps(settings, point)
            start = steps.get("phrases_pretraining", steps["public_pretraining"])
            if start.output in made and steps["pretraining"].output not in made:
                trainings.append(_named([point.name], [("pretraining", point)]))
        return trainings

    def measurements(self) -> list[NamedSteps]:
        """Return the measurements of the models that exist: of each model, then fine-tunings."""
        settings, points = self._page()
        made, measurements = _outputs_of("start", "pretraining"), []
        of_models = [(name, [p.model for p in points]) for name in POINT_STEPS[1:-1]]
        for name, measured in (*of_models, (POINT_STEPS[-1], points)):
            for point in unique(measured):
                steps = point_steps(settings, point)
                if name in steps and steps["pretraining"].output in made:
                    measurements.append(_named([title(name), point.name], [(name, point)]))
        return measurements

    def _page(self) -> tuple[JobSettings, list[Point]]:
        params = get_current_context()["params"]
        return self.settings(params), self.page(params)[0]


def _named(names: Iterable[str], steps: Iterable[tuple[str, Point | None]]) -> NamedSteps:
    listed = [(step, point.model_dump() if point else None) for step, point in steps]
    return NamedSteps(name=" · ".join(names), steps=listed)


def _outputs_of(*tasks: str) -> set[str]:
    """Return the outputs of the finished instances of mapped tasks."""
    answers = get_current_context()["ti"].xcom_pull(task_ids=list(tasks))
    return {output for answer in answers or () if answer for output in answer["outputs"]}


@dataclass(frozen=True)
class Experiment:
    """The tasks that the tasks of a single DAG follow.

    Attributes:
        measured: the last tasks before the report.
        report: the task that writes the report.
        last: the tasks that decide the state of the run.
        reporting: the group of the report's tasks.
    """

    measured: list[Any]
    report: BaseOperator
    last: list[Any]
    reporting: TaskGroup


def experiment(plan: RunPlan) -> Experiment:
    """Draw the graph from the check of the settings to the report."""
    shared, of_run = partial(step, plan=plan.of_point), partial(step, plan=plan.of_run)
    of_models = partial(each, plan=plan.of_point, pool=TRAINING)

    with group("Data"):
        # The data: confidential notes, public text, labelled text. A run that does not fit its
        # budget is refused before anything is read. The whole run is charged only after text and
        # labels have been read and checked.
        settings = listed("settings", plan.texts)
        budget = of_run("budget")
        texts = each("read", settings, plan=plan.of_point)
        reserve = of_run("reserve")
        settings >> budget >> texts >> reserve

    with group("Vocabulary"):
        # The vocabulary consists of public words, which are free, and of private words that public
        # text lacks, chosen by noised counts: the first release (ε_V). Alternatively, the tokens of
        # a public model are kept. Canaries are drawn after the vocabulary, so that they cannot
        # influence it, and are planted by unit.
        vocabulary = shared("vocabulary")
        canaries = shared("canaries")
        private_store = shared("private_store")
        public_store = shared("public_store")
        reserve >> vocabulary >> canaries >> private_store
        vocabulary >> public_store

    with group("Train"):
        # Pre-training begins with public text, and continues on text written from phrases that many
        # units share, which are optional and another release (ε_P). DP-SGD continues the training
        # on private rows; each training is a release (ε_T). Models trained without privacy are
        # compared with it. Points that share a training have one instance of it.
        start_list = listed("starts", plan.starts)
        starts = of_models("start", start_list)
        training_list = listed("trainings", plan.trainings, trigger_rule=ONE_IS_ENOUGH)
        trainings = of_models("pretraining", training_list)
        [private_store, public_store] >> start_list >> starts >> training_list >> trainings

    with group("Measure"):
        # Each model is measured by its usefulness (strict entity F1, or accuracy), its memorisation
        # (exposure) and, optionally, by membership inference against units that were held out, and
        # by guessing which canaries fair coins had put into the training. The models that a
        # training keeps after several epochs share its charge.
        measurement_list = listed("measurements", plan.measurements, trigger_rule=ONE_IS_ENOUGH)
        measurements = of_models("measurement", measurement_list)
        [starts, trainings] >> measurement_list >> measurements

    with group("Report") as reporting:
        report = of_run("report", trigger_rule=ONE_IS_ENOUGH)
        # A run that fails before its first release gives its planned budget back.
        give_back = of_run("give_back")
        measured = [trainings, measurements]
        measured >> report
        [trainings, report] >> give_back.as_teardown(setups=reserve)
    return Experiment(measured, report, [starts, *measured, report, give_back], reporting)


def group(name: str) -> TaskGroup:
    """Return a group of the graph, which is no part of the names of its tasks."""
    return TaskGroup(f"{name.lower()}_group", group_display_name=name, prefix_group_id=False)


def listed(name: str, steps: Callable[[], list[NamedSteps]], **options: Any) -> Any:
    """Draw the task that lists the instances of the next mapped task.

    Args:
        name: name of the task.
        steps: function of the run that lists the instances.
        options: options of the task.
    """

    @task(task_id=name, retries=0, **shown(name), **options)
    def list_steps() -> list[NamedSteps]:
        return steps()

    return list_steps()
