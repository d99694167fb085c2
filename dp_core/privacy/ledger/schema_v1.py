"""The tables as version 1 made them, written out: an old ledger is known by what it was."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Double,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

METADATA = MetaData()

Table(
    "ledger_schema",
    METADATA,
    Column("version", Integer, nullable=False),
)

Table(
    "budgets",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("unit", String(20)),
    Column("relation", String(40)),
    Column("epsilon", Double),
    Column("delta", Double),
    Column("renyi_order", Double, nullable=False),
    Column("opened_at", String(40), nullable=False),
)

Table(
    "datasets",
    METADATA,
    Column("name", String(200), primary_key=True),
    Column("budget_id", ForeignKey("budgets.id"), nullable=False),
    Column("registered_at", String(40), nullable=False),
)

Table(
    "entries",
    METADATA,
    Column("number", Integer, primary_key=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("budget_id", ForeignKey("budgets.id"), nullable=False, index=True),
    Column("dataset", ForeignKey("datasets.name"), nullable=False),
    Column("unit", String(20), nullable=False),
    Column("event", Text, nullable=False),
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
    UniqueConstraint("dataset", "spec_hash", "attempt"),
)
