"""Diseases of the made-up patients, each with what goes with it (`tables/conditions.txt`).

They are why the words of a note predict one another. Symptoms, drugs, tests and findings of a
patient come from the patient's own diseases, so a model that has read many notes knows more than
one that has not.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tasks.demo_data.language import WORDS, Piece, phrase, pick, pick_common, read_table


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


_PER_CLASS = 14
_STRENGTHS = (1, 2, 2.5, 4, 5, 6.25, 8, 10, 12.5, 15, 20, 25, 30, 40, 50, 60, 75, 80)
_LARGE = (100, 125, 150, 200, 250, 300, 400, 500, 600, 750, 800, 1000)
_FREQUENCIES = (
    "daily",
    "twice daily",
    "three times daily",
    "every 8 hours",
    "every 6 hours as needed",
    "every 12 hours",
    "at bedtime",
    "every morning",
    "weekly",
)
_INDICATIONS = {"every 6 hours as needed": ("for pain", "for nausea", "for anxiety", "for fever")}
_ROUTES = {
    **dict.fromkeys(WORDS["intravenous drugs"], "iv"),
    **dict.fromkeys(WORDS["subcutaneous drugs"], "subcutaneously"),
    **dict.fromkeys(WORDS["inhaled drugs"], "inhaled"),
}


@dataclass(frozen=True)
class Drug:
    """A drug and the few ways in which it is given: name and dose predict one another."""

    name: str
    strengths: tuple[str, ...]
    route: str
    frequencies: tuple[str, ...]
    forms: tuple[str, ...]


def _drug(name: str) -> Drug:
    # The name's own coins: a drug is dosed alike in every corpus.
    rng = Random(f"pharmacy {name}")  # noqa: S311
    scale = _STRENGTHS if rng.random() < 0.65 else _LARGE
    first = rng.randrange(len(scale) - 2)
    unit = "units" if name in WORDS["drugs in units"] else "mg"
    route = _ROUTES.get(name, "po")
    forms = {"po": ("tablet", "capsule"), "inhaled": ("puff", "inhaler")}.get(route, ("",))
    return Drug(
        name,
        tuple(f"{s:g} {unit}" for s in scale[first : first + 3]),
        route,
        tuple(rng.sample(_FREQUENCIES, 2)),
        forms,
    )


def _made_up(suffix: str) -> list[str]:
    rng = Random(f"pharmacy class {suffix}")  # noqa: S311
    names: set[str] = set()
    while len(names) < _PER_CLASS:
        middle = rng.choice(WORDS["drug middles"]) if rng.random() < 0.7 else ""
        names.add(rng.choice(WORDS["drug onsets"]) + middle + suffix)
    return sorted(names)


CLASSES: dict[str, list[str]] = {
    suffix: _made_up(suffix) for suffix in sorted({s for c in CONDITIONS for s in c.classes})
}
DRUGS: dict[str, Drug] = {
    name: _drug(name)
    for name in sorted(
        {d for c in CONDITIONS for d in c.drugs} | {d for names in CLASSES.values() for d in names}
    )
}


def frequency_and_reason(frequency: str, rng: Random) -> str:
    """Return a frequency, with its reason where it is as needed."""
    reasons = _INDICATIONS.get(frequency)
    return f"{frequency} {rng.choice(reasons)}" if reasons else frequency


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


class Scene:
    """One patient on one day.

    Args:
        patient: whose state fills the slots.
        rng: the note's own coins.
    """

    def __init__(self, patient: Patient, rng: Random) -> None:
        self.patient, self.rng = patient, rng
        self._month, self._day = rng.randint(1, 12), rng.randint(1, 28)
        self._year = rng.randint(2101, 2190)

    def fill(self, name: str) -> list[Piece]:
        """Return the pieces for a slot: the method `_slot_name` makes them."""
        made = getattr(self, f"_slot_{name}")()
        return [(made, "")] if isinstance(made, str) else made

    def _slot_pt(self) -> str:
        p = self.patient
        title = "Ms." if p.female else "Mr."
        return pick(self.rng, ("the patient", "patient", self._slot_he(), f"{title} {p.surname}"))

    def _slot_fullname(self) -> str:
        return f"{self.patient.first_name} {self.patient.surname}"

    def _slot_he(self) -> str:
        return "she" if self.patient.female else "he"

    def _slot_his(self) -> str:
        return "her" if self.patient.female else "his"

    def _slot_sex(self) -> str:
        return pick(self.rng, ("female", "woman") if self.patient.female else ("male", "man"))

    def _slot_age(self) -> str:
        return str(self.patient.age)

    def _slot_doctor(self) -> str:
        return f"Dr. {self.patient.physician if self.rng.random() < 0.6 else surname(self.rng)}"

    def _slot_relative(self) -> str:
        return self.patient.relative

    def _slot_work(self) -> str:
        return self.patient.occupation

    def _slot_facility(self) -> str:
        return (
            self.patient.facility
            if self.rng.random() < 0.7
            else pick(self.rng, WORDS["facilities"])
        )

    def _slot_ward(self) -> str:
        return pick(self.rng, WORDS["wards"])

    def _slot_specialty(self) -> str:
        return pick(self.rng, WORDS["specialties"])

    def _slot_date(self) -> str:
        form = self.rng.random()
        if form < 0.5:
            return f"{self._month}/{self.rng.randint(1, 28)}"
        if form < 0.8:
            return f"{self._month:02d}/{self._day:02d}/{self._year}"
        return f"{self._year}-{self._month}-{self._day}"

    def _slot_time(self) -> str:
        return f"{self.rng.randint(0, 23):02d}{self.rng.choice(('00', '15', '30', '45'))}"

    def _slot_span(self) -> str:
        unit = pick(self.rng, ("day", "day", "week", "month", "hour", "year"))
        number = self.rng.choice((1, 2, 2, 3, 3, 4, 5, 7, 10))
        return f"{number} {unit}{'s' if number > 1 else ''}"

    def _slot_small(self) -> str:
        return str(self.rng.randint(2, 9))

    def _slot_size(self) -> str:
        return f"{self.rng.randint(1, 4)}.{self.rng.randint(1, 9)} cm"

    def _slot_phone(self) -> str:
        return f"{self.rng.randint(200, 999)}-{self.rng.randint(1000, 9999)}"
