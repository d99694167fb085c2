"""Running text to sentences and tokens that know their offsets, never cutting inside an entity."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

_END = re.compile(r"[.!?][\"')\]]*\s+(?=[A-Z0-9\"'(\[])")
_NOT_AN_END = re.compile(
    r"(?:\b(?:[A-Z]|vs|Dr|Mr|Mrs|Ms|Prof|St|al|e\.g|i\.e|cf|approx|Fig|No|resp|ca|etc|sp|spp))\.$"
)
_TOKEN = re.compile(r"\w+|[^\w\s]")


def sentence_spans(
    text: str, entities: Sequence[tuple[int, int]], breaks: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return the (start, end) of each sentence.

    Args:
        text: running text.
        entities: spans that no sentence may cut.
        breaks: offsets at which a sentence begins in any case (the abstract, after the title).
    """
    cuts = {0, len(text), *breaks}
    for match in _END.finditer(text):
        stop = match.start() + 1
        if not _NOT_AN_END.search(text[max(0, stop - 12) : stop]):
            cuts.add(match.end())
    kept = _outside(sorted(cuts), sorted(entities))
    return [(a, b) for a, b in pairwise(kept) if text[a:b].strip()]


def _outside(cuts: list[int], entities: list[tuple[int, int]]) -> list[int]:
    """Return the cuts that lie in no entity; both lists are sorted."""
    kept = []
    number = reach = 0
    for cut in cuts:
        while number < len(entities) and entities[number][0] < cut:
            reach = max(reach, entities[number][1])
            number += 1
        if reach <= cut:
            kept.append(cut)
    return kept


def token_spans(
    text: str, begin: int, end: int, entities: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the (start, end) of each token between two offsets.

    A token is a run of word characters or one mark; the edges of entities cut tokens.
    """
    edges = sorted({e for span in entities for e in span if begin < e < end} | {begin, end})
    return [m.span() for a, b in pairwise(edges) for m in _TOKEN.finditer(text, a, b)]
