"""GPT-2's byte-level BPE (Radford et al. 2019), learned from counts; it has no unknown tokens.

Words are written in 256 characters that represent the bytes (`Ġ` is the space), so the alphabet
does not depend on any text. The private release counts the same words, because budget for other
words would be wasted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from dp_core.data.tokens import SPECIAL_TOKENS, Segmentation
from dp_core.errors import BadInput
from dp_core.vocabulary.merges import learn_tokens, words_to_learn
from dp_core.vocabulary.tokenizer_files import ALPHABET, GPT2, learned


def learn(
    counts: Mapping[str, int], size: int, whole: Sequence[str] = (), words: Segmentation = GPT2
) -> Tokenizer:
    """Return a byte-level tokenizer with at most `size` tokens.

    Args:
        counts: words, as `words` spells them, and the count of each.
        size: at most this many tokens; [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4 (a causal model
            reads [CLS] before a text and [SEP] after it), followed by placeholders and the bytes.
        whole: distinct words, of which the first become single tokens (`whole_words_apart`).
        words: the segmentation of the counted words.

    Raises:
        BadInput: there is no word, or `size` has no room for the bytes.
    """
    counts = words_to_learn(counts, words)
    base = [*SPECIAL_TOKENS, *words.placeholders, *ALPHABET]
    if size < len(base):
        raise BadInput(
            f"{size} tokens are too few for the 256 bytes and {len(base) - 256} special tokens",
            where="vocabulary_size",
            fix=f"Use {len(base)} or more.",
        )
    tokens, merges = learn_tokens(counts, base, size, whole)
    # As in Llama 3, a word that is a token is used whole: whole words have no merges.
    return learned(tokens, words, type="BPE", merges=merges, ignore_merges=True)
