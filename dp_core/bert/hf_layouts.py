"""Where Hugging Face keeps each parameter: of BERT, of DistilBERT, of GPT-2.

The output projection is the word table itself (tied), and so not stored a second time.
"""

from __future__ import annotations

from collections.abc import Iterator

from dp_core.bert.config import BertConfig
from dp_core.bert.gpt2_config import Gpt2Config
from dp_core.bert.parameters import (
    CLASSIFIER,
    MLM_BIAS,
    POOLER,
    POSITION,
    TAGGER,
    TYPE,
    WORD,
    ModelConfig,
)

Pair = tuple[str, str | tuple[str, ...]]  # our name, their name or names


def pairs(config: ModelConfig, heads: frozenset[str]) -> Iterator[Pair]:
    """Yield (our name, their name or names), with those of the heads `mlm`, TAGGER, CLASSIFIER."""
    if isinstance(config, Gpt2Config):
        yield from _gpt2(config)
    elif config.distilled:
        yield from _distilbert(config, heads)
    else:
        yield from _bert(config, heads)


def prefix(config: ModelConfig) -> str:
    """Return what the names of the body begin with; models saved without a head lack it."""
    if isinstance(config, Gpt2Config):
        return "transformer."
    return "distilbert." if config.distilled else "bert."


def _bert(config: BertConfig, heads: frozenset[str]) -> Iterator[Pair]:
    yield WORD, "bert.embeddings.word_embeddings.weight"
    yield POSITION, "bert.embeddings.position_embeddings.weight"
    yield TYPE, "bert.embeddings.token_type_embeddings.weight"
    yield from _norm("embeddings/norm", "bert.embeddings.LayerNorm")
    for i in range(config.layers):
        ours, theirs = f"layer_{i}", f"bert.encoder.layer.{i}"
        parts = [f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")]
        yield from _fused(f"{ours}/qkv", parts)
        yield from _linear(f"{ours}/attention_output", f"{theirs}.attention.output.dense")
        yield from _norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from _linear(f"{ours}/intermediate", f"{theirs}.intermediate.dense")
        yield from _linear(f"{ours}/output", f"{theirs}.output.dense")
        yield from _norm(f"{ours}/output_norm", f"{theirs}.output.LayerNorm")
    if "mlm" in heads:
        yield from _linear("mlm/transform", "cls.predictions.transform.dense")
        yield from _norm("mlm/norm", "cls.predictions.transform.LayerNorm")
        yield MLM_BIAS, "cls.predictions.bias"
    if TAGGER in heads:
        yield from _linear(TAGGER, "classifier")
    if CLASSIFIER in heads:
        yield from _linear(POOLER, "bert.pooler.dense")
        yield from _linear(CLASSIFIER, "classifier")


def _distilbert(config: BertConfig, heads: frozenset[str]) -> Iterator[Pair]:
    yield WORD, "distilbert.embeddings.word_embeddings.weight"
    yield POSITION, "distilbert.embeddings.position_embeddings.weight"
    yield from _norm("embeddings/norm", "distilbert.embeddings.LayerNorm")
    for i in range(config.layers):
        ours, theirs = f"layer_{i}", f"distilbert.transformer.layer.{i}"
        parts = [f"{theirs}.attention.{part}" for part in ("q_lin", "k_lin", "v_lin")]
        yield from _fused(f"{ours}/qkv", parts)
        yield from _linear(f"{ours}/attention_output", f"{theirs}.attention.out_lin")
        yield from _norm(f"{ours}/attention_norm", f"{theirs}.sa_layer_norm")
        yield from _linear(f"{ours}/intermediate", f"{theirs}.ffn.lin1")
        yield from _linear(f"{ours}/output", f"{theirs}.ffn.lin2")
        yield from _norm(f"{ours}/output_norm", f"{theirs}.output_layer_norm")
    if "mlm" in heads:
        yield from _linear("mlm/transform", "vocab_transform")
        yield from _norm("mlm/norm", "vocab_layer_norm")
        yield MLM_BIAS, "vocab_projector.bias"
    if TAGGER in heads:
        yield from _linear(TAGGER, "classifier")
    if CLASSIFIER in heads:
        yield from _linear(POOLER, "pre_classifier")
        yield from _linear(CLASSIFIER, "classifier")


def _gpt2(config: Gpt2Config) -> Iterator[Pair]:
    yield WORD, "transformer.wte.weight"
    yield POSITION, "transformer.wpe.weight"
    for i in range(config.layers):
        ours, theirs = f"layer_{i}", f"transformer.h.{i}"
        yield from _norm(f"{ours}/attention_norm", f"{theirs}.ln_1")
        yield from _linear(f"{ours}/qkv", f"{theirs}.attn.c_attn")
        yield from _linear(f"{ours}/attention_output", f"{theirs}.attn.c_proj")
        yield from _norm(f"{ours}/intermediate_norm", f"{theirs}.ln_2")
        yield from _linear(f"{ours}/intermediate", f"{theirs}.mlp.c_fc")
        yield from _linear(f"{ours}/output", f"{theirs}.mlp.c_proj")
    yield from _norm("final_norm", "transformer.ln_f")


def _linear(ours: str, theirs: str) -> Iterator[Pair]:
    yield f"{ours}/kernel", f"{theirs}.weight"
    yield f"{ours}/bias", f"{theirs}.bias"


def _fused(ours: str, theirs: list[str]) -> Iterator[Pair]:
    yield f"{ours}/kernel", tuple(f"{part}.weight" for part in theirs)
    yield f"{ours}/bias", tuple(f"{part}.bias" for part in theirs)


def _norm(ours: str, theirs: str) -> Iterator[Pair]:
    yield f"{ours}/gain", f"{theirs}.weight"
    yield f"{ours}/bias", f"{theirs}.bias"
