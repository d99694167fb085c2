"""Head for entity extraction: a token classifier, with or without a CRF, over windows of text.

A text that is longer than a row is read in overlapping windows. Each word is learned and tagged
once, in the window with the most context around it; in other windows it is only context. A word
is tagged at its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    initial_values,
)
from dp_core.nn import Layers, Tensor, best_tags
from dp_core.training.batches import Indices
from dp_core.training.devices import single_device
from dp_core.training.objectives import Objective

OVERLAP = 0.5  # share of a window that the next window repeats
_TOGETHER = 32  # rows that are tagged at once
_STEP = 8  # rows are padded to a multiple of this for tagging
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TaggingRow:
    """One row: a sentence, or a window of it.

    Attributes:
        ids: [CLS] pieces [SEP].
        firsts: position in `ids` of the first piece of each word that is tagged in this row.
        labels: label of each of these words.
        item: index of the sentence.
        words: index in the sentence of each of these words.
    """

    ids: tuple[int, ...]
    firsts: tuple[int, ...]
    labels: tuple[int, ...]
    item: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class TaggingHead:
    """A classifier of words by their tags.

    Attributes:
        labels: tags in order of id, `O` first; for private text they must be public knowledge. A
            tag outside the list counts as `O`.
        crf: learn the tags of a row jointly, and decode the best sequence.
        overlap: share of a window that the next window repeats, for texts longer than a row.
    """

    labels: tuple[str, ...]
    crf: bool = False
    overlap: float = OVERLAP

    def __post_init__(self) -> None:
        if not self.labels or self.labels[0] != "O":
            raise BadInput("the first label is not O", where="labels")

    def begin(self, start: Bert, seed: int) -> Bert:
        """Return the encoder with a fresh token classifier; other heads are dropped."""
        d, n = start.config.hidden, len(self.labels)
        shapes: dict[str, tuple[int, ...]] = {f"{TAGGER}/kernel": (d, n), f"{TAGGER}/bias": (n,)}
        if self.crf:
            shapes[TRANSITIONS] = (n, n)
        encoder = {n: a for n, a in start.parameters.items() if not n.startswith(HEADS)}
        fresh = initial_values(shapes, start.config.initializer_range, seed)
        return Bert(start.config, encoder | fresh, self.labels)

    def rows(
        self, items: Sequence[Sentence], tokenizer: Tokenizer, max_length: int
    ) -> list[TaggingRow]:
        """Cut sentences into rows of at most `max_length` pieces, including [CLS] and [SEP]."""
        special = SpecialIds.of(tokenizer)
        label_ids = {label: i for i, label in enumerate(self.labels)}
        encodings = tokenizer.encode_batch(
            [list(s.tokens) for s in items], is_pretokenized=True, add_special_tokens=False
        )
        rows = []
        for index, (sentence, encoding) in enumerate(zip(items, encodings, strict=True)):
            pieces: dict[int, list[int]] = {}
            for piece, word in zip(encoding.ids, encoding.word_ids, strict=True):
                assert word is not None  # noqa: S101 - no special tokens were added
                pieces.setdefault(word, []).append(piece)
            words = list(pieces)
            whole = [pieces[word][: max_length - 2] for word in words]
            for window in windows([len(p) for p in whole], max_length - 2, self.overlap):
                ends = list(accumulate(len(p) for p in whole[window.begin : window.end]))
                begins = [1, *(1 + end for end in ends)]  # after [CLS]
                tagged = range(window.first, window.last)
                rows.append(
                    TaggingRow(
                        (
                            special.cls,
                            *(i for p in whole[window.begin : window.end] for i in p),
                            special.sep,
                        ),
                        tuple(begins[i - window.begin] for i in tagged),
                        tuple(label_ids.get(sentence.tags[words[i]], 0) for i in tagged),
                        index,
                        tuple(words[i] for i in tagged),
                    )
                )
        return rows

    def objective(self, rows: Sequence[TaggingRow], max_length: int) -> Objective:
        """Return the objective that predicts the tag of each word in the rows of a store."""
        answers = _Answers(rows, max_length)
        if self.crf:
            return Objective("tagging with a CRF", answers.examples, crf_row_losses)
        return Objective("tagging", answers.examples, tag_row_losses)


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


class _Answers:
    """The tags of rows in the store's order."""

    def __init__(self, rows: Sequence[TaggingRow], max_length: int) -> None:
        self._rows, self._length = rows, max_length

    def examples(self, store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
        """Return the tag of each word at its first piece; nothing is masked or random.

        Returns:
            K = S − 2 predictions of each row, which bounds the number of words in a row.
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
    overlap: float = OVERLAP,
    device: str = "cpu",
) -> list[tuple[str, ...]]:
    """Tag sentences with a model's token classifier, and with its CRF if it has one.

    Args:
        model: model with its classifier and labels.
        sentences: sentences; their tags are ignored.
        tokenizer: tokenizer with the model's vocabulary.
        max_length: largest number of pieces of a row, at most the model's positions.
        overlap: as in `TaggingHead`.
        device: cpu, gpu, tpu or mock-tpu:N; one of its devices is used.

    Returns:
        IOB2 tags of each sentence, one for each token.
    """
    head = TaggingHead(model.labels, overlap=overlap)
    rows = head.rows(sentences, tokenizer, min(max_length, model.config.max_positions))
    with tf.device(single_device(device)):
        logits = _logits(model, rows, SpecialIds.of(tokenizer).pad)
    return tags_of(sentences, rows, logits, model.labels, model.parameters.get(TRANSITIONS))


def tags_of(
    sentences: Sequence[Sentence],
    rows: Sequence[TaggingRow],
    logits: Sequence[Floats],
    labels: Sequence[str],
    transitions: Floats | None = None,
) -> list[tuple[str, ...]]:
    """Return each sentence's tags, combined over its windows; a word without pieces is `O`.

    Args:
        sentences: sentences that the rows were cut from.
        rows: the rows; rows of one sentence are in order.
        logits: for each row, (words that it tags, tags).
        labels: tags in order of id.
        transitions: transition scores of a CRF, (tags, tags). None decodes each word separately.
            With a CRF an `I-` tag only follows a tag of its type.
    """
    words: list[list[int]] = [[] for _ in sentences]
    scores: list[list[Floats]] = [[] for _ in sentences]
    for row, row_logits in zip(rows, logits, strict=True):
        words[row.item] += row.words
        scores[row.item].append(row_logits)
    begins = np.array([not label.startswith("I-") for label in labels])
    follows = np.array([[_may_follow(before, tag) for tag in labels] for before in labels])
    out = [["O"] * len(s.tokens) for s in sentences]
    for tags, places, parts in zip(out, words, scores, strict=True):
        if not places:
            continue
        chain = np.concatenate(parts)
        if transitions is None:
            best = chain.argmax(1)
        else:
            best = best_tags(chain, transitions, begins, follows)
        for place, label in zip(places, best, strict=True):
            tags[place] = labels[int(label)]
    return [tuple(tags) for tags in out]


def _may_follow(before: str, tag: str) -> bool:
    return not tag.startswith("I-") or before[2:] == tag[2:]


def _logits(model: Bert, rows: Sequence[TaggingRow], pad: int) -> list[Floats]:
    """Return each row's logits at the words that it tags."""
    layers = Layers({name: tf.constant(a) for name, a in model.parameters.items()})

    def all_logits(ids: Tensor, lengths: Tensor) -> Tensor:
        logits = tag_logits(layers, model.config, ids, lengths)  # (M·S, tags)
        return tf.reshape(logits, (*tf.unstack(tf.shape(ids)), len(model.labels)))

    # One graph serves all lengths: tracing a graph costs more than the padding that it would save.
    shapes = tf.TensorSpec((_TOGETHER, None), tf.int32), tf.TensorSpec((_TOGETHER,), tf.int32)
    compiled = tf.function(all_logits, input_signature=shapes, autograph=False)
    order = np.argsort([len(row.ids) for row in rows], kind="stable")
    logits_of: dict[int, Floats] = {}
    for start in range(0, len(rows), _TOGETHER):
        batch = order[start : start + _TOGETHER]
        width = min(padded(len(rows[batch[-1]].ids)), model.config.max_positions)
        ids = np.full((_TOGETHER, width), pad, np.int32)
        lengths = np.ones(_TOGETHER, np.int32)  # a padding row attends to its first position
        for i, number in enumerate(batch):
            lengths[i] = len(rows[number].ids)
            ids[i, : lengths[i]] = rows[number].ids
        for number, row_logits in zip(batch, compiled(ids, lengths).numpy(), strict=False):
            logits_of[int(number)] = row_logits[list(rows[number].firsts)]
    return [logits_of[i] for i in range(len(rows))]


def padded(length: int) -> int:
    """Return the padded length of a row."""
    return -(-length // _STEP) * _STEP


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
        return Objective("classification", _ClassAnswers(rows).examples, class_row_losses)


def _cut(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """Shorten the longer one until both fit."""
    kept = min(len(first), max(room - len(second), -(-room // 2)))
    return first[:kept], second[: room - kept]


class _ClassAnswers:
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
