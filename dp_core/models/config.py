"""Shapes of models, and their conversion from and to Hugging Face's `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput

HEAD_WIDTH = 64  # the width of an attention head, at every published size of BERT and GPT-2
_LARGEST, _DEEPEST = 10_000_000, 1000  # a config.json with larger values is damaged
_MOST_TYPES = 1000
_DISTILBERT_EPSILON = 1e-12  # fixed in DistilBERT's code

# For each architecture: our fields and Hugging Face's, and values that a config.json may omit.
_OPTIONAL = (
    *("type_vocab", "layer_norm_epsilon", "initializer_range"),
    *("key_heads", "head_width", "tied"),
)
_BERT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab": "type_vocab_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "initializer_range": "initializer_range",
}
_BERT = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "tie_word_embeddings": True,
}
# `sinusoidal_pos_embds` records how the position table was initialised; it is stored as usual.
_DISTILBERT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "intermediate": "hidden_dim",
    "max_positions": "max_position_embeddings",
    "initializer_range": "initializer_range",
}
_DISTILBERT = {"model_type": "distilbert", "activation": "gelu", "tie_word_embeddings": True}
_GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "intermediate": "n_inner",
    "max_positions": "n_positions",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "initializer_range": "initializer_range",
}
_LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "initializer_range": "initializer_range",
    "tied": "tie_word_embeddings",
}
_ROPE_FIELDS = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "context": "original_max_position_embeddings",
}
_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_FEED_FORWARD_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden": "embedding_size",
    "window": "window_size",
    "units": "layer_sizes",
    "max_positions": "max_position_embeddings",
    "initializer_range": "initializer_range",
}
_FEED_FORWARD = {"model_type": "feed-forward", "hidden_act": "relu"}
_GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class LanguageModelConfig:
    """Fields in the shape of every language model.

    Attributes:
        vocab_size: V.
        max_positions: the longest row in tokens.
        initializer_range: standard deviation of initial weights.

    Raises:
        BadInput: a size below 1, or a number out of range.
    """

    vocab_size: int
    _: KW_ONLY
    max_positions: int = 512
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        self._check_sizes("vocab_size", "max_positions")
        self._check_shares("initializer_range")

    def _check_sizes(self, *names: str) -> None:
        for name in names:
            _check_size(name, getattr(self, name))

    def _check_shares(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                fix = "It must be a number from 0 to 1."
                raise BadInput(f"{name} is {value!r}", where="model", fix=fix)


def _check_size(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= _LARGEST:
        fix = f"It must be a whole number from 1 to {_LARGEST}."
        raise BadInput(f"{name} is {value!r}", where="model", fix=fix)


@dataclass(frozen=True)
class TransformerConfig(LanguageModelConfig):
    """Fields in the shape of every Transformer.

    Raises:
        BadInput: a size below 1, or a hidden size that the heads do not divide.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    _: KW_ONLY
    layer_norm_epsilon: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes("hidden", "layers", "heads", "intermediate")
        self._check_shares("layer_norm_epsilon")
        if self.layers > _DEEPEST:
            fix = f"At most {_DEEPEST} are supported."
            raise BadInput(f"{self.layers} layers", where="model", fix=fix)
        if self.hidden % self.heads:
            raise BadInput(
                f"hidden size {self.hidden} is not a multiple of {self.heads} heads", where="model"
            )

    @classmethod
    def of_size(cls, *, hidden: int, **others: Any) -> Self:
        """Return a config with heads of width 64 and an intermediate layer of size 4·D.

        Args:
            hidden: D.
            others: vocab_size, layers, and fields that differ from the usual proportions.
        """
        usual = {"heads": max(1, hidden // HEAD_WIDTH), "intermediate": 4 * hidden}
        return cls(hidden=hidden, **(usual | {"max_positions": 512} | others))


@dataclass(frozen=True)
class BertConfig(TransformerConfig):
    """A BERT encoder's shape (Devlin et al. 2019).

    Without token types (`type_vocab` 0) it is a DistilBERT's (Sanh et al. 2019), which has half
    the layers.
    """

    type_vocab: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.type_vocab) is not int or not 0 <= self.type_vocab <= _MOST_TYPES:
            raise BadInput(f"type_vocab is {self.type_vocab!r}", where="model")
        if self.distilled and self.layer_norm_epsilon != _DISTILBERT_EPSILON:
            raise BadInput(
                f"layer_norm_epsilon is {self.layer_norm_epsilon}",
                where="model",
                fix=f"A DistilBERT's is fixed to {_DISTILBERT_EPSILON}.",
            )

    @property
    def distilled(self) -> bool:
        """Whether this is a DistilBERT."""
        return self.type_vocab == 0

    @classmethod
    def of_size(cls, *, hidden: int, **others: Any) -> Self:
        """Return a config of BERT's proportions with the initial deviation `_wide_start`."""
        return super().of_size(
            hidden=hidden, **({"initializer_range": _wide_start(hidden)} | others)
        )

    def with_vocabulary(self, size: int) -> BertConfig:
        """Return the same shape over another vocabulary."""
        return replace(self, vocab_size=size)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> BertConfig:
        """Read Hugging Face's `config.json`, refusing unsupported encoders.

        Raises:
            BadInput: another architecture, activation or position embedding.
        """
        if config.get("model_type") == "distilbert":
            fields = _fields(config, _DISTILBERT_FIELDS, _DISTILBERT)
            return cls(**fields, type_vocab=0, layer_norm_epsilon=_DISTILBERT_EPSILON)
        return cls(**_fields(config, _BERT_FIELDS, _BERT))

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` for `BertConfig` or `DistilBertConfig`, without dropout."""
        if self.distilled:
            return {
                "architectures": ["DistilBertForMaskedLM"],
                **_DISTILBERT,
                **_hf_fields(self, _DISTILBERT_FIELDS),
                **_without_dropout("dropout", "attention_dropout", "seq_classif_dropout"),
                "sinusoidal_pos_embds": False,
            }
        return {
            "architectures": ["BertForMaskedLM"],
            **_BERT,
            **_hf_fields(self, _BERT_FIELDS),
            **_without_dropout("hidden_dropout_prob", "attention_probs_dropout_prob"),
        }


@dataclass(frozen=True)
class CausalConfig(LanguageModelConfig):
    """The shape of a causal language model.

    Attributes:
        begin: the token before a text; [CLS] in our vocabularies.
        end: the token after a text; [SEP].
    """

    _: KW_ONLY
    begin: int = SpecialIds.cls
    end: int = SpecialIds.sep

    def with_vocabulary(self, size: int) -> Self:
        """Return the same shape over another vocabulary."""
        return replace(self, vocab_size=size, begin=SpecialIds.cls, end=SpecialIds.sep)

    @property
    def _hf_markers(self) -> dict[str, int]:
        return {"bos_token_id": self.begin, "eos_token_id": self.end}


def _markers(config: Mapping[str, Any]) -> dict[str, int]:
    """Return `begin` and `end` of a config.json; the first of several end tokens."""
    named = {"begin": config.get("bos_token_id"), "end": config.get("eos_token_id")}
    first = {name: ids[0] if isinstance(ids, list) and ids else ids for name, ids in named.items()}
    return {name: marker for name, marker in first.items() if isinstance(marker, int)}


@dataclass(frozen=True)
class Gpt2Config(CausalConfig, TransformerConfig):
    """A GPT-2 decoder's shape (Radford et al. 2019)."""

    _: KW_ONLY
    max_positions: int = 1024
    layer_norm_epsilon: float = 1e-5

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gpt2Config:
        """Read Hugging Face's `config.json`, refusing unsupported decoders.

        Raises:
            BadInput: another architecture, activation, or scaling of attention.
        """
        inner, hidden = config.get("n_inner"), config.get("n_embd")
        if inner is None and isinstance(hidden, int):
            inner = 4 * hidden
        about = {**config, "n_inner": inner}
        return cls(**_fields(about, _GPT2_FIELDS, _GPT2), **_markers(config))

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` for `transformers.GPT2Config`, without dropout."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            **_GPT2,
            **_hf_fields(self, _GPT2_FIELDS),
            **_without_dropout("embd_pdrop", "attn_pdrop", "resid_pdrop", "summary_first_dropout"),
            **self._hf_markers,
        }


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary positions to a longer context (`rope_type` "llama3").

    Grattafiori et al. 2024 (arXiv:2407.21783). Wavelengths above context / low tokens become
    `factor` times as long, wavelengths below context / high are kept, and frequencies in between
    are interpolated linearly in the number of turns within the context.

    Raises:
        BadInput: a value is not a number or out of range.
    """

    factor: float
    low: float
    high: float
    context: int  # positions before stretching

    def __post_init__(self) -> None:
        for name, theirs in _ROPE_FIELDS.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= _LARGEST:
                raise BadInput(f"{theirs} is {value!r}", where="model")
        if self.factor < 1 or self.low >= self.high:
            fix = "factor must be at least 1, and low_freq_factor below high_freq_factor."
            raise BadInput("the scaling of rotary positions is invalid", where="model", fix=fix)


@dataclass(frozen=True)
class LlamaConfig(CausalConfig, TransformerConfig):
    """A Llama-style decoder's shape (Touvron et al. 2023, arXiv:2302.13971 and 2307.09288).

    Attributes:
        key_heads: heads of keys and values, each of which serves `heads / key_heads` queries
            (grouped-query attention, Ainslie et al. 2023).
        head_width: width of a query, key or value.
        rope_theta: base of the rotary frequencies (Su et al. 2021, arXiv:2104.09864).
        rope_scaling: scaling of rotary positions to a longer context, or None.
        tied: whether the word table is also the output projection.
    """

    _: KW_ONLY
    max_positions: int = 2048
    layer_norm_epsilon: float = 1e-6
    key_heads: int = 0  # 0: as many as heads
    head_width: int = 0  # 0: hidden / heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, usual, most in (
            ("key_heads", self.heads, self.heads),
            ("head_width", self.hidden // self.heads, _LARGEST),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise BadInput(f"{name} is {value!r}", where="model")
            object.__setattr__(self, name, value or usual)
        if self.heads % self.key_heads:
            raise BadInput(
                f"{self.heads} heads do not share {self.key_heads} evenly", where="model"
            )
        if self.head_width % 2:
            raise BadInput("heads of an odd width cannot be rotated by pairs", where="model")
        theta = self.rope_theta
        if type(theta) not in (int, float) or not 1 < theta <= 1e12:
            raise BadInput(f"rope_theta is {theta!r}", where="model")
        if type(self.tied) is not bool:
            raise BadInput(f"tie_word_embeddings is {self.tied!r}", where="model")

    @classmethod
    def of_size(cls, *, hidden: int, **others: Any) -> Self:
        """Return a config with heads of width 64 and an MLP of size 8/3·D, a multiple of 64."""
        usual = {
            "intermediate": 64 * math.ceil(8 * hidden / (3 * 64)),
            "initializer_range": _wide_start(hidden),
        }
        return super().of_size(hidden=hidden, **(usual | others))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read Hugging Face's `config.json`, refusing unsupported decoders.

        Raises:
            BadInput: another architecture or activation, biases, or another scaling of rotary
                positions than Llama 3's.
        """
        values = _fields(config, _LLAMA_FIELDS, _LLAMA) | _markers(config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise BadInput("rope_parameters is not an object", where="config.json")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            fix = "Only 'default' and 'llama3' work."
            raise BadInput(f"rope_type is {kind!r}", where="config.json", fix=fix)
        fields = _ROPE_FIELDS if kind == "llama3" else {}
        scaling = _fields(rope, fields, {"partial_rotary_factor": 1.0})  # rotates whole heads
        values["rope_scaling"] = RopeScaling(**scaling) if scaling else None
        values["rope_theta"] = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` for `transformers.LlamaConfig` of versions 4 and 5."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling:
            scaling = {
                their: getattr(self.rope_scaling, our) for our, their in _ROPE_FIELDS.items()
            }
            rope |= {"rope_type": "llama3", **scaling}
        return {
            "architectures": ["LlamaForCausalLM"],
            **_LLAMA,
            **_hf_fields(self, _LLAMA_FIELDS),
            **_without_dropout("attention_dropout"),
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            **({"rope_scaling": rope} if self.rope_scaling else {}),  # as version 4 calls it
            **self._hf_markers,
        }


@dataclass(frozen=True)
class FeedForwardConfig(CausalConfig):
    """The shape of a feed-forward language model (Bengio et al. 2003, Kerrigan et al. 2020).

    Dense layers with ReLU predict a token from the concatenated embeddings of the `window` tokens
    before it. Rows are padded on the left with `begin`.

    Attributes:
        hidden: size of a token's embedding.
        window: number of earlier tokens that the model sees.
        units: size of each dense layer.
    """

    hidden: int
    window: int
    units: tuple[int, ...]
    _: KW_ONLY
    initializer_range: float = 0.1  # of the embeddings; dense layers start by their width

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes("hidden", "window")
        if not isinstance(self.units, tuple) or not 1 <= len(self.units) <= _DEEPEST:
            raise BadInput(
                "units must be sizes of dense layers", where="model", fix="Give one or more."
            )
        for size in self.units:
            _check_size("units", size)

    @property
    def layers(self) -> int:
        """Number of dense layers before the output."""
        return len(self.units)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> FeedForwardConfig:
        """Read a `config.json` that `to_hf` wrote.

        Raises:
            BadInput: a field is missing or not a size.
        """
        fields = _fields(config, _FEED_FORWARD_FIELDS, _FEED_FORWARD) | _markers(config)
        sizes = fields["units"]
        return cls(**fields | {"units": tuple(sizes) if isinstance(sizes, list) else ()})

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json`; `transformers` has no such model."""
        return {
            "architectures": ["FeedForwardLM"],
            **_FEED_FORWARD,
            **_hf_fields(self, _FEED_FORWARD_FIELDS),
            "layer_sizes": list(self.units),
            **self._hf_markers,
        }


def _wide_start(hidden: int) -> float:
    """Return √(0.4 / hidden), the standard deviation of initial weights.

    This is BERT's 0.02 at the width of BERT-large. Narrow models need a larger deviation; otherwise
    they predict only word frequencies for thousands of updates.
    """
    return round(math.sqrt(0.4 / hidden), 3)


def _fields(
    config: Mapping[str, Any], fields: Mapping[str, str], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """Return our fields of a `config.json`. A missing or null value equals the expected value.

    Raises:
        BadInput: a value differs from the expected value, or a field is missing.
    """
    config = {key: value for key, value in config.items() if value is not None}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise BadInput(
                f"{key} is {config[key]!r}", where="config.json", fix=f"Only {value!r} works."
            )
    for ours, theirs in fields.items():
        if theirs not in config and ours not in _OPTIONAL:
            raise BadInput(f"{theirs} is missing", where="config.json")
    return {ours: config[theirs] for ours, theirs in fields.items() if theirs in config}


def _hf_fields(config: LanguageModelConfig, fields: Mapping[str, str]) -> dict[str, Any]:
    values = {theirs: getattr(config, ours) for ours, theirs in fields.items()}
    return {**values, "pad_token_id": 0, "torch_dtype": "float32"}


def _without_dropout(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)
