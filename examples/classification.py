"""Classification of texts, or of pairs of texts, on the platform's training loop.

An objective of its own, with a head of its own: everything else (units, plan, clipping, noise,
checkpoints) is what pre-training uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.config.training import TrainingConfig
from dp_core.data.hashing import U64
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.models.bert import class_logits, class_row_losses
from dp_core.models.hugging_face import load
from dp_core.models.parameters import CLASSIFIER, HEADS, POOLER, Bert, initial_values
from dp_core.nn.layers import Layers, Tensor
from dp_core.training.batches import Indices
from dp_core.training.checkpoints import CheckpointPlace
from dp_core.training.devices import single_device
from dp_core.training.finetune import check_row_length, store_by_unit
from dp_core.training.loop import PrivateUpdates, Progress, UpdateRule, train
from dp_core.training.objectives import Objective


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


def finetune_classes(
    model: Path | Bert,
    texts: Sequence[LabelledText],
    tokenizer: Tokenizer,
    *,
    labels: Sequence[str],
    units: Sequence[str] | None,
    updates: UpdateRule,
    config: TrainingConfig,
    init_seed: int,
    max_length: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a classifier of whole rows: its pooler and output layer are fresh, all else goes on.

    Formal guarantee, with `PrivateUpdates`: theirs, for the plan's unit: the model is as private
    towards the texts, their labels and which of them there are as `plan.event()` says. The
    starting model must be public, or private under a budget of its own, which then adds up.

    What depends on the data in no noised way comes from outside: the classes there may be, and
    the length of a row. A text of another class, or of none, teaches nothing.

    Args:
        model: the pre-trained model, or its folder; its heads are left behind.
        texts: with their classes.
        tokenizer: of the model's vocabulary.
        labels: the classes in order of id, two or more; public where there is a plan.
        units: id of each text's privacy unit, with a plan; None without one.
        updates: the update rule, private or ordinary.
        config: optimizer, and how the run is kept.
        init_seed: public; fresh layers.
        max_length: pieces of a row; longer texts are cut. Public.
        checkpoints: where they are kept; private as the data is.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`; `operator` numbers.

    Returns:
        The encoder with its classifier; `classes_of` uses it, and `weights.save` writes what
        `transformers` reads as `…ForSequenceClassification`.

    Raises:
        BadInput: update rule, model and texts do not fit together.
        Unfinished, ConfideError: as in `loop.train`.
    """
    start = load(model) if isinstance(model, Path) else model
    _check(start, texts, labels, units, isinstance(updates, PrivateUpdates), max_length)
    store, objective = class_units(
        class_rows(texts, labels, tokenizer, max_length),
        [str(i) for i in range(len(texts))] if units is None else units,
        max_length=max_length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=SpecialIds.of(tokenizer).pad,
    )
    return train(
        with_class_head(start, tuple(labels), init_seed),
        objective,
        store=store,
        updates=updates,
        config=config,
        seed=init_seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
    )


def _check(
    start: Bert,
    texts: Sequence[LabelledText],
    labels: Sequence[str],
    units: Sequence[str] | None,
    private: bool,
    max_length: int,
) -> None:
    if (units is not None) != private:
        raise BadInput("units belong to a plan, and a plan to units", where="fine-tuning")
    if units is not None and len(units) != len(texts):
        raise BadInput("not one unit for each text", where="fine-tuning")
    if not private and not texts:
        raise BadInput("there are no texts to train on", where="fine-tuning")
    if len(set(labels)) < max(2, len(labels)):
        raise BadInput("fewer than two classes, or one of them twice", where="labels")
    check_row_length(max_length, start.config.max_positions)


def with_class_head(start: Bert, labels: tuple[str, ...], seed: int) -> Bert:
    """Return the encoder with a fresh pooler and classifier; other heads are left behind.

    Args:
        start: the pre-trained model.
        labels: classes in order of id.
        seed: public.
    """
    config, d = start.config, start.config.hidden
    shapes = {
        f"{POOLER}/kernel": (d, d),
        f"{POOLER}/bias": (d,),
        f"{CLASSIFIER}/kernel": (d, len(labels)),
        f"{CLASSIFIER}/bias": (len(labels),),
    }
    encoder = {n: a for n, a in start.parameters.items() if not n.startswith(HEADS)}
    return Bert(config, encoder | initial_values(shapes, config.initializer_range, seed), labels)


def classes_of(
    model: Bert,
    texts: Sequence[LabelledText],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    batch_size: int = 32,
    device: str = "cpu",
) -> list[str]:
    """Return each text's likeliest class.

    Args:
        model: with its classifier and labels.
        texts: their own labels are not looked at.
        tokenizer: of the model's vocabulary.
        max_length: pieces of a row, as in training.
        batch_size: rows at once; memory and speed only.
        device: cpu, gpu, tpu or mock-tpu:N; one device of it is used.
    """
    rows = class_rows(texts, model.labels, tokenizer, max_length)
    ids = np.full((-(-len(rows) // batch_size) * batch_size, max_length), 0, np.int32)
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
                *(tf.constant(a[at : at + batch_size]) for a in (ids, lengths, seconds))
            ).numpy()
            for at in range(0, len(ids), batch_size)
        ]
    return [model.labels[int(n)] for part in guesses for n in part][: len(rows)]
