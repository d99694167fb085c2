"""The shape of a BERT, and its translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dp_core.errors import BadInput

HEAD_WIDTH = 64  # BERT's width of an attention head, at every published size


@dataclass(frozen=True)
class BertConfig:
    """A BERT encoder's shape (Devlin et al. 2019). Widths in floats, `max_positions` in tokens."""

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
        for name in ("vocab_size", "hidden", "layers", "heads", "intermediate", "max_positions"):
            if getattr(self, name) < 1:
                raise BadInput(
                    f"{name} is {getattr(self, name)}", where="model", fix="It must be 1 or more."
                )
        if self.hidden % self.heads:
            raise BadInput(
                f"hidden size {self.hidden} is not a multiple of {self.heads} heads", where="model"
            )

    @classmethod
    def of_size(
        cls, *, vocab_size: int, hidden: int, layers: int, max_positions: int = 512
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
        expected = {
            "model_type": "bert",
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "tie_word_embeddings": True,
        }
        for key, value in expected.items():
            if config.get(key, value) != value:
                raise BadInput(
                    f"{key} is {config[key]!r}", where="config.json", fix=f"Only {value!r} works."
                )
        try:
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
        except KeyError as missing:
            raise BadInput(f"{missing.args[0]} is missing", where="config.json") from None

    def to_hf(self) -> dict[str, Any]:
        """Return what `transformers.BertConfig` reads; trained without dropout, and says so."""
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
