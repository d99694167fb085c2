"""Fine-tuning for entity extraction: a token classifier on BERT, trained without privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tokenizers import Tokenizer

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
from dp_core.nn.layers import Layers, Tensor, Variables
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import Indices
from dp_core.training.checkpoints import CheckpointPlace
from dp_core.training.config import TrainingConfig
from dp_core.training.devices import single_device
from dp_core.training.loop import Progress, fit
from dp_core.training.objectives import Objective
from dp_core.training.trainer import AdamW

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


NO_LABEL = -1
_STEP = 8  # rows of a batch are padded to a multiple of this


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


@dataclass(frozen=True)
class TaggingBatch:
    """Rows padded to a common length S: ids (M, S), lengths (M,), labels (M, S) or NO_LABEL."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    labels: NDArray[np.int32]


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


def batch_of(rows: Sequence[TaggingRow], size: int, pad: int) -> TaggingBatch:
    """Pad at most `size` rows to exactly `size`, and to a common length."""
    longest = max(len(row.ids) for row in rows)
    length = -(-longest // _STEP) * _STEP
    ids = np.full((size, length), pad, np.int32)
    lengths = np.ones(size, np.int32)  # a padding row attends to its first place
    labels = np.full((size, length), NO_LABEL, np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        lengths[i] = len(row.ids)
        labels[i, list(row.firsts)] = row.labels
    return TaggingBatch(ids, lengths, labels)


def epoch_order(
    rows: Sequence[TaggingRow], batch_size: int, generator: np.random.Generator
) -> list[list[int]]:
    """Shuffle the rows into batches of like length, and the batches among themselves."""
    noisy_length = np.array([len(row.ids) for row in rows]) + generator.uniform(0, 6, len(rows))
    order = np.argsort(noisy_length, kind="stable")
    batches = [order[i : i + batch_size].tolist() for i in range(0, len(rows), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


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


@dataclass(frozen=True)
class FinetuneOutcome:
    """What fine-tuning gives.

    Attributes:
        model: the encoder with its token classifier.
        predictions: predicted IOB2 tags of each test sentence, one for each token.
        losses: mean loss of each epoch, in nats a word; an `operator` number on private labels.
    """

    model: Bert
    predictions: list[tuple[str, ...]]
    losses: list[float]


def finetune(
    model: Path,
    train: Sequence[Sentence],
    test: Sequence[Sentence],
    tokenizer: Tokenizer,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    max_length: int,
    seed: int,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FinetuneOutcome:
    """Train a token classifier and tag the test sentences.

    AdamW, linear warm-up over a tenth of the updates, linear decay; the loss is over each word's
    first piece. The tags are those of the training sentences' entity types.

    Args:
        model: folder of the pre-trained model.
        train: labelled sentences.
        test: sentences to tag; their own tags are not looked at.
        tokenizer: of the model's vocabulary.
        epochs: passes over the training sentences.
        batch_size: sentences.
        learning_rate: peak.
        max_length: pieces of a row; longer sentences are cut between words.
        seed: public; the classifier's initial values, and the order.
        device: cpu, gpu, tpu or mock-tpu:N; one device of it is used.
        progress: called after each update with (updates done, of how many).

    Raises:
        BadInput: nothing to train on, or a vocabulary that is not the model's.
    """
    start = load(model)
    labels = label_set(train)
    rows = rows_of(train, labels, tokenizer, min(max_length, start.config.max_positions))
    if not rows:
        raise BadInput("there are no sentences to train on", where="fine-tuning")
    if tokenizer.get_vocab_size() > start.config.vocab_size:
        raise BadInput("the tokenizer has more pieces than the model", where="fine-tuning")
    with tf.device(single_device(device)):
        tagger = Tagger(start, labels, seed, batch_size, SpecialIds.of(tokenizer).pad)
        losses = _train(tagger, rows, epochs, learning_rate, seed, progress)
        test_rows = rows_of(test, labels, tokenizer, min(max_length, start.config.max_positions))
        predictions = tags_of(test, test_rows, tagger.tag(test_rows), labels)
    return FinetuneOutcome(tagger.model(), predictions, losses)


def _train(
    tagger: Tagger,
    rows: list[TaggingRow],
    epochs: int,
    learning_rate: float,
    seed: int,
    progress: Callable[[int, int], None],
) -> list[float]:
    generator = np.random.default_rng([seed, 1])
    batches = -(-len(rows) // tagger.batch_size)
    training_config = TrainingConfig(tagger.batch_size, epochs * batches, learning_rate)
    losses, t = [], 0
    for _ in range(epochs):
        total = tf.constant(0.0)
        for picked in epoch_order(rows, tagger.batch_size, generator):
            total += tagger.step([rows[i] for i in picked], training_config.rate(t), t)
            t += 1
            progress(t, training_config.updates)
        losses.append(float(total) / batches)
    return losses


class Tagger:
    """A token classifier in training.

    Args:
        start: the pre-trained model; its MLM head is left behind.
        labels: tags in order of id.
        seed: public, of the classifier's initial values.
        batch_size: rows of every batch.
        pad: id of [PAD].
    """

    def __init__(
        self, start: Bert, labels: tuple[str, ...], seed: int, batch_size: int, pad: int
    ) -> None:
        self._config, self._labels = start.config, labels
        self.batch_size, self._pad = batch_size, pad
        arrays = with_classifier(start, labels, seed).parameters
        self._weights = {n: tf.Variable(a) for n, a in arrays.items()}
        self._means = {n: tf.Variable(np.zeros_like(a)) for n, a in arrays.items()}
        self._squares = {n: tf.Variable(np.zeros_like(a)) for n, a in arrays.items()}
        matrix, vector = tf.TensorSpec((batch_size, None), tf.int32), tf.TensorSpec((), tf.float32)
        lengths = tf.TensorSpec((batch_size,), tf.int32)
        # One graph for all lengths: making a graph costs more than the padding it would save.
        self._step = tf.function(
            self._train_step,
            input_signature=(matrix, lengths, matrix, vector, vector),
            autograph=False,
        )
        self._guess = _guesser(self._weights, start.config, batch_size)

    def step(self, rows: Sequence[TaggingRow], rate: float, t: int) -> Tensor:
        """Make update t (from 0) on at most `batch_size` rows; return the mean loss."""
        batch = batch_of(rows, self.batch_size, self._pad)
        scalars = (tf.constant(rate, tf.float32), tf.constant(t + 1, tf.float32))
        return self._step(*_tensors(batch), *scalars)

    def tag(self, rows: Sequence[TaggingRow]) -> list[NDArray[np.int32]]:
        """Return the best label id at each place of each row."""
        return _tag(rows, self._guess, self.batch_size, self._pad)

    def model(self) -> Bert:
        """Return the model as it is now."""
        arrays = {n: v.numpy() for n, v in self._weights.items()}
        return Bert(self._config, arrays, self._labels)

    def _train_step(
        self, ids: Tensor, lengths: Tensor, labels: Tensor, rate: Tensor, step: Tensor
    ) -> Tensor:
        with tf.GradientTape() as tape:
            logits = tag_logits(Layers(self._weights), self._config, ids, lengths)
            loss = tagging_loss(logits, labels)
        gradients = tape.gradient(loss, self._weights)
        optimizer = AdamW(0.9, 0.999, 0.01)
        for name, weight in self._weights.items():
            gradient = tf.convert_to_tensor(gradients[name])
            moments = (self._means[name], self._squares[name])
            optimizer.apply(name, weight, *moments, gradient, rate, step)
        return loss


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
        max_length: pieces of a row.
        batch_size: rows at once; memory and speed only.
        device: cpu, gpu, tpu or mock-tpu:N; one device of it is used.

    Returns:
        IOB2 tags of each sentence, one for each token.
    """
    rows = rows_of(sentences, model.labels, tokenizer, max_length)
    with tf.device(single_device(device)):
        weights = {n: tf.constant(a) for n, a in model.parameters.items()}
        guess = _guesser(weights, model.config, batch_size)
        guesses = _tag(rows, guess, batch_size, SpecialIds.of(tokenizer).pad)
    return tags_of(sentences, rows, guesses, model.labels)


def _guesser(weights: Variables, config: BertConfig, batch_size: int) -> Callable[..., Tensor]:
    def best(ids: Tensor, lengths: Tensor) -> Tensor:
        logits = tag_logits(Layers(weights), config, ids, lengths)
        return tf.argmax(logits, axis=2, output_type=tf.int32)

    signature = tf.TensorSpec((batch_size, None), tf.int32), tf.TensorSpec((batch_size,), tf.int32)
    guess: Callable[..., Tensor] = tf.function(best, input_signature=signature, autograph=False)
    return guess


def _tag(
    rows: Sequence[TaggingRow], guess: Callable[..., Tensor], batch_size: int, pad: int
) -> list[NDArray[np.int32]]:
    order = np.argsort([len(row.ids) for row in rows], kind="stable")
    out: list[Any] = [None] * len(rows)
    for start in range(0, len(rows), batch_size):
        picked = order[start : start + batch_size]
        batch = batch_of([rows[i] for i in picked], batch_size, pad)
        guesses = guess(tf.constant(batch.ids), tf.constant(batch.lengths)).numpy()
        for i, best in zip(picked, guesses, strict=False):
            out[i] = best
    return out


def tagging_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labelled places: (M, S, tags), (M, S) -> scalar."""
    asked = tf.cast(labels != NO_LABEL, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
    return tf.reduce_sum(losses * asked) / tf.maximum(tf.reduce_sum(asked), 1.0)


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


def _tensors(batch: TaggingBatch) -> tuple[Tensor, ...]:
    return tuple(tf.constant(a) for a in (batch.ids, batch.lengths, batch.labels))


def finetune_privately(
    model: Path | Bert,
    train: Sequence[Sentence],
    tokenizer: Tokenizer,
    *,
    labels: Sequence[str],
    units: Sequence[str],
    plan: ExecutionPlan,
    training_config: TrainingConfig,
    seed: PrivacySeed,
    manifest: bytes,
    init_seed: int,
    max_length: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a token classifier on private sentences and labels.

    Formal guarantee: as `pretrain`'s, for the plan's unit: the model is as private towards the
    sentences, their tags and which of them there are as `plan.event()` says. The starting model
    must be public, or private under a budget of its own, which then adds up with this one.

    What depends on the data in no noised way must be told from outside: the tags there may be,
    and the length of a row. Tags that are not told count as `O`.

    Args:
        model: the pre-trained model, or its folder; its MLM head is left behind.
        train: private sentences with private tags.
        tokenizer: of the model's vocabulary.
        labels: PUBLIC tags in order of id, `O` first; see `ner.sentence.tags_of_types`.
        units: id of each sentence's privacy unit: its document's, its patient's, or its own.
        plan: sampling, clip and noise, over these units.
        training_config: the rest; `updates`, batches and `examples_per_step` (rows of a unit) as
            the plan's.
        seed: secret of the reservation.
        manifest: keyed digests of everything the noise is drawn for.
        init_seed: public; the classifier's initial values.
        max_length: pieces of a row; longer sentences are cut between words. Public.
        checkpoints: where they are kept; private.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `pretrain`; `operator` numbers.

    Returns:
        The encoder with its token classifier; tag with it by `finetune.tag`.

    Raises:
        BadInput: plan, training_config, model and sentences do not fit together.
        Unfinished: `training_config.stop_after_seconds` passed; run again, it goes on.
        ConfideError: the weights stopped being finite, or a checkpoint could not be written.
    """
    start = load(model) if isinstance(model, Path) else model
    if len(units) != len(train):
        raise BadInput("not one unit for each sentence", where="fine-tuning")
    if not labels or labels[0] != "O":
        raise BadInput("the first label is not O", where="labels")
    check_row_length(max_length, start.config.max_positions)
    special = SpecialIds.of(tokenizer)
    store, objective = tagging_units(
        rows_of(train, labels, tokenizer, max_length),
        units,
        max_length=max_length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=special.pad,
    )
    return fit(
        with_classifier(start, tuple(labels), init_seed),
        objective,
        store=store,
        plan=plan,
        training_config=training_config,
        seed=seed,
        manifest=manifest,
        order_seed=init_seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
    )
