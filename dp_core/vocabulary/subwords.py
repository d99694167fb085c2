"""Subword vocabularies of both kinds, and how well a vocabulary fits a text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from dp_core.data.privacy_units import Unit
from dp_core.data.tokens import split_words
from dp_core.data.word_codes import Encoder, encode_bert_words
from dp_core.vocabulary import byte_level, wordpiece

SubwordKind = Literal["wordpiece", "byte-level-bpe"]


@dataclass(frozen=True)
class Subwords:
    """One kind of vocabulary.

    Attributes:
        split: text -> words to count.
        encode: the same for many texts at once.
        learn: (counts of words, size, words to keep whole) -> tokenizer.
        spelt: word as returned by `split` -> characters that it represents.
        save: writes a tokenizer into a folder.
        file: the file of that folder that holds the tokens.
    """

    split: Callable[[str], list[str]]
    encode: Encoder
    spelt: Callable[[str], str]
    learn: Callable[[Mapping[str, int], int, Sequence[str]], Tokenizer]
    save: Callable[[Tokenizer, Path], None]
    file: str


KINDS: Mapping[SubwordKind, Subwords] = {
    "wordpiece": Subwords(
        split_words,
        encode_bert_words,
        str,
        wordpiece.learn,
        wordpiece.save,
        "vocab.txt",
    ),
    "byte-level-bpe": Subwords(
        byte_level.split_words,
        byte_level.encode_words,
        byte_level.spelt,
        byte_level.learn,
        byte_level.save,
        byte_level.VOCABULARY,
    ),
}


def load(folder: Path | str) -> Tokenizer:
    """Return the tokenizer of a folder, of either kind.

    Raises:
        BadInput: no vocabulary, or one without the special tokens.
    """
    is_byte_level = (Path(folder) / byte_level.VOCABULARY).is_file()
    return byte_level.load(folder) if is_byte_level else wordpiece.load(folder)


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Return SHA-256 over the tokens in order of id, in hex."""
    ids = tokenizer.get_vocab()
    digest = hashlib.sha256()
    for token in sorted(ids, key=ids.__getitem__):
        digest.update(f"{len(token)} {token}\n".encode())
    return digest.hexdigest()


def document_counts(units: Iterable[Unit], split: Callable[[str], Iterable[str]]) -> Counter[str]:
    """Return the number of units that hold each word, without bounds; for public text only."""
    counts: Counter[str] = Counter()
    for unit in units:
        counts.update({word for text in unit.texts for word in split(text)})
    return counts


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
        safe = text.encode("utf-8", "replace").decode()
        encoding = tokenizer.encode(safe, add_special_tokens=False)
        pieces = Counter(encoding.word_ids)
        words += len(pieces)
        tokens += len(encoding.ids)
        whole += sum(
            pieces[word] == 1 and i != mark
            for word, i in zip(encoding.word_ids, encoding.ids, strict=True)
        )
        unknown += len(
            {w for w, i in zip(encoding.word_ids, encoding.ids, strict=True) if i == mark}
        )
    return Fit(whole / words, tokens / words, unknown / words) if words else None
