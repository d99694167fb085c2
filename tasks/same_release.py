"""A release that is made again must be the same, bit for bit: its noise is the same.

A step whose output was lost after its entry was settled works again with the seed of that entry;
two machines may work on one step at once. If a training's sums round otherwise (another
processor, other threads), the weights part ways after the first update, and two models with one
noise between them tell the difference of their gradients. If another version of a library splits
words otherwise, a histogram's noise falls on other counts. So settling takes a digest of what is
released: the ledger accepts one, and nothing is handed out before it has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from dp_core.bert.parameters import Arrays


def counts_released(noised: Mapping[str, int]) -> bytes:
    """Return a digest of a released histogram: words and noised counts."""
    return hashlib.sha256(json.dumps(sorted(noised.items())).encode()).digest()


def weights_released(weights: Arrays) -> bytes:
    """Return a digest of a released model: names, shapes and every bit of the weights."""
    digest = hashlib.sha256()
    for name, values in sorted(weights.items()):
        digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.digest()
