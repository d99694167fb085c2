import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import Gate
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.engine import Engine

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.discrete_gaussian import discrete_gaussian
from dp_core.privacy.ledger import Budget, Entry, Ledger, privacy_filter
from dp_core.privacy.ledger import ledger as ledger_module
from dp_core.privacy.mechanisms import (
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    PrivacyUnit,
    ThresholdedHistogram,
)
from dp_core.privacy.seed_store import SeedStore

TRAINING = PoissonGaussian.single(0.01, 1.0, 500)
HISTOGRAM = ThresholdedHistogram(words_per_unit=64, sigma=80.0, threshold=600)
GAUSSIAN = Gaussian(2.0)


def reservation(spec_hash: str = "spec", event: MechanismEvent = TRAINING, **more: Any) -> Entry:
    defaults = {"dataset": "notes", "unit": PrivacyUnit.PATIENT, "delta": 1e-6}
    return Entry(**(defaults | {"event": event, "spec_hash": spec_hash} | more))


# --- functions that run in other processes


def _slow(decide: Callable[..., Any]) -> Callable[..., Any]:
    """Return `decide` with a pause before its decision is recorded, to expose a missing lock."""

    @functools.wraps(decide)
    def decided(*arguments: Any) -> Any:
        decision = decide(*arguments)
        time.sleep(0.2)
        return decision

    return decided


def reserve_in_a_process(url: str, spec_hash: str, gate: Gate) -> str:
    """Open or create the ledger and reserve; return the entry's id, or "" if it is refused."""
    privacy_filter.admit = _slow(privacy_filter.admit)
    gate.wait()
    ledger = Ledger.open(url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    try:
        return ledger.reserve(reservation(spec_hash, GAUSSIAN)).id
    except BudgetExceeded:
        return ""


def reserve_without_lock(url: str, spec_hash: str, gate: Gate) -> str:
    """Reserve without the row lock, to produce the race that the lock prevents."""
    ledger_module.lock_budget = Budget.of_dataset
    return reserve_in_a_process(url, spec_hash, gate)


def register_run(url: str, name: str, gate: Gate) -> tuple[str, str]:
    """Register a plan of two releases; return its name and the error, or "" if it was admitted."""
    ledger = Ledger.open(url)
    more: dict[str, Any] = {"plan_key": name, "run": name}
    wanted = [reservation(f"{name}-{i}", Gaussian(1.0), **more) for i in range(2)]
    gate.wait()
    try:
        ledger.register_plan(wanted)
    except BudgetExceeded as error:
        return name, str(error)
    return name, ""


def release_once(url: str, seeds: Path, content: bytes, gate: Gate) -> tuple[str, bytes | str]:
    """Reserve, take the seed, wait until all processes have it, and settle.

    Returns the seed's hash, and the released content or the error.
    """
    Entry.verify_reproduced_release = _slow(  # type: ignore[method-assign]
        Entry.verify_reproduced_release
    )
    ledger = Ledger.open(url)
    entry = ledger.reserve(reservation("one", GAUSSIAN))
    seed = ledger.seed(entry, SeedStore(seeds), b"manifest")
    gate.wait()
    try:
        ledger.settle(entry.id, seed.derive("released", content))
    except BadInput as error:
        return seed.salted_hash(), str(error)
    return seed.salted_hash(), content


KILL_POINTS = (
    "before the entry is written",
    "before the reservation commits",
    "after the reservation",
    "before the seed has its name",
    "after the seed has its name",
    "after the seed is created",
    "before the binding commits",
    "after the binding",
    "after the release",
    "before the settlement commits",
    "after the settlement",
)


def release_in_a_process(url: str, home: Path, kill_at: str) -> None:
    """Run the protocol up to a released number, and die by SIGKILL at one of its points."""
    passed: list[str] = []  # progress of the protocol

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reach(point: str) -> None:
        passed.append(point)
        if point == kill_at:
            die()

    @sqlalchemy_event.listens_for(Engine, "before_cursor_execute")
    def executing(_c: Any, _cu: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO entries") and kill_at == KILL_POINTS[0]:
            die()
        if statement.startswith(("INSERT INTO entries", "UPDATE entries")):
            passed.append("wrote")

    @sqlalchemy_event.listens_for(Engine, "commit")
    def committing(_connection: Any) -> None:
        last = passed[-1:]
        stage = {0: KILL_POINTS[1], 4: KILL_POINTS[6], 6: KILL_POINTS[9]}
        done = len([p for p in passed if p in KILL_POINTS])
        if last == ["wrote"] and stage.get(done) == kill_at:
            die()

    link = os.link

    def linking(*arguments: Any, **more: Any) -> None:
        seed = str(arguments[1]).endswith(".json")  # not the folder's record of its ledger
        if seed:
            reach("before the seed has its name")
        link(*arguments, **more)
        if seed:
            reach("after the seed has its name")

    os.link = linking
    ledger = Ledger.open(url)
    entry = ledger.reserve(reservation())
    reach("after the reservation")
    seeds = SeedStore(home / "seeds")
    seeds.create(entry.seed_key)
    reach("after the seed is created")
    seed = ledger.seed(entry, seeds, b"manifest")
    reach("after the binding")
    noise = discrete_gaussian(100.0, 8, seed, b"context").tolist()
    with (home / "released").open("a") as file:
        file.write(f"{noise}\n")
    reach("after the release")
    ledger.settle(entry.id, seed.derive("released", repr(noise).encode()))
    reach("after the settlement")
