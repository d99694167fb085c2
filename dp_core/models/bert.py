"""Encoders: BERT's post-norm blocks over three embeddings, and ModernBERT's pre-norm blocks.

Shapes: M rows, S tokens, hidden size D, H heads of width W = D / H. Rows are independent: no
statistic is computed over M, so that the gradient of a row is well defined (docs/privacy.md,
independence of rows). Devlin et al. 2019 (arXiv:1810.04805); DistilBERT: Sanh et al. 2019
(arXiv:1910.01108); RoBERTa: Liu et al. 2019 (arXiv:1907.11692); ModernBERT: Warner et al. 2024
(arXiv:2412.13663).
"""

from typing import Any

import tensorflow as tf

from dp_core.models.config import BertConfig, ModernBertConfig
from dp_core.models.parameters import (
    CLASSIFIER,
    MLM_BIAS,
    POOLER,
    POSITION,
    PREDICTION,
    TAGGER,
    TRANSITIONS,
    TYPE,
    WORD,
    EncoderConfig,
)
from dp_core.nn import (
    FAR_BELOW,
    Layers,
    Tensor,
    chain_losses,
    frequencies_of,
    gelu,
    rotary_waves,
    row_losses,
    shape_of,
)


def encode(
    layers: Layers,
    config: EncoderConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """Return the last hidden states.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32 token ids.
        lengths: (M,) int32; later tokens are padding and receive no attention.
        positions: (M, K) int32, whose states are returned; all if None. For other positions
            the last block computes only keys and values.
        types: (M, S) int32 token types; zeros if None. A DistilBERT has none.

    Returns:
        (M, S, D) float32, or (M, K, D).
    """
    m, s = shape_of(ids)
    padding = FAR_BELOW * (1.0 - tf.sequence_mask(lengths, s, tf.float32))  # (M, S)
    bias = padding[:, None, None, :]  # (M, 1, 1, S)
    if types is None:
        types = tf.zeros_like(ids)
    bert = isinstance(config, BertConfig)
    kind = TYPE if isinstance(config, BertConfig) and not config.distilled else None
    x = layers.embed(ids, types, WORD, POSITION if bert else None, kind)
    x = tf.reshape(x, (m * s, config.hidden))  # (M·S, D): every layer from here on is by token
    x = layers.dropout(layers.layer_norm("embeddings/norm", x, config.layer_norm_epsilon))
    for i in range(config.layers):
        wanted = positions if i == config.layers - 1 else None
        if isinstance(config, ModernBertConfig):
            x = _modern_block(layers, config, i, x, bias, (m, s), wanted)
        else:
            x = _block(layers, config, f"layer_{i}", x, bias, (m, s), wanted)
    if not bert:
        x = layers.layer_norm("final_norm", x, config.layer_norm_epsilon)
        x = _transformed(layers, config, PREDICTION, x)
    return tf.reshape(x, (m, s if positions is None else shape_of(positions)[1], config.hidden))


def _block(
    layers: Layers,
    config: BertConfig,
    name: str,
    x: Tensor,
    bias: Tensor,
    shape: tuple[Any, Any],
    positions: Tensor | None,
) -> Tensor:
    attended = layers.dropout(layers.attention(name, x, bias, shape, config.heads, positions))
    x = _at(positions, x, shape) + attended
    x = layers.layer_norm(f"{name}/attention_norm", x, config.layer_norm_epsilon)
    inner = gelu(layers.linear(f"{name}/intermediate", x))  # (N, F)
    outer = layers.dropout(layers.linear(f"{name}/output", inner))  # (N, D)
    return layers.layer_norm(f"{name}/output_norm", x + outer, config.layer_norm_epsilon)


def _modern_block(
    layers: Layers,
    config: ModernBertConfig,
    number: int,
    x: Tensor,
    bias: Tensor,
    shape: tuple[Any, Any],
    positions: Tensor | None,
) -> Tensor:
    """Attend to all tokens, or in a local layer to near ones, by rotary positions; then GeGLU."""
    name, epsilon, base = f"layer_{number}", config.layer_norm_epsilon, config.global_theta
    if number % config.global_every:
        base, places = config.local_theta, tf.range(shape[1])
        far = tf.abs(places[:, None] - places) > config.local_attention // 2  # (S, S)
        far = far[None] if positions is None else tf.gather(far, positions)  # (M, queries, S)
        bias += FAR_BELOW * tf.cast(far, tf.float32)[:, None]  # (M, 1, queries, S)
    waves = rotary_waves(frequencies_of(base, config.hidden // config.heads), shape[1])
    normed = layers.layer_norm(f"{name}/attention_norm", x, epsilon) if number else x
    attended = layers.attention(name, normed, bias, shape, config.heads, positions, waves)
    x = _at(positions, x, shape) + layers.dropout(attended)
    normed = layers.layer_norm(f"{name}/intermediate_norm", x, epsilon)
    inner, gates = tf.split(layers.linear(f"{name}/intermediate", normed), 2, axis=1)  # (N, F)
    return x + layers.dropout(layers.linear(f"{name}/output", gelu(inner) * gates))


def _at(positions: Tensor | None, x: Tensor, shape: tuple[Any, Any]) -> Tensor:
    """Return the states at the positions: (M·S, D) -> (M·K, D), or all of them."""
    if positions is None:
        return x
    x = tf.gather(tf.reshape(x, (*shape, x.shape[1])), positions, batch_dims=1)  # (M, K, D)
    return tf.reshape(x, (shape[0] * shape_of(positions)[1], x.shape[2]))


def _transformed(layers: Layers, config: EncoderConfig, name: str, x: Tensor) -> Tensor:
    """Return the states that precede the projection to tokens: (N, D) -> (N, D)."""
    x = gelu(layers.linear(f"{name}/transform", x))
    return layers.layer_norm(f"{name}/norm", x, config.layer_norm_epsilon)


def mlm_logits(
    layers: Layers, config: EncoderConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return logits over the vocabulary at the given positions.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32.
        lengths: (M,) int32.
        positions: (M, K) int32, places in the row; K is static.

    Returns:
        (M·K, V) float32.
    """
    m, k = shape_of(positions)
    hidden = encode(layers, config, ids, lengths, positions=positions)  # (M, K, D)
    x = tf.reshape(hidden, (m * k, config.hidden))
    if isinstance(config, BertConfig):
        x = _transformed(layers, config, "mlm", x)
    return layers.tied_projection(x, WORD, MLM_BIAS)


def tag_logits(
    layers: Layers,
    config: EncoderConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the logits of the token classifier: (M·K, tags), or (M·S, tags) without positions.

    The arguments are as in `mlm_logits`.
    """
    hidden = encode(layers, config, ids, lengths, positions=positions)
    return layers.linear(TAGGER, layers.dropout(tf.reshape(hidden, (-1, config.hidden))))


def class_logits(
    layers: Layers, config: EncoderConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return the logits of the row classifier, computed from the state of [CLS].

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32, [CLS] text [SEP], or [CLS] text [SEP] text [SEP].
        lengths: (M,) int32.
        positions: (M, 1) int32, where the second text begins; 0 without one. Only a
            BERT has a second token type; the others separate the texts by [SEP] only.

    Returns:
        (M, classes) float32.
    """
    m, s = shape_of(ids)
    behind = tf.range(s)[None, :] >= positions  # (M, S)
    types = tf.cast(tf.logical_and(behind, positions > 0), tf.int32)
    if isinstance(config, BertConfig) and config.type_vocab == 1:
        types = tf.zeros_like(types)
    first = encode(layers, config, ids, lengths, positions=tf.zeros((m, 1), tf.int32), types=types)
    x = tf.reshape(first, (m, config.hidden))
    if isinstance(config, BertConfig):
        activation = tf.nn.relu if config.distilled else tf.tanh
        x = activation(layers.linear(POOLER, x))
    return layers.linear(CLASSIFIER, layers.dropout(x))


mlm_row_losses = row_losses(mlm_logits)  # labels: the original tokens of masked positions
tag_row_losses = row_losses(tag_logits)  # labels: a tag at the first token of each word
class_row_losses = row_losses(class_logits)  # labels: a class; K is 1


def crf_row_losses(layers: Layers, config: EncoderConfig, *row: Tensor) -> Tensor:
    """Return the negative log-likelihood of each row's tags under a CRF, per word: (M,).

    The arguments are as in `tag_row_losses`; positions of words come before padding.
    """
    *inputs, labels, weights = row
    m, k = shape_of(labels)
    logits = tag_logits(layers, config, *inputs)  # (M·K, L)
    emissions = tf.reshape(logits, (m, k, logits.shape[1]))
    losses = chain_losses(emissions, layers.for_each_row(TRANSITIONS, m), labels, weights)
    return losses / tf.maximum(tf.reduce_sum(weights, axis=1), 1.0)
