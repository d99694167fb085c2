"""Models as folders, in Hugging Face's layout: `config.json`, `model.safetensors`, vocabulary.

What is written here loads in `transformers` as `BertForMaskedLM`, `DistilBertForMaskedLM`,
`GPT2LMHeadModel`, or as a classifier of tokens or sequences, and the other way round.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dp_core.bert.config import BertConfig
from dp_core.bert.gpt2_config import Gpt2Config
from dp_core.bert.hf_names import from_hf, heads_of, to_hf
from dp_core.bert.parameters import (
    CLASSIFIER,
    HEADS,
    TAGGER,
    AnyModel,
    Bert,
    Model,
    ModelConfig,
    language_model,
    parameter_shapes,
)
from dp_core.errors import BadInput

CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocab.txt"
_SHARDS = "model.safetensors.index.json"
_TOKENIZER = (VOCABULARY, "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
_CLASSIFIERS = {TAGGER: "ForTokenClassification", CLASSIFIER: "ForSequenceClassification"}
_UNUSABLE = (
    *(OSError, SafetensorError, TypeError, ValueError, KeyError, AttributeError),
    RecursionError,  # JSON of a hundred thousand brackets
)
_FAMILIES = {"bert": "Bert", "distilbert": "DistilBert"}


def save(model: AnyModel, folder: Path, vocabulary: Path | None = None) -> None:
    """Write a model, with the tokenizer files of the folder `vocabulary` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = model.config.to_hf()
    for head in heads_of(model.parameters) & _CLASSIFIERS.keys():
        about["architectures"] = [_FAMILIES[about["model_type"]] + _CLASSIFIERS[head]]
        about["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
        about["label2id"] = {label: i for i, label in enumerate(model.labels)}
    save_file(to_hf(model.parameters, model.config), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=2) + "\n")
    if vocabulary is not None:
        for name in _TOKENIZER:
            if (vocabulary / name).is_file() and vocabulary != folder:
                shutil.copyfile(vocabulary / name, folder / name)


def load(folder: Path) -> Bert:
    """Read a BERT or a DistilBERT; see `load_model`.

    Raises:
        BadInput: as `load_model`; or it is a GPT-2.
    """
    model = load_model(folder)
    if not isinstance(model.config, BertConfig):
        raise BadInput("a causal model", where=str(folder), fix="This needs a BERT.")
    return Model(model.config, model.parameters, model.labels)


def load_model(folder: Path) -> AnyModel:
    """Read a model with the head that its `architectures` name: a classifier, or else the MLM head.

    An MLM head that the folder lacks is initialised afresh, with no data.

    Raises:
        BadInput: files missing, another architecture, or tensors that do not fit the config.
    """
    about = _read_config(folder)
    config = _shape(about)
    head = _classifier(about)
    found = from_hf(_read_tensors(folder), config, frozenset({"mlm"} if head is None else {head}))
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        if name not in found and not name.startswith(HEADS):
            raise BadInput(f"{name} is missing", where=f"{folder}/{WEIGHTS}")
        if name in found and found[name].shape != shape:
            raise BadInput(
                f"{name} is {found[name].shape}, the config says {shape}",
                where=f"{folder}/{WEIGHTS}",
            )
    if head is None:
        return language_model(Model(config, found))
    if f"{head}/kernel" not in found:
        raise BadInput("its classifier is missing", where=f"{folder}/{WEIGHTS}")
    return Model(config, found, _labels(about))


def _shape(about: dict[str, Any]) -> ModelConfig:
    if about.get("model_type") == "gpt2":
        return Gpt2Config.from_hf(about)
    return BertConfig.from_hf(about)


def _classifier(about: dict[str, Any]) -> str | None:
    """Return the classifier that the config speaks of, if any."""
    words = about.get("architectures") or ()
    if not (isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)):
        raise BadInput("architectures is no list of names", where=CONFIG)
    for head, ending in _CLASSIFIERS.items():
        if any(word.endswith(ending) for word in words):
            return head
    return None


def _read_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    try:
        files = [WEIGHTS]
        if not (folder / WEIGHTS).exists() and (folder / _SHARDS).exists():
            files = sorted(set(json.loads((folder / _SHARDS).read_text())["weight_map"].values()))
        return {k: v for name in files for k, v in load_file(_inside(folder, name)).items()}
    except _UNUSABLE as error:
        raise BadInput(
            f"{WEIGHTS} cannot be read",
            where=str(folder),
            fix="Give a Hugging Face folder of a BERT, DistilBERT or GPT-2 with safetensors.",
        ) from error


def _inside(folder: Path, name: str) -> Path:
    """Return a file of the folder itself, whatever its index says."""
    return folder / Path(name).name


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{CONFIG} cannot be read", where=str(folder)) from error
    if not isinstance(about, dict):
        raise BadInput(f"{CONFIG} is no JSON object", where=str(folder))
    return about


def _labels(about: dict[str, Any]) -> tuple[str, ...]:
    names = about.get("id2label", {})
    try:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    except (TypeError, ValueError) as error:
        raise BadInput("id2label does not name labels by number", where=CONFIG) from error
