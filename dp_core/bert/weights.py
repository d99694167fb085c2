"""Models as folders, in Hugging Face's layout: `config.json`, `model.safetensors`, vocabulary.

What is written here loads in `transformers` as `BertForMaskedLM`, and the other way round.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dp_core.bert.config import BertConfig
from dp_core.bert.hf_names import from_hf, to_hf
from dp_core.bert.parameters import (
    MLM_BIAS,
    TAGGER,
    WORD,
    Arrays,
    Bert,
    initial_values,
    parameter_shapes,
)
from dp_core.errors import BadInput

CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocab.txt"
_TOKENIZER = (VOCABULARY, "tokenizer.json", "tokenizer_config.json")


def save(model: Bert, folder: Path, vocabulary: Path | None = None) -> None:
    """Write a model, with the tokenizer files of the folder `vocabulary` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = model.config.to_hf()
    if f"{TAGGER}/kernel" in model.parameters:
        about["architectures"] = ["BertForTokenClassification"]
        about["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
        about["label2id"] = {label: i for i, label in enumerate(model.labels)}
    tensors = to_hf(model.parameters, model.config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    if vocabulary is not None:
        for name in _TOKENIZER:
            if (vocabulary / name).is_file() and vocabulary != folder:
                shutil.copyfile(vocabulary / name, folder / name)


def load(folder: Path) -> Bert:
    """Read a model; an MLM head that the folder lacks is initialised afresh, with no data.

    Raises:
        BadInput: files missing, not a BERT, or tensors that do not fit the config.
    """
    about = _read_config(folder)
    config = BertConfig.from_hf(about)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, TypeError) as error:
        raise BadInput(
            f"{WEIGHTS} cannot be read", where=str(folder), fix="Give a Hugging Face BERT folder."
        ) from error
    found = from_hf(tensors, config)
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        if name not in found and not name.startswith("mlm/"):
            raise BadInput(f"{name} is missing", where=f"{folder}/{WEIGHTS}")
        if name in found and found[name].shape != shape:
            raise BadInput(
                f"{name} is {found[name].shape}, the config says {shape}",
                where=f"{folder}/{WEIGHTS}",
            )
    missing = {name: shape for name, shape in shapes.items() if name not in found}
    fresh = initial_values(missing, config.initializer_range, seed=0)
    return Bert(config, fresh | found, _labels(about) if f"{TAGGER}/kernel" in found else ())


def load_with_vocabulary(folder: Path, pieces: Sequence[str], seed: int) -> Bert:
    """Read a model for another vocabulary.

    Pieces that the folder's `vocab.txt` has keep their embedding and output bias; the others are
    initialised from the public seed. This uses the vocabularies alone, and no data.

    Args:
        folder: the model, with its `vocab.txt`.
        pieces: the new vocabulary, in order of id.
        seed: public.
    """
    model = load(folder)
    old = {piece: i for i, piece in enumerate(read_vocabulary(folder))}
    config = model.config.with_vocabulary(len(pieces))
    shapes = parameter_shapes(config)
    changed: Arrays = initial_values(
        {name: shapes[name] for name in (WORD, MLM_BIAS)}, config.initializer_range, seed
    )
    pairs = [(new, old[piece]) for new, piece in enumerate(pieces) if piece in old]
    if pairs:
        to, source = np.array(pairs).T
        for name, values in changed.items():
            values[to] = model.parameters[name][source]
    return Bert(config, model.parameters | changed)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{CONFIG} cannot be read", where=str(folder)) from error
    return about


def _labels(about: dict[str, Any]) -> tuple[str, ...]:
    names = about.get("id2label", {})
    return tuple(names[key] for key in sorted(names, key=int))


def read_vocabulary(folder: Path) -> list[str]:
    """Return the pieces of the folder's `vocab.txt`, in order of id."""
    try:
        return (folder / VOCABULARY).read_text(encoding="utf-8").split("\n")[:-1]
    except OSError as error:
        raise BadInput(f"{VOCABULARY} cannot be read", where=str(folder)) from error
