"""`confide advise`: what it names keeps the budget, and nothing else compared does better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.advice import batches_to_try, phrase_noise, rough_noise, rows_to_try
from dp_core.privacy.ledger import Ledger
from tasks.cli import cli
from tasks.protocol import JobSettings
from tasks.releases import training_advice
from tasks.releases.training_advice import PrivacyBudget, RunReleases, advised, calibrated, changed

SMALL = JobSettings(
    declared_units=400, synthetic_patients=100, epochs=6.0, batch_size=64, words_per_unit=16
)
BUDGET = PrivacyBudget(6.0, 1e-5)


@pytest.fixture(scope="module")
def told() -> training_advice.Advice:
    """The advice on the small settings."""
    return advised(SMALL, BUDGET)


@pytest.fixture(autouse=True)
def _at_home(at_home: None) -> None:
    """The command line's ledger is the test's."""


def confide(*words: str) -> dict:
    answer = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.output)


def words_of(changes: dict) -> list[str]:
    return [part for name, value in changes.items() for part in ("--set", f"{name}={value}")]


def test_what_is_named_costs_at_most_the_budget_by_the_ledger_s_own_arithmetic(told):
    given = SMALL.model_dump(mode="json", exclude_defaults=True)
    cost = confide("ledger", "cost", *words_of(given | told.changes))
    assert 0.99 * BUDGET.epsilon < cost["epsilon"] <= BUDGET.epsilon
    assert 0.98 * BUDGET.delta < cost["delta"] <= BUDGET.delta
    assert cost["releases"] == 2  # the vocabulary is in it


def test_a_data_set_registered_with_the_budget_admits_the_run(told, deployment):
    """At order ∞ the ledger adds up (ε, δ) as they are stated, a run's releases as one."""
    from dp_core.privacy.ledger import Reservation
    from dp_core.privacy.mechanisms import PrivacyUnit

    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset(
        "notes", PrivacyUnit.PATIENT, BUDGET.epsilon, BUDGET.delta, order=float("inf")
    )
    spending = told.spending
    events = [(r.event, r.delta) for r in spending.alongside]
    events.append((spending.training.event(), spending.training.delta))
    planned = [
        Reservation(
            dataset="notes", unit=PrivacyUnit.PATIENT, event=event, delta=delta, spec_hash=f"{i}"
        )
        for i, (event, delta) in enumerate(events)
    ]
    assert ledger.cost_of_plan(planned).fits


def test_no_other_batch_and_no_other_rows_have_less_noise_beside_the_signal(told):
    """Brute force: every batch, and rows and masks of a unit, for as many rows read."""
    training = RunReleases.of(told.settings).training
    epsilon = epsilon_pld(training.event(), training.delta)
    figures = {}
    for rows, maskings in rows_to_try(SMALL.max_examples_per_unit):
        epochs = 6 * SMALL.examples_per_step / (rows * maskings)
        for batch in batches_to_try(400, epochs * 400):
            one = changed(
                told.settings, epochs=epochs, batch_size=batch,
                examples_per_step=rows, maskings_per_example=maskings,
            )  # fmt: skip
            sigma = rough_noise(RunReleases.of(one).training_event, epsilon, training.delta)
            figures[rows, maskings, batch] = RunReleases.of(
                changed(one, noise_multiplier=sigma)
            ).noise_to_signal
    assert len(figures) > 30
    own = told.settings
    chosen = figures[own.examples_per_step, own.maskings_per_example, own.batch_size]
    assert chosen == pytest.approx(min(figures.values()), rel=2e-3)
    assert chosen == pytest.approx(told.spending.noise_to_signal, rel=2e-3)
    read = own.updates * own.batch_size * own.examples_per_step * own.maskings_per_example
    asked = SMALL.updates * SMALL.batch_size * SMALL.examples_per_step
    assert read == pytest.approx(asked, rel=0.1)


def test_a_causal_model_is_advised_no_maskings():
    found = advised(changed(SMALL, model_kind="gpt2"), BUDGET)
    assert found.settings.maskings_per_example == 1


def test_more_computing_leaves_less_noise_beside_the_signal(told):
    """At the ε of the training as planned, and with as many units."""
    by_name = {o.case.name: o.case for o in told.outlook}
    own, more = by_name["as planned"], by_name["four times the computing"]
    assert by_name["sixteen times the computing"].figure < more.figure < own.figure
    assert (more.epsilon, more.declared_units) == (own.epsilon, own.declared_units)


def test_no_other_split_is_worth_more(told):
    from dp_core.privacy.advice import measured_curves, zipf_coverage

    worth = {}
    for share in training_advice.VOCABULARY_SHARES:
        own = changed(SMALL, vocabulary_epsilon=round(share * BUDGET.epsilon, 3))
        spending = RunReleases.of(calibrated(own, BUDGET))
        (vocabulary,) = (release.event for release in spending.alongside)
        kept = measured_curves("gradients")[0].expected(spending.noise_to_signal).share
        worth[own.vocabulary_epsilon] = kept * zipf_coverage(vocabulary.units_to_pass, 400, 16)
    assert worth[told.settings.vocabulary_epsilon] >= 0.99 * max(worth.values())


def test_more_units_and_more_epsilon_never_have_more_noise(told):
    by_name = {o.case.name: o for o in told.outlook}
    own = by_name["as planned"]
    for better in ("twice the units", "twice the ε of training"):
        assert by_name[better].case.figure < own.case.figure
        for name, one in by_name[better].expected.items():
            assert one.share >= own.expected[name].share
    for worse in ("half the units", "half the ε of training"):
        assert by_name[worse].case.figure > own.case.figure


def test_released_phrases_get_the_measured_share_and_the_whole_keeps_the_budget():
    """Phrases, words and gradients: composed from the events themselves, by the ledger's PLD."""
    given = changed(SMALL, phrases_epsilon=1.0, phrases_per_unit=50)
    found = advised(given, BUDGET)
    settings, spending = found.settings, found.spending
    assert (settings.phrases_epsilon, settings.vocabulary_epsilon) == (4.5, 1.5)
    assert 0.99 * BUDGET.epsilon < spending.epsilon <= BUDGET.epsilon
    assert 0.98 * BUDGET.delta < spending.delta <= BUDGET.delta
    assert spending.recipe == "phrases"
    assert found.phrases_instead == ""


def test_the_outlook_of_phrases_follows_their_noise_for_each_unit():
    given = changed(SMALL, phrases_epsilon=3.0, phrases_per_unit=50)
    by_name = {o.case.name: o for o in training_advice.outlook_of(given)}
    own = by_name["as planned"]
    noise = phrase_noise(RunReleases.of(given).phrases)
    assert own.case.figure == pytest.approx(noise / 400)
    assert own.case.figure == RunReleases.of(given).figure
    assert by_name["half the units"].case.figure == pytest.approx(noise / 200)
    doubled = phrase_noise(RunReleases.of(changed(given, phrases_epsilon=6.0)).phrases)
    assert by_name["twice the ε of phrases"].case.figure == pytest.approx(doubled / 400)
    assert doubled < noise
    for quantity, expected in own.expected.items():
        assert by_name["twice the units"].expected[quantity].share >= expected.share
        assert by_name["half the ε of phrases"].expected[quantity].share <= expected.share


@pytest.mark.parametrize(("epsilon", "words"), [(0.8, 0.48), (1.0, 0.6), (2.0, 0.6), (4.0, 1.0)])
def test_of_a_small_budget_words_get_more_than_a_quarter(epsilon, words):
    budget = PrivacyBudget(epsilon, 2.1e-6)
    found = advised(changed(JobSettings(), phrases_epsilon=1.0), budget)
    assert found.settings.vocabulary_epsilon == pytest.approx(words)
    assert found.spending.epsilon <= epsilon


def test_after_phrases_few_updates_of_large_batches_are_advised():
    """As it was measured: 36 of 1,024 patients bring something, 141 of 256 nothing."""
    phrases = changed(JobSettings(), phrases_epsilon=4.35)
    found = advised(phrases, PrivacyBudget(5.8, 2.1e-6))
    assert 512 <= found.settings.batch_size <= 2048
    assert 10 < found.settings.updates < 100


def test_what_phrases_would_give_is_said_where_there_are_none(told):
    assert "phrases_epsilon=4.5" in told.phrases_instead
    assert "made-up notes" in told.phrases_instead


def test_bands_that_the_plan_chooses_spend_the_budget_and_no_more():
    """σ of the settings is that of one band; what is charged is the noise of the chosen ones."""
    made = calibrated(changed(SMALL, noise_bands=0, batch_size=16), BUDGET)
    spending = RunReleases.of(made)
    assert spending.training.strategy.bands > 1
    assert spending.training.noise_multiplier > 1.05 * made.noise_multiplier
    assert 0.98 * BUDGET.epsilon < spending.epsilon <= BUDGET.epsilon


def test_calibration_keeps_the_budget_with_everything_in_it():
    """Over all releases, at odd budgets: composed from the events themselves."""
    from dp_core.privacy.mechanisms import compose

    found = calibrated(SMALL, PrivacyBudget(5.0, 7.77e-6))
    spending = RunReleases.of(found)
    (vocabulary,) = spending.alongside
    delta = found.delta + found.vocabulary_delta
    assert delta <= 7.77e-6
    total = epsilon_pld(compose(vocabulary.event, spending.training.event()), delta)
    assert 0.99 * 5.0 < total <= 5.0


def test_calibration_is_monotone_in_epsilon():
    sigmas = [
        calibrated(SMALL, PrivacyBudget(epsilon, 1e-5)).noise_multiplier for epsilon in (4, 6, 12)
    ]
    assert sigmas == sorted(sigmas, reverse=True)
    assert len(set(sigmas)) == 3


def test_delta_is_divided_as_the_settings_divide_it(told):
    settings = told.settings
    assert settings.vocabulary_delta + settings.delta <= 1e-5
    assert settings.delta / settings.vocabulary_delta == pytest.approx(10, rel=0.01)
    assert settings.finetune_delta == SMALL.finetune_delta  # nothing is charged for it
    assert settings.phrases_delta == SMALL.phrases_delta  # nor for this


def test_the_budget_of_what_is_set_already_changes_no_delta():
    now = RunReleases.of(SMALL)
    same = calibrated(SMALL, PrivacyBudget(now.epsilon, now.delta))
    assert (same.delta, same.vocabulary_delta) == (SMALL.delta, SMALL.vocabulary_delta)
    assert same.noise_multiplier == pytest.approx(SMALL.noise_multiplier, rel=1e-3)


def test_private_labels_of_the_same_people_are_paid_from_the_same_budget():
    labels = changed(
        SMALL, private_format="jsonl", private_path="/x/notes.jsonl", private_dataset="notes",
        unit="document", entities_format="columns", entities_train="/x/a.tsv",
        entities_test="/x/b.tsv", finetune_privacy="dp", entity_types="Disease",
        entities_declared_units=400, finetune_noise_multiplier=3.0,
    )  # fmt: skip
    spending = RunReleases.of(labels)
    assert len(spending.alongside) == 2
    found = calibrated(labels, PrivacyBudget(8.0, 1e-5))
    assert RunReleases.of(found).epsilon <= 8.0
    assert RunReleases.of(found).delta <= 1e-5
    assert found.finetune_delta < labels.finetune_delta * 10
    apart = changed(labels, entities_dataset="labels")
    assert len(RunReleases.of(apart).alongside) == 1  # others' budget


def test_the_command_reads_nothing_and_writes_settings_that_run(tmp_path: Path, deployment):
    file = tmp_path / "advised.json"
    asked = [
        "--set", "private_format=jsonl", "--set", "private_path=/nowhere/notes.jsonl",
        "--set", "private_dataset=ward", "--set", "declared_units=300", "--set", "epochs=4",
        "--set", "batch_size=100", "--set", "words_per_unit=16",
        "--epsilon", "5", "--delta", "1e-5", "--write", str(file),
    ]  # fmt: skip
    found = confide("advise", *asked)
    assert found["plan"]["epsilon"] <= 5
    assert found["plan"]["delta"] <= 1e-5
    assert [part["release"] for part in found["split"]] == [
        "partition selection",
        "DP pre-training",
    ]
    assert found["expected"][0]["case"] == "as planned"
    assert "made-up notes" in found["known_from"]
    assert not found["beats_public_only"]  # 300 units at ε = 5
    assert "cannot be expected to beat" in found["verdict"]
    settings = JobSettings.model_validate(json.loads(file.read_text()))
    assert settings.noise_multiplier == found["plan"]["noise_multiplier"]
    assert settings.batch_size == found["plan"]["batch_size"]
    assert settings.private_path == "/nowhere/notes.jsonl"
    assert not Path(deployment.ledger.removeprefix("sqlite:///")).exists()  # nothing is charged


def test_people_get_words_that_can_be_copied(told, monkeypatch):
    monkeypatch.setattr(training_advice, "advised", lambda settings, budget: told)
    answer = CliRunner().invoke(cli, ["advise"], catch_exceptions=False)
    assert answer.exit_code == 0
    for part in (
        f"--set noise_multiplier={told.settings.noise_multiplier}",
        "They are not a promise",
        told.verdict,
        "twice the units",
    ):
        assert part in answer.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--epsilon", "0"], "0 is not from"),
        (["--epsilon", "nan"], "not finite"),
        (["--epsilon", "3", "--delta", "0.0025"], "δ = 0.0025 in total is not between 0 and 1/400"),
        (["--delta", "0"], "is not between 0 and"),
        (["--delta", "nan"], "is not between 0 and"),
        (["--epsilon", "0.001"], "too small"),
        (["--set", "batch_size=401"], "batch_size is above declared_units"),
        (["--write", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(words, reason, told, monkeypatch):
    if "--write" in words:
        monkeypatch.setattr(training_advice, "advised", lambda settings, budget: told)
    small = ["--set", "declared_units=400", "--set", "batch_size=64", *words]
    small += ["--set", "words_per_unit=16"]
    with pytest.raises((BadInput, PlanError)) as refused:
        CliRunner().invoke(cli, ["advise", *small], catch_exceptions=False)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_ten_units_are_too_few_for_any_budget():
    """Either no plan keeps it, or it is said that it is not worth it."""
    tiny = changed(SMALL, declared_units=10, batch_size=10, epochs=2.0)
    found = advised(tiny, PrivacyBudget(8.0, 1e-3))
    assert found.spending.epsilon <= 8.0
    assert found.settings.batch_size <= 10
    assert "cannot be expected to beat" in found.verdict


def test_a_noise_that_no_setting_takes_is_refused(monkeypatch):
    monkeypatch.setattr(training_advice, "noise_for", lambda *arguments: 1000.1)
    with pytest.raises(BadInput, match="takes 1000 at most: nothing"):
        calibrated(SMALL, BUDGET)


@pytest.mark.parametrize(
    ("share", "low", "said"),
    [
        (0.2, 0.01, "should beat training on public text only, by 20% of the gain"),
        (0.2, 0.0, "may beat"),
        (0.05, -0.3, "may beat"),
        (0.049, -0.3, "cannot be expected to beat"),
        (0.049, 0.01, "cannot be expected to beat"),
    ],
)
def test_the_verdict_is_plain(share, low, said):
    from dp_core.privacy.advice import Expected

    assert said in training_advice.verdict({"F1": Expected(share, low, 0.6, True)})
