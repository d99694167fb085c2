"""Subword vocabularies of both kinds, the words that they count, and their fit to a text.

Words are counted, or gathered into sets, by functions of one shard. A worker receives everything by
the fields of the function. It never receives a privacy seed, but at most a key for sampling the
words that count, from which the noise cannot be derived.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.data.corpus import Shard, read_shard
from dp_core.data.privacy_units import in_blocks, is_held_out, units_of
from dp_core.data.tokens import (
    BERT,
    SPECIAL_TOKENS,
    HeldItems,
    Segmentation,
    added_counts,
    bert_segmentation,
    held_items,
    without_surrogates,
)
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary import byte_level, wordpiece
from dp_core.vocabulary.tokenizer_files import GPT2

if TYPE_CHECKING:
    from dp_core.cluster.shard_map import ShardMap

SubwordKind = Literal["wordpiece", "byte-level-bpe"]


def segmentation(
    kind: SubwordKind,
    *,
    lowercase: bool = True,
    strip_accents: bool = True,
    placeholders: Sequence[str] = (),
) -> Segmentation:
    """Return the words of a vocabulary that is learned; byte-level ones keep case and accents.

    Raises:
        BadInput: a placeholder is a special token, which no text may contain.
    """
    if special := sorted(set(placeholders) & set(SPECIAL_TOKENS)):
        raise BadInput(f"{special[0]} is a special token", where="placeholders")
    if kind == "wordpiece":
        return bert_segmentation(lowercase, strip_accents, placeholders)
    return replace(GPT2, placeholders=tuple(placeholders))


def learn(
    counts: Mapping[str, int], size: int, whole: Sequence[str], words: Segmentation
) -> Tokenizer:
    """Return a tokenizer of the kind of the counted words; see `wordpiece.learn`."""
    if words.pre_tokenizer == BERT.pre_tokenizer:
        return wordpiece.learn(counts, size, whole, words)
    return byte_level.learn(counts, size, whole, words)


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return SHA-256 over the tokens in order of id, and over unusual words, in hex."""
    ids = tokenizer.get_vocab()
    digest = hashlib.sha256()
    for token in sorted(ids, key=ids.__getitem__):
        digest.update(f"{len(token)} {token}\n".encode())
    if (words := Segmentation.of(tokenizer)) not in (BERT, GPT2):
        digest.update(repr(words).encode())
    return digest.hexdigest()


def whole_words(counts: Mapping[str, int], tokenizer: Tokenizer) -> frozenset[str]:
    """Return the words of `counts` that are one token of a vocabulary."""
    return frozenset(counts.keys() & tokenizer.get_vocab().keys())


def in_turns(*sources: Mapping[str, int]) -> list[str]:
    """Return all distinct words: the most frequent of every source, then the next of every source.

    Alternating needs no common scale for the counts of different sources. For released noised
    counts this is post-processing.
    """
    ordered = (sorted(counts, key=lambda word: (-counts[word], word)) for counts in sources)
    turns = chain.from_iterable(zip_longest(*ordered))
    return list(dict.fromkeys(word for word in turns if word is not None))


@dataclass(frozen=True)
class Fit:
    """How a vocabulary fits a text, over all its words.

    Attributes:
        coverage: share of the words that are one token.
        fertility: tokens per word, 1 or more.
        unknown: share of the words that contain a character outside the vocabulary.
    """

    coverage: float
    fertility: float
    unknown: float


def fit(tokenizer: Tokenizer, texts: Iterable[str]) -> Fit | None:
    """Return the fit of a vocabulary to texts, or None if they have no word."""
    words = tokens = whole = unknown = 0
    mark = tokenizer.token_to_id("[UNK]")
    for text in texts:
        encoding = tokenizer.encode(without_surrogates(text), add_special_tokens=False)
        pieces = Counter(encoding.word_ids)
        marked = {w for w, i in zip(encoding.word_ids, encoding.ids, strict=True) if i == mark}
        words += len(pieces)
        tokens += len(encoding.ids)
        whole += sum(number == 1 and word not in marked for word, number in pieces.items())
        unknown += len(marked)
    return Fit(whole / words, tokens / words, unknown / words) if words else None


@dataclass(frozen=True)
class UnitWords:
    """Reads the units of a shard and their words.

    Attributes:
        unit: the privacy unit.
        words_per_unit: the length of a tuple, for the unit `example`.
        words: the segmentation of texts into words, which the tokenizer shares.
        holdout: share of units that are left out.
        holdout_key: public coins that choose these units.
    """

    unit: PrivacyUnit
    words_per_unit: int
    words: Segmentation = BERT
    holdout: float = 0.0
    holdout_key: bytes = b""

    def __call__(self, shard: Shard) -> Iterator[HeldItems]:
        """Yield the distinct words of the shard's units, in blocks of units."""
        units = units_of(read_shard(shard), self.unit, self.words_per_unit)
        kept = (u for u in units if not is_held_out(u.unit_id, self.holdout, self.holdout_key))
        for block in in_blocks(kept):
            words = self.words.encode(block.texts)
            yield held_items(block.unit_ids, words, words.starts[block.rows])


def _counts_of_shard(words: UnitWords, shard: Shard) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the words of the shard's units, Arrow strings, and the number of units of each."""
    return added_counts(map(_counted, words(shard)))


def _counted(block: HeldItems) -> tuple[pa.Array, NDArray[np.int64]]:
    held = np.bincount(block.members, minlength=len(block.items))
    present = np.flatnonzero(held)  # drops items that no unit holds
    return block.items.take(pa.array(present)), held[present]


def word_counts(cluster: ShardMap, shards: Sequence[Shard], words: UnitWords) -> Counter[str]:
    """Return the number of units that hold each word, without bounds; for public text only."""
    items, counts = added_counts(cluster.map(partial(_counts_of_shard, words), shards))
    return Counter(dict(zip(items.to_pylist(), counts.tolist(), strict=True)))
