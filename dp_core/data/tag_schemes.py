"""Schemes of tags that mark entities in a sequence of words: IOB1, IOB2, IOBES, BILOU and BIOS.

A tag is `O`, or a prefix and a type, such as `B-problem`. Prefixes are `B` (first word of an
entity), `I` (within), `E` or `L` (last) and `S` or `U` (the only word). The schemes differ in
the prefixes that they use (Ratinov and Roth 2009):

| scheme | one word | first | within | last |
| --- | --- | --- | --- | --- |
| IOB1 | I, or B directly after an entity of the same type | as one word | I | I |
| IOB2, also called BIO | B | B | I | I |
| IOBES, also called BIOES | S | B | I | E |
| BILOU | U | B | I | L |
| BIOS | S | B | I | I |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from dp_core.config.data import TagScheme
from dp_core.data.labelled_text import Entity

TAG = re.compile(r"O|[BIESLU]-\S+")
_PREFIXES: dict[TagScheme, tuple[str, str, str, str]] = {  # in the order of the table
    "iob1": ("I", "I", "I", "I"),
    "iob2": ("B", "B", "I", "I"),
    "iobes": ("S", "B", "I", "E"),
    "bilou": ("U", "B", "I", "L"),
    "bios": ("S", "B", "I", "I"),
}


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence's tags in any scheme.

    An entity ends before `O`, another type, or a prefix that begins one, and after a prefix that
    ends one. Every tag but `O` belongs to an entity, as in the scorer of CoNLL-2000.
    """
    out: list[Entity] = []
    is_open = False
    for i, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        if prefix == "O":
            is_open = False
            continue
        if is_open and prefix in "IEL" and out[-1][0] == kind:
            out[-1] = (kind, out[-1][1], i + 1)
        else:
            out.append((kind, i, i + 1))
        is_open = prefix in "BI"
    return out


def tags_of(entities: Iterable[Entity], length: int, scheme: TagScheme = "iob2") -> list[str]:
    """Return the tags of a sentence.

    Args:
        entities: entities in the order of the sentence, without overlaps.
        length: number of words.
        scheme: the scheme of the tags.
    """
    tags, before = ["O"] * length, ("", 0, 0)
    only, first, within, last = _PREFIXES[scheme]
    for kind, begin, end in entities:
        prefixes = only if end - begin == 1 else first + within * (end - begin - 2) + last
        if scheme == "iob1" and before[::2] == (kind, begin):
            prefixes = "B" + prefixes[1:]
        tags[begin:end] = [f"{prefix}-{kind}" for prefix in prefixes]
        before = kind, begin, end
    return tags


def fits(tags: Sequence[str], scheme: TagScheme) -> bool:
    """Return whether the tags of a sentence are well-formed in a scheme."""
    return tags_of(entities_of(tags), len(tags), scheme) == list(tags)
