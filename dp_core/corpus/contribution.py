"""Bounding what one unit contributes, before anything is learned from it.

Each choice is drawn for its unit alone (see `keyed_hash`), so that adding or removing one unit
changes nothing about any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dp_core.corpus.keyed_hash import coin, generator

T = TypeVar("T")


def bounded_sample(items: Sequence[T], limit: int, unit_id: str, key: bytes) -> list[T]:
    """Return at most `limit` of a unit's items, uniformly without replacement, in their order.

    Args:
        items: what the unit would contribute, in an order that depends on the unit alone.
        limit: the bound.
        unit_id: whose items these are.
        key: public coins.
    """
    if len(items) <= limit:
        return list(items)
    rng = generator(key, "contribution", unit_id)
    return [items[i] for i in sorted(rng.sample(range(len(items)), limit))]


def is_held_out(unit_id: str, share: float, key: bytes) -> bool:
    """Whether a unit measures and never trains: true for `share` of all keys."""
    return coin(key, "held out", unit_id) < share
