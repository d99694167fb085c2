"""Settings of the audits of a trained model; `data` has the settings of its canaries."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from dp_core.config.data import VersionConfig
from dp_core.config.fields import AUDIT_AND_RUN, ESSENTIALS, Config, setting
from dp_core.config.training import SeedConfig


class AuditCanariesConfig(Config, section=AUDIT_AND_RUN):
    """Canaries that are whole units of a job's private training, each included by a secret coin.

    Attributes:
        audit_canaries: Units of random tokens, each of which a secret coin includes in DP
            pre-training or leaves out. Correct guesses of the coins from the model bound ε from
            below. Each costs as much as a declared unit; a tenth of declared_units is enough. 0: no
            audit. Sweeps have none. Empty: a tenth of the declared units of private text, at most
            1,000; none of fewer than 300 units, of made-up text, or if they could not contradict
            the target ε.
    """

    audit_canaries: int = setting(0, "Audit of ε: canaries", ge=0, le=100_000)


class SamplesConfig(Config, section=AUDIT_AND_RUN):
    """Sample texts of a job's causal models, for people to read.

    Attributes:
        sample_texts: Number of texts that every causal model generates for the report. Texts of a
            released model have no privacy cost; texts of a model without privacy are for the
            operator.
        sample_prompt: Words at the beginning of every text.
        sample_tokens: Largest number of tokens that are generated for a text.
    """

    sample_texts: int = setting(0, "Samples: texts", ge=0, le=100)
    sample_prompt: str = setting("", "Samples: beginning", max_length=200)
    sample_tokens: int = setting(24, "Samples: tokens", ge=1, le=512)


class MembershipConfig(Config, section=AUDIT_AND_RUN):
    """Membership attacks: the numbers of units and masks.

    Attributes:
        membership_units: At most this many units of the training, and as many held-out units, are
            attacked. The results are for the operator. 0: no membership attacks. Sweeps have none.
        membership_masks: Number of fresh masks over which a masked model's losses are averaged.
            More masks distinguish members better; the computing time grows in proportion.
        membership_codes: A table (.csv) with the columns of MIMIC's DIAGNOSES_ICD. The rarity of
            patients, and the attack on rare patients, are then measured by codes; by tokens if
            empty.
    """

    membership_units: int = setting(0, "Membership attacks: units", ge=0, le=1_000_000)
    membership_masks: int = setting(4, "Membership attacks: masks", ge=1, le=256)
    membership_codes: str = setting("", "Membership attacks: codes of diseases", path=True)


class ExtractionProtocol(Config, section=AUDIT_AND_RUN):
    """Extraction of text and secrets from a causal model: its parameters, fixed beforehand.

    Attributes:
        extraction_prefix: Tokens of a row that the attacker knows. Carlini et al. 2023 use 50.
        extraction_suffix: Tokens after the prefix that must be reproduced exactly. Carlini et al.
            2023 use 50.
        extraction_top_k: Number of tokens that sampling chooses from, and of guesses for a canary's
            secret.
        extraction_tries: Texts that the attacker samples for each prefix.
    """

    extraction_prefix: int = setting(10, "Extraction: prefix", ge=1, le=510)
    extraction_suffix: int = setting(10, "Extraction: suffix", ge=1, le=510)
    extraction_top_k: int = setting(40, "Extraction: top-k", ge=1, le=1_000_000)
    extraction_tries: int = setting(100, "Extraction: tries", ge=1, le=1_000_000_000)

    @property
    def extraction_tokens(self) -> int:
        """Least number of tokens of an attacked row, including [CLS] and [SEP]."""
        return self.extraction_prefix + self.extraction_suffix + 2


class ExtractionConfig(ExtractionProtocol, section=AUDIT_AND_RUN):
    """Attempts to extract text and secrets from a job's causal model.

    Attributes:
        extraction_rows: A causal model receives the beginning of at most this many training rows,
            one per unit, and of as many held-out rows; the rows that it continues correctly are
            counted for the operator. 0: the attack tries only canaries' secrets.
    """

    extraction_rows: int = setting(0, "Extraction: rows", ge=0, le=1_000_000)


class BlackBoxAuditConfig(ExtractionProtocol, VersionConfig, SeedConfig, section=ESSENTIALS):
    """An audit by given canaries and texts.

    Attributes:
        audited_model: A training's output in the store (…/pretrain/…), or a folder in Hugging
            Face's layout.
        given_canaries: A file of text lines; each line has its secret in [[brackets]].
        given_members: A file of texts that trained the model, one per line.
        given_held_out: A file of texts from the same distribution that did not train the model.
        given_coins: Whether an independent fair coin included each of these texts, a whole privacy
            unit, or left it out. The guesses then bound ε from below and may contradict the claim.
        given_epsilon: Claim for one text of an external model. 0: no claim.
        given_delta: δ of the same claim; below 1.
        given_masks: Number of fresh masks over which a masked model's losses are averaged.
    """

    audited_model: str = setting("", "Model", path=True)
    given_canaries: str = setting("", "Canaries", path=True)
    given_members: str = setting("", "Members", path=True)
    given_held_out: str = setting("", "Held-out texts", path=True)
    given_coins: bool = setting(False, "Divided by coins")
    given_epsilon: float = setting(0.0, "Claimed ε", section=ESSENTIALS, ge=0)
    given_delta: float = setting(0.0, "Claimed δ", section=ESSENTIALS, ge=0, lt=1)
    given_masks: int = setting(4, "Masks", ge=1, le=256)

    @model_validator(mode="after")
    def _audits_something(self) -> Self:
        if not self.audited_model:
            raise ValueError("audited_model: name the model")
        if bool(self.given_members) != bool(self.given_held_out):
            raise ValueError("given_members: needs given_held_out; give both or neither")
        if not self.given_canaries and not self.given_members:
            raise ValueError("given_canaries: give canaries, or members and held-out texts")
        if self.given_coins and not self.given_members:
            raise ValueError("given_coins: give the texts that coins divided")
        if self.given_delta and not self.given_epsilon:
            raise ValueError("given_epsilon: half a claim")
        return self
