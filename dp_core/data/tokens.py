"""Words as BERT splits them, both for the histogram and for WordPiece.

A histogram whose words were split differently from the tokenizer's would spend privacy on words
that never occur. So both use the normaliser and the pre-tokenizer of `tokenizers` (lower case,
accents stripped, every punctuation mark a separate word). ASCII between spaces, which is nearly all
of any English text, has a faster implementation in Python; a property test checks that it returns
the same words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from dp_core.errors import BadInput

NORMALIZER = BertNormalizer(
    clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True
)
PRE_TOKENIZER = BertPreTokenizer()

# clean_text deletes all control characters except those that count as white space.
_CONTROL = {c: None for c in [*range(32), 127] if chr(c) not in "\t\n\r"}
_HAS_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ASCII_WORD = re.compile(r"[a-z0-9]+|[!-/:-@\[-`{-~]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def split_words(text: str) -> list[str]:
    """Return the words of a text, in order, normalised as BERT does.

    The text between two spaces is split separately: the normaliser and the pre-tokenizer process
    one character at a time, except for accents, and a space carries no accent.
    """
    if text.isascii():
        return _ascii_words(text)
    text = text.replace("\t", " ").replace("\n", " ").replace("\r", " ")
    words: list[str] = []
    done = 0
    other = _NOT_ASCII.search(text)
    while other:
        start = text.rfind(" ", done, other.start()) + 1 or done
        end = _next_space(text, other.start())
        while (other := _NOT_ASCII.search(text, end)) and text.find(
            " ", end + 1, other.start()
        ) < 0:
            end = _next_space(text, other.start())  # the next word is not ASCII either
        words += _ascii_words(text[done:start])
        words += _any_words(text[start:end])
        done = end
    words += _ascii_words(text[done:])
    return words


def _next_space(text: str, start: int) -> int:
    end = text.find(" ", start)
    return len(text) if end < 0 else end


def _ascii_words(text: str) -> list[str]:
    if _HAS_CONTROL.search(text):
        text = text.translate(_CONTROL)
    return _ASCII_WORD.findall(text.lower())


def _any_words(text: str) -> list[str]:
    if not _encodable(text):
        text = text.encode("utf-8", "replace").decode()
    normal = NORMALIZER.normalize_str(text)
    return [word for word, _ in PRE_TOKENIZER.pre_tokenize_str(normal)]


def word_starts(texts: list[str]) -> list[list[int]]:
    """Return, for each text, the offsets in the original text at which its words start."""
    plain = [text.isascii() and not _HAS_CONTROL.search(text) for text in texts]
    others = [
        text if _encodable(text) else text.encode("utf-8", "replace").decode()
        for text, is_plain in zip(texts, plain, strict=True)
        if not is_plain
    ]
    located = iter(_LOCATOR.encode_batch(others))
    return [
        [match.start() for match in _ASCII_WORD.finditer(text.lower())]
        if is_plain
        else [start for start, _ in next(located).offsets]
        for text, is_plain in zip(texts, plain, strict=True)
    ]


def _encodable(text: str) -> bool:
    """Return whether the text has no lone surrogates, which Rust strings cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _locator() -> Tokenizer:
    """Return a tokenizer that makes one token of every word, which gives the words' offsets."""
    locator = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106
    locator.normalizer = NORMALIZER
    locator.pre_tokenizer = PRE_TOKENIZER
    return locator


_LOCATOR = _locator()


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens; by default the ids that `wordpiece.learn` assigns."""

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
