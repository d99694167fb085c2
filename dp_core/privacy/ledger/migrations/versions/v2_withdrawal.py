"""Version 2: a planned release whose step never began can be withdrawn (state `withdrawn`)."""

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Add when an entry was withdrawn."""
    column = sa.Column("withdrawn_at", sa.String(40), nullable=False, server_default="")
    op.add_column("entries", column)
