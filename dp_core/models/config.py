"""Shapes of models, which check themselves."""

import math
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput

HEAD_WIDTH = 64  # the width of an attention head, at every published size of BERT and GPT-2
_LARGEST, _DEEPEST = 10_000_000, 1000  # a config.json with larger values is damaged
_DISTILBERT_EPSILON = 1e-12  # fixed in DistilBERT's code
_STRICT = ConfigDict(strict=True, extra="forbid")

Size = Annotated[int, Field(ge=1, le=_LARGEST)]
Depth = Annotated[int, Field(ge=1, le=_DEEPEST)]
TokenId = Annotated[int, Field(ge=0, le=_LARGEST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Base = Annotated[float, Field(ge=2, le=1e12)]
Factor = Annotated[float, Field(ge=1e-6, le=_LARGEST)]


class Checked:
    """A shape that refuses values of the wrong type or out of range."""

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, values: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return check(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            what = f"{name} is {first['input']!r}"
            raise BadInput(what, where="model", fix=f"{first['msg']}.") from None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LanguageModelConfig(Checked):
    """Fields in the shape of every language model.

    Attributes:
        vocab_size: V.
        max_positions: the longest row in tokens.
        initializer_range: standard deviation of initial weights.

    Raises:
        BadInput: a size below 1, or a number out of range.
    """

    KIND: ClassVar[str]
    vocab_size: Size
    max_positions: Size
    initializer_range: Fraction = 0.02

    @property
    def kind(self) -> str:
        """The kind of model, by its name in the settings and in `config.json`."""
        return self.KIND


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TransformerConfig(LanguageModelConfig):
    """Fields in the shape of every Transformer.

    Raises:
        BadInput: a size below 1, or a hidden size that the heads do not divide.
    """

    hidden: Size
    layers: Depth
    heads: Size
    intermediate: Size
    layer_norm_epsilon: Fraction = 1e-12

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class BertConfig(TransformerConfig):
    """A BERT encoder's shape (Devlin et al. 2019).

    Without token types (`type_vocab` 0) it is a DistilBERT's (Sanh et al. 2019), which has half
    the layers.
    """

    KIND = "bert"
    type_vocab: Annotated[int, Field(ge=0, le=1000)] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @property
    def kind(self) -> str:
        """`distilbert` without token types."""
        return "distilbert" if self.distilled else self.KIND

    @classmethod
    def of_size(cls, *, hidden: int, **others: Any) -> Self:
        """Return a config of BERT's proportions with the initial deviation `_wide_start`."""
        return super().of_size(
            hidden=hidden, **({"initializer_range": _wide_start(hidden)} | others)
        )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RobertaConfig(BertConfig):
    """A RoBERTa encoder's shape (Liu et al. 2019, arXiv:1907.11692): a BERT with one token type."""

    KIND = "roberta"
    type_vocab: Annotated[int, Field(ge=1, le=1000)] = 1


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModernBertConfig(TransformerConfig):
    """A ModernBERT encoder's shape (Warner et al. 2024, arXiv:2412.13663).

    Attributes:
        local_attention: twice the largest distance of a token to which a local layer attends.
        global_every: number of layers from one global layer to the next; the first is global.
        global_theta: base of the rotary frequencies of global layers.
        local_theta: base of the rotary frequencies of local layers.
    """

    KIND = "modernbert"
    layer_norm_epsilon: Fraction = 1e-5
    local_attention: Size = 128
    global_every: Size = 3
    global_theta: Base = 160_000.0
    local_theta: Base = 10_000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden // self.heads % 2:
            raise BadInput("heads of an odd width cannot be rotated by pairs", where="model")

    @classmethod
    def of_size(cls, *, hidden: int, **others: Any) -> Self:
        """Return a config with heads of width 64 and an MLP of size 3/2·D."""
        usual = {"intermediate": 3 * hidden // 2, "initializer_range": _wide_start(hidden)}
        return super().of_size(hidden=hidden, **(usual | others))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CausalConfig(LanguageModelConfig):
    """The shape of a causal language model.

    Attributes:
        begin: the token before a text; [CLS] in our vocabularies.
        end: the token after a text; [SEP].
    """

    begin: TokenId = SpecialIds.cls
    end: TokenId = SpecialIds.sep


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Gpt2Config(CausalConfig, TransformerConfig):
    """A GPT-2 decoder's shape (Radford et al. 2019)."""

    KIND = "gpt2"
    intermediate: Size = 0  # 0: 4·hidden
    layer_norm_epsilon: Fraction = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "intermediate", self.intermediate or 4 * self.hidden)


@dataclass(frozen=True, config=_STRICT)
class RopeScaling(Checked):
    """Llama 3's scaling of rotary positions to a longer context (`rope_type` "llama3").

    Grattafiori et al. 2024 (arXiv:2407.21783). Wavelengths above context / low tokens become
    `factor` times as long, wavelengths below context / high are kept, and frequencies in between
    are interpolated linearly in the number of turns within the context.

    Raises:
        BadInput: a value is not a number or out of range.
    """

    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Size  # the context before stretching

    def __post_init__(self) -> None:
        if self.factor < 1 or self.low_freq_factor >= self.high_freq_factor:
            fix = "factor must be at least 1, and low_freq_factor below high_freq_factor."
            raise BadInput("the scaling of rotary positions is invalid", where="model", fix=fix)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
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

    KIND = "llama"
    layer_norm_epsilon: Fraction = 1e-6
    key_heads: Size = 0  # 0: as many as heads
    head_width: Size = 0  # 0: hidden / heads
    rope_theta: Base = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "key_heads", self.key_heads or self.heads)
        object.__setattr__(self, "head_width", self.head_width or self.hidden // self.heads)
        if self.heads % self.key_heads:
            raise BadInput(
                f"{self.heads} heads do not share {self.key_heads} evenly", where="model"
            )
        if self.head_width % 2:
            raise BadInput("heads of an odd width cannot be rotated by pairs", where="model")

    @classmethod
    def of_size(cls, *, hidden: int, **others: Any) -> Self:
        """Return a config with heads of width 64 and an MLP of size 8/3·D, a multiple of 64."""
        usual = {
            "intermediate": 64 * math.ceil(8 * hidden / (3 * 64)),
            "initializer_range": _wide_start(hidden),
        }
        return super().of_size(hidden=hidden, **(usual | others))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class FeedForwardConfig(CausalConfig):
    """The shape of a feed-forward language model (Bengio et al. 2003, Kerrigan et al. 2020).

    Dense layers with ReLU predict a token from the concatenated embeddings of the `window` tokens
    before it. Rows are padded on the left with `begin`. `transformers` has no such model.

    Attributes:
        hidden: size of a token's embedding.
        window: number of earlier tokens that the model sees.
        units: size of each dense layer.
    """

    KIND = "feed-forward"
    hidden: Size
    window: Size
    units: Annotated[tuple[Size, ...], Field(min_length=1, max_length=_DEEPEST)]
    initializer_range: Fraction = 0.1  # of the embeddings; dense layers start by their width

    @property
    def layers(self) -> int:
        """Number of dense layers before the output."""
        return len(self.units)


def _wide_start(hidden: int) -> float:
    """Return √(0.4 / hidden), the standard deviation of initial weights.

    This is BERT's 0.02 at the width of BERT-large. Narrow models need a larger deviation; otherwise
    they predict only word frequencies for thousands of updates.
    """
    return round(math.sqrt(0.4 / hidden), 3)
