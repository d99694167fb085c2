"""Texts, or pairs of texts, as rows with one label each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.bert.heads import class_row_losses
from dp_core.corpus.counter_random import U64
from dp_core.corpus.masking import MaskedRows
from dp_core.corpus.token_store import TokenStore
from dp_core.training.objective import Objective
from dp_core.training.rows import Indices
from dp_core.training.unit_rows import store_by_unit
from dp_core.vocab.special_ids import SpecialIds


@dataclass(frozen=True)
class LabelledText:
    """One text to classify, or a pair of them (does the second follow from the first?).

    Attributes:
        first: the text.
        second: the other one, or empty.
        label: its class; not looked at where it is to be predicted.
    """

    first: str
    second: str = ""
    label: str = ""


@dataclass(frozen=True)
class ClassRow:
    """One row: [CLS] first [SEP], and of a pair also second [SEP].

    Attributes:
        ids: its pieces.
        second: place where the second text begins; 0 if there is none.
        label: number of its class, or −1 if it has none of those that were told.
    """

    ids: tuple[int, ...]
    second: int
    label: int


def class_rows(
    texts: Sequence[LabelledText], labels: Sequence[str], tokenizer: Tokenizer, max_length: int
) -> list[ClassRow]:
    """Return a row for each text; what does not fit is cut from the end of the longer of a pair.

    Args:
        texts: with or without labels.
        labels: classes in order of id.
        tokenizer: BERT's.
        max_length: pieces of a row, markers among them.
    """
    special = SpecialIds.of(tokenizer)
    numbers = {label: i for i, label in enumerate(labels)}

    def pieces(words: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch(words, add_special_tokens=False)]

    firsts, seconds = pieces([t.first for t in texts]), pieces([t.second for t in texts])
    rows = []
    for text, first, second in zip(texts, firsts, seconds, strict=True):
        a, b = _cut(first, second, max_length - 2 - bool(text.second))
        ids, begins = [special.cls, *a, special.sep], 0
        if text.second:
            begins = len(ids)
            ids += [*b, special.sep]
        rows.append(ClassRow(tuple(ids), begins, numbers.get(text.label, -1)))
    return rows


def _cut(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Shorten the longer one until both fit."""
    own = min(len(first), max(room - len(second), -(-room // 2)))
    return first[:own], second[: room - own]


def class_units(
    rows: Sequence[ClassRow],
    units: Sequence[str],
    *,
    max_length: int,
    vocabulary: int,
    pad: int,
) -> tuple[TokenStore, Objective]:
    """Return the rows by unit, and what they teach: a row without a told label, nothing.

    Args:
        rows: of `class_rows`.
        units: id of each row's unit.
        max_length: S.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        A store in memory, and an objective that knows the classes of its rows.
    """
    ids = [row.ids for row in rows]
    store, order = store_by_unit(ids, units, max_length=max_length, vocabulary=vocabulary, pad=pad)
    answers = _Answers([rows[i] for i in order])
    return store, Objective("classification", answers.examples, class_row_losses)


class _Answers:
    """The classes of rows in the store's order."""

    def __init__(self, rows: Sequence[ClassRow]) -> None:
        self._seconds = _column([row.second for row in rows])
        self._labels = _column([row.label for row in rows])

    def examples(self, store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
        """Ask each row for its class: one answer; nothing is masked, nothing is random."""
        labels = self._labels[rows]
        told = (labels >= 0).astype(np.float32)
        return MaskedRows(store.tokens[rows], self._seconds[rows], np.maximum(labels, 0), told)


def _column(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32).reshape(-1, 1)
