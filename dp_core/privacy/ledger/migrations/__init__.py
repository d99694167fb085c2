"""Schema versions as alembic revisions: a ledger of any earlier version becomes one of today's.

`ledger_schema` holds the version as one number. Ledgers from before alembic have it too, and
releases from before alembic read it; alembic's own table follows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from dp_core.errors import BadInput

if TYPE_CHECKING:
    from alembic.config import Config

CURRENT = 3


def version_of(db: Connection) -> int:
    """Return the schema version of a database; 0 for an empty one."""
    if not inspect(db).has_table("ledger_schema"):
        return 0
    return int(db.execute(text("SELECT version FROM ledger_schema")).scalar_one())


def upgrade(db: Connection) -> None:
    """Bring the database to the current version, inside the caller's exclusive transaction.

    Raises:
        BadInput: a newer release of Confide made it.
    """
    from alembic import command

    version = version_of(db)
    if version > CURRENT:
        raise BadInput(
            f"its schema has version {version}, this release knows {CURRENT}",
            where="privacy ledger",
            fix="Use the newer release of Confide that made it.",
        )
    if version == CURRENT:  # another process was first
        return
    config = alembic_config(db)
    if version:  # a ledger from before alembic has no version in alembic's table
        command.stamp(config, str(version))
    command.upgrade(config, str(CURRENT))
    db.execute(text("DELETE FROM ledger_schema"))
    db.execute(text("INSERT INTO ledger_schema (version) VALUES (:v)"), {"v": CURRENT})


def alembic_config(db: Connection) -> Config:
    """Return how alembic runs the revisions: on this connection, in its transaction."""
    from alembic.config import Config

    config = Config(attributes={"connection": db})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
