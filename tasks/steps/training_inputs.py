"""What trainings of language models start from: inputs of one vocabulary, rows, a fresh model.

These lines shape releases: they are part of the code in the manifest of a charged training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dp_core.audit.coins import throw_coins
from dp_core.config.training import ArchitectureConfig, is_causal
from dp_core.data.token_store import TokenStore, joined
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.parameters import ModelConfig
from dp_core.privacy.seed_store import PrivacySeed
from tasks.context import StepContext
from tasks.protocol import PretrainSpec
from tasks.releases.provenance import PRETRAINED, Role, fact, model_at, output_of, rows_at
from tasks.report.results import ARCHITECTURES
from tasks.results.inputs import Input
from tasks.steps.token_store_step import AUDIT, HELD_OUT, TRAIN, keyed_store_digest

# Whose rows train, by mode.
_ROLES: dict[str, Role] = {
    "public": "public",
    "released": "released",
    "dp": "private",
    "nonprivate": "private",
}


@dataclass(frozen=True)
class TrainingInputs:
    """The outputs of earlier steps that a training reads, all of one vocabulary.

    Attributes:
        vocabulary: of all of them.
        rows: the token store whose units train.
        public: the token store whose held-out rows may be shown to anyone.
        private: the token store whose held-out rows are measured for the operator.
        initial: the model before the first update, if an earlier step made it.
    """

    vocabulary: Input
    rows: Input
    public: Input
    private: Input
    initial: Input | None

    @classmethod
    def open(cls, spec: PretrainSpec, context: StepContext) -> Self:
        """Open what the spec names, and nothing of another role or vocabulary.

        Raises:
            BadInput: an input is not what the spec calls it.
        """
        vocabulary = output_of(context, spec.vocabulary_uri, "vocabulary")

        def rows(field: str, role: Role) -> Input:
            return rows_at(context, getattr(spec, field), role, vocabulary, field=field)

        return cls(
            vocabulary,
            rows("store_uri", _ROLES[spec.mode]),
            rows("public_store_uri", "public"),
            rows("private_store_uri", "private"),
            model_at(
                context, spec.init_uri, field="init_uri", steps=PRETRAINED, vocabulary=vocabulary
            )
            if spec.init_uri
            else None,
        )

    def train_store(self, spec: PretrainSpec, context: StepContext) -> TokenStore:
        """Return the rows that train, as their step wrote them: the noise is bound to them.

        Raises:
            BadInput: they were altered.
        """
        store = TokenStore.open(self.rows.folder / TRAIN)
        if keyed_store_digest(store, context) != self.rows.facts["digest"]:
            raise BadInput("the rows are not those that the step wrote", where=spec.store_uri)
        return store

    def with_audit_canaries(
        self, store: TokenStore, chosen: Sequence[int], context: StepContext
    ) -> TokenStore:
        """Return the rows that train, and behind them the audit canaries that are in.

        The copy lies with the step's unfinished work, and goes with it.

        Args:
            store: of the private units.
            chosen: from `audit_canaries_in`.
            context: of the training.
        """
        canaries = audit_canaries_of(self.rows, context)
        return joined(context.durable / "rows", store, canaries, chosen)

    def audit_canaries_in(self, coins: PrivacySeed, context: StepContext) -> list[int]:
        """Return the numbers of the audit canaries that are in, by the release's coins.

        Raises:
            BadInput: the canaries were altered.
        """
        canaries = audit_canaries_of(self.rows, context)
        return [int(i) for i in np.flatnonzero(throw_coins(coins, canaries.n_units))]


def audit_canaries_of(rows: Input, context: StepContext) -> TokenStore:
    """Return all audit canaries of a private store, in or out, as their step wrote them.

    Raises:
        BadInput: there are none, or they were altered.
    """
    if not (count := fact(rows, "audit_canaries")):
        raise BadInput(
            "the rows have no audit canaries",
            where="private_store_uri",
            fix="Set audit_canaries before the training.",
        )
    store = TokenStore.open(rows.folder / AUDIT)
    known = keyed_store_digest(store, context) == fact(rows, "audit_digest")
    if not known or store.n_units != count:
        raise BadInput("the audit canaries are not those that the step wrote", where="store_uri")
    return store


def held_out(source: Input) -> TokenStore | None:
    """Return the rows of a store that only measure; None if the corpus was too small for any."""
    folder = source.folder / HELD_OUT
    return TokenStore.open(folder) if (folder / "store.json").exists() else None


def config_of(shape: ArchitectureConfig, vocabulary_size: int, length: int) -> ModelConfig:
    """Return the config of a fresh model that reads rows of `length` tokens."""
    if shape.model_kind == "feed-forward":
        return FeedForwardConfig(
            vocabulary_size,
            shape.hidden,
            shape.window,
            tuple(int(units) for units in shape.dense_units.split(",")),
            max_positions=length,
        )
    if is_causal(shape.model_kind):
        decoder = LlamaConfig if shape.model_kind == "llama" else Gpt2Config
        return decoder.of_size(
            vocab_size=vocabulary_size,
            hidden=shape.hidden,
            layers=shape.layers,
            max_positions=length,
        )
    return BertConfig.of_size(
        vocab_size=vocabulary_size,
        hidden=shape.hidden,
        layers=shape.layers,
        max_positions=length,
        type_vocab=0 if shape.model_kind == "distilbert" else 2,
    )


def kind_of(config: ModelConfig) -> str:
    """Return the kind of a model, as settings call it."""
    if isinstance(config, LlamaConfig):
        return "llama"
    if isinstance(config, Gpt2Config):
        return "gpt2"
    if isinstance(config, FeedForwardConfig):
        return "feed-forward"
    return "distilbert" if config.distilled else "bert"


def refuse_other_architecture(config: ModelConfig, shape: ArchitectureConfig) -> None:
    """Refuse to begin with a decoder where another one or a masked model is trained, or so.

    A BERT and a DistilBERT may stand for each other.

    Raises:
        BadInput: it says what the folder holds, and what was asked for.
    """
    kind = kind_of(config)
    if kind != shape.model_kind and (is_causal(kind) or is_causal(shape.model_kind)):
        raise BadInput(
            f"the folder holds a {ARCHITECTURES[kind]}, the settings ask for a "
            f"{ARCHITECTURES[shape.model_kind]}",
            where="public_model",
            fix=f"Set model_kind to {kind}, or give another folder.",
        )
