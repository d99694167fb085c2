"""A refusal of the budget step has exit code 3 and one line, and charges nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_examples import run

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol import JobSettings, job_steps
from tasks.releases.plans import planned_release
from tasks.runtime.deployment import Deployment

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
    room = ledger.cost_of_next("notes", [(vocabulary.event, vocabulary.delta)])
    assert room.fits  # the vocabulary alone would fit and would be charged without use
    assert _budget(home, tmp_path) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if "spent + asked" in line]
    assert len(lines) == 1
    assert lines[0].count(">") >= 2  # the arithmetic
    assert ledger.history("notes") == []


def test_data_set_without_a_budget_is_refused_before_reading(
    home: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(job_steps(JOB)["budget"]) == 2
    assert "confide ledger register notes" in capsys.readouterr().err
