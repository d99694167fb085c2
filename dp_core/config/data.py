"""What is read and how it is cut into rows; the canaries that are planted among them."""

from __future__ import annotations

from pydantic import field_validator

from dp_core.config.fields import (
    AUDIT_AND_RUN,
    CANARIES,
    DATA,
    MODEL,
    MORE_DATA,
    MORE_PRIVACY,
    NAME,
    NUMBERS,
    THREE_FIELDS,
    Config,
    numbers,
    setting,
)


class VersionConfig(Config):
    """Which version of the source files is read."""

    data_version: str = setting(
        "1",
        MORE_DATA,
        "Data version",
        "Change it when the files change: results are reused for the same settings only.",
        pattern=NAME,
    )


class ReaderConfig(VersionConfig):
    """How corpora are read, private and public alike."""

    synthetic_patients: int = setting(
        6000,
        DATA,
        "Synthetic patients",
        "How many made-up patients write notes.",
        ge=50,
        le=200_000,
    )
    jsonl_fields: str = setting(
        "text,document_id,patient_id",
        MORE_DATA,
        "JSONL: fields",
        "Comma-separated names of the fields that hold text, document id and patient id.",
        pattern=THREE_FIELDS,
    )
    corpus_shards: int = setting(
        16,
        MORE_DATA,
        "Shards of a corpus",
        "Files that a corpus is kept in, at least; each is worked on alone, by one core at a"
        " time. Of more than a gigabyte there are more.",
        ge=1,
        le=4096,
    )


class HoldoutConfig(Config):
    """What is kept out of every training, to measure by and to attack beside those that trained."""

    holdout: float = setting(
        0.05,
        MORE_DATA,
        "Held-out share",
        "Share of units and of public documents that never train: accuracy, vocabulary fit, "
        "membership attacks and extraction from rows need them. A larger share shows smaller "
        "differences, and leaves less to train on. 0: none of that is measured.",
        ge=0,
        le=0.5,
    )


class SequenceConfig(Config):
    """The length of a row."""

    sequence_length: int = setting(32, MODEL, "Sequence length", "Tokens per row.", ge=16, le=512)


class RowsConfig(SequenceConfig):
    """How the text of a unit is cut into rows."""

    max_examples_per_unit: int = setting(
        4,
        MORE_PRIVACY,
        "Examples kept per unit",
        "Rows of a unit kept in the token store.",
        ge=1,
        le=1_000_000,
    )


class CanaryConfig(Config):
    """The canaries (Carlini et al. 2019) whose exposure is measured."""

    canary_patterns: str = setting(
        "HS,HSH,HHSHH",
        AUDIT_AND_RUN,
        "Canary patterns",
        "Comma-separated strings of H (hint) with one S (secret).",
        pattern=CANARIES,
    )
    canary_rates: str = setting(
        "0.002,0.006,0.02",
        AUDIT_AND_RUN,
        "Canary rates",
        "Comma-separated probabilities p that a unit carries the canary.",
        pattern=NUMBERS,
    )
    canaries_per_group: int = setting(
        4,
        AUDIT_AND_RUN,
        "Canaries per pattern and rate",
        "More of them measure exposure more closely.",
        ge=1,
        le=1000,
    )

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, one by one."""
        return tuple(self.canary_patterns.split(","))

    @property
    def rates(self) -> tuple[float, ...]:
        """The canary rates, one by one."""
        return tuple(numbers(self.canary_rates))

    @field_validator("canary_rates")
    @classmethod
    def _are_probabilities(cls, value: str) -> str:
        for canary_rate in numbers(value):
            if not 0 < canary_rate <= 1:
                raise ValueError(f"{canary_rate:g} is not a probability above 0")
        return value
