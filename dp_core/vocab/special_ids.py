"""Ids of BERT's special tokens in a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from dp_core.errors import BadInput

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the five special tokens; the defaults are those that `wordpiece.learn` gives."""

    pad: int = 0
    unk: int = 1
    cls: int = 2
    sep: int = 3
    mask: int = 4

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpecialIds:
        """Return the ids in a tokenizer's vocabulary.

        Raises:
            BadInput: the vocabulary lacks one of them.
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
