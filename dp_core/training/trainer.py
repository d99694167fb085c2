"""Compiled training: accumulates clipped gradients and applies AdamW updates.

Each device adds the gradient sums of its micro-batches to its accumulators. With a cluster, the
sums of the hosts are loaded into the accumulators instead. An update adds the accumulators of all
devices, adds the noise ONCE, divides, and changes the weights. The noise is keyed only by variable
and update, so the layout (hosts, devices, micro-batches) cannot change it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.models.bert import mlm_row_losses
from dp_core.models.parameters import Arrays, ModelConfig, decays
from dp_core.nn import RowLosses, Tensor
from dp_core.privacy.execution_plan import Clipper
from dp_core.privacy.noise_addition import UpdateNoise, Vector, noised_means
from dp_core.training.batches import MicroBatch
from dp_core.training.objectives import UnitBatch, ordinary_sum


@dataclass(frozen=True)
class AdamW:
    """The AdamW optimizer (Loshchilov and Hutter 2019): its constants and its update rule.

    With a `noise_floor` γ > 0 it is DP-AdamBC (Tang, Shpilevskiy and Lécuyer 2023,
    arXiv:2312.14334). The bias-corrected second moment of noised gradients is the sum of the
    signal's and the noise's second moments. The known part of the noise is subtracted,

        w ← w − η·m̂ / √max(v̂ − Φ̂, γΦ̂),

    where Φ̂ is the bias-corrected decaying mean of the noise's variance (σC/B)², with the same decay
    as v, so clip norm and batch size may change. The authors' floor γ' is an
    absolute variance; a multiple of Φ̂ means the same at any σ, C and B. A large γ gives momentum.
    """

    beta1: float
    beta2: float
    weight_decay: float
    noise_floor: float = 0.0
    epsilon: float = 1e-8

    def apply(
        self,
        name: str,
        weight: Any,
        mean: Any,
        square: Any,
        gradient: Tensor,
        learning_rate: Tensor,
        step: Tensor,
        noise_variance: Tensor | None = None,
        loudness: Tensor | float = 1.0,
    ) -> None:
        """Update one variable and its two moments.

        Args:
            name: name of the parameter; biases and LayerNorm gains do not decay.
            weight: tf.Variable.
            mean: tf.Variable, the decaying mean of the gradients.
            square: tf.Variable, the decaying mean of the squared gradients.
            gradient: of the variable's shape.
            learning_rate: scalar.
            step: scalar float32, number of this update, from 1.
            noise_variance: scalar Φ̂, only with a `noise_floor`; 0 if no update was noised.
            loudness: multiplies the step without the decay. It has no effect with a `noise_floor`,
                which already removes the noise from the second moment.
        """
        if self.weight_decay and decays(name):
            weight.assign_sub(learning_rate * self.weight_decay * weight)
        if noise_variance is not None:
            mean.assign_add((1 - self.beta1) * (gradient - mean))
            square.assign_add((1 - self.beta2) * (tf.square(gradient) - square))
            first = mean / (1 - tf.pow(self.beta1, step))
            second = square / (1 - tf.pow(self.beta2, step))
            signal = tf.maximum(second - noise_variance, self.noise_floor * noise_variance)
            weight.assign_sub(learning_rate * first / (tf.sqrt(signal) + self.epsilon))
            return
        tf.raw_ops.ResourceApplyAdam(
            var=weight.handle,
            m=mean.handle,
            v=square.handle,
            beta1_power=tf.pow(self.beta1, step),
            beta2_power=tf.pow(self.beta2, step),
            lr=learning_rate * loudness,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            grad=gradient,
        )


@dataclass(frozen=True)
class PublicNoise:
    """Gaussian noise from a public seed, with any deviation: it protects nothing.

    Attributes:
        seed: public.
        t: number of the update.
        deviation: standard deviation of the noise on each value of the sum.
    """

    seed: int
    t: int
    deviation: float

    def means(self, totals: Mapping[str, Vector], divisor: float) -> dict[str, Vector]:
        """Return (sum + noise) / divisor of every parameter; each has a separate random stream."""
        means: dict[str, Vector] = {}
        for name, total in totals.items():
            stream = np.random.default_rng([self.seed, self.t, zlib.crc32(name.encode())])
            noise = stream.standard_normal(total.shape, np.float32) * np.float32(self.deviation)
            means[name] = np.asarray((total + noise) / np.float32(divisor), np.float32)
        return means


_MEAN, _SQUARE = "adam-mean/", "adam-square/"
_CLIP_NORM, _NOISE = "clip-norm", "adam-noise"
_TALLIES = 3  # sum of unit losses, units, clipped units
Observer = Callable[[int, Mapping[str, Tensor]], None]  # (update, noised means by name)


class Trainer:
    """Accumulates clipped gradients on the devices of a strategy, and applies AdamW updates.

    Args:
        strategy: from `devices.strategy_for`.
        config: the model's shape.
        parameters: initial weights, by name.
        optimizer: the constants of AdamW; None only computes sums, as a host does.
        clipper: clips the units' gradients at its current clip norm; None: no clipping.
        precision: format of the factors of products, `float32` or `bfloat16`; weights, norms,
            sums and noise are float32.
        row_losses: losses of the objective.
        trained: names of the trained parameters; all if None. The others are read and stay
            unchanged, bit for bit: they have no gradient, no noise, no moments and no part in a
            norm.
        dropout: rate of dropout.
        observe: for audits, called with every update's noised means, which private training
            releases. It is not called after an update without noise.

    Raises:
        BadInput: no parameter is trained, or, at the first batch, an unknown precision.
    """

    def __init__(
        self,
        strategy: Any,
        config: ModelConfig,
        parameters: Arrays,
        optimizer: AdamW | None,
        clipper: Clipper | None,
        *,
        precision: str = "float32",
        row_losses: RowLosses = mlm_row_losses,
        trained: Collection[str] | None = None,
        dropout: float = 0.0,
        observe: Observer | None = None,
    ) -> None:
        self._strategy, self.config = strategy, config
        self.precision, self.dropout, self._row_losses = precision, dropout, row_losses
        self._optimizer = optimizer or AdamW(0.0, 0.0, 0.0)  # a host makes no updates
        self.clipper, self._observe = clipper, observe
        self._noise_variance = 0.0  # decaying mean, like the second moments
        variables = parameters if trained is None else {n: parameters[n] for n in sorted(trained)}
        if not variables:
            raise BadInput("none of the model's parameters is trained", where="trained_parameters")
        self.names = list(variables)
        frozen = {n: a for n, a in parameters.items() if n not in variables}
        self._order = list(parameters)
        with strategy.scope():
            self._weights = {n: tf.Variable(a, name=n) for n, a in variables.items()}
            self._frozen = {n: tf.Variable(a, name=n, trainable=False) for n, a in frozen.items()}
            self._sums = {n: _accumulator(a.shape) for n, a in variables.items()}
            self._tallies = _accumulator((_TALLIES,))
            self._within = _accumulator(())
            moments = variables if optimizer else {}
            self._means = {n: tf.Variable(np.zeros_like(a)) for n, a in moments.items()}
            self._squares = {n: tf.Variable(np.zeros_like(a)) for n, a in moments.items()}
        self._add = tf.function(self._add_everywhere, autograph=False)
        self._totals = tf.function(self._added_up, autograph=False)
        self._read = tf.function(lambda: self._take(self._tallies), autograph=False)
        self._take_within = tf.function(lambda: self._take(self._within), autograph=False)
        self._clear = tf.function(lambda: self._strategy.run(self._empty), autograph=False)
        self._update = tf.function(self._update_everywhere, autograph=False)
        # Reduces, divides and updates in one compiled call: half the time of an eager division.
        self._update_by_totals = tf.function(self._update_without_noise, autograph=False)

    @property
    def devices(self) -> int:
        """Number of devices that share a micro-batch."""
        return int(self._strategy.num_replicas_in_sync)

    def add(self, batch: MicroBatch) -> None:
        """Add a micro-batch's gradients to the accumulators; devices share its units equally."""
        n = self.devices
        shares = [np.split(array, n) for array in batch]

        def of_device(context: Any) -> tuple[Tensor, ...]:
            return tuple(tf.constant(s[context.replica_id_in_sync_group]) for s in shares)

        values = self._strategy.experimental_distribute_values_from_function(of_device)
        self._add(values, tf.constant(self.clip_norm, tf.float32))

    def set_weights(self, weights: Sequence[Vector]) -> None:
        """Set the weights of the trained parameters, in the order of `names`."""
        for name, values in zip(self.names, weights, strict=True):
            self._weights[name].assign(values)

    def clear(self) -> None:
        """Reset sums and counts to zero."""
        self._clear()
        self._read()
        self._take_within()

    def take(self) -> tuple[list[Vector], NDArray[np.float64]]:
        """Return the sums in the order of `names`, and the counts; then reset all of them.

        Returns:
            Read-only float32 arrays, and (4,): sum of unit losses, units, clipped units, and
            Σ (1{norm ≤ C} − ½).
        """
        totals = self._totals()
        counts = [*self._read().numpy().tolist(), float(self._take_within().numpy())]
        self._clear()
        return [as_array(totals[name]) for name in self.names], np.array(counts, np.float64)

    def _add_everywhere(self, batch: tuple[Any, ...], clip_norm: Tensor) -> None:
        self._strategy.run(self._add_here, args=(clip_norm, *batch))

    def _add_here(self, clip_norm: Tensor, *batch: Tensor) -> None:
        unit_losses = UnitBatch(self._row_losses, self.config, batch, self.dropout)
        shares = MicroBatch(*batch).shares
        real = tf.reduce_sum(shares, axis=1) > 0  # (U,) false for padding
        if self.clipper is None:
            sums, losses = ordinary_sum(unit_losses, self._weights, self.precision, self._frozen)
            norms = tf.zeros_like(losses)
        else:
            clipped = self.clipper.clipped_grad_sum(
                unit_losses, self._weights, shares.shape[0], clip_norm, self.precision, self._frozen
            )
            sums, losses, norms = clipped.sums, clipped.losses, clipped.norms
        for name in self.names:
            self._sums[name].assign_add(sums[name])
        within = norms <= clip_norm
        tallies = (tf.where(real, losses, 0.0), real, tf.logical_and(real, ~within))
        self._tallies.assign_add(tf.stack([tf.reduce_sum(tf.cast(x, tf.float32)) for x in tallies]))
        counted = tf.where(real, tf.cast(within, tf.float32) - 0.5, 0.0)
        self._within.assign_add(tf.reduce_sum(counted))

    def _take(self, counts: Any) -> Tensor:
        # With one device, `reduce` returns the variable itself, so copy it before the reset.
        total = tf.identity(self._strategy.reduce("SUM", counts, axis=None))
        with tf.control_dependencies([total]):
            self._strategy.run(lambda: counts.assign(tf.zeros_like(total)))
        return total

    def _added_up(self) -> dict[str, Tensor]:
        with tf.device("/cpu:0"):
            return {
                name: tf.identity(self._strategy.reduce("SUM", self._sums[name], axis=None))
                for name in self.names
            }

    def _empty(self) -> None:
        for name in self.names:
            self._sums[name].assign(tf.zeros_like(self._sums[name]))

    def apply_update(
        self,
        *,
        step: int,
        learning_rate: float,
        divisor: float,
        noise: UpdateNoise | PublicNoise | None,
        loudness: float = 1.0,
    ) -> None:
        """Make an update from the accumulators, and reset them.

        Args:
            step: number of the update, from 0.
            learning_rate: learning rate of this update.
            divisor: divides the sums. Private training divides by the EXPECTED batch size.
            noise: noise of this update; None adds none.
            loudness: of correlated noise, which later updates cancel (`ToeplitzStrategy`).
        """
        known = self._known_variance(step, 0.0 if noise is None else noise.deviation / divisor)
        scalars = [tf.constant(x, tf.float32) for x in (learning_rate, step + 1)]
        scalars += [tf.constant(x, tf.float32) for x in (known, loudness)]
        if noise is None:
            self._update_by_totals(tf.constant(divisor, tf.float32), *scalars)
            return
        totals = self._totals()
        arrays = {n: as_array(totals[n]) for n in self.names}
        if isinstance(noise, PublicNoise):
            self._update(noise.means(arrays, divisor), *scalars)
            return
        means = noised_means(arrays, noise, divisor)
        if self._observe is not None:
            self._observe(step, means)
        self._update(means, *scalars)

    @property
    def clip_norm(self) -> float:
        """The current clip norm; infinite without clipping."""
        return math.inf if self.clipper is None else self.clipper.clip_norm

    def trained_weights(self) -> list[Vector]:
        """Return the weights of the trained parameters, in the order of `names`."""
        return [self._weights[name].numpy() for name in self.names]

    def load(self, sums: Sequence[Vector], counts: NDArray[np.float64]) -> None:
        """Set the sums of an update, and add its counts; hosts return both by `take`.

        Args:
            sums: sums over all hosts.
            counts: counts over all hosts, (4,).
        """
        for name, values in zip(self.names, sums, strict=True):
            self._sums[name].assign(values)
        self._tallies.assign_add(counts[:_TALLIES].astype(np.float32))
        self._within.assign_add(np.float32(counts[_TALLIES]))

    def read_tallies(self) -> NDArray[np.float64]:
        """Return the sum of unit losses, units and clipped units since the last reading: (3,).

        They are `operator` numbers, computed without noise.
        """
        return np.asarray(self._read().numpy(), np.float64)

    def take_count_within(self) -> float:
        """Return Σ (1{norm ≤ C} − ½) over the units since the last call, without noise.

        Adaptive clipping learns C from this count (Andrew et al. 2021, arXiv:1905.03871, eq. 1 and
        remark 4 of section 2.3). One unit changes it by ½. The sum is exact for under 2²³ units.
        """
        return float(self._take_within().numpy())

    def weights(self) -> Arrays:
        """Return all weights as arrays, including frozen ones."""
        every = {**self._frozen, **self._weights}
        return {n: every[n].numpy() for n in self._order}

    def state(self) -> Arrays:
        """Return the trained parameters' state between two updates, for a checkpoint."""
        return (
            {n: v.numpy() for n, v in self._weights.items()}
            | {_MEAN + n: v.numpy() for n, v in self._means.items()}
            | {_SQUARE + n: v.numpy() for n, v in self._squares.items()}
            | ({_CLIP_NORM: np.array([self.clipper.clip_norm])} if self.clipper else {})
            | ({_NOISE: np.array([self._noise_variance])} if self._optimizer.noise_floor else {})
        )

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state that `state` returned."""
        for n in self.names:
            self._weights[n].assign(state[n])
            self._means[n].assign(state[_MEAN + n])
            self._squares[n].assign(state[_SQUARE + n])
        if self.clipper:
            self.clipper.clip_norm = float(state[_CLIP_NORM][0])
        if self._optimizer.noise_floor:
            self._noise_variance = float(state[_NOISE][0])

    def _known_variance(self, step: int, deviation: float) -> float:
        """Return Φ̂, the bias-corrected decaying mean of the noise's variance up to this update."""
        decay = self._optimizer.beta2
        self._noise_variance += (1 - decay) * (deviation**2 - self._noise_variance)
        return self._noise_variance / (1 - decay ** (step + 1))

    def _update_without_noise(self, divisor: Tensor, *scalars: Tensor) -> None:
        sums = {n: self._strategy.reduce("SUM", self._sums[n], axis=None) for n in self.names}
        self._update_everywhere({name: total / divisor for name, total in sums.items()}, *scalars)

    def _update_everywhere(
        self,
        gradients: dict[str, Tensor],
        learning_rate: Tensor,
        step: Tensor,
        noise_variance: Tensor,
        loudness: Tensor,
    ) -> None:
        scalars = {"learning_rate": learning_rate, "step": step, "loudness": loudness}
        if self._optimizer.noise_floor:
            scalars["noise_variance"] = noise_variance
        for name in self.names:
            apply = partial(self._optimizer.apply, name, **scalars)
            arguments = (self._means[name], self._squares[name], gradients[name])
            self._strategy.extended.update(self._weights[name], apply, args=arguments)
        self._strategy.run(self._empty)


def _accumulator(shape: tuple[int, ...]) -> Any:
    """Return a variable with one copy per device; reading it adds up the copies."""
    return tf.Variable(
        np.zeros(shape, np.float32),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def as_array(tensor: Tensor) -> Vector:
    """Return a tensor in this machine's memory as a read-only array, without a copy."""
    array: Vector = np.asarray(memoryview(tensor))
    return array
