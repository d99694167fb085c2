"""Tokenizers in the files of Hugging Face: saved vocabularies, and those of checkpoints.

A saved vocabulary is its `tokenizer.json`; the other files describe it to `transformers`. Its
special tokens are [PAD] [UNK] [CLS] [SEP] [MASK] with the ids 0 to 4, and no text contains them:
"[MASK]" written in a note is text, not a command.

A checkpoint keeps its normalizer, its pre-tokenizer and its model, so texts are split as in its
training. Only its special tokens are renamed and moved.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dp_core.data.tokens import BERT, SPECIAL_TOKENS, Segmentation, SpecialIds
from dp_core.errors import BadInput

WHOLE, CONFIG = "tokenizer.json", "tokenizer_config.json"
WORD_PIECES, BYTE_LEVEL, MERGES = "vocab.txt", "vocab.json", "merges.txt"
ALPHABET = tuple(sorted(ByteLevel.alphabet()))  # one character for each byte
PREFIX = "##"  # of WordPiece's tokens that continue a word

Json = dict[str, Any]
_BERT_FLAGS = {  # of the normalizer, as `tokenizer_config.json` names them
    "lowercase": "do_lower_case",
    "strip_accents": "strip_accents",
    "handle_chinese_chars": "tokenize_chinese_chars",
}
_LITERAL = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)


WORD_PIECE = {
    "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": PREFIX,
    "max_input_chars_per_word": 100,
}  # fmt: skip
# GPT-2's words: a space belongs to the word after it, case matters, digits and letters do not mix.
GPT2 = Segmentation("null", ByteLevel(add_prefix_space=False).__getstate__().decode())


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens are byte-level BPE; all others are WordPiece."""
    return isinstance(tokenizer.model, BPE)


def tokens_file(tokenizer: Tokenizer) -> str:
    """Return the name of the saved file that lists the tokens."""
    return BYTE_LEVEL if is_byte_level(tokenizer) else WORD_PIECES


def spelt(tokenizer: Tokenizer, token: int | str) -> str:
    """Return the characters of a token, without marks of a word's beginning or continuation."""
    name = str(tokenizer.id_to_token(token)) if isinstance(token, int) else token
    if is_byte_level(tokenizer):
        return str(tokenizer.decoder.decode([name])).strip()
    return name.removeprefix(PREFIX)


def learned(tokens: Sequence[str], words: Segmentation, **model: Any) -> Tokenizer:
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
        {"id": i, "content": token, **_LITERAL, "special": True}
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    about = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [*special, *added], "post_processor": None, "decoder": None,
        "normalizer": parts.get("normalizer"), "pre_tokenizer": parts["pre_tokenizer"],
        "model": model,
    }  # fmt: skip
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
    own = about["model"]["vocab"]
    ids = {t: i for i, t in enumerate(dict.fromkeys((*sorted(own, key=own.__getitem__), *words)))}
    return _assembled({**about["model"], "vocab": ids}, about, _renumbered(about, ids))


def _renumbered(about: Json, ids: Mapping[str, int]) -> list[Json]:
    """Return the added tokens after the special ones: words of the model, or after all of them."""
    added = sorted(about.get("added_tokens") or (), key=lambda token: token["id"])
    added = [token for token in added if token["content"] not in SPECIAL_TOKENS]
    later = (token["content"] for token in added if token["content"] not in ids)
    places = {**ids, **{token: len(ids) + i for i, token in enumerate(later)}}
    return [{**token, "id": places[token["content"]]} for token in added]


def save(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Write `tokenizer.json`, and for other readers its tokens and its settings."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / WHOLE))
    about = json.loads(tokenizer.to_str())
    normalizer, ids = about["normalizer"] or {}, tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    config: Json = {f"{t[1:-1].lower()}_token": t for t in SPECIAL_TOKENS}
    # This class reads all of tokenizer.json; GPT2Tokenizer would omit its template.
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if is_byte_level(tokenizer):
        config |= {"bos_token": "[CLS]", "eos_token": "[SEP]"}
        lines = "".join(f"{left} {right}\n" for left, right in about["model"]["merges"])
        (folder / MERGES).write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
        listed = json.dumps({token: ids[token] for token in tokens}, ensure_ascii=False)
    else:
        listed = "".join(f"{token}\n" for token in tokens)
        if normalizer.get("type") == "BertNormalizer":
            config["tokenizer_class"] = "BertTokenizer"
            config |= {stated: normalizer[flag] for flag, stated in _BERT_FLAGS.items()}
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

_CLASSES = {  # without tokenizer.json, the files of these classes determine a tokenizer
    "WordPiece": ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"),
    "BPE": ("GPT2Tokenizer", "RobertaTokenizer", "DistilRobertaTokenizer"),
}
_OPTIONS = ("dropout", "byte_fallback", "end_of_word_suffix")  # of BPE; not supported
_NORMALIZERS = {
    *("BertNormalizer", "Lowercase", "StripAccents"),
    *("NFC", "NFD", "NFKC", "NFKD"),
}
_PRE_TOKENIZERS = {
    *("BertPreTokenizer", "ByteLevel", "Split", "Digits"),
    *("Punctuation", "Whitespace", "WhitespaceSplit"),
}
_SUPPORTED = (
    "Supported are WordPiece, and byte-level BPE as in GPT-2, RoBERTa, ModernBERT and Llama 3. A"
    " job can also exchange the tokens (vocabulary_source)."
)
_ROLES = {  # settings that name a special token, and its usual names
    "[PAD]": (("pad_token",), ("<pad>",)),
    "[UNK]": (("unk_token",), ("<unk>",)),
    "[CLS]": (("cls_token", "bos_token"), ("<s>", "<|begin_of_text|>", "<|endoftext|>")),
    "[SEP]": (("sep_token", "eos_token"), ("</s>", "<|end_of_text|>", "<|endoftext|>")),
    "[MASK]": (("mask_token",), ("<mask>",)),
}


def of_checkpoint(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model from any source, with this project's special tokens.

    A special token of the model that has one role is renamed. The special tokens come first,
    missing ones are added, and the other tokens keep their order.

    Raises:
        BadInput: no readable tokenizer, or one that cannot be reproduced.
    """
    about = _stored(folder)
    _refuse_unsupported(about, folder)
    old, roles = _ids(about), _roles(folder, about)
    shared = Counter(roles.values())
    new = {stored: special for special, stored in roles.items() if shared[stored] == 1}
    own = [new.get(token, token) for token in sorted(about["model"]["vocab"], key=old.__getitem__)]
    ids = {token: i for i, token in enumerate(dict.fromkeys((*SPECIAL_TOKENS, *own)))}
    for token in about.get("added_tokens") or ():
        token["content"] = new.get(token["content"], token["content"])
    unknown = about["model"].get("unk_token")
    about["model"]["unk_token"] = new.get(unknown, unknown)
    added = _renumbered(about, ids)
    try:
        tokenizer = _assembled({**about["model"], "vocab": ids}, about, added)
    except Exception as error:  # tokenizers raises no narrower class
        raise BadInput(
            f"its tokenizer cannot be read: {MERGES} or {WHOLE} does not fit its tokens",
            where=str(folder),
            fix=_SUPPORTED,
        ) from error
    expected = {**ids, **{token["content"]: token["id"] for token in added}}
    commands = set(SpecialIds().as_tuple()) - {SpecialIds.unk}
    written = tokenizer.encode(" ".join(SPECIAL_TOKENS), add_special_tokens=False).ids
    if tokenizer.get_vocab() != expected or commands & set(written):
        raise BadInput("its special tokens occur in texts", where=str(folder), fix=_SUPPORTED)
    return tokenizer


def stored_ids(folder: Path) -> tuple[dict[str, int], str]:
    """Return the ids of a checkpoint's tokens by their names in `of_checkpoint`, and its type.

    A special token with several roles has several names. The type is WordPiece or BPE.

    Raises:
        BadInput: no readable vocabulary.
    """
    about = _stored(folder)
    if (kind := about["model"]["type"]) not in ("BPE", "WordPiece"):
        raise BadInput(f"tokens of the type {kind}"[:80], where=str(folder), fix=_SUPPORTED)
    old, roles = _ids(about), _roles(folder, about)
    shared = Counter(roles.values())
    renamed = {stored for stored in roles.values() if shared[stored] == 1}
    kept = {token: i for token, i in old.items() if token not in renamed}
    return {**kept, **{special: old[stored] for special, stored in roles.items()}}, kind


def _stored(folder: Path) -> Json:
    """Return `tokenizer.json`, or the same content made from the files that determine it.

    As in `transformers`, `tokenizer_config.json` overrides case, accents, Chinese characters and
    the space before a text.
    """
    config = _json(folder / CONFIG)
    try:
        if (folder / WHOLE).is_file():
            about: Json = json.loads((folder / WHOLE).read_text(encoding="utf-8"))
            if about["model"].get("type", "WordPiece") == "WordPiece":
                about["model"] = {**WORD_PIECE, **about["model"]}
        else:
            about = _from_lists(folder, config)
        for part in _parts(about, "normalizer"):
            if part["type"] == "BertNormalizer":
                part |= {f: config[name] for f, name in _BERT_FLAGS.items() if name in config}
        for part in _parts(about, "pre_tokenizer"):
            if part["type"] == "ByteLevel" and "add_prefix_space" in config:
                part["add_prefix_space"] = config["add_prefix_space"]
        if not all(isinstance(i, int) and i >= 0 for i in _ids(about).values()):
            raise ValueError("an id is not a number")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"no readable {WORD_PIECES}, {BYTE_LEVEL} or {WHOLE}", where=str(folder), fix=_SUPPORTED
        ) from error
    return about


def _from_lists(folder: Path, config: Json) -> Json:
    """Return the content of `tokenizer.json` as `transformers` makes it from lists of tokens."""
    added = [{"id": int(i), **t} for i, t in config.get("added_tokens_decoder", {}).items()]
    about: Json = {"added_tokens": added}
    if (folder / WORD_PIECES).is_file():
        lines = (folder / WORD_PIECES).read_text(encoding="utf-8").split("\n")
        vocabulary = {token.rstrip("\r"): i for i, token in enumerate(lines) if token}
        about |= BERT.to_json()
        about["normalizer"]["strip_accents"] = None  # follows the case
        model = WORD_PIECE
    else:
        vocabulary = dict(json.loads((folder / BYTE_LEVEL).read_text(encoding="utf-8")))
        about |= GPT2.to_json()
        model = {"type": "BPE"}
        if (folder / MERGES).is_file():
            text = (folder / MERGES).read_text(encoding="utf-8")
            lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
            model["merges"] = [line.rstrip("\r").split(" ") for line in lines]
    stated, known = config.get("tokenizer_class"), _CLASSES[str(model["type"])]
    if stated is not None and str(stated).removesuffix("Fast") not in known:
        about["unknown"] = f"the class {stated}"
    return {**about, "model": {**model, "vocab": vocabulary}}


def _refuse_unsupported(about: Json, folder: Path) -> None:
    """Refuse a tokenizer that is not certain to split texts as in the training of its model."""
    model = about["model"]
    normalizers = [part["type"] for part in _parts(about, "normalizer")]
    pre_tokenizers = [part["type"] for part in _parts(about, "pre_tokenizer")]
    reasons = [
        *([about["unknown"]] if "unknown" in about else []),
        *(f"the normalizer {name}" for name in normalizers if name not in _NORMALIZERS),
        *(f"the pre-tokenizer {name}" for name in pre_tokenizers if name not in _PRE_TOKENIZERS),
        *(f"{name}" for name in _OPTIONS if model.get(name)),
    ]
    if model["type"] == "BPE":
        if "ByteLevel" not in pre_tokenizers or not set(ALPHABET) <= set(model["vocab"]):
            reasons.append("BPE without all 256 bytes")
        if "merges" not in model:
            reasons.append(f"no {MERGES}")
    elif model["type"] != "WordPiece" or model.get("continuing_subword_prefix", PREFIX) != PREFIX:
        reasons.append(f"a model {model['type']} without the prefix {PREFIX}")
    elif not pre_tokenizers:
        reasons.append("no pre-tokenizer")
    if reasons:
        raise BadInput(
            f"the model's tokenizer cannot be reproduced: it has {reasons[0]}"[:200],
            where=str(folder),
            fix=_SUPPORTED,
        )


def _parts(about: Json, name: str) -> Iterator[Json]:
    """Yield the parts of a normalizer or pre-tokenizer, which may be a sequence."""
    part = about.get(name)
    if part and part["type"] == "Sequence":
        for inner in part[{"normalizer": "normalizers"}.get(name, "pretokenizers")]:
            yield from _parts({name: inner}, name)
    elif part:
        yield part


def _ids(about: Json) -> dict[str, int]:
    """Return the ids of all tokens, as the checkpoint spells them."""
    added = {token["content"]: token["id"] for token in about.get("added_tokens") or ()}
    return {**about["model"]["vocab"], **added}


def _roles(folder: Path, about: Json) -> dict[str, str]:
    """Return the stored name of each of this project's special tokens, as far as there is one."""
    known, stated = _ids(about), {**_json(folder / "special_tokens_map.json")}
    stated |= {name: value for name, value in _json(folder / CONFIG).items() if value}
    roles = {}
    for special, (settings, usual) in _ROLES.items():
        values = [stated.get(name) for name in settings]
        names = [value.get("content") if isinstance(value, dict) else value for value in values]
        for name in (special, *names, *usual):
            if isinstance(name, str) and name in known:
                roles[special] = name
                break
    return roles


def _json(file: Path) -> Json:
    """Return a JSON object; empty if the file is absent or holds none, which states nothing."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
