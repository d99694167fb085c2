"""A release that is made again must be the same, bit for bit: its noise is the same.

A step whose output was lost after its entry was settled works again with the seed of that entry.
If a training's sums round otherwise (another processor, other threads), the weights part ways
after the first update, and two models with one noise between them tell the difference of their
gradients. If another version of a library splits words otherwise, a histogram's noise falls on
other counts. So the step leaves a keyed digest of what it releases before it settles, and
compares before it hands out. The digest lies beside the seed, not among the outputs: those are
what may be lost.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping

from dp_core.bert.parameters import Arrays
from dp_core.errors import BadInput
from dp_core.privacy.ledger import State
from tasks.charging import Charge
from tasks.workbench import Workbench


def refuse_unrecorded(bench: Workbench, charged: Charge) -> None:
    """Refuse to make again what was released without a record: it could not be handed out.

    Raises:
        BadInput: nothing tells what was released.
    """
    if charged.entry.state is State.SETTLED and not bench.seeds.digest_left(charged.entry.seed_key):
        raise BadInput(
            "this was released before, and nothing tells any more what came out",
            where=f"ledger entry {charged.entry.id}",
            fix="Restore the seeds' folder or the output from a copy, or use another seed: a new"
            " charge.",
        )


def confirm_same_release(bench: Workbench, charged: Charge, content: bytes) -> None:
    """Leave a digest of what is released; of a settled entry, refuse other content than was.

    Args:
        bench: whose seeds' folder keeps the digest.
        charged: the entry.
        content: `weights_released` or `counts_released`.

    Raises:
        BadInput: it is other, or nothing tells what was released.
    """
    refuse_unrecorded(bench, charged)
    key = charged.entry.seed_key
    digest = charged.seed.derive("released", content)
    released = bench.seeds.digest_left(key)
    if charged.entry.state is not State.SETTLED or released is None:
        bench.seeds.leave_digest(key, digest)
    elif not hmac.compare_digest(digest, released):
        raise BadInput(
            "this was released before, and came out otherwise this time",
            where=f"ledger entry {charged.entry.id}",
            fix="Restore the output from a copy, or use another seed: a new charge.",
        )


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
