"""The deployment's privacy ledger: which one it is, and which data sets a run may use it for.

Seeds and store remember their ledger, and no other is opened beside them. A ledger file that was
deleted, a database that was emptied, another one named by mistake: each would begin at nothing, and
the whole budget of people whose data was released already could be spent again. The evidence that
it was lies elsewhere: among the seeds, one for every release, and in the store, whose results name
the ledger's entries.
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
        deployment: whose ledger and seeds.
        store: where results are written that name its entries; None for a command that only asks.

    Raises:
        BadInput: it is another ledger than the seeds or the store remember, or has forgotten
            releases; or it is damaged.
        LedgerUnavailable: the database does not answer; may be retried.
    """
    ledger = Ledger.open(deployment.ledger)
    refuse_lost_ledger(ledger, deployment)
    if not deployment.holds_seeds:  # a step that reads files from outside: it writes nothing
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
        BadInput: it remembers another one.
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
    """Return the ledger, in which the data set is registered as what the run says it is.

    A run registers nothing but the project's own notes: what is public, the operator says.

    Raises:
        BadInput: it is not registered; or registered as public and called private, or the other
            way round; or the ledger is not the one that seeds and store remember.
    """
    ledger = refuse_unregistered(context, dataset)
    if dataset == MADE_UP and dataset not in ledger.datasets():
        ledger.register_made_up(dataset)
    return ledger


def refuse_unregistered(context: StepContext, dataset: str) -> Ledger:
    """Check that the data set is registered as what the run says it is; only read the ledger.

    The project's own notes may be registered later, by who may write.

    Raises:
        BadInput: as `ledger_for`.
    """
    ledger = open_ledger(context.deployment, context.store)
    if dataset != MADE_UP:
        refuse_other_standing(ledger.datasets().get(dataset), dataset, made_up=context.made_up)
    return ledger


def refuse_other_standing(budget: Budget | None, dataset: str, *, made_up: bool) -> None:
    """Refuse a data set that is not registered as what a run says it is: private or public.

    Raises:
        BadInput: says which command the operator runs.
    """
    if dataset == MADE_UP and budget is not None:
        return  # no file is ever read under that name as private: tasks/releases/declarations.py
    if budget is None and made_up:
        what = f"nobody has registered the data set {dataset} as public, as this run calls it"
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
        fix = "Give the private data set a name of its own."
    else:
        return
    raise BadInput(what, where="ledger", fix=fix)
