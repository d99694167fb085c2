"""How a model is trained, apart from privacy: batches, rates, optimizer, and how a run is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.models.parameters import ModelConfig
from dp_core.privacy.execution_plan import BatchPhase, ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed

_COUNTS = (
    "batch_size",
    "updates",
    "examples_per_step",
    "micro_rows",
    "checkpoint_every",
    "keep_checkpoints",
)
_HOUSEKEEPING = ("checkpoint_every", "keep_checkpoints", "stop_after_seconds")


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of one pre-training.

    Attributes:
        batch_size: units an update reads (with a privacy plan, expected units); with a
            `schedule`, the size it ends with.
        updates: number of updates.
        learning_rate: peak, of AdamW.
        examples_per_step: rows R of a unit that one update reads.
        warmup: share of the updates in which the rate rises linearly.
        decay_power: how it falls after: as (share of the updates left)^power; 0 keeps the peak.
        weight_decay: decoupled, on kernels and tables only. Anil et al. 2021 take values near 1
            where 0.01 is usual: under DP the noise makes the norms of weights that a LayerNorm
            follows grow, which slows learning down.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        schedule: batches that grow, phase by phase; () is `batch_size` throughout.
        whole_words: mask all pieces of a word together (needs the vocabulary's continuations).
        engine: the way to the clipped sum: `book-keeping`, `tensorflow-privacy` or `naive`.
        clipping: `flat`, or `automatic` (Bu et al. 2022), where C only scales the gradient.
        precision: of the factors of products, `float32` or `bfloat16`.
        micro_rows: rows that one device works on at a time; memory and speed only.
        checkpoint_every: updates between checkpoints.
        keep_checkpoints: how many of the newest are kept.
        stop_after_seconds: end after the first update past this time, with a checkpoint, to go on
            when run again; None never does.
    """

    batch_size: int
    updates: int
    learning_rate: float
    examples_per_step: int = 1
    warmup: float = 0.1
    decay_power: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    schedule: tuple[BatchPhase, ...] = ()
    whole_words: bool = False
    engine: str = "book-keeping"
    clipping: str = "flat"
    precision: str = "float32"
    micro_rows: int = 64
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    stop_after_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", tuple(self.schedule))
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise BadInput(f"{getattr(self, name)} is below 1", where=name)
        self._check_optimizer()
        self._check_schedule()
        if self.stop_after_seconds is not None and not self.stop_after_seconds > 0:
            raise BadInput(f"{self.stop_after_seconds} is not positive", where="stop_after_seconds")

    def rate(self, t: int) -> float:
        """Return the learning rate of update t (from 0): linear warm-up, then polynomial decay."""
        rising = max(1, round(self.warmup * self.updates))
        if t < rising:
            return self.learning_rate * (t + 1) / rising
        left = (self.updates - t) / max(1, self.updates - rising)
        return float(self.learning_rate * left**self.decay_power)

    def batch_at(self, t: int) -> float:
        """Return the batch of update t (from 0), in units."""
        for phase in self.phases():
            if t < phase.steps:
                return phase.expected_batch
            t -= phase.steps
        raise IndexError("there is no such update")

    def phases(self) -> tuple[BatchPhase, ...]:
        """Return the batches, phase by phase: what a plan's `schedule` must be."""
        return self.schedule or (BatchPhase(self.updates, self.batch_size),)

    def identity(self) -> dict[str, Any]:
        """Return the settings that the trained weights depend on: part of a run's manifest."""
        return {k: v for k, v in asdict(self).items() if k not in _HOUSEKEEPING}

    def _check_optimizer(self) -> None:
        for name in ("learning_rate", "weight_decay", "decay_power"):
            if not math.isfinite(getattr(self, name)):
                raise BadInput(f"{getattr(self, name)} is not a number", where=name)
        if self.learning_rate <= 0:
            raise BadInput(f"{self.learning_rate} is not positive", where="learning_rate")
        if not 0 <= self.warmup <= 1:
            raise BadInput(f"{self.warmup} is not a share", where="warmup")
        if self.decay_power < 0:
            raise BadInput(f"{self.decay_power} is negative", where="decay_power")
        if not 0 <= self.weight_decay * self.learning_rate < 1:
            raise BadInput(
                f"{self.weight_decay} at a rate of {self.learning_rate} would not shrink the "
                "weights but turn them round",
                where="weight_decay",
                fix="Keep weight_decay times learning_rate within 0 and 1.",
            )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"{getattr(self, name)} is not in [0, 1)", where=name)

    def _check_schedule(self) -> None:
        if not self.schedule:
            return
        for phase in self.schedule:
            if phase.steps < 1 or phase.expected_batch < 1:
                raise BadInput("a phase needs updates and a batch", where="schedule")
        if sum(phase.steps for phase in self.schedule) != self.updates:
            raise BadInput(
                f"its phases make {sum(p.steps for p in self.schedule)} updates, not "
                f"{self.updates}",
                where="schedule",
            )
        if self.schedule[-1].expected_batch != self.batch_size:
            raise BadInput(
                f"it ends with batches of {self.schedule[-1].expected_batch:g}, not "
                f"{self.batch_size}",
                where="schedule",
            )


def growing(
    first: int, last: int, *, updates: int, over: int, phases: int
) -> tuple[BatchPhase, ...]:
    """Return a schedule that grows from `first` to `last` by equal factors, then stays.

    Args:
        first: batch of the first phase.
        last: batch of the last one.
        updates: of the whole run.
        over: updates until `last` is reached.
        phases: number of phases before that.

    Raises:
        BadInput: there are fewer updates than phases.
    """
    if phases < 1 or over < phases or over >= updates:
        raise BadInput(
            f"{phases} phases over {over} of {updates} updates", where="schedule", fix="Take fewer."
        )
    ends = [round(over * (i + 1) / phases) for i in range(phases)]
    sizes = [round(first * (last / first) ** (i / phases)) for i in range(phases)]
    steps = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    grown = [BatchPhase(n, size) for n, size in zip(steps, sizes, strict=True)]
    return (*grown, BatchPhase(updates - over, last))


def anil(batch_size: int, updates: int, learning_rate: float, **more: Any) -> TrainingConfig:
    """Return a configuration in the manner of Anil et al. 2021 (arXiv:2108.01624).

    Batches that grow fourfold over the first part of the run, weight decay 1, linear warm-up and
    polynomial decay. Neither their model and batches (BERT-Large, up to two million examples)
    nor their result are implied.

    The ingredients are theirs: batches that increase, a weight decay far above the usual 0.01,
    warm-up, large batches. The numbers (fourfold, over 3/8 of the updates in three phases, decay
    1, power 2, warm-up 0.1) were NOT checked against the paper's tables and are not claimed to be
    its: they are this project's, held by its own tests. To repeat the paper, give its numbers in
    `more`.

    Args:
        batch_size: the size the batches end with; they begin with a quarter of it.
        updates: number of updates, at least 8.
        learning_rate: peak.
        more: other settings of `TrainingConfig`, which win.
    """
    schedule = growing(
        max(1, batch_size // 4), batch_size, updates=updates, over=3 * updates // 8, phases=3
    )
    settings: dict[str, Any] = {
        "decay_power": 2.0,
        "weight_decay": 1.0,
        "schedule": schedule,
    }
    return TrainingConfig(batch_size, updates, learning_rate, **(settings | more))


Flags = NDArray[np.bool_]


def check_plan(
    plan: ExecutionPlan | None, training_config: TrainingConfig, seed: PrivacySeed | None
) -> None:
    """Refuse a configuration that is not what the plan accounts for.

    Raises:
        BadInput: it says which two numbers differ, or that plan or seed is missing.
    """
    if plan is None:
        if seed is not None:
            raise BadInput("a privacy seed without a plan", where="pretraining")
        return
    if seed is None:
        raise BadInput("a plan without a privacy seed", where="pretraining")
    if plan.adaptive is not None and training_config.clipping != "flat":
        raise BadInput(
            "automatic clipping has no clip norm to learn",
            where="clipping",
            fix="Use flat, or a plan without adaptive clipping.",
        )
    _same("updates", plan.steps, training_config.updates)
    _same("examples_per_step", plan.examples_per_step, training_config.examples_per_step)
    planned, asked = (_merged(phases) for phases in (plan.schedule, training_config.phases()))
    if planned != asked:
        _same("batch_size", _shown(planned), _shown(asked))


def check_words(
    training_config: TrainingConfig, store: TokenStore, continuation: Flags | None
) -> None:
    """Refuse whole-word masking without knowing which pieces go on with a word.

    Raises:
        BadInput: the flags are missing, or are not one for each piece.
    """
    if not training_config.whole_words:
        return
    if continuation is None or continuation.shape != (store.vocabulary_size,):
        raise BadInput(
            "masking whole words needs the vocabulary's continuation pieces",
            where="whole_words",
            fix="Give one flag for each piece of the store's vocabulary.",
        )


def check_model(config: ModelConfig, store: TokenStore) -> None:
    """Refuse a model that cannot read the rows.

    Raises:
        BadInput: too small a vocabulary, or too few positions.
    """
    if store.vocabulary_size > config.vocab_size:
        raise BadInput(
            f"the store's vocabulary of {store.vocabulary_size} is larger than the model's of "
            f"{config.vocab_size}",
            where="model",
            fix="Load the model with the store's vocabulary.",
        )
    if store.sequence_length > config.max_positions:
        raise BadInput(
            f"rows of {store.sequence_length} tokens, positions for {config.max_positions}",
            where="model",
        )


def _same(name: str, planned: object, asked: object) -> None:
    if planned != asked:
        raise BadInput(
            f"the plan has {planned}, the training configuration {asked}",
            where=name,
            fix="What is accounted must be what is done.",
        )


def _merged(phases: Sequence[BatchPhase]) -> list[tuple[int, float]]:
    """Return (updates, batch) with neighbouring phases of one batch size joined."""
    joined: list[tuple[int, float]] = []
    for phase in phases:
        if joined and joined[-1][1] == phase.expected_batch:
            joined[-1] = (joined[-1][0] + phase.steps, joined[-1][1])
        else:
            joined.append((phase.steps, float(phase.expected_batch)))
    return joined


def _shown(phases: list[tuple[int, float]]) -> str:
    return ", ".join(f"{batch:g} units for {steps} updates" for steps, batch in phases)
