"""Layers that read their parameters by name, losses of rows, and conditional random fields.

Models write the forward pass once against `Layers`. `dp_core.privacy.clipping` has a subclass
that also records the inputs and outputs of each layer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.errors import BadInput

Tensor = Any  # tf.Tensor: TensorFlow ships no types
Backward = Callable[[Tensor], Tensor]

_SQRT_HALF = math.sqrt(0.5)
_DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)
_SLOPE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715  # of GPT-2's approximation


def _gelu(x: Tensor) -> tuple[Tensor, Backward]:
    below = 0.5 * tf.math.erf(x * _SQRT_HALF) + 0.5  # Φ(x)

    def backward(g: Tensor) -> Tensor:
        return g * (below + x * (_DENSITY_AT_0 * tf.exp(-0.5 * tf.square(x))))

    return x * below, backward


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[..., Any]]:
    highest = tf.reduce_max(logits, axis=1, keepdims=True)  # (N, 1)
    powers = tf.exp(logits - highest)  # (N, V)
    total = tf.reduce_sum(powers, axis=1)  # (N,)
    at_label = tf.gather(logits, labels, batch_dims=1)  # (N,)

    def backward(g: Tensor) -> tuple[Tensor, None]:
        rows = tf.range(tf.shape(labels)[0])
        positions = tf.stack([rows, labels], axis=1)  # (N, 2)
        spread = powers * (g / total)[:, None]
        return tf.tensor_scatter_nd_sub(spread, positions, g), None

    return tf.math.log(total) + highest[:, 0] - at_label, backward


def _gelu_new(x: Tensor) -> tuple[Tensor, Backward]:
    squared = tf.square(x)
    bent = tf.tanh(_SLOPE * x * (1.0 + _CUBIC * squared))

    def backward(g: Tensor) -> Tensor:
        steepness = _SLOPE * (1.0 + 3.0 * _CUBIC * squared)
        return g * 0.5 * (1.0 + bent + x * (1.0 - tf.square(bent)) * steepness)

    return 0.5 * x * (1.0 + bent), backward


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x), exactly (Hendrycks and Gimpel 2016), as Hugging Face's `gelu` computes it."""
    return tf.custom_gradient(_gelu)(x)


def gelu_new(x: Tensor) -> Tensor:
    """x·Φ(x) approximately, by tanh, as GPT-2 and Hugging Face's `gelu_new` compute it."""
    return tf.custom_gradient(_gelu_new)(x)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax at the label, in nats: (N, V), (N,) -> (N,)."""
    return tf.custom_gradient(_cross_entropy)(logits, labels)


# (layers, config, ids, lengths, positions) -> (M·K, V), the logits at the positions
LogitsOf = Callable[..., Tensor]
# (layers, config, ids, lengths, positions, labels, weights) -> (M,)
RowLosses = Callable[..., Tensor]


def row_losses(logits_of: LogitsOf) -> RowLosses:
    """Return a function that computes each row's mean cross-entropy over its predictions: (M,).

    A row is ids (S,), its length, K positions with their labels, all int32, and K weights, float32,
    1 for a prediction and 0 for padding. Its loss is in nats, and 0 without predictions. No divisor
    depends on other rows of the batch.
    """

    def losses(layers: Layers, config: Any, *row: Tensor) -> Tensor:
        *inputs, labels, weights = row
        m, k = shape_of(labels)
        logits = logits_of(layers, config, *inputs)  # (M·K, V)
        each = cross_entropy(logits, tf.reshape(labels, (m * k,)))
        counts = tf.maximum(tf.reduce_sum(weights, axis=1), 1.0)  # (M,)
        return tf.reduce_sum(tf.reshape(each, (m, k)) * weights, axis=1) / counts

    return losses


def standardise(x: Tensor, epsilon: float) -> Tensor:
    """(N, D) -> (N, D) with mean 0 and variance 1 along the last axis."""

    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        scale = tf.math.rsqrt(variance + epsilon)
        y = centred * scale

        def backward(g: Tensor) -> Tensor:
            along = tf.reduce_mean(g * y, axis=-1, keepdims=True)
            return scale * (g - tf.reduce_mean(g, axis=-1, keepdims=True) - y * along)

        return y, backward

    return tf.custom_gradient(forward)(x)


def scale_to_unit_power(x: Tensor, epsilon: float) -> Tensor:
    """(N, D) -> (N, D) with mean square 1 along the last axis (Zhang and Sennrich 2019)."""

    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(x), axis=-1, keepdims=True) + epsilon)
        y = x * scale

        def backward(g: Tensor) -> Tensor:
            return scale * (g - y * tf.reduce_mean(g * y, axis=-1, keepdims=True))

        return y, backward

    return tf.custom_gradient(forward)(x)


Waves = tuple[Tensor, Tensor]  # cosines and sines of position times frequency: (S, W) each


def rotary_waves(frequencies: NDArray[np.float64], tokens: Any) -> Waves:
    """Return the waves of S positions from the frequency of each pair: (W/2,) -> (S, W) each."""
    angles = tf.cast(tf.range(tokens), tf.float32)[:, None] * tf.constant(frequencies, tf.float32)
    angles = tf.concat([angles, angles], axis=1)  # (S, W)
    return tf.cos(angles), tf.sin(angles)


def frequencies_of(base: float, width: int) -> NDArray[np.float64]:
    """Return the rotary frequency base^(−2i/W) of each pair (Su et al. 2021, arXiv:2104.09864)."""
    return np.asarray(base ** -(np.arange(0, width, 2) / width))  # (W/2,)


def rotated(x: Tensor, waves: Waves) -> Tensor:
    """Rotate each pair of values by the angle of its position: (M, heads, S, W) -> the same.

    Value i is paired with value i + W/2, as in Hugging Face's checkpoints, and not with its
    neighbour as in the paper.
    """
    first, second = tf.split(x, 2, axis=3)
    cosines, sines = waves
    return x * cosines + tf.concat([-second, first], axis=3) * sines


_TYPES = {"float32": tf.float32, "bfloat16": tf.bfloat16}
Variables = Mapping[str, Any]  # name -> tf.Variable or tf.Tensor
FAR_BELOW = -1e9  # added to excluded scores, whose softmax weight is then exactly 0
LORA_A, LORA_B = "lora_a", "lora_b"  # leaves next to a module's kernel
LORA_SCALE = "lora/scale"  # alpha / rank: a constant of the model, never trained


class Layers:
    """Ordinary layers over named parameters. N is any leading shape.

    Args:
        parameters: float32 variables or tensors, by name.
        precision: the format of the factors of products, `float32` or `bfloat16`. All else is
            float32: weights, sums over a vector (LayerNorm, softmax, losses), gradients, norms and
            noise (Micikevicius et al. 2018, arXiv:1710.03740; Kalamkar et al. 2019,
            arXiv:1905.12322).

    Raises:
        BadInput: unknown precision.
    """

    def __init__(self, parameters: Variables, precision: str = "float32") -> None:
        self._parameters = parameters
        if precision not in _TYPES:
            what = f"{precision!r} is not a precision"
            raise BadInput(what, where="precision", fix=f"Use {' or '.join(_TYPES)}.")
        self._type = _TYPES[precision]
        self._dropout_rate, self._dropout_keys, self._dropouts = 0.0, None, 0

    def drop(self, rate: float, keys: Tensor) -> None:
        """Switch dropout on; evaluation leaves it off.

        Args:
            rate: probability with which each activation becomes 0.
            keys: (M,) uint32, one for each row and update.
        """
        self._dropout_rate, self._dropout_keys = rate, keys

    def dropout(self, x: Tensor) -> Tensor:
        """Dropout (Srivastava et al. 2014): set activations to 0, and scale the others up.

        The mask of a row is a hash of its key, the number of the dropout in the model, and the
        place in the row, so it does not depend on the other rows of the batch (docs/privacy.md,
        independence of rows), and a row has the same mask in every layout.

        Args:
            x: the activations of M rows, row by row: (M·S, D), or (M, ...).
        """
        if not self._dropout_rate:
            return x
        self._dropouts += 1
        rows = _scrambled(self._dropout_keys ^ _scrambled(tf.constant(self._dropouts, tf.uint32)))
        places = tf.cast(tf.range(tf.size(x) // tf.size(rows)), tf.uint32) * _GAMMA
        bits = _scrambled(rows[:, None] + places[None, :])  # (M, activations of a row)
        kept = bits >= tf.constant(math.floor(self._dropout_rate * 2**32), tf.uint32)
        return x * tf.reshape(tf.cast(kept, tf.float32) / (1.0 - self._dropout_rate), tf.shape(x))

    def linear(self, name: str, x: Tensor) -> Tensor:
        """(N, in) -> (N, out) by kernel, and by the bias and adapter that the model has.

        The adapter is a LoRA's (Hu et al. 2021, arXiv:2106.09685): y += (alpha / rank)·(x·A)·B. A
        kernel of p blocks, such as a query-key-value kernel with three, has p adapters next to each
        other: A is (in, p·rank), B is (rank, p·out), and block j of the output sees only block j of
        x·A.

        Args:
            name: name of the module.
            x: (N, in).
        """
        y = self.dense(name, x)
        if f"{name}/{LORA_A}" not in self._parameters:
            return y
        h = self.narrow(f"{name}/{LORA_A}", x) * self._parameters[LORA_SCALE]
        return y + self.widen(f"{name}/{LORA_B}", h)

    def dense(self, name: str, x: Tensor) -> Tensor:
        """(N, in) -> (N, out) by kernel, and by the bias that the model has, without adapter."""
        return self._shifted(name, self.product(x, self._parameters[f"{name}/kernel"]))

    def _shifted(self, name: str, y: Tensor) -> Tensor:
        bias = self._parameters.get(f"{name}/bias")
        return y if bias is None else y + bias

    def narrow(self, a: str, x: Tensor) -> Tensor:
        """(N, in) -> (N, p·rank), by an adapter's A."""
        return self.product(x, self._parameters[a])

    def widen(self, b: str, h: Tensor) -> Tensor:
        """(N, p·rank) -> (N, p·out), block by block, by an adapter's B."""
        blocks = self.blocks_of(b, h)
        if blocks == 1:
            return self.product(h, self._parameters[b])
        pairs = zip(tf.split(h, blocks, 1), tf.split(self._parameters[b], blocks, 1), strict=True)
        return tf.concat([self.product(*pair) for pair in pairs], axis=1)

    def blocks_of(self, b: str, h: Tensor) -> int:
        """Return the number of blocks p: h is p times as wide as B is high."""
        return int(h.shape[1] // self._parameters[b].shape[0])

    def product(self, a: Tensor, b: Tensor, *, transpose_b: bool = False) -> Tensor:
        """(..., n, k), (..., k, m) -> (..., n, m), with factors in the chosen precision."""
        if self._type == tf.float32:
            return tf.matmul(a, b, transpose_b=transpose_b)
        factors = (tf.cast(factor, self._type) for factor in (a, b))
        return tf.cast(tf.matmul(*factors, transpose_b=transpose_b), tf.float32)

    def for_each_row(self, name: str, rows: Any) -> Tensor:
        """Return a whole parameter once for each of M rows, (M, ...), like a CRF's transitions."""
        value = tf.convert_to_tensor(self._parameters[name])
        return tf.tile(value[None], (rows, *(1 for _ in value.shape)))

    def attention(
        self,
        name: str,
        x: Tensor,
        bias: Tensor,
        shape: tuple[Any, Any],
        heads: int,
        positions: Tensor | None = None,
        waves: Waves | None = None,
    ) -> Tensor:
        """Multi-head self-attention (Vaswani et al. 2017, section 3.2).

        Args:
            name: name of the block, whose `qkv` and `attention_output` are used.
            x: (M·S, D).
            bias: added to scores; broadcast to (M, heads, queries, S).
            shape: M and S.
            heads: number of heads.
            positions: (M, K) int32, positions that query; all if None.
            waves: rotate queries and keys by their positions; None: they are not rotated.

        Returns:
            (M·S, D), or (M·K, D).
        """
        (m, s), d = shape, x.shape[-1]
        width = d // heads  # W
        qkv = self.linear(f"{name}/qkv", x)  # (M·S, 3D)
        qkv = tf.transpose(tf.reshape(qkv, (m, s, 3, heads, width)), (2, 0, 3, 1, 4))
        q, k, v = tf.unstack(qkv)  # each (M, heads, S, W)
        if waves is not None:
            q, k = rotated(q, waves), rotated(k, waves)
        if positions is not None:
            queried = tf.tile(positions[:, None, :], (1, heads, 1))  # (M, heads, K)
            q = tf.gather(q, queried, batch_dims=2)  # (M, heads, K, W)
        return self.linear(f"{name}/attention_output", self.mixed_values(name, q, k, v, bias))

    def mixed_values(self, name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Return softmax(q·kᵀ/√W + bias)·v, with concatenated heads: (M·queries, heads·W).

        Args:
            name: name of the block.
            q: (M, heads, queries, W).
            k: (M, heads, S, W).
            v: (M, heads, S, W).
            bias: broadcast to the scores, (M, heads, queries, S).
        """
        m, heads, queries, width = shape_of(q)
        scores = self.product(q * (1.0 / math.sqrt(width)), k, transpose_b=True) + bias
        mixed = self.product(self.attention_weights(name, scores), v)  # (M, heads, queries, W)
        return tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (m * queries, heads * width))

    def attention_weights(self, name: str, scores: Tensor) -> Tensor:
        """(M, heads, queries, S) scores of the block `name` -> weights that sum to 1 over S.

        Dropout removes some of them.
        """
        del name  # used by subclasses that record the weights
        return self.dropout(tf.nn.softmax(scores))

    def layer_norm(self, name: str, x: Tensor, epsilon: float) -> Tensor:
        """(N, D) -> (N, D), each vector standardised, then scaled and shifted."""
        return self.scale_and_shift(name, standardise(x, epsilon))

    def rms_norm(self, name: str, x: Tensor, epsilon: float) -> Tensor:
        """(N, D) -> (N, D), each vector scaled to mean square 1 and by the gain (RMSNorm)."""
        return self.scale_and_shift(name, scale_to_unit_power(x, epsilon))

    def scale_and_shift(self, name: str, x: Tensor) -> Tensor:
        """(N, D) -> (N, D), each vector times the gain, plus the bias that the model has."""
        return self._shifted(name, x * self._parameters[f"{name}/gain"])

    def embed(
        self, ids: Tensor, types: Tensor | None, word: str, position: str | None, kind: str | None
    ) -> Tensor:
        """(M, S) word and type ids -> (M, S, D): the sum of rows of one table, two or three."""
        # Read first: of a variable that was once gathered from, TensorFlow copies every later
        # reading.
        words = tf.gather(tf.convert_to_tensor(self._parameters[word]), ids)  # (M, S, D)
        if position is not None:
            words += self._parameters[position][: shape_of(ids)[-1]]
        if kind is None:
            return words
        kinds = tf.one_hot(types, self._parameters[kind].shape[0])  # (M, S, types)
        return words + tf.matmul(kinds, self._parameters[kind])

    def tied_projection(self, x: Tensor, table: str, bias: str | None) -> Tensor:
        """(N, D) -> (N, V): logits by the transposed word table."""
        logits = self.product(x, self._parameters[table], transpose_b=True)
        return logits if bias is None else logits + self._parameters[bias]


_GAMMA = 0x9E3779B9  # odd, near 2³² divided by the golden ratio


def _scrambled(z: Tensor) -> Tensor:
    """Return a bijective scrambling of uint32 words, elementwise (MurmurHash3's finaliser)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        z = (z ^ tf.bitwise.right_shift(z, tf.constant(shift, tf.uint32))) * factor
    return z ^ tf.bitwise.right_shift(z, tf.constant(16, tf.uint32))


def shape_of(x: Tensor) -> tuple[Any, ...]:
    """Return the shape: numbers where they are static, scalar tensors where they are not."""
    dynamic = tf.shape(x)
    return tuple(dynamic[i] if size is None else size for i, size in enumerate(x.shape))


def chain_losses(emissions: Tensor, transitions: Tensor, tags: Tensor, weights: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats of each row's tags under a CRF: (M,).

    The CRF is a linear chain (Lafferty et al. 2001). For n words with emissions e and transitions
    T, the score of tags y is Σₖ eₖ[yₖ] + Σₖ T[yₖ₋₁, yₖ] and their probability is exp(score) / Z.
    The ends of a chain have no parameters: the encoder sees them as special tokens. The loss of a
    row without words is 0.

    Args:
        emissions: (M, K, L).
        transitions: (M, L, L) from a tag to the next; one copy per row, for per-row gradients.
        tags: (M, K) int32.
        weights: (M, K), 1 for words and 0 for padding; words come first.
    """
    m, _, n = shape_of(emissions)
    at_tags = tf.gather(emissions, tags, batch_dims=2) * weights  # (M, K)
    steps = tags[:, :-1] * n + tags[:, 1:]  # (M, K − 1)
    between = tf.gather(tf.reshape(transitions, (m, n * n)), steps, batch_dims=1) * weights[:, 1:]
    score = tf.reduce_sum(at_tags, axis=1) + tf.reduce_sum(between, axis=1)
    return (_log_partition(emissions, transitions, weights) - score) * weights[:, 0]


def _log_partition(emissions: Tensor, transitions: Tensor, weights: Tensor) -> Tensor:
    """Return log Z of each row's chain by the forward algorithm: (M,)."""

    def step(alpha: Tensor, word: tuple[Tensor, Tensor]) -> Tensor:
        emission, weight = word  # (M, L), (M,)
        ways = alpha[:, :, None] + transitions + emission[:, None, :]  # (M, from, to)
        return tf.where(weight[:, None] > 0, tf.reduce_logsumexp(ways, axis=1), alpha)

    by_word = tf.transpose(emissions, (1, 0, 2)), tf.transpose(weights)  # (K, M, L), (K, M)
    later = tuple(values[1:] for values in by_word)
    if later[0].shape[0] == 0:
        return tf.reduce_logsumexp(emissions[:, 0], axis=1)
    alphas = tf.scan(step, later, initializer=by_word[0][0])
    return tf.reduce_logsumexp(alphas[-1], axis=1)


def best_tags(
    emissions: NDArray[np.float32],
    transitions: NDArray[np.float32],
    may_begin: NDArray[np.bool_],
    may_follow: NDArray[np.bool_],
) -> NDArray[np.int32]:
    """Return the most likely allowed tags of one chain by the Viterbi algorithm: (n,).

    Args:
        emissions: (n, L).
        transitions: (L, L).
        may_begin: (L,), true for tags that may be the first.
        may_follow: (L, L), true at [i, j] if tag j may follow tag i.
    """
    ways = np.where(may_follow, transitions.astype(np.float64), FAR_BELOW)
    best = np.where(may_begin, emissions[0].astype(np.float64), FAR_BELOW)  # (L,)
    came_from = np.zeros(emissions.shape, np.int32)
    for k in range(1, len(emissions)):
        through = best[:, None] + ways  # (from, to)
        came_from[k] = through.argmax(0)
        best = through.max(0) + emissions[k]
    tags = np.zeros(len(emissions), np.int32)
    tags[-1] = best.argmax()
    for k in range(len(emissions) - 1, 0, -1):
        tags[k - 1] = came_from[k, tags[k]]
    return tags
