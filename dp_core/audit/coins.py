"""The coins of an audit, which decide the included canaries before the training.

An audit of a job's own training needs coins that are fixed before the training and cannot be drawn
again for the same charge. They are derived one-way from the seed of the release, under a separate
purpose. The ledger commits to that seed by its salted hash before the training begins, and so to
the coins. A training that resumes after a kill has the same coins; a new charge has new coins.
Neither the release's seed nor its noise can be computed from the seed of the coins.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dp_core.privacy.seed_store import PrivacySeed

Coins = NDArray[np.bool_]


def coin_seed(release: PrivacySeed) -> PrivacySeed:
    """Return the seed of the coins of one release; its salted hash may be published.

    A verifier who later receives the seed can throw the coins again and check the seed's hash.

    Args:
        release: the seed to which the ledger bound the release.
    """
    secret, salt = release.derive("audit coin seed"), release.derive("audit coin salt")
    return PrivacySeed(secret, salt[:16], known=release.known)


def throw_coins(seed: PrivacySeed, canaries: int, stream: int = 0) -> Coins:
    """Return whether each canary is included, by fair, independent coins: (canaries,).

    Args:
        seed: secret seed of the audit, used only for these coins and for null controls.
        canaries: m, the number of canaries.
        stream: 0 for the coins of the training; other streams for null controls.
    """
    key = np.frombuffer(seed.derive("audit coins", stream)[:16], dtype="<u8")
    words = np.random.Philox(key=key).random_raw(canaries)
    return np.asarray(words >> np.uint64(63), np.bool_)
