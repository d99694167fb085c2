"""Fine-tuning for entity extraction: a token classifier on BERT, private or not.

A row's loss is the mean over its words, asked at each word's first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.config.training import TrainingConfig
from dp_core.data.hashing import U64, digest64
from dp_core.data.masking import MaskedRows
from dp_core.data.ner import Sentence, label_set
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.models.bert import tag_logits, tag_row_losses
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import load
from dp_core.models.parameters import HEADS, TAGGER, Bert, initial_values
from dp_core.nn.layers import Layers, Tensor
from dp_core.training.batches import Indices
from dp_core.training.checkpoints import CheckpointPlace
from dp_core.training.devices import single_device
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates, Progress, train
from dp_core.training.objectives import Objective

_LEAST = 8  # pieces: the markers, and some of a text or of two


def check_row_length(max_length: int, most: int) -> None:
    """Refuse rows that hold next to nothing, or more than the model reads.

    Raises:
        BadInput: not from 8 to `most`, the model's positions.
    """
    if not _LEAST <= max_length <= most:
        raise BadInput(
            f"{max_length} is not from {_LEAST} to the model's {most}", where="max_length"
        )


def store_by_unit(
    rows: Sequence[Sequence[int]],
    units: Sequence[str],
    *,
    max_length: int,
    vocabulary: int,
    pad: int,
) -> tuple[TokenStore, NDArray[np.int64]]:
    """Return the rows by unit, and which row stands where.

    Args:
        rows: piece ids of each row, at most `max_length`.
        units: id of each row's unit.
        max_length: S.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        The store, and (rows,) the number in `rows` of each of its rows. Rows of one unit keep
        their order.
    """
    ids = sorted(set(units))
    place = {unit: i for i, unit in enumerate(ids)}
    unit_of = np.array([place[unit] for unit in units], np.int64)
    order = np.argsort(unit_of, kind="stable")
    tokens = np.full((len(rows), max_length), pad, np.int32)
    for i, number in enumerate(order):
        tokens[i, : len(rows[number])] = rows[number]
    counts = np.bincount(unit_of, minlength=len(ids))
    store = TokenStore(
        tokens=tokens,
        lengths=np.array([len(rows[number]) for number in order], np.int32),
        unit_rows=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        unit_keys=np.array([digest64(b"", "unit", unit) for unit in ids], np.uint64),
        sequence_length=max_length,
        vocabulary_size=vocabulary,
        digest="",
    )
    return store, order


_STEP = 8  # rows that are tagged are padded to a multiple of this


@dataclass(frozen=True)
class TaggingRow:
    """One row.

    Attributes:
        ids: [CLS] pieces [SEP].
        firsts: place in `ids` of each word's first piece.
        labels: label of each of these words.
        sentence: index of the sentence.
        words: index in the sentence of each of these words.
    """

    ids: tuple[int, ...]
    firsts: tuple[int, ...]
    labels: tuple[int, ...]
    sentence: int
    words: tuple[int, ...]


def rows_of(
    sentences: Sequence[Sentence], labels: Sequence[str], tokenizer: Tokenizer, max_length: int
) -> list[TaggingRow]:
    """Cut sentences into rows of at most `max_length` pieces.

    Args:
        sentences: tokens and tags; a tag that is not in `labels` counts as `O`.
        labels: tags in order of id, `O` first.
        tokenizer: BERT's.
        max_length: pieces of a row, [CLS] and [SEP] among them.
    """
    special = SpecialIds.of(tokenizer)
    label_ids = {label: i for i, label in enumerate(labels)}
    encodings = tokenizer.encode_batch(
        [list(s.tokens) for s in sentences], is_pretokenized=True, add_special_tokens=False
    )
    rows = []
    for index, (sentence, encoding) in enumerate(zip(sentences, encodings, strict=True)):
        pieces: dict[int, list[int]] = {}
        for piece, word in zip(encoding.ids, encoding.word_ids, strict=True):
            assert word is not None  # noqa: S101 - no special tokens were added
            pieces.setdefault(word, []).append(piece)
        tags = {w: label_ids.get(sentence.tags[w], 0) for w in pieces}
        rows += _cut(index, pieces, tags, special, max_length - 2)
    return rows


def _cut(
    sentence: int,
    pieces: dict[int, list[int]],
    tags: dict[int, int],
    special: SpecialIds,
    room: int,
) -> list[TaggingRow]:
    rows, words, used = [], list[int](), 0

    def finish() -> None:
        ids, firsts = [special.cls], []
        for word in words:
            firsts.append(len(ids))
            ids += pieces[word][:room]
        labels = tuple(tags[w] for w in words)
        rows.append(TaggingRow((*ids, special.sep), tuple(firsts), labels, sentence, tuple(words)))

    for word, own in pieces.items():
        size = min(len(own), room)
        if words and used + size > room:
            finish()
            words, used = [], 0
        words.append(word)
        used += size
    if words:
        finish()
    return rows


def tags_of(
    sentences: Sequence[Sentence],
    rows: Sequence[TaggingRow],
    predicted: Sequence[NDArray[np.int32]],
    labels: Sequence[str],
) -> list[tuple[str, ...]]:
    """Return each sentence's tags; a word without pieces is `O`.

    Args:
        sentences: that the rows were cut from.
        rows: the rows.
        predicted: for each row, a label id at each of its places.
        labels: tags in order of id.
    """
    out = [["O"] * len(s.tokens) for s in sentences]
    for row, ids in zip(rows, predicted, strict=True):
        for first, word in zip(row.firsts, row.words, strict=True):
            out[row.sentence][word] = labels[int(ids[first])]
    return [tuple(tags) for tags in out]


def tagging_units(
    rows: Sequence[TaggingRow], units: Sequence[str], *, max_length: int, vocabulary: int, pad: int
) -> tuple[TokenStore, Objective]:
    """Return the rows by unit, and what they teach.

    Args:
        rows: of `tagging.rows_of`.
        units: id of the unit of each sentence that the rows were cut from.
        max_length: S, at least 3 and that of the rows.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        A store in memory, and an objective that knows the tags of its rows.
    """
    store, order = store_by_unit(
        [row.ids for row in rows],
        [units[row.sentence] for row in rows],
        max_length=max_length,
        vocabulary=vocabulary,
        pad=pad,
    )
    answers = _Answers([rows[i] for i in order], max_length)
    return store, Objective("tagging", answers.examples, tag_row_losses)


class _Answers:
    """The tags of rows in the store's order."""

    def __init__(self, rows: Sequence[TaggingRow], max_length: int) -> None:
        self._rows, self._length = rows, max_length

    def examples(self, store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
        """Ask each word for its tag, at its first piece; nothing is masked, nothing is random.

        Returns:
            K = S − 2 answers of each row: no row has more words than places between its markers.
        """
        shape = (len(rows), self._length - 2)
        positions, labels = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights = np.zeros(shape, np.float32)
        for i, number in enumerate(rows):
            row = self._rows[number]
            positions[i, : len(row.firsts)] = row.firsts
            labels[i, : len(row.labels)] = row.labels
            weights[i, : len(row.labels)] = 1
        return MaskedRows(store.tokens[rows], positions, labels, weights)


def tag(
    model: Bert,
    sentences: Sequence[Sentence],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    batch_size: int = 32,
    device: str = "cpu",
) -> list[tuple[str, ...]]:
    """Tag sentences with a model that has a token classifier.

    Args:
        model: with its classifier and labels.
        sentences: their own tags are not looked at.
        tokenizer: of the model's vocabulary.
        max_length: pieces of a row, at most; the model's positions bound them too.
        batch_size: rows at once; memory and speed only.
        device: cpu, gpu, tpu or mock-tpu:N; one device of it is used.

    Returns:
        IOB2 tags of each sentence, one for each token.
    """
    rows = rows_of(sentences, model.labels, tokenizer, min(max_length, model.config.max_positions))
    with tf.device(single_device(device)):
        predicted = _predict(model, rows, batch_size, SpecialIds.of(tokenizer).pad)
    return tags_of(sentences, rows, predicted, model.labels)


def _predict(
    model: Bert, rows: Sequence[TaggingRow], batch_size: int, pad: int
) -> list[NDArray[np.int32]]:
    """Return the best label id at each position of each row."""
    layers = Layers({name: tf.constant(a) for name, a in model.parameters.items()})

    def best(ids: Tensor, lengths: Tensor) -> Tensor:
        logits = tag_logits(layers, model.config, ids, lengths)  # (M·S, tags)
        return tf.reshape(tf.argmax(logits, axis=1, output_type=tf.int32), tf.shape(ids))

    # One graph for all lengths: making a graph costs more than the padding it would save.
    shapes = tf.TensorSpec((batch_size, None), tf.int32), tf.TensorSpec((batch_size,), tf.int32)
    compiled = tf.function(best, input_signature=shapes, autograph=False)
    order = np.argsort([len(row.ids) for row in rows], kind="stable")
    predicted: list[Any] = [None] * len(rows)
    for start in range(0, len(rows), batch_size):
        batch = order[start : start + batch_size]
        width = min(_padded(len(rows[batch[-1]].ids)), model.config.max_positions)
        ids = np.full((batch_size, width), pad, np.int32)
        lengths = np.ones(batch_size, np.int32)  # a padding row attends to its first position
        for i, number in enumerate(batch):
            lengths[i] = len(rows[number].ids)
            ids[i, : lengths[i]] = rows[number].ids
        for number, labels in zip(batch, compiled(ids, lengths).numpy(), strict=False):
            predicted[number] = labels
    return predicted


def _padded(length: int) -> int:
    return -(-length // _STEP) * _STEP


def with_classifier(start: Bert, labels: tuple[str, ...], seed: int) -> Bert:
    """Return the encoder with a fresh token classifier; other heads are left behind.

    Args:
        start: the pre-trained model.
        labels: tags in order of id.
        seed: public.
    """
    config: BertConfig = start.config
    shapes = {f"{TAGGER}/kernel": (config.hidden, len(labels)), f"{TAGGER}/bias": (len(labels),)}
    encoder = {n: a for n, a in start.parameters.items() if not n.startswith(HEADS)}
    return Bert(config, encoder | initial_values(shapes, config.initializer_range, seed), labels)


def finetune(
    model: Path,
    sentences: Sequence[Sentence],
    tokenizer: Tokenizer,
    *,
    epochs: int,
    batch_size: int,
    config: TrainingConfig,
    max_length: int,
    seed: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a token classifier without privacy, in shuffled epochs over the rows.

    Args:
        model: folder of the pre-trained model; its MLM head is left behind.
        sentences: the labelled sentences. Their entity types make the tags.
        tokenizer: of the model's vocabulary.
        epochs: passes over the rows. The points of the curve are their ends.
        batch_size: rows.
        config: optimizer, and how the run is kept.
        max_length: tokens of a row, at most; longer sentences are cut between words, and so is
            the longest hundredth.
        seed: public; the classifier's initial values, and the order.
        checkpoints: where they are kept.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`.

    Returns:
        The encoder with its token classifier; `tag` uses it.

    Raises:
        BadInput: nothing to train on, or a vocabulary that is not the model's.
        Unfinished: as in `loop.train`.
    """
    start = load(model)
    labels = label_set(sentences)
    rows = rows_of(sentences, labels, tokenizer, min(max_length, start.config.max_positions))
    if not rows:
        raise BadInput("there are no sentences to train on", where="fine-tuning")
    # Rows of a batch have one length: the few longest are cut, or all would be mostly padding.
    usual = _padded(int(np.percentile([len(row.ids) for row in rows], 99)))
    length = min(usual, max_length, start.config.max_positions)
    rows = rows_of(sentences, labels, tokenizer, length)
    store, objective = tagging_units(
        rows,
        [str(i) for i in range(len(sentences))],
        max_length=length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=SpecialIds.of(tokenizer).pad,
    )
    batches = -(-len(rows) // batch_size)
    return train(
        with_classifier(start, labels, seed),
        objective,
        store=store,
        updates=OrdinaryUpdates(epochs * batches, batch_size, seed),
        config=config,
        seed=seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
        points=range(batches, epochs * batches + 1, batches),
    )


def finetune_privately(
    model: Path | Bert,
    sentences: Sequence[Sentence],
    tokenizer: Tokenizer,
    *,
    labels: Sequence[str],
    units: Sequence[str],
    updates: PrivateUpdates,
    config: TrainingConfig,
    init_seed: int,
    max_length: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a token classifier on private sentences and labels.

    Formal guarantee: that of `PrivateUpdates`, for the plan's unit: the model is as private
    towards the sentences, their tags and which of them there are as `plan.event()` says. The
    starting model must be public, or private under a budget of its own, which then adds up with
    this one.

    What depends on the data in no noised way must come from outside: the tags there may be, and
    the length of a row. A tag that is not in `labels` counts as `O`.

    Args:
        model: the pre-trained model, or its folder; its MLM head is left behind.
        sentences: private sentences with private tags.
        tokenizer: of the model's vocabulary.
        labels: PUBLIC tags in order of id, `O` first; see `ner.tags_of_types`.
        units: id of each sentence's privacy unit: its document's, its patient's, or its own.
        updates: the plan over these units, with the seed of its reservation.
        config: optimizer, and how the run is kept.
        init_seed: public; the classifier's initial values.
        max_length: tokens of a row; longer sentences are cut between words. Public.
        checkpoints: where they are kept; private.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`; `operator` numbers.

    Returns:
        The encoder with its token classifier; `tag` uses it.

    Raises:
        BadInput: plan, model and sentences do not fit together.
        Unfinished: as in `loop.train`.
    """
    start = load(model) if isinstance(model, Path) else model
    if len(units) != len(sentences):
        raise BadInput("not one unit for each sentence", where="fine-tuning")
    if not labels or labels[0] != "O":
        raise BadInput("the first label is not O", where="labels")
    check_row_length(max_length, start.config.max_positions)
    store, objective = tagging_units(
        rows_of(sentences, labels, tokenizer, max_length),
        units,
        max_length=max_length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=SpecialIds.of(tokenizer).pad,
    )
    return train(
        with_classifier(start, tuple(labels), init_seed),
        objective,
        store=store,
        updates=updates,
        config=config,
        seed=init_seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
    )
