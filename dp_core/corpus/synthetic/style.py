"""How a clinician types: abbreviations, capitals and slips of the finger."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from dp_core.corpus.synthetic.grammar import Piece

_ABBREVIATIONS = {
    "patient": "pt",
    "history": "hx",
    "with": "w/",
    "without": "w/o",
    "year old": "yo",
    "status post": "s/p",
    "follow up": "f/u",
    "complains of": "c/o",
    "admitted": "adm",
    "discharged": "d/c'd",
    "daily": "qd",
    "twice daily": "bid",
    "three times daily": "tid",
    "at bedtime": "qhs",
    "as needed": "prn",
    "every": "q",
    "evaluate": "eval",
    "secondary to": "2/2",
    "female": "F",
    "male": "M",
    "bilaterally": "b/l",
    "temperature": "temp",
    "tomorrow": "in am",
    "continue": "cont",
    "positive": "+",
    "negative": "neg",
    "significant": "sig",
    "hours": "hrs",
    "denies": "den",
    "increased": "inc",
    "evidence of": "e/o",
    "consistent with": "c/w",
}
_ABBREVIATE = re.compile(
    r"\b("
    + "|".join(sorted(map(re.escape, _ABBREVIATIONS), key=len, reverse=True))
    + r")\b(?![-/'])"
)
_LONG_WORD = re.compile(r"[a-z]{6,}")
_SLIPS_PER_CHARACTER = 0.0012


@dataclass(frozen=True)
class Style:
    """One clinician's habits.

    Args:
        abbreviates: whether the usual abbreviations are used.
        capitals: whether sentences begin with a capital.
        full_stops: whether sentences end with a full stop.
    """

    abbreviates: bool
    capitals: bool
    full_stops: bool


def draw_style(rng: Random) -> Style:
    """Return the habits of some clinician."""
    return Style(rng.random() < 0.35, rng.random() < 0.8, rng.random() < 0.9)


def typed(pieces: list[Piece], style: Style, rng: Random) -> list[Piece]:
    """Return a sentence as it is typed; entities keep their extent, and may be misspelt."""
    out: list[Piece] = []
    for text, label in pieces:
        if not label and style.abbreviates:
            text = _ABBREVIATE.sub(lambda m: _ABBREVIATIONS[m[1]], text)
        if rng.random() < _SLIPS_PER_CHARACTER * len(text):
            text = _slip(text, rng)
        if text:
            out.append((text, label))
    if style.capitals and out:
        text, label = out[0]
        out[0] = (text[0].upper() + text[1:], label)
    if style.full_stops and out and out[-1][0][-1] not in ".:":
        out.append((".", ""))
    return out


def _slip(text: str, rng: Random) -> str:
    """Misspell one of the long words: two letters swapped, one dropped, or one doubled."""
    words = list(_LONG_WORD.finditer(text))
    if not words:
        return text
    word = rng.choice(words)
    at = word.start() + 1 + rng.randrange(len(word[0]) - 2)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + (text[at] * 2 if kind == 1 else "") + text[at + 1 :]
