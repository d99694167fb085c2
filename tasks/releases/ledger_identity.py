"""One ledger for a deployment: seeds and store remember which, and no other is opened beside them.

A ledger file that was deleted, a database that was emptied, another one named by mistake: each
would begin at nothing, and the whole budget of people whose data was released already could be
spent again. The evidence that it was lies elsewhere: among the seeds, one for every release, and
in the store, whose results name the ledger's entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dp_core.errors import BadInput
from dp_core.privacy.seed_store import SeedStore
from tasks.runtime.deployment import Deployment

if TYPE_CHECKING:
    from dp_core.privacy.ledger import Ledger
    from tasks.storage import Store

MARK = "ledger/identity"  # where the store remembers its ledger


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
    from dp_core.privacy.ledger import Ledger

    ledger = Ledger.open(deployment.ledger)
    if not deployment.holds_seeds:  # a step that reads files from outside: it writes nothing
        if store is not None:
            confirm_store(store, ledger.identity())
        return ledger
    own = ledger.confirm_memory(SeedStore(deployment.seeds))
    if store is not None and not confirm_store(store, own):
        store.write(f"{store.root}/{MARK}", own.encode())
    return ledger


def confirm_store(store: Store, own: str) -> bool:
    """Return whether the store remembers this ledger; False if it remembers none yet.

    Raises:
        BadInput: it remembers another one.
    """
    from dp_core.privacy.ledger.database import RESTORE

    remembered = store.read(f"{store.root}/{MARK}")
    if remembered is None:
        return False
    if remembered.decode(errors="replace").strip() != own:
        raise BadInput(
            "the results in the store name the entries of another ledger",
            where=f"store {store.root}",
            fix=RESTORE,
        )
    return True
