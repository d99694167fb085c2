"""Words as a tokenizer splits them, both for the histogram and for its tokens.

A histogram whose words were split differently from the tokenizer's would spend privacy on words
that never occur. So both use the normalizer and the pre-tokenizer of one `Segmentation`. The words
of many texts are codes of a list of distinct words. `encode_bert_words` finds BERT's words by bytes
(every punctuation mark is a separate word); a property test compares them with the words of the
segmentation. ASCII between two spaces, which is nearly all of any English text, is split by classes
of bytes (letters and digits, punctuation) with array operations. A run between spaces that holds
any other byte (a control character, a letter beyond ASCII, a placeholder) first becomes one item,
and the segmentation then splits each distinct item.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.errors import BadInput

_HAS_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ASCII_WORD = re.compile(r"[a-z0-9]+|[!-/:-@\[-`{-~]")


@dataclass(frozen=True)
class Segmentation:
    """The words of a tokenizer: its normalizer, its pre-tokenizer and its placeholders.

    It is part of the plan of a release of words, and every shard receives it.

    Attributes:
        normalizer: JSON in the form of `tokenizer.json`; `null` for none.
        pre_tokenizer: likewise.
        placeholders: literal strings in alphabetical order, each of which is one word.
    """

    normalizer: str
    pre_tokenizer: str
    placeholders: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Segmentation:
        """Return the segmentation of a tokenizer."""
        added = tokenizer.get_added_tokens_decoder().values()
        kept = tuple(sorted(token.content for token in added if not token.special))
        parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
        normalizer, pre_tokenizer = (p.__getstate__().decode() if p else "null" for p in parts)
        return cls(normalizer, pre_tokenizer, kept)

    def to_json(self) -> dict[str, Any]:
        """Return the segmentation for a manifest."""
        return {
            "normalizer": json.loads(self.normalizer),
            "pre_tokenizer": json.loads(self.pre_tokenizer),
            "placeholders": list(self.placeholders),
        }

    def split(self, text: str) -> list[str]:
        """Return the words of a text, in order, as the tokenizer spells them."""
        text, parts = without_surrogates(text), _one_word_each(self)
        pieces = re.split(f"({_any_of(self.placeholders)})", text) if self.placeholders else [text]
        words: list[str] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                words.append(piece)
            elif piece:
                normal = parts.normalizer.normalize_str(piece) if parts.normalizer else piece
                words += [word for word, _ in parts.pre_tokenizer.pre_tokenize_str(normal)]
        return words

    def encode(self, texts: pa.Array) -> WordCodes:
        """Return the words of many texts, an Arrow array of strings without nulls."""
        by_bytes = self.pre_tokenizer == BERT.pre_tokenizer and self.normalizer.startswith(_BERT)
        if by_bytes and not re.search(r"\s", "".join(self.placeholders)):
            return encode_bert_words(texts, self)
        return encode_with(self, texts)


_BERT = '{"type":"BertNormalizer"'
_EMPTY: dict[str, object] = dict.fromkeys(("truncation", "padding", "post_processor", "decoder"))
_EMPTY |= {"version": "1.0", "added_tokens": []}


def _any_of(placeholders: Sequence[str]) -> str:
    """Return a regular expression of the placeholders, in which the longest match comes first."""
    return "|".join(re.escape(p) for p in sorted(placeholders, key=len, reverse=True))


@cache
def _one_word_each(segmentation: Segmentation) -> Tokenizer:
    """Return a tokenizer that makes one token of every word, placeholders not considered."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    parts = segmentation.to_json()
    parts.pop("placeholders")
    return Tokenizer.from_str(json.dumps({**_EMPTY, **parts, "model": model}))


def bert_segmentation(
    lowercase: bool = True, strip_accents: bool = True, placeholders: Sequence[str] = ()
) -> Segmentation:
    """Return BERT's words: punctuation marks and Chinese characters are words."""
    normalizer: dict[str, Any] = {
        "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
        "strip_accents": strip_accents, "lowercase": lowercase,
    }  # fmt: skip
    pre_tokenizer = '{"type":"BertPreTokenizer"}'
    stated = json.dumps(normalizer, separators=(",", ":"))
    return Segmentation(stated, pre_tokenizer, tuple(placeholders))


BERT = bert_segmentation()


def split_words(text: str) -> list[str]:
    """Return the words of a text, in order, as an uncased BERT reads them."""
    return BERT.split(text)


def without_surrogates(text: str) -> str:
    """Return the text with `?` for each lone surrogate, which UTF-8 and Rust cannot hold."""
    return text.encode("utf-8", "replace").decode()


def word_starts(text: str) -> list[int]:
    """Return the offsets in the original text at which the words of `split_words` start.

    They cut a text into units of the kind `example`, whatever the vocabulary.
    """
    if text.isascii() and not _HAS_CONTROL.search(text):
        return [match.start() for match in _ASCII_WORD.finditer(text.lower())]
    encoding = _one_word_each(BERT).encode(without_surrogates(text))
    return [start for start, _ in encoding.offsets]


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens; by default the ids that `subwords.learn` assigns."""

    pad: int = 0
    unk: int = 1
    cls: int = 2
    sep: int = 3
    mask: int = 4

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialIds:
        """Return the ids in a tokenizer's vocabulary.

        Raises:
            BadInput: the vocabulary lacks a special token.
        """
        vocab = tokenizer.get_vocab()
        for token in SPECIAL_TOKENS:
            if token not in vocab:
                raise BadInput(
                    f"the vocabulary lacks {token}",
                    where="vocabulary",
                    fix="Use a BERT vocabulary.",
                )
        return cls(*(vocab[token] for token in SPECIAL_TOKENS))

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        """Return the ids in the order [PAD] [UNK] [CLS] [SEP] [MASK]."""
        return self.pad, self.unk, self.cls, self.sep, self.mask


Ints = NDArray[np.int64]
_SPACE, _LETTER, _MARK, _ODD = range(4)
_SPACES = b"\t\n\r "
_TEXT = pa.large_string()
_MANY = 1 << 19  # items merged at once


def _class(byte: int) -> int:
    if byte in _SPACES:
        return _SPACE
    if byte < 32 or byte > 126:
        return _ODD
    return _LETTER if chr(byte).isalnum() else _MARK


_CLASSES = bytes(map(_class, range(256)))


@dataclass(frozen=True)
class WordCodes:
    """The running words of texts. Private, as the texts are.

    Attributes:
        words: an Arrow array of distinct words; some of them may not occur.
        codes: int64 `[n]`, each running word's index in `words`.
        starts: int64 `[texts + 1]`; text t has the codes `codes[starts[t]:starts[t + 1]]`.
    """

    words: pa.Array
    codes: Ints
    starts: Ints


def encode_bert_words(texts: pa.Array, segmentation: Segmentation = BERT) -> WordCodes:
    """Return the words of texts as BERT splits them.

    Args:
        texts: an Arrow array of strings, without nulls.
        segmentation: with BERT's pre-tokenizer and a normalizer of BERT's class.
    """
    data, ends = _bytes_of(texts)
    if not data:
        return WordCodes(pa.array([], _TEXT), np.zeros(0, np.int64), np.zeros_like(ends))
    classes = np.frombuffer(bytearray(data.translate(_CLASSES)), np.uint8)
    if segmentation.placeholders:
        for match in re.finditer(_any_of(segmentation.placeholders).encode(), data):
            classes[match.start() : match.end()] = _ODD
    joined, odd = _join_odd(classes, ends)
    letter, space = classes == _LETTER, classes == _SPACE
    # A word begins at every non-space byte that does not continue a run of letters of its text.
    begins = ~space
    begins[1:] &= ~(letter[1:] & letter[:-1])
    first = ends[:-1][ends[:-1] < len(space)]
    begins[first] = ~space[first]
    # Once the spaces are removed, each word ends where the next word begins.
    flags = begins.view(np.uint8) | (space.view(np.uint8) << 1)
    offsets = np.flatnonzero(np.frombuffer(flags.tobytes().translate(None, b"\2"), np.bool_))
    if json.loads(segmentation.normalizer)["lowercase"]:  # placeholders keep their case
        both = np.frombuffer(data, np.uint8), np.frombuffer(data.lower(), np.uint8)
        data = np.where(joined, *both).tobytes()
    squeezed = data.translate(None, _SPACES)
    encoded = pa.Array.from_buffers(
        pa.large_binary(),
        len(offsets),
        [None, pa.py_buffer(np.append(offsets, len(squeezed))), pa.py_buffer(squeezed)],
    ).dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int64)
    places = np.flatnonzero(begins)
    words = WordCodes(encoded.dictionary.cast(_TEXT), codes, np.searchsorted(places, ends))
    odd = np.searchsorted(places, odd)
    return _split_odd(words, odd, segmentation) if len(odd) else words


def encode_with(segmentation: Segmentation, texts: pa.Array) -> WordCodes:
    """Return the words of texts by any segmentation, which splits one text at a time."""
    words = [segmentation.split(text) for text in texts.to_pylist()]
    lengths = np.array([len(words_of_text) for words_of_text in words], np.int64)
    every = pa.array(list(itertools.chain.from_iterable(words)), _TEXT).dictionary_encode()
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return WordCodes(every.dictionary, every.indices.to_numpy().astype(np.int64), starts)


def _bytes_of(texts: pa.Array) -> tuple[bytes, Ints]:
    """Return the concatenated bytes of the texts, and the boundaries of the texts in them."""
    texts = texts.cast(_TEXT)
    if not len(texts):
        return b"", np.zeros(1, np.int64)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return bytes(memoryview(data)[ends[0] : ends[-1]]) if data else b"", ends - ends[0]


def _join_odd(classes: NDArray[np.uint8], ends: Ints) -> tuple[NDArray[np.bool_], Ints]:
    """Turn every run between spaces that holds an odd byte into a run of letters, in place.

    Returns:
        Whether each byte is in such a run, and the offsets at which the runs begin.
    """
    odd = np.flatnonzero(classes == _ODD)
    if not len(odd):
        return np.zeros(1, np.bool_), odd
    breaks = np.concatenate([[-1], np.flatnonzero(classes == _SPACE), [len(classes)]])
    after = np.searchsorted(breaks, odd)
    text = np.searchsorted(ends, odd, "right")
    begins = np.maximum(breaks[after - 1] + 1, ends[text - 1])
    stops = np.minimum(breaks[after], ends[text])
    change = np.zeros(len(classes) + 1, np.int8)
    change[begins], change[stops] = 1, -1
    # A run that ends where the run of the next text begins must not switch the flag off.
    change[np.intersect1d(begins, stops)] = 0
    joined = np.cumsum(change[:-1], dtype=np.int8) > 0
    classes[joined] = _LETTER
    return joined, np.unique(begins)


def _split_odd(words: WordCodes, odd: Ints, segmentation: Segmentation) -> WordCodes:
    """Return the codes with the runs at these places replaced by the words that they contain."""
    items, which = np.unique(words.codes[odd], return_inverse=True)
    split = [segmentation.split(item) for item in words.words.take(pa.array(items)).to_pylist()]
    more = pa.array(list(itertools.chain.from_iterable(split)), _TEXT)
    every = pa.concat_arrays([words.words, more]).dictionary_encode()
    # The codes of the existing words do not change.
    of_item = every.indices.to_numpy()[len(words.words) :]
    lengths = np.array([len(words_of_item) for words_of_item in split], np.int64)
    number = lengths[which]
    times = np.ones(len(words.codes), np.int64)
    times[odd] = number
    codes = np.repeat(words.codes, times)
    shift = np.concatenate([[0], np.cumsum(number - 1)])  # of the codes after each odd run
    first = np.cumsum(lengths) - lengths
    codes[ranges(odd + shift[:-1], number)] = of_item[ranges(first[which], number)]
    starts = words.starts + shift[np.searchsorted(odd, words.starts)]
    return WordCodes(every.dictionary, codes, starts)


def ranges(begins: Ints, lengths: Ints) -> Ints:
    """Return begin, begin + 1, … of each range, one range after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    values: Ints = np.arange(total) + np.repeat(begins - (ends - lengths), lengths)
    return values


# --- by unit


@dataclass(frozen=True)
class HeldItems:
    """The distinct items of each unit, for some units. Private.

    Attributes:
        unit_ids: names of the units; all items of a unit are included.
        items: an Arrow array of distinct strings.
        starts: int64 `[units + 1]`; unit u holds `members[starts[u]:starts[u + 1]]`.
        members: int32, indices into `items`, without repetition within a unit.
    """

    unit_ids: Sequence[str]
    items: pa.Array
    starts: Ints
    members: NDArray[np.int32]

    def keeping(self, kept: NDArray[np.bool_]) -> HeldItems:
        """Return all units with only the chosen ones of `members`."""
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts]
        return HeldItems(self.unit_ids, self.items, starts, self.members[kept])


def held_items(unit_ids: Sequence[str], words: WordCodes, bounds: Ints) -> HeldItems:
    """Return the distinct words of units.

    Args:
        unit_ids: names of the units.
        words: running words.
        bounds: int64 `[units + 1]`; unit u has the codes `codes[bounds[u]:bounds[u + 1]]`.
    """
    owners = np.repeat(np.arange(len(unit_ids), dtype=np.int64), np.diff(bounds))
    return held_once(unit_ids, words.words, owners, words.codes[bounds[0] : bounds[-1]])


def held_once(unit_ids: Sequence[str], items: pa.Array, owners: Ints, numbers: Ints) -> HeldItems:
    """Return the distinct items of units, given the unit and the item of each occurrence."""
    size = max(1, len(items))
    pairs = owners * size + numbers
    pairs.sort()
    if len(pairs):
        pairs = pairs[np.concatenate([[True], pairs[1:] != pairs[:-1]])]
    owners, members = np.divmod(pairs, size)
    starts = np.searchsorted(owners, np.arange(len(unit_ids) + 1))
    return HeldItems(unit_ids, items, starts, members.astype(np.int32))


def joined_items(blocks: Iterator[HeldItems]) -> HeldItems:
    """Return the units of several blocks, with one common list of items."""
    held = list(blocks)
    if not held:
        return HeldItems([], pa.array([], _TEXT), np.zeros(1, np.int64), np.zeros(0, np.int32))
    every = pa.concat_arrays([block.items for block in held]).dictionary_encode()
    places = np.split(every.indices.to_numpy(), np.cumsum([len(b.items) for b in held])[:-1])
    members = [place[b.members] for place, b in zip(places, held, strict=True)]
    lengths = np.concatenate([np.diff(block.starts) for block in held])
    return HeldItems(
        [unit_id for block in held for unit_id in block.unit_ids],
        every.dictionary,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.concatenate(members),
    )


def added_counts(
    parts: Iterable[tuple[pa.Array, NDArray[np.int64]]],
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the distinct items of several lists, and the sum of each item's counts."""

    total = pa.array([], _TEXT), np.zeros(0, np.int64)
    waiting: list[tuple[pa.Array, NDArray[np.int64]]] = []
    for part in parts:
        waiting.append(part)
        if sum(len(items) for items, _ in waiting) > _MANY + len(total[0]):
            total, waiting = _added([total, *waiting]), []
    return _added([total, *waiting])


def _added(parts: list[tuple[pa.Array, NDArray[np.int64]]]) -> tuple[pa.Array, NDArray[np.int64]]:
    every = pa.concat_arrays([items for items, _ in parts]).dictionary_encode()
    total = np.zeros(len(every.dictionary), np.int64)
    np.add.at(total, every.indices.to_numpy(), np.concatenate([counts for _, counts in parts]))
    return every.dictionary, total
