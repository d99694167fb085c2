"""WordPiece learned only from counts: post-processing of released and public words.

`dp_core.vocabulary.merges` computes the merges of `tokenizers` from the counts. The alphabet comes
only from these words, too. It is sorted here, because its ids would otherwise follow the order of a
hash table, and equal counts must give equal vocabularies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from dp_core.data.tokens import BERT, SPECIAL_TOKENS, Segmentation
from dp_core.errors import BadInput
from dp_core.vocabulary.merges import learn_tokens, words_to_learn
from dp_core.vocabulary.tokenizer_files import PREFIX, WORD_PIECE, is_byte_level, learned


def learn(
    counts: Mapping[str, int], size: int, whole: Sequence[str] = (), words: Segmentation = BERT
) -> Tokenizer:
    """Return a BERT tokenizer with at most `size` tokens.

    Args:
        counts: counts of words: noised for released words, exact for public ones.
        size: at most this many tokens; [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4, followed by
            placeholders.
        whole: distinct words, of which the first become single tokens (`whole_words_apart`).
        words: the segmentation of the counted words, which the tokenizer shares.

    Raises:
        BadInput: there is no word, or `size` has no room for an alphabet.
    """
    counts = words_to_learn(counts, words)
    base = [*SPECIAL_TOKENS, *words.placeholders]
    if size < 4 * len(SPECIAL_TOKENS):
        raise BadInput(
            f"{size} tokens are too few", where="vocabulary size", fix="Use 100 or more."
        )
    base += _alphabet(counts, (size - len(base)) // 2)
    tokens, _ = learn_tokens(counts, base, size, whole, prefix=PREFIX)
    return learned(tokens, words, **WORD_PIECE)


def continuation_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return bool `[V]`: true for tokens that continue a word; false for all byte-level tokens."""
    out = np.zeros(tokenizer.get_vocab_size(), np.bool_)
    for token, i in tokenizer.get_vocab().items():
        out[i] = token.startswith(PREFIX) and len(token) > len(PREFIX)
    return out & (not is_byte_level(tokenizer))


def _alphabet(counts: Mapping[str, int], room: int) -> list[str]:
    """Return the words' characters, each as a start and as a continuation of words.

    Returns at most `room` tokens, for the most frequent characters.
    """
    weight: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            weight[character] += count
    kept = sorted(sorted(weight), key=lambda c: -weight[c])[: room // 2]
    return [*sorted(kept), *(PREFIX + c for c in sorted(kept))]
