"""Drugs: how each is dosed, and some hundreds of made-up names that end as their class does.

A made-up name is rare, so it seldom survives a private vocabulary whole; its ending often does.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dp_core.corpus.synthetic.conditions import CONDITIONS
from dp_core.corpus.synthetic.lexicon import WORDS

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
