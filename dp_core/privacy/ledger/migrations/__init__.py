"""Schema versions as alembic revisions. A ledger of a known version is upgraded when it is opened.

`ledger_schema` holds the version as one number, which every release of Confide can read. Alembic's
table follows it. Version 4 is the oldest known version.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from dp_core.errors import BadInput

if TYPE_CHECKING:
    from alembic.config import Config

OLDEST, CURRENT = 4, 4


def version_of(db: Connection) -> int:
    """Return the schema version of a database; 0 for an empty one."""
    if not inspect(db).has_table("ledger_schema"):
        return 0
    return int(db.execute(text("SELECT version FROM ledger_schema")).scalar_one())


def upgrade(db: Connection) -> None:
    """Bring the database to the current version, inside the caller's exclusive transaction.

    Raises:
        BadInput: the version is not known.
    """
    from alembic import command

    version = version_of(db)
    if version == CURRENT:  # another process was first
        return
    if version and not OLDEST <= version <= CURRENT:
        release = "newer" if version > CURRENT else "older"
        raise BadInput(
            f"its schema has version {version}, this release reads {OLDEST} to {CURRENT}",
            where="privacy ledger",
            fix=f"Use the {release} release of Confide that made it.",
        )
    command.upgrade(alembic_config(db), str(CURRENT))
    db.execute(text("DELETE FROM ledger_schema"))
    db.execute(text("INSERT INTO ledger_schema (version) VALUES (:v)"), {"v": CURRENT})


def alembic_config(db: Connection) -> Config:
    """Return alembic's configuration: the revisions, run on this connection in its transaction."""
    from alembic.config import Config

    config = Config(attributes={"connection": db})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
