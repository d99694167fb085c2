"""Templates of the synthetic text, and the tables of words that fill their slots.

A table (`tables/*.txt`) consists of blocks, separated by blank lines. Each line of a block is
`= title`, `- template`, or `field: a; b; c`. A template is text with slots `{name}`, whole
numbers `{1..28}` drawn uniformly, and choices `(a|b|)`, which may be nested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Span = tuple[str, str]  # text, and its entity label or ""
Fill = Callable[[str], list[Span]]  # from a slot's name to its text

_FOLDER = Path(__file__).parent / "tables"
_SKEW = 3.0  # of the draws of `pick_common`; 1 would be uniform
_TOKEN = re.compile(r"[(|)]|\{[\w. ]+\}|[^(|){]+")

# A literal, a slot with its braces, or a choice of sequences.
_Node: TypeAlias = "str | tuple[list[_Node], ...]"


@dataclass(frozen=True)
class Block:
    """One block of a table: a title, templates, and lists of words by field."""

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


def expand(template: str, rng: Random, fill: Fill) -> list[Span]:
    """Return the spans of one random expansion; all branches of a choice are equally likely.

    Raises:
        ValueError: braces or parentheses do not match, or `fill` does not know a slot.
    """
    spans: list[Span] = []
    _expand(_parse(template), rng, fill, spans)
    return spans


def _no_slot(name: str) -> list[Span]:
    raise ValueError(f"this template has no slot {name!r}")


def phrase(template: str, rng: Random, fill: Fill = _no_slot) -> str:
    """Return the text of one random expansion; without `fill`, the template has no slots."""
    return "".join(text for text, _ in expand(template, rng, fill))


def pick(rng: Random, items: Sequence[str]) -> str:
    """Return an item drawn uniformly; faster than `Random.choice`."""
    return items[int(rng.random() * len(items))]


def pick_common(rng: Random, items: Sequence[T]) -> T:
    """Return an item drawn with a skew towards the first items, like the words of a language.

    The first tenth of the items receives 46% of the draws, the last half 21%.
    """
    return items[int(rng.random() ** _SKEW * len(items))]


def _expand(nodes: list[_Node], rng: Random, fill: Fill, spans: list[Span]) -> None:
    for node in nodes:
        if isinstance(node, tuple):
            _expand(node[int(rng.random() * len(node))], rng, fill, spans)
        elif node[0] == "{":
            name, dots, most = node[1:-1].partition("..")
            spans += [(str(rng.randint(int(name), int(most))), "")] if dots else fill(name)
        else:
            spans.append((node, ""))


@cache
def _parse(template: str) -> list[_Node]:
    tokens = _TOKEN.findall(template)
    open_choices: list[list[list[_Node]]] = [[[]]]  # the template itself, then nested choices
    for token in tokens:
        if token == "(":  # noqa: S105 - a parenthesis
            open_choices.append([[]])
        elif token == "|":  # noqa: S105
            open_choices[-1].append([])
        elif token == ")" and len(open_choices) > 1:  # noqa: S105
            branches = tuple(open_choices.pop())
            open_choices[-1][-1].append(branches)
        else:
            open_choices[-1][-1].append(token)
    nodes = open_choices[0][0]
    if "".join(tokens) != template or open_choices != [[nodes]] or ")" in nodes:
        raise ValueError("a parenthesis or brace of the template does not match")
    return nodes


WORDS, _ABBREVIATIONS, _TEMPLATES = (block.fields for block in read_table("lexicon"))

ABBREVIATIONS = {long: short for long, (short,) in _ABBREVIATIONS.items()}
# The parts of these slots combine freely, into many more surfaces than any training set contains.
TEMPLATES = {name: template for name, (template,) in _TEMPLATES.items()}
