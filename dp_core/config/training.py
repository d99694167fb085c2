"""Settings of models and training: architecture, optimizer, batches, checkpoints, device."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dp_core.config.fields import (
    AUDIT_AND_RUN,
    DEVICE,
    ESSENTIALS,
    LAYER_SIZES,
    MORE_TRAINING,
    Config,
    later,
    setting,
)
from dp_core.config.privacy import PrivacyConfig
from dp_core.errors import BadInput

_CAUSAL = ("gpt2", "llama", "feed-forward")  # kinds of model that read from left to right
LEAST_GROWING = 8  # least number of updates with growing batches

LearningRate = Annotated[float, Field(gt=0, le=10)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 24)]


def is_causal(kind: str) -> bool:
    """Return whether a kind of model reads from left to right and predicts the next token."""
    return kind in _CAUSAL


class ArchitectureConfig(Config, section=ESSENTIALS):
    """The kind and size of a model.

    Attributes:
        model_kind: distilbert: BERT without token types. roberta: with one type. With public_model,
            each of bert, distilbert, roberta and modernbert means the kind in the folder. gpt2,
            llama, feed-forward (dense layers over a window of tokens): causal models, measured by
            perplexity and exposure, not fine-tuned.
        layers: Number of Transformer blocks; unused by feed-forward. 0: as public_model has it; 2
            without one.
        hidden: Width of the model, a multiple of 64; with feed-forward, size of a token's
            embedding. 0: as public_model has it; 128 without one.
        window: feed-forward: tokens that a prediction reads.
        dense_units: feed-forward: units of each dense layer, separated by commas.
    """

    model_kind: Literal[
        "bert", "distilbert", "roberta", "modernbert", "gpt2", "llama", "feed-forward"
    ] = setting("bert", "Kind of model", section=MORE_TRAINING)
    layers: int = setting(0, "Layers", ge=0, le=48)
    hidden: int = setting(0, "Hidden size", ge=0, le=4096, multiple_of=64)
    window: int = setting(20, "Window", section=MORE_TRAINING, ge=1, le=1024)
    dense_units: str = setting(
        "500,250,50", "Dense layers", section=MORE_TRAINING, pattern=LAYER_SIZES
    )

    def refuse_other(self, *, kind: str, layers: int, hidden: int, where: str) -> None:
        """Refuse a public model of another shape than the settings state.

        Masked models of all kinds may replace each other. `where` names the folder.

        Raises:
            BadInput: the kind, the layers or the hidden size differs.
        """
        stated = {"model_kind": self.model_kind, "layers": self.layers, "hidden": self.hidden}
        masked = not (is_causal(kind) or is_causal(self.model_kind))
        held = {"model_kind": self.model_kind if masked else kind, "layers": layers}
        for name, value in (held | {"hidden": hidden}).items():
            if stated[name] not in (0, value):
                raise BadInput(
                    f"{name} is {value} in the folder, but {stated[name]} in the settings",
                    where=where,
                    fix=f"Set {name} to {value}, or give another folder.",
                )


class OptimizerConfig(Config, section=MORE_TRAINING):
    """AdamW (Loshchilov and Hutter 2019), its schedule, and its correction for the noise.

    Attributes:
        learning_rate: Peak learning rate of DP pre-training with AdamW. Empty: 0.006; for private
            text it falls with batches below 256 units, which are mostly noise.
        warmup: Share of the updates in which the learning rate of a pre-training rises linearly.
        decay_power: After warm-up the learning rate falls as (share of updates left)^power; 0:
            constant.
        weight_decay: AdamW's weight decay of kernels and tables, in every pre-training. Anil et al.
            2021 use 1: DP noise increases the norms of weights before a LayerNorm, which slows
            learning.
        beta1: Decay of AdamW's running mean of gradients.
        beta2: Decay of AdamW's running mean of squared gradients.
        noise_floor: Above 0, the known variance of the noise is subtracted from AdamW's second
            moment (DP-AdamBC, Tang et al. 2023), down to this multiple of the variance. 0: no
            correction.
        adam_epsilon: Constant that AdamW adds to the root of the second moment, in every training.
    """

    learning_rate: LearningRate = setting(6e-3, "DP learning rate")
    warmup: float = setting(0.1, "Learning-rate warm-up", ge=0, le=1)
    decay_power: float = setting(1.0, "Learning-rate decay", ge=0, le=10)
    weight_decay: float = setting(0.01, "Weight decay", ge=0, le=10)
    beta1: float = setting(0.9, "AdamW: β₁", ge=0, lt=1)
    beta2: float = setting(0.98, "AdamW: β₂", ge=0, lt=1)
    noise_floor: float = setting(0.0, "Noise correction: floor", ge=0, le=1e6)
    adam_epsilon: float = later(1e-8, "AdamW: ε", ge=1e-16, le=1)

    def learning_rate_at(self, step: int, updates: int) -> float:
        """Return the learning rate of an update: linear warm-up, then polynomial decay.

        Args:
            step: number of the update, from 0.
            updates: number of updates of the whole run.
        """
        rising = max(1, round(self.warmup * updates))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        left = (updates - step) / max(1, updates - rising)
        return float(self.learning_rate * left**self.decay_power)

    @model_validator(mode="after")
    def _weight_decay_shrinks_weights(self) -> Self:
        if self.weight_decay * self.learning_rate >= 1:
            raise ValueError(
                f"weight_decay: {self.weight_decay:g} at a learning rate of "
                f"{self.learning_rate:g} would reverse the weights instead of shrinking them: "
                "keep their product below 1"
            )
        return self


class CheckpointConfig(Config, section=MORE_TRAINING):
    """Checkpoints and time limit of a run; the weights do not depend on them.

    Attributes:
        checkpoint_every: Number of updates between two checkpoints, from which a training can
            continue.
        time_box_minutes: Minutes after which a training's process ends with a checkpoint. It is
            restarted at once and continues without a new charge. The limit is per process, not per
            job. 0: none.
    """

    checkpoint_every: int = setting(100, "Updates between checkpoints", ge=1, le=1_000_000)
    time_box_minutes: float = setting(0.0, "Time box", ge=0, le=100_000)

    @property
    def stop_after_seconds(self) -> float | None:
        """Seconds after which the process ends with a checkpoint; None: no limit."""
        return 60 * self.time_box_minutes or None


TrainedParameters = Literal["all", "lora", "biases-and-norms", "no-embeddings", "top-layer"]


class AdapterConfig(Config, section=MORE_TRAINING):
    """The parameters that a DP training changes: only these have gradients and noise.

    Attributes:
        trained_parameters: Parameters that training with DP changes. lora: low-rank adapters.
            biases-and-norms: only vectors (BitFit). no-embeddings: not the tables of words and
            positions. top-layer: the last block and the layers after it. A fresh classifier is
            always trained. Empty: all; lora in private fine-tuning of public_model.
        lora_rank: Width of the adapters.
        lora_alpha: An adapter's output is multiplied by α / rank.
        lora_targets: Matrices with adapters: attention, MLP, or both.
    """

    trained_parameters: TrainedParameters = setting("all", "Trained parameters")
    lora_rank: int = setting(8, "LoRA: rank", ge=1, le=256)
    lora_alpha: float = setting(16.0, "LoRA: α", gt=0, le=4096)
    lora_targets: Literal["attention", "mlp", "attention-and-mlp"] = setting(
        "attention-and-mlp", "LoRA: targets"
    )


MOST_ROWS = 64  # rows at a time by default
_FLOATS = 44  # activations of a block that a gradient keeps, for each token and hidden unit
_COPIES = 5  # of the parameters: weights, two moments, the sum of gradients and a part of it


class TrainingConfig(AdapterConfig, OptimizerConfig, CheckpointConfig, section=MORE_TRAINING):
    """How a model is trained, except for its batches.

    Attributes:
        whole_words: Mask all pieces of a word together.
        precision: Format of matrix products; weights, norms, sums and noise stay float32.
        micro_rows: Rows of a micro-batch on one device; affects memory, speed and the rounding of
            sums, but not ε. 0: 64, or as many as fit into device_memory with this shape of model.
        device_memory: GB that a training may use on one device, for micro_rows=0. It is not read
            from the device: a job is planned elsewhere, and a resumed training must sum in the same
            order on any device. 14 fits a GPU or a core of a TPU with 16 GB.
        dropout: Probability with which every training sets an activation to 0 (0.1 for BERT). The
            gradient of a unit is still clipped, so ε does not depend on it.
    """

    whole_words: bool = setting(False, "Mask whole words")
    precision: Literal["float32", "bfloat16"] = setting("float32", "Compute precision")
    micro_rows: int = setting(0, "Rows at a time", ge=0, le=1 << 20)
    device_memory: float = later(14.0, "Device memory, GB", gt=0, le=10_000)
    dropout: float = later(0.0, "Dropout", ge=0, le=0.9)

    def rows_at_once(
        self, *, kind: str, layers: int, hidden: int, sequence_length: int, vocabulary_size: int
    ) -> int:
        """Return the rows of a micro-batch, from settings alone, so that runs are repeatable.

        A device holds five copies of about (vocabulary + 12 · layers · hidden) · hidden parameters.
        The activations of a row are 44 numbers for each layer, token and hidden unit, and three
        (logit, exponential and gradient) for each predicted token and token of the vocabulary. A
        feed-forward model needs less.
        """
        share = 1.0 if is_causal(kind) else 0.15  # of the tokens that are predicted
        row = sequence_length * (_FLOATS * layers * hidden + 3 * share * vocabulary_size)
        parameters = (vocabulary_size + 12 * layers * hidden) * hidden
        left = self.device_memory * 1e9 / 4 - _COPIES * parameters
        return self.micro_rows or max(1, min(MOST_ROWS, int(left / row)))

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the trained weights, for a run's manifest."""
        return self.model_dump(mode="json", exclude=set(CheckpointConfig.model_fields))


class BatchConfig(Config, section=MORE_TRAINING):
    """The size of batches.

    Attributes:
        batch_size: Expected units per DP update; of the last one if it grows. Empty: 256, at most
            an eighth of declared_units.
        first_batch_size: Size of the first DP batches; they grow over 3/8 of the updates (Anil et
            al.). 0: constant.
        examples_per_step: Most rows of a sampled unit that one step reads; their mean gradient is
            clipped.
        maskings_per_example: Masks of one row whose gradients a DP update averages before it clips
            the unit's gradient. Computing time grows in proportion; no privacy cost (De et al.
            2022).
    """

    batch_size: BatchSize = setting(256, "Batch size")
    first_batch_size: int = setting(0, "First batch size", ge=0, le=1 << 24)
    examples_per_step: int = setting(4, "Examples per unit and step", ge=1, le=256)
    maskings_per_example: int = setting(1, "Maskings per example", ge=1, le=256)

    @model_validator(mode="after")
    def _batches_grow(self) -> Self:
        if self.first_batch_size > self.batch_size:
            raise ValueError("first_batch_size is above batch_size")
        return self


def refuse_impossible_updates(
    batches: BatchConfig, plan: PrivacyConfig | None, updates: int
) -> None:
    """Refuse a number of updates that is too small for its batches or its correlated noise.

    Args:
        batches: settings of the batches.
        plan: settings of a private training, or None.
        updates: number of updates of the whole run.

    Raises:
        ValueError: there are too few updates; with correlated noise, batches grow or a part of the
            units cannot fill them.
    """
    bands = plan.noise_bands if plan else 1
    if batches.first_batch_size and updates < LEAST_GROWING:
        raise ValueError(f"first_batch_size: fewer than {LEAST_GROWING} updates cannot grow")
    if plan is None or bands <= 1:
        return
    if batches.first_batch_size:
        raise ValueError("noise_bands: correlated noise needs batches of one expected size")
    if bands * batches.batch_size > plan.declared_units:
        raise ValueError(f"noise_bands: batch_size is above declared_units / {bands}, one part")
    if bands > updates:
        raise ValueError(f"noise_bands: more than the {updates} updates")


def refuse_masks(kind: str, *, whole_words: bool, maskings_per_example: int) -> None:
    """Refuse mask settings for a causal model, which has no masks.

    Raises:
        ValueError: the kind of model is causal, and a setting needs masks.
    """
    needs_masks = {"whole_words": whole_words, "maskings_per_example": maskings_per_example > 1}
    for name in [n for n, masks in needs_masks.items() if masks and is_causal(kind)]:
        raise ValueError(f"{name}: a causal model ({kind}) masks nothing")


Head = Literal["entities", "classes", "pairs"]


class HeadConfig(Config, section=ESSENTIALS):
    """The task that a model is fine-tuned for.

    Attributes:
        head: Task of fine-tuning. entities: tags of words, scored by strict F1; classes: a class
            per text; pairs: a class per pair of texts (MedNLI); both are scored by accuracy.
    """

    head: Head = setting("entities", "Fine-tuning: head")


class TaggingConfig(HeadConfig, section=MORE_TRAINING):
    """Tagging of words: the context of a sentence, and the head.

    Attributes:
        tagging_context: Text that is tagged together: each sentence, or all sentences of a
            document.
        window_overlap: Share of a row that the next row of a long text repeats; each word is tagged
            once.
        crf: Learn and decode the tags of a row jointly, by a linear-chain conditional random field.
            Empty: only if public_model has private labels, for all models.
    """

    tagging_context: Literal["sentence", "document"] = setting("sentence", "Tagging: context")
    window_overlap: float = setting(0.5, "Tagging: overlap of windows", ge=0, le=0.9)
    crf: bool = setting(False, "Tagging: CRF")

    @model_validator(mode="after")
    def _only_words_are_tagged(self) -> Self:
        if self.head != "entities" and (self.crf or self.tagging_context != "sentence"):
            name = "crf" if self.crf else "tagging_context"
            raise ValueError(f"{name}: only the head entities tags words")
        return self


class SeedConfig(Config, section=AUDIT_AND_RUN):
    """The public seed.

    Attributes:
        seed: For initialisation, synthetic data and canaries. Noise and sampling never use it.
    """

    seed: int = setting(1, "Public seed", ge=0, le=2**31 - 1)


class RunConfig(SeedConfig, section=AUDIT_AND_RUN):
    """The device of a step.

    Attributes:
        device: cpu, or mock-tpu:N (the processor as N devices); gpu and tpu need an image whose
            TensorFlow drives them (docs/cloud.md).
    """

    device: str = setting("mock-tpu:2", "Device", pattern=DEVICE)
