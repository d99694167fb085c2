"""WordPiece learned from counts and nothing else: post-processing of released and public words.

The merges are those of `tokenizers`, found from the counts themselves
(`dp_core.vocabulary.merges`). The alphabet, too, comes from these words alone; and as its ids would
otherwise follow the order of a hash table, it is fixed here first, so that equal counts give equal
vocabularies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import WordPiece

from dp_core.data.tokens import NORMALIZER, PRE_TOKENIZER, SPECIAL_TOKENS, SpecialIds
from dp_core.errors import BadInput
from dp_core.vocabulary.merges import learn_merges, whole_words_apart

_PREFIX = "##"


def learn(counts: Mapping[str, int], size: int, whole: Sequence[str] = ()) -> Tokenizer:
    """Return a BERT tokenizer (lower case) with at most `size` tokens.

    Args:
        counts: words and how often each counts: released ones noised, public ones as they are.
        size: at most this many tokens; [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4.
        whole: words, each once, of which the first become tokens whole (`whole_words_apart`).

    Raises:
        BadInput: there is no word, or `size` has no room for an alphabet.
    """
    refuse_no_words(counts)
    if size < 4 * len(SPECIAL_TOKENS):
        raise BadInput(
            f"{size} tokens are too few", where="vocabulary size", fix="Use 100 or more."
        )
    base = [*SPECIAL_TOKENS, *_alphabet(counts, (size - len(SPECIAL_TOKENS)) // 2)]
    rest, base = whole_words_apart(counts, base, size, whole)
    tokens, _ = learn_merges(rest, base, size, prefix=_PREFIX)
    if whole:  # room that is left is for parts of all words, of which unknown ones are spelt
        tokens, _ = learn_merges(counts, tokens, size, prefix=_PREFIX)
    return _bert({token: i for i, token in enumerate(tokens)})


def refuse_no_words(counts: Mapping[str, int]) -> None:
    """Refuse to learn from nothing.

    Raises:
        BadInput: there is no word.
    """
    if not counts:
        raise BadInput(
            "no word passed the threshold",
            where="vocabulary",
            fix="Raise ε, δ or the number of units, lower words_per_unit, or use public text too.",
        )


def of_tokens(tokens: Sequence[str], words: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer of a checkpoint's own tokens, and of words that are added whole.

    Args:
        tokens: of a BERT vocabulary (lower case), in any order; the special ones come first in the
            result, as everywhere in this project, and the others keep their order.
        words: become tokens of their own, after all others; those that are tokens stay what they
            are.

    Raises:
        BadInput: the vocabulary lacks one of BERT's special tokens.
    """
    SpecialIds.of(_bert({token: i for i, token in enumerate(tokens)}))
    every = dict.fromkeys((*SPECIAL_TOKENS, *tokens, *words))
    return _bert({token: i for i, token in enumerate(every)})


def save(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json`, as Hugging Face has them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    (folder / "vocab.txt").write_text("".join(f"{p}\n" for p in tokens), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "strip_accents": True,
        "tokenize_chinese_chars": True,
        **{f"{t[1:-1].lower()}_token": t for t in SPECIAL_TOKENS},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path | str) -> Tokenizer:
    """Return the tokenizer of a folder with a `vocab.txt` (one token a line, BERT's).

    Raises:
        BadInput: no vocabulary there, or one without BERT's special tokens.
    """
    path = Path(folder) / "vocab.txt"
    try:
        tokens = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            "no readable vocabulary", where=str(path), fix="Run the vocabulary step."
        ) from error
    if tokens and not tokens[-1]:
        tokens.pop()
    tokenizer = _bert({token.rstrip("\r"): i for i, token in enumerate(tokens)})
    SpecialIds.of(tokenizer)
    return tokenizer


def continuation_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return bool `[V]`: true for tokens that go on with a word."""
    out = np.zeros(tokenizer.get_vocab_size(), np.bool_)
    for token, i in tokenizer.get_vocab().items():
        out[i] = token.startswith(_PREFIX) and len(token) > len(_PREFIX)
    return out


def _alphabet(counts: Mapping[str, int], room: int) -> list[str]:
    """Return the words' characters, each as a start and as a continuation of words.

    At most `room` tokens: where there are more, those of the most frequent characters.
    """
    weight: Counter[str] = Counter()
    for word, count in counts.items():
        for character in word:
            weight[character] += count
    kept = sorted(sorted(weight), key=lambda c: -weight[c])[: room // 2]
    return [*sorted(kept), *(_PREFIX + c for c in sorted(kept))]


def _bert(vocab: dict[str, int]) -> Tokenizer:
    """Return a tokenizer with BERT's normaliser, splitter and template around a vocabulary."""
    tokenizer = Tokenizer(
        WordPiece(vocab, unk_token="[UNK]", continuing_subword_prefix=_PREFIX)  # noqa: S106
    )
    tokenizer.normalizer = NORMALIZER
    tokenizer.pre_tokenizer = PRE_TOKENIZER
    tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    if all(t in vocab for t in SPECIAL_TOKENS):
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer.post_processor = processors.BertProcessing(
            ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
        )
    # "[MASK]" written in a note is text, not a command.
    tokenizer.encode_special_tokens = True
    return tokenizer
