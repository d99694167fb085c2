"""Consistency of ledger, seeds and store, for example after a backup was restored.

Outputs in the store carry records of the releases that they descend from. Each record must agree
with a settled entry of the ledger. Otherwise the ledger is older than the store, and it would admit
releases as if the recorded ones had never been made.
"""

from __future__ import annotations

from collections.abc import Iterable

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Entry, Ledger, State
from dp_core.privacy.ledger.database import RESTORE
from dp_core.privacy.seed_store import SeedStore
from tasks.protocol import ReleaseRecord
from tasks.protocol.specs import STEPS
from tasks.results.inputs import read_result
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

IDENTITY = "store://ledger/identity"  # the object in which the store remembers its ledger


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
        raise BadInput(
            "the privacy ledger is missing: an empty one is in its place, but releases were made",
            where=f"privacy ledger {deployment.ledger_place}",
            fix=RESTORE,
        )


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
    held = (entry.dataset, entry.unit.value, entry.event.to_json(), entry.delta)
    if held != (record.dataset, record.unit, record.event, record.delta):
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
    for uri in (uri for step in STEPS for uri in store.outputs(step)):
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
