from typing import Any

import pytest
from release_examples import bench_of
from test_plans import LABELS, PRIVATE

from dp_core.errors import PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.statement import total_epsilon
from tasks.protocol.job import budget_of_run, job_steps, point_and_task, point_steps
from tasks.protocol.points import Point, unique
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import FinetuneSpec, PretrainSpec, StepSpec
from tasks.protocol.sweep import SweepSettings
from tasks.releases.charge import planned_release, plans_of, register_plans
from tasks.runtime.deployment import Deployment
from tasks.steps import budget_step as budget

# The vocabulary is public, so only trainings are charged.
PUBLIC_LABELS: dict[str, Any] = PRIVATE | {
    "vocabulary_source": "public", "sweep_noise_multipliers": "2", "sweep_batch_sizes": "60",
    "sweep_epochs": "1", "entities_format": "synthetic",
}  # fmt: skip
PRIVATE_LABELS: dict[str, Any] = PUBLIC_LABELS | LABELS | {
    "entities_train": __file__, "entities_test": "", "entities_folds": 5,
    "entities_unit": "document", "entities_dataset": "labels",
    "finetune_batch_size": 40, "finetune_delta": 1e-6,
}  # fmt: skip


def trainings_of(sweep: SweepSettings) -> list[Point]:
    """Return the private trainings; each is one release even if several points share it."""
    return unique(point.training for point in sweep.points() if point.mode == "dp")


# 6000 declared patients, batches of 60, one epoch: 100 updates at a rate of 1/100.
EVENT = PoissonGaussian.single(0.01, 2.0, 100, unit=PrivacyUnit.PATIENT)


def specs(kind: type[StepSpec], **settings: Any) -> list[Any]:
    every = job_steps(SweepSettings.model_validate(settings))
    task = {PretrainSpec: "pretraining", FinetuneSpec: "finetuning"}[kind]
    named = [spec for name, spec in every.items() if point_and_task(name)[1] == task]
    return [spec for spec in named if kind is FinetuneSpec or spec.charges]


def planned(deployment: Deployment, run: str = "run", **settings: Any) -> dict[str, float]:
    """Register a sweep; return the costs that its first step measures."""
    context = bench_of(deployment, run=run)
    spec = budget_of_run(SweepSettings.model_validate(settings))
    budget.run(spec, context)
    register_plans(context, spec.charged)
    return {name: label.value for name, label in context.measured.items()}  # type: ignore[attr-defined]


def points_by_output(settings: SweepSettings) -> dict[tuple[str, str], str]:
    steps = job_steps(settings)
    named = {(point_and_task(name), spec.output) for name, spec in steps.items()}
    return {(task, output): point for (point, task), output in named}


def test_fine_tuning_on_public_labels_costs_nothing(ledger, deployment):
    free = {
        "entities_folds": 5, "sweep_finetune_seeds": 3, "sweep_finetune_epochs": "1,2",
        "sweep_finetune_learning_rates": "1e-4,1e-3", "sweep_finetune_batch_sizes": "16,32",
    }  # fmt: skip
    settings = PUBLIC_LABELS | free
    assert len(specs(FinetuneSpec, **settings)) == 5 * 3 * 2 * 2 * 2
    (training,) = specs(PretrainSpec, **settings)
    cost = planned(deployment, **settings)
    assert cost == {
        "planned_epsilon/notes": pytest.approx(epsilon_pld(EVENT, 1e-6)),
        "planned_delta/notes": 1e-6,
    }
    assert [entry.event for entry in ledger.history("notes")] == [EVENT]
    # A job with the same settings is the same release.
    grid = SweepSettings.model_validate(settings)
    job = job_steps(grid.job(grid.points()[0]))["With DP / pretraining"]
    assert job.output == training.output


def test_every_point_of_a_sweep_is_charged(ledger, deployment):
    grid = {"sweep_noise_multipliers": "2,4", "sweep_epochs": "1,2"}
    planned(deployment, **PUBLIC_LABELS | grid)
    assert len(ledger.history("notes")) == 4


def test_causal_sweep_costs_as_much_as_the_trainings_of_a_job(ledger, deployment):
    """Two seeds of a training cost as much as two trainings, and baselines cost nothing."""
    causal = PUBLIC_LABELS | {"model_kind": "gpt2", "sweep_noise_multipliers": "2,4"}
    settings = SweepSettings.model_validate(
        causal | {"sweep_baselines": "public-training,nonprivate,nonprivate-training"}
    )
    points = settings.points()
    steps = [point_steps(settings, point) for point in points]
    assert not [
        task for point_steps in steps for task in point_steps if task in ("entities", "finetuning")
    ]
    jobs = [job_steps(settings.job(point)) for point in points[:2]]
    for of_point, job in zip(steps, jobs, strict=False):
        assert of_point["pretraining"] == job["With DP / pretraining"]
        assert of_point["exposure"] == job["With DP / exposure"]
    of_sweep = planned(deployment, **settings.model_dump())
    assert [entry.event for entry in ledger.history("notes")] == [
        EVENT, PoissonGaussian.single(0.01, 4.0, 100, unit=PrivacyUnit.PATIENT)
    ]  # fmt: skip
    charged = ledger.history("notes")
    together = settings.job(points[0]).model_dump() | {"more_trainings": "noise_multiplier=4"}
    of_job = bench_of(deployment)
    job = budget_of_run(JobSettings.model_validate(together))
    budget.run(job, of_job)
    register_plans(of_job, job.charged)
    assert of_sweep == {
        name: label.value
        for name, label in of_job.measured.items()  # type: ignore[attr-defined]
    }
    assert ledger.history("notes") == charged  # the same entries
    assert not any("entities" in source.field for source in budget_of_run(settings).reads)


def test_each_seed_of_the_private_training_is_charged(ledger, deployment):
    """Seeds that an earlier run has charged are not charged again."""
    planned(deployment, "an earlier run", **PUBLIC_LABELS)
    assert len(ledger.history("notes")) == 1
    settings = PUBLIC_LABELS | {"sweep_seeds": 3, "entities_folds": 2}
    trainings = specs(PretrainSpec, **settings)
    assert [spec.seed for spec in trainings] == [1, 2, 3]
    assert len({spec.init_uri for spec in trainings}) == 1  # the public training is run once
    cost = planned(deployment, **settings)
    three = total_epsilon([EVENT.stating(PrivacyUnit.PATIENT)] * 3, 3e-6)
    assert cost["planned_epsilon/notes"] == pytest.approx(three)
    assert cost["planned_delta/notes"] == pytest.approx(3e-6)
    assert cost["planned_epsilon/notes"] > 1.5 * epsilon_pld(EVENT, 1e-6)
    assert len(ledger.history("notes")) == 3


def test_each_private_fine_tuning_is_charged_and_their_training_once(ledger, deployment):
    settings = PRIVATE_LABELS | {
        "sweep_finetune_noise_multipliers": "2,4", "sweep_finetune_seeds": 2,
    }  # fmt: skip
    cost = planned(deployment, **settings)
    assert len(ledger.history("notes")) == 1
    assert len(ledger.history("labels")) == 2 * 2 * 5  # σ, seeds, folds
    # 400 declared documents, batches of 40, 3 epochs: 30 updates at a rate of 1/10.
    events = [
        PoissonGaussian.single(0.1, sigma, 30, unit=PrivacyUnit.DOCUMENT) for sigma in (2.0, 4.0)
    ]
    expected = total_epsilon(
        [event.stating(PrivacyUnit.DOCUMENT) for event in events for _ in range(10)], 20e-6
    )
    assert cost["planned_epsilon/labels"] == pytest.approx(expected)
    assert cost["planned_delta/labels"] == pytest.approx(20e-6)
    assert cost["planned_epsilon/notes"] == pytest.approx(epsilon_pld(EVENT, 1e-6))


def test_total_delta_counts_shared_trainings_once():
    """The total δ must stay below 1/6000 = 1.67e-4 and below 1/400 = 2.5e-3."""
    near = PUBLIC_LABELS | {"delta": 1.5e-4, "entities_folds": 10}
    tuned = PRIVATE_LABELS | {"finetune_delta": 4e-4}  # five folds: 2e-3
    for fits, twice in ((near, "sweep_seeds"), (tuned, "sweep_finetune_seeds")):
        plans_of(budget_of_run(SweepSettings.model_validate(fits)).charged, {})
        with pytest.raises(PlanError, match="publishing one unit whole"):
            plans_of(budget_of_run(SweepSettings.model_validate(fits | {twice: 2})).charged, {})


def test_noise_scaled_with_the_root_of_the_batch_keeps_epsilon_similar():
    settings = PUBLIC_LABELS | {"sweep_batch_sizes": "60,240", "sweep_noise_scaling": "sqrt-batch"}
    small, large = specs(PretrainSpec, **settings)
    assert (small.plan.noise_multiplier, large.plan.noise_multiplier) == (2.0, 4.0)
    epsilons = [epsilon_pld(planned_release(spec).event, 1e-6) for spec in (small, large)]
    assert epsilons[0] == pytest.approx(epsilon_pld(EVENT, 1e-6))
    assert epsilons[1] == pytest.approx(epsilons[0], rel=0.1)
    listed = "noise_multiplier=3; batch_size=60; noise_multiplier=3,batch_size=60"
    grid = SweepSettings(**settings, batch_size=15, sweep_points=listed).grid()
    scaled = [(point.noise_multiplier, point.batch_size) for point in grid]
    assert scaled == [(3.0, 15), (1.4, 60), (6.0, 60)]


def test_listed_points_inherit_settings_of_the_job():
    settings = SweepSettings.model_validate(
        PUBLIC_LABELS
        | {"sweep_points": "batch_size=64; epochs=1, finetune_epochs=7", "sweep_epochs": "99"}
    )
    first, second = (settings.job(point) for point in settings.points())
    assert (first.batch_size, first.epochs, first.noise_multiplier) == (64, 2.0, 0.7)
    assert (second.batch_size, second.epochs, second.finetune_epochs) == (
        settings.batch_size,
        1.0,
        7,
    )
    assert [point.name for point in trainings_of(settings)] == [
        "σ=0.7 · B=64 · epochs=2",
        f"σ=0.7 · B={settings.batch_size} · epochs=1",
    ]


def test_every_point_is_fine_tuned_from_its_training_on_its_fold():
    settings = SweepSettings.model_validate(
        PUBLIC_LABELS | {"sweep_seeds": 2, "sweep_finetune_seeds": 2, "entities_folds": 3}
    )
    tunings = specs(FinetuneSpec, **settings.model_dump())
    trainings = specs(PretrainSpec, **settings.model_dump())
    inputs = [(spec.model_uri, spec.seed, spec.folds, spec.fold) for spec in tunings]
    assert inputs == [
        (training.output, seed, 3, fold)
        for training in trainings
        for seed in (1, 2)
        for fold in range(3)
    ]
    report = job_steps(settings)["report"]
    tuned = [uri for name, uri in report.results.items() if name.endswith(" / finetuning")]
    assert tuned == [t.output for t in tunings]


WITH_BASELINES: dict[str, Any] = PRIVATE_LABELS | {
    "vocabulary_source": "private", "vocabulary_delta": 1e-7, "phrases_epsilon": 1.0,
    "sweep_baselines": "nonprivate-training,public,nonprivate,public-training",
    "sweep_checkpoints": "/a/bert,/b/biobert", "sweep_seeds": 2,
    "sweep_points": "epochs=1;epochs=2;epochs=1,finetune_noise_multiplier=4",
}  # fmt: skip


def test_baselines_cost_nothing_and_their_sources_are_in_the_budget_spec(ledger, deployment):
    """Baselines have neither private fine-tuning nor phrases."""
    alone = WITH_BASELINES | {"sweep_baselines": "", "sweep_checkpoints": ""}
    before = planned(deployment, **alone)
    entries = len(ledger.history("notes")) + len(ledger.history("labels"))
    budget = budget_of_run(SweepSettings.model_validate(WITH_BASELINES))
    assert budget.charged == budget_of_run(SweepSettings.model_validate(alone)).charged
    read = [(source.field, source.uri) for source in budget.called_public]
    assert read == [("public_model", "/a/bert"), ("public_model", "/b/biobert")]
    # the ledger would look up the files of checkpoints
    without = WITH_BASELINES | {"sweep_checkpoints": ""}
    assert planned(deployment, "another run", **without) == before
    assert len(ledger.history("notes")) + len(ledger.history("labels")) == entries


# For each baseline: the source of its vocabulary, its last mode, its updates, its trainings.
EXPECTED = {
    "public text only": ("public", "public", 900, 1),
    "public training": ("private", "public", 900, 1),
    "without privacy": ("nonprivate", "nonprivate", 94, 2 * 2),
    "training without privacy": ("private", "nonprivate", 94, 2 * 2),
    "checkpoint bert": ("checkpoint", "public", 0, 1),
    "checkpoint biobert": ("checkpoint", "public", 0, 1),
}


def test_each_baseline_has_its_steps_on_the_same_folds_and_seeds():
    sweep = SweepSettings.model_validate(WITH_BASELINES | {"sweep_finetune_seeds": 3})
    points = [point for point in sweep.points() if point.baseline]
    assert [(p.finetune_seed, p.fold) for p in points[:15]] == [
        (seed, fold) for seed in (1, 2, 3) for fold in range(5)
    ]
    assert not any(point.finetune_noise_multiplier for point in points)
    assert len(trainings_of(sweep)) == 2 * 2
    made: dict[str, tuple[str, str, int]] = {}
    trainings: dict[str, set[str]] = {}
    for point in points:
        steps = point_steps(sweep, point)
        name = point.name.partition(" · ")[0]
        vocabulary, model, tuned = (steps[n] for n in ("vocabulary", "pretraining", "finetuning"))
        assert (model.plan, tuned.plan) == (None, None)
        assert (tuned.seed, tuned.fold) == (point.finetune_seed, point.fold)
        assert tuned.model_uri == steps["exposure"].model_dump()["model_uri"] == model.output
        assert model.vocabulary_uri == vocabulary.output
        trainings.setdefault(name, set()).add(model.output)
        if point.epochs < 2:
            made[name] = vocabulary.config.vocabulary_source, model.mode, model.updates
    assert made == {name: expected[:3] for name, expected in EXPECTED.items()}
    assert {name: len(steps_of_point) for name, steps_of_point in trainings.items()} == {
        name: count for name, (*_, count) in EXPECTED.items()
    }
    # In MLflow, the initial model of private trainings is named by its baseline.
    named = points_by_output(sweep)
    start = point_steps(sweep, sweep.points()[0])["public_pretraining"].output
    assert named["pretraining", start] == "public training"
    assert {named["vocabulary", spec] for task, spec in named if task == "vocabulary"} == {
        "", "public text only", "without privacy", "checkpoint bert", "checkpoint biobert"
    }  # fmt: skip
    # The comparisons of a job are the same steps.
    assert points[0].name.startswith("public text only")
    steps_of_point, job = point_steps(sweep, points[0]), job_steps(sweep.job(points[0]))
    for task in ("pretraining", "exposure", "finetuning"):
        assert steps_of_point[task].output == job[f"Public text only / {task}"].output


def test_epochs_from_checkpoints_are_one_release(ledger, deployment):
    """Points that differ only in epochs share a training; another σ needs a separate training."""
    changed = PUBLIC_LABELS | {
        "sweep_points": "epochs=1;epochs=4;epochs=2,finetune_epochs=7;"
        "noise_multiplier=3,epochs=2",
        "sweep_baselines": "nonprivate-training", "entities_folds": 2, "entities_test": "",
        "noise_multiplier": 2, "batch_size": 60,
    }  # fmt: skip
    settings = SweepSettings.model_validate(changed | {"sweep_epochs_from": "checkpoints"})
    points = [point for point in settings.points() if not point.fold]
    names = [f"{point.name} " for point in points]
    assert [name.partition(" · fold=")[0] for name in names] == [
        "σ=2 · B=60 · epochs=1 of 4", "σ=2 · B=60 · epochs=4",
        "σ=2 · B=60 · epochs=2 of 4 · tuning epochs=7", "σ=3 · B=60 · epochs=2",
        "training without privacy · epochs=1 of 4", "training without privacy · epochs=4",
        "training without privacy · epochs=2 of 4 · tuning epochs=7",
        "training without privacy · epochs=2",
    ]  # fmt: skip
    specs_of = {p: point_steps(settings, p) for p in points}
    first, last, tuned, other = (specs_of[point] for point in points[:4])
    training = first["pretraining"]
    assert (training.updates, training.kept_updates) == (400, (100, 200))
    assert training == last["pretraining"] == tuned["pretraining"] != other["pretraining"]
    for steps, updates in ((first, 100), (last, 0), (tuned, 200), (other, 0)):
        for task in ("finetuning", "exposure"):
            fields = steps[task].model_dump()
            assert fields["model_uri"] == steps["pretraining"].output
            assert fields["model_updates"] == updates
    red = specs_of[points[4]]
    assert red["finetuning"].model_dump()["model_updates"] == settings.job(points[4]).updates_after(
        "nonprivate", 1
    )
    assert red["pretraining"] == specs_of[points[5]]["pretraining"]
    # One entry for all three points, with the mechanism of the longest training.
    planned(deployment, **settings.model_dump())
    longest, shorter = (
        PoissonGaussian.single(0.01, sigma, updates, unit=PrivacyUnit.PATIENT)
        for sigma, updates in ((2.0, 400), (3.0, 200))
    )
    assert {entry.event for entry in ledger.history("notes")} == {longest, shorter}
    assert len(ledger.history("notes")) == len(trainings_of(settings)) == 2
    assert len({p.model for p in settings.points() if p.mode == "dp"}) == 4
    named = points_by_output(settings)
    assert named["pretraining", training.output] == "σ=2 · B=60 · epochs=4"
    assert named["exposure", first["exposure"].output] == "σ=2 · B=60 · epochs=1 of 4"
    # Without checkpoints, each number of epochs is a separate training.
    apart = SweepSettings.model_validate(changed)
    assert len(trainings_of(apart)) == 4
    assert all(not point.is_on_the_way for point in apart.points())


def test_large_sweep_is_split_into_pages_and_reported_completely(monkeypatch):
    """Airflow maps a bounded number of points at a time, but all are charged and reported."""
    monkeypatch.setattr("tasks.protocol.settings.PAGE", 10)
    grid = ",".join(f"{2 + i / 1000:g}" for i in range(7))
    settings = SweepSettings.model_validate(
        PUBLIC_LABELS
        | {"sweep_noise_multipliers": grid, "sweep_finetune_epochs": "1,2,3", "delta": 1e-8}
    )
    pages = settings.pages()
    assert [len(page) for page in pages] == [10, 10, 1]
    on_pages = [point for page in pages for point in page]
    assert on_pages == settings.points()
    assert len(set(on_pages)) == len(on_pages)
    trainings = {point.training for point in on_pages}
    assert trainings == set(trainings_of(settings)) and len(trainings) == 7
    assert list(job_steps(settings)["report"].points) == [point.name for point in on_pages]
    assert len(budget_of_run(settings).charged) == 7
