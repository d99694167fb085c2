"""Clipping rules of the layers: each unit's gradient norm, and the clipped sum.

U units, T tokens of a unit: the rows of a unit are one long sequence, so that a unit has one
gradient, one norm and one clip factor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import tensorflow as tf

from dp_core.nn import Tensor


class Part(NamedTuple):
    """A tensor of n consecutive units, from `first_unit` on: (n, ...)."""

    first_unit: int
    values: Tensor

    def factors(self, factors: Tensor) -> Tensor:
        """Return the factors of these units, (n,), out of the factors (U,) of all units."""
        return factors[self.first_unit : self.first_unit + self.values.shape[0]]


@dataclass(frozen=True)
class UnitGradients:
    """The gradients of one layer's parameters, one per unit, in the cheapest form.

    Attributes:
        squared_norms: (U,) float32, an upper bound on each unit's squared gradient norm, up to the
            rounding of sums of squares (measured: 10⁻⁶ of it); not finite where the gradient is
            not.
        parts: tensors from which `combine` computes the gradients.
        combine: (factors (U,), parts) -> for each parameter, Σᵤ factorᵤ · gradientᵤ. Linear in
            the factors. The caller passes the parts again because it zeroes units that are not
            finite. A sum with few nonzero rows may be a tf.IndexedSlices.
    """

    squared_norms: Tensor
    parts: tuple[Part, ...]
    combine: Callable[[Tensor, tuple[Part, ...]], dict[str, Tensor]]


def whole(*tensors: Tensor) -> tuple[Part, ...]:
    """Return parts that each hold all U units."""
    return tuple(Part(0, tensor) for tensor in tensors)


class LayerRecord(Protocol):
    """A layer's record of the forward pass, and its clipping rule.

    Law: for any (factors), `gradients(g).combine(factors, parts)` equals Σᵤ factorᵤ · ∂Lᵤ/∂θ, and
    `squared_norms` is at least Σ_θ ‖∂Lᵤ/∂θ‖², up to rounding, which Gram matrices bound and sums of
    squares do not. tests/dp_core/privacy/clipping checks every rule by brute force.
    """

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that this rule covers."""

    @property
    def output(self) -> Tensor:
        """The layer's output y, before anything else used it."""

    def gradients(self, g: Tensor) -> UnitGradients:
        """Turn ∂L/∂y into the units' gradients."""


_UNIT_ROUNDOFF = 2.0**-24  # float32, round to nearest


def gram_squared_norms(x: Tensor, g: Tensor, *, bias: bool = False) -> Tensor:
    """Bound ‖xᵤᵀgᵤ‖² from above, tightly: (U, T, in), (U, T, out) -> (U,).

    With `bias`, ‖xᵤᵀgᵤ‖² + ‖Σ_t gᵤₜ‖²: a bias is a weight whose input is always 1, so that every
    entry of xxᵀ is one more, and `in` below is replaced by in + 1.

    With γ_n = n·u/(1−n·u), every entry of xxᵀ is off by at most γ_in·|x_s||x_t| and of ggᵀ by
    γ_out·|g_s||g_t|, in whatever order the terms are added (Higham 2002, 3.5, and Cauchy-Schwarz);
    one more rounding for their product, and γ_2T for adding first along one axis, then along the
    other. Together at most γ_(in+out+2T+1) · (Σ_t |x_t||g_t|)². The lengths are the roots of the
    diagonals, themselves off by a factor within 1 ± γ_(in+out); twice the bound covers that and
    the rounding of the bound itself.
    """
    t, d_in, d_out = x.shape[1], x.shape[2] + int(bias), g.shape[2]
    x_gram = tf.matmul(x, x, transpose_b=True)  # (U, T, T)
    if bias:
        x_gram += 1.0
    g_gram = tf.matmul(g, g, transpose_b=True)  # (U, T, T)
    computed = tf.reduce_sum(tf.reduce_sum(x_gram * g_gram, axis=2), axis=1)  # (U,)
    lengths = tf.sqrt(tf.linalg.diag_part(x_gram) * tf.linalg.diag_part(g_gram))  # (U, T)
    scale = tf.square(tf.reduce_sum(lengths, axis=1))
    return tf.maximum(computed, 0.0) + rounding_factor(d_in, d_out, t) * scale


def rounding_factor(d_in: int, d_out: int, tokens: int) -> float:
    """Return twice γ_n of `gram_squared_norms`."""
    n = 2 * (d_in + d_out + 2 * tokens + 1)
    return n * _UNIT_ROUNDOFF / (1 - n * _UNIT_ROUNDOFF)


_LARGEST_PART = 8 << 20  # bytes


@dataclass(frozen=True)
class LinearRecord:
    """One linear layer's input and output, with N = U·T.

    `kernel` and `bias` say which of the two are trained, one of them at least.
    """

    name: str
    units: int
    x: Tensor  # (N, in)
    output: Tensor  # (N, out)
    kernel: bool = True
    bias: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        """Kernel and bias, as far as they are trained."""
        leaves = ("kernel",) * self.kernel + ("bias",) * self.bias
        return tuple(f"{self.name}/{leaf}" for leaf in leaves)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(N, out) -> the units' gradients, in the form that is cheaper for this shape."""
        tokens, d_in, d_out = self.x.shape[0] // self.units, self.x.shape[1], g.shape[1]
        g = tf.reshape(g, (self.units, tokens, d_out))
        if not self.kernel:
            return vector_gradients(self.parameters, (sum_over_tokens(g),))
        x = tf.reshape(self.x, (self.units, tokens, d_in))
        if explicit_is_cheaper(tokens, d_in, d_out):
            return self._explicit(x, g)
        return self._implicit(x, g)

    def _explicit(self, x: Tensor, g: Tensor) -> UnitGradients:
        """Form every unit's product; its weighted sum then is the clipped sum."""
        kernel, *bias = self.parameters
        products = product_gradients(kernel, x, g)
        if not bias:
            return products
        biases = sum_over_tokens(g)  # (U, out)

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            *kernels, biases = parts
            sums = products.combine(factors, tuple(kernels))
            return sums | {bias[0]: weighted_sum(factors, biases.values)}

        parts = (*products.parts, Part(0, biases))
        return UnitGradients(products.squared_norms + squared_norms(biases), parts, combine)

    def _implicit(self, x: Tensor, g: Tensor) -> UnitGradients:
        """Norms by Gram matrices; the clipped sum is the ordinary product that is still due."""
        kernel, *bias = self.parameters

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            x, g = (part.values for part in parts)
            sums = {name: weighted_sum_over_tokens(factors, g) for name in bias}  # of g as it is
            if x.shape[2] < g.shape[2]:  # the narrower of the two is the cheaper to weigh
                x *= factors[:, None, None]
            else:
                g *= factors[:, None, None]
            flat_x, flat_g = (tf.reshape(v, (-1, v.shape[2])) for v in (x, g))  # (N, in), (N, out)
            return sums | {kernel: tf.matmul(flat_x, flat_g, transpose_a=True)}

        return UnitGradients(gram_squared_norms(x, g, bias=self.bias), whole(x, g), combine)


@dataclass(frozen=True)
class BlockwiseRecord:
    """A product without bias, block by block, of a LoRA's A or B, with N = U·T.

    Block j of the output is block j of the input times the columns j of the matrix. A has one
    block, B has as many as its module. The products are narrow, so every unit's product is formed.
    """

    name: str
    units: int
    blocks: int  # p
    x: Tensor  # (N, p·in)
    output: Tensor  # (N, p·out)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The matrix: (in, p·out)."""
        return (self.name,)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(N, p·out) -> the units' gradients."""
        xs, gs = (
            tf.split(tf.reshape(v, (self.units, -1, v.shape[1])), self.blocks, axis=2)
            for v in (self.x, g)
        )
        each = [product_gradients(self.name, x, g) for x, g in zip(xs, gs, strict=True)]

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            count = len(parts) // self.blocks
            sums = [
                block.combine(factors, parts[count * j : count * (j + 1)])[self.name]
                for j, block in enumerate(each)
            ]
            return {self.name: tf.concat(sums, axis=1)}

        norms = tf.add_n([block.squared_norms for block in each])
        return UnitGradients(norms, tuple(part for block in each for part in block.parts), combine)


@dataclass(frozen=True)
class CopiesRecord:
    """A parameter that each row reads as a whole, through one copy per row; M = U·R rows.

    A copy has the gradient of its row, so a unit's gradient is the sum over its rows' copies.
    """

    name: str
    units: int
    output: Tensor  # (M, ...)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameter: (...)."""
        return (self.name,)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(M, ...) -> the units' gradients, explicitly: such parameters are small."""
        shape = g.shape[1:]
        sums = tf.reduce_sum(tf.reshape(g, (self.units, -1, *shape)), axis=1)  # (U, ...)
        return vector_gradients((self.name,), (sums,))


def product_gradients(name: str, x: Tensor, g: Tensor) -> UnitGradients:
    """Return the gradients xᵤᵀgᵤ of a matrix, explicitly: (U, T, in), (U, T, out)."""
    products = tuple(unit_products(x, g))

    def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
        return {name: tf.add_n([weighted_sum(p.factors(factors), p.values) for p in parts])}

    norms = tf.concat([squared_norms_of_matrices(p.values) for p in products], axis=0)
    return UnitGradients(norms, products, combine)


def vector_gradients(names: tuple[str, ...], values: tuple[Tensor, ...]) -> UnitGradients:
    """Return the gradients of small parameters, as they are: each (U, ...), one for each name."""

    def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
        pairs = zip(names, parts, strict=True)
        return {name: weighted_sum(factors, part.values) for name, part in pairs}

    return UnitGradients(tf.add_n([squared_norms(v) for v in values]), whole(*values), combine)


def unit_products(x: Tensor, g: Tensor) -> list[Part]:
    """Return xᵤᵀgᵤ of all units: (U, T, in), (U, T, out) -> parts (n, in, out).

    In parts of at most 8 MiB: larger blocks of memory are fetched from the operating system and
    returned to it every time, which costs a third of the product itself.
    """
    units, size = x.shape[0], 4 * x.shape[2] * g.shape[2]
    step = max(1, _LARGEST_PART // size)
    return [
        Part(u, tf.matmul(x[u : u + step], g[u : u + step], transpose_a=True))
        for u in range(0, units, step)
    ]


def explicit_is_cheaper(tokens: int, d_in: int, d_out: int) -> bool:
    """Whether forming U products beats two Gram matrices; decided once, from static shapes.

    Gram costs T²(in + out) multiplications a unit beyond an ordinary step; the explicit way costs
    in·out writes and two reads a unit, together worth about 80 multiplications on a CPU: measured
    within whole steps, where the products also fill cores that the backward pass leaves idle.
    """
    return 2 * tokens * tokens * (d_in + d_out) > 80 * d_in * d_out


def sum_over_tokens(values: Tensor) -> Tensor:
    """(U, T, D) -> (U, D), as a product with ones: of the ways to add, it reads memory fastest."""
    return tf.matmul(tf.ones((values.shape[0], 1, values.shape[1])), values)[:, 0]


def weighted_sum_over_tokens(factors: Tensor, values: Tensor) -> Tensor:
    """Σᵤ factorᵤ · Σₜ valueᵤₜ: (U,), (U, T, D) -> (D,), as a product too."""
    by_token = tf.repeat(factors, values.shape[1])[None, :]  # (1, N)
    return tf.matmul(by_token, tf.reshape(values, (-1, values.shape[2])))[0]


def squared_norms(parts: Tensor) -> Tensor:
    """(U, ...) -> (U,): the squared norm of each unit's part."""
    flat = tf.reshape(parts, (parts.shape[0], -1))
    return tf.reduce_sum(tf.square(flat), axis=1)


def squared_norms_of_matrices(products: Tensor) -> Tensor:
    """(U, in, out) -> (U,): as `squared_norms`, in one pass over memory but U times the graph."""
    return 2.0 * tf.stack([tf.nn.l2_loss(product) for product in tf.unstack(products)])


def weighted_sum(factors: Tensor, parts: Tensor) -> Tensor:
    """Σᵤ factorᵤ · partᵤ: (U,), (U, ...) -> (...)."""
    flat = tf.reshape(parts, (parts.shape[0], -1))
    return tf.reshape(tf.matmul(factors[None, :], flat), parts.shape[1:])


@dataclass(frozen=True)
class EmbeddingRecord:
    """The lookups' ids and their sum; M = U·R rows of S tokens, T = R·S.

    A table that is not trained, or that the model does without, is None.
    """

    word: str | None
    position: str | None
    kind: str | None
    units: int
    ids: Tensor  # (M, S)
    types: Tensor | None  # (M, S)
    table_rows: dict[str, int]  # rows of each table
    output: Tensor  # (M, S, D)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tables."""
        return tuple(name for name in (self.word, self.position, self.kind) if name is not None)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(M, S, D) -> the units' gradients."""
        _, s, d = g.shape
        by_token = tf.reshape(g, (self.units, -1, d))  # (U, T, D)
        norms, parts = [], {}
        if self.word is not None:
            norms.append(squared_norms(sum_by_word(self.unit_ids(), by_token)))
            parts[self.word] = by_token
        if self.position is not None:
            by_position = tf.reduce_sum(tf.reshape(g, (self.units, -1, s, d)), axis=1)  # (U, S, D)
            norms.append(squared_norms(by_position))
            parts[self.position] = by_position
        if self.kind is not None:
            kinds = tf.one_hot(tf.reshape(self.types, (self.units, -1)), self.table_rows[self.kind])
            by_type = tf.matmul(kinds, by_token, transpose_a=True)  # (U, types, D)
            norms.append(squared_norms(by_type))
            parts[self.kind] = by_type

        def combine(factors: Tensor, values: tuple[Part, ...]) -> dict[str, Tensor]:
            by_table = dict(zip(parts, (part.values for part in values), strict=True))
            sums = {}
            if self.word is not None:
                weighted = by_table[self.word] * factors[:, None, None]
                weighted = tf.reshape(weighted, (-1, d))  # (U·T, D)
                sums[self.word] = tf.IndexedSlices(weighted, tf.reshape(self.ids, (-1,)))
            if self.position is not None:
                unused = self.table_rows[self.position] - s
                placed = weighted_sum(factors, by_table[self.position])
                sums[self.position] = tf.pad(placed, ((0, unused), (0, 0)))
            if self.kind is not None:
                sums[self.kind] = weighted_sum(factors, by_table[self.kind])
            return sums

        return UnitGradients(tf.add_n(norms), whole(*parts.values()), combine)

    def unit_ids(self) -> Tensor:
        """(U, T): the word ids of each unit."""
        return tf.reshape(self.ids, (self.units, -1))


def sum_by_word(ids: Tensor, g: Tensor) -> Tensor:
    """Add up the places of each word: (U, T) ids, (U, T, D) -> (U, T, D), other slots zero.

    A word's slot is where it begins in the unit's sorted ids, so two places share a slot exactly
    if they hold the same word.
    """
    u, t = ids.shape
    slots = tf.searchsorted(tf.sort(ids, axis=1), ids)  # (U, T) in [0, T)
    slots += t * tf.range(u)[:, None]
    flat = tf.math.unsorted_segment_sum(tf.reshape(g, (u * t, -1)), tf.reshape(slots, (-1,)), u * t)
    return tf.reshape(flat, g.shape)


@dataclass(frozen=True)
class NormRecord:
    """A LayerNorm's or RMSNorm's normalised input and its output, with N = U·T.

    `gain` and `bias` say which of the two are trained, one of them at least.
    """

    name: str
    units: int
    normalised: Tensor  # (N, D)
    output: Tensor  # (N, D)
    gain: bool = True
    bias: bool = True

    @property
    def parameters(self) -> tuple[str, ...]:
        """Gain and bias, as far as they are trained."""
        leaves = ("gain",) * self.gain + ("bias",) * self.bias
        return tuple(f"{self.name}/{leaf}" for leaf in leaves)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(N, D) -> the units' gradients, explicitly: they are small."""
        shape = (self.units, -1, g.shape[1])
        values = (g * self.normalised,) * self.gain + (g,) * self.bias
        sums = tuple(sum_over_tokens(tf.reshape(v, shape)) for v in values)  # each (U, D)
        return vector_gradients(self.parameters, sums)


@dataclass(frozen=True)
class TiedProjectionRecord:
    """The output projection's input and its logits, with N = U·K predictions.

    A table or bias is None if it is not trained or the model has none.
    """

    table: str | None
    bias: str | None
    units: int
    x: Tensor  # (N, D)
    output: Tensor  # (N, V)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Table and bias."""
        return tuple(name for name in (self.table, self.bias) if name is not None)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(N, V) -> the units' gradients: few predictions, a wide table, so always by Gram."""
        g = tf.reshape(g, (self.units, -1, g.shape[1]))  # (U, K, V)
        table = self.table
        if table is None:
            return vector_gradients(self.parameters, (sum_over_tokens(g),))
        x = tf.reshape(self.x, (self.units, -1, self.x.shape[1]))  # (U, K, D)

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            x, g = (part.values for part in parts)
            weighted = tf.reshape(x * factors[:, None, None], (-1, x.shape[2]))  # (N, D)
            flat = tf.reshape(g, (-1, g.shape[2]))  # (N, V)
            sums = {table: tf.matmul(flat, weighted, transpose_a=True)}
            if self.bias is not None:
                sums[self.bias] = weighted_sum_over_tokens(factors, g)
            return sums

        norms = gram_squared_norms(x, g, bias=self.bias is not None)
        return UnitGradients(norms, whole(x, g), combine)


def cross_term(
    lookup: EmbeddingRecord,
    lookup_g: Tensor,
    projection: TiedProjectionRecord,
    projection_g: Tensor,
) -> Tensor:
    """Return the cross term of lookup and projection in the table's squared norm: (U,).

    It is bounded from above like the Gram norms, since it can cancel them: each product of vectors
    is off by at most γ_D times their lengths, and terms are added over T, then over K (Higham 2002,
    3.5).

    Args:
        lookup: the embedding's record.
        lookup_g: (M, S, D), its output's gradient.
        projection: the projection's record.
        projection_g: (N, V), its logits' gradient.
    """
    units = lookup.units
    h = tf.reshape(projection.x, (units, -1, projection.x.shape[1]))  # (U, K, D)
    logit_g = tf.reshape(projection_g, (units, -1, projection_g.shape[1]))  # (U, K, V)
    g = tf.reshape(lookup_g, (units, -1, lookup_g.shape[-1]))  # (U, T, D)
    k = h.shape[1]
    ids = lookup.unit_ids()  # (U, T)
    ids = tf.repeat(ids[:, None, :], k, axis=1)  # (U, K, T)
    at_words = tf.gather(logit_g, ids, batch_dims=2)  # (U, K, T)
    alignment = tf.matmul(h, g, transpose_b=True)  # (U, K, T)
    lengths = tf.norm(h, axis=2)[:, :, None] * tf.norm(g, axis=2)[:, None, :]  # (U, K, T)
    computed = tf.reduce_sum(tf.reduce_sum(alignment * at_words, axis=2), axis=1)
    scale = tf.reduce_sum(lengths * tf.abs(at_words), axis=(1, 2))
    return 2.0 * (computed + rounding_factor(h.shape[2], 0, max(k, g.shape[1])) * scale)
