"""The audit of one model from outside: which model, by which canaries and texts, against what."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from dp_core.config.audit import ExtractionProtocol
from dp_core.config.data import VersionConfig
from dp_core.config.fields import DATA, PRIVACY, setting
from dp_core.config.training import SeedConfig


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
