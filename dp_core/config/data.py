"""Settings of the source files, of the rows that they are cut into, and of planted canaries."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from dp_core.config.fields import (
    AUDIT_AND_RUN,
    CANARIES,
    MORE_DATA,
    MORE_PRIVACY,
    MORE_TRAINING,
    NAME,
    NUMBERS,
    Config,
    numbers,
    setting,
)

TagScheme = Literal["iob1", "iob2", "iobes", "bilou", "bios"]  # of tags of words


class VersionConfig(Config, section=MORE_DATA):
    """The version of the source files.

    Attributes:
        data_version: Change it when the files change: results are reused only for the same
            settings.
    """

    data_version: str = setting("1", "Data version", pattern=NAME)


class ReaderConfig(VersionConfig, section=MORE_DATA):
    """How private and public corpora are read.

    Attributes:
        synthetic_patients: Number of synthetic patients who write notes. Empty: 6000, at most
            declared_units.
        corpus_shards: Least number of files of a corpus, each for one core; corpora above a
            gigabyte have more.
    """

    synthetic_patients: int = setting(6000, "Synthetic patients", ge=50, le=200_000)
    corpus_shards: int = setting(16, "Shards of a corpus", ge=1, le=4096)


class HoldoutConfig(Config, section=MORE_DATA):
    """The part of the data that is kept out of every training, for evaluation and attacks.

    Attributes:
        holdout: Share of units and of public documents that are never trained on: accuracy,
            vocabulary fit, membership attacks and extraction from rows need them. A larger share
            measures more precisely and leaves less training data. 0: none of these is measured.
            Empty: 0.05, of fewer than 500 private units 0.1.
    """

    holdout: float = setting(0.05, "Held-out share", ge=0, le=0.5)


class SequenceConfig(Config, section=MORE_TRAINING):
    """The length of a row.

    Attributes:
        sequence_length: Tokens per row.
    """

    sequence_length: int = setting(32, "Sequence length", ge=16, le=512)


class RowsConfig(SequenceConfig, section=MORE_PRIVACY):
    """How the text of a unit is cut into rows.

    Attributes:
        max_examples_per_unit: Rows of a unit kept in the token store.
    """

    max_examples_per_unit: int = setting(4, "Examples kept per unit", ge=1, le=1_000_000)


class CanaryConfig(Config, section=AUDIT_AND_RUN):
    """The canaries (Carlini et al. 2019) whose exposure is measured.

    Attributes:
        canary_patterns: Comma-separated strings of H (hint) with one S (secret).
        canary_rates: Comma-separated probabilities p that a unit carries the canary. Empty:
            0.002,0.006,0.02, up to five times that for fewer than 1,000 private units.
        canaries_per_group: More canaries measure exposure more precisely. Empty: 4, with higher
            rates down to 1.
    """

    canary_patterns: str = setting("HS,HSH,HHSHH", "Canary patterns", pattern=CANARIES)
    canary_rates: str = setting("0.002,0.006,0.02", "Canary rates", pattern=NUMBERS)
    canaries_per_group: int = setting(4, "Canaries per pattern and rate", ge=1, le=1000)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The canary patterns as a tuple."""
        return tuple(self.canary_patterns.split(","))

    @property
    def rates(self) -> tuple[float, ...]:
        """The canary rates as a tuple."""
        return tuple(numbers(self.canary_rates))

    @field_validator("canary_rates")
    @classmethod
    def _are_probabilities(cls, value: str) -> str:
        for canary_rate in numbers(value):
            if not 0 < canary_rate <= 1:
                raise ValueError(f"{canary_rate:g} is not a probability above 0")
        return value
