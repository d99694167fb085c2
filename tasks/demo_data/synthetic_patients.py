"""Synthetic patients: diseases with their symptoms, findings, drugs and laboratory values.

All attributes of a patient follow from the patient's diseases. The words of a note therefore
predict one another, and a model can learn these relations from many notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from tasks.demo_data.templates import WORDS, phrase, pick, pick_common, read_table

_IMPOSSIBLE = {"female": "prostate cancer", "male": "breast cancer"}
_PER_CLASS = 14
_INVENTED_DRUG = 0.2
_OTHER_ROUTES = ("iv", "subcutaneously", "inhaled")  # all other drugs are taken by mouth: po


# A disease (`tables/conditions.txt`) by field, each with alternatives. `names` are written out and
# abbreviated, `drugs` are generic, `classes` are the name endings of the invented drugs that treat
# it, `labs` are keys of `LABS` that are abnormal. `symptoms`, `findings` (of imaging or
# examination) and `procedures` (operations, and treatments without a dose) are templates.
Condition: TypeAlias = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Drug:
    """A drug with few strengths and frequencies, so that its name predicts its dose."""

    name: str
    strengths: tuple[str, ...]
    route: str
    frequencies: tuple[str, ...]


@dataclass(frozen=True)
class Medication:
    """A drug with the strength and frequency that one patient takes."""

    drug: Drug
    strength: str
    frequency: str


def _drug(name: str) -> Drug:
    # The name is the seed: a drug has the same doses in every corpus.
    rng = Random(f"pharmacy {name}")  # noqa: S311
    scale = WORDS["strengths" if rng.random() < 0.65 else "large strengths"]
    first = rng.randrange(len(scale) - 2)
    unit = "units" if name in WORDS["drugs in units"] else "mg"
    return Drug(
        name,
        tuple(f"{strength} {unit}" for strength in scale[first : first + 3]),
        next((r for r in _OTHER_ROUTES if name in WORDS[f"drugs {r}"]), "po"),
        tuple(rng.sample(WORDS["frequencies"], 2)),
    )


def _invented_drugs(ending: str) -> list[str]:
    rng = Random(f"pharmacy class {ending}")  # noqa: S311
    names: set[str] = set()
    while len(names) < _PER_CLASS:
        middle = rng.choice(WORDS["drug middles"]) if rng.random() < 0.7 else ""
        names.add(rng.choice(WORDS["drug onsets"]) + middle + ending)
    return sorted(names)


CONDITIONS: tuple[Condition, ...] = tuple(block.fields for block in read_table("conditions"))
# A laboratory value: names, both ends of the normal range, unit, decimals, direction in disease.
LABS = read_table("labs")[0].fields
_CLASSES = {ending: _invented_drugs(ending) for c in CONDITIONS for ending in c["classes"]}
DRUGS = {
    name: _drug(name)
    for names in (*(c["drugs"] for c in CONDITIONS), *_CLASSES.values())
    for name in names
}


class Patient:
    """The patient described by the notes; all attributes are drawn once, from `rng` alone."""

    def __init__(self, rng: Random) -> None:
        sex = "female" if rng.random() < 0.5 else "male"
        # Two to five conditions; the first is the reason for admission.
        self.conditions = _draw_conditions(rng, _IMPOSSIBLE[sex])
        main = self.conditions[:2]
        drawn = [
            _draw_medication(c, rng) for c in self.conditions for _ in range(rng.randint(1, 2))
        ]
        self.medications = list({m.drug.name: m for m in drawn}.values())
        self.traits = {  # by slot of the templates; the sex is a template itself
            **dict(zip(("he", "his", "title", "sex"), WORDS[sex], strict=True)),
            "age": str(min(94, max(19, round(rng.gauss(63, 15))))),
            "first name": pick(rng, WORDS[f"{sex} first names"]),
            "surname": _surname(rng),
            "physician": _surname(rng),
        }
        self.condition_names = [pick_common(rng, c["names"]) for c in self.conditions]
        self.symptoms = [phrase(s, rng) for c in main for s in c["symptoms"]]
        self.findings = [phrase(f, rng) for c in main for f in c["findings"]]
        self.abnormal_labs = sorted({lab for c in main for lab in c["labs"]})
        allergic = rng.random() < 0.4
        self.allergy = (
            (pick(rng, WORDS["allergies"]), pick(rng, WORDS["reactions"])) if allergic else None
        )
        for trait in ("relative", "occupation", "hospital"):
            self.traits[trait] = pick(rng, WORDS[f"{trait}s"])
        self.heart_rate = round(rng.gauss(84, 14))
        self.systolic = round(rng.gauss(130, 18))


def _surname(rng: Random) -> str:
    """Return one of several thousand surnames, each a compound of two listed parts."""
    return pick(rng, WORDS["surname starts"]) + pick(rng, WORDS["surname ends"])


def _draw_conditions(rng: Random, impossible: str) -> list[Condition]:
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
