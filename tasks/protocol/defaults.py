"""Defaults of settings that are left empty: they follow from the data and from the target ε.

Every rule is a function of declared numbers, so the same settings always give the same run. Nothing
is read from the data or from the ledger.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from decimal import ROUND_DOWN, Context
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dp_core.config.privacy import CHARGED_SOURCES

# Shares of ε for phrases and for the rest, as measured by benchmarks/utility.
PHRASES_SHARE, BESIDE_PHRASES = 0.75, 0.25
# ε of words that phrases cannot do without, as a share where ε in total is below 1. At ε = 1 and
# 6,000 patients 0.6 for words and 0.8 for phrases kept 45% of the gain, 0.25 and 0.75 kept 32%.
LEAST_FOR_WORDS = 0.6
# Phrases need this product of units and ε: below it the noise hides nearly all that units share.
LEAST_FOR_PHRASES = 5000.0
# With fewer units, the canaries of an audit are too few to show a noticeable ε.
LEAST_AUDITED_UNITS, MOST_AUDIT_CANARIES = 300, 1000
SCARCE_UNITS = 1000  # with fewer, a canary at the usual rates would hardly occur
MANY_UNITS = 500  # with fewer, a twentieth of them measures too little
_CANARY_RATES = (0.002, 0.006, 0.02)
_DELTA = Context(prec=3, rounding=ROUND_DOWN)  # significant digits of the δ of a part
_DELTA_WEIGHTS = {"delta": 10, "phrases_delta": 10, "vocabulary_delta": 1}
_WITHOUT_TARGET = {  # the demo's privacy
    "noise_multiplier": 0.875,
    "delta": 1e-6,
    "vocabulary_epsilon": 2.0,
    "vocabulary_delta": 1e-7,
    "phrases_epsilon": 0.0,
    "phrases_delta": 1e-6,
}
_FINE_TUNING = tomllib.loads(Path(__file__).with_name("fine_tuning.toml").read_text("utf-8"))
FINE_TUNING: dict[str, Any] = _FINE_TUNING["usual"]


class AdaptiveDefaults(BaseModel):
    """The settings on which other defaults depend, and the rules for these defaults.

    Attributes:
        audited: whether a job of this kind can have an audit by canaries; sweeps have none.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    private_format: str = "synthetic"
    entities_format: str | None = None
    finetune_privacy: str = "none"
    finetune_epsilon: float | None = None
    public_model: str = ""
    head: str = "entities"
    all_public: bool = False
    declared_units: int = 6000
    vocabulary_source: str = "public+private"
    private_start: str = "public"
    noise_bands: int = 1
    batch_size: int | None = None
    canary_rates: str | None = None
    target_epsilon: float | None = None
    target_delta: float | None = None
    delta: float | None = None
    vocabulary_delta: float | None = None
    phrases_epsilon: float | None = None
    phrases_delta: float | None = None
    audited: bool = True

    @property
    def continues_a_public_model(self) -> bool:
        """Whether private trainings start from a public model's weights."""
        return bool(self.public_model) and self.private_start == "public"

    @property
    def of_data(self) -> dict[str, Any]:
        """Defaults that follow from the kind of text and from the number of units."""
        units, made_up = self.declared_units, self.private_format == "synthetic"
        shown = self.all_public or made_up
        usual_canaries = made_up or bool(self.canary_rates)
        scarcity = 1.0 if usual_canaries else min(max(1.0, SCARCE_UNITS / units), 5.0)
        batch = min(256, max(1, units // max(8, self.noise_bands)))
        # AdamW moves a weight by the learning rate even if its gradient is nearly all noise.
        rate = 1.0 if made_up else min(1.0, (self.batch_size or batch) / 256)
        auditable = self.audited and not shown and self.private_start != "fresh"
        canaries = min(units // 10, MOST_AUDIT_CANARIES) if units >= LEAST_AUDITED_UNITS else 0
        if not could_contradict(canaries, self.target_epsilon):
            canaries = 0
        return {
            "synthetic_patients": max(50, min(6000, units)) if made_up else 6000,
            "entities_format": "synthetic" if made_up else "none",
            "nonprivate": self.all_public or made_up,
            "batch_size": batch,
            "learning_rate": float(f"{6e-3 * rate:.2g}"),
            # 3e-3 destroys a pre-trained model; 1e-4 is the rate of Devlin et al. 2019.
            "public_learning_rate": 1e-4 if self.public_model else 3e-3,
            "nonprivate_learning_rate": 1e-4 if self.continues_a_public_model else 3e-3,
            "holdout": 0.05 if made_up or units >= MANY_UNITS else 0.1,
            "canary_rates": ",".join(f"{rate * scarcity:.3g}" for rate in _CANARY_RATES),
            "canaries_per_group": max(1, round(4 / scarcity)),
            "audit_canaries": canaries if auditable else 0,
        }

    @property
    def of_privacy(self) -> dict[str, Any]:
        """Shares of the target ε and δ, without σ, which the plan calibrates; or the demo's."""
        epsilon = self.target_epsilon
        if epsilon is None:
            return _WITHOUT_TARGET
        phrases = self.phrases_epsilon
        if phrases is None:
            enough = epsilon * self.declared_units >= LEAST_FOR_PHRASES
            enough = enough and self.private_start == "public"  # where their model is continued
            phrases = share_of(epsilon, PHRASES_SHARE) if enough else 0.0
        delta = self.target_delta or default_delta(self.declared_units)
        return {
            **_WITHOUT_TARGET,
            "noise_multiplier": None,
            "target_delta": delta,
            "vocabulary_epsilon": share_of(epsilon, words_share(epsilon, phrases)),
            "phrases_epsilon": phrases,
            **self._deltas(delta, phrases),
        }

    @property
    def of_labels(self) -> dict[str, Any]:
        """Settings of fine-tuning; private labels of a public model have the measured recipe.

        Its settings of the DP models alone stay empty, and `private_labels` supplies them.
        """
        values = FINE_TUNING
        if self.finetune_privacy == "dp" and self.continues_a_public_model:
            values = {**_FINE_TUNING["recipe"], "crf": self.head == "entities"}
        calibrated = {} if self.finetune_epsilon is None else {"finetune_noise_multiplier": None}
        return {**values, **calibrated}

    def _deltas(self, total: float, phrases: float) -> dict[str, float]:
        """Return the δ of the charged parts that are left empty: shares of the rest of the total.

        If nothing is left for them, the parts exceed the target, and the settings are refused.
        """
        charged = {
            "delta": True,
            "vocabulary_delta": self.vocabulary_source in CHARGED_SOURCES,
            "phrases_delta": phrases > 0,
        }
        given = {name: getattr(self, name) for name, charges in charged.items() if charges}
        left = total - math.fsum(delta for delta in given.values() if delta)
        empty = [name for name, delta in given.items() if delta is None]
        weights = sum(_DELTA_WEIGHTS[name] for name in empty)
        shares = {name: left * _DELTA_WEIGHTS[name] / weights for name in empty}
        return {n: min(share, rounded_down(share)) for n, share in shares.items() if share > 0}


def private_labels(declared_units: int, batch_size: int | None) -> dict[str, Any]:
    """Return the recipe's settings of fine-tuning with DP, for an empty or a given batch size."""
    recipe = dict(_FINE_TUNING["recipe_of_dp"])
    updates, most = recipe.pop("updates"), recipe.pop("batch_size")
    batch = batch_size or min(most, declared_units // 4)
    epochs = math.ceil(updates * batch / declared_units)
    return recipe | {"finetune_batch_size": batch, "finetune_epochs": epochs}


def default_delta(declared_units: int) -> float:
    """Return the largest power of ten that is at most a hundredth of one in the units."""
    return float(f"1e-{math.ceil(math.log10(100 * declared_units) - 1e-9)}")


def could_contradict(canaries: int, epsilon: float | None) -> bool:
    """Return whether an audit would contradict a target ε if all of its guesses were right.

    It guesses a quarter of the canaries, and its significance is 0.001. Under ε each guess is right
    with probability at most e^ε/(1 + e^ε) (Steinke, Nasr and Jagielski 2023).
    """
    return epsilon is None or canaries / 4 * math.log1p(math.exp(-epsilon)) >= math.log(1000)


def words_share(epsilon: float, phrases_epsilon: float) -> float:
    """Return the share of ε for the vocabulary; phrases cannot do without words."""
    if not phrases_epsilon:
        return BESIDE_PHRASES
    return max(BESIDE_PHRASES, min(LEAST_FOR_WORDS / epsilon, LEAST_FOR_WORDS))


def share_of(epsilon: float, share: float) -> float:
    """Return a share of ε, rounded and within the range of a setting."""
    return min(max(round(share * epsilon, 3), 0.01), 100.0)


def rounded_down(delta: float) -> float:
    """Return δ with three significant digits; 9.9999999999999e-7, a rounded product, is 1e-6."""
    return float(_DELTA.create_decimal_from_float(delta * (1 + 1e-9)))


def with_defaults(given: Mapping[str, Any], *, audited: bool) -> dict[str, Any]:
    """Return the given settings, and values of those that are left empty.

    Args:
        given: settings that are not empty, before their validation.
        audited: whether a job of this kind can have an audit by canaries.
    """
    try:
        known = AdaptiveDefaults.model_validate({**given, "audited": audited})
    except ValidationError:  # the validation of all settings names the wrong value
        return dict(given)
    return known.of_data | known.of_privacy | known.of_labels | dict(given)
