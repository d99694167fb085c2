"""Sources of an update's clipped gradient sum: this process, or hosts of a cluster.

The step draws the units of every update from all units at once, including truncation, and adds the
noise once, after it has added the sums of all hosts. A host receives weights, clip norm and the
drawn items of its share, and returns a clipped sum without noise. It never receives a seed or a
plan.

*Units.* Host k of n owns a contiguous range of units (`share`) and reads no other rows. The union
over hosts is exactly the batch of a single process. The step sends one number for each item of a
share, drawn or not, so no message size reveals the number of drawn items.

*Sums.* The step adds the hosts' sums in the order of the hosts. The float32 sum of one process
becomes a sum of n parts: weights agree up to rounding, and are the same bits for the same n.

*Faults.* A host's answer depends only on its arguments. A restarted host computes the same update
again, and no sum of an interrupted call remains (`Trainer.clear`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.cluster.shard_map import HostFunction, Hosts
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.models.parameters import Arrays, ModelConfig
from dp_core.privacy.execution_plan import Clipper, ClippingStyle
from dp_core.training.batches import Batches, Indices, MicroBatch, SingleRows, UnitRows, prefetch
from dp_core.training.checkpoints import arrays_digest
from dp_core.training.devices import configure, strategy_for
from dp_core.training.objectives import Objective, objective_for
from dp_core.training.trainer import Trainer

_AHEAD = 8  # micro-batches made in advance
OpenRows = Callable[[], TokenStore]
Sums = tuple[list[NDArray[np.float32]], NDArray[np.float64]]
# (first, last) -> the number of each update, after a trainer has its clipped sum
GradientSource = Callable[[int, int], Iterator[int]]


def local_gradients(trainer: Trainer, batches: Batches, first: int, last: int) -> Iterator[int]:
    """Yield each update's number, from `first` to `last` − 1, after the trainer has its sum.

    The devices of this process compute the gradients of micro-batches, which a thread makes ahead.
    """

    def stream() -> Iterator[tuple[int, MicroBatch | None]]:
        for step in range(first, last):
            for batch in batches.micro_batches(step):
                yield step, batch
            yield step, None  # empty batches make updates, too

    with contextlib.closing(prefetch(stream(), _AHEAD)) as items:
        for step, batch in items:
            if batch is None:
                yield step
            else:
                trainer.add(batch)


@dataclass(frozen=True)
class GradientHosts:
    """The hosts of a training, and their access to the rows.

    Attributes:
        hosts: hosts of a cluster.
        open_rows: picklable function that opens the token store on a host.
    """

    hosts: Hosts
    open_rows: OpenRows

    def source(
        self, trainer: Trainer, objective: Objective, batches: Batches, device: str
    ) -> GradientSource:
        """Start the hosts; return the source of their sums.

        Each host sums over its share of the units, of items that the step draws for all hosts.

        Raises:
            BadInput: hosts do not support the objective.
            ConfideError: the cluster does not answer.
        """
        clipper, weights, count = trainer.clipper, trainer.weights(), self.hosts.count
        if objective.name != objective_for(trainer.config).name:
            raise BadInput(
                f"hosts of a cluster do not train the objective {objective.name}",
                where="CONFIDE_HOSTS",
                fix="Unset it: hosts train language models.",
            )
        store = batches.store
        shares = [share(number, count, store.n_units) for number in range(count)]
        self.hosts.start(
            [
                HostShare(
                    units=units,
                    config=trainer.config,
                    trained={name: weights[name].shape for name in trainer.names},
                    frozen={n: a for n, a in weights.items() if n not in trainer.names},
                    clipping=None if clipper is None else clipper.style,
                    precision=trainer.precision,
                    dropout=trainer.dropout,
                    device=device,
                    continuation=objective.continuation,
                    rows=batches.rows,
                    open_rows=self.open_rows,
                    rows_digest=rows_digest(store, units),
                )
                for units in shares
            ]
        )
        items_of_hosts = [batches.rows.items(store, units) for units in shares]

        def gradients(first: int, last: int) -> Iterator[int]:
            for step in range(first, last):
                drawn = batches.sampler.batch(step)
                shared = (step, trainer.clip_norm, trainer.trained_weights())
                marks = [marks_of(drawn, items) for items in items_of_hosts]
                trainer.load(*added(self.hosts.call(shared, marks)))
                yield step

        return gradients


@dataclass(frozen=True)
class HostShare:
    """Everything that a host receives before the first update, without seed and plan.

    Attributes:
        units: units of the host.
        config: the model's shape.
        trained: shape of each trained parameter.
        frozen: the other parameters.
        clipping: style; None does not clip.
        precision: precision of products.
        dropout: rate of dropout.
        device: device of the host.
        continuation: word continuation flags of the objective.
        rows: makes micro-batches for one device. Its coins choose rows and masks; the noise cannot
            be derived from them.
        open_rows: opens the token store.
        rows_digest: digest of the host's rows.
    """

    units: range
    config: ModelConfig
    trained: Mapping[str, tuple[int, ...]]
    frozen: Arrays = field(repr=False)
    clipping: ClippingStyle | None
    precision: str
    dropout: float
    device: str
    continuation: NDArray[np.bool_] | None = field(repr=False)
    rows: UnitRows | SingleRows = field(repr=False)
    open_rows: OpenRows
    rows_digest: str = field(repr=False)

    def __call__(self) -> HostFunction:
        """Return the function that computes the host's clipped sum of an update.

        Its arguments are (number of the update, clip norm, weights in the order of `trained`) and
        the host's marks, see `marks_of`. It returns the sums and counts of `Trainer.take`.

        Raises:
            BadInput: the host reads other rows than the step.
        """
        configure(self.device)
        store = self.open_rows()
        if rows_digest(store, self.units) != self.rows_digest:
            raise BadInput(
                "a host reads other rows than the step", fix="Let all hosts read the same store."
            )
        tf.config.experimental.enable_op_determinism()  # as in the step
        objective = objective_for(self.config, self.continuation)
        zeros = {name: np.zeros(shape, np.float32) for name, shape in self.trained.items()}
        trainer = Trainer(
            strategy_for(self.device),
            self.config,
            {**zeros, **self.frozen},
            None,
            None if self.clipping is None else Clipper(1.0, self.clipping),
            precision=self.precision,
            row_losses=objective.row_losses,
            trained=list(zeros),
            dropout=self.dropout,
        )
        rows, items = self.rows.on(trainer.devices), self.rows.items(store, self.units)

        def sums_of(shared: Any, marks: NDArray[np.uint16]) -> Sums:
            step, clip_norm, weights = shared
            trainer.clear()
            trainer.set_weights(weights)
            if trainer.clipper is not None:
                trainer.clipper.clip_norm = clip_norm
            made = rows.made(store, objective.examples, step, marked(marks, items))
            with contextlib.closing(prefetch(made, _AHEAD)) as batches:
                for batch in batches:
                    trainer.add(batch)
            return trainer.take()

        return sums_of


def added(results: Iterator[Sums]) -> Sums:
    """Return the sum over hosts, added in the order of the hosts."""
    sums, counts = next(results)
    totals = [np.array(array) for array in sums]
    for more, more_counts in results:
        for total, array in zip(totals, more, strict=True):
            total += array
        counts = counts + more_counts
    return totals, counts


def share(number: int, count: int, n_units: int) -> range:
    """Return the units of host `number` of `count`: contiguous ranges that partition the units.

    Their sizes differ by at most one unit. The share of a unit depends only on its position in the
    store.
    """
    return range(n_units * number // count, n_units * (number + 1) // count)


def marks_of(drawn: Indices, items: range) -> NDArray[np.uint16]:
    """Return how often each item is drawn, (len(items),); the size does not depend on the draw."""
    inside = drawn[(items.start <= drawn) & (drawn < items.stop)] - items.start
    return np.bincount(inside, minlength=len(items)).astype(np.uint16)


def marked(marks: NDArray[np.uint16], items: range) -> Indices:
    """Return the sorted items that `marks_of` encodes."""
    return np.repeat(np.arange(items.start, items.stop), marks)


def rows_digest(store: TokenStore, units: range) -> str:
    """Return SHA-256 over the rows and keys of a share of a store; private like the rows."""
    first, last = int(store.unit_rows[units.start]), int(store.unit_rows[units.stop])
    return arrays_digest(
        {
            "tokens": store.tokens[first:last],
            "lengths": store.lengths[first:last],
            "unit_rows": store.unit_rows[units.start : units.stop + 1],
            "unit_keys": store.unit_keys[units.start : units.stop],
        },
        f"{store.n_units} {store.vocabulary_size}",
    )
