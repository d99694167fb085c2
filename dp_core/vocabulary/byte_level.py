"""GPT-2's byte-level BPE (Radford et al. 2019), learned from counts; it has no unknown tokens.

Words are GPT-2's: a space belongs to the word after it, case matters, and digits and letters do not
mix. They are written in 256 characters that represent the bytes (`Ġ` is the space), so the alphabet
does not depend on any text. The private release counts the same words, because budget for other
words would be wasted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dp_core.data.tokens import (
    SPECIAL_TOKENS,
    SpecialIds,
    WordCodes,
    encode_with,
    without_surrogates,
)
from dp_core.errors import BadInput
from dp_core.vocabulary.merges import learn_tokens
from dp_core.vocabulary.wordpiece import refuse_no_words, write_tokenizer

ALPHABET = tuple(sorted(ByteLevel.alphabet()))  # one character for each byte
_PRE_TOKENIZER = ByteLevel(add_prefix_space=False, use_regex=True)
_DECODER = decoders.ByteLevel()
FILE, _MERGES = "vocab.json", "merges.txt"


def split_words(text: str) -> list[str]:
    """Return the words of a text in GPT-2's segmentation, in the characters of `ALPHABET`."""
    return [word for word, _ in _PRE_TOKENIZER.pre_tokenize_str(without_surrogates(text))]


def encode_words(texts: pa.Array) -> WordCodes:
    """Return the words of many texts, Arrow strings, as `split_words` returns them."""
    return encode_with(split_words, texts)


def spelt(word: str) -> str:
    """Return the characters that a word of `split_words` represents."""
    return _DECODER.decode([word])


def learn(counts: Mapping[str, int], size: int, whole: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level tokenizer with at most `size` tokens.

    Args:
        counts: words, as `split_words` returns them, and the count of each.
        size: at most this many tokens; [PAD] [UNK] [CLS] [SEP] [MASK] are 0 to 4 (a causal model
            reads [CLS] before a text and [SEP] after it), followed by the bytes.
        whole: distinct words, of which the first become single tokens (`whole_words_apart`).

    Raises:
        BadInput: there is no word, or `size` has no room for the bytes.
    """
    refuse_no_words(counts)
    base = [*SPECIAL_TOKENS, *ALPHABET]
    if size < len(base):
        raise BadInput(
            f"{size} tokens are too few for the 256 bytes and {len(SPECIAL_TOKENS)} special tokens",
            where="vocabulary_size",
            fix=f"Use {len(base)} or more.",
        )
    tokens, merges = learn_tokens(counts, base, size, whole)
    return _gpt2({token: i for i, token in enumerate(tokens)}, merges)


def save(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Write `vocab.json`, `merges.txt`, `tokenizer.json` and `tokenizer_config.json`."""
    model = json.loads(tokenizer.to_str())["model"]
    ordered = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    lines = "".join(f"{left} {right}\n" for left, right in model["merges"])
    write_tokenizer(
        tokenizer,
        Path(folder),
        {
            FILE: json.dumps(ordered, ensure_ascii=False),
            _MERGES: f"#version: 0.2\n{lines}",
        },
        # This class reads all of tokenizer.json; GPT2Tokenizer would omit its template.
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
        bos_token="[CLS]",  # noqa: S106
        eos_token="[SEP]",  # noqa: S106
    )


def load(folder: Path | str) -> Tokenizer:
    """Return the tokenizer of a folder with `vocab.json` and `merges.txt` that `save` wrote.

    Raises:
        BadInput: no vocabulary, or one without the special tokens.
    """
    folder = Path(folder)
    try:
        vocabulary = json.loads((folder / FILE).read_text(encoding="utf-8"))
        lines = (folder / _MERGES).read_text(encoding="utf-8").splitlines()
        pairs = [line.split(" ") for line in lines[1:]]  # the first line names the version
        tokenizer = _gpt2(dict(vocabulary), [(left, right) for left, right in pairs])
    except Exception as error:
        raise BadInput(
            "no readable vocabulary", where=str(folder), fix="Run the vocabulary step."
        ) from error
    SpecialIds.of(tokenizer)
    return tokenizer


def of_folder(folder: Path, tokens: Sequence[str]) -> Tokenizer:
    """Return the tokenizer of the folder of a byte-level model from any source.

    Args:
        folder: folder with `merges.txt` or `tokenizer.json`.
        tokens: tokens of the model. In the result the special tokens come first, missing special
            tokens are added, and the other tokens keep their order.

    Raises:
        BadInput: no merges that fit the tokens.
    """
    every = {token: i for i, token in enumerate(dict.fromkeys((*SPECIAL_TOKENS, *tokens)))}
    try:
        if (folder / _MERGES).is_file():
            lines = (folder / _MERGES).read_text(encoding="utf-8").splitlines()
            pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        else:
            about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
            pairs = [m.split(" ") if isinstance(m, str) else m for m in about["merges"]]
        return _gpt2(every, [(left, right) for left, right in pairs])
    except Exception as error:
        raise BadInput(
            f"no readable {_MERGES} or tokenizer.json that fits its tokens", where=str(folder)
        ) from error


def _gpt2(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a tokenizer with GPT-2's splitter and our template around a vocabulary."""
    # As in Llama 3, a word that is a token is used whole: whole words have no merges.
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _PRE_TOKENIZER
    tokenizer.decoder = _DECODER
    if all(t in vocabulary for t in SPECIAL_TOKENS):
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B [SEP]",
            special_tokens=[(t, vocabulary[t]) for t in ("[CLS]", "[SEP]")],
        )
    # "[MASK]" written in a note is text, not a command.
    tokenizer.encode_special_tokens = True
    return tokenizer
