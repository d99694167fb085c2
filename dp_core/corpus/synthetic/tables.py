"""Reads the tables of words and templates that the made-up text is made of (`tables/*.txt`).

A table is blocks between blank lines. A line is `= title`, `- template`, or `field: a; b; c`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Block:
    """One block of a table: its title, its templates, and its fields, each a list."""

    title: str
    templates: tuple[str, ...]
    fields: dict[str, tuple[str, ...]]


def read_table(name: str) -> list[Block]:
    """Return the blocks of the table `name`."""
    text = (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    return [_block(block.splitlines()) for block in text.strip().split("\n\n")]


def _block(lines: list[str]) -> Block:
    pairs = [line.partition(": ") for line in lines if not line.startswith(("= ", "- "))]
    return Block(
        title="".join(line[2:] for line in lines if line.startswith("= ")),
        templates=tuple(line[2:] for line in lines if line.startswith("- ")),
        fields={name: tuple(item.strip() for item in items.split(";")) for name, _, items in pairs},
    )
