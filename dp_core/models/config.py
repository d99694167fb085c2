"""Shapes of models, and their conversion from and to Hugging Face's `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, Self

from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput

HEAD_WIDTH = 64  # the width of an attention head, at every published size of BERT and GPT-2
_LARGEST, _DEEPEST = 10_000_000, 1000  # a config.json with larger values is damaged
_MOST_TYPES = 1000
_DISTILBERT_EPSILON = 1e-12  # fixed in DistilBERT's code
_OPTIONAL = (  # fields that a config.json may omit
    *("type_vocab", "layer_norm_epsilon", "initializer_range"),
    *("key_heads", "head_width", "tied"),
)


@dataclass(frozen=True)
class Layout:
    """The `config.json` of an architecture.

    Attributes:
        architecture: name of its class in Hugging Face.
        fields: our fields and Hugging Face's.
        expected: values that a file must have; a missing or null value counts as expected.
        dropouts: names of dropout rates, which are written as 0.
    """

    architecture: str
    fields: Mapping[str, str]
    expected: Mapping[str, Any]
    dropouts: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return our fields of a `config.json`.

        Raises:
            BadInput: a value differs from the expected value, or a field is missing.
        """
        return _fields(config, self.fields, self.expected)

    def written(self, config: LanguageModelConfig) -> dict[str, Any]:
        """Return the `config.json` of a shape."""
        return {
            "architectures": [self.architecture],
            **self.expected,
            **{theirs: getattr(config, ours) for ours, theirs in self.fields.items()},
            "pad_token_id": 0,
            "torch_dtype": "float32",
            **dict.fromkeys(self.dropouts, 0.0),
        }


def _fields(
    config: Mapping[str, Any], fields: Mapping[str, str], expected: Mapping[str, Any]
) -> dict[str, Any]:
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


_USUAL = {  # names that most architectures share
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "initializer_range": "initializer_range",
}
_BERT = Layout(
    "BertForMaskedLM",
    _USUAL | {"type_vocab": "type_vocab_size", "layer_norm_epsilon": "layer_norm_eps"},
    {
        "model_type": "bert",
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
    },
    ("hidden_dropout_prob", "attention_probs_dropout_prob"),
)
_DISTILBERT = Layout(
    "DistilBertForMaskedLM",
    _USUAL
    | {"hidden": "dim", "layers": "n_layers", "heads": "n_heads", "intermediate": "hidden_dim"},
    {"model_type": "distilbert", "activation": "gelu", "tie_word_embeddings": True},
    ("dropout", "attention_dropout", "seq_classif_dropout"),
)
_GPT2 = Layout(
    "GPT2LMHeadModel",
    {
        "vocab_size": "vocab_size",
        "hidden": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "intermediate": "n_inner",
        "max_positions": "n_positions",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
    },
    {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    ("embd_pdrop", "attn_pdrop", "resid_pdrop", "summary_first_dropout"),
)
_LLAMA = Layout(
    "LlamaForCausalLM",
    {
        **_USUAL,
        "key_heads": "num_key_value_heads",
        "head_width": "head_dim",
        "layer_norm_epsilon": "rms_norm_eps",
        "tied": "tie_word_embeddings",
    },
    {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ("attention_dropout",),
)
_FEED_FORWARD = Layout(
    "FeedForwardLM",
    {
        "vocab_size": "vocab_size",
        "hidden": "embedding_size",
        "window": "window_size",
        "units": "layer_sizes",
        "max_positions": "max_position_embeddings",
        "initializer_range": "initializer_range",
    },
    {"model_type": "feed-forward", "hidden_act": "relu"},
)


def _check(
    name: str, value: object, least: float = 1, most: float = _LARGEST, *, whole: bool = True
) -> None:
    """Refuse a value of a config that is no number of the stated range."""
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if type(value) not in kinds or not least <= value <= most:  # type: ignore[operator]
        fix = f"It must be a {'whole ' if whole else ''}number from {least} to {most}."
        raise BadInput(f"{name} is {value!r}", where="model", fix=fix)


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

    LAYOUT: ClassVar[Layout]
    vocab_size: int
    _: KW_ONLY
    max_positions: int = 512
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _check("vocab_size", self.vocab_size)
        _check("max_positions", self.max_positions)
        _check("initializer_range", self.initializer_range, 0, 1, whole=False)

    @property
    def kind(self) -> str:
        """The kind of model, by its name in the settings and in `config.json`."""
        return str(self.to_hf()["model_type"])

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` without dropout."""
        return self.LAYOUT.written(self)


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
        for name in ("hidden", "heads", "intermediate"):
            _check(name, getattr(self, name))
        _check("layers", self.layers, most=_DEEPEST)
        _check("layer_norm_epsilon", self.layer_norm_epsilon, 0, 1, whole=False)
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

    LAYOUT = _BERT
    type_vocab: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("type_vocab", self.type_vocab, 0, _MOST_TYPES)
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
            fields = _DISTILBERT.read(config)
            return cls(**fields, type_vocab=0, layer_norm_epsilon=_DISTILBERT_EPSILON)
        return cls(**_BERT.read(config))

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` for `BertConfig` or `DistilBertConfig`, without dropout."""
        if self.distilled:
            # The field records how the position table was initialised; it is stored as usual.
            return _DISTILBERT.written(self) | {"sinusoidal_pos_embds": False}
        return super().to_hf()


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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read Hugging Face's `config.json`, refusing unsupported decoders.

        Of several end tokens, the first is read.

        Raises:
            BadInput: another architecture or activation; a field is missing or out of range.
        """
        markers = {}
        for name, theirs in (("begin", "bos_token_id"), ("end", "eos_token_id")):
            ids = config.get(theirs)
            first = ids[0] if isinstance(ids, list) and ids else ids
            if isinstance(first, int):
                markers[name] = first
        return cls(**cls._fields_of(config), **markers)

    @classmethod
    def _fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return cls.LAYOUT.read(config)

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` without dropout."""
        return super().to_hf() | {"bos_token_id": self.begin, "eos_token_id": self.end}


@dataclass(frozen=True)
class Gpt2Config(CausalConfig, TransformerConfig):
    """A GPT-2 decoder's shape (Radford et al. 2019)."""

    LAYOUT = _GPT2
    _: KW_ONLY
    max_positions: int = 1024
    layer_norm_epsilon: float = 1e-5

    @classmethod
    def _fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        inner, hidden = config.get("n_inner"), config.get("n_embd")
        if inner is None and isinstance(hidden, int):
            inner = 4 * hidden
        return super()._fields_of({**config, "n_inner": inner})


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
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int  # the context before stretching

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check(name, value, 1e-6, whole=False)
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
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

    LAYOUT = _LLAMA
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
        _check("key_heads", self.key_heads, 0, self.heads)
        _check("head_width", self.head_width, 0)
        object.__setattr__(self, "key_heads", self.key_heads or self.heads)
        object.__setattr__(self, "head_width", self.head_width or self.hidden // self.heads)
        if self.heads % self.key_heads:
            raise BadInput(
                f"{self.heads} heads do not share {self.key_heads} evenly", where="model"
            )
        if self.head_width % 2:
            raise BadInput("heads of an odd width cannot be rotated by pairs", where="model")
        _check("rope_theta", self.rope_theta, 2, 1e12, whole=False)
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
    def _fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Read also the rotary positions, scaled as in Llama 3 or not at all."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise BadInput("rope_parameters is not an object", where="config.json")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "llama3"):
            fix = "Only 'default' and 'llama3' work."
            raise BadInput(f"rope_type is {kind!r}", where="config.json", fix=fix)
        fields = {f.name: f.name for f in dataclass_fields(RopeScaling) if kind == "llama3"}
        scaling = _fields(rope, fields, {"partial_rotary_factor": 1.0})  # rotates whole heads
        return super()._fields_of(config) | {
            "rope_scaling": RopeScaling(**scaling) if scaling else None,
            "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        }

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json` for `transformers.LlamaConfig` of versions 4 and 5."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling:
            rope |= {"rope_type": "llama3", **asdict(self.rope_scaling)}
        return {
            **super().to_hf(),
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            **({"rope_scaling": rope} if self.rope_scaling else {}),  # as version 4 calls it
        }


@dataclass(frozen=True)
class FeedForwardConfig(CausalConfig):
    """The shape of a feed-forward language model (Bengio et al. 2003, Kerrigan et al. 2020).

    Dense layers with ReLU predict a token from the concatenated embeddings of the `window` tokens
    before it. Rows are padded on the left with `begin`. `transformers` has no such model.

    Attributes:
        hidden: size of a token's embedding.
        window: number of earlier tokens that the model sees.
        units: size of each dense layer.
    """

    LAYOUT = _FEED_FORWARD
    hidden: int
    window: int
    units: tuple[int, ...]
    _: KW_ONLY
    initializer_range: float = 0.1  # of the embeddings; dense layers start by their width

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("hidden", self.hidden)
        _check("window", self.window)
        if not isinstance(self.units, tuple) or not 1 <= len(self.units) <= _DEEPEST:
            raise BadInput(
                "units must be sizes of dense layers", where="model", fix="Give one or more."
            )
        for size in self.units:
            _check("units", size)

    @property
    def layers(self) -> int:
        """Number of dense layers before the output."""
        return len(self.units)

    @classmethod
    def _fields_of(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        fields = super()._fields_of(config)
        sizes = fields["units"]
        return fields | {"units": tuple(sizes) if isinstance(sizes, list) else ()}

    def to_hf(self) -> dict[str, Any]:
        """Return a `config.json`."""
        return super().to_hf() | {"layer_sizes": list(self.units)}


def _wide_start(hidden: int) -> float:
    """Return √(0.4 / hidden), the standard deviation of initial weights.

    This is BERT's 0.02 at the width of BERT-large. Narrow models need a larger deviation; otherwise
    they predict only word frequencies for thousands of updates.
    """
    return round(math.sqrt(0.4 / hidden), 3)
