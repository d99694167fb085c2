"""Opening the database so that a transaction is alone where it must be, and durable after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import NullPool

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.ledger.schema import CURRENT, migrate, version_of

WAIT_SECONDS = 120
_CREATION_LOCK = 0x636F6E66  # "conf": any number that other programs do not use


class LedgerUnavailable(ConfideError):
    """The database did not answer. Trying again may help: nothing was reserved, or it is found."""


class Database:
    """A ledger's database, SQLite or PostgreSQL, at the current schema version."""

    def __init__(self, url: str) -> None:
        self._url = _checked(url)
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
            LedgerUnavailable: the database is not there, or was busy for two minutes.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except OperationalError as error:
            raise LedgerUnavailable(
                f"the database does not answer ({type(error.orig).__name__})",
                where=f"privacy ledger {self._url.render_as_string(hide_password=True)}",
                fix="Check that it runs and can be reached, then retry: nothing is charged twice.",
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
    try:
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, DBAPIError):
        # `from None`: the cause may quote the URL, and with it a password
        raise BadInput(
            "not a database URL", where="CONFIDE_LEDGER", fix="Example: sqlite:///ledger.db"
        ) from None
    if backend not in ("sqlite", "postgresql"):
        raise BadInput(
            f"a ledger lives on SQLite or PostgreSQL, not on {backend}", where="CONFIDE_LEDGER"
        )
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise BadInput("a ledger in memory forgets", where="CONFIDE_LEDGER", fix="Name a file.")
        Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    return parsed


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
