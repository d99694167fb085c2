"""The deployment's privacy ledger: its identity, its data sets, and the plans of unfinished runs.

Seeds and store remember their ledger, and no other ledger is opened with them. A deleted ledger
file, an emptied database or a wrong URL would give an empty ledger, and the budget of people whose
data was already released could be spent again. Two places prove earlier releases: the seed store,
with one seed per release, and the store, whose outputs carry records of their releases. Each record
must agree with a settled entry. Otherwise the ledger is older than the store, for example after a
backup was restored.

Each run of the command line holds a lock on a file in the deployment's home. The kernel frees the
lock when the process dies, so a file without a lock names a run that was killed. The ledger
withdraws only plans of which no release has begun (`Ledger.give_back`).
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import ROUND_UP, Context
from pathlib import Path

from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.ledger import Budget, Entry, Ledger, State
from dp_core.privacy.ledger.database import RESTORE
from dp_core.privacy.seed_store import SeedStore
from dp_core.privacy.statement import total_epsilon
from tasks.context import StepContext
from tasks.protocol.settings import MADE_UP
from tasks.protocol.step_classes import STEP_CLASSES
from tasks.results import read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.journal import exclusive, is_still_there
from tasks.storage.store import Store

IDENTITY = "store://ledger/identity"  # the object in which the store remembers its ledger
_RUNS = "runs"  # in the deployment's home


def open_ledger(deployment: Deployment, store: Store | None = None) -> Ledger:
    """Return the deployment's ledger.

    Args:
        deployment: the deployment that holds ledger and seeds.
        store: the store whose results name the ledger's entries; None for a read-only command.

    Raises:
        BadInput: the seeds or the store remember another ledger, the ledger lacks releases, or it
            is damaged.
        LedgerUnavailable: the database does not answer; may be retried.
    """
    ledger = Ledger.open(deployment.ledger)
    refuse_lost_ledger(ledger, deployment)
    if deployment.holds_seeds:
        ledger.confirm_memory(SeedStore(deployment.seeds))
    identity = ledger.identity()
    # A step that reads files from outside holds no seeds, and never writes.
    if store is not None and not confirm_store(store, identity) and deployment.holds_seeds:
        store.write(IDENTITY, identity.encode())
    return ledger


def confirm_store(store: Store, identity: str) -> bool:
    """Return whether the store remembers this ledger; False if it remembers none yet.

    Raises:
        BadInput: the store remembers another ledger.
    """
    remembered = store.read(IDENTITY)
    if remembered is None:
        return False
    if remembered.decode(errors="replace").strip() != identity:
        what = "the results in the store name the entries of another ledger"
        raise BadInput(what, where=f"store {store.root}", fix=RESTORE)
    return True


def ledger_for(context: StepContext, dataset: str, plan: Sequence[Entry] = ()) -> Ledger:
    """Return the ledger, after a check that the data set's registration agrees with the run.

    A run registers only the project's made-up notes. The operator registers every other data set.

    Args:
        context: of the step.
        dataset: the data set.
        plan: the run's planned releases of it, for the command that registers enough for them.

    Raises:
        BadInput: the data set is not registered; its registration as public or private contradicts
            the run; or seeds and store remember another ledger.
    """
    ledger = refuse_unregistered(context, dataset, plan)
    if dataset == MADE_UP and dataset not in ledger.datasets():
        ledger.register_made_up(dataset)
    return ledger


def refuse_unregistered(context: StepContext, dataset: str, plan: Sequence[Entry] = ()) -> Ledger:
    """Return the ledger if the data set's registration agrees with the run, without writing.

    The project's made-up notes may be registered later, by a step with write access.

    Raises:
        BadInput: as `ledger_for`.
    """
    ledger = open_ledger(context.deployment, context.store)
    budget = ledger.datasets().get(dataset)
    refuse_other_standing(budget, dataset, made_up=context.made_up, plan=plan)
    return ledger


def refuse_other_standing(
    budget: Budget | None, dataset: str, *, made_up: bool, plan: Sequence[Entry] = ()
) -> None:
    """Refuse a data set whose registration as private or public contradicts the run.

    Args:
        budget: the registered budget, or None.
        dataset: the data set.
        made_up: whether the run calls it made up or public.
        plan: the run's planned releases of it, if they are known.

    Raises:
        BadInput: the message names the command for the operator.
    """
    if dataset == MADE_UP:
        return  # tasks/releases/declarations.py reads no private file under that name
    if budget is None and made_up:
        what = f"the data set {dataset} is not registered as public, but this run calls it public"
        fix = f"If it is, the operator says so: confide ledger register {dataset} --public"
    elif budget is None:
        what = f"the data set {dataset} has no privacy budget yet"
        fix = f"Set one: confide ledger register {dataset} {least_terms(plan)}"
    elif made_up and not budget.made_up:
        what = f"the data set {dataset} is registered as private, but this run calls it public"
        fix = "A budget is declared once: leave all_public unset."
    elif budget.made_up and not made_up:
        what = (
            f"the data set {dataset} is registered as made up or public, but this run calls it "
            "private"
        )
        fix = "Give the private data set a separate name."
    else:
        return
    raise BadInput(what, where="ledger", fix=fix)


def least_terms(plan: Sequence[Entry]) -> str:
    """Return the options of `confide ledger register` for the smallest budget that admits a plan.

    Numbers are rounded up to three digits.
    """
    delta = math.fsum(release.delta for release in plan)
    epsilon = total_epsilon([release.event for release in plan], delta)
    if not plan or epsilon is None or not math.isfinite(epsilon):
        return "--unit … --epsilon … --delta …"
    rounded = Context(prec=3, rounding=ROUND_UP)
    up = [
        f"{float(rounded.create_decimal_from_float(n * (1 - 1e-12))):g}" for n in (epsilon, delta)
    ]
    return f"--unit {plan[0].unit.value} --epsilon {up[0]} --delta {up[1]}"


# --- restored ledgers, seeds and stores


def refuse_lost_ledger(ledger: Ledger, deployment: Deployment) -> None:
    """Refuse an empty ledger if seeds or store remember another one.

    Raises:
        BadInput: the ledger was deleted or emptied after releases were made.
    """
    if ledger.datasets():
        return
    seeds = SeedStore(deployment.seeds).remembered_ledger() if deployment.holds_seeds else None
    store = deployment.open_store().read(IDENTITY)
    remembered = {seeds, store.decode(errors="replace").strip() if store else None}
    if remembered - {None, ledger.identity()}:
        what = "the privacy ledger is missing: an empty one is in its place, but releases were made"
        raise BadInput(what, where=f"privacy ledger {deployment.ledger_place}", fix=RESTORE)


def confirm_releases(ledger: Ledger, records: Iterable[ReleaseRecord], where: str) -> None:
    """Refuse records of releases that the ledger does not hold as settled.

    Args:
        ledger: of the deployment.
        records: the release records of an output.
        where: the output, for messages.

    Raises:
        BadInput: an entry is missing, not settled, or of another release.
    """
    for record in records:
        entry_of(ledger, record, where)


def entry_of(ledger: Ledger, record: ReleaseRecord, where: str) -> Entry:
    """Return the settled entry of a release that an output carries.

    Raises:
        BadInput: the entry is missing, not settled, or of another release.
    """
    where = f"release {record.ledger_id} of {where}"
    try:
        entry = ledger.entry(record.ledger_id)
    except BadInput:
        raise BadInput("the ledger does not hold it", where=where, fix=RESTORE) from None
    budget = ledger.datasets()[entry.dataset]
    held = (entry.dataset, entry.unit.value, entry.event.to_json(), entry.delta)
    named = (record.dataset, record.unit, record.event, record.delta)
    if (*held, budget.name, budget.of_study) != (*named, record.budget, record.of_study):
        raise BadInput("the ledger holds another release", where=where, fix=RESTORE)
    if entry.state is not State.SETTLED:
        raise BadInput(
            f"the ledger has not settled it: it is {entry.state.value}", where=where, fix=RESTORE
        )
    if entry.released_hash != record.released:
        raise BadInput("the ledger settled a release with another digest", where=where, fix=RESTORE)
    return entry


def lost_seeds(ledger: Ledger, seeds: SeedStore) -> list[str]:
    """Return the ids of the entries whose seed was drawn and is no longer in the seed store."""
    drawn = seeds.drawn()
    return [e.id for e in _entries(ledger) if e.seed_hash and e.seed_key not in drawn]


def compare(ledger: Ledger, store: Store) -> tuple[list[str], list[str]]:
    """Compare the ledger with the outputs in the store, both ways.

    Returns:
        One line for each recorded release that the ledger does not hold as settled, and the ids of
        the settled entries that no output carries.
    """
    faults: list[str] = []
    carried: set[str] = set()
    for uri in (uri for step in STEP_CLASSES for uri in store.outputs(step)):
        result = read_result(store, uri)
        fresh = [r for r in result.releases if r.ledger_id not in carried] if result else []
        for record in fresh:
            carried.add(record.ledger_id)
            try:
                entry_of(ledger, record, uri)
            except BadInput as error:
                faults.append(f"{error.where}: {error.what}")
    settled = [entry.id for entry in _entries(ledger) if entry.state is State.SETTLED]
    return faults, [entry_id for entry_id in settled if entry_id not in carried]


def _entries(ledger: Ledger) -> list[Entry]:
    """Return the entries of all data sets; data sets that share a budget have the same ones."""
    return list({e.id: e for name in ledger.datasets() for e in ledger.history(name)}.values())


# --- unfinished runs on this machine


@contextmanager
def plans_given_back(deployment: Deployment, run_key: str) -> Iterator[list[str]]:
    """Withdraw, at the end of the run, its plans of which no release has begun.

    Plans of killed runs are withdrawn first. The caller ends the run by an exception if a signal
    arrives (`stops_on_signals`).

    Yields:
        A list that is filled with the ids of the withdrawn entries after the run.
    """
    deployment.prepare()
    folder = deployment.home / _RUNS
    folder.mkdir(mode=0o700, exist_ok=True)
    for key, file in _killed(folder):
        open_ledger(deployment).give_back(key)
        file.unlink(missing_ok=True)
    given_back: list[str] = []
    file = folder / f"{hashlib.sha256(run_key.encode()).hexdigest()[:16]}.run"
    with exclusive(file) as descriptor:
        os.write(descriptor, run_key.encode())
        try:
            yield given_back
        finally:
            with suppress(ConfideError):  # the next run gives it back: the file stays
                given_back += [entry.id for entry in open_ledger(deployment).give_back(run_key)]
                file.unlink(missing_ok=True)


def charged_by_run(deployment: Deployment, run_key: str) -> int:
    """Return the number of releases that a run has charged to its data sets."""
    entries = _entries(open_ledger(deployment))
    return sum(entry.run == run_key and entry.charged for entry in entries)


def killed_runs(deployment: Deployment) -> frozenset[str]:
    """Return the keys of runs that were killed, and whose plans the next run will give back."""
    return frozenset(key for key, _ in _killed(deployment.home / _RUNS))


def _killed(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the key and file of each run whose process has died, holding its lock meanwhile."""
    for file in sorted(folder.glob("*.run")):
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except FileNotFoundError:  # that run has just ended
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still_there(file, descriptor):
                yield os.read(descriptor, 4096).decode(), file
        except BlockingIOError:
            continue  # still running
        finally:
            os.close(descriptor)
