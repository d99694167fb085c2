"""From a sweep's settings to the specs of its points' steps: a pure function, as `job`."""

from __future__ import annotations

from tasks.specs.base import StepSpec
from tasks.specs.job import budget_of, dp_bert_steps, exposure, finetuning, front_half, pretraining
from tasks.specs.settings import JobSettings
from tasks.specs.steps import BudgetSpec, PretrainSpec, SelectSpec, SweepReportSpec
from tasks.specs.sweep_settings import CHOSEN, SweepPoint, SweepSettings

OWN = ("dp_pretraining", "dp_finetuning", "dp_exposure")


def sweep_point_steps(settings: SweepSettings, point: SweepPoint, root: str) -> dict[str, StepSpec]:
    """Return the specs of one point of `dp_sweep`: shared front half, then its own back half."""
    return {"budget": sweep_budget(settings, root), **_point(settings, point, root)}


def sweep_budget(settings: SweepSettings, root: str) -> BudgetSpec:
    """Return the registration of a whole sweep: the vocabulary, and what each point releases."""
    steps = [_point(settings, point, root) for point in settings.points()]
    shared = [spec for task, spec in steps[0].items() if task not in OWN]
    return budget_of([*shared, *(point[task] for task in OWN[:2] for point in steps)])


def budget_of_run(settings: JobSettings, root: str) -> BudgetSpec:
    """Return the registration of a whole run, be it a job or a sweep."""
    if isinstance(settings, SweepSettings):
        return sweep_budget(settings, root)
    return budget_of(
        spec for name, spec in dp_bert_steps(settings, root).items() if name != "budget"
    )


def sweep_report(settings: SweepSettings, root: str) -> SweepReportSpec:
    """Return the spec of the sweep's last step."""
    steps = {p.name: _point(settings, p, root) for p in settings.points()}
    return SweepReportSpec(
        root=root,
        made_up=settings.made_up,
        title="dp_sweep",
        points={p.name: p.model_dump(mode="json") for p in settings.points()},
        results={
            name: {
                task: spec.output for task, spec in point.items() if task in (*OWN, "vocabulary")
            }
            for name, point in steps.items()
        },
        settings=settings.model_dump(mode="json"),
    )


def _point(settings: SweepSettings, point: SweepPoint, root: str) -> dict[str, StepSpec]:
    job = settings.job(settings.grid()[0] if point == CHOSEN else point)
    front = front_half(job, root)
    model: PretrainSpec | SelectSpec = pretraining(job, front, "dp")
    if point == CHOSEN:
        model = _selection(settings, job, front)
    return {
        **front,
        "dp_pretraining": model,
        "dp_finetuning": finetuning(job, front, model),
        "dp_exposure": exposure(job, front, model),
    }


def _selection(settings: SweepSettings, job: JobSettings, front: dict[str, StepSpec]) -> SelectSpec:
    jobs = [settings.job(point) for point in settings.grid()]
    candidates = tuple(pretraining(one, front, "dp") for one in jobs)
    return SelectSpec(
        root=candidates[0].root,
        made_up=job.made_up,
        candidates=candidates,
        law=settings.selection_law,
        mean=settings.selection_mean,
        delta=job.delta,
    )
