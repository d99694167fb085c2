"""The kinds of model that a job can train, and what only some of them can do."""

from __future__ import annotations

from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.parameters import ModelConfig
from tasks.protocol import CAUSAL, ModelShape
from tasks.runtime.context import Input

NAMES = {"bert": "BERT", "distilbert": "DistilBERT", CAUSAL: "GPT-2"}


def config_of(shape: ModelShape, vocabulary_size: int, length: int) -> ModelConfig:
    """Return the shape of a fresh model that reads rows of `length` pieces."""
    if shape.kind == CAUSAL:
        return Gpt2Config.of_size(
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
        type_vocab=0 if shape.kind == "distilbert" else 2,
    )


def kind_of(config: ModelConfig) -> str:
    """Return the kind, as settings call it."""
    if isinstance(config, Gpt2Config):
        return CAUSAL
    return "distilbert" if config.distilled else "bert"


def refuse_other_architecture(found: ModelConfig, shape: ModelShape) -> None:
    """Refuse to begin with a causal model where a masked one is trained, and the other way round.

    Raises:
        BadInput: it says what the folder holds, and what was asked for.
    """
    kind = kind_of(found)
    if (kind == CAUSAL) != (shape.kind == CAUSAL):
        raise BadInput(
            f"the folder holds a {NAMES[kind]}, the settings ask for a {NAMES[shape.kind]}",
            where="public_model",
            fix=f"Set model_kind to {kind}, or give another folder.",
        )


def refuse_causal(model: Input, what: str) -> None:
    """Refuse a causal model, before anything is read or charged.

    Args:
        model: a pre-training's output.
        what: that cannot be done with it.

    Raises:
        BadInput: it is one.
    """
    if model.facts.get("shape", {}).get("kind") == CAUSAL:
        raise BadInput(
            f"{what} needs a model that reads both sides of a word, and this one is causal",
            where="model_uri",
            fix="Give the output of a pre-training of kind bert or distilbert.",
        )


def in_words(model: Input) -> str:
    """Return a model's kind and size, for example `BERT, 2 layers × 128`."""
    shape = model.facts["shape"]
    layers = f"{shape['layers']} layer{'s' * (shape['layers'] != 1)}"
    return f"{NAMES[shape.get('kind', 'bert')]}, {layers} × {shape['hidden']}"
