"""The settings of a job, as a person gives them: Airflow's trigger form, the CLI and sweeps.

The JSON schema of these models is the trigger form, so every field has a title, a description,
a unit and a range; what the form lets through is validated here again before any work starts.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from tasks.specs.base import Frozen

Fraction = Annotated[float, Field(gt=0, lt=1)]


def _field(default: Any, section: str, title: str, description: str, **limits: Any) -> Any:
    return Field(
        default=default,
        title=title,
        description=description,
        json_schema_extra={"section": section},
        **limits,
    )


_DATA, _PRIVACY, _MODEL, _TRAINING, _AUDIT, _RUN = (
    "1. Data",
    "2. Privacy",
    "3. Model",
    "4. Training",
    "5. Audit",
    "6. Run",
)
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class JobSettings(Frozen):
    """Everything `dp_bert` can be told. The defaults are the demo."""

    # --- data
    private_format: Literal["synthetic", "text", "jsonl", "noteevents"] = _field(
        "synthetic",
        _DATA,
        "Private corpus: format",
        "synthetic: notes of the project's own making; text: a folder of .txt; jsonl: one JSON "
        "object a line with `text`, `document_id`, `patient_id`; noteevents: CSV in MIMIC-III's "
        "NOTEEVENTS columns. Files may be .gz or .xz.",
    )
    private_path: str = _field(
        "", _DATA, "Private corpus: path", "File or folder (local or gs://); empty for synthetic."
    )
    private_dataset: str = _field(
        "synthetic-notes",
        _DATA,
        "Private data set",
        "Its name in the privacy ledger: every release of it is charged to this name.",
        pattern=_NAME,
    )
    public_format: Literal["synthetic", "text", "jsonl"] = _field(
        "synthetic", _DATA, "Public corpus: format", "As above; needs no privacy."
    )
    public_path: str = _field(
        "", _DATA, "Public corpus: path", "File or folder; empty for synthetic."
    )
    entities_format: Literal["synthetic", "i2b2", "columns", "pubtator"] = _field(
        "synthetic",
        _DATA,
        "Entities: format",
        "i2b2: folders of .txt and .con; columns: token and tag (IOB, IOB2); pubtator.",
    )
    entities_train: str = _field("", _DATA, "Entities: training path", "Empty for synthetic.")
    entities_test: str = _field("", _DATA, "Entities: test path", "Empty for synthetic.")
    entities_public: bool = _field(
        False,
        _DATA,
        "Entities: public",
        "Tick if the labelled sentences are public. Otherwise F1 on them is the operator's alone.",
    )
    all_public: bool = _field(
        False,
        _DATA,
        "Everything may be shown",
        "Tick only if every corpus and label file given here is public or made up: then nothing "
        "is hidden in MLflow and the report.",
    )
    data_version: str = _field(
        "1",
        _DATA,
        "Data version",
        "Change it when the files change: results are reused for the same settings only.",
        pattern=_NAME,
    )
    synthetic_patients: int = _field(
        6000,
        _DATA,
        "Synthetic patients",
        "How many made-up patients write notes.",
        ge=50,
        le=200_000,
    )
    # --- privacy
    unit: Literal["example", "document", "patient"] = _field(
        "patient",
        _PRIVACY,
        "Privacy unit",
        "What is protected as a whole, in vocabulary and training alike.",
    )
    declared_units: int = _field(
        6000,
        _PRIVACY,
        "Declared number of units",
        "A public, rounded upper bound on the number of units (the true number is private). "
        "More units than this are refused.",
        ge=10,
        le=1_000_000_000,
    )
    words_per_unit: int = _field(
        128,
        _PRIVACY,
        "Words per unit",
        "At most this many distinct words of a unit count towards the vocabulary; with the unit "
        "`example`, the length of a tuple (256 in the paper).",
        ge=1,
        le=100_000,
    )
    vocabulary_epsilon: float = _field(
        2.0, _PRIVACY, "Vocabulary: ε", "Privacy loss of the word histogram.", gt=0, le=100
    )
    vocabulary_delta: float = _field(1e-7, _PRIVACY, "Vocabulary: δ", "", gt=0, le=0.01)
    noise_multiplier: float = _field(
        1.0,
        _PRIVACY,
        "Noise multiplier σ",
        "Effective noise of one update, in units of the clip norm.",
        gt=0,
        le=1000,
    )
    clip_norm: float = _field(
        1.0, _PRIVACY, "Clip norm", "Bound on one unit's gradient.", gt=0, le=1e6
    )
    delta: float = _field(1e-6, _PRIVACY, "Training: δ", "δ of the pre-training.", gt=0, le=0.01)
    max_examples_per_unit: int = _field(
        4,
        _PRIVACY,
        "Examples kept per unit",
        "Rows of a unit kept in the token store.",
        ge=1,
        le=1000,
    )
    examples_per_step: int = _field(
        1,
        _PRIVACY,
        "Examples per unit and step",
        "Rows of a sampled unit that one step reads; they are clipped together.",
        ge=1,
        le=64,
    )
    # --- model
    vocabulary_size: int = _field(
        4000, _MODEL, "Vocabulary size", "At most this many word pieces.", ge=100, le=200_000
    )
    layers: int = _field(2, _MODEL, "Layers", "Transformer blocks.", ge=1, le=48)
    hidden: int = _field(
        128, _MODEL, "Hidden size", "A multiple of 64.", ge=64, le=4096, multiple_of=64
    )
    sequence_length: int = _field(32, _MODEL, "Sequence length", "Tokens per row.", ge=16, le=512)
    # --- training
    batch_size: int = _field(
        256,
        _TRAINING,
        "Batch size",
        "Expected units per DP update (and rows per update in public pre-training).",
        ge=1,
        le=1 << 24,
    )
    epochs: float = _field(
        12.0,
        _TRAINING,
        "Epochs",
        "Passes over the declared units in DP pre-training.",
        gt=0,
        le=10_000,
    )
    learning_rate: float = _field(
        2e-3, _TRAINING, "DP learning rate", "Peak, of AdamW.", gt=0, le=10
    )
    nonprivate: bool = _field(
        True,
        _TRAINING,
        "Compare with non-private training",
        "Also pre-train on the same rows without privacy. The result stays with the operator.",
    )
    nonprivate_batch_size: int = _field(
        64,
        _TRAINING,
        "Non-private batch size",
        "Units per update; the epochs are those of the DP training, so that as many rows are read.",
        ge=1,
        le=1 << 24,
    )
    nonprivate_learning_rate: float = _field(
        3e-3, _TRAINING, "Non-private learning rate", "Peak, of AdamW.", gt=0, le=10
    )
    public_steps: int = _field(
        900,
        _TRAINING,
        "Public pre-training: updates",
        "Updates on public text.",
        ge=1,
        le=100_000_000,
    )
    public_batch_size: int = _field(
        64, _TRAINING, "Public pre-training: batch size", "Rows per update.", ge=1, le=1 << 20
    )
    public_learning_rate: float = _field(
        3e-3, _TRAINING, "Public learning rate", "Peak, of AdamW.", gt=0, le=10
    )
    finetune_epochs: int = _field(3, _TRAINING, "Fine-tuning: epochs", "", ge=1, le=1000)
    finetune_batch_size: int = _field(
        32, _TRAINING, "Fine-tuning: batch size", "Sentences.", ge=1, le=4096
    )
    finetune_learning_rate: float = _field(
        5e-4, _TRAINING, "Fine-tuning: learning rate", "", gt=0, le=10
    )
    # --- audit
    canary_patterns: str = _field(
        "HS,HSH,HHSHH",
        _AUDIT,
        "Canary patterns",
        "Comma-separated strings of H (hint) with one S (secret).",
        pattern=r"^H*SH*(,H*SH*)*$",
    )
    canary_rates: str = _field(
        "0.002,0.006,0.02",
        _AUDIT,
        "Canary rates",
        "Comma-separated probabilities p that a unit carries the canary.",
        pattern=r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$",
    )
    canaries_per_group: int = _field(4, _AUDIT, "Canaries per pattern and rate", "", ge=1, le=1000)
    # --- run
    device: str = _field(
        "mock-tpu:2",
        _RUN,
        "Device",
        "cpu, gpu, tpu, or mock-tpu:N (N logical CPU devices).",
        pattern=r"^(cpu|gpu|tpu|mock-tpu:[1-9][0-9]?)$",
    )
    seed: int = _field(
        1,
        _RUN,
        "Public seed",
        "For initialisation, made-up data and canaries. Noise and sampling never use it.",
        ge=0,
        le=2**31 - 1,
    )

    @field_validator("canary_patterns")
    @classmethod
    def _one_secret(cls, value: str) -> str:
        for pattern in value.split(","):
            if pattern.count("S") != 1:
                raise ValueError("each canary pattern needs exactly one S")
        return value

    @field_validator("canary_rates")
    @classmethod
    def _are_probabilities(cls, value: str) -> str:
        for rate in value.split(","):
            if not 0 < float(rate) <= 1:
                raise ValueError(f"{rate} is not a probability above 0")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> JobSettings:
        for kind, fmt, paths in (
            ("private", self.private_format, [self.private_path]),
            ("public", self.public_format, [self.public_path]),
            ("entities", self.entities_format, [self.entities_train, self.entities_test]),
        ):
            if fmt != "synthetic" and not all(paths):
                raise ValueError(f"{kind}: format {fmt} needs a path")
            if fmt == "synthetic" and any(paths):
                raise ValueError(f"{kind}: format synthetic takes no path")
        if self.batch_size > self.declared_units:
            raise ValueError("batch_size is above declared_units: the sampling rate would pass 1")
        if self.private_format == "synthetic" and self.private_dataset != "synthetic-notes":
            raise ValueError("the synthetic corpus is the data set 'synthetic-notes'")
        if self.private_format != "synthetic" and self.private_dataset == "synthetic-notes":
            raise ValueError(
                "private_dataset must name your data set: 'synthetic-notes' is the made-up one"
            )
        return self

    @property
    def updates(self) -> int:
        """Number of DP updates: epochs over the declared units at the expected batch size."""
        return max(1, math.ceil(self.epochs * self.declared_units / self.batch_size))

    @property
    def nonprivate_updates(self) -> int:
        """Number of updates of the non-private comparison: the same epochs."""
        return max(1, math.ceil(self.epochs * self.declared_units / self.nonprivate_batch_size))

    @property
    def made_up(self) -> bool:
        """Whether every input is made up or declared public, so that everything may be shown."""
        synthetic = self.private_format == "synthetic" and self.entities_format == "synthetic"
        return self.all_public or synthetic


class SweepPoint(Frozen):
    """One point of the grid."""

    noise_multiplier: float
    batch_size: int
    epochs: float

    @property
    def name(self) -> str:
        """What people see: the mapped task and the child run carry this name."""
        return f"σ={self.noise_multiplier:g} · B={self.batch_size} · epochs={self.epochs:g}"


class SweepSettings(JobSettings):
    """Everything `dp_sweep` can be told: a job, and a grid over three of its settings."""

    sweep_noise_multipliers: str = _field(
        "0.6,1.0,2.0",
        "0. Grid",
        "Noise multipliers σ",
        "Comma-separated.",
        pattern=r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$",
    )
    sweep_batch_sizes: str = _field(
        "128,256", "0. Grid", "Batch sizes", "Comma-separated.", pattern=r"^[0-9]+(,[0-9]+)*$"
    )
    sweep_epochs: str = _field(
        "5,10", "0. Grid", "Epochs", "Comma-separated.", pattern=r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$"
    )

    def points(self) -> list[SweepPoint]:
        """Return the grid, in reading order; each point is a release of its own."""
        grid = itertools.product(
            (float(x) for x in self.sweep_noise_multipliers.split(",")),
            (int(x) for x in self.sweep_batch_sizes.split(",")),
            (float(x) for x in self.sweep_epochs.split(",")),
        )
        return [
            SweepPoint(noise_multiplier=s, batch_size=b, epochs=e)
            for s, b, e in dict.fromkeys(grid)
        ]

    def job(self, point: SweepPoint) -> JobSettings:
        """Return the settings of the job at one point."""
        own = {k: v for k, v in self.model_dump().items() if k in JobSettings.model_fields}
        return JobSettings.model_validate(own | point.model_dump())

    @model_validator(mode="after")
    def _every_point_is_a_job(self) -> SweepSettings:
        for point in self.points():
            self.job(point)
        return self


def one_line(error: ValidationError) -> str:
    """Return a validation error as one line: field, reason, for each field that is wrong."""
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        field = ".".join(str(x) for x in item["loc"]) or "settings"
        reason = "unknown setting" if item["type"] == "extra_forbidden" else item["msg"]
        parts.append(f"{field}: {reason.removeprefix('Value error, ')}")
    return "; ".join(parts)
