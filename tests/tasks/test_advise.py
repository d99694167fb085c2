import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import refused_commands, set_options
from release_examples import bench_of
from spec_examples import run

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy import advice
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger import AdmissionDecision, Entry, Ledger, State, Way
from dp_core.privacy.mechanisms import Gaussian, PrivacyUnit, compose
from tasks.protocol.job import budget_of_run, job_steps
from tasks.protocol.settings import JobSettings
from tasks.releases import charge, training_advice
from tasks.releases.charge import planned_release, refuse_unfit_plans, register_plans
from tasks.releases.training_advice import (
    PrivacyBudget,
    RunReleases,
    advised,
    advised_within,
    calibrated,
    changed,
)

pytestmark = pytest.mark.usefixtures("at_home")
SMALL = JobSettings(
    declared_units=400, synthetic_patients=100, epochs=6.0, batch_size=64, words_per_unit=16
)
BUDGET = PrivacyBudget(6.0, 1e-5)
WARD = {"private_format": "jsonl", "private_dataset": "ward"}


@pytest.fixture(scope="module")
def advice_on_small() -> training_advice.Advice:
    return advised(SMALL, BUDGET)


def test_advised_plan_costs_at_most_the_budget_by_ledger_cost(confide, advice_on_small):
    given = SMALL.model_dump(mode="json", exclude_defaults=True)
    cost = confide.json("ledger", "cost", *set_options(**given | advice_on_small.changes))
    assert 0.99 * BUDGET.epsilon < cost["epsilon"] <= BUDGET.epsilon
    assert 0.98 * BUDGET.delta < cost["delta"] <= BUDGET.delta
    assert cost["releases"] == 2  # including the release of the vocabulary
    settings = advice_on_small.settings  # divides δ as the given settings do
    assert settings.delta / settings.vocabulary_delta == pytest.approx(10, rel=0.01)
    assert settings.finetune_delta == SMALL.finetune_delta  # no private fine-tuning is charged
    assert settings.phrases_delta == SMALL.phrases_delta  # no phrases are charged


def test_advised_batch_and_rows_minimise_the_noise_to_signal_ratio(advice_on_small):
    """Brute force over batch sizes, rows and maskings per unit, for an equal number of rows."""
    training = RunReleases.of(advice_on_small.settings).training
    epsilon = epsilon_pld(training.event(), training.delta)
    figures = {}
    for rows, maskings in advice.rows_to_try(SMALL.max_examples_per_unit):
        epochs = 6 * SMALL.examples_per_step / (rows * maskings)
        for batch in advice.batches_to_try(400, epochs * 400):
            alternative = changed(
                advice_on_small.settings, epochs=epochs, batch_size=batch,
                examples_per_step=rows, maskings_per_example=maskings,
            )  # fmt: skip
            sigma = advice.rough_noise(
                RunReleases.of(alternative).training_event, epsilon, training.delta
            )
            figures[rows, maskings, batch] = RunReleases.of(
                changed(alternative, noise_multiplier=sigma)
            ).noise_to_signal
    assert len(figures) > 30
    settings = advice_on_small.settings
    chosen = figures[settings.examples_per_step, settings.maskings_per_example, settings.batch_size]
    assert chosen == pytest.approx(min(figures.values()), rel=2e-3)
    assert chosen == pytest.approx(advice_on_small.spending.noise_to_signal, rel=2e-3)
    drawn = settings.updates * settings.batch_size
    read = drawn * settings.examples_per_step * settings.maskings_per_example
    given = SMALL.updates * SMALL.batch_size * SMALL.examples_per_step
    assert read == pytest.approx(given, rel=0.1)


def test_causal_model_is_advised_one_masking():
    answer = advised(changed(SMALL, model_kind="gpt2", vocabulary_source="public"), BUDGET)
    assert answer.settings.maskings_per_example == 1


def test_more_computing_lowers_the_noise_to_signal_ratio(advice_on_small):
    by_name = {case.name: case for case in advice_on_small.outlook}
    planned, more = by_name["as planned"], by_name["four times the computing"]
    assert by_name["sixteen times the computing"].figure < more.figure < planned.figure
    assert (more.epsilon, more.declared_units) == (planned.epsilon, planned.declared_units)


def test_no_other_split_of_the_budget_is_better(advice_on_small):
    worth = {}
    for share in training_advice.VOCABULARY_SHARES:
        settings = changed(SMALL, vocabulary_epsilon=round(share * BUDGET.epsilon, 3))
        spending = RunReleases.of(calibrated(settings, BUDGET))
        (vocabulary,) = (release.event for release in spending.alongside)
        kept = advice.measured_curves("gradients")[0].expected(spending.noise_to_signal).share
        worth[settings.vocabulary_epsilon] = kept * advice.zipf_coverage(
            vocabulary.units_to_pass, 400, 16
        )
    assert worth[advice_on_small.settings.vocabulary_epsilon] >= 0.99 * max(worth.values())


@pytest.mark.parametrize(("epsilon", "words"), [(0.8, 0.48), (2.0, 0.6), (5.8, 1.45)])
def test_phrases_receive_the_measured_share_of_the_budget(epsilon, words):
    budget = PrivacyBudget(epsilon, 2.1e-6)
    answer = advised(changed(JobSettings(), phrases_epsilon=1.0), budget)
    settings, spending = answer.settings, answer.spending
    assert settings.phrases_epsilon == pytest.approx(0.75 * epsilon)
    assert settings.vocabulary_epsilon == pytest.approx(words)  # above a quarter of a small budget
    assert 0.99 * epsilon < spending.epsilon <= epsilon
    assert 0.98 * budget.delta < spending.delta <= budget.delta
    assert (spending.recipe, answer.phrases_instead) == ("phrases", "")
    if epsilon == 5.8:  # few updates of large batches
        assert 512 <= settings.batch_size <= 2048 and 10 < settings.updates < 100


def test_outlook_of_phrases_follows_their_noise_per_unit():
    given = changed(SMALL, phrases_epsilon=3.0, phrases_per_unit=50)
    by_name = {case.name: case for case in training_advice.outlook_of(given)}
    planned = by_name["as planned"]
    noise = advice.phrase_noise(RunReleases.of(given).phrases)
    assert planned.figure == pytest.approx(noise / 400)
    assert planned.figure == RunReleases.of(given).figure
    assert by_name["half the units"].figure == pytest.approx(noise / 200)
    doubled = advice.phrase_noise(RunReleases.of(changed(given, phrases_epsilon=6.0)).phrases)
    assert by_name["twice the ε of phrases"].figure == pytest.approx(doubled / 400)
    assert doubled < noise
    for quantity, expected in planned.expected.items():
        assert by_name["twice the units"].expected[quantity].share >= expected.share
        assert by_name["half the ε of phrases"].expected[quantity].share <= expected.share


def test_noise_bands_chosen_by_the_plan_keep_the_budget():
    """The setting σ is that of a single band, and the charged noise is that of the chosen bands."""
    given = changed(SMALL, noise_bands=0, batch_size=16, vocabulary_source="private")
    made = calibrated(given, BUDGET)
    spending = RunReleases.of(made)
    assert spending.training.strategy.bands > 1
    assert spending.training.noise_multiplier > 1.05 * made.noise_multiplier
    assert 0.98 * BUDGET.epsilon < spending.epsilon <= BUDGET.epsilon


def test_calibration_keeps_the_budget_over_all_releases():
    settings = calibrated(SMALL, PrivacyBudget(5.0, 7.77e-6))
    spending = RunReleases.of(settings)
    (vocabulary,) = spending.alongside
    delta = settings.delta + settings.vocabulary_delta
    assert delta <= 7.77e-6
    total = epsilon_pld(compose(vocabulary.event, spending.training.event()), delta)
    assert 0.99 * 5.0 < total <= 5.0
    now = RunReleases.of(SMALL)  # a budget of the present cost changes nothing
    same = calibrated(SMALL, PrivacyBudget(now.epsilon, now.delta))
    assert (same.delta, same.vocabulary_delta) == (SMALL.delta, SMALL.vocabulary_delta)
    assert same.noise_multiplier == pytest.approx(SMALL.noise_multiplier, rel=1e-3)


def test_private_labels_of_the_same_data_set_share_the_budget():
    labels = changed(
        SMALL, private_format="jsonl", private_path="/x/notes.jsonl", private_dataset="notes",
        unit="document", entities_format="columns", entities_train="/x/a.tsv",
        entities_test="/x/b.tsv", finetune_privacy="dp", entity_types="Disease",
        entities_declared_units=400, finetune_noise_multiplier=3.0,
    )  # fmt: skip
    spending = RunReleases.of(labels)
    assert len(spending.alongside) == 2
    settings = calibrated(labels, PrivacyBudget(8.0, 1e-5))
    assert RunReleases.of(settings).epsilon <= 8.0
    assert RunReleases.of(settings).delta <= 1e-5
    assert settings.finetune_delta < labels.finetune_delta * 10
    apart = changed(labels, entities_dataset="labels")
    assert len(RunReleases.of(apart).alongside) == 1  # the labels are charged to another budget
    assert calibrated(apart, PrivacyBudget(8.0, 1e-5)).finetune_delta == apart.finetune_delta


def test_advice_on_labels_of_another_name_under_the_budget_of_the_notes_is_refused(confide):
    labels = WARD | {
        "entities_format": "jsonl", "head": "classes", "class_names": "a,b", "entities_train": "/a",
        "entities_test": "/b", "entities_dataset": "labels", "finetune_privacy": "dp",
        "entities_declared_units": 300, "entities_unit": "patient", "declared_units": 300,
    }  # fmt: skip
    confide.register(dataset="ward")
    confide.register("--shares-budget-with", "ward", dataset="labels")
    assert "shares the budget of ward" in confide.refused("advise", *set_options(**labels))


def test_command_reads_no_data_and_writes_valid_settings(confide, tmp_path, deployment):
    file = tmp_path / "advised.json"
    given = WARD | {"private_path": "/nowhere/notes.jsonl", "declared_units": 300, "epochs": 4}
    given |= {"batch_size": 100, "words_per_unit": 16}
    budget = ["--epsilon", "5", "--delta", "1e-5"]
    answer = confide.json("advise", *set_options(**given), *budget, "--write", file)
    assert answer["plan"]["epsilon"] <= 5 and answer["plan"]["delta"] <= 1e-5
    releases = [part["release"] for part in answer["split"]]
    assert releases == ["word selection", "DP pre-training"]
    assert answer["expected"][0]["name"] == "as planned"
    assert "made-up notes" in answer["known_from"] and "declare-public" in answer["public_start"][0]
    assert not answer["beats_public_only"]  # 300 units at ε = 5
    assert "cannot be expected to beat" in answer["verdict"]
    settings = JobSettings.model_validate(json.loads(file.read_text()))
    assert settings.noise_multiplier == answer["plan"]["noise_multiplier"]
    assert settings.batch_size == answer["plan"]["batch_size"]
    assert settings.private_path == "/nowhere/notes.jsonl"
    # no ledger was created, so nothing is charged
    assert not Path(deployment.ledger.removeprefix("sqlite:///")).exists()


def test_text_output_contains_options_to_copy(confide, advice_on_small, monkeypatch):
    monkeypatch.setattr(training_advice, "advised", lambda settings, budget: advice_on_small)
    code, output, _ = confide("advise")
    noise = f"--set noise_multiplier={advice_on_small.settings.noise_multiplier}"
    assert (code, advice_on_small.public_start) == (0, ())
    for part in (noise, "They are not a promise", advice_on_small.verdict, "twice the units"):
        assert part in output


@pytest.mark.parametrize(("command", "reason"), refused_commands("advice"))
def test_invalid_budget_or_settings_are_refused_in_one_line(
    command, reason, confide, advice_on_small, monkeypatch
):
    if "--write" in command:
        monkeypatch.setattr(training_advice, "advised", lambda settings, budget: advice_on_small)
    small = set_options(declared_units=400, batch_size=64, words_per_unit=16)
    assert reason in confide.refused("advise", *small, *command.split())


def test_noise_above_the_maximum_of_the_setting_is_refused(monkeypatch):
    monkeypatch.setattr(charge, "noise_for", lambda *arguments: 1000.1)
    with pytest.raises(BadInput, match="takes 1000 at most: nothing"):
        calibrated(SMALL, PrivacyBudget(0.5, 1e-5))


@pytest.mark.cases
def test_verdict_depends_on_share_and_lower_bound(share, low, wording):
    assert wording in training_advice.verdict({"F1": advice.Expected(share, low, 0.6, True)})


# --- register, advise, cost and run apply the same arithmetic


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    (tmp_path / "ward.jsonl").write_text("")
    return set_options(**WARD, private_path=tmp_path / "ward.jsonl")


def test_advised_plan_of_a_whole_budget_is_admitted_by_every_verb(
    confide, settings, deployment, tmp_path
):
    registered = confide.register(dataset="ward")
    assert registered["way"] is None
    assert registered["ways"]["one plan"] == {"rho": 8.0, "delta": 1e-5}
    assert registered["ways"]["any sequence"]["rho"] == pytest.approx(4.681, abs=1e-3)
    written = tmp_path / "advised.json"
    words = ["--epsilon", "8", "--delta", "1e-5", "--write", str(written)]
    plan = confide.json("advise", *settings, *words)
    assert 7.9 < plan["plan"]["epsilon"] <= 8
    assert plan["registered"]["way"] == "one plan"
    cost = confide.json("ledger", "cost", "--settings", written)
    assert cost == cost | plan["registered"]
    context = bench_of(deployment)
    charged = budget_of_run(JobSettings.model_validate_json(written.read_text()))
    refuse_unfit_plans(context, charged.charged)
    entries = register_plans(context, charged.charged)
    assert {entry.state for entry in entries} == {State.PLANNED}
    first = entries[0]
    begun = Entry(first.dataset, first.unit, first.event, first.delta, first.spec_hash)
    Ledger.open(deployment.ledger).reserve(begun)
    closed = confide.json("ledger", "remaining", "ward")
    assert closed["way"] == "one plan"
    assert closed["share"] == pytest.approx(plan["plan"]["epsilon"] / 8, rel=1e-3)
    shown = " ".join(confide("ledger", "remaining", "ward")[1].replace("│", " ").split())
    assert "it is closed for" in shown
    code, out, err = confide("advise", *settings, "--set", "epochs=2")
    assert (code, out) == (3, "") and "closed for every other release" in err
    code, out, _ = confide("ledger", "cost", *settings, "--json")
    assert code == 3 and "closed" in json.loads(out)["refusal"]
    with pytest.raises(BudgetExceeded, match="closed"):
        other = JobSettings.model_validate(json.loads(written.read_text()) | {"epochs": 1})
        refuse_unfit_plans(context, budget_of_run(other).charged)


def test_advice_fits_the_part_of_a_budget_that_is_left(confide, settings, deployment, tmp_path):
    confide.register(dataset="ward")
    ledger = Ledger.open(deployment.ledger)
    spent = Entry("ward", PrivacyUnit.PATIENT, Gaussian(2.0), 1e-6, "earlier")
    ledger.reserve(spent)
    written = tmp_path / "advised.json"
    plan = confide.json("advise", *settings, "--write", written)
    assert plan["registered"]["way"] == "any sequence"
    assert plan["registered"]["left_after"] < 0.1
    cost = confide.json("ledger", "cost", "--settings", written)
    assert cost == cost | plan["registered"]


@pytest.mark.parametrize("room", [0.9, 0.5, 0.1])
def test_largest_epsilon_that_the_filter_admits_is_advised(monkeypatch, room):
    """The largest ε is known, because the charge of this filter is the square of ε."""
    plans: dict[float, Any] = {}

    def plan_of(given: JobSettings, budget: PrivacyBudget) -> training_advice.Advice:
        changed = given.model_copy(update={"noise_multiplier": budget.epsilon})
        return plans.setdefault(budget.epsilon, training_advice.Advice(changed, budget, given))

    def decide(planned: JobSettings) -> AdmissionDecision:
        share = (planned.noise_multiplier / 8) ** 2
        way = Way.SEQUENCE if share <= room else None
        return AdmissionDecision(way, None, share, room - share if way else room, None, 2)

    monkeypatch.setattr(training_advice, "advised", plan_of)
    chosen = advised_within(JobSettings(), PrivacyBudget(8.0, 1e-5), decide)
    assert 0.95 * room <= (chosen.budget.epsilon / 8) ** 2 <= room
    assert len(plans) <= 5


# --- the step that refuses a run


def test_run_above_the_budget_ends_with_exit_code_3(
    deployment, as_in_a_process, no_mlflow, tmp_path, capsys
):
    (tmp_path / "notes" / "a").mkdir(parents=True)
    (tmp_path / "notes" / "a" / "1.txt").write_text("pain")
    job = JobSettings(
        private_format="text", private_path=str(tmp_path / "notes"), private_dataset="notes",
        words_per_unit=16, epochs=2, noise_multiplier=0.7,
    )  # fmt: skip
    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 4.0, 1e-5)
    # the vocabulary alone would fit and would be charged without use
    assert ledger.cost_of_plan([planned_release(job_steps(job)["vocabulary"])]).fits
    assert run(job_steps(job)["budget"]) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "spent + asked" in line]
    assert len(lines) == 1
    assert lines[0].count(">") >= 2  # the arithmetic
    assert ledger.history("notes") == []


@pytest.mark.usefixtures("as_in_a_process", "no_mlflow")
def test_data_set_without_a_budget_is_refused_before_reading(capsys):
    job = JobSettings(private_format="text", private_path="/absent", private_dataset="notes")
    assert run(job_steps(job)["budget"]) == 2
    assert "confide ledger register notes" in capsys.readouterr().err


def test_advice_on_a_public_model_states_what_was_measured_with_a_real_one(advice_on_small):
    private = {"finetune_privacy": "dp", "public_model": "/model"}
    measured = {}
    cases = {"dp": {}, "none": {"finetune_privacy": "none"}, "": {"public_model": ""}}
    for name, other in cases.items():
        settings = SMALL.model_copy(update=private | other)
        measured[name] = replace(advice_on_small, settings=settings).public_start
    notes, labels = measured["dp"]
    assert notes.startswith("Of the gain without privacy in masked tokens ")
    assert labels.startswith("Of the F1 without privacy, private labels kept ")
    assert "sentences were drawn" in labels
    assert (measured["none"], measured[""]) == ((notes,), ())
