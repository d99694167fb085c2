"""Model folders in Hugging Face's layout.

An output projection that is tied to the word table is not stored a second time.
"""

import json
import shutil
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy gets the type bfloat16, as TensorFlow requires it too
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import decoders

from dp_core.data.tokens import SPECIAL_TOKENS, SpecialIds
from dp_core.errors import BadInput
from dp_core.models.architectures import (
    config_from_hf,
    config_to_hf,
    tensors_from_hf,
    tensors_to_hf,
    unused_positions,
)
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import (
    CLASSIFIER,
    CLASSIFIERS,
    HEAD,
    HEAD_BIAS,
    HEADS,
    MLM_BIAS,
    POOLER,
    POSITION,
    PREDICTION,
    TAGGER,
    TRANSITIONS,
    WORD,
    AnyModel,
    Arrays,
    Bert,
    Model,
    initial_values,
    language_model,
    parameter_shapes,
    shape_facts,
)
from dp_core.vocabulary.tokenizer_files import ALPHABET, stored_ids

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ADAPTER_FOLDER = "adapter"  # a subfolder: next to a merged model, PEFT would apply it again
_SHARDS = "model.safetensors.index.json"
_TOKENIZER = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
_CLASSIFIERS = {TAGGER: "ForTokenClassification", CLASSIFIER: "ForSequenceClassification"}
_OF_CLASSIFIER = {
    TAGGER: (f"{TAGGER}/kernel", f"{TAGGER}/bias", TRANSITIONS),
    CLASSIFIER: tuple(
        f"{name}/{leaf}" for name in (CLASSIFIER, POOLER) for leaf in ("kernel", "bias")
    ),
}
_FLOATS = ("F64", "F32", "F16", "BF16")
_UNUSABLE = (
    *(OSError, SafetensorError, TypeError, ValueError, KeyError, AttributeError),
    ArithmeticError,  # a size of zero or infinity
    RecursionError,  # deeply nested JSON
)


def save(model: AnyModel, folder: Path, vocabulary: Path | None = None) -> None:
    """Write a model, and copy the tokenizer files of the folder `vocabulary` to it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = config_to_hf(model.config)
    for head, task in _CLASSIFIERS.items():
        if f"{head}/kernel" in model.parameters:
            about["architectures"] = [about["architectures"][0].removesuffix("ForMaskedLM") + task]
            about["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
            about["label2id"] = {label: i for i, label in enumerate(model.labels)}
    tensors = tensors_to_hf(model.parameters, model.config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    if vocabulary is not None:
        for name in _TOKENIZER:
            if (vocabulary / name).is_file() and vocabulary != folder:
                shutil.copyfile(vocabulary / name, folder / name)


def load(folder: Path) -> Bert:
    """Read a BERT or a DistilBERT (see `load_model`).

    Raises:
        BadInput: as `load_model`, or the model is causal.
    """
    model = load_model(folder)
    if isinstance(model.config, CausalConfig):
        raise BadInput("a causal model", where=str(folder), fix="This needs a BERT.")
    return Model(model.config, model.parameters, model.labels)


def load_model(folder: Path) -> AnyModel:
    """Read a model with its head: the classifier that `architectures` names, or the MLM head.

    A missing MLM head is initialised from a public seed.

    Raises:
        BadInput: missing files, an unsupported architecture, or tensors of the wrong shape.
    """
    model = _stored_model(folder)
    classifies = any(name.startswith(CLASSIFIERS) for name in model.parameters)
    return model if classifies else language_model(model)


def checkpoint_facts(folder: Path) -> dict[str, Any]:
    """Return the shape, the positions and the presence of a language model's head in a folder.

    Raises:
        BadInput: as `load_model`, or the folder has no vocabulary or one larger than the table.
    """
    model = _stored_model(folder)
    config, stored = model.config, model.parameters.keys()
    _refuse_tokens_beyond(model.parameters[WORD], stored_ids(folder)[0], folder)
    head = stored >= parameter_shapes(config).keys()
    return {"shape": shape_facts(config), "positions": config.max_positions, "head": head}


def _refuse_tokens_beyond(table: Sized, ids: Mapping[str, int], folder: Path) -> None:
    if max(ids.values(), default=0) >= len(table):
        raise BadInput("the vocabulary is larger than the model's table", where=str(folder))


def _stored_model(folder: Path) -> AnyModel:
    """Read a model with the heads that its folder holds, as `load_model` does."""
    about = _read_config(folder)
    config = config_from_hf(about)
    head, shapes = _classifier(about), parameter_shapes(config)
    encoder = [name for name in shapes if not name.startswith(HEADS)]
    names = [*encoder, *_OF_CLASSIFIER[head]] if head else list(shapes)
    parameters = tensors_from_hf(_read_tensors(folder), config, names)
    if POSITION in parameters:
        parameters[POSITION] = parameters[POSITION][unused_positions(about) :]
    for name, shape in shapes.items():
        if name not in parameters and not name.startswith((*HEADS, PREDICTION)):
            raise BadInput(f"{name} is missing", where=f"{folder}/{WEIGHTS}")
        if name in parameters and parameters[name].shape != shape:
            raise BadInput(
                f"{name} is {parameters[name].shape}, but {CONFIG} states {shape}",
                where=f"{folder}/{WEIGHTS}",
            )
    if head and f"{head}/kernel" not in parameters:
        raise BadInput("the classifier is missing", where=f"{folder}/{WEIGHTS}")
    return Model(config, parameters, _labels(about) if head else ())


def _classifier(about: dict[str, Any]) -> str | None:
    """Return the classifier that the config names, if any."""
    words = about.get("architectures") or ()
    if not (isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)):
        raise BadInput("architectures is not a list of names", where=CONFIG)
    heads = (h for h, end in _CLASSIFIERS.items() if any(word.endswith(end) for word in words))
    return next(heads, None)


def _read_tensors(folder: Path) -> Arrays:
    """Return the floating-point tensors of a model folder, of one file or of all its shards.

    Parameters are floats. Tensors of other types, such as the buffer `position_ids` of older
    checkpoints, are not read.

    Raises:
        BadInput: no weights in safetensors, a missing shard, or a damaged file.
    """
    try:
        files = [WEIGHTS]
        if not (folder / WEIGHTS).exists() and (folder / _SHARDS).exists():
            # Only the name is used, so no index can point outside of its folder.
            shards = json.loads((folder / _SHARDS).read_text())["weight_map"].values()
            files = sorted({Path(name).name for name in shards})
        if missing := [name for name in files if not (folder / name).exists()]:
            raise BadInput(_absent(folder, files, missing), where=str(folder), fix=_FORMAT)
        arrays: Arrays = {}
        for file in files:
            with safe_open(folder / file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    if tensors.get_slice(name).get_dtype() in _FLOATS:
                        arrays[name] = tensors.get_tensor(name).astype(np.float32)
        return arrays
    except _UNUSABLE as error:
        raise BadInput(f"{WEIGHTS} cannot be read", where=str(folder), fix=_FORMAT) from error


_FORMAT = f"The folder needs {WEIGHTS}, or all its shards, as `save_pretrained` writes them."


def _absent(folder: Path, files: Sequence[str], missing: Sequence[str]) -> str:
    """Return a message about the missing weights of a folder."""
    if files != [WEIGHTS]:
        return f"{len(missing)} of {len(files)} shards are missing, the first is {missing[0]!r}"
    if pickles := sorted(file.name for file in folder.glob("*.bin")):
        return (
            f"the only weights are {pickles[0]!r}, a pickle, which could run code and is not read"
        )
    return f"{WEIGHTS} is missing"


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{CONFIG} cannot be read", where=str(folder)) from error
    if not isinstance(about, dict):
        raise BadInput(f"{CONFIG} is not a JSON object", where=str(folder))
    return about


def _labels(about: dict[str, Any]) -> tuple[str, ...]:
    names = about.get("id2label", {})
    try:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    except (TypeError, ValueError) as error:
        raise BadInput("id2label does not name labels by number", where=CONFIG) from error


_CONTINUES = "##"
_BYTES = decoders.ByteLevel()
_SPACE = "\u2581"  # SentencePiece's mark at the start of a word, as in Llama 2


def load_with_vocabulary(folder: Path, tokens: Sequence[str], seed: int) -> AnyModel:
    """Read a model and replace its vocabulary.

    A token of the old vocabulary keeps its embedding and output bias. A new token that old tokens
    can spell starts as the mean of their embeddings, with the longest pieces first, so that the
    model keeps its knowledge of the word. Any other token is sampled around the mean of the old
    table with the table's standard deviation. New tokens get the mean bias, so that their logits
    are ordinary and do not exceed all others (Hewitt 2021, "Initializing New Word Embeddings for
    Pretrained Language Models").

    Args:
        folder: the model, with `vocab.txt`, `tokenizer.json` or GPT-2's `vocab.json`.
        tokens: the new vocabulary in order of id, WordPiece or byte-level. A byte-level vocabulary
            contains all 256 characters that represent bytes.
        seed: public.

    Raises:
        BadInput: as `load_model`, or the folder has no vocabulary.
    """
    model = load_model(folder)
    old, prefix = _names_for(tokens, *stored_ids(folder))
    config = replace(model.config, vocab_size=len(tokens))
    if isinstance(config, CausalConfig):  # begin and end tokens may have other names
        old = {"[CLS]": config.begin, "[SEP]": config.end} | old
        config = replace(config, begin=SpecialIds.cls, end=SpecialIds.sep)
    table = model.parameters[WORD]
    _refuse_tokens_beyond(table, old, folder)
    spelt = [_spelt(token, old, prefix) for token in tokens]
    changed = {WORD: _exchanged(WORD, table, spelt, seed)}
    if (head := model.parameters.get(f"{HEAD}/kernel")) is not None:
        by_token = _exchanged(HEAD, head.T, spelt, seed)
        changed[f"{HEAD}/kernel"] = np.ascontiguousarray(by_token.T)
    for name in {MLM_BIAS, HEAD_BIAS} & model.parameters.keys():
        bias = model.parameters[name]
        mean = bias.mean()
        kept = [bias[pieces[0]] if len(pieces) == 1 else mean for pieces in spelt]
        changed[name] = np.array(kept, np.float32)
    return Model(config, model.parameters | changed, model.labels)


def _spelt(token: str, old: Mapping[str, int], prefix: str) -> list[int]:
    """Return the ids of old tokens that spell a new token, longest first; [] if none do.

    An old token spells itself, and is the only spelling by one piece.

    Args:
        token: the new token, with the prefix if it continues a word.
        old: ids by token, with the same prefix.
        prefix: the continuation prefix `##` of WordPiece; empty for byte-level tokens.
    """
    rest, pieces = token, [old[token]] if token == prefix and token in old else []
    while rest not in ("", prefix):
        least = len(prefix) if prefix and rest.startswith(prefix) else 0
        for end in range(len(rest), least, -1):
            if rest[:end] in old:
                pieces.append(old[rest[:end]])
                rest = prefix + rest[end:]
                break
        else:
            return []
    return pieces


def _exchanged(
    name: str, table: NDArray[np.float32], spelt: Sequence[Sequence[int]], seed: int
) -> NDArray[np.float32]:
    """Return the new table, (V, D) -> (V', D): kept rows, means of pieces, and random rows."""
    draws = initial_values({name: (len(spelt), table.shape[1])}, 1.0, seed)[name]
    out: NDArray[np.float32] = table.mean(0) + table.std(0) * draws
    for new, pieces in enumerate(spelt):
        if pieces:
            out[new] = table[list(pieces)].mean(0)
    return out


def _names_for(
    tokens: Sequence[str], stored: dict[str, int], kind: str
) -> tuple[dict[str, int], str]:
    """Return stored ids by names in the form of a new vocabulary, and its continuation prefix."""
    byte_level, names = set(ALPHABET) <= set(tokens), stored
    marked = any(token.startswith(_SPACE) for token in stored)
    if kind == "BPE" and byte_level and marked:
        names = {token.replace(_SPACE, "\u0120"): i for token, i in stored.items()}
    elif kind == "BPE" and not byte_level:
        names = {}
        for token, i in stored.items():
            text = token.replace(_SPACE, " ") if marked else _BYTES.decode([token])
            names[text[1:] if text.startswith(" ") else _CONTINUES + text] = i
        names |= {token: stored[token] for token in SPECIAL_TOKENS if token in stored}
    return names, "" if byte_level else _CONTINUES
