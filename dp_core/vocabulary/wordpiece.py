"""WordPiece learned from a released histogram and nothing else: post-processing, free of privacy.

The merges are those of `tokenizers`. Its alphabet, too, comes from the released words alone; and
as its ids would otherwise follow the order of a hash table, it is fixed here first, so that equal
histograms give equal vocabularies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from dp_core.data.tokens import NORMALIZER, PRE_TOKENIZER, SPECIAL_TOKENS, SpecialIds
from dp_core.errors import BadInput

_PREFIX = "##"
_OCCURRENCES = 2_000_000  # counts are scaled down to about this many words in all
_REPEATS_PER_LINE = 1000


def learn(noised: Mapping[str, int], size: int) -> Tokenizer:
    """Return a BERT tokenizer (lower case) with at most `size` tokens.

    Args:
        noised: released words and noised counts.
        size: at most this many tokens; [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4.

    Raises:
        BadInput: nothing was released, or `size` has no room for an alphabet.
    """
    if not noised:
        raise BadInput(
            "no word passed the threshold",
            where="vocabulary",
            fix="Raise ε, δ or the number of units, or lower words_per_unit.",
        )
    if size < 4 * len(SPECIAL_TOKENS):
        raise BadInput(
            f"{size} tokens are too few", where="vocabulary size", fix="Use 100 or more."
        )
    base = [*SPECIAL_TOKENS, *_alphabet(noised, (size - len(SPECIAL_TOKENS)) // 2)]
    learner = Tokenizer(WordPiece(unk_token="[UNK]"))  # noqa: S106
    learner.pre_tokenizer = WhitespaceSplit()
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=0,
        special_tokens=base,  # fixes their ids, whatever order the words are met in
        limit_alphabet=0,
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(_occurrences(noised), trainer)
    return _bert(learner.get_vocab(with_added_tokens=True))


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


def _alphabet(noised: Mapping[str, int], room: int) -> list[str]:
    """Return the released characters, each as a start and as a continuation of words.

    At most `room` tokens: where there are more, those of the most frequent characters.
    """
    weight: Counter[str] = Counter()
    for word, count in noised.items():
        for character in word:
            weight[character] += count
    kept = sorted(sorted(weight), key=lambda c: -weight[c])[: room // 2]
    return [*sorted(kept), *(_PREFIX + c for c in sorted(kept))]


def _occurrences(noised: Mapping[str, int]) -> Iterator[str]:
    """Yield lines that hold each word as often as its count, scaled to a bounded total.

    Trainers read text, not counts. Scaling is post-processing, keeps proportions, and keeps the
    work independent of how large the corpus was.
    """
    scale = min(1.0, _OCCURRENCES / sum(noised.values()))
    for word in sorted(noised):
        left = max(1, round(noised[word] * scale))
        while left > 0:
            yield f"{word} " * min(left, _REPEATS_PER_LINE)
            left -= _REPEATS_PER_LINE


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
