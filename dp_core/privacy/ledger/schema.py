"""The tables, and how an older ledger becomes a newer one.

One number, in the table `ledger_schema`, tells a ledger's version. `MIGRATIONS[v]` takes a
database from version v to v + 1 in one transaction; a database from a newer release is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    inspect,
    select,
    text,
    update,
)

from dp_core.errors import BadInput
from dp_core.privacy.ledger import schema_v1

METADATA = MetaData()

VERSION = Table(
    "ledger_schema",
    METADATA,
    Column("version", Integer, nullable=False),
)

IDENTITY = Table(
    "ledger_identity",
    METADATA,
    Column("id", String(32), nullable=False),  # one row; random, made with the ledger
)

BUDGETS = Table(
    "budgets",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("unit", String(20)),  # NULL, like the next three: made-up data
    Column("relation", String(40)),
    Column("epsilon", Double),
    Column("delta", Double),
    Column("renyi_order", Double, nullable=False),
    Column("opened_at", String(40), nullable=False),
)

DATASETS = Table(
    "datasets",
    METADATA,
    Column("name", String(200), primary_key=True),
    Column("budget_id", ForeignKey("budgets.id"), nullable=False),
    Column("registered_at", String(40), nullable=False),
)

ENTRIES = Table(
    "entries",
    METADATA,
    Column("number", Integer, primary_key=True),  # the order of reservation
    Column("id", String(32), nullable=False, unique=True),
    Column("budget_id", ForeignKey("budgets.id"), nullable=False, index=True),
    Column("dataset", ForeignKey("datasets.name"), nullable=False),
    Column("unit", String(20), nullable=False),
    Column("event", Text, nullable=False),  # JSON; the record from which every ε is computed
    Column("delta", Double, nullable=False),
    Column("spec_hash", String(128), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("state", String(20), nullable=False),
    Column("plan_key", String(300), nullable=False),
    Column("whole_plan", Boolean, nullable=False),
    Column("run", String(300), nullable=False),
    Column("seed_key", String(128), nullable=False),
    Column("seed_hash", String(200), nullable=False),
    Column("manifest_hash", String(128), nullable=False),
    Column("known_seed", Boolean, nullable=False),
    Column("reserved_at", String(40), nullable=False),
    Column("settled_at", String(40), nullable=False),
    Column("withdrawn_at", String(40), nullable=False, server_default=""),
    Column("released_hash", String(128), nullable=False, server_default=""),
    UniqueConstraint("dataset", "spec_hash", "attempt"),
)

PUBLIC_SOURCES = Table(
    "public_sources",
    METADATA,
    Column("digest", String(64), primary_key=True),  # keyed, of the content
    Column("label", String(200), nullable=False),  # for people: the file's own name
    Column("declared_at", String(40), nullable=False),
    Column("known_private", Boolean, nullable=False),  # declared though it had been read as private
)

PRIVATE_SOURCES = Table(
    "private_sources",
    METADATA,
    Column("digest", String(64), primary_key=True),
    Column("dataset", ForeignKey("datasets.name"), primary_key=True),
    Column("read_at", String(40), nullable=False),  # for the first time
)


def _version_1(db: Connection) -> None:
    schema_v1.METADATA.create_all(db)


def _version_2(db: Connection) -> None:
    """A planned release whose step never began can be withdrawn (state `withdrawn`)."""
    db.execute(text("ALTER TABLE entries ADD COLUMN withdrawn_at VARCHAR(40) NOT NULL DEFAULT ''"))


def _version_3(db: Connection) -> None:
    """An entry holds the digest of its release; a ledger has an identity, and knows sources."""
    for command in (
        "ALTER TABLE entries ADD COLUMN released_hash VARCHAR(128) NOT NULL DEFAULT ''",
        "CREATE TABLE ledger_identity (id VARCHAR(32) NOT NULL)",
        """CREATE TABLE public_sources (
            digest VARCHAR(64) NOT NULL PRIMARY KEY,
            label VARCHAR(200) NOT NULL,
            declared_at VARCHAR(40) NOT NULL,
            known_private BOOLEAN NOT NULL
        )""",
        """CREATE TABLE private_sources (
            digest VARCHAR(64) NOT NULL,
            dataset VARCHAR(200) NOT NULL REFERENCES datasets (name),
            read_at VARCHAR(40) NOT NULL,
            PRIMARY KEY (digest, dataset)
        )""",
    ):
        db.execute(text(command))
    drawn = secrets.token_hex(16)
    db.execute(text("INSERT INTO ledger_identity (id) VALUES (:id)"), {"id": drawn})


MIGRATIONS: tuple[Callable[[Connection], None], ...] = (_version_1, _version_2, _version_3)
CURRENT = len(MIGRATIONS)


def version_of(db: Connection) -> int:
    """Return the schema version of a database; 0 for an empty one."""
    if not inspect(db).has_table(VERSION.name):
        return 0
    return int(db.execute(select(VERSION.c.version)).scalar_one())


def identity_of(db: Connection) -> str:
    """Return what no other ledger has: by it the seeds and the store know the one they belong to.

    A copy of a ledger has the identity of the original.
    """
    return str(db.execute(select(IDENTITY.c.id)).scalar_one())


def migrate(db: Connection) -> None:
    """Bring the database to the current version, inside the caller's exclusive transaction.

    Raises:
        BadInput: a newer release of Confide made it.
    """
    found = version_of(db)
    if found > CURRENT:
        raise BadInput(
            f"its schema has version {found}, this release knows {CURRENT}",
            where="privacy ledger",
            fix="Use the newer release of Confide that made it.",
        )
    for step in MIGRATIONS[found:]:
        step(db)
    if found == 0:
        db.execute(VERSION.insert().values(version=CURRENT))
    elif found < CURRENT:
        db.execute(update(VERSION).values(version=CURRENT))
