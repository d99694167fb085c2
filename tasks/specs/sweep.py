"""From a sweep's settings to the specs of its points' steps: a pure function, as `job`."""

from __future__ import annotations

from tasks.specs.base import StepSpec
from tasks.specs.job import budget_of, exposure, finetuning, front_half, pretraining
from tasks.specs.steps import BudgetSpec, SweepReportSpec
from tasks.specs.sweep_settings import SweepPoint, SweepSettings


def sweep_point_steps(settings: SweepSettings, point: SweepPoint, root: str) -> dict[str, StepSpec]:
    """Return the specs of one point of `dp_sweep`: shared front half, then its own back half."""
    job = settings.job(point)
    front = front_half(job, root)
    model = pretraining(job, front, "dp")
    return {
        "budget": sweep_budget(settings, root),
        **front,
        "dp_pretraining": model,
        "dp_finetuning": finetuning(job, front, model),
        "dp_exposure": exposure(job, front, model),
    }


def sweep_budget(settings: SweepSettings, root: str) -> BudgetSpec:
    """Return the registration of a whole sweep: the vocabulary, and one training a point."""
    jobs = [settings.job(point) for point in settings.points()]
    fronts = [(job, front_half(job, root)) for job in jobs]
    trainings = [(job, front, pretraining(job, front, "dp")) for job, front in fronts]
    tunings = [finetuning(job, front, model) for job, front, model in trainings]
    return budget_of([fronts[0][1]["vocabulary"], *(model for *_, model in trainings), *tunings])


def sweep_report(settings: SweepSettings, root: str) -> SweepReportSpec:
    """Return the spec of the sweep's last step."""
    own = ("dp_pretraining", "dp_finetuning", "dp_exposure")
    steps = {p.name: sweep_point_steps(settings, p, root) for p in settings.points()}
    return SweepReportSpec(
        root=root,
        made_up=settings.made_up,
        title="dp_sweep",
        points={p.name: p.model_dump(mode="json") for p in settings.points()},
        results={
            name: {
                task: spec.output for task, spec in point.items() if task in (*own, "vocabulary")
            }
            for name, point in steps.items()
        },
        settings=settings.model_dump(mode="json"),
    )
