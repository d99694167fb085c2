"""A plan is charged as a whole or not at all, and given back only where no data was read."""

from __future__ import annotations

import math
import os
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from ledger_examples import HISTOGRAM, TRAINING, register_run, reservation
from processes import run_at_once, run_until_killed
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.engine import Engine

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.ledger import Entry, Ledger, State
from dp_core.privacy.mechanisms import Gaussian, PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed, SeedStore

RUN: dict[str, Any] = {"plan_key": "dp_bert/one", "run": "dp_bert/one"}
DEAR = Gaussian(0.6)


def plan(**more: Any) -> list[Entry]:
    both = RUN | more
    return [reservation("vocabulary", HISTOGRAM, **both), reservation("training", **both)]


def states(ledger: Ledger) -> list[State]:
    return [entry.state for entry in ledger.history("notes")]


def test_refused_plan_leaves_no_entry_and_names_the_plan_that_holds_the_budget(
    ledger: Ledger,
) -> None:
    ledger.register_plan(plan())
    dear = [reservation("dear", DEAR, plan_key="later", run="later")]
    with pytest.raises(BudgetExceeded, match="`confide ledger withdraw DATASET RUN`") as caught:
        ledger.register_plan(dear)
    assert "spent + asked > capacity" in str(caught.value) and "\n" not in str(caught.value)
    assert "2 of dp_bert/one" in str(caught.value)
    assert len(ledger.history("notes")) == 2
    ledger.reserve(plan()[0])
    ledger.withdraw_plan("notes", "dp_bert/one")
    with pytest.raises(BudgetExceeded, match="1 of dp_bert/one") as caught:
        ledger.register_plan(dear)
    assert "ledger withdraw" not in str(caught.value)  # a plan that has begun stays charged


def test_withdrawn_plan_is_free_and_charged_again_when_registered(ledger: Ledger) -> None:
    empty = ledger.remaining("notes").spent
    first = ledger.register_plan(plan())
    held = ledger.remaining("notes")
    gone = ledger.withdraw_plan("notes", "dp_bert/one")
    assert {e.id for e in gone} == {e.id for e in first}
    assert all(e.withdrawn_at for e in gone)
    assert ledger.remaining("notes").spent == empty
    assert ledger.remaining("notes").unsettled == 0
    again = ledger.register_plan(plan(plan_key="dp_bert/two", run="dp_bert/two"))
    assert [e.id for e in again] == [e.id for e in first]
    assert ledger.remaining("notes").spent == held.spent
    with pytest.raises(BadInput, match="no planned release"):
        ledger.withdraw_plan("notes", "dp_bert/one")
    assert ledger.reserve(plan()[1]).state is State.RESERVED


def test_withdrawn_release_is_admitted_again_before_it_is_reserved(ledger: Ledger) -> None:
    asked = reservation("dear", Gaussian(0.8), **RUN)
    ledger.register_plan([asked])
    ledger.withdraw_plan("notes", "dp_bert/one")
    ledger.reserve(reservation("other", Gaussian(0.8)))
    with pytest.raises(BudgetExceeded):
        ledger.reserve(asked)
    assert states(ledger) == [State.WITHDRAWN, State.RESERVED]


def test_begun_release_stays_charged(ledger: Ledger) -> None:
    vocabulary, _ = plan()
    ledger.register_plan(plan())
    ledger.reserve(vocabulary)
    before = ledger.cost_of_plan([vocabulary])
    assert before.share == 0  # it is charged already
    (gone,) = ledger.withdraw_plan("notes", "dp_bert/one")
    assert gone.spec_hash == "training"
    assert states(ledger) == [State.RESERVED, State.WITHDRAWN]
    with pytest.raises(BadInput, match="no planned release"):
        ledger.withdraw_plan("notes", "dp_bert/one")


@pytest.mark.parametrize("begun", [State.RESERVED, State.SETTLED])
def test_plan_composed_by_pld_is_given_back_whole_or_not_at_all(url: str, begun: State) -> None:
    ledger = Ledger.open(url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5, order=math.inf)
    ledger.register_plan(plan())
    spent = ledger.remaining("notes").spent
    first = ledger.reserve(plan()[0])
    if begun is State.SETTLED:
        ledger.bind(first.id, PrivacySeed.draw(), b"manifest")
        ledger.settle(first.id, b"released")
    with pytest.raises(BadInput, match="charged as one"):
        ledger.withdraw_plan("notes", "dp_bert/one")
    assert ledger.remaining("notes").spent == spent
    assert states(ledger) == [begun, State.PLANNED]
    other = [reservation("later", TRAINING, plan_key="later", run="later")]
    ledger.register_plan(other)
    ledger.withdraw_plan("notes", "later")
    assert ledger.remaining("notes").spent == spent


def test_withdrawn_release_draws_no_noise(ledger: Ledger, tmp_path: Path) -> None:
    ledger.register_plan(plan())
    (first, _) = ledger.withdraw_plan("notes", "dp_bert/one")
    with pytest.raises(BadInput, match="reserve it"):
        ledger.seed(first, SeedStore(tmp_path / "seeds"), b"manifest")
    with pytest.raises(BadInput, match="never reserved"):
        ledger.settle(first.id)


# --- kill -9

POINTS = {
    "before the plan commits": ("INSERT INTO entries", 0),
    "after the plan": ("", 0),
    "before the withdrawal commits": ("UPDATE entries", 0),
    "after the withdrawal": ("", 0),
}


def change_in_a_process(url: str, kill_at: str) -> None:
    """Register a plan and withdraw it, and die by SIGKILL at one point."""
    statement = POINTS.get(kill_at, ("", 0))[0]
    written: list[str] = []

    @sqlalchemy_event.listens_for(Engine, "before_cursor_execute")
    def executing(_c: Any, _cu: Any, sql: str, *_: Any) -> None:
        if statement and sql.startswith(statement):
            written.append(sql)

    @sqlalchemy_event.listens_for(Engine, "commit")
    def committing(_connection: Any) -> None:
        if written:
            os.kill(os.getpid(), signal.SIGKILL)

    ledger = Ledger.open(url)
    ledger.register_plan(plan())
    if kill_at == "after the plan":
        os.kill(os.getpid(), signal.SIGKILL)
    ledger.withdraw_plan("notes", "dp_bert/one")
    if kill_at == "after the withdrawal":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("point", POINTS)
def test_kill_registers_or_withdraws_a_whole_plan_or_none_of_it(
    ledger: Ledger, url: str, point: str, other_processes: ForkServerContext
) -> None:
    empty = ledger.remaining("notes").spent
    run_until_killed(other_processes, change_in_a_process, url, point)
    expected = {
        "before the plan commits": [],
        "after the plan": [State.PLANNED] * 2,
        "before the withdrawal commits": [State.PLANNED] * 2,
        "after the withdrawal": [State.WITHDRAWN] * 2,
    }[point]
    assert states(ledger) == expected
    charged = State.PLANNED in expected
    assert (ledger.remaining("notes").spent == empty) is not charged
    # The retry finds the plan or registers it, and the plan is charged once.
    ledger.register_plan(plan())
    once = ledger.remaining("notes").spent
    ledger.register_plan(plan())
    assert ledger.remaining("notes").spent == once
    assert states(ledger) == [State.PLANNED] * 2


# --- two runs at once


def test_second_of_two_racing_runs_is_refused_with_the_reason(
    ledger: Ledger, url: str, other_processes: ForkServerContext
) -> None:
    names = ("dp_bert/a", "dp_bert/b")
    said = dict(run_at_once(other_processes, register_run, [(url, name) for name in names]))
    (refused,) = [name for name in names if said[name]]
    (admitted,) = set(names) - {refused}
    assert f"2 of {admitted}" in said[refused]
    assert [e.run for e in ledger.history("notes")] == [admitted] * 2
