import json
import math

import pytest
from mechanism_examples import release

from dp_core.privacy import mechanisms
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.mechanism_event import STATED
from dp_core.privacy.statement import privacy_statement

PATIENT = mechanisms.PrivacyUnit.PATIENT
VOCABULARY = mechanisms.ThresholdedHistogram(64, 60.0, 380, unit=PATIENT)
TRAINING = mechanisms.PoissonGaussian.single(0.064, 1.5, 100, unit=PATIENT)


BOTH = [release("L-17", VOCABULARY, 1e-7), release("L-18", TRAINING, 1e-6)]


def test_it_states_the_composition_in_words_and_in_data():
    statement = privacy_statement(BOTH)
    total = epsilon_pld(mechanisms.compose(VOCABULARY, TRAINING), 1.1e-6)
    assert statement.epsilon == pytest.approx(total)
    data = json.loads(json.dumps(statement.data))
    assert (data["unit"], data["delta"], data["private"]) == ("patient", 1.1e-6, True)
    assert data["ledger_ids"] == ["L-17", "L-18"]
    events = [mechanisms.MechanismEvent.from_json(r["event"]) for r in data["releases"]]
    assert events == [VOCABULARY, TRAINING]
    for said in (f"{total:.4g}", "1.1e-06", "patient", "added or removed", "Poisson", "L-17"):
        assert said in statement.words
    assert f"at most {math.exp(total):.3g} times" in statement.words
    assert "Not private" not in statement.words


def test_a_known_seed_is_said_and_voids_the_claim():
    statement = privacy_statement([release("L-1", TRAINING, seed_known=True)])
    assert "Not private: known seed" in statement.words
    assert (statement.data["seed_known"], statement.data["private"]) == (True, False)
    assert "It is" not in statement.words and "would have been" in statement.words
    assert "secret and was used" not in statement.words


def test_whether_the_releases_were_fixed_together_is_said():
    together = [r.model_copy(update={"plan": "run-1"}) for r in BOTH]
    planned, unplanned = privacy_statement(together), privacy_statement(BOTH)
    assert planned.data["one_plan"] and not unplanned.data["one_plan"]
    assert "registered as one plan before the first" in planned.words
    assert "chosen without a look at earlier results" in unplanned.words
    later = [together[0], release("L-18", TRAINING, plan="run-2")]
    assert not privacy_statement(later).data["one_plan"]
    assert "plan" not in "".join(privacy_statement(BOTH[:1]).data["assumptions"])


def test_words_and_data_rest_on_the_same():
    statement = privacy_statement(BOTH)
    for said in statement.data["assumptions"]:
        assert f"- {said}" in statement.words
    items = statement.words.split("Assumptions:")[1].count("\n- ")
    assert len(statement.data["assumptions"]) == items
    assert "a person with two identifiers is two units" in statement.words
    assert "public knowledge, and was not derived from the texts" in statement.words
    assert "several models made from the same text" in statement.words


def test_made_up_text_is_said():
    assert "made up" in privacy_statement(BOTH, made_up=True).words
    assert privacy_statement(BOTH, made_up=True).data["made_up"] is True
    assert "made up" not in privacy_statement(BOTH).words


def test_training_without_privacy_is_said():
    free = mechanisms.Unaccounted("non-private pre-training", unit=PATIENT)
    statement = privacy_statement([*BOTH, release("L-19", free, 0.0001)])
    assert statement.epsilon == math.inf
    assert statement.data["epsilon"] == "inf"
    assert "must stay with the operator" in statement.words
    assert "differentially private" not in statement.words
    json.dumps(statement.data, allow_nan=False)


def test_guarantees_of_different_units_have_no_total():
    shuffled = release("L-20", mechanisms.ShuffledGaussian(2.0, 3, unit=PATIENT))
    statement = privacy_statement([BOTH[0], shuffled])
    assert statement.epsilon is None
    assert "No total is claimed" in statement.words
    assert statement.data["private"] is False


def test_without_private_text_there_is_nothing_to_claim():
    assert "No private text" in privacy_statement([]).words


def test_data_sets_with_one_budget_have_one_claim():
    shared = release("L-3", TRAINING, dataset="letters", budget="notes")
    data = privacy_statement([*BOTH, shared]).data
    assert data["epsilon"] == privacy_statement([*BOTH, BOTH[1]]).epsilon
    assert (data["dataset"], data.get("others")) == ("notes and letters", None)
    assert STATED["separate"] not in data["assumptions"]


def test_each_budget_has_a_separate_claim_for_different_people():
    data = privacy_statement([*BOTH, release("L-3", TRAINING, dataset="letters")]).data
    (other,) = data["others"]
    assert all(STATED["separate"] in claim["assumptions"] for claim in (data, other))
    assert (data["dataset"], other["dataset"]) == ("notes", "letters")
    assert data["epsilon"] == privacy_statement(BOTH).data["epsilon"]
    assert other["epsilon"] == pytest.approx(epsilon_pld(TRAINING, 1e-6))
