"""Micro-batches of masked rows, of one fixed shape, made in NumPy from a token store.

U units, R rows of a unit, S tokens of a row, K predictions of a row. What a draw does not fill is
padding of weight zero, so that every micro-batch runs the same compiled step. Rows and masks are
keyed by (secret, unit, row, t): a unit looks the same whoever else was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_core.corpus.counter_random import U64, bits, fold, mix
from dp_core.corpus.masking import MASKED_SHARE, SpecialIds, mask_rows
from dp_core.corpus.token_store import TokenStore
from dp_core.privacy.sampling import UnitSampler

Indices = NDArray[np.int64]
_CHOICE = 7  # stream of the generator that chooses rows


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch; padded rows have share and weights 0.

    Attributes:
        ids: (U, R, S) int32, masked.
        lengths: (U, R) int32.
        positions: (U, R, K) int32.
        labels: (U, R, K) int32.
        weights: (U, R, K) float32, 1 for a prediction.
        shares: (U, R) float32, 1 / (the unit's rows in this update), 0 for padding.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    positions: NDArray[np.int32]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]
    shares: NDArray[np.float32]

    def arrays(self) -> tuple[NDArray[np.int32] | NDArray[np.float32], ...]:
        """Return the six arrays in order."""
        return (self.ids, self.lengths, self.positions, self.labels, self.weights, self.shares)


def predictions_per_row(sequence_length: int) -> int:
    """Return K: 15% of the tokens, rounded, at least 1."""
    return max(1, round(MASKED_SHARE * sequence_length))


class PrivateBatches:
    """The units that the plan's sampler draws, R rows of each, as many micro-batches as needed.

    Args:
        store: the rows.
        sampler: says which units take part in update t.
        coins: 64 secret bits, which choose rows and masks.
        units: U, units of a micro-batch.
        rows: R, rows of a unit and update.
    """

    def __init__(
        self, store: TokenStore, sampler: UnitSampler, coins: int, units: int, rows: int
    ) -> None:
        self._store, self._sampler, self._coins = store, sampler, coins
        self._units, self._rows = units, rows

    def update(self, t: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of update t; none if no unit was drawn."""
        drawn = self._sampler.batch(t)
        for start in range(0, len(drawn), self._units):
            units = drawn[start : start + self._units]
            rows, real = choose_rows(self._store, units, self._rows, self._coins, t)
            keys = row_keys(self._store, units, rows, self._coins, t)
            yield micro_batch(self._store, rows, real, keys, self._units)


class OrdinaryBatches:
    """Shuffled epochs over all rows, each row alone: what training without privacy does.

    Args:
        store: the rows.
        seed: public; orders rows and chooses masks, afresh in every epoch.
        units: U, rows of a micro-batch (each is a unit of its own here).
        batch_rows: rows of an update.
    """

    def __init__(self, store: TokenStore, seed: int, units: int, batch_rows: int) -> None:
        self._store, self._seed = store, seed
        self._units, self._batch = units, batch_rows
        self._unit_of = np.repeat(np.arange(store.n_units), np.diff(store.unit_rows))
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def update(self, t: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of update t, which follow each other through the epochs."""
        start = t * self._batch
        for at in range(start, start + self._batch, self._units):
            places = np.arange(at, min(at + self._units, start + self._batch))
            epochs, offsets = np.divmod(places, self._store.n_rows)
            rows = np.empty(len(places), np.int64)
            for epoch in np.unique(epochs):
                here = epochs == epoch
                rows[here] = self._shuffled(int(epoch))[offsets[here]]
            units = self._unit_of[rows]
            keys = row_keys(self._store, units, rows[:, None], self._seed, t)
            real = np.ones((len(rows), 1), np.bool_)
            yield micro_batch(self._store, rows[:, None], real, keys, self._units)

    def _shuffled(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            generator = np.random.default_rng([self._seed, epoch])
            self._epoch, self._order = epoch, generator.permutation(self._store.n_rows)
        return self._order


def choose_rows(
    store: TokenStore, units: Indices, rows: int, coins: int, t: int
) -> tuple[Indices, NDArray[np.bool_]]:
    """Draw up to R of each unit's rows, without replacement.

    Returns:
        Row numbers (n, R), and (n, R) which of them are real; units with fewer rows are padded.
    """
    first = store.unit_rows[units]
    count = store.unit_rows[units + 1] - first
    widest = max(rows, int(count.max(initial=0)))
    scores = bits(fold(store.unit_keys[units], coins, t), _CHOICE, widest) >> np.uint64(1)
    scores[np.arange(widest)[None, :] >= count[:, None]] |= np.uint64(1 << 63)
    chosen = np.argsort(scores, axis=1, kind="stable")[:, :rows]
    real = np.arange(rows)[None, :] < count[:, None]
    return np.where(real, first[:, None] + chosen, first[:, None]), real


def row_keys(store: TokenStore, units: Indices, rows: Indices, coins: int, t: int) -> U64:
    """Return the mask key of each row (n, R): a function of (coins, unit, row in unit, t)."""
    within = (rows - store.unit_rows[units][:, None]).astype(np.uint64)
    return mix(fold(store.unit_keys[units], coins, t)[:, None] ^ mix(within + np.uint64(1)))


def micro_batch(
    store: TokenStore, rows: Indices, real: NDArray[np.bool_], keys: U64, units: int
) -> MicroBatch:
    """Mask the rows (n, R) and pad them to U units.

    Args:
        store: the rows.
        rows: (n, R) row numbers, n at most U.
        real: (n, R) false for padding.
        keys: (n, R) uint64 mask keys.
        units: U.
    """
    n, r = rows.shape
    s = store.sequence_length
    k = predictions_per_row(s)
    flat = rows.reshape(-1)
    lengths = store.lengths[flat]
    masked = mask_rows(
        store.tokens[flat], lengths, keys.reshape(-1), SpecialIds(), store.vocabulary_size, k
    )
    own = real.sum(1, keepdims=True)
    batch = MicroBatch(
        masked.input_ids.reshape(n, r, s),
        lengths.reshape(n, r).astype(np.int32),
        masked.positions.reshape(n, r, k),
        masked.labels.reshape(n, r, k),
        masked.weights.reshape(n, r, k) * real[:, :, None].astype(np.float32),
        (real / np.maximum(own, 1)).astype(np.float32),
    )
    if n == units:
        return batch
    return MicroBatch(*(_padded(a, units) for a in batch.arrays()))  # type: ignore[arg-type]


def _padded(array: NDArray[np.int32] | NDArray[np.float32], units: int) -> NDArray[np.generic]:
    out = np.zeros((units, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out
