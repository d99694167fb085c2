"""The coins of an audit: which canaries are in, and that nobody chose them.

An audit of a job's own training needs coins that are fixed before the training and cannot be drawn
again for the same charge. They follow from the seed of the release, one way, under a purpose of
their own: the ledger binds that seed, by its salted hash, before the training begins, and with it
the coins. A training that goes on after a kill has the same coins; a new charge has others. From
the seed of the coins nothing of the release's seed, and so nothing of its noise, can be computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_core.privacy.seed_store import PrivacySeed

Coins = NDArray[np.bool_]


def coin_seed(release: PrivacySeed) -> PrivacySeed:
    """Return the seed of the coins of one release; its salted hash may be published.

    Who is shown it later can throw the coins, and check that they are those of the hash.

    Args:
        release: the seed to which the ledger bound the release.
    """
    secret, salt = release.derive("audit coin seed"), release.derive("audit coin salt")
    return PrivacySeed(secret, salt[:16], known=release.known)


def throw_coins(seed: PrivacySeed, canaries: int, stream: int = 0) -> Coins:
    """Return for each canary whether it is in: fair, independent coins, (canaries,).

    Args:
        seed: a secret of the audit's own, of which nothing else is drawn but null controls.
        canaries: m.
        stream: 0 for the coins that train; others for null controls.
    """
    key = np.frombuffer(seed.derive("audit coins", stream)[:16], dtype="<u8")
    words = np.random.Philox(key=key).random_raw(canaries)
    return np.asarray(words >> np.uint64(63), np.bool_)
