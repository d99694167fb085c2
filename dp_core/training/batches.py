"""Micro-batches of masked rows, of one fixed shape, made in NumPy from a token store.

U units, R rows of a unit, S tokens of a row, K predictions of a row. Padding of weight zero fills
micro-batches up, so that every micro-batch runs the same compiled step. Rows and masks are keyed by
(secret, unit, row, step), so a unit's rows do not depend on the other drawn units. A row with
several maskings is repeated among its unit's rows, with a different key for each copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from dp_core.data.hashing import U64, ShuffledRange, bits, fold, mix
from dp_core.data.masking import MASKED_SHARE, MaskedRows, mask_rows
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds

Indices = NDArray[np.int64]
# (store, row numbers (M,), their keys (M,)) -> inputs and predictions, for each row independently
Examples = Callable[[TokenStore, Indices, U64], MaskedRows]
_CHOICE = 7  # stream of the generator that chooses rows


class MicroBatch(NamedTuple):
    """One micro-batch; padded rows have share and weights 0.

    Attributes:
        ids: (U, R, S) int32, masked.
        lengths: (U, R) int32.
        positions: (U, R, K) int32.
        labels: (U, R, K) int32.
        weights: (U, R, K) float32, 1 for a prediction.
        shares: (U, R) float32, 1 / (the unit's rows in this update), 0 for padding.
        keys: (U, R) uint32, which determine the rows' dropout.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    positions: NDArray[np.int32]
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]
    shares: NDArray[np.float32]
    keys: NDArray[np.uint32]


def predictions_per_row(sequence_length: int) -> int:
    """Return K: 15% of the tokens, rounded, at least 1."""
    return max(1, round(MASKED_SHARE * sequence_length))


def masked_examples(
    store: TokenStore, rows: Indices, keys: U64, continuation: NDArray[np.bool_] | None = None
) -> MaskedRows:
    """Mask rows as BERT does.

    Args:
        store: the rows.
        rows: (M,) row numbers.
        keys: (M,) uint64, one per row.
        continuation: (V,) true for tokens that continue a word, to mask whole words.
    """
    return mask_rows(
        store.tokens[rows],
        store.lengths[rows],
        keys,
        SpecialIds(),
        store.vocabulary_size,
        predictions_per_row(store.sequence_length),
        continuation,
    )


@dataclass(frozen=True)
class UnitRows:
    """Micro-batches of drawn units, R rows of each, in as many micro-batches as needed.

    Attributes:
        coins: 64 secret bits, which choose rows and masks. The seed cannot be derived from them.
        units: U, units of a micro-batch.
        rows: R, rows of a unit and update, including copies.
        maskings: masked copies of each row; R is a multiple of it.
        least: least number of micro-batches of a draw; smaller draws end with pure padding.
    """

    coins: int
    units: int
    rows: int
    maskings: int = 1
    least: int = 0

    def on(self, devices: int) -> UnitRows:
        """Return larger micro-batches, of whose units each device gets as many as these have."""
        least = math.ceil(self.least / devices)
        return replace(self, units=self.units * devices, least=least)

    def items(self, store: TokenStore, units: range) -> range:
        """Return the numbers of the drawn items of some units: the units themselves."""
        return units

    def made(
        self, store: TokenStore, examples: Examples, step: int, drawn: Indices
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of drawn units; without units only the `least` number."""
        count = max(self.least, math.ceil(len(drawn) / self.units))
        for start in range(0, count * self.units, self.units):
            units = drawn[start : start + self.units]
            rows, real = choose_rows(store, units, self.rows // self.maskings, self.coins, step)
            keys = row_keys(store, units, rows, self.coins, step)
            rows, real, keys = masked_copies(rows, real, keys, self.maskings)
            yield micro_batch(store, rows, real, keys, self.units, examples)


@dataclass(frozen=True)
class SingleRows:
    """Micro-batches of drawn rows, for training without privacy: one unit for each row.

    Attributes:
        seed: public; chooses masks, anew in every update.
        units: U, rows of a micro-batch.
    """

    seed: int
    units: int

    def on(self, devices: int) -> SingleRows:
        """Return larger micro-batches; see `UnitRows`."""
        return replace(self, units=self.units * devices)

    def items(self, store: TokenStore, units: range) -> range:
        """Return the numbers of the drawn items of some units: their rows."""
        return range(int(store.unit_rows[units.start]), int(store.unit_rows[units.stop]))

    def made(
        self, store: TokenStore, examples: Examples, step: int, drawn: Indices
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of drawn rows."""
        for start in range(0, len(drawn), self.units):
            rows = drawn[start : start + self.units]
            units = np.searchsorted(store.unit_rows, rows, side="right") - 1
            keys = row_keys(store, units, rows[:, None], self.seed, step)
            real = np.ones((len(rows), 1), np.bool_)
            yield micro_batch(store, rows[:, None], real, keys, self.units, examples)


class Sampler(Protocol):
    """Draws the items of an update: units (`BatchSampler`) or rows (`ShuffledRows`)."""

    def batch(self, step: int) -> Indices:
        """Return the numbers of the items that update `step` reads, possibly none."""


@dataclass(frozen=True)
class ShuffledRows:
    """Rows in shuffled epochs; successive updates run through the epochs.

    Attributes:
        rows: number of rows.
        seed: public; orders the rows, anew in every epoch.
        batch_rows: number of rows of an update.
    """

    rows: int
    seed: int
    batch_rows: int

    def batch(self, step: int) -> Indices:
        """Return the rows of an update, in order."""
        numbers = np.arange(step * self.batch_rows, (step + 1) * self.batch_rows)
        epochs, offsets = np.divmod(numbers, self.rows)
        rows = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = ShuffledRange(self.rows, self.seed, int(epoch)).items(offsets[here])
        return rows


@dataclass(frozen=True)
class Batches:
    """Micro-batches of a run, by update.

    An update's items (units or rows) are drawn together and then made into micro-batches, either in
    this process, or by each host for its share.

    Attributes:
        store: the rows.
        sampler: draws the items of an update.
        rows: makes micro-batches, of one shape, of a draw.
        examples: makes the inputs and predictions of rows.
    """

    store: TokenStore
    sampler: Sampler
    rows: UnitRows | SingleRows
    examples: Examples = masked_examples

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an update, possibly none."""
        return self.rows.made(self.store, self.examples, step, self.sampler.batch(step))


def choose_rows(
    store: TokenStore, units: Indices, rows: int, coins: int, step: int
) -> tuple[Indices, NDArray[np.bool_]]:
    """Draw up to R of each unit's rows, without replacement.

    Returns:
        Row numbers (n, R), and (n, R) flags that are false for padding of units with fewer rows.
    """
    first = store.unit_rows[units]
    count = store.unit_rows[units + 1] - first
    widest = max(rows, int(count.max(initial=0)))
    scores = bits(fold(store.unit_keys[units], coins, step), _CHOICE, widest) >> np.uint64(1)
    scores[np.arange(widest)[None, :] >= count[:, None]] |= np.uint64(1 << 63)
    chosen = np.argsort(scores, axis=1, kind="stable")[:, :rows]
    real = np.arange(rows)[None, :] < count[:, None]
    return np.where(real, first[:, None] + chosen, first[:, None]), real


def row_keys(store: TokenStore, units: Indices, rows: Indices, coins: int, step: int) -> U64:
    """Return the mask key of each row (n, R): a function of (coins, unit, row in unit, step)."""
    within = (rows - store.unit_rows[units][:, None]).astype(np.uint64)
    return mix(fold(store.unit_keys[units], coins, step)[:, None] ^ mix(within + np.uint64(1)))


def masked_copies(
    rows: Indices, real: NDArray[np.bool_], keys: U64, maskings: int
) -> tuple[Indices, NDArray[np.bool_], U64]:
    """Repeat each row (n, R) with a different key for each masking: (n, R·maskings).

    The first copies come first and keep their keys, so a single masking changes nothing.
    """
    number = np.repeat(np.arange(maskings, dtype=np.uint64), rows.shape[1])[None, :]
    copied = np.tile(keys, maskings)
    return (
        np.tile(rows, maskings),
        np.tile(real, maskings),
        np.where(number > 0, mix(copied ^ mix(number)), copied),
    )


def micro_batch(
    store: TokenStore,
    rows: Indices,
    real: NDArray[np.bool_],
    keys: U64,
    units: int,
    examples: Examples = masked_examples,
) -> MicroBatch:
    """Make the rows (n, R) into examples and pad them to U units.

    Args:
        store: the rows.
        rows: (n, R) row numbers, n at most U.
        real: (n, R) false for padding.
        keys: (n, R) uint64 keys of the rows.
        units: U.
        examples: makes the inputs and predictions of rows.
    """
    n, r = rows.shape
    s = store.sequence_length
    flat = rows.reshape(-1)
    made = examples(store, flat, keys.reshape(-1))
    k = made.positions.shape[1]
    rows_of_unit = real.sum(1, keepdims=True)
    batch = MicroBatch(
        made.input_ids.reshape(n, r, s),
        store.lengths[flat].reshape(n, r).astype(np.int32),
        made.positions.reshape(n, r, k),
        made.labels.reshape(n, r, k),
        made.weights.reshape(n, r, k) * real[:, :, None].astype(np.float32),
        (real / np.maximum(rows_of_unit, 1)).astype(np.float32),
        keys.astype(np.uint32),
    )
    if n == units:
        return batch
    padded = [np.concatenate([a, np.zeros((units - n, *a.shape[1:]), a.dtype)]) for a in batch]
    return MicroBatch(*padded)


T = TypeVar("T")


def prefetch(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Yield the items in order, while a thread makes up to `depth` items ahead.

    An error in the thread is raised here. Leaving the loop early ends the thread.
    """
    iterator, end = iter(items), object()
    thread = ThreadPoolExecutor(1)
    try:
        ahead = deque(thread.submit(next, iterator, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, iterator, end))
            yield cast(T, item)
    finally:
        thread.shutdown(cancel_futures=True)
