"""Synthetic patients: diseases with their symptoms, findings, drugs and laboratory values.

All attributes of a patient follow from the patient's diseases. The words of a note therefore
predict one another, and a model can learn these relations from many notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from tasks.demo_data.templates import WORDS, phrase, pick, pick_common, read_table

_FEMALE_ONLY, _MALE_ONLY = "breast cancer", "prostate cancer"
_PER_CLASS = 14
_INVENTED_DRUG = 0.2
_STRENGTHS = (1, 2, 2.5, 4, 5, 6.25, 8, 10, 12.5, 15, 20, 25, 30, 40, 50, 60, 75, 80)
_LARGE_STRENGTHS = (100, 125, 150, 200, 250, 300, 400, 500, 600, 750, 800, 1000)
_ROUTES = {
    **dict.fromkeys(WORDS["intravenous drugs"], "iv"),
    **dict.fromkeys(WORDS["subcutaneous drugs"], "subcutaneously"),
    **dict.fromkeys(WORDS["inhaled drugs"], "inhaled"),
}
_FORMS = {"po": ("tablet", "capsule"), "inhaled": ("puff", "inhaler")}


# A disease (`tables/conditions.txt`) by field, each with alternatives. `names` are written out and
# abbreviated, `drugs` are generic, `classes` are the name endings of the invented drugs that treat
# it, `labs` are keys of `LABS` that are abnormal. `symptoms`, `findings` (of imaging or
# examination) and `procedures` (operations, and treatments without a dose) are templates.
Condition: TypeAlias = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Lab:
    """A laboratory value: names, normal range, unit, decimals, and the direction in disease."""

    names: tuple[str, ...]
    low: float
    high: float
    unit: str
    decimals: int
    rises: bool


@dataclass(frozen=True)
class Drug:
    """A drug with few strengths and frequencies, so that its name predicts its dose."""

    name: str
    strengths: tuple[str, ...]
    route: str
    frequencies: tuple[str, ...]
    forms: tuple[str, ...]


@dataclass(frozen=True)
class Medication:
    """A drug with the strength and frequency that one patient takes."""

    drug: Drug
    strength: str
    frequency: str


def _lab(names: str, low: str, high: str, unit: str, decimals: str, moves: str) -> Lab:
    return Lab(
        tuple(names.split(", ")), float(low), float(high), unit, int(decimals), moves == "high"
    )


def _drug(name: str) -> Drug:
    # The name is the seed: a drug has the same doses in every corpus.
    rng = Random(f"pharmacy {name}")  # noqa: S311
    scale = _STRENGTHS if rng.random() < 0.65 else _LARGE_STRENGTHS
    first = rng.randrange(len(scale) - 2)
    unit = "units" if name in WORDS["drugs in units"] else "mg"
    route = _ROUTES.get(name, "po")
    return Drug(
        name,
        tuple(f"{strength:g} {unit}" for strength in scale[first : first + 3]),
        route,
        tuple(rng.sample(WORDS["frequencies"], 2)),
        _FORMS.get(route, ("",)),
    )


def _invented_drugs(ending: str) -> list[str]:
    rng = Random(f"pharmacy class {ending}")  # noqa: S311
    names: set[str] = set()
    while len(names) < _PER_CLASS:
        middle = rng.choice(WORDS["drug middles"]) if rng.random() < 0.7 else ""
        names.add(rng.choice(WORDS["drug onsets"]) + middle + ending)
    return sorted(names)


CONDITIONS: tuple[Condition, ...] = tuple(block.fields for block in read_table("conditions"))
LABS = {name: _lab(*fields) for name, fields in read_table("labs")[0].fields.items()}
_CLASSES = {ending: _invented_drugs(ending) for c in CONDITIONS for ending in c["classes"]}
DRUGS = {
    name: _drug(name)
    for names in (*(c["drugs"] for c in CONDITIONS), *_CLASSES.values())
    for name in names
}


class Patient:
    """The patient described by the notes; all attributes are drawn once, from `rng` alone."""

    def __init__(self, rng: Random) -> None:
        self.female = rng.random() < 0.5
        # Two to five conditions; the first is the reason for admission.
        self.conditions = _draw_conditions(rng, self.female)
        main = self.conditions[:2]
        drawn = [
            _draw_medication(c, rng) for c in self.conditions for _ in range(rng.randint(1, 2))
        ]
        self.medications = list({m.drug.name: m for m in drawn}.values())
        self.age = min(94, max(19, round(rng.gauss(63, 15))))
        self.first_name = pick(rng, WORDS[f"{'female' if self.female else 'male'} first names"])
        self.surname = draw_surname(rng)
        self.physician = draw_surname(rng)
        self.condition_names = [pick_common(rng, c["names"]) for c in self.conditions]
        self.symptoms = [phrase(s, rng) for c in main for s in c["symptoms"]]
        self.findings = [phrase(f, rng) for c in main for f in c["findings"]]
        self.abnormal_labs = sorted({lab for c in main for lab in c["labs"]})
        allergic = rng.random() < 0.4
        self.allergy = (
            (pick(rng, WORDS["allergies"]), pick(rng, WORDS["reactions"])) if allergic else None
        )
        self.relative = pick(rng, WORDS["relatives"])
        self.occupation = pick(rng, WORDS["occupations"])
        self.facility = pick(rng, WORDS["facility"])
        self.heart_rate = round(rng.gauss(84, 14))
        self.systolic = round(rng.gauss(130, 18))


def draw_surname(rng: Random) -> str:
    """Return one of several thousand surnames, each a compound of two listed parts."""
    return pick(rng, WORDS["surname starts"]) + pick(rng, WORDS["surname ends"])


def _draw_conditions(rng: Random, female: bool) -> list[Condition]:
    impossible = _MALE_ONLY if female else _FEMALE_ONLY
    wanted = rng.randint(2, 5)
    chosen: dict[str, Condition] = {}
    while len(chosen) < wanted:
        condition = pick_common(rng, CONDITIONS)
        if condition["names"][0] != impossible:
            chosen[condition["names"][0]] = condition
    return list(chosen.values())


def _draw_medication(condition: Condition, rng: Random) -> Medication:
    if condition["classes"] and rng.random() < _INVENTED_DRUG:
        name = pick_common(rng, _CLASSES[pick_common(rng, condition["classes"])])
    else:
        name = pick_common(rng, condition["drugs"])
    drug = DRUGS[name]
    return Medication(drug, pick_common(rng, drug.strengths), pick_common(rng, drug.frequencies))
