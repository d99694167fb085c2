"""The head for entity extraction: a token classifier, alone or under a CRF, over windows of text.

A text that does not fit into a row is read in windows that overlap. Each word is learned and tagged
once, in the window that shows most of the text around it; in the others it is context alone. A
word is asked at its first token.
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
from dp_core.data.masking import MaskedRows
from dp_core.data.ner import Sentence
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.models.bert import crf_row_losses, tag_logits, tag_row_losses
from dp_core.models.parameters import HEADS, TAGGER, TRANSITIONS, Bert, initial_values
from dp_core.nn.crf import best_tags
from dp_core.nn.layers import Layers, Tensor
from dp_core.training.batches import Indices
from dp_core.training.devices import single_device
from dp_core.training.objectives import Objective

OVERLAP = 0.5  # share of a window that the next one repeats
_TOGETHER = 32  # rows that are tagged at once
_STEP = 8  # rows that are tagged are padded to a multiple of this
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TaggingRow:
    """One row: a sentence, or a window of it.

    Attributes:
        ids: [CLS] pieces [SEP].
        firsts: place in `ids` of the first piece of each word that is asked here.
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
        labels: tags in order of id, `O` first; of private text they must be public knowledge. A
            tag that is none of them counts as `O`.
        crf: the tags of a row are learned together, and the best sequence is taken.
        overlap: share of a window that the next one repeats, of texts longer than a row.
    """

    labels: tuple[str, ...]
    crf: bool = False
    overlap: float = OVERLAP

    def __post_init__(self) -> None:
        if not self.labels or self.labels[0] != "O":
            raise BadInput("the first label is not O", where="labels")

    def begin(self, start: Bert, seed: int) -> Bert:
        """Return the encoder with a fresh token classifier; other heads are left behind."""
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
        """Cut sentences into rows of at most `max_length` pieces, [CLS] and [SEP] among them."""
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
                begins = [1, *(1 + end for end in ends)]  # behind [CLS]
                own = range(window.first, window.last)
                rows.append(
                    TaggingRow(
                        (
                            special.cls,
                            *(i for p in whole[window.begin : window.end] for i in p),
                            special.sep,
                        ),
                        tuple(begins[i - window.begin] for i in own),
                        tuple(label_ids.get(sentence.tags[words[i]], 0) for i in own),
                        index,
                        tuple(words[i] for i in own),
                    )
                )
        return rows

    def objective(self, rows: Sequence[TaggingRow], max_length: int) -> Objective:
        """Return what the rows, in a store's order, ask: each word's tag."""
        answers = _Answers(rows, max_length)
        if self.crf:
            return Objective("tagging with a CRF", answers.examples, crf_row_losses)
        return Objective("tagging", answers.examples, tag_row_losses)


@dataclass(frozen=True)
class Window:
    """Words that one row shows, and those of them that are asked there: both without the end."""

    begin: int
    end: int
    first: int
    last: int


def windows(sizes: Sequence[int], room: int, overlap: float) -> list[Window]:
    """Return the windows of a text: every word is asked in one of them, in order.

    A word is asked where it has most context: where the smaller of the numbers of pieces before and
    behind it is largest, the ends of the text aside, of two alike in the first. A window repeats
    at most a share `overlap` of its room of the one before, and the last is filled from before.
    Windows in which no word would be asked are left out.

    Args:
        sizes: pieces of each word, 1 to `room`.
        room: pieces of a window.
        overlap: 0 … below 1.
    """
    if not sizes:
        return []
    ends = [0, *accumulate(sizes)]  # pieces before each word, and in all
    n = len(sizes)
    extents: list[tuple[int, int]] = []
    begin = end = 0
    while end < n:
        end = begin
        while end < n and ends[end + 1] - ends[begin] <= room:
            end += 1
        if end == n:  # the last: as much as fits
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
        # Behind word i the one window shows ends[end] − ends[i + 1] pieces, before it the next one
        # ends[i] − ends[later]: the word goes to the next one as soon as the latter is larger.
        border = max(firsts[-1], later)
        while border < end and ends[end] - ends[border + 1] >= ends[border] - ends[later]:
            border += 1
        firsts.append(border)
    asked = zip(extents, firsts, [*firsts[1:], n], strict=True)
    return [Window(*extent, first, last) for extent, first, last in asked if first < last]


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
    overlap: float = OVERLAP,
    device: str = "cpu",
) -> list[tuple[str, ...]]:
    """Tag sentences with a model that has a token classifier, by its CRF where it has one.

    Args:
        model: with its classifier and labels.
        sentences: their own tags are not looked at.
        tokenizer: of the model's vocabulary.
        max_length: pieces of a row, at most; the model's positions bound them too.
        overlap: as of `TaggingHead`.
        device: cpu, gpu, tpu or mock-tpu:N; one device of it is used.

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
    """Return each sentence's tags, over its windows; a word without pieces is `O`.

    Args:
        sentences: that the rows were cut from.
        rows: the rows, those of a sentence in its order.
        logits: for each row, (words that are asked in it, tags).
        labels: tags in order of id.
        transitions: of a CRF: (tags, tags); None takes each word's likeliest tag by itself. With a
            CRF an `I-` tag follows one of its own type alone.
    """
    words: list[list[int]] = [[] for _ in sentences]
    scores: list[list[Floats]] = [[] for _ in sentences]
    for row, own in zip(rows, logits, strict=True):
        words[row.item] += row.words
        scores[row.item].append(own)
    begins = np.array([not label.startswith("I-") for label in labels])
    follows = np.array([[_may_follow(one, other) for other in labels] for one in labels])
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
    """Return each row's logits at the words that are asked in it."""
    layers = Layers({name: tf.constant(a) for name, a in model.parameters.items()})

    def all_logits(ids: Tensor, lengths: Tensor) -> Tensor:
        logits = tag_logits(layers, model.config, ids, lengths)  # (M·S, tags)
        return tf.reshape(logits, (*tf.unstack(tf.shape(ids)), len(model.labels)))

    # One graph for all lengths: making a graph costs more than the padding it would save.
    shapes = tf.TensorSpec((_TOGETHER, None), tf.int32), tf.TensorSpec((_TOGETHER,), tf.int32)
    compiled = tf.function(all_logits, input_signature=shapes, autograph=False)
    order = np.argsort([len(row.ids) for row in rows], kind="stable")
    found: dict[int, Floats] = {}
    for start in range(0, len(rows), _TOGETHER):
        batch = order[start : start + _TOGETHER]
        width = min(padded(len(rows[batch[-1]].ids)), model.config.max_positions)
        ids = np.full((_TOGETHER, width), pad, np.int32)
        lengths = np.ones(_TOGETHER, np.int32)  # a padding row attends to its first position
        for i, number in enumerate(batch):
            lengths[i] = len(rows[number].ids)
            ids[i, : lengths[i]] = rows[number].ids
        for number, own in zip(batch, compiled(ids, lengths).numpy(), strict=False):
            found[int(number)] = own[list(rows[number].firsts)]
    return [found[i] for i in range(len(rows))]


def padded(length: int) -> int:
    """Return the length of a row with its padding."""
    return -(-length // _STEP) * _STEP
