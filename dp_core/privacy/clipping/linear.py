"""Rule for y = x·W + b: a unit's gradient is xᵀg, its norm by explicit product or by Gram."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from dp_core.bert.layers import Tensor
from dp_core.privacy.clipping.gram import gram_squared_norms
from dp_core.privacy.clipping.rule import Part, UnitGradients, whole

_LARGEST_PART = 8 << 20  # bytes


@dataclass(frozen=True)
class LinearTap:
    """One linear layer's input and output, with N = U·T."""

    name: str
    units: int
    x: Tensor  # (N, in)
    output: Tensor  # (N, out)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Kernel and bias."""
        return (f"{self.name}/kernel", f"{self.name}/bias")

    def gradients(self, g: Tensor) -> UnitGradients:
        """(N, out) -> the units' gradients, in the form that is cheaper for this shape."""
        tokens, d_in, d_out = self.x.shape[0] // self.units, self.x.shape[1], g.shape[1]
        x = tf.reshape(self.x, (self.units, tokens, d_in))
        g = tf.reshape(g, (self.units, tokens, d_out))
        if explicit_is_cheaper(tokens, d_in, d_out):
            return self._explicit(x, g)
        return self._implicit(x, g)

    def _explicit(self, x: Tensor, g: Tensor) -> UnitGradients:
        """Form every unit's product; its weighted sum then is the clipped sum."""
        products = unit_products(x, g)
        biases = sum_over_tokens(g)  # (U, out)
        kernel, bias = self.parameters

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            *products, biases = parts
            sums = [weighted_sum(p.factors(factors), p.values) for p in products]
            return {kernel: tf.add_n(sums), bias: weighted_sum(factors, biases.values)}

        norms = tf.concat([squared_norms_of_matrices(p.values) for p in products], axis=0)
        parts = (*products, Part(0, biases))
        return UnitGradients(norms + squared_norms(biases), parts, combine)

    def _implicit(self, x: Tensor, g: Tensor) -> UnitGradients:
        """Norms by Gram matrices; the clipped sum is the ordinary product that is still due."""
        kernel, bias = self.parameters

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            x, g = (part.values for part in parts)
            biases = weighted_sum_over_tokens(factors, g)  # of g as it is
            if x.shape[2] < g.shape[2]:  # the narrower of the two is the cheaper to weigh
                x *= factors[:, None, None]
            else:
                g *= factors[:, None, None]
            flat_x, flat_g = (tf.reshape(v, (-1, v.shape[2])) for v in (x, g))  # (N, in), (N, out)
            return {kernel: tf.matmul(flat_x, flat_g, transpose_a=True), bias: biases}

        return UnitGradients(gram_squared_norms(x, g, bias=True), whole(x, g), combine)


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
