"""Rule for the sum of word, position and type embeddings: the tables share one gradient g.

A word that stands at several places of a unit has one row in the table: its gradient is the sum
over those places, so places are added by word before anything is squared.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from dp_core.bert.layers import Tensor
from dp_core.privacy.clipping.linear import squared_norms, weighted_sum
from dp_core.privacy.clipping.rule import Part, UnitGradients, whole


@dataclass(frozen=True)
class EmbeddingTap:
    """The lookups' ids and their sum; M = U·R rows of S tokens, T = R·S.

    `kind` and `types` are None in a model without token types.
    """

    word: str
    position: str
    kind: str | None
    units: int
    ids: Tensor  # (M, S)
    types: Tensor | None  # (M, S)
    table_rows: dict[str, int]  # rows of each table
    output: Tensor  # (M, S, D)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tables."""
        tables = (self.word, self.position)
        return tables if self.kind is None else (*tables, self.kind)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(M, S, D) -> the units' gradients."""
        _, s, d = g.shape
        by_token = tf.reshape(g, (self.units, -1, d))  # (U, T, D)
        by_place = tf.reduce_sum(tf.reshape(g, (self.units, -1, s, d)), axis=1)  # (U, S, D)
        norms = squared_norms(sum_by_word(self.unit_ids(), by_token)) + squared_norms(by_place)
        parts = [by_token, by_place]
        if self.kind is not None:
            kinds = tf.one_hot(tf.reshape(self.types, (self.units, -1)), self.table_rows[self.kind])
            by_kind = tf.matmul(kinds, by_token, transpose_a=True)  # (U, types, D)
            norms += squared_norms(by_kind)
            parts.append(by_kind)

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            by_token, by_place, *by_kind = (part.values for part in parts)
            weighted = tf.reshape(by_token * factors[:, None, None], (-1, d))  # (U·T, D)
            words = tf.IndexedSlices(weighted, tf.reshape(self.ids, (-1,)))
            unused = self.table_rows[self.position] - s
            sums = {
                self.word: words,
                self.position: tf.pad(weighted_sum(factors, by_place), ((0, unused), (0, 0))),
            }
            if self.kind is not None:
                sums[self.kind] = weighted_sum(factors, by_kind[0])
            return sums

        return UnitGradients(norms, whole(*parts), combine)

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
