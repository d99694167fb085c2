"""The integrity of a ledger: every row is there and can be read, and its seeds are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, Row, Table, select, text

from dp_core.errors import BadInput
from dp_core.privacy.ledger import rows
from dp_core.privacy.ledger.schema import BUDGETS, ENTRIES, identity_of
from dp_core.privacy.seed_store import SeedStore


def faults(db: Connection, seeds: SeedStore) -> Iterator[str]:
    """Look through the whole ledger; say what is wrong with it, a line each.

    Args:
        db: inside a transaction.
        seeds: the operator's store; a seed must be the one that its entry was bound to.
    """
    identity_of(db)
    if db.dialect.name == "sqlite":  # PostgreSQL keeps its pages and references itself
        found = db.execute(text("PRAGMA integrity_check")).scalars().all()
        yield from (f"the file: {line.splitlines()[0]}" for line in found if line != "ok")
        broken = db.execute(text("PRAGMA foreign_key_check")).all()
        yield from (f"a row of {row[0]} names a row of {row[2]} that is gone" for row in broken)
        yield from _gaps(db)
    readers: tuple[tuple[Table, Callable[[Row[Any]], object]], ...] = (
        (BUDGETS, rows.as_budget),
        (ENTRIES, rows.as_entry),
    )
    for table, read in readers:
        for row in db.execute(select(table)):
            try:
                read(row)
            except BadInput as error:
                yield f"{error.where}: {error.what}"
    drawn = seeds.drawn()
    for entry, key, bound in db.execute(
        select(ENTRIES.c.id, ENTRIES.c.seed_key, ENTRIES.c.seed_hash).where(
            ENTRIES.c.seed_hash != ""
        )
    ):
        if key in drawn:  # a lost seed is no fault of the ledger's
            yield from _seed(seeds, key, bound, f"entry {entry}")


def _gaps(db: Connection) -> Iterator[str]:
    """Say whether entries are gone: no row is ever deleted, and SQLite numbers them in sequence."""
    numbers = db.execute(select(ENTRIES.c.number)).scalars().all()
    if numbers and len(numbers) != max(numbers):
        yield f"{max(numbers) - len(numbers)} entries are gone"


def _seed(seeds: SeedStore, key: str, bound: str, entry: str) -> Iterator[str]:
    try:
        found = seeds.get(key).salted_hash()
    except BadInput as error:
        yield f"the seed of {entry}: {error.what}"
        return
    if found != bound:
        yield f"the seed of {entry} is not the one that it was bound to"
