"""The deployment's privacy ledger: its identity, and the registration of a run's data sets.

Seeds and store remember their ledger, and no other ledger is opened with them. A deleted ledger
file, an emptied database or a wrong URL would give an empty ledger, and the budget of people whose
data was already released could be spent again. Two places prove earlier releases: the seed store,
with one seed per release, and the store, whose results name the ledger's entries.
"""

from __future__ import annotations

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Budget, Ledger
from dp_core.privacy.ledger.database import RESTORE
from dp_core.privacy.seed_store import SeedStore
from tasks.context import StepContext
from tasks.protocol.settings import MADE_UP
from tasks.releases.restored_state import IDENTITY, refuse_lost_ledger
from tasks.runtime.deployment import Deployment
from tasks.storage import Store


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
    if not deployment.holds_seeds:  # a step that reads files from outside never writes
        if store is not None:
            confirm_store(store, ledger.identity())
        return ledger
    identity = ledger.confirm_memory(SeedStore(deployment.seeds))
    if store is not None and not confirm_store(store, identity):
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
        raise BadInput(
            "the results in the store name the entries of another ledger",
            where=f"store {store.root}",
            fix=RESTORE,
        )
    return True


def ledger_for(context: StepContext, dataset: str) -> Ledger:
    """Return the ledger, after a check that the data set's registration agrees with the run.

    A run registers only the project's made-up notes. The operator registers every other data set.

    Raises:
        BadInput: the data set is not registered; its registration as public or private contradicts
            the run; or seeds and store remember another ledger.
    """
    ledger = refuse_unregistered(context, dataset)
    if dataset == MADE_UP and dataset not in ledger.datasets():
        ledger.register_made_up(dataset)
    return ledger


def refuse_unregistered(context: StepContext, dataset: str) -> Ledger:
    """Return the ledger if the data set's registration agrees with the run, without writing.

    The project's made-up notes may be registered later, by a step with write access.

    Raises:
        BadInput: as `ledger_for`.
    """
    ledger = open_ledger(context.deployment, context.store)
    if dataset != MADE_UP:
        refuse_other_standing(ledger.datasets().get(dataset), dataset, made_up=context.made_up)
    return ledger


def refuse_other_standing(budget: Budget | None, dataset: str, *, made_up: bool) -> None:
    """Refuse a data set whose registration as private or public contradicts the run.

    Raises:
        BadInput: the message names the command for the operator.
    """
    if dataset == MADE_UP and budget is not None:
        return  # tasks/releases/declarations.py reads no private file under that name
    if budget is None and made_up:
        what = f"the data set {dataset} is not registered as public, but this run calls it public"
        fix = f"If it is, the operator says so: confide ledger register {dataset} --public"
    elif budget is None:
        what = f"the data set {dataset} has no privacy budget yet"
        fix = f"Set one: confide ledger register {dataset} --unit … --epsilon … --delta …"
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
