"""Audits of this engine on synthetic data, which have no privacy cost.

They use the execution plan, sampler, clipper, noise, trainer and loop of every private training.
The audited training runs on whole-unit canaries, each included or not by a coin.

* *White box* (Nasr et al. 2023, arXiv:2302.07956): the adversary sees the noised sum of every
  update. Canaries are Dirac gradients: the gradient of a unit lies in one entry of one table, which
  it shares with no other unit, and is far above the clip norm. Only the noise hides a canary, so
  the bound comes as near to the claim as one run can. Tables belong to layers of four kinds, each
  with the clipping rule of that kind.
* *Black box* (Panda et al. 2025, arXiv:2503.06808): the adversary sees only the released weights. A
  canary is a row with a token that no other row has, among ordinary rows that a decoder learns. Its
  score is the released model's loss on it.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.audit.canaries import Coins
from dp_core.audit.observations import canary_scores
from dp_core.audit.one_run import Scores
from dp_core.config.training import TrainingConfig
from dp_core.data.hashing import U64
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.models.config import Gpt2Config
from dp_core.models.parameters import WORD, Model, ModelConfig, fresh
from dp_core.nn import Layers, Tensor
from dp_core.privacy.accounting.calibration import noise_for
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import PrivateUpdates, train
from dp_core.training.objectives import Objective, objective_for
from dp_core.training.trainer import Observer

MANIFEST = b"engine audit"
_START = 0.3  # standard deviation of the black box's initial weights
_FLOOR = 10.0  # noise floor, in deviations of an update's noise: disables adaptive scaling
CLIP_NORM = 1.0


def audited_plan(
    units: int, epsilon: float, delta: float, *, sampling_rate: float, steps: int
) -> ExecutionPlan:
    """Return a plan with Poisson sampling that claims ε at δ.

    Args:
        units: declared number of units, including every canary, drawn or not.
        epsilon: the claimed ε, to which σ is calibrated.
        delta: below 1/units.
        sampling_rate: sampling rate of every update.
        steps: number of updates.
    """

    def plan(noise_multiplier: float) -> ExecutionPlan:
        return ExecutionPlan.poisson(
            unit=PrivacyUnit.EXAMPLE,
            declared_units=units,
            expected_batch=sampling_rate * units,
            steps=steps,
            clip_norm=CLIP_NORM,
            noise_multiplier=noise_multiplier,
            delta=delta,
        )

    return plan(noise_for(lambda sigma: plan(sigma).event(), epsilon, delta))


# --- white box: Dirac canaries in the noised sums

_KINDS = ("embedding", "dense", "projection", "norm")
_EMBEDDING, _DENSE, _PROJECTION, _NORM = (f"probe/{kind}" for kind in _KINDS)
_STEEPNESS = 10.0  # norm of a canary's gradient before clipping, in clip norms


@dataclass(frozen=True)
class DiracCanaries:
    """Canaries with Dirac gradients: each has a gradient in one entry of a layer's table.

    The number of a canary determines its layer and its entry. A quarter of the canaries belongs to
    each of embedding, dense layer, tied projection and layer norm (there to a gain and its shift).

    Attributes:
        side: A, the rows and the columns of each table, which has A² canaries.

    Raises:
        BadInput: an odd side, or a side below 2.
    """

    side: int

    def __post_init__(self) -> None:
        if self.side < 2 or self.side % 2:
            raise BadInput(f"{self.side} by {self.side} canaries a layer", where="audit")

    @classmethod
    def at_least(cls, canaries: int) -> Self:
        """Return a layout of at least this number of canaries."""
        return cls(2 * max(1, int(np.ceil(np.sqrt(canaries / 16)))))

    @property
    def cells(self) -> int:
        """Number of canaries of a layer."""
        return self.side**2

    @property
    def count(self) -> int:
        """Number of all canaries, m."""
        return len(_KINDS) * self.cells

    @property
    def units(self) -> int:
        """Declared units: every canary, included or not."""
        return self.count

    @property
    def objective(self) -> Objective:
        """The objective of a training on these canaries."""
        return Objective("dirac canaries", _only_ids, self.row_losses)

    def model(self) -> Model[ModelConfig]:
        """Return tables of zeros; the config holds only the vocabulary size and the row length."""
        table = (self.side, self.side)
        config = Gpt2Config(
            vocab_size=self.count, hidden=1, layers=1, heads=1, intermediate=1, max_positions=1
        )
        shapes = {
            _EMBEDDING: table,
            f"{_DENSE}/kernel": table,
            _PROJECTION: table,
            f"{_NORM}/gain": (self.cells,),
            f"{_NORM}/bias": (self.cells,),
        }
        return Model(config, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})

    def row_losses(
        self, layers: Layers, config: ModelConfig, ids: Tensor, *ignored: Tensor
    ) -> Tensor:
        """Return each row's loss, linear in the entry of its canary: (M, 1) ids -> (M,)."""
        kind, cell = ids[:, 0] // self.cells, ids[:, 0] % self.cells
        a, b = cell // self.side, cell % self.side
        one_row, one_column = tf.one_hot(a, self.side), tf.one_hot(b, self.side)
        signs = tf.tile(tf.constant(self._signs(), tf.float32)[None], (ids.shape[0], 1))
        by_kind = (
            tf.reduce_sum(
                layers.embed(a[:, None], None, _EMBEDDING, None, None)[:, 0] * one_column, axis=1
            ),
            tf.reduce_sum(layers.dense(_DENSE, one_row) * one_column, axis=1),
            tf.reduce_sum(layers.tied_projection(one_column, _PROJECTION, None) * one_row, axis=1),
            tf.gather(layers.layer_norm(_NORM, signs, 0.0), cell, batch_dims=1),
        )
        chosen = tf.one_hot(kind, len(_KINDS), axis=0)  # (kinds, M)
        return _STEEPNESS * CLIP_NORM * tf.reduce_sum(tf.stack(by_kind) * chosen, axis=0)

    def write_store(self, folder: Path, coins: Coins) -> TokenStore:
        """Write the included canaries; coins are (m,) true for included canaries."""
        writer = TokenStoreWriter(folder, 1, self.count)
        for number in np.flatnonzero(coins).tolist():
            writer.add_unit(f"canary {number}", [[number]])
        return writer.finish()

    def along(self, means: Mapping[str, Tensor]) -> Scores:
        """Return the component of an update along every canary's gradient: (m,)."""
        flat = {name: np.asarray(mean, np.float64).reshape(-1) for name, mean in means.items()}
        norm = (flat[f"{_NORM}/gain"] * self._signs() + flat[f"{_NORM}/bias"]) / np.sqrt(2.0)
        tables = [flat[name] for name in (_EMBEDDING, f"{_DENSE}/kernel", _PROJECTION)]
        return np.concatenate([*tables, norm])

    def _signs(self) -> NDArray[np.float64]:
        """Return the layer norm's input +1, −1, …, which the layer norm does not change."""
        return np.where(np.arange(self.cells) % 2, -1.0, 1.0)


def _only_ids(store: TokenStore, rows: NDArray[np.int64], keys: U64) -> MaskedRows:
    ids = store.tokens[rows].astype(np.int32)
    return MaskedRows(ids, np.zeros_like(ids), np.zeros_like(ids), np.ones(ids.shape, np.float32))


def white_box_observations(
    canaries: DiracCanaries,
    plan: ExecutionPlan,
    coins: Coins,
    seed: PrivacySeed,
    *,
    micro_rows: int = 512,
) -> Scores:
    """Train on the included canaries; return the evidence of every canary in the noised sums.

    Args:
        canaries: as many canaries as the plan's declared units.
        plan: execution plan of the training.
        coins: (m,) true for included canaries.
        seed: secret seed of the training's sampling and noise, other than the seed of the coins.
        micro_rows: number of rows of a micro-batch.

    Returns:
        (updates, m): inner products of the noised sums with the canaries' gradients, in clip norms.
    """
    seen = np.empty((plan.steps, canaries.count))

    def observe(step: int, means: Mapping[str, Tensor]) -> None:
        seen[step] = canaries.along(means) * (plan.expected_batch(step) / plan.clip_norm)

    _trained(canaries, plan, coins, seed, 1.0, micro_rows, observe)
    return seen


def periodic(observations: Scores, period: int) -> Scores:
    """Return each canary's largest sum over every `period`-th update, (T, m) -> (m,).

    Under Poisson sampling this score is weaker than the sum over all updates. If an engine deals
    batches in a fixed order but claims Poisson sampling, the score finds the updates that a canary
    takes part in.

    Args:
        observations: from `white_box_observations`.
        period: number of updates of an epoch, 1 / sampling rate.
    """
    turns = [observations[turn::period].sum(axis=0) for turn in range(period)]
    return np.asarray(np.max(turns, axis=0))


def white_box_scores(plan: ExecutionPlan, observations: Scores) -> list[Scores]:
    """Return the scores of every white-box audit: summed, and periodic where it differs.

    The choice of scores depends on the plan alone, so it is made before the training.
    """
    period = min(plan.steps, max(1, round(1 / plan.sampling_rate(0))))
    ways = [np.asarray(observations.sum(axis=0))]
    return ways if period == 1 else [*ways, periodic(observations, period)]


# --- black box: canaries with a unique token, seen in the released weights

_WORDS, _LENGTH = 64, 8  # distinct tokens in ordinary rows, and tokens of such a row
_WIDTH = 64  # of the decoder


@dataclass(frozen=True)
class NewTokenCanaries:
    """Rows with one token that occurs in no other row, among ordinary rows of other tokens.

    Attributes:
        count: m, the number of canaries.
        ordinary: number of rows without a canary.
    """

    count: int
    ordinary: int = 256

    @property
    def units(self) -> int:
        """Declared units: every canary, included or not, and every ordinary row."""
        return self.count + self.ordinary

    @property
    def first(self) -> int:
        """Id of the first canary's token."""
        return len(SpecialIds().as_tuple()) + _WORDS

    @property
    def objective(self) -> Objective:
        """The objective of a training on these canaries."""
        return objective_for(self.config)

    @property
    def config(self) -> Gpt2Config:
        """The shape of a decoder of one block."""
        return Gpt2Config(
            vocab_size=self.first + self.count,
            hidden=_WIDTH,
            layers=1,
            heads=1,
            intermediate=_WIDTH,
            max_positions=_LENGTH + 2,
            initializer_range=_START,
        )

    def model(self) -> Model[Gpt2Config]:
        """Return a decoder, freshly initialised except that new tokens are zero.

        The initial weights are public and chosen by the auditor (Annamalai and De Cristofaro 2024,
        arXiv:2405.14106). Hidden states that are large relative to an update's noise hardly change,
        so a canary's effect on its row of the embedding table remains visible.
        """
        start = fresh(self.config, 0)
        start.parameters[WORD][self.first :] = 0.0
        return start

    def write_store(self, folder: Path, coins: Coins) -> TokenStore:
        """Write the included canaries, and ordinary rows of consecutive words.

        Args:
            folder: folder of the store.
            coins: (m,) true for included canaries.
        """
        special, first = SpecialIds(), self.first - _WORDS
        writer = TokenStoreWriter(folder, _LENGTH + 2, self.first + self.count)
        for number in np.flatnonzero(coins).tolist():
            writer.add_unit(f"canary {number}", [[special.cls, self.first + number, special.sep]])
        starts = np.random.default_rng(0).integers(0, _WORDS, self.ordinary)
        for number, start in enumerate(starts.tolist()):
            run = [first + (start + i) % _WORDS for i in range(_LENGTH)]
            writer.add_unit(f"ordinary {number}", [[special.cls, *run, special.sep]])
        return writer.finish()


def black_box_scores(
    canaries: NewTokenCanaries,
    plan: ExecutionPlan,
    coins: Coins,
    seed: PrivacySeed,
    *,
    micro_rows: int = 128,
) -> Scores:
    """Train a decoder; return the released weights' score of every canary: (m,).

    Args:
        canaries: the canaries and ordinary rows, whose number is the plan's declared units.
        plan: execution plan of the training.
        coins: (m,) true for included canaries.
        seed: secret seed of the training's sampling and noise, other than the seed of the coins.
        micro_rows: number of rows of a micro-batch.

    Returns:
        The increase of each canary token's log-probability at the beginning of a row, from the
        public initial weights to the released weights, in nats.
    """
    start = canaries.model()
    released = _trained(canaries, plan, coins, seed, 0.02, micro_rows)
    with tempfile.TemporaryDirectory() as scratch:
        every = canaries.write_store(Path(scratch), np.ones(canaries.count, np.bool_))
        return canary_scores(start, released, every)[: canaries.count]


def _trained(
    canaries: DiracCanaries | NewTokenCanaries,
    plan: ExecutionPlan,
    coins: Coins,
    seed: PrivacySeed,
    learning_rate: float,
    micro_rows: int,
    observe: Observer | None = None,
) -> Model[Any]:
    """Return the model of a private training on the included canaries.

    Updates have equal weights: gradient descent at a constant rate, by DP-AdamBC with a large noise
    floor and no momentum, w ← w − η·g̃/(_FLOOR·noise's deviation).
    """
    if len(coins) != canaries.count or plan.declared_units != canaries.units:
        raise BadInput("canaries, coins and declared units must be as many", where="audit")
    config = TrainingConfig(
        learning_rate=learning_rate,
        beta1=0.0,
        noise_floor=_FLOOR**2,
        warmup=0.0,
        decay_power=0.0,
        weight_decay=0.0,
        checkpoint_every=plan.steps,
        micro_rows=micro_rows,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        return train(
            canaries.model(),
            canaries.objective,
            store=canaries.write_store(folder / "store", coins),
            updates=PrivateUpdates(plan, seed, MANIFEST),
            config=config,
            seed=0,
            checkpoints=LocalFolder(folder / "checkpoints"),
            observe=observe,
        )
