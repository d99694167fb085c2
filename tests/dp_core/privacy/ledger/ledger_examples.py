import functools
import os
import signal
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import Gate
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.engine import Engine

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.discrete_gaussian import discrete_gaussian
from dp_core.privacy.ledger import Budget, Entry, Ledger, State, privacy_filter
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
    """Decide while no process has recorded its decision yet."""
    ledger_module.lock_budget, admit = Budget.of_dataset, privacy_filter.admit
    privacy_filter.admit = lambda *arguments: (admit(*arguments), gate.wait())[0]
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


KILL_POINTS = {  # with the states of the entries after the kill
    point: [State(state) for state in states]
    for point, states in tomllib.loads(
        Path(__file__).with_name("kill_points.toml").read_text()
    ).items()
}


def whole_run(**more: Any) -> list[Entry]:
    both: dict[str, Any] = {"plan_key": "dp_bert/one", "run": "dp_bert/one"} | more
    return [reservation("vocabulary", HISTOGRAM, **both), reservation("training", **both)]


def release_in_a_process(url: str, home: Path, kill_at: str) -> None:
    """Register a plan, withdraw it, and release its first part; die by SIGKILL at a point."""
    stage, written = "", False

    def reach(point: str) -> None:
        if point == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(name: str, work: Callable[[], Any]) -> Any:
        nonlocal stage, written
        stage, written = name, False
        result = work()
        reach(f"after the {name}")
        return result

    @sqlalchemy_event.listens_for(Engine, "before_cursor_execute")
    def executing(_c: Any, _cu: Any, statement: str, *_: Any) -> None:
        nonlocal written
        written |= statement.startswith(("INSERT INTO entries", "UPDATE entries"))

    @sqlalchemy_event.listens_for(Engine, "commit")
    def committing(_connection: Any) -> None:
        if written:
            reach(f"before the {stage} commits")

    link = os.link

    def linking(*arguments: Any, **more: Any) -> None:
        seed = str(arguments[1]).endswith(".json")  # not the folder's record of its ledger
        reach("before the seed has its name" if seed else "")
        link(*arguments, **more)
        reach("after the seed has its name" if seed else "")

    def release() -> list[int]:
        noise: list[int] = discrete_gaussian(100.0, 8, seed, b"context").tolist()
        with (home / "released").open("a") as file:
            file.write(f"{noise}\n")
        return noise

    os.link = linking
    ledger = Ledger.open(url)
    run("plan", lambda: ledger.register_plan(whole_run()))
    run("withdrawal", lambda: ledger.withdraw_plan("notes", "dp_bert/one"))
    entry = run("reservation", lambda: ledger.reserve(whole_run()[0]))
    seed = run("binding", lambda: ledger.seed(entry, SeedStore(home / "seeds"), b"manifest"))
    digest = seed.derive("released", repr(run("release", release)).encode())
    run("settlement", lambda: ledger.settle(entry.id, digest))
