"""Version 3: an entry holds its release's digest; a ledger has an identity, and knows sources."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """Add the digest, the tables of sources, and the identity, drawn once."""
    digest = sa.Column("released_hash", sa.String(128), nullable=False, server_default="")
    op.add_column("entries", digest)
    identity = op.create_table("ledger_identity", sa.Column("id", sa.String(32), nullable=False))
    op.create_table(
        "public_sources",
        sa.Column("digest", sa.String(64), primary_key=True),  # keyed, of the content
        sa.Column("label", sa.String(200), nullable=False),  # for people: the file's own name
        sa.Column("declared_at", sa.String(40), nullable=False),
        sa.Column("known_private", sa.Boolean, nullable=False),
    )
    op.create_table(
        "private_sources",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("dataset", sa.String(200), sa.ForeignKey("datasets.name"), primary_key=True),
        sa.Column("read_at", sa.String(40), nullable=False),  # for the first time
    )
    op.bulk_insert(identity, [{"id": secrets.token_hex(16)}])
