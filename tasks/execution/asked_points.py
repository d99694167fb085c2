"""Sweep points that Optuna proposes one after the other, from the F1 of earlier points.

Optuna's storage is next to the ledger. Each trial has a separate seed, so that its proposal is a
function of the settings and of the reported results: a stopped run continues, and a repeated run
finds its trainings. Only results that the guarantee protects are reported to Optuna, because its
next proposal would reveal something about private numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING

from dp_core.errors import BadInput
from tasks.protocol import job
from tasks.protocol.messages import StepResult
from tasks.protocol.points import Point
from tasks.protocol.specs import PretrainSpec, StepSpec
from tasks.protocol.sweep import SEARCHED, SweepSettings
from tasks.releases.deployment_ledger import IDENTITY
from tasks.results import read_result
from tasks.runtime.deployment import Deployment, sqlite_url

if TYPE_CHECKING:
    from optuna import Study

STORAGE = "optuna.db"  # in the deployment's home
OBJECTIVE = "f1"


def asked_steps(
    settings: SweepSettings, deployment: Deployment
) -> Iterator[tuple[str, str, StepSpec]]:
    """Yield (point, task, spec) of an Optuna sweep; the caller runs each step before the next.

    Points with the same private training share one release, charged for the first of them.
    """
    store = deployment.open_store()
    planned = job.job_steps(settings)
    steps = {
        name: spec
        for name, spec in planned.items()
        if name != "report" and not (isinstance(spec, PretrainSpec) and spec.asked)
    }
    for name, spec in steps.items():  # the step `budget` makes the store record its ledger
        yield *job.point_and_task(name), spec
    points: dict[Point, None] = {}
    trainings: dict[Point, PretrainSpec] = {}
    scores: dict[str, None] = {}  # fine-tunings whose F1 the optimiser knows
    study = _study(settings, deployment)
    for number in range(settings.sweep_trials):
        point = settings.asked_point(_answer(study, settings, number))
        if point.training not in trainings:
            trainings[point.training] = job.asked_training(
                settings, point, len(trainings), tuple(scores)
            )
        names = job.names_of(point)
        if point not in points:
            points[point] = None
            of_point = job.point_steps(settings, point, trainings[point.training], tuple(scores))
            steps |= {names[task]: of_point[task] for task in job.POINT_STEPS if task in of_point}
        for name in (names[task] for task in job.POINT_STEPS if names[task] in steps):
            yield *job.point_and_task(name), steps[name]
        finetuned = steps[names["finetuning"]].output
        value = tellable(read_result(store, finetuned), OBJECTIVE)
        if not study.trials[number].state.is_finished():
            study.tell(number, value)
        scores[finetuned] = None
    yield "", "report", job.report_of(settings, steps, list(points))


def most_steps(settings: SweepSettings) -> int:
    """Return the largest possible number of steps of an Optuna sweep."""
    of_point = job.point_steps(settings, settings.costliest)
    of_trials = len(of_point.keys() & set(job.POINT_STEPS)) * settings.sweep_trials
    return len(job.job_steps(settings)) - settings.most_trainings + of_trials


def tellable(result: StepResult | None, name: str) -> float:
    """Return a metric of a result that may be reported to an optimiser.

    Raises:
        BadInput: the metric is the operator's, or is missing.
    """
    for metric in reversed(result.metrics if result else []):
        if metric.name == name:
            if metric.label not in ("dp", "public"):
                raise BadInput(
                    f"{name} is the operator's, and the points that an optimiser suggests next "
                    "would reveal it",
                    where="sweep_search",
                    fix="Search by public labels, or choose grid.",
                )
            return metric.value
    raise BadInput(f"the point has no {name}", where="sweep_search")


def _study(settings: SweepSettings, deployment: Deployment) -> Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    deployment.prepare()
    ledger = deployment.open_store().read(IDENTITY) or b""  # another ledger has other results
    name = ledger + settings.search.encode()
    return optuna.create_study(
        storage=sqlite_url(deployment.home / STORAGE),
        study_name=sha256(name).hexdigest()[:16],
        direction="maximize",
        load_if_exists=True,
    )


def _answer(study: Study, settings: SweepSettings, number: int) -> Mapping[str, float]:
    """Return the values of a trial, asking Optuna if it has not been asked yet."""
    from optuna.samplers import TPESampler

    if number < len(study.trials) and len(study.trials[number].params) == len(settings.space()):
        return study.trials[number].params
    if number < len(study.trials):
        raise BadInput(
            "a question to Optuna was cut off",
            where=STORAGE,
            fix="Delete the file: what was asked before is asked again, and charged nothing.",
        )
    study.sampler = TPESampler(seed=settings.seed + number)
    trial = study.ask()
    for name, (low, high) in settings.space().items():
        if SEARCHED[name] == "whole":
            trial.suggest_int(name, int(low), int(high))
        else:
            trial.suggest_float(name, low, high, log=SEARCHED[name] == "logarithm")
    return trial.params
