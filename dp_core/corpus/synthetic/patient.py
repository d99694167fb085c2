"""The state of a made-up patient, the same through all notes about that patient."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dp_core.corpus.synthetic.conditions import CONDITIONS, Condition
from dp_core.corpus.synthetic.grammar import phrase, pick, pick_common
from dp_core.corpus.synthetic.lexicon import WORDS
from dp_core.corpus.synthetic.pharmacy import CLASSES, DRUGS, Drug

_FEMALE_ONLY, _MALE_ONLY = "breast cancer", "prostate cancer"
_MADE_UP_DRUG = 0.2


@dataclass(frozen=True)
class Medication:
    """A drug as this patient takes it."""

    drug: Drug
    strength: str
    frequency: str


@dataclass(frozen=True)
class Patient:
    """Who the notes are about; every field is drawn once."""

    female: bool
    age: int
    first_name: str
    surname: str
    physician: str
    conditions: tuple[Condition, ...]  # the first is what brings the patient in
    condition_names: tuple[str, ...]
    symptoms: tuple[str, ...]  # of the first two conditions
    findings: tuple[str, ...]
    medications: tuple[Medication, ...]
    abnormal_labs: frozenset[str]
    allergy: tuple[str, str] | None
    relative: str
    occupation: str
    facility: str
    heart_rate: int
    systolic: int


def surname(rng: Random) -> str:
    """Return one of some thousands of surnames."""
    return pick(rng, WORDS["surname starts"]) + pick(rng, WORDS["surname ends"])


def draw_patient(rng: Random) -> Patient:
    """Return a patient, drawn from the given coins alone."""
    female = rng.random() < 0.5
    conditions = _conditions(rng, female)
    main = conditions[:2]
    medications = [
        _medication(condition, rng) for condition in conditions for _ in range(rng.randint(1, 2))
    ]
    by_name = {m.drug.name: m for m in medications}
    return Patient(
        female=female,
        age=min(94, max(19, round(rng.gauss(63, 15)))),
        first_name=pick(rng, WORDS["female first names" if female else "male first names"]),
        surname=surname(rng),
        physician=surname(rng),
        conditions=conditions,
        condition_names=tuple(pick_common(rng, c.names) for c in conditions),
        symptoms=tuple(phrase(s, rng) for c in main for s in c.symptoms),
        findings=tuple(phrase(f, rng) for c in main for f in c.findings),
        medications=tuple(by_name.values()),
        abnormal_labs=frozenset(lab for c in main for lab in c.labs),
        allergy=(pick(rng, WORDS["allergies"]), pick(rng, WORDS["reactions"]))
        if rng.random() < 0.4
        else None,
        relative=pick(rng, WORDS["relatives"]),
        occupation=pick(rng, WORDS["occupations"]),
        facility=pick(rng, WORDS["facilities"]),
        heart_rate=round(rng.gauss(84, 14)),
        systolic=round(rng.gauss(130, 18)),
    )


def _conditions(rng: Random, female: bool) -> tuple[Condition, ...]:
    """Return two to five diseases; common ones (early in the table) more often."""
    wrong = _MALE_ONLY if female else _FEMALE_ONLY
    wanted = rng.randint(2, 5)
    chosen: dict[str, Condition] = {}
    while len(chosen) < wanted:
        condition = pick_common(rng, CONDITIONS)
        if condition.names[0] != wrong:
            chosen[condition.names[0]] = condition
    return tuple(chosen.values())


def _medication(condition: Condition, rng: Random) -> Medication:
    if condition.classes and rng.random() < _MADE_UP_DRUG:
        name = pick_common(rng, CLASSES[pick_common(rng, condition.classes)])
    else:
        name = pick_common(rng, condition.drugs)
    drug = DRUGS[name]
    return Medication(drug, pick_common(rng, drug.strengths), pick_common(rng, drug.frequencies))
