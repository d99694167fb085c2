"""A job with a target ε: σ and the parts follow from it, and the run costs at most that much."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from release_examples import bench_of
from scipy.special import expit

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol.defaults import AdaptiveDefaults, could_contradict, default_delta
from tasks.protocol.job import budget_of_run, job_steps
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import FinetuneSpec, PretrainSpec
from tasks.releases.charge import planned_release, plans_of, refuse_unfit_plans
from tasks.releases.training_advice import RunReleases

WARD: dict[str, Any] = {
    "private_format": "jsonl", "private_path": "/x/notes.jsonl", "private_dataset": "ward",
    "words_per_unit": 16,
}  # fmt: skip


def ward(**changes: Any) -> JobSettings:
    return JobSettings.model_validate(WARD | changes)


@settings(max_examples=4, deadline=None)
@given(
    units=st.integers(60, 4000),
    epsilon=st.floats(0.5, 10).map(lambda epsilon: float(f"{epsilon:.3g}")),
    delta=st.one_of(st.none(), st.floats(-9, -6).map(lambda power: float(f"{10**power:.3g}"))),
)
def test_run_costs_at_most_its_target(units, epsilon, delta, tmp_path_factory):
    """The decision is the ledger's, for a budget of exactly the target."""
    job = ward(declared_units=units, target_epsilon=epsilon, target_delta=delta)
    most = job.target_delta
    assert most is not None
    folder = tmp_path_factory.mktemp("ledger")
    ledger = Ledger.open(f"sqlite:///{folder / 'ledger.db'}")
    ledger.register_dataset("ward", PrivacyUnit.PATIENT, epsilon, most)
    decision = ledger.cost_of_plan(plans_of(budget_of_run(job).charged, {})["ward"])
    assert decision.fits
    releases = RunReleases.of(job)
    assert 0.99 * epsilon <= releases.epsilon <= epsilon
    assert 0.98 * most <= releases.delta <= most


@settings(max_examples=5, deadline=None)
@given(
    units=st.integers(60, 20_000),
    epsilon=st.floats(0.5, 10).map(lambda epsilon: float(f"{epsilon:.3g}")),
    public_model=st.sampled_from(["", "/x/bert"]),
)
def test_private_fine_tuning_costs_at_most_its_target(units, epsilon, public_model):
    job = ward(
        declared_units=units, public_model=public_model, entities_format="jsonl", head="classes",
        entities_train="/x/a", entities_test="/x/b", entities_dataset="labels",
        finetune_privacy="dp", entities_declared_units=units, class_names="a,b",
        finetune_epsilon=epsilon,
    )  # fmt: skip
    spec = job_steps(job)["With DP / finetuning"]
    assert isinstance(spec, FinetuneSpec)
    entry = planned_release(spec)
    assert (entry.dataset, entry.delta) == ("labels", job.finetune_delta)
    assert 0.99 * epsilon <= epsilon_pld(entry.event, entry.delta) <= epsilon
    public = job_steps(job)["Public text only / finetuning"]
    assert isinstance(public, FinetuneSpec) and public.target is None


def test_phrases_are_part_of_the_target():
    job = ward(declared_units=1000, target_epsilon=6.0, phrases_per_unit=20)
    assert job.phrases_epsilon == 4.5 and job.vocabulary_epsilon == 1.5
    releases = RunReleases.of(job)
    assert len(releases.alongside) == 2
    assert 5.9 < releases.epsilon <= 6.0
    assert ward(declared_units=100, target_epsilon=6.0).phrases_epsilon == 0  # too few units


@given(
    units=st.integers(10, 10**9),
    epsilon=st.floats(0.01, 100),
    total=st.one_of(st.none(), st.floats(1e-12, 1e-3)),
    vocabulary=st.sampled_from(["public+private", "public"]),
)
def test_parts_share_the_target_delta(units, epsilon, total, vocabulary):
    given_settings = AdaptiveDefaults(
        declared_units=units, target_epsilon=epsilon, target_delta=total,
        vocabulary_source=vocabulary, private_format="jsonl",
    )  # fmt: skip
    resolved = given_settings.of_privacy
    parts = [resolved["delta"]]
    parts += [resolved["vocabulary_delta"]] if vocabulary != "public" else []
    parts += [resolved["phrases_delta"]] if resolved["phrases_epsilon"] else []
    assert 0.98 * resolved["target_delta"] <= math.fsum(parts) <= resolved["target_delta"]


@given(units=st.integers(10, 10**9))
def test_default_delta_is_at_most_a_hundredth_of_one_in_the_units(units):
    assert 0.1 < 100 * units * default_delta(units) <= 1.0000001


def test_recorded_settings_of_a_target_give_the_same_run():
    job = ward(declared_units=116, target_epsilon=8.0)
    steps = job_steps(job)
    again = JobSettings.model_validate(steps["report"].model_dump()["settings"])
    assert {spec.output for spec in job_steps(again).values()} == {s.output for s in steps.values()}
    training = next(spec for spec in steps.values() if isinstance(spec, PretrainSpec) and spec.plan)
    assert PretrainSpec.model_validate_json(training.model_dump_json()) == training
    other = ward(declared_units=116, target_epsilon=7.9)
    assert job_steps(other)["With DP / pretraining"].output != training.output


# --- defaults that follow from the data


@pytest.mark.parametrize("units", [60, 116, 300, 1000, 6000])
def test_defaults_of_private_text_fit_the_number_of_units(units):
    job = ward(declared_units=units)
    assert job.batch_size == min(256, units // 8)
    assert job.audit_canaries == (units // 10 if units >= 300 else 0)
    assert bool(job.why_unaudited) == (units < 300)
    strict = ward(declared_units=units, target_epsilon=8.0)  # no audit could contradict it
    assert (strict.audit_canaries, "contradict" in strict.why_unaudited) == (0, units >= 300)
    assert (job.nonprivate, job.entities_format) == (False, "none")
    carriers = [rate * units for rate in job.rates]
    assert carriers[-1] >= 6  # the most frequent canaries occur
    burden = sum(job.rates) * job.canaries_per_group * len(job.patterns)
    assert burden < 0.5  # rows of canaries of a unit
    assert JobSettings.model_validate(job.model_dump()) == job


def test_defaults_of_made_up_text_are_those_of_the_demo():
    job = JobSettings()
    assert (job.batch_size, job.noise_multiplier, job.delta) == (256, 0.875, 1e-6)
    assert (job.nonprivate, job.entities_format, job.audit_canaries) == (True, "synthetic", 0)
    assert job.canary_rates == "0.002,0.006,0.02" and job.canaries_per_group == 4
    assert JobSettings(declared_units=116).synthetic_patients == 116


def test_given_settings_are_kept():
    chosen = {"batch_size": 20, "nonprivate": True, "audit_canaries": 3, "holdout": 0.2}
    job = ward(declared_units=60, **chosen)
    assert {name: getattr(job, name) for name in chosen} == chosen
    assert ward(declared_units="60", batch_size=None, holdout="").batch_size == 7


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("shared", [None, "ward"])
def test_target_of_a_run_counts_all_of_its_releases_under_the_budget(deployment, shared):
    terms, ledger = (PrivacyUnit.DOCUMENT, 50.0, 1e-4), Ledger.open(deployment.ledger)
    ledger.register_dataset("ward", *terms)
    ledger.register_dataset("labels", *terms, shares_budget_with=shared)
    job = ward(
        declared_units=100, target_epsilon=8.0, unit="document", entities_format="jsonl",
        entities_train="/x/a", entities_test="/x/b", entities_dataset="labels", head="pairs",
        finetune_privacy="dp", entities_declared_units=100, class_names="a,b",
    )  # fmt: skip
    with nullcontext() if shared is None else pytest.raises(BadInput, match="budget of ward, too"):
        refuse_unfit_plans(bench_of(deployment), budget_of_run(job).charged)


@pytest.mark.usefixtures("at_home")
def test_unregistered_data_set_is_refused_with_the_command_that_registers_it(deployment):
    job = ward(declared_units=116, target_epsilon=8.0)
    command = r"confide ledger register ward --unit patient --epsilon 8 --delta 1e-05"
    with pytest.raises(Exception, match=command):
        refuse_unfit_plans(bench_of(deployment), budget_of_run(job).charged)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 3.5, 3.6, 8.0])
@pytest.mark.parametrize("canaries", [30, 400, 1000])
def test_default_audit_could_contradict_the_target(canaries, epsilon):
    all_right = scipy.stats.binom.sf(canaries // 4 - 1, canaries // 4, expit(epsilon))
    assert could_contradict(canaries // 4 * 4, epsilon) == (all_right <= 0.001)
