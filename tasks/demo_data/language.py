"""Reads the tables of words and templates that the made-up text is made of (`tables/*.txt`).

A table is blocks between blank lines. A line is `= title`, `- template`, or `field: a; b; c`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Protocol, TypeVar

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


T = TypeVar("T")

Piece = tuple[str, str]
_Choice = tuple["_Sequence", ...]
_Slot = list[str]  # one name; a list, to be told from a choice at a glance of its type
_Sequence = tuple["str | _Choice | _Slot", ...]

_SKEW = 3.0  # of common items; 1 would be uniform
_TOKEN = re.compile(r"[(|)]|\{\w+\}|[^(|){]+")


class Slots(Protocol):
    """What fills the slots of a template, by name."""

    def fill(self, name: str) -> list[Piece]:
        """Return the pieces that stand for a slot."""


def expand(template: str, rng: Random, slots: Slots) -> list[Piece]:
    """Return the pieces of one expansion of a template."""
    out: list[Piece] = []
    _expand(_parse(template), rng.random, slots, out)
    return out


def phrase(template: str, rng: Random) -> str:
    """Return one expansion of a template that has no slots."""
    return "".join(text for text, _ in expand(template, rng, _NO_SLOTS))


def pick(rng: Random, items: Sequence[str]) -> str:
    """Return one of the items, each as likely; as `Random.choice`, and faster."""
    return items[int(rng.random() * len(items))]


def pick_common(rng: Random, items: Sequence[T]) -> T:
    """Return one of the items, the earlier the likelier, as words of a language are.

    The first tenth comes up in 46% of the draws, the last half in 21%.
    """
    return items[int(rng.random() ** _SKEW * len(items))]


class _NoSlots:
    def fill(self, name: str) -> list[Piece]:
        raise ValueError(f"this template has no slot {name!r}")


_NO_SLOTS = _NoSlots()


def _expand(
    sequence: _Sequence, uniform: Callable[[], float], slots: Slots, out: list[Piece]
) -> None:
    for node in sequence:
        if isinstance(node, str):
            out.append((node, ""))
        elif isinstance(node, tuple):
            _expand(node[int(uniform() * len(node))], uniform, slots, out)
        else:
            out.extend(slots.fill(node[0]))


@cache
def _parse(template: str) -> _Sequence:
    tokens = _TOKEN.findall(template)
    if "".join(tokens) != template:
        raise ValueError("a brace of the template does not close")
    sequence, rest = _parse_sequence(tokens, 0)
    if rest != len(tokens):
        raise ValueError("a parenthesis of the template does not open")
    return sequence


def _parse_sequence(tokens: list[str], at: int) -> tuple[_Sequence, int]:
    nodes: list[str | _Choice | _Slot] = []
    while at < len(tokens) and tokens[at] not in ("|", ")"):
        token = tokens[at]
        if token == "(":  # noqa: S105 - a parenthesis
            branches: list[_Sequence] = []
            while True:
                branch, at = _parse_sequence(tokens, at + 1)
                branches.append(branch)
                if at >= len(tokens):
                    raise ValueError("a parenthesis of the template does not close")
                if tokens[at] == ")":
                    break
            nodes.append(tuple(branches))
        elif token.startswith("{"):
            nodes.append([token[1:-1]])
        else:
            nodes.append(token)
        at += 1
    return tuple(nodes), at


# Lists by name, for example WORDS["facilities"]. Surnames are compounds of two lists, so that
# there are some thousands of them.
WORDS: dict[str, tuple[str, ...]] = read_table("lexicon")[0].fields


@dataclass(frozen=True)
class Lab:
    """A laboratory value: its names, normal range, unit, decimals, and where disease moves it."""

    names: tuple[str, ...]
    low: float
    high: float
    unit: str
    decimals: int
    rises: bool


def _lab(fields: tuple[str, ...]) -> Lab:
    names, low, high, unit, decimals, direction = fields
    return Lab(
        tuple(names.split(", ")), float(low), float(high), unit, int(decimals), direction == "high"
    )


LABS: dict[str, Lab] = {name: _lab(fields) for name, fields in read_table("labs")[0].fields.items()}

# Entities whose parts combine freely: many more surfaces than any training set shows.
IMAGING = (
    "(ct|ct|ct|mri|mri|ultrasound|x-ray|doppler|plain films) of the "
    "(chest|chest|chest|abdomen|abdomen|head|head|brain|pelvis|neck|abdomen and pelvis|"
    "(left|right) (knee|hip|leg|leg|shoulder|foot)|(lumbar|cervical|thoracic) spine)"
    "( with contrast| without contrast||||)"
)
TEST_MODIFIERS = "(repeat |repeat |serial |initial |follow up |outpatient |||||)"
LESION = (
    "({size} |)(small |calcified |enhancing |stable |cystic |spiculated |hypodense |)"
    "(nodule|nodule|mass|mass|lesion|lesion|opacity|cyst|lymph node|fluid collection|fracture) in "
    "the (left|right) (upper lobe|upper lobe|lower lobe|lower lobe|kidney|lung|breast|"
    "adrenal gland|hepatic lobe|femur|frontal lobe|ovary|axilla)"
)


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
