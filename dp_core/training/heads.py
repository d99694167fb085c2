"""Heads of fine-tuning: labelled texts as rows, fresh parameters, objective and predictions.

`TaggingHead` extracts entities by a token classifier, with or without a CRF; `ClassHead` classifies
texts and pairs of texts by the state of a row's first token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.data.hashing import U64
from dp_core.data.labelled_text import LabelledText, Sentence
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.models.architectures import tensors_of
from dp_core.models.bert import (
    class_logits,
    class_row_losses,
    crf_row_losses,
    tag_logits,
    tag_row_losses,
)
from dp_core.models.parameters import (
    CLASSIFIER,
    HEADS,
    POOLER,
    TAGGER,
    TRANSITIONS,
    Bert,
    EncoderConfig,
    initial_values,
)
from dp_core.nn import Layers, Tensor, best_tags
from dp_core.training.batches import Examples, Indices
from dp_core.training.devices import single_device
from dp_core.training.objectives import Objective

OVERLAP = 0.5  # share of a window that the next window repeats
_TOGETHER = 32  # rows whose predictions are computed at once
_STEP = 8  # rows are padded to a multiple of this
Floats = NDArray[np.float32]
Shapes = dict[str, tuple[int, ...]]
Item = TypeVar("Item")
Prediction = TypeVar("Prediction")


@dataclass(frozen=True)
class LabelledRow:
    """A row of token ids that was cut from a labelled text.

    Attributes:
        ids: ids of the row's pieces, including markers.
        positions: for each tagged word, the position of its first piece; for a class, the position
            of the second text's first piece, or 0 without a second text.
        labels: number of the label at each position; −1 if it is not in the list of labels.
        item: index of the text.
        words: index in the text of each tagged word.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    labels: tuple[int, ...]
    item: int
    words: tuple[int, ...] = ()


@dataclass(frozen=True)
class Head(ABC, Generic[Item, Prediction]):
    """A head on an encoder, which is learned from labelled texts.

    Attributes:
        labels: labels in order of id; public knowledge even if the texts are private.
    """

    labels: tuple[str, ...]

    @abstractmethod
    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each parameter of the head."""

    @abstractmethod
    def rows(
        self, items: Sequence[Item], tokenizer: Tokenizer, max_length: int
    ) -> list[LabelledRow]:
        """Return the rows of the texts, of at most `max_length` pieces including markers.

        Each row depends only on its text.
        """

    @abstractmethod
    def objective(self, rows: Sequence[LabelledRow], max_length: int) -> Objective:
        """Return the training objective for rows in the order of a store."""

    @abstractmethod
    def logits(self, layers: Layers, config: EncoderConfig, *inputs: Tensor) -> Tensor:
        """Return the logits of M rows.

        Args:
            layers: the layers, which hold the parameters.
            config: the shape.
            inputs: ids (M, S), lengths (M,), and the first of each row's `positions` (M,), int32.

        Returns:
            (M, ..., labels).
        """

    @abstractmethod
    def decoded(
        self,
        items: Sequence[Item],
        rows: Sequence[LabelledRow],
        logits: Sequence[Floats],
        transitions: Floats | None,
    ) -> list[Prediction]:
        """Return the prediction for each text from the logits of its rows."""

    def begin(self, start: Bert, seed: int) -> Bert:
        """Return the encoder with this head, fresh from a public seed; other heads are dropped."""
        encoder = {n: a for n, a in start.parameters.items() if not n.startswith(HEADS)}
        shapes = self.shapes(start.config.hidden)
        shapes = {name: s for name, s in shapes.items() if tensors_of(name, start.config)}
        fresh = initial_values(shapes, start.config.initializer_range, seed)
        return Bert(start.config, encoder | fresh, self.labels)

    def predict(
        self,
        model: Bert,
        items: Sequence[Item],
        tokenizer: Tokenizer,
        *,
        max_length: int,
        device: str = "cpu",
    ) -> list[Prediction]:
        """Return the model's prediction for each text; labels of the texts have no effect.

        Args:
            model: model with this head.
            items: the texts.
            tokenizer: tokenizer with the model's vocabulary.
            max_length: largest number of pieces of a row; at most the model's positions are used.
            device: cpu, gpu, tpu or mock-tpu:N; one of its devices is used.
        """
        rows = self.rows(items, tokenizer, min(max_length, model.config.max_positions))
        with tf.device(single_device(device)):
            logits = self._logits_of_rows(model, rows, SpecialIds.of(tokenizer).pad)
        return self.decoded(items, rows, logits, model.parameters.get(TRANSITIONS))

    def _logits_of_rows(self, model: Bert, rows: Sequence[LabelledRow], pad: int) -> list[Floats]:
        """Return the logits of each row, computed in batches of rows of about the same length."""
        layers = Layers({name: tf.constant(a) for name, a in model.parameters.items()})

        # One graph serves all lengths: tracing a graph costs more than the padding that it saves.
        of_row = tf.TensorSpec((_TOGETHER,), tf.int32)
        signature = tf.TensorSpec((_TOGETHER, None), tf.int32), of_row, of_row
        logits = partial(self.logits, layers, model.config)
        compiled = tf.function(logits, input_signature=signature, autograph=False)
        order = np.argsort([len(row.ids) for row in rows], kind="stable")
        logits_of: dict[int, Floats] = {}
        for start in range(0, len(rows), _TOGETHER):
            batch = order[start : start + _TOGETHER]
            width = min(padded(len(rows[batch[-1]].ids)), model.config.max_positions)
            ids = np.full((_TOGETHER, width), pad, np.int32)
            lengths = np.ones(_TOGETHER, np.int32)  # a padding row attends to its first position
            seconds = np.zeros(_TOGETHER, np.int32)
            for i, number in enumerate(batch):
                row = rows[number]
                lengths[i], seconds[i] = len(row.ids), next(iter(row.positions), 0)
                ids[i, : lengths[i]] = row.ids
            made = compiled(ids, lengths, seconds).numpy()
            logits_of |= dict(zip(batch.tolist(), made, strict=False))
        return [logits_of[i] for i in range(len(rows))]


def _answers(rows: Sequence[LabelledRow], predictions: int) -> Examples:
    """Return the labels at K positions of rows in the store's order; nothing is random."""

    def examples(store: TokenStore, numbers: Indices, keys: U64) -> MaskedRows:
        shape = (len(numbers), predictions)
        positions, labels = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for i, number in enumerate(numbers):
            row = rows[number]
            positions[i, : len(row.positions)] = row.positions
            labels[i, : len(row.labels)] = row.labels
        weights = (labels >= 0).astype(np.float32)
        ids = store.tokens[numbers].astype(np.int32)
        return MaskedRows(ids, positions, np.maximum(labels, 0), weights)

    return examples


def padded(length: int) -> int:
    """Return the padded length of a row."""
    return -(-length // _STEP) * _STEP


@dataclass(frozen=True)
class TaggingHead(Head[Sentence, tuple[str, ...]]):
    """A classifier of words by their tags, over windows of text.

    A text that is longer than a row is read in overlapping windows. Each word is learned and tagged
    once, in the window with the most context around it; in other windows it is only context. A word
    is tagged at its first token.

    Attributes:
        labels: tags in order of id, `O` first; for private text they must be public knowledge. A
            tag outside the list counts as `O`.
        crf: learn the tags of a row jointly, and decode the best sequence.
        overlap: share of a window that the next window repeats, for texts longer than a row.
    """

    crf: bool = False
    overlap: float = OVERLAP

    def __post_init__(self) -> None:
        if not self.labels or self.labels[0] != "O":
            raise BadInput("the first label is not O", where="labels")

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the token classifier, and of a CRF's transitions."""
        n = len(self.labels)
        shapes: Shapes = {f"{TAGGER}/kernel": (hidden, n), f"{TAGGER}/bias": (n,)}
        return shapes | {TRANSITIONS: (n, n)} if self.crf else shapes

    def rows(
        self, items: Sequence[Sentence], tokenizer: Tokenizer, max_length: int
    ) -> list[LabelledRow]:
        """Cut sentences into rows of at most `max_length` pieces, including [CLS] and [SEP]."""
        special = SpecialIds.of(tokenizer)
        label_ids = {label: i for i, label in enumerate(self.labels)}
        # A space belongs to a byte-level word, so words are read as in running text.
        spaced = [[" " * (i > 0) + word for i, word in enumerate(s.tokens)] for s in items]
        encodings = tokenizer.encode_batch(spaced, is_pretokenized=True, add_special_tokens=False)
        rows = []
        for index, (sentence, encoding) in enumerate(zip(items, encodings, strict=True)):
            pieces: dict[int, list[int]] = {}
            for piece, word in zip(encoding.ids, encoding.word_ids, strict=True):
                assert word is not None  # noqa: S101 - no special tokens were added
                pieces.setdefault(word, []).append(piece)
            words = list(pieces)
            whole = [pieces[word][: max_length - 2] for word in words]
            for window in windows([len(p) for p in whole], max_length - 2, self.overlap):
                shown = whole[window.begin : window.end]
                begins = [1, *(1 + end for end in accumulate(map(len, shown)))]  # after [CLS]
                tagged = range(window.first, window.last)
                rows.append(
                    LabelledRow(
                        (special.cls, *(i for p in shown for i in p), special.sep),
                        tuple(begins[i - window.begin] for i in tagged),
                        tuple(label_ids.get(sentence.tags[words[i]], 0) for i in tagged),
                        index,
                        tuple(words[i] for i in tagged),
                    )
                )
        return rows

    def objective(self, rows: Sequence[LabelledRow], max_length: int) -> Objective:
        """Return the objective that predicts the tag of each word in the rows of a store.

        K is S − 2, which bounds the number of words in a row.
        """
        examples = _answers(rows, max_length - 2)
        if self.crf:
            return Objective("tagging with a CRF", examples, crf_row_losses)
        return Objective("tagging", examples, tag_row_losses)

    def logits(self, layers: Layers, config: EncoderConfig, *inputs: Tensor) -> Tensor:
        """Return the logits of the tags at every piece: (M, S, tags)."""
        ids, lengths, _ = inputs
        logits = tag_logits(layers, config, ids, lengths)  # (M·S, tags)
        return tf.reshape(logits, (*tf.unstack(tf.shape(ids)), len(self.labels)))

    def decoded(
        self,
        items: Sequence[Sentence],
        rows: Sequence[LabelledRow],
        logits: Sequence[Floats],
        transitions: Floats | None,
    ) -> list[tuple[str, ...]]:
        """Return IOB2 tags of each sentence, combined over its windows, one for each token.

        Without a CRF each word is decoded separately; with a CRF an `I-` tag only follows a tag of
        its type. A word without pieces is `O`.
        """
        words: list[list[int]] = [[] for _ in items]
        scores: list[list[Floats]] = [[] for _ in items]
        for row, of_row in zip(rows, logits, strict=True):
            words[row.item] += row.words
            scores[row.item].append(of_row[list(row.positions)])
        begins = np.array([not label.startswith("I-") for label in self.labels])
        follows = np.array([[_may_follow(a, b) for b in self.labels] for a in self.labels])
        out = [["O"] * len(s.tokens) for s in items]
        for tags, places, parts in zip(out, words, scores, strict=True):
            if not places:
                continue
            chain = np.concatenate(parts)
            if transitions is None:
                best = chain.argmax(1)
            else:
                best = best_tags(chain, transitions, begins, follows)
            for place, label in zip(places, best, strict=True):
                tags[place] = self.labels[int(label)]
        return [tuple(tags) for tags in out]


@dataclass(frozen=True)
class Window:
    """A window shows words `begin` to `end` − 1, and tags words `first` to `last` − 1."""

    begin: int
    end: int
    first: int
    last: int


def windows(sizes: Sequence[int], room: int, overlap: float) -> list[Window]:
    """Return the windows of a text: every word is tagged in one of them, in order.

    A word is tagged in the window that gives it the most context, measured by the smaller of the
    numbers of pieces before and after it, except at the ends of the text. Of two equal windows the
    first tags it. A window repeats at most a share `overlap` of its predecessor's room, and the
    last window is extended to the left. Windows that would tag no word are left out.

    Args:
        sizes: pieces of each word, 1 to `room`.
        room: pieces of a window.
        overlap: from 0 to below 1.
    """
    if not sizes:
        return []
    ends = [0, *accumulate(sizes)]  # pieces before each word, and the total
    n = len(sizes)
    extents: list[tuple[int, int]] = []
    begin = end = 0
    while end < n:
        end = begin
        while end < n and ends[end + 1] - ends[begin] <= room:
            end += 1
        if end == n:  # extend the last window to the left
            while begin and ends[n] - ends[begin - 1] <= room:
                begin -= 1
        extents.append((begin, end))
        while begin < end and (
            ends[end] - ends[begin] > overlap * room
            or (end < n and ends[end + 1] - ends[begin] > room)
        ):
            begin += 1
    firsts = [0]
    for (_, end), (later, _) in pairwise(extents):
        # After word i the earlier window shows ends[end] − ends[i + 1] pieces; before it the later
        # window shows ends[i] − ends[later]. The later window tags it if the latter is larger.
        border = max(firsts[-1], later)
        while border < end and ends[end] - ends[border + 1] >= ends[border] - ends[later]:
            border += 1
        firsts.append(border)
    tagged = zip(extents, firsts, [*firsts[1:], n], strict=True)
    return [Window(*extent, first, last) for extent, first, last in tagged if first < last]


def _may_follow(before: str, tag: str) -> bool:
    return not tag.startswith("I-") or before[2:] == tag[2:]


@dataclass(frozen=True)
class ClassHead(Head[LabelledText, str]):
    """A classifier of whole rows.

    A row is [CLS] first [SEP], followed by second [SEP] if the text is a pair.

    Attributes:
        labels: two or more classes in order of id; for private text they must be public
            knowledge. A text of another class teaches nothing.
    """

    def __post_init__(self) -> None:
        if len(set(self.labels)) < max(2, len(self.labels)):
            raise PrivateTextRefusal("fewer than two classes, or one of them twice", where="labels")

    def shapes(self, hidden: int) -> Shapes:
        """Return the shapes of the pooler and the classifier."""
        return {
            f"{POOLER}/kernel": (hidden, hidden),
            f"{POOLER}/bias": (hidden,),
            f"{CLASSIFIER}/kernel": (hidden, len(self.labels)),
            f"{CLASSIFIER}/bias": (len(self.labels),),
        }

    def rows(
        self, items: Sequence[LabelledText], tokenizer: Tokenizer, max_length: int
    ) -> list[LabelledRow]:
        """Return a row for each text; the longer text of a pair is shortened until both fit."""
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
            rows.append(LabelledRow(tuple(ids), (begins,), (numbers.get(text.label, -1),), i))
        return rows

    def objective(self, rows: Sequence[LabelledRow], max_length: int) -> Objective:
        """Return the objective that predicts the class of each row of a store."""
        return Objective("classification", _answers(rows, 1), class_row_losses)

    def logits(self, layers: Layers, config: EncoderConfig, *inputs: Tensor) -> Tensor:
        """Return the logits of the classes: (M, classes)."""
        ids, lengths, begins = inputs
        return class_logits(layers, config, ids, lengths, begins[:, None])

    def decoded(
        self,
        items: Sequence[LabelledText],
        rows: Sequence[LabelledRow],
        logits: Sequence[Floats],
        transitions: Floats | None,
    ) -> list[str]:
        """Return the most probable class of each text."""
        return [self.labels[int(of_row.argmax())] for of_row in logits]


def _cut(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Shorten the longer one until both fit."""
    kept = min(len(first), max(room - len(second), -(-room // 2)))
    return first[:kept], second[: room - kept]
