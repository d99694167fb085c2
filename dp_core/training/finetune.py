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

from dp_core.bert.config import BertConfig
from dp_core.bert.heads import tag_logits
from dp_core.bert.layers import Layers, Tensor, Variables
from dp_core.bert.parameters import HEADS, TAGGER, Bert, initial_values
from dp_core.bert.weights import load
from dp_core.errors import BadInput
from dp_core.ner.sentence import Sentence, label_set
from dp_core.training.adamw import AdamW
from dp_core.training.devices import single_device
from dp_core.training.recipe import Recipe
from dp_core.training.tagging import (
    NO_LABEL,
    TaggingBatch,
    TaggingRow,
    batch_of,
    epoch_order,
    rows_of,
    tags_of,
)
from dp_core.vocab.special_ids import SpecialIds


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
    recipe = Recipe(tagger.batch_size, epochs * batches, learning_rate)
    losses, t = [], 0
    for _ in range(epochs):
        total = tf.constant(0.0)
        for picked in epoch_order(rows, tagger.batch_size, generator):
            total += tagger.step([rows[i] for i in picked], recipe.rate(t), t)
            t += 1
            progress(t, recipe.updates)
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
