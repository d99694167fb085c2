"""Keyed, stable coins: what is drawn for one unit depends on that unit's id and a key alone.

Contribution bounding, held-out splits and planting must be drawn *for each unit independently of
all other data*; otherwise adding one unit could change what another contributes, and no
sensitivity bound would hold. A keyed hash of the unit's id has that property by construction,
in any order of reading and on any machine.
"""

from __future__ import annotations

import hashlib
import random


def digest64(key: bytes, purpose: str, *parts: str) -> int:
    """Return 64 bits, uniform over keys, of the given parts (BLAKE2b, parts length-prefixed).

    Args:
        key: any number of bytes; longer than 64 are hashed first.
        purpose: separates uses of one key.
        parts: what the coins belong to, for example a unit's id.
    """
    short = key if len(key) <= 64 else hashlib.sha256(key).digest()
    h = hashlib.blake2b(key=short, digest_size=8)
    for part in (purpose, *parts):
        raw = part.encode("utf-8", "surrogatepass")
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return int.from_bytes(h.digest(), "little")


def coin(key: bytes, purpose: str, *parts: str) -> float:
    """Return a number in [0, 1), uniform over keys; as `digest64`."""
    return (digest64(key, purpose, *parts) >> 11) * 2.0**-53


def generator(key: bytes, purpose: str, *parts: str) -> random.Random:
    """Return a generator of public coins for the given parts; never for noise or sampling."""
    return random.Random(digest64(key, purpose, *parts))  # noqa: S311


def seed_key(seed: int) -> bytes:
    """Return the key of a public seed."""
    return b"public seed " + str(seed).encode()
