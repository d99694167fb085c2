"""The shape of a GPT-2, and its translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dp_core.bert.config import HEAD_WIDTH, check_shape, refuse_other_than
from dp_core.errors import BadInput
from dp_core.vocab.special_ids import SpecialIds


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
