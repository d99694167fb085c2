"""Micro-batches of masked rows, of one fixed shape, made in NumPy from a token store.

U units, R rows of a unit, S tokens of a row, K predictions of a row. What a draw does not fill is
padding of weight zero, so that every micro-batch runs the same compiled step. Rows and masks are
keyed by (secret, unit, row, t): a unit looks the same whoever else was drawn.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dp_core.data.hashing import U64, ShuffledRange, bits, fold, mix
from dp_core.data.masking import MASKED_SHARE, MaskedRows, SpecialIds, mask_rows
from dp_core.data.token_store import TokenStore
from dp_core.privacy.batch_selection import UnitSampler, sampler_for
from dp_core.privacy.execution_plan import ExecutionPlan, PoissonSampling, TruncatedPoissonSampling
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.config import TrainingConfig

Indices = NDArray[np.int64]
# (store, row numbers (M,), their keys (M,)) -> inputs and predictions, each row's its own affair
Examples = Callable[[TokenStore, Indices, U64], MaskedRows]
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


def masked_examples(
    store: TokenStore, rows: Indices, keys: U64, continuation: NDArray[np.bool_] | None = None
) -> MaskedRows:
    """Mask rows as BERT does.

    Args:
        store: the rows.
        rows: (M,) row numbers.
        keys: (M,) uint64, one per row.
        continuation: (V,) true for pieces that go on with a word: whole words are then masked.
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


class PrivateBatches:
    """The units that the plan's sampler draws, R rows of each, as many micro-batches as needed.

    Args:
        store: the rows.
        sampler: says which units take part in update t.
        coins: 64 secret bits, which choose rows and masks.
        units: U, units of a micro-batch.
        rows: R, rows of a unit and update.
        largest: the most units that the sampler can draw, where it has such a bound: every update
            then has the same number of micro-batches, the last ones of padding alone.
        examples: what rows ask for.
    """

    def __init__(
        self,
        store: TokenStore,
        sampler: UnitSampler,
        coins: int,
        units: int,
        rows: int,
        *,
        largest: int = 0,
        examples: Examples = masked_examples,
    ) -> None:
        self._store, self._sampler, self._coins = store, sampler, coins
        self._units, self._rows = units, rows
        self._least = math.ceil(largest / units)
        self._examples = examples

    def update(self, t: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of update t; none if no unit was drawn, and none is due."""
        drawn = self._sampler.batch(t)
        count = max(self._least, math.ceil(len(drawn) / self._units))
        for start in range(0, count * self._units, self._units):
            units = drawn[start : start + self._units]
            rows, real = choose_rows(self._store, units, self._rows, self._coins, t)
            keys = row_keys(self._store, units, rows, self._coins, t)
            yield micro_batch(self._store, rows, real, keys, self._units, self._examples)


class OrdinaryBatches:
    """Shuffled epochs over all rows, each row alone: what training without privacy does.

    Args:
        store: the rows.
        seed: public; orders rows and chooses masks, afresh in every epoch.
        units: U, rows of a micro-batch (each is a unit of its own here).
        batch_rows: (first update, rows of an update from there on), by update; one number stands
            for all updates.
        examples: what rows ask for.
    """

    def __init__(
        self,
        store: TokenStore,
        seed: int,
        units: int,
        batch_rows: int | Sequence[tuple[int, int]],
        *,
        examples: Examples = masked_examples,
    ) -> None:
        self._store, self._seed, self._units = store, seed, units
        self._phases = [(0, batch_rows)] if isinstance(batch_rows, int) else list(batch_rows)
        self._examples = examples

    def update(self, t: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of update t, which follow each other through the epochs."""
        start, batch = self._place(t)
        for at in range(start, start + batch, self._units):
            places = np.arange(at, min(at + self._units, start + batch))
            epochs, offsets = np.divmod(places, self._store.n_rows)
            rows = np.empty(len(places), np.int64)
            for epoch in np.unique(epochs):
                here = epochs == epoch
                order = ShuffledRange(self._store.n_rows, self._seed, int(epoch))
                rows[here] = order.items(offsets[here])
            units = np.searchsorted(self._store.unit_rows, rows, side="right") - 1
            keys = row_keys(self._store, units, rows[:, None], self._seed, t)
            real = np.ones((len(rows), 1), np.bool_)
            yield micro_batch(self._store, rows[:, None], real, keys, self._units, self._examples)

    def _place(self, t: int) -> tuple[int, int]:
        """Return how many rows were read before update t, and how many it reads."""
        before = 0
        for (first, rows), (end, _) in itertools.pairwise([*self._phases, (t + 1, 0)]):
            if t < end:
                return before + (t - first) * rows, rows
            before += (end - first) * rows
        raise AssertionError("the phases begin with update 0")


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
        examples: what rows ask for.
    """
    n, r = rows.shape
    s = store.sequence_length
    flat = rows.reshape(-1)
    made = examples(store, flat, keys.reshape(-1))
    k = made.positions.shape[1]
    own = real.sum(1, keepdims=True)
    batch = MicroBatch(
        made.input_ids.reshape(n, r, s),
        store.lengths[flat].reshape(n, r).astype(np.int32),
        made.positions.reshape(n, r, k),
        made.labels.reshape(n, r, k),
        made.weights.reshape(n, r, k) * real[:, :, None].astype(np.float32),
        (real / np.maximum(own, 1)).astype(np.float32),
    )
    if n == units:
        return batch
    return MicroBatch(*(_padded(a, units) for a in batch.arrays()))  # type: ignore[arg-type]


def _padded(array: NDArray[np.int32] | NDArray[np.float32], units: int) -> NDArray[np.generic]:
    out = np.zeros((units, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out


class BatchSource(Protocol):
    """Micro-batches of a run, by update."""

    def update(self, t: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of update t, all of one shape; maybe none."""


def private_batches(
    store: TokenStore,
    plan: ExecutionPlan,
    training_config: TrainingConfig,
    seed: PrivacySeed,
    *,
    devices: int,
    examples: Examples,
) -> PrivateBatches:
    """Return the batches that the plan accounts for.

    Raises:
        BadInput: the store has more units than the plan declares.
    """
    units = max(1, training_config.micro_rows // training_config.examples_per_step) * devices
    coins = int.from_bytes(seed.derive("rows and masks")[:8], "little")
    return PrivateBatches(
        store,
        sampler_for(plan, seed, store.n_units),
        coins,
        units,
        training_config.examples_per_step,
        largest=_largest(plan),
        examples=examples,
    )


def ordinary_batches(
    store: TokenStore,
    training_config: TrainingConfig,
    init_seed: int,
    *,
    devices: int,
    examples: Examples,
) -> OrdinaryBatches:
    """Return shuffled epochs over the rows, for training without privacy."""
    rows = training_config.batch_size * training_config.examples_per_step
    parts = math.ceil(rows / (training_config.micro_rows * devices))
    units = math.ceil(rows / (parts * devices)) * devices  # even parts: little padding
    firsts, phases = 0, []
    for phase in training_config.phases():
        phases.append((firsts, round(phase.expected_batch) * training_config.examples_per_step))
        firsts += phase.steps
    return OrdinaryBatches(store, init_seed, units, phases, examples=examples)


def stream(batches: BatchSource, start: int, end: int) -> Iterator[tuple[int, MicroBatch | None]]:
    """Yield each update's micro-batches and then None: also an empty batch makes an update."""
    for t in range(start, end):
        for batch in batches.update(t):
            yield t, batch
        yield t, None


def _largest(plan: ExecutionPlan) -> int:
    """Return the most units of one update, where the sampling bounds them; else 0."""
    match plan.sampling:
        case PoissonSampling():
            return 0
        case TruncatedPoissonSampling(cap=cap):
            return min(cap, plan.declared_units)
        case sampling:
            return sampling.batch


T = TypeVar("T")
_WAIT = 0.1


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def prefetch(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield the items in order, made up to `depth` ahead by a thread of their own.

    An error while making an item is raised here; leaving the loop early ends the thread.
    """
    end = object()
    ready: queue.Queue[object] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: object) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_WAIT)
                return
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
            put(end)
        except BaseException as error:  # noqa: BLE001 - handed over and raised by the reader
            put(_Failure(error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not end:
            if isinstance(item, _Failure):
                raise item.error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
