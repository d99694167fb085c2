"""Sentences as rows of piece ids with a label at each word's first piece, and back again.

A sentence longer than a row is cut into several rows between words, so that every word is
answered for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.ner.sentence import Sentence
from dp_core.vocab.special_ids import SpecialIds

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
