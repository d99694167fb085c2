"""Opening the database so that a transaction is alone where it must be, and durable after it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
)
from sqlalchemy.pool import NullPool

from dp_core.errors import BadInput, without_password
from dp_core.privacy.ledger.damage import RESTORE, LedgerDamaged, in_words
from dp_core.privacy.ledger.schema import CURRENT, migrate, version_of

WAIT_SECONDS = 120
_DRIVER = "postgresql+psycopg2"  # the one that is installed
_CREATION_LOCK = 0x636F6E66  # "conf": any number that other programs do not use


class Database:
    """A ledger's database, SQLite or PostgreSQL, at the current schema version."""

    def __init__(self, url: str) -> None:
        self._url = _checked(url)
        self.place = without_password(url)
        # NullPool: a connection belongs to one transaction, so a fork shares none
        self._engine = create_engine(self._url, poolclass=NullPool, connect_args=self._arguments())
        if self._url.get_backend_name() == "sqlite":
            _prepare_sqlite(self._engine)
        self._migrate()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Open a transaction that commits at the end of the block, durably.

        On SQLite it holds the write lock from its first moment (BEGIN IMMEDIATE): what it reads
        cannot change before it writes. On PostgreSQL the caller locks the budget's row.

        Raises:
            LedgerUnavailable: the database is not there, is full, or was busy for two minutes.
            LedgerDamaged: what is there is no whole ledger.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise in_words(error, self.place) from error
        except (NoResultFound, MultipleResultsFound) as error:  # a table that has one row always
            raise LedgerDamaged(
                "a table of it was emptied", where=f"privacy ledger {self.place}", fix=RESTORE
            ) from error

    @contextmanager
    def alone(self) -> Iterator[Connection]:
        """Open a transaction beside which no other of this kind runs: to create what is unique."""
        with self.transaction() as db:
            if db.dialect.name == "postgresql":
                db.execute(text("SELECT pg_advisory_xact_lock(:k)"), {"k": _CREATION_LOCK})
            yield db

    def _arguments(self) -> dict[str, Any]:
        if self._url.get_backend_name() == "sqlite":
            return {"timeout": WAIT_SECONDS}
        return {"connect_timeout": 10, "options": f"-c lock_timeout={WAIT_SECONDS}s"}

    def _migrate(self) -> None:
        with self.transaction() as db:
            if version_of(db) == CURRENT:
                return
        with self.alone() as db:
            migrate(db)


def _checked(url: str) -> URL:
    """Return the URL of a database that can hold a ledger, with the driver that is installed.

    Raises:
        BadInput: it is none. The cause is not kept: it may quote the URL, and with it a password.
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
    """Refuse a place that is not one and the same file for every process; make its folder.

    Raises:
        BadInput: in memory, or relative to wherever a command is started.
    """
    if name in (None, "", ":memory:"):
        raise BadInput("a ledger in memory forgets", where="CONFIDE_LEDGER", fix="Name a file.")
    file = Path(str(name))
    if not file.is_absolute():  # `file:` with options is refused with it
        raise BadInput(
            "a relative place is another ledger in every folder",
            where="CONFIDE_LEDGER",
            fix="Write the whole path, after four slashes: sqlite:////srv/confide/ledger.db.",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadInput(
            f"{file.parent} cannot be made ({os.strerror(error.errno or 0)})",
            where="CONFIDE_LEDGER",
            fix="Name a folder that you may write.",
        ) from None


def _prepare_sqlite(engine: Engine) -> None:
    """Take the write lock at BEGIN, and let no commit be forgotten by a power cut."""

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
