"""Settings of the audits of a trained model; its canaries have settings of their own file."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from dp_core.config.data import VersionConfig
from dp_core.config.fields import AUDIT_AND_RUN, DATA, PRIVACY, Config, setting
from dp_core.config.training import SeedConfig


class AuditCanariesConfig(Config):
    """Whole-unit canaries in a job's own private training, each in or out by a secret coin."""

    audit_canaries: int = setting(
        0,
        AUDIT_AND_RUN,
        "Audit of ε: canaries",
        "Units of random tokens beside the private ones, each in DP pre-training or left out by a "
        "secret coin: from the model the audit guesses which, and what it guesses bounds ε from "
        "below. Each counts as a declared unit and costs what one costs; a tenth of declared_units "
        "is plenty. 0: no audit. A sweep has none.",
        ge=0,
        le=100_000,
    )


class SamplesConfig(Config):
    """Texts that a causal model of a job writes, for people to read."""

    sample_texts: int = setting(
        0,
        AUDIT_AND_RUN,
        "Samples: texts",
        "How many texts every causal model writes for the report. Those of a released model cost "
        "no privacy; those of a model without it are the operator's.",
        ge=0,
        le=100,
    )
    sample_prompt: str = setting(
        "",
        AUDIT_AND_RUN,
        "Samples: beginning",
        "The words that every text begins with.",
        max_length=200,
    )
    sample_tokens: int = setting(
        24,
        AUDIT_AND_RUN,
        "Samples: tokens",
        "Tokens that a text goes on for, at most.",
        ge=1,
        le=512,
    )


class MembershipConfig(Config):
    """Membership attacks: on how many units, and under how many masks."""

    membership_units: int = setting(
        0,
        AUDIT_AND_RUN,
        "Membership attacks: units",
        "At most this many units that trained, and as many held out, are attacked; what is found "
        "is the operator's. 0: no membership attacks. A sweep has none.",
        ge=0,
        le=1_000_000,
    )
    membership_masks: int = setting(
        4,
        AUDIT_AND_RUN,
        "Membership attacks: masks",
        "Fresh masks over which a masked model's losses are averaged; more of them tell members "
        "apart better, and cost as many times the computing.",
        ge=1,
        le=256,
    )
    membership_codes: str = setting(
        "",
        AUDIT_AND_RUN,
        "Membership attacks: codes of diseases",
        "A table (.csv) in the columns of MIMIC's DIAGNOSES_ICD. How rare a patient is, and "
        "whether rare ones are given away more, is then told by codes; by tokens if empty.",
        path=True,
    )


class ExtractionProtocol(Config):
    """How text and secrets are sought in a causal model: fixed beforehand, or said to be not."""

    extraction_prefix: int = setting(
        10,
        AUDIT_AND_RUN,
        "Extraction: prefix",
        "Tokens of a row that the attacker knows. Carlini et al. 2023 use 50.",
        ge=1,
        le=510,
    )
    extraction_suffix: int = setting(
        10,
        AUDIT_AND_RUN,
        "Extraction: suffix",
        "Tokens behind the prefix that must come out word for word. Carlini et al. 2023 use 50.",
        ge=1,
        le=510,
    )
    extraction_top_k: int = setting(
        40,
        AUDIT_AND_RUN,
        "Extraction: top-k",
        "Tokens that sampling draws from, and the guesses for a canary's secret.",
        ge=1,
        le=1_000_000,
    )
    extraction_tries: int = setting(
        100,
        AUDIT_AND_RUN,
        "Extraction: tries",
        "Texts that the attacker samples for each prefix.",
        ge=1,
        le=1_000_000_000,
    )

    @property
    def extraction_tokens(self) -> int:
        """Tokens that a row needs to be tried, [CLS] and [SEP] included."""
        return self.extraction_prefix + self.extraction_suffix + 2


class ExtractionConfig(ExtractionProtocol):
    """Attempts to get text and secrets out of a causal model of a job."""

    extraction_rows: int = setting(
        0,
        AUDIT_AND_RUN,
        "Extraction: rows",
        "A causal model is given the beginning of at most this many rows that trained, one of a "
        "unit, and as many held out; what it continues as they go on is counted, for the "
        "operator. 0: only canaries' secrets are tried.",
        ge=0,
        le=1_000_000,
    )


class BlackBoxAuditConfig(ExtractionProtocol, VersionConfig, SeedConfig):
    """An audit by given canaries and texts."""

    audited_model: str = setting(
        "",
        DATA,
        "Model",
        "A training step's output in the store (…/pretrain/…), or a folder in Hugging Face's "
        "layout, masked or causal.",
        path=True,
    )
    given_canaries: str = setting(
        "",
        DATA,
        "Canaries",
        "A file: lines of text, the secret of each in [[brackets]].",
        path=True,
    )
    given_members: str = setting(
        "", DATA, "Members", "A file: texts that trained the model, one a line.", path=True
    )
    given_held_out: str = setting(
        "", DATA, "Held-out texts", "A file: texts that did not, drawn alike.", path=True
    )
    given_coins: bool = setting(
        False,
        DATA,
        "Divided by coins",
        "Tick only if each of these texts was one whole privacy unit and, before the training, put "
        "in or left out by a fair coin of its own: then the guesses about them bound ε from below, "
        "and may contradict the claim.",
    )
    given_epsilon: float = setting(
        0.0, PRIVACY, "Claimed ε", "Of a model from elsewhere, for one text. 0: no claim.", ge=0
    )
    given_delta: float = setting(
        0.0, PRIVACY, "Claimed δ", "Of the same claim; below 1.", ge=0, lt=1
    )
    given_masks: int = setting(
        4,
        DATA,
        "Masks",
        "Fresh masks over which a masked model's losses are averaged.",
        ge=1,
        le=256,
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.audited_model:
            raise ValueError("audited_model: name the model")
        if bool(self.given_members) != bool(self.given_held_out):
            raise ValueError("given_members: needs given_held_out, and the other way round")
        if not self.given_canaries and not self.given_members:
            raise ValueError("given_canaries: give canaries, or members and held-out texts")
        if self.given_coins and not self.given_members:
            raise ValueError("given_coins: give the texts that coins divided")
        if self.given_delta and not self.given_epsilon:
            raise ValueError("given_epsilon: half a claim")
        return self
