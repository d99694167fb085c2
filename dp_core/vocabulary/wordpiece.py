"""WordPiece learned only from counts: post-processing of released and public words.

`dp_core.vocabulary.merges` computes the merges of `tokenizers` from the counts. The alphabet comes
only from these words, too. It is sorted here, because its ids would otherwise follow the order of a
hash table, and equal counts must give equal vocabularies.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import WordPiece

from dp_core.data.tokens import (
    NORMALIZER,
    PRE_TOKENIZER,
    SPECIAL_TOKENS,
    SpecialIds,
    encode_bert_words,
    split_words,
)
from dp_core.errors import BadInput
from dp_core.vocabulary.merges import learn_tokens

_PREFIX = "##"
FILE = "vocab.txt"
encode_words = encode_bert_words


def spelt(word: str) -> str:
    """Return the word itself: it is counted as it is spelt."""
    return word


def learn(counts: Mapping[str, int], size: int, whole: Sequence[str] = ()) -> Tokenizer:
    """Return a BERT tokenizer (lower case) with at most `size` tokens.

    Args:
        counts: counts of words: noised for released words, exact for public ones.
        size: at most this many tokens; [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4.
        whole: distinct words, of which the first become single tokens (`whole_words_apart`).

    Raises:
        BadInput: there is no word, or `size` has no room for an alphabet.
    """
    refuse_no_words(counts)
    if size < 4 * len(SPECIAL_TOKENS):
        raise BadInput(
            f"{size} tokens are too few", where="vocabulary size", fix="Use 100 or more."
        )
    base = [*SPECIAL_TOKENS, *_alphabet(counts, (size - len(SPECIAL_TOKENS)) // 2)]
    tokens, _ = learn_tokens(counts, base, size, whole, prefix=_PREFIX)
    return _bert({token: i for i, token in enumerate(tokens)})


def refuse_no_words(counts: Mapping[str, int]) -> None:
    """Refuse to learn from an empty set of words.

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
    """Return the tokenizer of a checkpoint's tokens and of additional whole words.

    Args:
        tokens: tokens of a BERT vocabulary (lower case), in any order. In the result the special
            tokens come first, as everywhere in this project, and the others keep their order.
        words: become single tokens after all others, unless they are tokens already.

    Raises:
        BadInput: the vocabulary lacks one of BERT's special tokens.
    """
    SpecialIds.of(_bert({token: i for i, token in enumerate(tokens)}))
    every = dict.fromkeys((*SPECIAL_TOKENS, *tokens, *words))
    return _bert({token: i for i, token in enumerate(every)})


def of_folder(folder: Path, tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of a checkpoint that normalises text as this project does.

    Args:
        folder: the checkpoint; `tokenizer_config.json` and `tokenizer.json` are read if present.
        tokens: the vocabulary of the checkpoint, in order of id.

    Raises:
        BadInput: the checkpoint keeps case, accents or runs of Chinese characters, or its
            vocabulary lacks one of BERT's special tokens.
    """
    tokenizer = of_tokens(tokens)
    share = unreachable_share(tokens)
    evidence = _stated_otherwise(folder)
    if share > MOST_UNREACHABLE:
        evidence = f"{share:.1%} of its tokens can never occur in normalised text"
    if evidence:
        raise BadInput(
            "the model's tokenizer keeps capital letters, accents or runs of Chinese characters, "
            f"which this project normalises: {evidence}",
            where=str(folder),
            fix="Use an uncased model; a job can also exchange the tokens (vocabulary_source).",
        )
    return tokenizer


# Measured: the published vocabularies of bert-base-uncased (29,523 tokens without markers), of
# bert-base-chinese (21,025) and an uncased one of PubMed (49,995) have 1, 3 and 0 tokens that no
# normalised text contains, at most 0.014%. Vocabularies of 2,000 tokens learned from notes have
# none if uncased, 16% if cased, and 0.6% or 0.35% if a few accented words or two Chinese phrases
# were added to each text and the tokenizer kept them (test_wordpiece.py).
MOST_UNREACHABLE = 0.001
_MARKER = re.compile(r"\[.*\]|<.*>")  # [CLS], [unused17], <s>: no text contains them


def unreachable_share(tokens: Iterable[str]) -> float:
    """Return the share of tokens that no text can contain after our normalisation.

    Such a token has capital letters or accents, or the pre-tokenizer would cut it into words.
    Markers such as `[unused17]` do not count.
    """
    pieces = [t.removeprefix(_PREFIX) or t for t in tokens if not _MARKER.fullmatch(t)]
    return sum(split_words(piece) != [piece] for piece in pieces) / max(1, len(pieces))


_FLAGS = {
    "tokenizer_config.json": ("do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    "tokenizer.json": ("lowercase", "strip_accents", "handle_chinese_chars"),
}


def _stated_otherwise(folder: Path) -> str:
    """Return the first setting of a checkpoint that switches a normalisation off, or nothing."""
    for file, flags in _FLAGS.items():
        try:
            settings = json.loads((folder / file).read_text(encoding="utf-8"))
            if file == "tokenizer.json":
                settings = settings["normalizer"] or {}
            stated = [flag for flag in flags if settings.get(flag) is False]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # A file that is absent or unreadable states nothing: the tokens decide.
        if stated:
            return f"{stated[0]} is false in {file}"
    return ""


def save(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json`, as Hugging Face does."""
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    write_tokenizer(
        tokenizer,
        Path(folder),
        {FILE: "".join(f"{p}\n" for p in tokens)},
        tokenizer_class="BertTokenizer",
        do_lower_case=True,
        strip_accents=True,
        tokenize_chinese_chars=True,
    )


def write_tokenizer(
    tokenizer: Tokenizer, folder: Path, files: Mapping[str, str], **config: str | bool
) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json`, and further files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {f"{t[1:-1].lower()}_token": t for t in SPECIAL_TOKENS}
    files = {**files, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


def load(folder: Path | str) -> Tokenizer:
    """Return the tokenizer of a folder with a `vocab.txt` (one token per line, BERT's).

    Raises:
        BadInput: no vocabulary, or one without BERT's special tokens.
    """
    path = Path(folder) / FILE
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
    """Return bool `[V]`: true for tokens that continue a word."""
    out = np.zeros(tokenizer.get_vocab_size(), np.bool_)
    for token, i in tokenizer.get_vocab().items():
        out[i] = token.startswith(_PREFIX) and len(token) > len(_PREFIX)
    return out


def _alphabet(counts: Mapping[str, int], room: int) -> list[str]:
    """Return the words' characters, each as a start and as a continuation of words.

    Returns at most `room` tokens, for the most frequent characters.
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
