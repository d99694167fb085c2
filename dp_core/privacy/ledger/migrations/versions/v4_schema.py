"""Version 4, the oldest that is known: budgets, entries, sources and the ledger's identity."""

import secrets

import sqlalchemy as sa
from alembic import op

revision = "4"
down_revision = None


def upgrade() -> None:
    """Create the tables, and draw the identity."""
    op.create_table("ledger_schema", sa.Column("version", sa.Integer, nullable=False))
    op.create_table(
        "budgets",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        sa.Column("unit", sa.String(20)),  # NULL, like the next three: made-up data
        sa.Column("relation", sa.String(40)),
        sa.Column("epsilon", sa.Double),
        sa.Column("delta", sa.Double),
        sa.Column("renyi_order", sa.Double, nullable=False),
        sa.Column("opened_at", sa.String(40), nullable=False),
        sa.Column("closed_for", sa.String(310), nullable=False),  # a group of entries, or empty
    )
    op.create_table(
        "datasets",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("budget_id", sa.Integer, sa.ForeignKey("budgets.id"), nullable=False),
        sa.Column("registered_at", sa.String(40), nullable=False),
    )
    op.create_table(
        "entries",
        sa.Column("number", sa.Integer, primary_key=True),  # the order of reservation
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("budget_id", sa.Integer, sa.ForeignKey("budgets.id"), nullable=False, index=True),
        sa.Column("dataset", sa.String(200), sa.ForeignKey("datasets.name"), nullable=False),
        sa.Column("unit", sa.String(20), nullable=False),
        sa.Column("event", sa.Text, nullable=False),  # JSON, from which every ε is computed
        sa.Column("delta", sa.Double, nullable=False),
        sa.Column("spec_hash", sa.String(128), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("plan_key", sa.String(300), nullable=False),
        sa.Column("whole_plan", sa.Boolean, nullable=False),
        sa.Column("run", sa.String(300), nullable=False),
        sa.Column("seed_key", sa.String(128), nullable=False),
        sa.Column("seed_hash", sa.String(200), nullable=False),
        sa.Column("manifest_hash", sa.String(128), nullable=False),
        sa.Column("known_seed", sa.Boolean, nullable=False),
        sa.Column("reserved_at", sa.String(40), nullable=False),
        sa.Column("settled_at", sa.String(40), nullable=False),
        sa.Column("withdrawn_at", sa.String(40), nullable=False),
        sa.Column("released_hash", sa.String(128), nullable=False),
        sa.UniqueConstraint("dataset", "spec_hash", "attempt"),
    )
    op.create_table(
        "public_sources",
        sa.Column("digest", sa.String(64), primary_key=True),  # keyed, of the content
        sa.Column("label", sa.String(200), nullable=False),  # the file's name, for people
        sa.Column("declared_at", sa.String(40), nullable=False),
        sa.Column("known_private", sa.Boolean, nullable=False),
    )
    op.create_table(
        "private_sources",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("dataset", sa.String(200), sa.ForeignKey("datasets.name"), primary_key=True),
        sa.Column("read_at", sa.String(40), nullable=False),  # for the first time
    )
    identity = op.create_table("ledger_identity", sa.Column("id", sa.String(32), nullable=False))
    op.bulk_insert(identity, [{"id": secrets.token_hex(16)}])
