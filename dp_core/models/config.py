"""The shape of a BERT, and its translation from and to Hugging Face's `config.json`.

DistilBERT (Sanh et al. 2019) is a BERT of half the layers without token types: `type_vocab` 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput

HEAD_WIDTH = 64  # the width of an attention head, at every published size of BERT and GPT-2
_LARGEST, _DEEPEST = 10_000_000, 1000  # beyond these a config.json is damaged, and not a model
_MOST_TYPES = 1000
_DISTILBERT_EPSILON = 1e-12  # fixed in DistilBERT's code


class Shape(Protocol):
    """What every architecture here has a number for."""

    @property
    def vocab_size(self) -> int:
        """Pieces."""

    @property
    def hidden(self) -> int:
        """D."""

    @property
    def layers(self) -> int:
        """Blocks."""

    @property
    def heads(self) -> int:
        """Attention heads of a layer."""


@dataclass(frozen=True)
class BertConfig:
    """A BERT encoder's shape (Devlin et al. 2019). Widths in floats, `max_positions` in tokens.

    Without token types (`type_vocab` 0) it is a DistilBERT's.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    max_positions: int = 512
    type_vocab: int = 2
    layer_norm_epsilon: float = 1e-12
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        check_shape(self)
        if type(self.type_vocab) is not int or not 0 <= self.type_vocab <= _MOST_TYPES:
            raise BadInput(f"type_vocab is {self.type_vocab!r}", where="model")
        if self.distilled and self.layer_norm_epsilon != _DISTILBERT_EPSILON:
            raise BadInput(
                f"layer_norm_epsilon is {self.layer_norm_epsilon}",
                where="model",
                fix=f"A DistilBERT's is {_DISTILBERT_EPSILON}: its config.json has no word for it.",
            )

    @property
    def distilled(self) -> bool:
        """Whether this is a DistilBERT."""
        return self.type_vocab == 0

    @classmethod
    def of_size(
        cls,
        *,
        vocab_size: int,
        hidden: int,
        layers: int,
        max_positions: int = 512,
        type_vocab: int = 2,
    ) -> BertConfig:
        """Return BERT's usual proportions: heads of 64 and a fourfold intermediate layer.

        Weights start at √(0.4 / hidden): BERT's own 0.02 at its largest width, and wider for the
        narrow, which otherwise stay at word frequencies for thousands of updates.
        """
        return cls(
            vocab_size=vocab_size,
            hidden=hidden,
            layers=layers,
            heads=max(1, hidden // HEAD_WIDTH),
            intermediate=4 * hidden,
            max_positions=max_positions,
            type_vocab=type_vocab,
            initializer_range=round(math.sqrt(0.4 / hidden), 3),
        )

    def with_vocabulary(self, size: int) -> BertConfig:
        """Return the same shape over another vocabulary."""
        return replace(self, vocab_size=size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read Hugging Face's `config.json`, refusing what this encoder does not compute.

        Raises:
            BadInput: another architecture, activation or position embedding.
        """
        try:
            if config.get("model_type") == "distilbert":
                return cls._from_distilbert(config)
            return cls._from_bert(config)
        except KeyError as missing:
            raise BadInput(f"{missing.args[0]} is missing", where="config.json") from None

    @classmethod
    def _from_bert(cls, config: Mapping[str, Any]) -> BertConfig:
        refuse_other_than(
            config,
            {
                "model_type": "bert",
                "hidden_act": "gelu",
                "position_embedding_type": "absolute",
                "is_decoder": False,
                "tie_word_embeddings": True,
            },
        )
        return cls(
            vocab_size=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            intermediate=config["intermediate_size"],
            max_positions=config["max_position_embeddings"],
            type_vocab=config.get("type_vocab_size", 2),
            layer_norm_epsilon=config.get("layer_norm_eps", 1e-12),
            initializer_range=config.get("initializer_range", 0.02),
        )

    @classmethod
    def _from_distilbert(cls, config: Mapping[str, Any]) -> BertConfig:
        # `sinusoidal_pos_embds` says how the position table began: it is stored like any other.
        refuse_other_than(config, {"activation": "gelu", "tie_word_embeddings": True})
        return cls(
            vocab_size=config["vocab_size"],
            hidden=config["dim"],
            layers=config["n_layers"],
            heads=config["n_heads"],
            intermediate=config["hidden_dim"],
            max_positions=config["max_position_embeddings"],
            type_vocab=0,
            layer_norm_epsilon=_DISTILBERT_EPSILON,
            initializer_range=config.get("initializer_range", 0.02),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return what `transformers` reads as `BertConfig` or `DistilBertConfig`.

        Trained without dropout, and says so.
        """
        return self._to_distilbert() if self.distilled else self._to_bert()

    def _to_bert(self) -> dict[str, Any]:
        return {
            "architectures": ["BertForMaskedLM"],
            "model_type": "bert",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "type_vocab_size": self.type_vocab,
            "layer_norm_eps": self.layer_norm_epsilon,
            "initializer_range": self.initializer_range,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "position_embedding_type": "absolute",
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "torch_dtype": "float32",
        }

    def _to_distilbert(self) -> dict[str, Any]:
        return {
            "architectures": ["DistilBertForMaskedLM"],
            "model_type": "distilbert",
            "vocab_size": self.vocab_size,
            "dim": self.hidden,
            "n_layers": self.layers,
            "n_heads": self.heads,
            "hidden_dim": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "initializer_range": self.initializer_range,
            "activation": "gelu",
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
            "sinusoidal_pos_embds": False,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "torch_dtype": "float32",
        }


def check_shape(shape: Shape) -> None:
    """Refuse sizes below 1, and a hidden size that the heads do not divide.

    Raises:
        BadInput: such a shape.
    """
    for name in ("vocab_size", "hidden", "layers", "heads", "intermediate", "max_positions"):
        value = getattr(shape, name)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            fix = f"It must be a whole number from 1 to {_LARGEST}."
            raise BadInput(f"{name} is {value!r}", where="model", fix=fix)
    for name in ("layer_norm_epsilon", "initializer_range"):
        value = getattr(shape, name)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise BadInput(
                f"{name} is {value!r}", where="model", fix="It must be a number from 0 to 1."
            )
    if shape.layers > _DEEPEST:
        raise BadInput(f"{shape.layers} layers", where="model", fix="No model has so many.")
    if shape.hidden % shape.heads:
        raise BadInput(
            f"hidden size {shape.hidden} is not a multiple of {shape.heads} heads", where="model"
        )


def refuse_other_than(config: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a `config.json` that says otherwise; what it does not say is as expected.

    Raises:
        BadInput: naming the first difference.
    """
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise BadInput(
                f"{key} is {config[key]!r}", where="config.json", fix=f"Only {value!r} works."
            )


@dataclass(frozen=True)
class Gpt2Config:
    """A GPT-2 decoder's shape (Radford et al. 2019). Widths in floats, `max_positions` in tokens.

    `begin` and `end` are the pieces around a text: [CLS] and [SEP] in our vocabularies.
    """

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    max_positions: int = 1024
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    begin: int = SpecialIds.cls
    end: int = SpecialIds.sep

    def __post_init__(self) -> None:
        check_shape(self)

    @classmethod
    def of_size(
        cls, *, vocab_size: int, hidden: int, layers: int, max_positions: int = 512
    ) -> Gpt2Config:
        """Return GPT-2's usual proportions: heads of 64 and a fourfold intermediate layer."""
        return cls(
            vocab_size=vocab_size,
            hidden=hidden,
            layers=layers,
            heads=max(1, hidden // HEAD_WIDTH),
            intermediate=4 * hidden,
            max_positions=max_positions,
        )

    def with_vocabulary(self, size: int) -> Gpt2Config:
        """Return the same shape over another vocabulary."""
        return replace(self, vocab_size=size, begin=SpecialIds.cls, end=SpecialIds.sep)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gpt2Config:
        """Read Hugging Face's `config.json`, refusing what this decoder does not compute.

        Raises:
            BadInput: another architecture, activation, or scaling of attention.
        """
        refuse_other_than(
            config,
            {
                "model_type": "gpt2",
                "activation_function": "gelu_new",
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False,
                "add_cross_attention": False,
                "tie_word_embeddings": True,
            },
        )
        try:
            return cls(
                vocab_size=config["vocab_size"],
                hidden=config["n_embd"],
                layers=config["n_layer"],
                heads=config["n_head"],
                intermediate=_inner(config),
                max_positions=config["n_positions"],
                layer_norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
                initializer_range=config.get("initializer_range", 0.02),
                begin=_or(config.get("bos_token_id"), cls.begin),
                end=_or(config.get("eos_token_id"), cls.end),
            )
        except KeyError as missing:
            raise BadInput(f"{missing.args[0]} is missing", where="config.json") from None

    def to_hf(self) -> dict[str, Any]:
        """Return what `transformers.GPT2Config` reads; trained without dropout, and says so."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.heads,
            "n_inner": self.intermediate,
            "n_positions": self.max_positions,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "initializer_range": self.initializer_range,
            "activation_function": "gelu_new",
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "summary_first_dropout": 0.0,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
            "bos_token_id": self.begin,
            "eos_token_id": self.end,
            "pad_token_id": 0,
            "torch_dtype": "float32",
        }


def _inner(config: Mapping[str, Any]) -> Any:
    """Return the width of the feed-forward layers, which a config may leave to be fourfold."""
    inner, hidden = config.get("n_inner"), config["n_embd"]
    return 4 * hidden if inner is None and isinstance(hidden, int) else inner


def _or(piece: Any, otherwise: int) -> int:
    """Return the id of a piece, unless there is none, or several."""
    return piece if isinstance(piece, int) else otherwise
