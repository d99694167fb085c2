"""Shares K/N of a list: every N-th item, from the K-th. today/N is another share each day."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import TypeVar

Item = TypeVar("Item")


def numbered(share: str, day: date | None = None) -> str:
    """Return the share K/N that today/N means on the given day (UTC); K/N itself is unchanged."""
    which, parts = share.split("/")
    if which != "today":
        return share
    day = day or datetime.now(UTC).date()
    return f"{day.toordinal() % int(parts) + 1}/{parts}"


def share_of(items: Sequence[Item], share: str) -> Sequence[Item]:
    """Return the items of a share K/N, with K from 1 to N."""
    first, parts = (int(number) for number in share.split("/"))
    if not 1 <= first <= parts:
        raise ValueError(f"the share {share} is not one of 1/{parts} to {parts}/{parts}")
    return items[first - 1 :: parts]
