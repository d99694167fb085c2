"""The model, and how it is trained: architecture, optimizer, batches, checkpoints, device."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dp_core.config.fields import (
    AUDIT_AND_RUN,
    DEVICE,
    MODEL,
    MORE_TRAINING,
    TRAINING,
    WHOLE_NUMBERS,
    Config,
    setting,
)

_CAUSAL = ("gpt2", "llama", "feed-forward")  # the kinds of model that read from left to right
LEAST_GROWING = 8  # updates that batches need to grow in

LearningRate = Annotated[float, Field(gt=0, le=10)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 24)]


def is_causal(kind: str) -> bool:
    """Whether a kind of model reads from left to right and predicts what comes next."""
    return kind in _CAUSAL


class ArchitectureConfig(Config):
    """The kind and size of a fresh model."""

    model_kind: Literal["bert", "distilbert", "gpt2", "llama", "feed-forward"] = setting(
        "bert",
        MODEL,
        "Kind of model",
        "distilbert: the same without token types. gpt2, llama, feed-forward: causal models, "
        "measured by perplexity and exposure; they are not fine-tuned. feed-forward: dense layers "
        "over a window of tokens.",
    )
    layers: int = setting(
        2, MODEL, "Layers", "How many Transformer blocks; of no use to feed-forward.", ge=1, le=48
    )
    hidden: int = setting(
        128,
        MODEL,
        "Hidden size",
        "Width of the model, a multiple of 64; of a feed-forward one, of a token's embedding.",
        ge=64,
        le=4096,
        multiple_of=64,
    )
    window: int = setting(
        20, MODEL, "Window", "feed-forward: how many tokens it predicts by.", ge=1, le=1024
    )
    dense_units: str = setting(
        "500,250,50",
        MODEL,
        "Dense layers",
        "feed-forward: units of each dense layer, with commas between them.",
        pattern=WHOLE_NUMBERS,
    )


class OptimizerConfig(Config):
    """AdamW (Loshchilov and Hutter 2019) and the course of its learning rate."""

    learning_rate: LearningRate = setting(
        6e-3, TRAINING, "DP learning rate", "Peak learning rate of DP pre-training, of AdamW."
    )
    warmup: float = setting(
        0.1,
        MORE_TRAINING,
        "Learning-rate warm-up",
        "Share of the updates in which the learning rate of a pre-training rises linearly.",
        ge=0,
        le=1,
    )
    decay_power: float = setting(
        1.0,
        MORE_TRAINING,
        "Learning-rate decay",
        "After warm-up the learning rate falls as (share of the updates left)^power; 0 keeps it.",
        ge=0,
        le=10,
    )
    weight_decay: float = setting(
        0.01,
        MORE_TRAINING,
        "Weight decay",
        "AdamW's, on kernels and tables, in every pre-training. Anil et al. 2021 take 1: under DP "
        "the noise makes the norms of weights that a LayerNorm follows grow, which slows learning.",
        ge=0,
        le=10,
    )
    beta1: float = setting(
        0.9,
        MORE_TRAINING,
        "AdamW: β₁",
        "Decay of AdamW's running mean of gradients.",
        ge=0,
        lt=1,
    )
    beta2: float = setting(
        0.98,
        MORE_TRAINING,
        "AdamW: β₂",
        "Decay of AdamW's running mean of squared gradients.",
        ge=0,
        lt=1,
    )

    def learning_rate_at(self, step: int, updates: int) -> float:
        """Return the learning rate of an update: linear warm-up, then polynomial decay.

        Args:
            step: number of the update, from 0.
            updates: of the whole run.
        """
        rising = max(1, round(self.warmup * updates))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        left = (updates - step) / max(1, updates - rising)
        return float(self.learning_rate * left**self.decay_power)

    @model_validator(mode="after")
    def _weights_shrink_and_do_not_turn_round(self) -> Self:
        if self.weight_decay * self.learning_rate >= 1:
            raise ValueError(
                f"weight_decay: {self.weight_decay:g} at a learning rate of "
                f"{self.learning_rate:g} would not shrink the weights but turn them round: keep "
                "their product below 1"
            )
        return self


class NoisyUpdatesConfig(Config):
    """What is done about the noise of DP updates: known variance, averages of the iterates.

    All of it is post-processing of noised gradients and costs no privacy.
    """

    noise_floor: float = setting(
        0.0,
        MORE_TRAINING,
        "Noise correction: floor",
        "Above 0, AdamW's second moment is freed of the known variance of the noise (DP-AdamBC, "
        "Tang et al. 2023), and kept above this many times that variance. 0: left as it is.",
        ge=0,
        le=1e6,
    )
    averaging: Literal["none", "exponential", "tail"] = setting(
        "none",
        MORE_TRAINING,
        "Averaging of iterates",
        "Which weights a DP training releases. none: the last; exponential: a moving average of "
        "all, warm-started; tail: the mean of the last ones.",
    )
    average_share: float = setting(
        0.1,
        MORE_TRAINING,
        "Averaging: share",
        "Over which share of a training's updates its weights are averaged: the time constant of "
        "the moving average, the length of the tail.",
        gt=0,
        le=1,
    )

    def newest_share(self, step: int, updates: int) -> float:
        """Return the weight of the newest iterate in the average: a ← a + share·(w − a).

        Exponential: 1 − min(1 − 1/(s·T), (1 + t)/(10 + t)) after t of T updates, whose second part
        is the warm start of De et al. 2022 (arXiv:2204.13650). Tail: 1/k for the k-th of the last
        s·T iterates, which makes their plain mean, and 1 before.

        Args:
            step: number of the update, from 0.
            updates: of the whole run.
        """
        length = max(1, round(self.average_share * updates))
        if self.averaging == "exponential":
            return max(1 / length, 9 / (10 + step + 1))
        return 1 / max(1, step + 1 - (updates - length))


class CheckpointConfig(Config):
    """How a run is kept; no weight depends on it."""

    checkpoint_every: int = setting(
        100,
        MORE_TRAINING,
        "Updates between checkpoints",
        "After how many updates a training keeps what it needs to go on.",
        ge=1,
        le=1_000_000,
    )
    keep_checkpoints: int = setting(
        2,
        MORE_TRAINING,
        "Checkpoints kept",
        "How many of the newest a training keeps.",
        ge=1,
        le=100,
    )
    time_box_minutes: float = setting(
        0.0,
        MORE_TRAINING,
        "Time box",
        "Minutes after which a training's process ends with a checkpoint; it is started again at "
        "once and goes on, charged once. It bounds one process, not the job. 0: none.",
        ge=0,
        le=100_000,
    )

    @property
    def stop_after_seconds(self) -> float | None:
        """Seconds after which the process ends with a checkpoint; None never does."""
        return 60 * self.time_box_minutes or None


TrainedParameters = Literal["all", "lora", "biases-and-norms", "no-embeddings", "top-layer"]


class AdapterConfig(Config):
    """Which parameters a training with DP changes: only these get gradients, and noise."""

    trained_parameters: TrainedParameters = setting(
        "all",
        TRAINING,
        "Trained parameters",
        "What training with DP changes. lora: low-rank adapters beside frozen matrices. "
        "biases-and-norms: vectors alone (BitFit). no-embeddings: all but the tables of words and "
        "positions. top-layer: the last block and what follows it, but for tables. A fresh "
        "classifier is always trained.",
    )
    lora_rank: int = setting(8, MORE_TRAINING, "LoRA: rank", "Width of the adapters.", ge=1, le=256)
    lora_alpha: float = setting(
        16.0,
        MORE_TRAINING,
        "LoRA: α",
        "An adapter's output is multiplied by α / rank.",
        gt=0,
        le=4096,
    )
    lora_targets: Literal["attention", "mlp", "attention-and-mlp"] = setting(
        "attention-and-mlp",
        MORE_TRAINING,
        "LoRA: targets",
        "Which matrices have an adapter: those of attention, those of the MLP, or both.",
    )


class TrainingConfig(AdapterConfig, OptimizerConfig, NoisyUpdatesConfig, CheckpointConfig):
    """How a model is trained, whatever its batches."""

    whole_words: bool = setting(
        False, MORE_TRAINING, "Mask whole words", "Mask all pieces of a word together."
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "float32",
        MORE_TRAINING,
        "Compute precision",
        "Format of matrix products; weights, norms, sums and noise stay float32.",
    )
    micro_rows: int = setting(
        64,
        MORE_TRAINING,
        "Rows at a time",
        "Rows that one device works on at a time, in a micro-batch; memory and speed only.",
        ge=1,
        le=1 << 20,
    )

    def identity(self) -> dict[str, Any]:
        """Return the settings that the trained weights depend on: part of a run's manifest."""
        return self.model_dump(mode="json", exclude=set(CheckpointConfig.model_fields))


class BatchConfig(Config):
    """The size of batches."""

    batch_size: BatchSize = setting(
        256, TRAINING, "Batch size", "Expected units per DP update; the last, where it grows."
    )
    first_batch_size: int = setting(
        0,
        MORE_TRAINING,
        "First batch size",
        "DP batches grow in four phases from this to the batch size, over 3/8 of the updates "
        "(after Anil et al. 2021); 0: constant.",
        ge=0,
        le=1 << 24,
    )
    examples_per_step: int = setting(
        4,
        MORE_TRAINING,
        "Examples per unit and step",
        "Rows of a sampled unit that one step reads, at most those that are kept; their gradients "
        "are averaged and clipped together.",
        ge=1,
        le=256,
    )
    maskings_per_example: int = setting(
        1,
        MORE_TRAINING,
        "Maskings per example",
        "Masks of one row whose gradients a DP update averages before it clips the unit's. Costs "
        "as many times the computing, and no privacy (De et al. 2022).",
        ge=1,
        le=256,
    )

    @model_validator(mode="after")
    def _batches_grow(self) -> Self:
        if self.first_batch_size > self.batch_size:
            raise ValueError("first_batch_size is above batch_size")
        return self


def refuse_short_growth(first_batch_size: int, updates: int) -> None:
    """Refuse batches that have no time to grow.

    Raises:
        ValueError: they are to grow in too few updates.
    """
    if first_batch_size and updates < LEAST_GROWING:
        raise ValueError(f"first_batch_size: fewer than {LEAST_GROWING} updates cannot grow")


def refuse_masks(kind: str, *, whole_words: bool, maskings_per_example: int) -> None:
    """Refuse what a causal model has no masks for.

    Raises:
        ValueError: the kind of model is causal, and masks are asked for.
    """
    asked = {"whole_words": whole_words, "maskings_per_example": maskings_per_example > 1}
    for name in [n for n, masks in asked.items() if masks and is_causal(kind)]:
        raise ValueError(f"{name}: a causal model ({kind}) masks nothing")


Head = Literal["entities", "classes", "pairs"]


class HeadConfig(Config):
    """What a model is fine-tuned for."""

    head: Head = setting(
        "entities",
        TRAINING,
        "Fine-tuning: head",
        "What fine-tuning teaches. entities: tags of words, scored by strict F1; classes: one of "
        "each text; pairs: one of each pair of texts, as in MedNLI; both scored by accuracy.",
    )


class TaggingConfig(HeadConfig):
    """How words are tagged: in which text, and by which head."""

    tagging_context: Literal["sentence", "document"] = setting(
        "sentence",
        MORE_TRAINING,
        "Tagging: context",
        "What is tagged as one text. sentence: each by itself; document: all sentences of a "
        "document together, so that nothing depends on where they were cut.",
    )
    window_overlap: float = setting(
        0.5,
        MORE_TRAINING,
        "Tagging: overlap of windows",
        "Share of a row that the next one repeats, where a text is longer than a row. Each word is "
        "learned and tagged once, in the row that shows most of the text around it.",
        ge=0,
        le=0.9,
    )
    crf: bool = setting(
        False,
        MORE_TRAINING,
        "Tagging: CRF",
        "Learn the tags of a row together, by a linear-chain conditional random field, and take "
        "the best sequence of tags that is well formed.",
    )

    @model_validator(mode="after")
    def _only_words_are_tagged(self) -> Self:
        if self.head != "entities" and (self.crf or self.tagging_context != "sentence"):
            name = "crf" if self.crf else "tagging_context"
            raise ValueError(f"{name}: only the head entities tags words")
        return self


class SeedConfig(Config):
    """The seed of coins that anyone may know."""

    seed: int = setting(
        1,
        AUDIT_AND_RUN,
        "Public seed",
        "For initialisation, made-up data and canaries. Noise and sampling never use it.",
        ge=0,
        le=2**31 - 1,
    )


class RunConfig(SeedConfig):
    """Where a step computes."""

    device: str = setting(
        "mock-tpu:2",
        AUDIT_AND_RUN,
        "Device",
        "cpu, or mock-tpu:N (the processor as N devices); gpu and tpu need an image whose "
        "TensorFlow drives them (docs/cloud.md).",
        pattern=DEVICE,
    )
