"""The charges of a run follow from its settings, and are registered completely or not at all."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from release_examples import bench_of, record

from dp_core.config.privacy import refuse_large_delta
from dp_core.config.release import ReleaseRecord
from dp_core.errors import BudgetExceeded, PlanError
from dp_core.privacy import mechanisms
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.calibration import least_error
from dp_core.privacy.batch_selection import PoissonSampling
from dp_core.privacy.execution_plan import BatchPhase, ExecutionPlan
from dp_core.privacy.ledger import Entry, Ledger, State
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.statement import privacy_statement
from dp_core.vocabulary.selection_calibration import calibrate
from tasks.protocol.job import budget_of_run, job_steps
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import PretrainSpec, VocabularySpec
from tasks.protocol.sweep import SweepSettings
from tasks.releases import charge
from tasks.releases.provenance import PrivateUnits
from tasks.report import job_results as reporting
from tasks.runtime.deployment import Deployment
from tasks.steps import budget_step as budget

PRIVATE = {
    "private_format": "text", "private_path": __file__, "private_dataset": "notes",
    "words_per_unit": 16, "epochs": 2, "noise_multiplier": 0.7,
}  # fmt: skip
FILES = {"entities_format": "i2b2", "entities_train": "/a", "entities_test": "/b"}


def steps_of(**settings: Any) -> dict[str, Any]:
    return dict(job_steps(JobSettings.model_validate(PRIVATE | settings)))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, mechanisms.PoissonGaussian),
        ({"sampling": "truncated-poisson", "batch_cap": 300}, mechanisms.TruncatedPoissonGaussian),
    ],
)
def test_job_charges_the_event_of_its_sampling_and_composes_the_total(settings, kind):
    steps = steps_of(**settings)
    vocabulary, training = steps["vocabulary"], steps["With DP / pretraining"]
    charged = [charge.planned_release(spec) for spec in (vocabulary, training)]
    assert isinstance(charged[1].event, kind)
    assert {release.event.relation for release in charged} == {
        mechanisms.NeighboringRelation.ADD_REMOVE
    }
    records = [
        record(str(i), r.event, r.dataset, epsilon=epsilon_pld(r.event, r.delta), delta=r.delta)
        for i, r in enumerate(charged)
    ]
    (composed,) = reporting.totals(records)
    total, delta = composed.epsilon, composed.delta
    assert total is not None and math.isfinite(total)
    assert max(r.epsilon for r in records) < total <= sum(r.epsilon for r in records) * 1.001
    assert delta == pytest.approx(sum(r.delta for r in records))


def test_noise_bands_determine_sampling_noise_and_charge():
    plans = {
        bands: charge.training_plan(steps_of(noise_bands=bands, epochs=20)["With DP / pretraining"])
        for bands in (0, 1, 4)
    }
    alone, four, chosen = plans[1], plans[4], plans[0]
    assert alone.strategy.bands == alone.sampling.separation == 1
    assert four.strategy.bands == four.sampling.separation == 4
    assert four.event() == mechanisms.CyclicPoissonGaussian(
        4, ((4 * 256 / 6600, 0.7, four.steps),), unit=mechanisms.PrivacyUnit.PATIENT
    )
    training = steps_of(epochs=20)["With DP / pretraining"].training
    rates = tuple(training.learning_rate_at(t, alone.steps) for t in range(alone.steps))
    assert chosen == least_error(alone, Workload(rates, training.beta1))
    assert chosen.strategy.bands > 1
    assert epsilon_pld(chosen.event(), alone.delta) <= epsilon_pld(alone.event(), alone.delta)
    halfway = epsilon_pld(charge.plan_until(four, four.steps // 2).event(), four.delta)
    assert halfway < epsilon_pld(four.event(), four.delta)


def _registered(deployment: Deployment, epsilon: float, **more: Any) -> Ledger:
    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset("notes", mechanisms.PrivacyUnit.PATIENT, epsilon, 1e-5, **more)
    return ledger


def test_registered_run_is_charged_once(deployment):
    ledger = _registered(deployment, 20.0)
    spec = steps_of()["budget"]
    context = bench_of(deployment)
    answer = budget.run(spec, context)
    assert ledger.history("notes") == []  # nothing is planned before the files have been read
    charge.register_plans(context, spec.charged)
    entries = ledger.history("notes")
    assert [e.state for e in entries] == [State.PLANNED] * 2
    assert answer.facts["planned"] == ["word selection", "DP training"]
    spent = ledger.remaining("notes").spent
    charge.register_plans(context, spec.charged)  # a retry
    charge.register_plans(bench_of(deployment, run="triggered again"), spec.charged)
    for charged in spec.charged:
        release = charge.planned_release(charged)
        step = bench_of(deployment, spec_hash=charged.digest())
        units = PrivateUnits(
            release.dataset, release.unit, release.declared_units, 1, patients=True, origin="x"
        )
        done = charge.charge(step, units, release, content=b"manifest")
        done.settle(b"released")
    assert ledger.remaining("notes").spent == spent
    assert [e.state for e in ledger.history("notes")] == [State.SETTLED] * 2


def test_refused_plan_of_one_data_set_gives_back_the_plans_of_others(deployment):
    ledger = _registered(deployment, 400.0)
    ledger.register_dataset("labels", mechanisms.PrivacyUnit.PATIENT, 0.01, 1e-5)
    labels = LABELS | {"entities_patients": "/p.csv", "entities_dataset": "labels"}
    with pytest.raises(BudgetExceeded, match="data set labels"):
        charge.register_plans(bench_of(deployment), steps_of(**labels)["budget"].charged)
    assert [entry.state for entry in ledger.history("notes")] == [State.WITHDRAWN] * 2
    assert ledger.history("labels") == []


@given(st.lists(st.tuples(st.sampled_from(["notes", "labels"]), st.floats(0.5, 3.0)), min_size=1))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_first_step_and_reserve_refuse_what_one_plan_of_both_data_sets_exceeds(
    deployment, monkeypatch, run
):
    ledger = _registered(deployment, 8.0)
    ledger.register_dataset("labels", EVENT.unit, 8.0, 1e-5, shares_budget_with="notes")
    events, number = [mechanisms.Gaussian(σ) for _, σ in run], len(ledger.history("notes"))
    planned: Any = [
        Entry(name, EVENT.unit, event, 1e-8, f"{number} {i}", declared_units=100)
        for i, (event, (name, _)) in enumerate(zip(events, run, strict=True))
    ]
    monkeypatch.setattr(Entry, "digest", lambda release: release.spec_hash, raising=False)
    monkeypatch.setattr(charge, "planned_release", lambda release: release)
    fits = epsilon_pld(mechanisms.compose(*events), 1e-5) <= 8.0
    for step in (charge.refuse_unfit_plans, charge.register_plans):
        with nullcontext() if fits else pytest.raises(BudgetExceeded):
            step(bench_of(deployment), planned)
    assert len(ledger.give_back("run")) == len(run) * fits


@pytest.mark.parametrize(
    "settings",
    [
        {"noise_multiplier": 900.0, "noise_bands": 8, "batch_size": 10},
        {"noise_multiplier": 1 - 1e-8, "clipping": "adaptive", "batch_size": 10},
    ],
)
def test_noise_without_a_lattice_is_refused_before_any_charge(settings):
    with pytest.raises(PlanError, match="would take half of the noise or more"):
        charge.planned_release(steps_of(**settings)["With DP / pretraining"])
    less = settings | {"noise_multiplier": 0.9}
    assert charge.planned_release(steps_of(**less)["With DP / pretraining"]).event.phases


def test_plan_until_an_update_contains_only_earlier_updates():
    first = BatchPhase(4, 5)
    plan = ExecutionPlan(
        unit=EVENT.unit, declared_units=100, sampling=PoissonSampling(), clip_norm=1.0,
        noise_multiplier=1.0, schedule=(first, BatchPhase(6, 10)), delta=1e-6,
    )  # fmt: skip
    made = [charge.plan_until(plan, updates).schedule for updates in (3, 4, 7, 10)]
    assert made == [(BatchPhase(3, 5),), (first,), (first, BatchPhase(3, 10)), plan.schedule]


def test_noise_reduction_settings_reach_private_trainings_only():
    steps = steps_of(
        examples_per_step=2, maskings_per_example=3, noise_floor=0.5, nonprivate=True,
        entities_format="i2b2", entities_train=__file__, entities_test=__file__,
        finetune_privacy="dp", entity_types="problem", entities_declared_units=100,
        entities_dataset="labels", finetune_batch_size=10, finetune_rows_per_unit=5,
    )  # fmt: skip
    settings_of_step = {
        name: (
            spec.batches.examples_per_step, spec.batches.maskings_per_example,
            spec.training.noise_floor,
        )
        for name, spec in steps.items() if hasattr(spec, "training")
    }  # fmt: skip
    assert settings_of_step == {
        "Public text only / pretraining": (1, 1, 0.0),
        "With DP / pretraining": (2, 3, 0.5),
        "Without privacy / pretraining": (2, 1, 0.0),
        "Public text only / finetuning": (1, 1, 0.0),
        "With DP / finetuning": (5, 1, 0.5),
        "Without privacy / finetuning": (1, 1, 0.0),
    }
    plan = charge.training_plan(steps["With DP / pretraining"])
    assert (plan.examples_per_step, plan.maskings_per_example) == (2, 3)


def test_private_labels_of_a_public_model_have_the_measured_recipe_by_default():
    labels = LABELS | {"entities_unit": "example", "entities_dataset": "labels"}

    def tuned(model="With DP", **settings: Any) -> tuple[Any, ...]:
        spec = steps_of(**labels | settings)[f"{model} / finetuning"]
        batch, training, plan = spec.batches.batch_size, spec.training, spec.plan
        noise = (plan.noise_multiplier, plan.clip_norm, spec.updates) if plan else ()
        return batch, training.learning_rate, training.trained_parameters, spec.crf, *noise

    usual, started = (32, 5e-4, "all", False), {"public_model": "/bert"}
    for other in ({}, {"private_start": "fresh", "audit_canaries": 0, **started}):
        assert tuned(**other) == (*usual, 1.0, 1.0, 38)
    assert tuned("Public text only", **started) == (32, 5e-4, "all", True)
    for units, batch, updates in ((10, 2, 240), (401, 100, 241), (4560, 1024, 241)):
        started["entities_declared_units"] = units
        assert tuned(**started) == (batch, 4e-3, "lora", True, 2.75, 0.1, updates)
        plan = charge.training_plan(steps_of(**labels | started)["With DP / finetuning"])
        assert plan.examples_per_step == 1 and epsilon_pld(plan.event(), plan.delta) < 8
    given = {"finetune_batch_size": 32, "finetune_epochs": 3, "finetune_learning_rate": 5e-4}
    given |= {"trained_parameters": "all", "crf": False, "finetune_noise_multiplier": 1.0}
    assert tuned(**started, **given, finetune_clip_norm=1.0) == (*usual, 1.0, 1.0, 428)
    head = {"head": "pairs", "entities_format": "jsonl", "class_names": "a,b", "entity_types": ""}
    assert tuned(**started, **head)[2:4] == ("lora", False)


def test_a_public_model_is_continued_at_the_rate_of_a_pretrained_model():
    """At 0.002 a public MiniLM lost all that it had learned; at 0.0005 it did not."""
    continued = {"public_model": "/bert"}
    fresh = {**continued, "private_start": "fresh", "audit_canaries": 0}
    for changes, rates in (({}, [3e-3] * 2), (continued, [1e-4] * 2), (fresh, [1e-4, 3e-3])):
        steps = steps_of(nonprivate=True, **changes)
        trained = ("Public text only / pretraining", "Without privacy / pretraining")
        assert [steps[name].training.learning_rate for name in trained] == rates


@pytest.mark.parametrize(
    ("head", "example"), [("entities", "sentence"), ("classes", "text"), ("pairs", "pair")]
)
def test_release_from_labels_states_what_an_example_is(head, example):
    labels = LABELS | {"entities_dataset": "labels", "head": head}
    if head != "entities":
        labels |= {"class_names": "a,b", "entity_types": "", "entities_format": "jsonl"}
    for unit, words in (("example", f"example of one labelled {example}"), ("document",) * 2):
        spec = steps_of(**labels | {"entities_unit": unit})["With DP / finetuning"]
        assert charge.planned_release(spec).event.unit_in_words == words


def test_examples_per_step_are_bounded_by_the_rows_of_a_unit():
    spec = steps_of(examples_per_step=4)["With DP / pretraining"]
    assert charge.training_plan(spec).examples_per_step == 4
    assert charge.training_plan(spec, 3).examples_per_step == 3
    alone = steps_of(examples_per_step=4, unit="example")["With DP / pretraining"]
    assert charge.training_plan(alone, 3).examples_per_step == 1


def test_maskings_are_refused_for_trainings_without_masks_or_dp():
    with pytest.raises(ValueError, match=r"maskings_per_example.*masks nothing"):
        steps_of(model_kind="gpt2", maskings_per_example=2)
    steps = steps_of(entities_format="synthetic", nonprivate=True)
    for name, reason in (
        ("Public text only / pretraining", "only DP"),
        ("Without privacy / pretraining", "only DP"),
        ("With DP / finetuning", "masks nothing"),
    ):
        data = steps[name].model_dump()
        data["batches"]["maskings_per_example"] = 2
        with pytest.raises(ValueError, match=f"maskings_per_example.*{reason}"):
            type(steps[name]).model_validate(data)


def test_without_labels_no_model_of_a_private_corpus_is_fine_tuned():
    """Labels are made up for the made-up corpus alone, unless the user asks for them."""
    for unlabelled in ({}, {"entities_format": "none"}):
        steps = steps_of(**unlabelled)
        assert not {"entities", "With DP / finetuning"} & steps.keys()
        assert (steps["reserve"].entities_uri, steps["reserve"].learned) == ("", None)
        assert steps["budget"].made_up is False
    for labelled in (steps_of(entities_format="synthetic"), job_steps(JobSettings())):
        assert {"entities", "With DP / finetuning"} <= labelled.keys()
    made_up = job_steps(JobSettings(entities_format="none"))
    assert made_up["budget"].made_up and "entities" not in made_up


# --- the total δ of a claim stays below one over the units


LABELS = {
    **FILES, "finetune_privacy": "dp", "entity_types": "problem", "entities_declared_units": 400,
    "entities_unit": "patient",
}  # fmt: skip
TOO_MUCH: list[dict[str, Any]] = [
    {"vocabulary_delta": 0.01, "declared_units": 50_000},
    {"vocabulary_delta": 0.9e-4, "delta": 0.9e-4},  # each below 1/6000, but not both together
    # charged to the same data set
    {**LABELS, "entities_patients": "/p.csv", "delta": 1e-4, "finetune_delta": 1e-4},
]


@pytest.mark.parametrize("wrong", TOO_MUCH)
def test_run_with_a_too_large_total_delta_is_refused_by_its_plan(wrong):
    with pytest.raises(PlanError, match="publishing one unit whole"):
        charge.plans_of(budget_of_run(JobSettings.model_validate(PRIVATE | wrong)).charged, {})


def test_total_delta_counts_all_points_of_a_sweep():
    twelve = PRIVATE | {"delta": 2e-5}
    charge.plans_of(budget_of_run(JobSettings.model_validate(twelve)).charged, {})
    with pytest.raises(PlanError, match="publishing one unit whole"):
        charge.plans_of(budget_of_run(SweepSettings.model_validate(twelve)).charged, {})
    chosen = SweepSettings.model_validate(twelve | {"selection": "random-count"})
    charge.plans_of(budget_of_run(chosen).charged, {})  # one model is released


def test_settings_never_underestimate_the_charged_delta():
    settings = JobSettings.model_validate(PRIVATE)
    charged = charge.planned_release(steps_of()["vocabulary"]).delta
    assert charged <= settings.vocabulary_delta <= charged * 1.02


EVENT = mechanisms.PoissonGaussian.single(0.01, 1.0, 10, unit=mechanisms.PrivacyUnit.PATIENT)


def released(dataset: str, delta: float) -> ReleaseRecord:
    return record("1", EVENT, dataset, delta=delta, declared_units=6000)


def of_delta(spec: VocabularySpec, delta: float) -> VocabularySpec:
    config = spec.config.model_copy(update={"vocabulary_delta": delta})
    return spec.model_copy(update={"config": config})


def test_spec_with_a_too_large_delta_is_refused_by_its_step():
    vocabulary = steps_of()["vocabulary"]
    with pytest.raises(PlanError, match="1/6000"):
        charge.planned_release(of_delta(vocabulary, 0.01))
    training = charge.planned_release(steps_of(delta=1e-4)["With DP / pretraining"])
    charge.refuse_large_deltas({"notes": [training]}, [released("notes", 1e-5)])
    charge.refuse_large_deltas({"notes": [training]}, [released("others", 1e-4)])
    # the same entry, listed repeatedly
    charge.refuse_large_deltas({"notes": [training]}, [released("notes", 1e-5)] * 20)
    with pytest.raises(PlanError, match="δ under the budget of others"):
        charge.refuse_large_deltas({"others": [training]}, [released("others", 1e-4)])


def test_run_or_sweep_with_a_too_large_delta_is_not_registered(deployment):
    """A sweep counts the δ of every point, and a run the δ of vocabulary and training."""
    Ledger.open(deployment.ledger).register_dataset(
        "notes", mechanisms.PrivacyUnit.PATIENT, 20.0, 1e-3
    )
    run = steps_of(delta=1e-4)["budget"]
    large = (of_delta(run.charged[0], 1e-4), *run.charged[1:])
    sweep = budget_of_run(SweepSettings.model_validate(PRIVATE))
    assert len(sweep.charged) == 13
    points = [
        point.model_copy(update={"plan": point.private_plan.model_copy(update={"delta": 2e-5})})
        for point in sweep.charged[1:]
        if isinstance(point, PretrainSpec)
    ]
    for spec, charged, reason in (
        (run, large, "1/6600"),
        (sweep, (sweep.charged[0], *points), "in total"),
    ):
        with pytest.raises(PlanError, match=reason):
            budget.run(spec.model_copy(update={"charged": charged}), bench_of(deployment))
    assert not Ledger.open(deployment.ledger).history("notes")


def test_statement_makes_no_claim_at_a_delta_above_one_over_units():
    for units, private in ((0, True), (900, True), (1100, False)):
        release = record("1", EVENT, delta=1e-3, declared_units=units)
        statement = privacy_statement([release])
        assert statement.data["private"] is private
        assert ("No claim is made" in statement.words) is not private
        assert ("differentially private**" in statement.words) is private


def test_vocabulary_calibration_checks_delta_against_units():
    with pytest.raises(PlanError, match="1/50000"):
        calibrate(2.0, 1e-3, 16, declared_units=50_000)


@pytest.mark.parametrize("delta", [0.0, -1e-6, math.nan, math.inf])
def test_invalid_delta_is_refused(delta):
    with pytest.raises(PlanError):
        refuse_large_delta([delta], 100, "δ")
