"""Micro-batches of masked rows, of one fixed shape, made in NumPy from a token store.

U units, R rows of a unit, S tokens of a row, K predictions of a row. Padding of weight zero fills
micro-batches up, so that every micro-batch runs the same compiled step. Rows and masks are keyed by
(secret, unit, row, step), so a unit's rows do not depend on the other drawn units. A row with
several maskings is repeated among its unit's rows, with a different key for each copy.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dp_core.data.hashing import U64, ShuffledRange, bits, fold, mix
from dp_core.data.masking import MASKED_SHARE, MaskedRows, SpecialIds, mask_rows
from dp_core.data.token_store import TokenStore
from dp_core.privacy.batch_selection import BatchSampler
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed

Indices = NDArray[np.int64]
# (store, row numbers (M,), their keys (M,)) -> inputs and predictions, for each row independently
Examples = Callable[[TokenStore, Indices, U64], MaskedRows]
_OF_UNITS, _OF_ROWS = "units", "rows"
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


class BatchSource(Protocol):
    """Micro-batches of a run, by update.

    An update's items (units or rows) are drawn together and then made into micro-batches, either in
    this process, or by each host for its share.
    """

    def draw(self, step: int) -> Indices:
        """Return the numbers of the items that update `step` reads, possibly none."""

    def items(self, units: range) -> range:
        """Return the numbers of the items of units `units.start` to `units.stop` − 1."""

    def made(self, step: int, drawn: Indices) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a draw of update `step`, of one shape; possibly none."""

    def settings(self) -> dict[str, Any]:
        """Return the settings from which `batches_of` makes the same micro-batches of a draw."""


class UnitBatches:
    """Units, R rows of each, in as many micro-batches as needed.

    Args:
        store: the rows.
        coins: 64 secret bits, which choose rows and masks.
        units: U, units of a micro-batch.
        rows: R, rows of a unit and update, including copies.
        maskings: masked copies of each row; R is a multiple of it.
        least: least number of micro-batches of a draw; smaller draws end with pure padding.
        examples: makes the inputs and predictions of rows.
    """

    def __init__(
        self,
        store: TokenStore,
        coins: int,
        units: int,
        rows: int,
        *,
        maskings: int = 1,
        least: int = 0,
        examples: Examples = masked_examples,
    ) -> None:
        self._store, self._coins = store, coins
        self._units, self._rows, self._maskings = units, rows, maskings
        self._least, self._examples = least, examples

    def items(self, units: range) -> range:
        """Return the units themselves."""
        return units

    def made(self, step: int, drawn: Indices) -> Iterator[MicroBatch]:
        """Yield the micro-batches of drawn units; without units only the `least` number."""
        count = max(self._least, math.ceil(len(drawn) / self._units))
        for start in range(0, count * self._units, self._units):
            units = drawn[start : start + self._units]
            chosen = self._rows // self._maskings
            rows, real = choose_rows(self._store, units, chosen, self._coins, step)
            keys = row_keys(self._store, units, rows, self._coins, step)
            rows, real, keys = masked_copies(rows, real, keys, self._maskings)
            yield micro_batch(self._store, rows, real, keys, self._units, self._examples)

    def settings(self) -> dict[str, Any]:
        """Return the constructor's numbers. The seed cannot be derived from the coins."""
        return {
            "kind": _OF_UNITS,
            "coins": self._coins,
            "units": self._units,
            "rows": self._rows,
            "maskings": self._maskings,
            "least": self._least,
        }


class PrivateBatches(UnitBatches):
    """The units that a sampler draws.

    Args:
        store: the rows.
        sampler: draws the units of each update.
        coins: as in `UnitBatches`, like `units`, `rows`, `maskings` and `examples`.
        largest: largest draw of the sampler, if it is bounded. Every update then has at least the
            number of micro-batches that this draw needs.
        hosts: number of hosts that share a draw.
    """

    def __init__(
        self,
        store: TokenStore,
        sampler: BatchSampler,
        coins: int,
        units: int,
        rows: int,
        *,
        maskings: int = 1,
        largest: int = 0,
        hosts: int = 1,
        examples: Examples = masked_examples,
    ) -> None:
        least = math.ceil(largest / (units * hosts))
        super().__init__(
            store, coins, units, rows, maskings=maskings, least=least, examples=examples
        )
        self._sampler = sampler

    @classmethod
    def of_plan(
        cls,
        plan: ExecutionPlan,
        seed: PrivacySeed,
        store: TokenStore,
        *,
        micro_rows: int,
        devices: int,
        examples: Examples,
        hosts: int = 1,
    ) -> PrivateBatches:
        """Return the batches that the plan accounts for.

        Raises:
            BadInput: the store has more units than the plan declares.
        """
        rows = plan.examples_per_step * plan.maskings_per_example
        return cls(
            store,
            plan.sampler(seed, store.n_units),
            int.from_bytes(seed.derive("rows and masks")[:8], "little"),
            max(1, micro_rows // rows) * devices,
            rows,
            maskings=plan.maskings_per_example,
            largest=plan.sampling.largest_batch(plan.declared_units) or 0,
            hosts=hosts,
            examples=examples,
        )

    def draw(self, step: int) -> Indices:
        """Return the sorted units of an update for all hosts."""
        return self._sampler.batch(step)

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an update; without units only the least number."""
        return self.made(step, self.draw(step))


class OrdinaryBatches:
    """Batches of training without privacy: shuffled epochs over all rows, one unit for each row.

    Args:
        store: the rows.
        seed: public; orders rows and chooses masks, anew in every epoch.
        units: U, rows of a micro-batch (each row is one unit here).
        batch_rows: rows of an update.
        examples: makes the inputs and predictions of rows.
    """

    def __init__(
        self,
        store: TokenStore,
        seed: int,
        units: int,
        batch_rows: int,
        *,
        examples: Examples = masked_examples,
    ) -> None:
        self._store, self._seed, self._units = store, seed, units
        self._batch_rows, self._examples = batch_rows, examples

    def draw(self, step: int) -> Indices:
        """Return the rows of an update, in order; successive updates run through the epochs."""
        numbers = np.arange(step * self._batch_rows, (step + 1) * self._batch_rows)
        epochs, offsets = np.divmod(numbers, self._store.n_rows)
        rows = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = ShuffledRange(self._store.n_rows, self._seed, int(epoch))
            rows[here] = order.items(offsets[here])
        return rows

    def items(self, units: range) -> range:
        """Return the rows of the units."""
        unit_rows = self._store.unit_rows
        return range(int(unit_rows[units.start]), int(unit_rows[units.stop]))

    def made(self, step: int, drawn: Indices) -> Iterator[MicroBatch]:
        """Yield the micro-batches of drawn rows."""
        for start in range(0, len(drawn), self._units):
            rows = drawn[start : start + self._units]
            units = np.searchsorted(self._store.unit_rows, rows, side="right") - 1
            keys = row_keys(self._store, units, rows[:, None], self._seed, step)
            real = np.ones((len(rows), 1), np.bool_)
            yield micro_batch(self._store, rows[:, None], real, keys, self._units, self._examples)

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an update."""
        return self.made(step, self.draw(step))

    def settings(self) -> dict[str, Any]:
        """Return the constructor's numbers."""
        return {
            "kind": _OF_ROWS,
            "seed": self._seed,
            "units": self._units,
            "batch_rows": self._batch_rows,
        }


def batches_of(
    settings: Mapping[str, Any], store: TokenStore, examples: Examples, devices: int = 1
) -> UnitBatches | OrdinaryBatches:
    """Return the batch source that another source's `settings` describe, over the same rows.

    Args:
        settings: settings of a source for one device.
        store: the rows.
        examples: as in `UnitBatches`.
        devices: number of devices that share a micro-batch; multiplies its units.
    """
    numbers = {name: value for name, value in settings.items() if name != "kind"}
    numbers["units"] *= devices
    if "least" in numbers:
        numbers["least"] = math.ceil(numbers["least"] / devices)
    if settings["kind"] == _OF_ROWS:
        return OrdinaryBatches(store, **numbers, examples=examples)
    return UnitBatches(store, **numbers, examples=examples)


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
    )
    if n == units:
        return batch
    return MicroBatch(*(_padded(a, units) for a in batch.arrays()))  # type: ignore[arg-type]


def _padded(array: NDArray[np.int32] | NDArray[np.float32], units: int) -> NDArray[np.generic]:
    out = np.zeros((units, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out


T = TypeVar("T")
_WAIT = 0.1


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def prefetch(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Yield the items in order, while a thread makes up to `depth` items ahead.

    An error in the thread is raised here. Leaving the loop early ends the thread.
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
