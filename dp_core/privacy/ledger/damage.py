"""What a database's failure means: it is away, it is full, or it is damaged.

A ledger that is away or full may answer later, and nothing is lost by asking again. One that is
damaged answers no better tomorrow: it is restored from a backup, or nobody knows what was spent.
"""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError, OperationalError

from dp_core.errors import BadInput, ConfideError

RESTORE = (
    "Restore ledger and seeds from one backup (docs/operate.md). Do not begin an empty ledger: "
    "what was released stays spent."
)
_SQLITE_FULL = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_SHMSIZE,  # no room for the index of the write-ahead log
}
_SQLITE_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_POSTGRES_FULL = {"53100"}
# data or an index that cannot be read; a table or a column that is not there, or there already
_POSTGRES_DAMAGED = {"XX001", "XX002", "42P01", "42703", "42701"}
_SQLITE_SAYS = ("no such table", "no such column", "duplicate column")


class LedgerUnavailable(ConfideError):
    """The database did not answer. Trying again may help: nothing was reserved, or it is found."""


class LedgerDamaged(BadInput):
    """What is there is no whole ledger, and trying again does not make it one."""


def in_words(error: DBAPIError, place: str) -> Exception:
    """Return what to raise for a database's error: named, or as it is where it is a fault of ours.

    Args:
        error: as SQLAlchemy raised it.
        place: where the ledger is, without any password.
    """
    where = f"privacy ledger {place}"
    code = getattr(error.orig, "pgcode", None)
    number = getattr(error.orig, "sqlite_errorcode", 0)
    if code in _POSTGRES_FULL or number in _SQLITE_FULL or number & 0xFF in _SQLITE_FULL:
        return LedgerUnavailable(
            "the disk is full",
            where=where,
            fix="Make room where the ledger is, and try again: nothing is charged twice.",
        )
    altered = str(error.orig).startswith(_SQLITE_SAYS)
    if code in _POSTGRES_DAMAGED or number & 0xFF in _SQLITE_DAMAGED or altered:
        return LedgerDamaged("it is damaged, or no ledger at all", where=where, fix=RESTORE)
    if isinstance(error, OperationalError):
        return LedgerUnavailable(
            f"the database does not answer ({type(error.orig).__name__})",
            where=where,
            fix="Check that it runs and can be reached, then retry: nothing is charged twice.",
        )
    return error
