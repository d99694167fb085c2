"""Diseases of the made-up patients, each with what goes with it (`tables/conditions.txt`).

They are why the words of a note predict one another. Symptoms, drugs, tests and findings of a patient come from the patient's own
diseases, so a model that has read many notes knows more than one that has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Condition:
    """A disease; every field but the names lists alternatives.

    Args:
        names: how it is written out and abbreviated.
        symptoms: templates.
        drugs: generic names; `classes` name the made-up ones that are also given.
        tests: laboratory tests and other examinations, without values.
        labs: keys of `lexicon.LABS` that are abnormal.
        findings: templates of what imaging or examination shows.
        procedures: operations and other treatments without a dose.
    """

    names: tuple[str, ...]
    symptoms: tuple[str, ...]
    drugs: tuple[str, ...]
    classes: tuple[str, ...]
    tests: tuple[str, ...]
    labs: tuple[str, ...]
    findings: tuple[str, ...]
    procedures: tuple[str, ...]


def _condition(table: str) -> Condition:
    """Read one block of the table: one field a line, alternatives separated by `;`."""
    fields = [
        tuple(item.strip() for item in line.partition(":")[2].split(";") if item.strip())
        for line in table.strip().splitlines()
    ]
    return Condition(*fields)


_TABLE = (Path(__file__).parent / "tables" / "conditions.txt").read_text(encoding="utf-8")
CONDITIONS: tuple[Condition, ...] = tuple(_condition(b) for b in _TABLE.strip().split("\n\n"))
