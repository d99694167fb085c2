"""Where Hugging Face keeps each parameter: of BERT, of DistilBERT, of GPT-2.

The output projection is the word table itself (tied), and so not stored a second time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import decoders

from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.parameters import (
    CLASSIFIER,
    HEADS,
    MLM_BIAS,
    POOLER,
    POSITION,
    TAGGER,
    TYPE,
    WORD,
    AnyModel,
    Arrays,
    Bert,
    Model,
    ModelConfig,
    initial_values,
    language_model,
    parameter_shapes,
)

Pair = tuple[str, str | tuple[str, ...]]  # our name, their name or names


def pairs(config: ModelConfig, heads: frozenset[str]) -> Iterator[Pair]:
    """Yield (our name, their name or names), with those of the heads `mlm`, TAGGER, CLASSIFIER."""
    if isinstance(config, Gpt2Config):
        yield from _gpt2(config)
    elif config.distilled:
        yield from _distilbert(config, heads)
    else:
        yield from _bert(config, heads)


def prefix(config: ModelConfig) -> str:
    """Return what the names of the body begin with; models saved without a head lack it."""
    if isinstance(config, Gpt2Config):
        return "transformer."
    return "distilbert." if config.distilled else "bert."


def _bert(config: BertConfig, heads: frozenset[str]) -> Iterator[Pair]:
    yield WORD, "bert.embeddings.word_embeddings.weight"
    yield POSITION, "bert.embeddings.position_embeddings.weight"
    yield TYPE, "bert.embeddings.token_type_embeddings.weight"
    yield from _norm("embeddings/norm", "bert.embeddings.LayerNorm")
    for i in range(config.layers):
        ours, theirs = f"layer_{i}", f"bert.encoder.layer.{i}"
        parts = [f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")]
        yield from _fused(f"{ours}/qkv", parts)
        yield from _linear(f"{ours}/attention_output", f"{theirs}.attention.output.dense")
        yield from _norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from _linear(f"{ours}/intermediate", f"{theirs}.intermediate.dense")
        yield from _linear(f"{ours}/output", f"{theirs}.output.dense")
        yield from _norm(f"{ours}/output_norm", f"{theirs}.output.LayerNorm")
    if "mlm" in heads:
        yield from _linear("mlm/transform", "cls.predictions.transform.dense")
        yield from _norm("mlm/norm", "cls.predictions.transform.LayerNorm")
        yield MLM_BIAS, "cls.predictions.bias"
    if TAGGER in heads:
        yield from _linear(TAGGER, "classifier")
    if CLASSIFIER in heads:
        yield from _linear(POOLER, "bert.pooler.dense")
        yield from _linear(CLASSIFIER, "classifier")


def _distilbert(config: BertConfig, heads: frozenset[str]) -> Iterator[Pair]:
    yield WORD, "distilbert.embeddings.word_embeddings.weight"
    yield POSITION, "distilbert.embeddings.position_embeddings.weight"
    yield from _norm("embeddings/norm", "distilbert.embeddings.LayerNorm")
    for i in range(config.layers):
        ours, theirs = f"layer_{i}", f"distilbert.transformer.layer.{i}"
        parts = [f"{theirs}.attention.{part}" for part in ("q_lin", "k_lin", "v_lin")]
        yield from _fused(f"{ours}/qkv", parts)
        yield from _linear(f"{ours}/attention_output", f"{theirs}.attention.out_lin")
        yield from _norm(f"{ours}/attention_norm", f"{theirs}.sa_layer_norm")
        yield from _linear(f"{ours}/intermediate", f"{theirs}.ffn.lin1")
        yield from _linear(f"{ours}/output", f"{theirs}.ffn.lin2")
        yield from _norm(f"{ours}/output_norm", f"{theirs}.output_layer_norm")
    if "mlm" in heads:
        yield from _linear("mlm/transform", "vocab_transform")
        yield from _norm("mlm/norm", "vocab_layer_norm")
        yield MLM_BIAS, "vocab_projector.bias"
    if TAGGER in heads:
        yield from _linear(TAGGER, "classifier")
    if CLASSIFIER in heads:
        yield from _linear(POOLER, "pre_classifier")
        yield from _linear(CLASSIFIER, "classifier")


def _gpt2(config: Gpt2Config) -> Iterator[Pair]:
    yield WORD, "transformer.wte.weight"
    yield POSITION, "transformer.wpe.weight"
    for i in range(config.layers):
        ours, theirs = f"layer_{i}", f"transformer.h.{i}"
        yield from _norm(f"{ours}/attention_norm", f"{theirs}.ln_1")
        yield from _linear(f"{ours}/qkv", f"{theirs}.attn.c_attn")
        yield from _linear(f"{ours}/attention_output", f"{theirs}.attn.c_proj")
        yield from _norm(f"{ours}/intermediate_norm", f"{theirs}.ln_2")
        yield from _linear(f"{ours}/intermediate", f"{theirs}.mlp.c_fc")
        yield from _linear(f"{ours}/output", f"{theirs}.mlp.c_proj")
    yield from _norm("final_norm", "transformer.ln_f")


def _linear(ours: str, theirs: str) -> Iterator[Pair]:
    yield f"{ours}/kernel", f"{theirs}.weight"
    yield f"{ours}/bias", f"{theirs}.bias"


def _fused(ours: str, theirs: list[str]) -> Iterator[Pair]:
    yield f"{ours}/kernel", tuple(f"{part}.weight" for part in theirs)
    yield f"{ours}/bias", tuple(f"{part}.bias" for part in theirs)


def _norm(ours: str, theirs: str) -> Iterator[Pair]:
    yield f"{ours}/gain", f"{theirs}.weight"
    yield f"{ours}/bias", f"{theirs}.bias"


_BODY = ("embeddings.", "encoder.", "transformer.", "pooler.", "wte.", "wpe.", "h.", "ln_f.")
_KERNEL = "/kernel"


def to_hf(parameters: Mapping[str, NDArray[np.float32]], config: ModelConfig) -> Arrays:
    """Return the same parameters under Hugging Face's names; a head's become `classifier`."""
    out: Arrays = {}
    for ours, theirs in pairs(config, heads_of(parameters)):
        value = parameters[ours]
        if isinstance(theirs, str):
            out[theirs] = _turned(ours, value, config)
        else:
            thirds = np.split(value, 3, axis=-1)
            names = zip(theirs, thirds, strict=True)
            out |= {name: _turned(ours, third, config) for name, third in names}
    return out


def from_hf(
    tensors: Mapping[str, NDArray[np.float32]], config: ModelConfig, heads: frozenset[str]
) -> Arrays:
    """Return the parameters that are there under our names; the rest is left out.

    Understands the older `gamma` and `beta`, and bodies saved without the architecture's prefix.
    """
    known = {_modern(name, config): value for name, value in tensors.items()}
    out: Arrays = {}
    for ours, theirs in pairs(config, heads):
        names = [theirs] if isinstance(theirs, str) else list(theirs)
        if all(name in known for name in names):
            parts = [_turned(ours, known[name].astype(np.float32), config) for name in names]
            out[ours] = np.ascontiguousarray(np.concatenate(parts, axis=-1))
    return out


def heads_of(parameters: Mapping[str, NDArray[np.float32]]) -> frozenset[str]:
    """Return which heads these parameters have."""
    marks = {"mlm": MLM_BIAS, TAGGER: TAGGER + _KERNEL, CLASSIFIER: CLASSIFIER + _KERNEL}
    return frozenset(head for head, name in marks.items() if name in parameters)


def _modern(name: str, config: ModelConfig) -> str:
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    own = prefix(config)
    return own + name if name.startswith(_BODY) and not name.startswith(own) else name


def _turned(ours: str, value: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    turn = ours.endswith(_KERNEL) and not isinstance(config, Gpt2Config)
    return np.ascontiguousarray(value.T if turn else value)


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


_BYTE_LEVEL, _WHOLE = "vocab.json", "tokenizer.json"
_CONTINUES = "##"
_END_OF_TEXT = "<|endoftext|>"  # GPT-2's only marker: it stands before a text and after it


def load_with_vocabulary(folder: Path, pieces: Sequence[str], seed: int) -> AnyModel:
    """Read a model for another vocabulary.

    Pieces that the folder's own vocabulary has keep their embedding and output bias. The others
    are drawn around the mean of the old table with its deviation, and get the mean bias: then the
    logits of pieces the model has never seen are ordinary ones, and do not outbid all others
    (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Args:
        folder: the model, with `vocab.txt`, or `tokenizer.json`, or GPT-2's `vocab.json`.
        pieces: the new vocabulary, in order of id; WordPiece's.
        seed: public.

    Raises:
        BadInput: as `load_model`, or a folder without its vocabulary.
    """
    model = load_model(folder)
    old = read_pieces(folder)
    table = model.parameters[WORD]
    if max(old.values(), default=0) >= len(table):
        raise BadInput("a vocabulary larger than the model's table", where=str(folder))
    pairs = np.array(
        [(new, old[piece]) for new, piece in enumerate(pieces) if piece in old], np.int64
    ).reshape(-1, 2)
    draws = initial_values({WORD: (len(pieces), table.shape[1])}, 1.0, seed)[WORD]
    changed = {WORD: table.mean(0) + table.std(0) * draws}
    changed[WORD][pairs[:, 0]] = table[pairs[:, 1]]
    if MLM_BIAS in model.parameters:
        changed[MLM_BIAS] = _moved(model.parameters[MLM_BIAS], pairs, len(pieces))
    config = model.config.with_vocabulary(len(pieces))
    return Model(config, model.parameters | changed, model.labels)


def _moved(bias: NDArray[np.float32], pairs: NDArray[np.int64], size: int) -> NDArray[np.float32]:
    out = np.full(size, bias.mean(), np.float32)
    out[pairs[:, 0]] = bias[pairs[:, 1]]
    return out


def read_pieces(folder: Path) -> dict[str, int]:
    """Return the ids of a model folder's pieces, GPT-2's under their WordPiece names.

    Raises:
        BadInput: no vocabulary there that can be read.
    """
    try:
        if (folder / VOCABULARY).is_file():
            lines = (folder / VOCABULARY).read_text(encoding="utf-8").split("\n")
            return {piece.rstrip("\r"): i for i, piece in enumerate(lines) if piece}
        if (folder / _BYTE_LEVEL).is_file():
            return _as_word_pieces(json.loads((folder / _BYTE_LEVEL).read_text(encoding="utf-8")))
        about = json.loads((folder / _WHOLE).read_text(encoding="utf-8"))["model"]
        vocabulary: dict[str, int] = about["vocab"]
        return _as_word_pieces(vocabulary) if about["type"] == "BPE" else vocabulary
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"no readable {VOCABULARY}, {_BYTE_LEVEL} or {_WHOLE}", where=str(folder)
        ) from error


def _as_word_pieces(byte_level: dict[str, int]) -> dict[str, int]:
    """Rename byte-level pieces: those with a space before them begin a word, the others go on."""
    decoder = decoders.ByteLevel()
    out = {}
    for piece, i in byte_level.items():
        text = decoder.decode([piece])
        out[text[1:] if text.startswith(" ") else _CONTINUES + text] = i
    if _END_OF_TEXT in byte_level:
        out |= dict.fromkeys(("[CLS]", "[SEP]"), byte_level[_END_OF_TEXT])
    return out
