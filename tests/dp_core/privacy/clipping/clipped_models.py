"""Small models with heads, batches of units, and comparison of clipped sums."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from small_models import randomised

from dp_core.config.training import AdapterConfig
from dp_core.models.adapters import prepared
from dp_core.models.bert import class_row_losses, crf_row_losses, mlm_row_losses, tag_row_losses
from dp_core.models.causal import causal_row_losses
from dp_core.models.config import (
    BertConfig,
    FeedForwardConfig,
    Gpt2Config,
    LlamaConfig,
    ModernBertConfig,
    RobertaConfig,
)
from dp_core.models.parameters import AnyModel, ModelConfig, fresh
from dp_core.nn import RowLosses
from dp_core.training.heads import ClassHead, Head, TaggingHead
from dp_core.training.objectives import UnitBatch

UNITS, ROWS, LENGTH, WORDS = 3, 2, 7, 9  # few words, so that they repeat within a unit
SIZES = {
    "vocab_size": WORDS, "hidden": 8, "layers": 1, "heads": 2, "intermediate": 12,
    "max_positions": LENGTH + 1,
}  # fmt: skip
BERT, DISTILBERT = BertConfig(**SIZES), BertConfig(**SIZES, type_vocab=0)
MODERN = ModernBertConfig(**SIZES | {"layers": 2}, global_every=2, local_attention=4)
TAGS, CRF = TaggingHead(tuple("OABC")), TaggingHead(tuple("OABC"), crf=True)
CLASSES = ClassHead(tuple("ABCD"))
WHOLE = AdapterConfig()
LORA = AdapterConfig(trained_parameters="lora", lora_rank=2, lora_alpha=3.0)


class Case(NamedTuple):
    """A model, its head, and its losses with K answers in each row."""

    config: ModelConfig
    losses: RowLosses = mlm_row_losses
    answers: int = 3
    head: Head[Any, Any] | None = None

    @property
    def varies(self) -> bool:
        """Whether rows may have any number of answers."""
        return self.losses is not causal_row_losses and self.answers > 1


def causal(config: ModelConfig) -> Case:
    return Case(config, causal_row_losses, LENGTH - 1)


MODELS = {
    "BERT": Case(BERT),
    "DistilBERT": Case(DISTILBERT),
    "RoBERTa": Case(RobertaConfig(**SIZES)),
    "ModernBERT": Case(MODERN),
    "GPT-2": causal(Gpt2Config(**SIZES)),
    "Llama": causal(LlamaConfig(**SIZES, key_heads=1)),
    "tied Llama": causal(LlamaConfig(**SIZES, tied=True)),
    # The window extends beyond the beginning of the row, and contains a word more than once.
    "feed-forward": causal(
        FeedForwardConfig(
            vocab_size=WORDS, hidden=8, window=5, units=(12, 6), max_positions=LENGTH + 1
        )
    ),
    "BERT tags": Case(BERT, tag_row_losses, 4, TAGS),
    "DistilBERT tags": Case(DISTILBERT, tag_row_losses, 4, TAGS),
    "BERT tags with a CRF": Case(BERT, crf_row_losses, 5, CRF),
    "BERT classes of pairs": Case(BERT, class_row_losses, 1, CLASSES),
    "DistilBERT classes": Case(DISTILBERT, class_row_losses, 1, CLASSES),
    "RoBERTa classes of pairs": Case(RobertaConfig(**SIZES), class_row_losses, 1, CLASSES),
    "ModernBERT classes of pairs": Case(MODERN, class_row_losses, 1, CLASSES),
    "deep BERT": Case(BertConfig(**SIZES | {"layers": 2})),
}


def parts_of(kind: Any) -> AdapterConfig:
    return LORA.model_copy(update={"trained_parameters": kind})


def model_of(name: str, config: AdapterConfig = WHOLE, seed: int = 0) -> AnyModel:
    """Return a model with random offsets, so that no gradient vanishes by symmetry."""
    case = MODELS[name]
    start: Any = fresh(case.config, seed)
    start = case.head.begin(start, seed) if case.head else start
    return randomised(prepared(start, config, seed), seed, 0.2)


def batch_of(
    name: str, seed: int = 0, units: int = UNITS, rows: int = ROWS, answers: int = 0
) -> tuple[tf.Tensor, ...]:
    """Return rows of various lengths with repeated words; some are padding or lack answers."""
    rng, case = np.random.default_rng(seed), MODELS[name]
    answers = answers if answers and case.varies else case.answers
    shape = (units, rows)
    lengths = rng.integers(2, LENGTH + 1, shape)
    real = rng.random(shape) < 0.8
    classes = len(case.head.labels) if case.head else WORDS
    arrays = (
        rng.integers(0, WORDS, (*shape, LENGTH)).astype(np.int32),
        lengths.astype(np.int32),
        rng.integers(0, lengths[:, :, None], (*shape, answers)).astype(np.int32),
        rng.integers(0, classes, (*shape, answers)).astype(np.int32),
        (rng.random((*shape, answers)) < 0.8).astype(np.float32),
        (real / np.maximum(real.sum(1, keepdims=True), 1)).astype(np.float32),
    )
    if case.head is CRF:  # the words of a chain come before its padding
        arrays[4][:] = -np.sort(-arrays[4])
    return tuple(tf.constant(a) for a in arrays)


def losses_of(name: str, *size: int) -> UnitBatch:
    return UnitBatch(MODELS[name].losses, MODELS[name].config, batch_of(name, *size))


def split(model: AnyModel, trained: Collection[str]) -> tuple[dict, dict]:
    """Return the trained and the frozen parameters as variables."""
    variables = {n: tf.Variable(a) for n, a in model.parameters.items()}
    chosen = {n: v for n, v in variables.items() if n in trained}
    return chosen, {n: v for n, v in variables.items() if n not in trained}


def assert_same(fast: Any, slow: Any) -> None:
    np.testing.assert_allclose(fast.losses, slow.losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(fast.norms, slow.norms, rtol=2e-4, atol=1e-6)
    assert fast.sums.keys() == slow.sums.keys()
    for name, expected in slow.sums.items():
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(
            fast.sums[name], expected, atol=3e-4 * scale + 1e-9, err_msg=name
        )
