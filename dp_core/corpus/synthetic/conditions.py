"""Diseases of the made-up patients, each with what goes with it (`tables/conditions.txt`).

They are why the words of a note predict one another. Symptoms, drugs, tests and findings of a
patient come from the patient's own diseases, so a model that has read many notes knows more than
one that has not.
"""

from __future__ import annotations

from dataclasses import dataclass

from dp_core.corpus.synthetic.tables import read_table


@dataclass(frozen=True)
class Condition:
    """A disease; every field lists alternatives.

    Args:
        names: how it is written out and abbreviated.
        symptoms: templates.
        drugs: generic names; `classes` name the made-up ones that are also given.
        classes: endings of drug names.
        tests: laboratory tests and other examinations, without values.
        labs: keys of `lexicon.LABS` that are abnormal.
        findings: templates of what imaging or examination shows.
        procedures: templates of operations and other treatments without a dose.
    """

    names: tuple[str, ...]
    symptoms: tuple[str, ...]
    drugs: tuple[str, ...]
    classes: tuple[str, ...]
    tests: tuple[str, ...]
    labs: tuple[str, ...]
    findings: tuple[str, ...]
    procedures: tuple[str, ...]


CONDITIONS: tuple[Condition, ...] = tuple(
    Condition(**block.fields) for block in read_table("conditions")
)
