import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from release_examples import record
from spec_examples import spec_of
from step_bench import Bench, Chain, as_input, tuning

from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput, ConfideError, PlanError
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import Arrays
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, Unaccounted
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import NO_EVALUATION, EvaluationHook
from tasks.protocol.job import budget_of_run, job_steps, point_steps
from tasks.protocol.measurements import ExposureSpec
from tasks.protocol.messages import StepResult
from tasks.protocol.points import OF_JOB, Point
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import FinetuneSpec, PretrainSpec, ReportSpec, SelectSpec
from tasks.protocol.sweep import SweepSettings
from tasks.releases.charge import planned_release, plans_of
from tasks.releases.provenance import model_at, models_by_updates
from tasks.report.job_results import released_by
from tasks.results import STATEMENT_DATA, STATEMENT_WORDS, SUBJECT, Input
from tasks.steps import exposure_step as exposure
from tasks.steps import finetune_step as finetune
from tasks.steps import pretrain_step as pretrain
from tasks.steps.training_files import KeptModels
from tasks.storage.store import sha256_of


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def released(chain: Chain) -> tuple[Input, Bench]:
    context = chain.context("kept")
    spec = chain.training(updates=4, kept_updates=(1, 3))
    return as_input(pretrain.run(spec, context), context, "pretrain"), context


def differ(first: Arrays, second: Arrays) -> bool:
    return any((first[name] != second[name]).any() for name in first)


def test_models_of_several_epochs_have_one_ledger_entry_and_one_epsilon(chain, released):
    model, context = released
    digest = chain.training(updates=4, kept_updates=(1, 3)).digest()
    assert [e.spec_hash for e in chain.ledger.history("notes")].count(digest) == 1
    alone = chain.context("last alone")
    pretrain.run(chain.training(updates=4), alone)
    (epsilon,) = {n.value for n in context.numbers if n.name == "epsilon"}
    assert epsilon == {n.value for n in alone.numbers if n.name == "epsilon"}.pop()
    folders = models_by_updates(model)
    assert list(folders) == [1, 3, 4] and folders[4] == context.out
    statements = [json.loads((folder / STATEMENT_DATA).read_text()) for folder in folders.values()]
    assert statements[0] == statements[1] == statements[2]
    assert statements[0]["epsilon"] == pytest.approx(epsilon)
    assert statements[0]["released_after_updates"] == [1, 3, 4]
    for folder in folders.values():
        words = (folder / STATEMENT_WORDS).read_text()
        assert "3 models are released: after 1, 3 and 4 updates" in words
    assert "released_after_updates" not in json.loads((alone.out / STATEMENT_DATA).read_text())


def test_kept_models_equal_the_weights_of_the_training(chain, released, monkeypatch):
    model, context = released
    passed: dict[int, Arrays] = {}
    original = KeptModels.hook

    def inspected(self: KeptModels, inner: EvaluationHook) -> EvaluationHook:
        hook = original(self, inner)
        every = frozenset(range(1, 5))

        def evaluate(done: int, weights: Arrays) -> None:
            passed[done] = {name: np.array(value) for name, value in weights.items()}
            if done in hook.at:
                hook.evaluate(done, weights)

        return EvaluationHook(every, evaluate)

    monkeypatch.setattr(KeptModels, "hook", inspected)
    again = chain.context("kept")  # the same entry, seed and manifest
    for name in ("checkpoints", "models"):
        for place in context.durable.glob(f"{name}-*"):
            for file in place.iterdir():
                file.unlink()
    pretrain.run(chain.training(updates=4, kept_updates=(1, 3)), again)
    assert sorted(passed) == [1, 2, 3, 4]
    for updates, folder in models_by_updates(model).items():
        kept = load_model(folder).parameters
        assert not differ(kept, {n: passed[updates][n] for n in kept}), updates
        assert differ(kept, {n: passed[updates % 4 + 1][n] for n in kept}), updates


def test_changed_intermediate_model_under_the_same_noise_is_refused(chain, monkeypatch):
    spec = chain.training(updates=3, kept_updates=(1,))
    pretrain.run(spec, chain.context("bound"))
    original = KeptModels.weights

    def rounded(self: KeptModels) -> dict[int, Arrays]:
        return {
            u: {n: v * (1 + 1e-6) for n, v in values.items()}
            for u, values in original(self).items()
        }

    monkeypatch.setattr(KeptModels, "weights", rounded)
    with pytest.raises(BadInput, match="was released before"):
        pretrain.run(spec, chain.context("bound"))


def kept_in(folder: Path, *updates: int, run: str = "run") -> KeptModels:
    return KeptModels(updates, LocalFolder(folder), run)


def test_models_written_by_two_processes_are_refused(tmp_path):
    ours, theirs = kept_in(tmp_path, 1, 2), kept_in(tmp_path, 1, 2)
    for kept, rounded in ((ours, 0.0), (theirs, 1e-7)):
        hook = kept.hook(NO_EVALUATION)
        for update in (1, 2):
            hook.evaluate(update, {"w": np.full(2, update + rounded, np.float32)})
    assert list(theirs.weights()) == [1, 2]
    with pytest.raises(ConfideError, match="at the same time"):
        ours.weights()


def arrays(number: int) -> Arrays:
    return {"w": np.full((2, 3), number, np.float32)}


def test_resumed_training_finds_its_kept_models(tmp_path):
    seen: list[int] = []
    evaluation = EvaluationHook(frozenset({2, 5}), lambda done, _: seen.append(done))
    first = kept_in(tmp_path, 2, 4).hook(evaluation)
    assert first.at == {2, 4, 5}
    first.evaluate(2, arrays(2))
    second = kept_in(tmp_path, 2, 4)
    again = second.hook(evaluation)
    for done in (2, 4, 5):  # a resumed training repeats the update that it resumes from
        again.evaluate(done, arrays(done))
    assert seen == [2, 2, 5]
    assert {u: float(w["w"][0, 0]) for u, w in second.weights().items()} == {2: 2.0, 4: 4.0}
    assert kept_in(tmp_path).hook(evaluation).at == evaluation.at
    assert kept_in(tmp_path).weights() == {}


def test_missing_damaged_or_foreign_kept_model_is_refused(tmp_path):
    kept = kept_in(tmp_path, 2, 4)
    hook = kept.hook(NO_EVALUATION)
    hook.evaluate(2, arrays(2))
    with pytest.raises(ConfideError, match="the model after 4 updates is not there"):
        kept.weights()
    hook.evaluate(4, arrays(4))
    with pytest.raises(BadInput, match="belongs to another run"):
        kept_in(tmp_path, 2, 4, run="another").weights()
    (file,) = tmp_path.glob("update-0000000002*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfideError, match="the model after 2 updates is not there, or damaged"):
        kept.weights()


@pytest.mark.parametrize("kept", [(2, 1), (1, 1), (0, 1), (2,), (3,)])
def test_kept_updates_must_increase_and_precede_the_last(chain, kept):
    with pytest.raises(ValueError, match="kept_updates: they must rise, and lie below updates"):
        chain.training(updates=2, kept_updates=kept)


def test_kept_epochs_become_updates_and_measurements_of_each_training():
    settings = JobSettings(
        kept_epochs="1,2.5", epochs=4, declared_units=1000, batch_size=64,
        nonprivate_batch_size=100, membership_units=10, audit_canaries=100, phrases_epsilon=1.0,
    )  # fmt: skip
    steps = job_steps(settings)
    kept = {n: s.kept_updates for n, s in steps.items() if isinstance(s, PretrainSpec)}
    assert kept == {
        "Public text only / pretraining": (),
        "Released phrases only / pretraining": (),
        "With DP / pretraining": (18, 43),  # 1100 units, including the audit canaries
        "Without privacy / pretraining": (10, 25),
    }
    trained = {model: steps[f"{model} / pretraining"].output for model in OF_JOB.values()}
    for task in ("membership", "exposure", "finetuning", "audit"):
        assert vars(steps[f"With DP / {task}"])["model_uri"] == trained["With DP"]
    without = job_steps(settings.model_copy(update={"kept_epochs": ""}))
    for model in ("With DP", "Without privacy"):  # the outputs hold other models
        assert trained[model] != without[f"{model} / pretraining"].output
    # Each earlier model has the same measurements as the last, under separate names.
    measured = {
        name: (spec.model_uri, spec.model_updates)
        for name, spec in steps.items()
        if isinstance(spec, ExposureSpec | FinetuneSpec) and spec.model_updates
    }
    assert measured == {
        f"{model} · epochs={epochs} of 4 / {task}": (trained[model], updates)
        for model, every in (
            ("With DP", {"1": 18, "2.5": 43}),
            ("Without privacy", {"1": 10, "2.5": 25}),
        )
        for epochs, updates in every.items()
        for task in ("finetuning", "exposure")
    }
    outputs = {spec.output for spec in steps.values() if isinstance(spec, FinetuneSpec)}
    assert len(outputs) == 4 + 4  # one fine-tuning per model
    assert steps["budget"].model_dump()["charged"] == tuple(
        steps[name].model_dump() for name in ("vocabulary", "phrases", "With DP / pretraining")
    )
    causal = job_steps(settings.model_copy(update={"model_kind": "gpt2"}))
    tasks = [name for name in causal if " of 4 / " in name]
    assert len(tasks) == 4 and all(name.endswith("exposure") for name in tasks)


def test_training_without_privacy_may_have_its_epochs_and_clipping():
    settings = JobSettings(
        kept_epochs="1", epochs=4, declared_units=1000, batch_size=64, nonprivate_batch_size=100,
        nonprivate_epochs=2, nonprivate_clip_norm=0.5, nonprivate_noise_multiplier=1e-20,
    )  # fmt: skip
    steps = job_steps(settings)
    training = {model: steps[f"{model} / pretraining"] for model in ("With DP", "Without privacy")}
    dp, without = training.values()
    assert (dp.updates, dp.kept_updates, dp.clipped) == (63, (16,), None)
    assert (without.updates, without.kept_updates, without.plan) == (20, (), None)
    assert vars(without.clipped) == {"clip_norm": 0.5, "noise_multiplier": 1e-20}
    assert not any(name.startswith("Without privacy · epochs") for name in steps)
    sweep = SweepSettings(
        sweep_baselines="nonprivate", sweep_epochs="1,3", nonprivate_epochs=2.0,
        nonprivate_batch_size=100, declared_units=1000, sweep_batch_sizes="60",
    )  # fmt: skip
    (point,) = (p for p in sweep.points() if p.baseline)  # of all points of the grid
    assert point.name == "without privacy · epochs=2"
    assert point_steps(sweep, point)["pretraining"].updates == 20
    with pytest.raises(ValidationError, match="nonprivate_noise_multiplier: set nonprivate_clip"):
        JobSettings(nonprivate_noise_multiplier=0.1)


def test_each_private_fine_tuning_of_an_earlier_model_is_charged():
    settings_of_job: dict[str, Any] = {
        "private_format": "text", "private_path": "/a", "private_dataset": "notes",
        "entities_format": "columns", "entities_train": "/l", "entities_test": "/t",
        "entities_dataset": "labels", "finetune_privacy": "dp", "entity_types": "problem",
        "entities_unit": "document", "entities_declared_units": 1000, "nonprivate": False,
    }  # fmt: skip
    for epochs, finetunings in (("", 1), ("1,2,3", 4)):
        run = budget_of_run(JobSettings(**settings_of_job, kept_epochs=epochs))
        steps = [spec.step for spec in run.charged]
        assert (steps.count("finetune"), steps.count("pretrain")) == (finetunings, 1)
    delta = {"finetune_delta": 4e-4}  # twice this δ is below one in 1000, four times is not
    twice = JobSettings(**settings_of_job, **delta, kept_epochs="1")
    plans_of(budget_of_run(twice).charged, {})
    four_times = JobSettings(**settings_of_job, **delta, kept_epochs="1,2,3")
    with pytest.raises(PlanError, match="δ under the budget of labels"):
        plans_of(budget_of_run(four_times).charged, {})


def test_total_of_a_job_includes_fine_tunings_of_earlier_models():
    event = PoissonGaussian.single(0.1, 2.0, 5, unit=PrivacyUnit.PATIENT)
    training, last, earlier = (record(name, event) for name in ("training", "last", "earlier"))
    unaccounted = record("own", Unaccounted("labels as they are", unit=PrivacyUnit.PATIENT))

    def output(step: str, *releases: ReleaseRecord) -> Input:
        fields: dict[str, Any] = {"outputs": {}, "metrics": [], "facts": {}, "spec_hash": ""}
        return Input(StepResult(step=step, releases=[training, *releases], **fields), Path())

    kept = [Point(epochs=epochs, of_epochs=(1, 4)) for epochs in (4, 1)]
    tuned = dict(zip(kept, (last, earlier), strict=True))
    tuned[kept[1].model_copy(update={"baseline": "nonprivate-training"})] = unaccounted
    points = {
        point.name: {"pretraining": output("pretrain"), "finetuning": output("finetune", release)}
        for point, release in tuned.items()
    }
    named = {point.name: point for point in tuned}
    spec = ReportSpec(made_up=False, title="dp_bert", results={}, settings={}, points=named)
    assert released_by(spec, points) == [training, last, earlier]


def test_fine_tuning_and_exposure_read_the_model_of_the_requested_epoch(
    chain, released, monkeypatch
):
    model, _ = released
    tuned: dict[str, Arrays] = {}
    ranked: list[Path] = []

    def recorded(folder: Path) -> Any:
        ranked.append(folder)
        return load_model(folder)

    monkeypatch.setattr(exposure, "load_model", recorded)
    for updates in (1, 3, 0):
        context, spec = tuning(chain, model, f"tuned after {updates}", model_updates=updates)
        opened = model_at(context, "model", field="model_uri", updates=updates)
        assert opened.folder == models_by_updates(model)[updates or 4]
        weights = sha256_of(opened.folder / "model.safetensors")
        answer = finetune.run(spec, context)
        assert answer.facts["began_with"] == opened.facts["weights_digest"] == weights
        assert answer.facts["released_after"] == [1, 3, 4]
        statement, of_start = (
            json.loads((folder / STATEMENT_DATA).read_text())
            for folder in (context.out, model.folder)
        )
        assert statement["released_after_updates"] == [1, 3, 4]
        assert statement["epsilon"] == of_start["epsilon"]
        tuned[weights] = load_model(context.out).parameters
        audited = chain.context(f"exposure after {updates}", model=model)
        inputs = {"model_uri": "model", "canaries_uri": "canaries", "private_store_uri": "rows"}
        exposure_spec = spec_of(ExposureSpec, **inputs, model_updates=updates)
        measured = exposure.run(exposure_spec, audited)
        assert measured.facts[SUBJECT] == weights
        (epsilon,) = (n.value for n in audited.numbers if n.name == "epsilon")
        assert epsilon == pytest.approx(statement["epsilon"])
        assert ranked.pop() == opened.folder and not ranked
    assert len(tuned) == 3
    first, second, third = tuned.values()
    assert differ(first, second) and differ(second, third)
    context = chain.context("no such model", model=model)
    with pytest.raises(BadInput, match=r"no model was kept after 2 updates.*those after 1, 3, 4"):
        model_at(context, "model", field="model_uri", updates=2)


def test_kept_models_need_a_mechanism_that_covers_every_iterate(chain, monkeypatch):
    spec = chain.training(updates=4, kept_updates=(2,))
    planned_release(spec)
    monkeypatch.setattr(PoissonGaussian, "every_iterate", False)
    before = chain.ledger.history("notes")
    with pytest.raises(BadInput, match="covers the last model alone"):
        pretrain.run(spec, chain.context("hidden"))
    with pytest.raises(BadInput, match="kept_updates"):
        planned_release(spec)
    planned_release(chain.training(updates=4))
    assert chain.ledger.history("notes") == before


@pytest.mark.parametrize("epochs", ["2,1", "0,1", "4", "1,5", "1,1", "1,1.001"])
def test_kept_epochs_must_increase_below_the_last_epoch(epochs):
    with pytest.raises(ValueError, match=r"kept_epochs: .* must rise, above 0 and below epochs"):
        JobSettings(kept_epochs=epochs, epochs=4)


def test_selection_and_search_refuse_kept_models(chain):
    kept: dict[str, Any] = {"updates": 3, "kept_updates": (1,)}
    fields = {"made_up": False, "selection": {}}
    with pytest.raises(ValueError, match="a selection releases its best model alone"):
        SelectSpec(candidates=(chain.training(**kept),), **fields)
    asked = {"search": "s", "number": 0, "least_noise_multiplier": 4.0, "most_updates": 9}
    with pytest.raises(ValueError, match="the last model alone is released"):
        chain.training(asked=asked, **kept)
