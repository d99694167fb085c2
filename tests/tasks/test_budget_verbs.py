from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Confide
from release_examples import bench_of
from spec_examples import run

from dp_core.errors import BudgetExceeded
from dp_core.privacy.ledger import AdmissionDecision, Entry, Ledger, State, Way
from dp_core.privacy.mechanisms import Gaussian, PrivacyUnit
from tasks.protocol import JobSettings, budget_of_run, job_steps
from tasks.releases import training_advice
from tasks.releases.charge import planned_release, refuse_unfit_plans, register_plans
from tasks.releases.training_advice import PrivacyBudget, advised_within
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.usefixtures("at_home")
WARD = {"private_format": "jsonl", "private_dataset": "ward"}


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    (tmp_path / "ward.jsonl").write_text("")
    named = WARD | {"private_path": str(tmp_path / "ward.jsonl")}
    return [word for name, value in named.items() for word in ("--set", f"{name}={value}")]


def register(confide: Confide) -> dict[str, Any]:
    words = "ledger register ward --unit patient --epsilon 8 --delta 1e-5"
    registered: dict[str, Any] = confide.json(*words.split())
    return registered


def test_advised_plan_of_a_whole_budget_is_admitted_by_every_verb(
    confide: Confide, settings: list[str], deployment: Deployment, tmp_path: Path
) -> None:
    registered = register(confide)
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
    Ledger.open(deployment.ledger).reserve(_reservation(entries[0]))
    closed = confide.json("ledger", "remaining", "ward")
    assert (closed["way"], closed["share"]) == (
        "one plan",
        pytest.approx(plan["plan"]["epsilon"] / 8, rel=1e-3),
    )
    shown = " ".join(confide("ledger", "remaining", "ward")[1].replace("│", " ").split())
    assert "it is closed for" in shown
    code, out, err = confide("advise", *settings, "--set", "epochs=2")
    assert (code, out) == (3, "") and "closed for every other release" in err
    code, out, _ = confide("ledger", "cost", *settings, "--json")
    assert code == 3 and "closed" in json.loads(out)["refusal"]
    with pytest.raises(BudgetExceeded, match="closed"):
        other = JobSettings.model_validate(json.loads(written.read_text()) | {"epochs": 1})
        refuse_unfit_plans(context, budget_of_run(other).charged)


def _reservation(entry: Any) -> Entry:
    return Entry(entry.dataset, entry.unit, entry.event, entry.delta, entry.spec_hash)


def test_advice_fits_the_part_of_a_budget_that_is_left(
    confide: Confide, settings: list[str], deployment: Deployment, tmp_path: Path
) -> None:
    register(confide)
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
def test_largest_epsilon_that_the_filter_admits_is_advised(
    monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
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


JOB = JobSettings(
    private_format="text", private_path="/nobody/has/this", private_dataset="notes",
    words_per_unit=16, epochs=2, noise_multiplier=0.7,
)  # fmt: skip


@pytest.fixture
def home(
    untracked: Deployment, monkeypatch: pytest.MonkeyPatch, as_in_a_process: None
) -> Deployment:
    monkeypatch.setenv("CONFIDE_HOME", str(untracked.home))
    monkeypatch.setenv("CONFIDE_TRACKING", untracked.tracking)
    return untracked


def _budget(deployment: Deployment, tmp_path: Path) -> int:
    notes = tmp_path / "notes"
    (notes / "a").mkdir(parents=True, exist_ok=True)
    (notes / "a" / "1.txt").write_text("pain")
    job = JOB.model_copy(update={"private_path": str(notes)})
    return run(job_steps(job)["budget"])


def test_run_above_the_budget_ends_with_exit_code_3(
    home: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger.open(home.ledger)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 4.0, 1e-5)
    vocabulary = planned_release(job_steps(JOB)["vocabulary"])
    room = ledger.cost_of_plan([vocabulary])
    assert room.fits  # the vocabulary alone would fit and would be charged without use
    assert _budget(home, tmp_path) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "spent + asked" in line]
    assert len(lines) == 1
    assert lines[0].count(">") >= 2  # the arithmetic
    assert ledger.history("notes") == []
