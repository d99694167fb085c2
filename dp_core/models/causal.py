"""Causal language models of either architecture: the next token's logits, and a row's loss."""

from __future__ import annotations

from dp_core.models.config import CausalConfig, LlamaConfig
from dp_core.models.gpt2 import gpt2_logits
from dp_core.models.llama import llama_logits
from dp_core.nn.layers import Layers, Tensor, row_means


def causal_logits(
    layers: Layers, config: CausalConfig, ids: Tensor, asked: Tensor | None = None
) -> Tensor:
    """Return at each position the logits of the token after it, by the config's architecture.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32 token ids, padded at the end.
        asked: (M, K) int32 positions whose logits are wanted, K static; all if None.

    Returns:
        (M·S, V) float32, or (M·K, V).
    """
    if isinstance(config, LlamaConfig):
        return llama_logits(layers, config, ids, asked)
    return gpt2_logits(layers, config, ids, asked)


def causal_row_losses(
    layers: Layers,
    config: CausalConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return each row's loss, as `dp_core.models.bert` has them: answers are the next tokens.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32.
        lengths: (M,) unused: padding at the end is seen by nobody, and weighs 0.
        positions: (M, S − 1) unused: every position but the last is asked for the next token.
        labels: (M, S − 1) int32, the token after each position but the last.
        weights: (M, S − 1) float32.
    """
    # Nobody asks what follows the last position.
    logits = causal_logits(layers, config, ids[:, :-1])
    return row_means(logits, labels, weights)
