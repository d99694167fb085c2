"""Head that classifies texts and pairs of texts by the state of a row's first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.data.hashing import U64
from dp_core.data.labelled_text import LabelledText
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import PrivateTextRefusal
from dp_core.models.bert import class_logits, class_row_losses
from dp_core.models.parameters import CLASSIFIER, HEADS, POOLER, Bert, initial_values
from dp_core.nn.layers import Layers, Tensor
from dp_core.training.batches import Indices
from dp_core.training.devices import single_device
from dp_core.training.objectives import Objective


@dataclass(frozen=True)
class ClassRow:
    """One row: [CLS] first [SEP], followed by second [SEP] if the text is a pair.

    Attributes:
        ids: ids of the row's pieces.
        second: position of the second text's first piece; 0 if there is none.
        label: number of the row's class, or −1 if the class is not in the list of labels.
        item: index of the text.
    """

    ids: tuple[int, ...]
    second: int
    label: int
    item: int


@dataclass(frozen=True)
class ClassHead:
    """A classifier of whole rows.

    Attributes:
        labels: two or more classes in order of id; for private text they must be public
            knowledge. A text of another class teaches nothing.
    """

    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.labels)) < max(2, len(self.labels)):
            raise PrivateTextRefusal("fewer than two classes, or one of them twice", where="labels")

    def begin(self, start: Bert, seed: int) -> Bert:
        """Return the encoder with a fresh pooler and classifier; other heads are dropped."""
        d, n = start.config.hidden, len(self.labels)
        shapes = {
            f"{POOLER}/kernel": (d, d),
            f"{POOLER}/bias": (d,),
            f"{CLASSIFIER}/kernel": (d, n),
            f"{CLASSIFIER}/bias": (n,),
        }
        encoder = {n: a for n, a in start.parameters.items() if not n.startswith(HEADS)}
        fresh = initial_values(shapes, start.config.initializer_range, seed)
        return Bert(start.config, encoder | fresh, self.labels)

    def rows(
        self, items: Sequence[LabelledText], tokenizer: Tokenizer, max_length: int
    ) -> list[ClassRow]:
        """Return a row for each text; the longer text of a pair is shortened until both fit.

        Args:
            items: texts with or without labels.
            tokenizer: BERT's tokenizer.
            max_length: pieces of a row, including markers.
        """
        special = SpecialIds.of(tokenizer)
        numbers = {label: i for i, label in enumerate(self.labels)}

        def pieces(texts: list[str]) -> list[list[int]]:
            return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]

        firsts, seconds = pieces([t.first for t in items]), pieces([t.second for t in items])
        rows = []
        for i, (text, first, second) in enumerate(zip(items, firsts, seconds, strict=True)):
            a, b = _cut(first, second, max_length - 2 - bool(text.second))
            ids, begins = [special.cls, *a, special.sep], 0
            if text.second:
                begins = len(ids)
                ids += [*b, special.sep]
            rows.append(ClassRow(tuple(ids), begins, numbers.get(text.label, -1), i))
        return rows

    def objective(self, rows: Sequence[ClassRow], max_length: int) -> Objective:
        """Return the objective that predicts the class of each row of a store."""
        del max_length
        return Objective("classification", _Answers(rows).examples, class_row_losses)


def _cut(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Shorten the longer one until both fit."""
    kept = min(len(first), max(room - len(second), -(-room // 2)))
    return first[:kept], second[: room - kept]


class _Answers:
    """The classes of rows in the store's order."""

    def __init__(self, rows: Sequence[ClassRow]) -> None:
        self._seconds = _column([row.second for row in rows])
        self._labels = _column([row.label for row in rows])

    def examples(self, store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
        """Return one prediction for each row, its class; nothing is masked or random."""
        labels = self._labels[rows]
        weights = (labels >= 0).astype(np.float32)
        return MaskedRows(store.tokens[rows], self._seconds[rows], np.maximum(labels, 0), weights)


def _column(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32).reshape(-1, 1)


def classes_of(
    model: Bert,
    texts: Sequence[LabelledText],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    batch_size: int = 32,
    device: str = "cpu",
) -> list[str]:
    """Return the most probable class of each text.

    Args:
        model: model with its classifier and labels.
        texts: texts; their labels are ignored.
        tokenizer: tokenizer with the model's vocabulary.
        max_length: pieces of a row, as in training, and at most the model's positions.
        batch_size: rows at once; affects only memory and speed.
        device: cpu, gpu, tpu or mock-tpu:N; one of its devices is used.
    """
    length = min(max_length, model.config.max_positions)
    rows = ClassHead(model.labels).rows(texts, tokenizer, length)
    ids = np.full(
        (-(-len(rows) // batch_size) * batch_size, length), SpecialIds.of(tokenizer).pad, np.int32
    )
    lengths, seconds = np.ones(len(ids), np.int32), np.zeros(len(ids), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        lengths[i], seconds[i] = len(row.ids), row.second
    with tf.device(single_device(device)):
        weights = {n: tf.constant(a) for n, a in model.parameters.items()}

        def best(*arrays: Tensor) -> Tensor:
            logits = class_logits(Layers(weights), model.config, *arrays)
            return tf.argmax(logits, axis=1, output_type=tf.int32)

        compiled = tf.function(best, autograph=False)
        guesses = [
            compiled(
                *(tf.constant(a[start : start + batch_size]) for a in (ids, lengths, seconds))
            ).numpy()
            for start in range(0, len(ids), batch_size)
        ]
    return [model.labels[int(n)] for part in guesses for n in part][: len(rows)]
