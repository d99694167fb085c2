"""Privacy settings: units, vocabulary, phrases, DP-SGD and selection."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dp_core.config.fields import (
    ESSENTIALS,
    MORE_PRIVACY,
    MORE_TRAINING,
    PLACEHOLDERS,
    WHOLE_NUMBERS,
    Config,
    later,
    setting,
)
from dp_core.errors import PlanError

UnitName = Literal["example", "document", "patient"]
LEAST_UNITS = 10  # smaller crowds do not hide a unit
LEAST_NOISE = 0.01  # below it ε is in the thousands
LEAST_CLIP, MOST_CLIP = 1e-6, 1e6  # squares of far smaller gradients are 0 in float32
MOST_PHRASE, MOST_ROUNDS = 16, 8  # words of a phrase; rounds of a phrase release
MOST_BANDS = 64  # of correlated noise; more bands gain little and need as many buffers
LEAST_EPSILON, MOST_EPSILON = 0.01, 100.0  # of a part, and of a run
MOST_CLAIM = 500.0  # largest ε with a meaning; a larger budget is for studies by the operator
LEAST_DELTA = 1e-30  # below any meaningful probability; smaller tails are not computed
LEAST_BYTE_LEVEL = 261  # tokens: 256 bytes and 5 special ones
MechanismName = Literal["elimination", "gaussian", "paper"]

NoiseMultiplier = Annotated[float, Field(ge=LEAST_NOISE, le=1000)]
ClipNorm = Annotated[float, Field(ge=LEAST_CLIP, le=MOST_CLIP)]
Delta = Annotated[float, Field(ge=LEAST_DELTA, le=0.01)]


def gives_a_unit_away(delta: float, declared_units: int) -> bool:
    """Return whether δ is 1/n or more for n units (or NaN) and so guarantees nothing.

    Publishing one whole random unit is (0, 1/n)-DP.
    """
    return not delta * declared_units < 1


def refuse_large_delta(deltas: Iterable[float], declared_units: int, where: str) -> None:
    """Refuse a total δ that `gives_a_unit_away`.

    Args:
        deltas: δ of every part of a claim, as stated.
        declared_units: n, the public upper bound on the number of units.
        where: location for the message.

    Raises:
        PlanError: the sum is not above 0 and below 1/n, or NaN.
    """
    total = math.fsum(deltas)
    if not total > 0 or gives_a_unit_away(total, declared_units):
        raise PlanError(
            f"δ = {total:.3g} in total is not between 0 and 1/{declared_units}: at 1/n and above, "
            "publishing one unit whole would count as private",
            where=where,
            fix="Lower the δ of a part, or release fewer parts.",
        )


class UnitConfig(Config, section=ESSENTIALS):
    """The privacy unit of vocabulary and training, and public bounds on it.

    Attributes:
        unit: The unit that is protected as a whole, in vocabulary and training.
        declared_units: An upper bound on the number of units that is public knowledge, and not
            derived from the texts. More units are refused.
        words_per_unit: At most this many distinct words of a unit count towards the vocabulary.
            With the unit “example” it is the length of a tuple (256 in the paper).
    """

    unit: UnitName = setting("patient", "Privacy unit")
    declared_units: int = setting(
        6000, "Declared number of units", ge=LEAST_UNITS, le=1_000_000_000
    )
    words_per_unit: int = setting(128, "Words per unit", section=MORE_PRIVACY, ge=1, le=100_000)

    @property
    def example(self) -> str:
        """What an example is, in words, if that is the unit; otherwise empty."""
        return f"{self.words_per_unit} words" if self.unit == "example" else ""


VocabularySource = Literal[
    "public+private", "private", "public", "checkpoint+private", "checkpoint", "nonprivate"
]
CHARGED_SOURCES = ("public+private", "private", "checkpoint+private")  # they release private words


class VocabularyConfig(UnitConfig, section=MORE_TRAINING):
    """The source of the vocabulary's words, and the noised histogram of private words.

    Attributes:
        vocabulary_source: Source of the tokens. public+private: in turns, free public words and
            released private words that public text would split (charged), and merges of other
            words. private: only released private words, as in the paper (charged). public: only
            public text (ε 0). checkpoint+private, checkpoint: tokens and embeddings of
            public_model, with released private words (charged) or without (ε 0). nonprivate: exact
            private counts; all its models have ε = ∞ and are for the operator only.
        vocabulary_mechanism: Mechanism at the same ε and δ. elimination: rounds that drop released
            and hopeless words; releases the most. gaussian: noised counts. paper: Hoory et al.'s N
            = 256, σ = 200, C = 982.5, charged at its true δ; it ignores ε, δ and words per unit.
        vocabulary_epsilon: Privacy loss of the word histogram, if the vocabulary's source releases
            private words. Empty: 2, or a share of target_epsilon.
        vocabulary_delta: δ of the vocabulary's release; far below 1 / number of units. Empty: 1e-7,
            or a share of target_delta.
        vocabulary_size: Most tokens that are learned (with gpt2 at least 261). A checkpoint keeps
            all of its own.
        lowercase: Whether a learned WordPiece vocabulary lowers the case of text. Byte-level
            vocabularies keep it, and a checkpoint's tokens are read as it states.
        strip_accents: Whether it strips accents and the vowel signs of other scripts, such as Hindi
            and Thai; as-lowercase: if it lowers the case.
        placeholders: Placeholders of de-identification, spaces between them, such as [**Name**]
            ___. Each is one public token of a learned vocabulary, without a charge.
    """

    vocabulary_source: VocabularySource = setting("public+private", "Vocabulary: source")
    vocabulary_mechanism: MechanismName = setting(
        "elimination", "Vocabulary: mechanism", section=MORE_PRIVACY
    )
    vocabulary_epsilon: float = setting(
        2.0, "Vocabulary: ε", section=MORE_PRIVACY, ge=LEAST_EPSILON, le=MOST_EPSILON
    )
    vocabulary_delta: Delta = setting(1e-7, "Vocabulary: δ", section=MORE_PRIVACY)
    vocabulary_size: int = setting(4000, "Vocabulary size", ge=100, le=200_000)
    lowercase: bool = later(True, "Vocabulary: lower case")
    strip_accents: Literal["as-lowercase", "yes", "no"] = later(
        "as-lowercase", "Vocabulary: strip accents"
    )
    placeholders: str = later("", "Vocabulary: placeholders", pattern=PLACEHOLDERS)

    @model_validator(mode="after")
    def _placeholders_fit(self) -> Self:
        least = LEAST_BYTE_LEVEL + len(self.placeholders.split())
        if self.placeholders and self.vocabulary_size < least:
            raise ValueError(f"vocabulary_size: the placeholders need {least} tokens or more")
        return self

    @property
    def strips_accents(self) -> bool:
        """Whether a learned WordPiece vocabulary strips accents."""
        follows = self.strip_accents == "as-lowercase"
        return self.lowercase if follows else self.strip_accents == "yes"

    @property
    def releases_private_words(self) -> bool:
        """Whether the mechanism runs and is charged."""
        return self.vocabulary_source in CHARGED_SOURCES

    @property
    def reads_private_text(self) -> bool:
        """Whether the private corpus is read at all."""
        return self.releases_private_words or self.vocabulary_source == "nonprivate"

    @property
    def reads_public_text(self) -> bool:
        """Whether words are learned from the public corpus."""
        return self.vocabulary_source in ("public+private", "public")

    @property
    def keeps_a_checkpoint(self) -> bool:
        """Whether the tokens come from a public model."""
        return self.vocabulary_source in ("checkpoint+private", "checkpoint")


class PhrasesConfig(UnitConfig, section=MORE_PRIVACY):
    """Phrases that many units share, released in rounds (DPNE: Kim et al. 2021).

    Attributes:
        phrases_epsilon: Privacy loss of released phrases. A generator writes text from them, which
            trains the model before its private rows do. 0: no phrases are released. Empty: 0; with
            target_epsilon a share of it if declared_units · ε is at least 5,000.
        phrases_delta: δ of the released phrases; far below 1 / number of units. Unused if ε is 0.
            Empty: 1e-6, or a share of target_delta.
        phrases_lengths: Comma-separated, increasing, from 2 to 16: words of a phrase in each round.
            A round counts only phrases whose parts the previous round released.
        phrases_per_unit: Most distinct phrases of a unit that one round counts, sampled at random.
            More phrases hardly raise the threshold; fewer leave out more of a unit's text.
    """

    phrases_epsilon: float = setting(0.0, "Phrases: ε", ge=0, le=MOST_EPSILON)
    phrases_delta: Delta = setting(1e-6, "Phrases: δ")
    phrases_lengths: str = setting("2,3,5", "Phrases: lengths", pattern=WHOLE_NUMBERS)
    phrases_per_unit: int = setting(2000, "Phrases per unit", ge=1, le=100_000)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The phrase lengths of the rounds as a tuple."""
        return tuple(int(word) for word in self.phrases_lengths.split(","))

    @field_validator("phrases_lengths")
    @classmethod
    def _rise(cls, value: str) -> str:
        lengths = [int(word) for word in value.split(",")]
        if lengths != sorted(set(lengths)) or len(lengths) > MOST_ROUNDS:
            raise ValueError(f"lengths must increase, in at most {MOST_ROUNDS} rounds")
        if not 2 <= lengths[0] <= lengths[-1] <= MOST_PHRASE:
            raise ValueError(f"a phrase has 2 to {MOST_PHRASE} words")
        return value


class WrittenTextConfig(Config, section=MORE_TRAINING):
    """Text generated from released phrases: post-processing without further privacy cost.

    Attributes:
        written_documents: Number of documents that are generated from the released phrases.
        written_words: Number of words of each document that is generated from the released phrases.
        written_public_share: Share of public documents among the generated ones, by words: they
            preserve the public model's knowledge while it learns the phrases. 0: only generated
            text.
    """

    written_documents: int = setting(6000, "Written text: documents", ge=1, le=10_000_000)
    written_words: int = setting(120, "Written text: words", ge=16, le=10_000)
    written_public_share: float = setting(0.5, "Written text: share of public text", ge=0, le=0.95)


class PrivacyConfig(UnitConfig, section=MORE_PRIVACY):
    """DP-SGD (Abadi et al. 2016): clipping, sampling and noise of every update, and δ.

    Attributes:
        noise_multiplier: Effective noise of one update, in units of the clip norm; more noise, less
            ε. Empty: 0.875, or calibrated to target_epsilon.
        delta: δ of the pre-training. Empty: 1e-6, or a share of target_delta.
        clip_norm: Bound on one unit's gradient.
        clipping: flat: clip at the clip norm; automatic: scale every gradient to nearly the clip
            norm (AUTO-S); adaptive: the clip norm follows a noised quantile of the norms. ε is the
            same.
        clip_quantile: Share of units that should be within the clip norm.
        sampling: Distribution of batches. poisson: smallest ε; truncated-poisson: no batch above
            the cap, slightly larger ε. Neighbours: add or remove one unit.
        batch_cap: Largest number of units of a batch, only with truncated-poisson; otherwise 0.
        noise_bands: 1: every update has independent noise (DP-SGD). b above 1: banded matrix
            factorisation; updates sample from parts of the units in turn, noise partly cancels over
            b updates, and σ is the noise of one column. 0: the number of bands, at most 64, that
            disturbs training least at the ε that σ has with 1 band; 1 if batches are truncated or
            grow, or the clip norm is learned. Choose 0 if each unit takes part in few updates,
            where the gain is largest.
    """

    noise_multiplier: NoiseMultiplier | None = setting(0.875, "Noise multiplier σ")
    delta: Delta = setting(1e-6, "Training: δ")
    clip_norm: ClipNorm = setting(1.0, "Clip norm")
    clipping: Literal["flat", "automatic", "adaptive"] = setting("flat", "Clipping")
    clip_quantile: float = setting(0.5, "Adaptive clipping: quantile", gt=0, lt=1)
    sampling: Literal["poisson", "truncated-poisson"] = setting("poisson", "Sampling")
    batch_cap: int = setting(0, "Batch cap", ge=0, le=1 << 26)
    noise_bands: int = setting(1, "Correlated noise: bands", ge=0, le=MOST_BANDS)

    @model_validator(mode="after")
    def _sampling_and_noise_are_proven(self) -> Self:
        if self.noise_bands > 1 and self.sampling != "poisson":
            raise ValueError("noise_bands: correlated noise is proven only for poisson sampling")
        if self.noise_bands > 1 and self.clipping == "adaptive":
            raise ValueError("noise_bands: correlated noise needs a constant clip norm")
        if (self.sampling == "truncated-poisson") != (self.batch_cap > 0):
            raise ValueError("batch_cap: only truncated-poisson sampling has one, and needs it")
        return self


class SelectionConfig(Config, section=MORE_PRIVACY):
    """Private selection by a random number of trainings (Papernot and Steinke 2022).

    Attributes:
        selection_law: Law of the secret number of trainings of a selection; with poisson it may be
            0.
        selection_mean: Expected number of trainings of a selection by a random count.
    """

    selection_law: Literal["geometric", "logarithmic", "poisson"] = setting(
        "geometric", "Random count: law"
    )
    selection_mean: float = setting(6.0, "Random count: mean", gt=1, le=10_000)
