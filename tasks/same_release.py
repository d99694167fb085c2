"""A release that is made again must be the same, bit for bit: its noise is the same.

A step whose output was lost after its entry was settled trains again with the seed of that entry.
If sums round otherwise (another processor, other threads), the weights part ways after the first
update, and two models with one noise between them tell the difference of their gradients. So the
step leaves a keyed digest of the weights before it settles, and compares before it hands out.
The digest lies beside the seed, not among the outputs: those are what may be lost.
"""

from __future__ import annotations

import hashlib
import hmac

from dp_core.bert.parameters import Arrays
from dp_core.errors import BadInput
from dp_core.privacy.ledger import State
from tasks.charging import Charge
from tasks.workbench import Workbench


def confirm_same_release(bench: Workbench, charged: Charge, weights: Arrays) -> None:
    """Leave a digest of the weights; of a settled entry, refuse other weights than were released.

    Raises:
        BadInput: they are others, or nothing tells what was released.
    """
    key = charged.entry.seed_key
    digest = charged.seed.derive("released weights", _digest(weights))
    if charged.entry.state is not State.SETTLED:
        bench.seeds.leave_digest(key, digest)
        return
    released = bench.seeds.digest_left(key)
    if released is None:
        raise BadInput(
            "this training was released before, and nothing tells any more what came out",
            where=f"ledger entry {charged.entry.id}",
            fix="Restore the seeds' folder or the model from a copy, or train with another seed:"
            " a new charge.",
        )
    if not hmac.compare_digest(digest, released):
        raise BadInput(
            "this training was released before, and came out otherwise this time",
            where=f"ledger entry {charged.entry.id}",
            fix="Restore the model from a copy, or train with another seed: a new charge.",
        )


def _digest(weights: Arrays) -> bytes:
    digest = hashlib.sha256()
    for name, values in sorted(weights.items()):
        digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
        digest.update(values.tobytes())
    return digest.digest()
