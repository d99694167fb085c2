"""Tokenizers in the files of Hugging Face: saved vocabularies, and those of checkpoints.

A saved vocabulary is its `tokenizer.json`; the other files describe it to `transformers`. Its
special tokens are [PAD] [UNK] [CLS] [SEP] [MASK] with the ids 0 to 4, and no text contains them:
"[MASK]" written in a note is text, not a command.

A checkpoint keeps its normalizer, its pre-tokenizer and its model, so texts are split as in its
training. Only its special tokens are renamed and moved. `tokenizer_files.toml` lists the parts that
are supported.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dp_core.data.tokens import BERT, SPECIAL_TOKENS, Segmentation, SpecialIds
from dp_core.errors import BadInput

WHOLE, CONFIG = "tokenizer.json", "tokenizer_config.json"
WORD_PIECES, BYTE_LEVEL, MERGES = "vocab.txt", "vocab.json", "merges.txt"
ALPHABET = tuple(sorted(ByteLevel.alphabet()))  # one character for each byte
PREFIX = "##"  # of WordPiece's tokens that continue a word
# GPT-2's words: a space belongs to the word after it, case matters, digits and letters do not mix.
GPT2 = Segmentation("null", ByteLevel(add_prefix_space=False).__getstate__().decode())

Json = dict[str, Any]
_TABLES: Json = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
WORD_PIECE: Json = _TABLES["word_piece"]
_LITERAL = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
_SUPPORTED = (
    "Supported are WordPiece, and byte-level BPE as in GPT-2, RoBERTa, ModernBERT and Llama 3. A"
    " job can also exchange the tokens (vocabulary_source)."
)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens are byte-level BPE; all others are WordPiece."""
    return isinstance(tokenizer.model, BPE)


def tokens_file(tokenizer: Tokenizer) -> str:
    """Return the name of the saved file that lists the tokens."""
    return BYTE_LEVEL if is_byte_level(tokenizer) else WORD_PIECES


def spelt(tokenizer: Tokenizer, token: int | str) -> str:
    """Return the characters of a token, without marks of a word's beginning or continuation."""
    name = str(tokenizer.id_to_token(token)) if isinstance(token, int) else token
    text = tokenizer.decoder.decode([name]) if is_byte_level(tokenizer) else name
    return str(text).strip().removeprefix(PREFIX)


def continuation_tokens(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return bool `[V]`: true for tokens that continue a word; false for all byte-level tokens."""
    out = np.zeros(tokenizer.get_vocab_size(), np.bool_)
    for token, i in tokenizer.get_vocab().items():
        out[i] = token.startswith(PREFIX) and len(token) > len(PREFIX)
    return out & (not is_byte_level(tokenizer))


def learned(tokens: Sequence[str], words: Segmentation, model: Json) -> Tokenizer:
    """Return the tokenizer of learned tokens.

    Args:
        tokens: in order of id: the special tokens, the placeholders of `words`, and all others.
        words: the segmentation of the words that were counted.
        model: type and parameters of the model, in the form of `tokenizer.json`.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    kept = [{"id": ids[token], "content": token, **_LITERAL} for token in words.placeholders]
    return _assembled({**model, "vocab": ids}, words.to_json(), kept)


def _assembled(model: Json, parts: Mapping[str, Any], added: Sequence[Json]) -> Tokenizer:
    """Return the tokenizer of a model whose first tokens are the special tokens.

    Args:
        model: in the form of `tokenizer.json`, as are the others.
        parts: normalizer and pre-tokenizer.
        added: further added tokens.
    """
    special = [
        {**_LITERAL, "id": i, "content": token, "special": True}
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    about = dict.fromkeys(("truncation", "padding", "post_processor", "decoder", "normalizer"))
    about |= {name: parts[name] for name in ("normalizer", "pre_tokenizer") if name in parts}
    about |= {"version": "1.0", "added_tokens": [*special, *added], "model": model}
    tokenizer = Tokenizer.from_str(json.dumps(about))
    byte_level = is_byte_level(tokenizer)
    tokenizer.decoder = decoders.ByteLevel() if byte_level else decoders.WordPiece(PREFIX)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", SpecialIds.cls), ("[SEP]", SpecialIds.sep)],
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


def takes_words(tokenizer: Tokenizer) -> bool:
    """Return whether `with_words` can add words, and `Segmentation.of` returns the exact words."""
    added = [t for t in tokenizer.get_added_tokens_decoder().values() if not t.special]
    options = any(t.normalized or t.single_word or t.lstrip or t.rstrip for t in added)
    return not (options or is_byte_level(tokenizer))


def with_words(tokenizer: Tokenizer, words: Iterable[str]) -> Tokenizer:
    """Return a WordPiece tokenizer with more whole words, after all its other words."""
    about = json.loads(tokenizer.to_str())
    return _ordered(about, [*about["model"]["vocab"], *words])


def _ordered(about: Json, tokens: Iterable[str]) -> Tokenizer:
    """Return a tokenizer whose model has these tokens after the special ones.

    Added tokens that are not tokens of the model follow, in their order.
    """
    ids = {token: i for i, token in enumerate(dict.fromkeys((*SPECIAL_TOKENS, *tokens)))}
    added = sorted(about.get("added_tokens") or (), key=lambda token: token["id"])
    added = [token for token in added if token["content"] not in SPECIAL_TOKENS]
    later = (token["content"] for token in added if token["content"] not in ids)
    places = {**ids, **{token: len(ids) + i for i, token in enumerate(later)}}
    added = [{**token, "id": places[token["content"]]} for token in added]
    return _assembled({**about["model"], "vocab": ids}, about, added)


def save(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Write `tokenizer.json`, and for other readers its tokens and its settings."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / WHOLE))
    about, ids = json.loads(tokenizer.to_str()), tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    config: Json = {f"{t[1:-1].lower()}_token": t for t in SPECIAL_TOKENS}
    # This class reads all of tokenizer.json; GPT2Tokenizer would omit its template.
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    listed = "".join(f"{token}\n" for token in tokens)
    if is_byte_level(tokenizer):
        config |= {"bos_token": "[CLS]", "eos_token": "[SEP]"}
        lines = "".join(f"{left} {right}\n" for left, right in about["model"]["merges"])
        (folder / MERGES).write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
        listed = json.dumps({token: ids[token] for token in tokens}, ensure_ascii=False)
    elif (normalizer := about["normalizer"] or {}).get("type") == "BertNormalizer":
        config["tokenizer_class"] = "BertTokenizer"
        config |= {name: normalizer[flag] for flag, name in _TABLES["bert"].items()}
    (folder / tokens_file(tokenizer)).write_text(listed, encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load(folder: Path | str) -> Tokenizer:
    """Return the tokenizer of a folder that `save` wrote.

    Raises:
        BadInput: no vocabulary, or one without the special tokens.
    """
    try:
        tokenizer = Tokenizer.from_file(str(Path(folder) / WHOLE))
    except Exception as error:  # tokenizers raises no narrower class
        raise BadInput(
            "no readable vocabulary", where=str(folder), fix="Run the vocabulary step."
        ) from error
    SpecialIds.of(tokenizer)
    tokenizer.encode_special_tokens = True
    return tokenizer


# --- checkpoints


def of_checkpoint(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model from any source, with this project's special tokens.

    A special token of the model that has one role is renamed. The special tokens come first,
    missing ones are added, and the other tokens keep their order.

    Raises:
        BadInput: no readable tokenizer, or one that cannot be reproduced.
    """
    about = _stored(folder)
    ids, reason = about["model"]["vocab"], next(_unsupported(about), None)
    if not reason:
        try:
            tokenizer = _ordered(about, sorted(ids, key=ids.__getitem__))
            read = tokenizer.encode(" ".join(SPECIAL_TOKENS), add_special_tokens=False).ids
            if set(SpecialIds().as_tuple()).intersection(read) <= {SpecialIds.unk}:
                return tokenizer
            reason = "special tokens that occur in texts"
        except Exception:  # noqa: BLE001 - tokenizers raises no narrower class
            reason = "merges that do not fit its tokens"
    raise BadInput(
        f"the model's tokenizer cannot be reproduced: it has {reason}"[:200],
        where=str(folder),
        fix=_SUPPORTED,
    )


def stored_ids(folder: Path) -> tuple[dict[str, int], str]:
    """Return the ids of a checkpoint's tokens by their names in `of_checkpoint`, and its type.

    A special token with several roles has several names. The type is WordPiece or BPE.

    Raises:
        BadInput: no readable vocabulary.
    """
    about = _stored(folder)
    return {**_ids(about), **about["roles"]}, about["model"]["type"]


def _stored(folder: Path) -> Json:
    """Return the content of `tokenizer.json`, in which special tokens have this project's names.

    The field `roles` has the ids of special tokens. Without the file, its content is made from the
    files that determine it. As in `transformers`, `tokenizer_config.json` overrides case, accents,
    Chinese characters and the space before a text.
    """
    config = _json(folder / CONFIG)
    try:
        if (folder / WHOLE).is_file():
            about: Json = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
        else:
            about = _from_lists(folder, config)
        if (model := about["model"]).setdefault("type", "WordPiece") == "WordPiece":
            model = about["model"] = {**WORD_PIECE, **model}
        for part in _parts(about, "normalizer"):
            if part["type"] == "BertNormalizer":
                part |= {f: config[name] for f, name in _TABLES["bert"].items() if name in config}
        for part in _parts(about, "pre_tokenizer"):
            if part["type"] == "ByteLevel" and "add_prefix_space" in config:
                part["add_prefix_space"] = config["add_prefix_space"]
        ids = _ids(about)
        if model["type"] not in _TABLES["classes"] or {type(i) for i in ids.values()} - {int}:
            raise ValueError("another type of model, or an id that is no number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"no readable {WORD_PIECES}, {BYTE_LEVEL} or {WHOLE}", where=str(folder), fix=_SUPPORTED
        ) from error
    roles = _roles({**_json(folder / "special_tokens_map.json"), **config}, ids)
    about["roles"] = {special: ids[token] for special, token in roles.items()}
    shared = Counter(roles.values())
    new = {token: special for special, token in roles.items() if shared[token] == 1}
    model["vocab"] = {new.get(token, token): i for token, i in model["vocab"].items()}
    model["unk_token"] = new.get(model.get("unk_token"), model.get("unk_token"))
    for token in about.get("added_tokens") or ():
        token["content"] = new.get(token["content"], token["content"])
    return about


def _from_lists(folder: Path, config: Json) -> Json:
    """Return the content of `tokenizer.json` as `transformers` makes it from lists of tokens."""
    added = [{"id": int(i), **t} for i, t in config.get("added_tokens_decoder", {}).items()]
    if (folder / WORD_PIECES).is_file():
        lines = (folder / WORD_PIECES).read_text(encoding="utf-8").split("\n")
        tokens = {token.rstrip("\r"): i for i, token in enumerate(lines) if token}
        about = {"model": {"type": "WordPiece", "vocab": tokens}, **BERT.to_json()}
        about["normalizer"]["strip_accents"] = None  # follows the case
    else:
        tokens = json.loads((folder / BYTE_LEVEL).read_text(encoding="utf-8"))
        about = {"model": {"type": "BPE", "vocab": tokens}, **GPT2.to_json()}
        if (folder / MERGES).is_file():
            lines = (folder / MERGES).read_text(encoding="utf-8").splitlines()
            pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
            about["model"]["merges"] = pairs
    stated = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if stated and stated not in _TABLES["classes"][about["model"]["type"]]:
        about["unknown"] = stated
    return {**about, "added_tokens": added}


def _unsupported(about: Json) -> Iterator[str]:
    """Yield the reasons why a tokenizer may split texts otherwise than in its model's training."""
    model = about["model"]
    if "unknown" in about:
        yield f"the class {about['unknown']}"
    for kind, supported in _TABLES["supported"].items():
        types = [part["type"] for part in _parts(about, kind)]
        yield from (f"the {kind} {name}" for name in types if name not in supported)
    yield from (name for name in _TABLES["refused"]["options"] if model.get(name))
    if model["type"] == "BPE":
        if "ByteLevel" not in types or not set(ALPHABET) <= set(model["vocab"]):
            yield "BPE without all 256 bytes"
        if "merges" not in model:
            yield f"no {MERGES}"
    elif not types or model["continuing_subword_prefix"] != PREFIX:
        yield f"no pre-tokenizer, or another prefix than {PREFIX}"


def _parts(about: Json, name: str) -> Iterator[Json]:
    """Yield the parts of a normalizer or pre-tokenizer, which may be a sequence."""
    part = about.get(name) or {"type": "Sequence"}
    if part["type"] != "Sequence":
        yield part
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _parts({name: inner}, name)


def _ids(about: Json) -> dict[str, int]:
    """Return the ids of all tokens."""
    added = {token["content"]: token["id"] for token in about.get("added_tokens") or ()}
    return {**about["model"]["vocab"], **added}


def _roles(stated: Json, known: Mapping[str, int]) -> dict[str, str]:
    """Return the stored name of each of this project's special tokens that a checkpoint has."""
    roles: dict[str, str] = {}
    for special, (settings, usual) in _TABLES["roles"].items():
        values = [stated.get(name) for name in settings]
        names = [value.get("content") if isinstance(value, dict) else value for value in values]
        present = [name for name in (special, *map(str, names), *usual) if name in known]
        roles |= {special: present[0]} if present else {}
    return roles


def _json(file: Path) -> Json:
    """Return a JSON object; empty if the file is absent or holds none, which states nothing."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
