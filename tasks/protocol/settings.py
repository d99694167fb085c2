"""The settings of a job, as a person gives them: Airflow's trigger form and the CLI.

The JSON schema of these models is the trigger form, so every field has a title, a description,
a unit and a range; what the form lets through is validated here again before any work starts.
"""

from __future__ import annotations

import math
from typing import Self

from pydantic import ValidationError, field_validator, model_validator

from tasks.protocol.advanced_settings import AdvancedSettings
from tasks.protocol.data_settings import DataSettings
from tasks.protocol.fields import AUDIT, CANARIES, DEVICE, IN_WORDS, NUMBERS, RUN, numbers, setting
from tasks.protocol.finetune_settings import FinetuneSettings
from tasks.protocol.privacy_settings import PrivacySettings
from tasks.protocol.specs import CAUSAL
from tasks.protocol.training_settings import TrainingSettings


class JobSettings(
    DataSettings, PrivacySettings, TrainingSettings, AdvancedSettings, FinetuneSettings
):
    """Everything `dp_bert` can be told. The defaults are the demo."""

    canary_patterns: str = setting(
        "HS,HSH,HHSHH",
        AUDIT,
        "Canary patterns",
        "Comma-separated strings of H (hint) with one S (secret).",
        pattern=CANARIES,
    )
    canary_rates: str = setting(
        "0.002,0.006,0.02",
        AUDIT,
        "Canary rates",
        "Comma-separated probabilities p that a unit carries the canary.",
        pattern=NUMBERS,
    )
    canaries_per_group: int = setting(
        4,
        AUDIT,
        "Canaries per pattern and rate",
        "More of them measure exposure more closely.",
        ge=1,
        le=1000,
    )
    device: str = setting(
        "mock-tpu:2",
        RUN,
        "Device",
        "cpu, or mock-tpu:N (the processor as N devices); gpu and tpu need an image whose "
        "TensorFlow drives them (docs/cloud.md).",
        pattern=DEVICE,
    )
    seed: int = setting(
        1,
        RUN,
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
        for rate in numbers(value):
            if not 0 < rate <= 1:
                raise ValueError(f"{rate:g} is not a probability above 0")
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.batch_size > self.declared_units:
            raise ValueError("batch_size is above declared_units: the sampling rate would pass 1")
        if self.finetune_privacy == "dp" and self.entities_shown:
            raise ValueError("finetune_privacy: public or made-up labels need no privacy")
        if self._tunes_the_private_data_set:
            self._refuse_another_currency()
        self.refuse_large_deltas()
        listed = self.entities_unit != "patient" or bool(self.entities_patients)
        if self.finetune_privacy == "dp" and not listed:
            raise ValueError(
                "entities_unit: no labelled document names its patient: choose document, or give "
                "entities_patients, a list of whose each document is"
            )
        if self.model_kind == CAUSAL:
            if self.finetune_privacy == "dp":
                raise ValueError("finetune_privacy: a causal model is not fine-tuned for entities")
            if self.whole_words:
                raise ValueError("whole_words: a causal model (gpt2) masks nothing")
        if self.first_batch_size:
            if self.first_batch_size > self.batch_size:
                raise ValueError("first_batch_size is above batch_size")
            if self.updates < 8:
                raise ValueError("first_batch_size: fewer than 8 updates cannot grow")
        return self

    @property
    def _tunes_the_private_data_set(self) -> bool:
        """Whether private fine-tuning is charged to the data set of the corpus."""
        private = self.finetune_privacy == "dp"
        return private and self.entities_charged_to == self.private_dataset

    def refuse_large_deltas(self, models: int = 1) -> None:
        """Refuse a total δ of one in the units or more, of this many DP models together.

        Raises:
            ValueError: one unit could be given away.
        """
        if self._tunes_the_private_data_set:
            units = max(self.declared_units, self.entities_declared_units)
            self.refuse_large_delta(models, self.finetune_delta, units)
            return
        self.refuse_large_delta(models, 0.0, self.declared_units)
        units, delta = self.entities_declared_units, models * self.finetune_delta
        if self.finetune_privacy == "dp" and not delta * units < 1:
            raise ValueError(
                f"finetune_delta: {delta:.3g} for {models} models is not below "
                f"1/entities_declared_units"
            )

    def _refuse_another_currency(self) -> None:
        """Refuse private fine-tuning that the private data set's own budget could never hold."""
        elsewhere = "or name a data set of their own in entities_dataset"
        if self.entities_unit != self.unit:
            raise ValueError(
                f"entities_unit: the labels are charged to {self.private_dataset}, whose unit is "
                f"{self.unit}, not {self.entities_unit}: choose {self.unit}, {elsewhere}"
            )

    @property
    def updates(self) -> int:
        """Number of DP updates: epochs over the declared units at the expected batch size."""
        return max(1, math.ceil(self.epochs * self.declared_units / self.batch_size))

    @property
    def nonprivate_updates(self) -> int:
        """Number of updates of the non-private comparison: the same epochs."""
        return max(1, math.ceil(self.epochs * self.declared_units / self.nonprivate_batch_size))


def one_line(error: ValidationError) -> str:
    """Return a validation error as one line: field, reason, for each field that is wrong.

    A rule over several fields names them itself.
    """
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        field = ".".join(str(x) for x in item["loc"])
        match item["type"]:
            case "extra_forbidden":
                reason = "unknown setting"
            case "string_pattern_mismatch" if item["ctx"]["pattern"] in IN_WORDS:
                reason = f"must be {IN_WORDS[item['ctx']['pattern']]}"
            case _:
                reason = item["msg"].removeprefix("Value error, ")
        parts.append(f"{field}: {reason}" if field else reason)
    return "; ".join(parts)
