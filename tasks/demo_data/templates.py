"""Templates of the synthetic text, and the tables of words that they are filled with.

A table (`tables/*.txt`) is blocks between blank lines. A line of a block is `= title`,
`- template`, or `field: a; b; c`. A template is text with choices `(a|b|)`, which may nest, and
slots `{name}`.
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
Fill = Callable[[str], list[Span]]  # what stands for a slot, by the slot's name

_FOLDER = Path(__file__).parent / "tables"
_SKEW = 3.0  # of common items; 1 would be uniform
_TOKEN = re.compile(r"[(|)]|\{\w+\}|[^(|){]+")

# A literal, a slot with its braces, or a choice of sequences.
_Node: TypeAlias = "str | tuple[list[_Node], ...]"


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


def expand(template: str, rng: Random, fill: Fill) -> list[Span]:
    """Return the spans of one expansion of a template, each branch of a choice as likely.

    Raises:
        ValueError: braces or parentheses do not match, or `fill` knows no such slot.
    """
    spans: list[Span] = []
    _expand(_parse(template), rng.random, fill, spans)
    return spans


def phrase(template: str, rng: Random) -> str:
    """Return one expansion of a template that has no slots."""
    return "".join(text for text, _ in expand(template, rng, _no_slot))


def pick(rng: Random, items: Sequence[str]) -> str:
    """Return one of the items, each as likely; as `Random.choice`, and faster."""
    return items[int(rng.random() * len(items))]


def pick_common(rng: Random, items: Sequence[T]) -> T:
    """Return one of the items, the earlier the likelier, as words of a language are.

    The first tenth comes up in 46% of the draws, the last half in 21%.
    """
    return items[int(rng.random() ** _SKEW * len(items))]


def _no_slot(name: str) -> list[Span]:
    raise ValueError(f"this template has no slot {name!r}")


def _expand(
    nodes: list[_Node], uniform: Callable[[], float], fill: Fill, spans: list[Span]
) -> None:
    for node in nodes:
        if isinstance(node, tuple):
            _expand(node[int(uniform() * len(node))], uniform, fill, spans)
        elif node[0] == "{":
            spans += fill(node[1:-1])
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


_WORDS, _ABBREVIATIONS, _TEMPLATES = (block.fields for block in read_table("lexicon"))

WORDS: dict[str, tuple[str, ...]] = _WORDS
ABBREVIATIONS = {long: short for long, (short,) in _ABBREVIATIONS.items()}
# Slots whose parts combine freely: many more surfaces than any training set shows.
TEMPLATES = {name: template for name, (template,) in _TEMPLATES.items()}
