"""The ledger's database: durable transactions, exclusive where they create unique rows.

A database that is unreachable or full may answer later, and a retry is safe. A damaged ledger must
be restored from a backup, because the spent budget cannot be computed without its entries.
"""

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    MultipleResultsFound,
    NoResultFound,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from dp_core.errors import BadInput, ConfideError, without_password

WAIT_SECONDS = 120
_DRIVER = "postgresql+psycopg2"  # the installed driver
_CREATION_LOCK = 0x636F6E66  # "conf": any number that other programs do not use

RESTORE = (
    "Restore ledger and seeds from one backup (docs/operate.md). Do not begin an empty ledger: "
    "the budget of earlier releases stays spent."
)
_SQLITE_FULL = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_SHMSIZE,  # no room for the index of the write-ahead log
}
_SQLITE_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_POSTGRES_FULL = {"53100"}
# unreadable data or index; a missing or duplicate table or column
_POSTGRES_DAMAGED = {"XX001", "XX002", "42P01", "42703", "42701", "42P07"}
_SQLITE_DAMAGE = re.compile(r"no such (table|column)|duplicate column|table \w+ already exists")


class LedgerUnavailable(ConfideError):
    """The database did not answer. A retry is safe: a reservation is never charged twice."""


class LedgerDamaged(BadInput):
    """The database does not hold a complete ledger. A retry does not help."""


def as_named(error: DBAPIError, location: str) -> Exception:
    """Return the exception to raise for a database error; programming errors stay unchanged.

    Args:
        error: as SQLAlchemy raised it.
        location: the ledger's URL without its password.
    """
    where = f"privacy ledger {location}"
    code = getattr(error.orig, "pgcode", None)
    number = getattr(error.orig, "sqlite_errorcode", 0)
    if code in _POSTGRES_FULL or number in _SQLITE_FULL or number & 0xFF in _SQLITE_FULL:
        return LedgerUnavailable(
            "the disk is full",
            where=where,
            fix="Make room where the ledger is, and try again: nothing is charged twice.",
        )
    altered = number and _SQLITE_DAMAGE.match(str(error.orig))
    if code in _POSTGRES_DAMAGED or number & 0xFF in _SQLITE_DAMAGED or altered:
        return _damaged(location)
    if isinstance(error, OperationalError):
        return LedgerUnavailable(
            f"the database does not answer ({type(error.orig).__name__})",
            where=where,
            fix="Check that it runs and can be reached, then retry: nothing is charged twice.",
        )
    return error


def _damaged(location: str) -> LedgerDamaged:
    what, where = "it is damaged, or no ledger at all", f"privacy ledger {location}"
    return LedgerDamaged(what, where=where, fix=RESTORE)


class Database:
    """A ledger's database, SQLite or PostgreSQL."""

    def __init__(self, url: str) -> None:
        self._url = _checked(url)
        self.location = without_password(url)
        # NullPool: a connection belongs to one transaction, so a fork shares none
        sqlite = self._url.get_backend_name() == "sqlite"
        patience: dict[str, Any] = {"timeout": WAIT_SECONDS}
        if not sqlite:
            patience = {"connect_timeout": 10, "options": f"-c lock_timeout={WAIT_SECONDS}s"}
        self._engine = create_engine(self._url, poolclass=NullPool, connect_args=patience)
        if sqlite:
            _prepare_sqlite(self._engine)
            self._refuse_damaged_pages()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open a transaction that commits at the end of the block, durably.

        On SQLite the transaction holds the write lock from its beginning (BEGIN IMMEDIATE), so
        that rows cannot change between its reads and its writes. On PostgreSQL the caller locks
        the budget's row.

        Raises:
            LedgerUnavailable: the database is unreachable or full, or was busy for two minutes.
            LedgerDamaged: the database does not hold a complete ledger.
        """
        try:
            # callers read the returned objects after the transaction, so they must not expire
            with Session(self._engine, expire_on_commit=False) as db, db.begin():
                yield db
        except DBAPIError as error:
            raise as_named(error, self.location) from error
        except (NoResultFound, MultipleResultsFound) as error:  # a table that always has one row
            raise LedgerDamaged(
                "a table of it was emptied", where=f"privacy ledger {self.location}", fix=RESTORE
            ) from error

    @contextmanager
    def alone(self) -> Iterator[Session]:
        """Open an exclusive transaction, for the creation of unique rows."""
        with self.transaction() as db:
            if db.get_bind().dialect.name == "postgresql":
                db.execute(text("SELECT pg_advisory_xact_lock(:k)"), {"k": _CREATION_LOCK})
            yield db

    def _refuse_damaged_pages(self) -> None:
        """Refuse a file with damaged database pages.

        SQLite reports a damaged page only when a query meets it. The check reads the whole file:
        about 20 ms for 10,000 entries.

        Raises:
            LedgerDamaged: a page is damaged.
        """
        with self.transaction() as db:
            fault = db.execute(text("PRAGMA quick_check(1)")).scalar_one()
        if fault != "ok":
            raise _damaged(self.location)


def _checked(url: str) -> URL:
    """Return the URL of a database that can hold a ledger, with the driver that is installed.

    Raises:
        BadInput: it is not a valid URL. The cause is dropped, because it may quote a password.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername=_DRIVER)
        backend = parsed.get_backend_name()
        parsed.get_dialect().import_dbapi()
    except ImportError:
        raise BadInput(
            f"the driver of {parsed.drivername} is not installed",
            where="CONFIDE_LEDGER",
            fix="Write postgresql://<USER>:<PASSWORD>@<HOST>/<DATABASE>.",
        ) from None
    except (ArgumentError, NoSuchModuleError, DBAPIError, ValueError):
        raise BadInput(
            "not a database URL",
            where="CONFIDE_LEDGER",
            fix="Examples: sqlite:////srv/confide/ledger.db, "
            "postgresql://<USER>:<PASSWORD>@<HOST>/<DATABASE>.",
        ) from None
    if backend not in ("sqlite", "postgresql"):
        raise BadInput(
            f"a ledger lives on SQLite or PostgreSQL, not on {backend}", where="CONFIDE_LEDGER"
        )
    if backend == "sqlite":
        _check_file(parsed.database)
    return parsed


def _check_file(name: str | None) -> None:
    """Refuse a database that is not the same file for every process; create the file (mode 0600).

    Raises:
        BadInput: the database is in memory, has a relative path, or cannot be created.
    """
    if name in (None, "", ":memory:"):
        raise BadInput("a ledger in memory forgets", where="CONFIDE_LEDGER", fix="Name a file.")
    file = Path(str(name))
    if not file.is_absolute():  # this also refuses `file:` URLs with options
        raise BadInput(
            "a relative place is another ledger in every folder",
            where="CONFIDE_LEDGER",
            fix="Write the whole path, after four slashes: sqlite:////srv/confide/ledger.db.",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):  # SQLite would create it with this process's umask
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadInput(
            f"{file} cannot be made ({os.strerror(error.errno or 0)})",
            where="CONFIDE_LEDGER",
            fix="Name a file in a folder that this user may write.",
        ) from None


def _prepare_sqlite(engine: Engine) -> None:
    """Take the write lock at BEGIN, and make every commit survive a power cut."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver would delay BEGIN until the first write
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")  # NORMAL may lose the last commits in WAL
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
