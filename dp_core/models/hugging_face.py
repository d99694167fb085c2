"""Model folders in Hugging Face's layout: BERT, DistilBERT, GPT-2 and Llama.

Feed-forward models, which `transformers` does not know, are stored in the same files. An output
projection that is tied to the word table is not stored a second time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import decoders, pre_tokenizers

from dp_core.errors import BadInput
from dp_core.models.config import (
    BertConfig,
    CausalConfig,
    FeedForwardConfig,
    Gpt2Config,
    LlamaConfig,
)
from dp_core.models.parameters import (
    CLASSIFIER,
    HEAD,
    HEAD_BIAS,
    HEADS,
    MLM_BIAS,
    POOLER,
    POSITION,
    TAGGER,
    TRANSITIONS,
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

_Names = Mapping[str, str | tuple[str, ...]]  # our name of a module or table -> Hugging Face's

_CRF = "crf.transitions"  # `transformers` ignores this tensor

_BERT: _Names = {
    WORD: "bert.embeddings.word_embeddings",
    POSITION: "bert.embeddings.position_embeddings",
    TYPE: "bert.embeddings.token_type_embeddings",
    "embeddings/norm": "bert.embeddings.LayerNorm",
    "layer_{}/qkv": tuple(
        f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")
    ),
    "layer_{}/attention_output": "bert.encoder.layer.{}.attention.output.dense",
    "layer_{}/attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "layer_{}/intermediate": "bert.encoder.layer.{}.intermediate.dense",
    "layer_{}/output": "bert.encoder.layer.{}.output.dense",
    "layer_{}/output_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "mlm/transform": "cls.predictions.transform.dense",
    "mlm/norm": "cls.predictions.transform.LayerNorm",
    "mlm": "cls.predictions",
    TAGGER: "classifier",
    TRANSITIONS: _CRF,
    POOLER: "bert.pooler.dense",
    CLASSIFIER: "classifier",
}
_DISTILBERT: _Names = {
    WORD: "distilbert.embeddings.word_embeddings",
    POSITION: "distilbert.embeddings.position_embeddings",
    "embeddings/norm": "distilbert.embeddings.LayerNorm",
    "layer_{}/qkv": tuple(
        f"distilbert.transformer.layer.{{}}.attention.{part}"
        for part in ("q_lin", "k_lin", "v_lin")
    ),
    "layer_{}/attention_output": "distilbert.transformer.layer.{}.attention.out_lin",
    "layer_{}/attention_norm": "distilbert.transformer.layer.{}.sa_layer_norm",
    "layer_{}/intermediate": "distilbert.transformer.layer.{}.ffn.lin1",
    "layer_{}/output": "distilbert.transformer.layer.{}.ffn.lin2",
    "layer_{}/output_norm": "distilbert.transformer.layer.{}.output_layer_norm",
    "mlm/transform": "vocab_transform",
    "mlm/norm": "vocab_layer_norm",
    "mlm": "vocab_projector",
    TAGGER: "classifier",
    TRANSITIONS: _CRF,
    POOLER: "pre_classifier",
    CLASSIFIER: "classifier",
}
_GPT2: _Names = {
    WORD: "transformer.wte",
    POSITION: "transformer.wpe",
    "layer_{}/attention_norm": "transformer.h.{}.ln_1",
    "layer_{}/qkv": "transformer.h.{}.attn.c_attn",
    "layer_{}/attention_output": "transformer.h.{}.attn.c_proj",
    "layer_{}/intermediate_norm": "transformer.h.{}.ln_2",
    "layer_{}/intermediate": "transformer.h.{}.mlp.c_fc",
    "layer_{}/output": "transformer.h.{}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
}
_LLAMA: _Names = {
    WORD: "model.embed_tokens",
    "layer_{}/attention_norm": "model.layers.{}.input_layernorm",
    "layer_{}/query": "model.layers.{}.self_attn.q_proj",
    "layer_{}/key": "model.layers.{}.self_attn.k_proj",
    "layer_{}/value": "model.layers.{}.self_attn.v_proj",
    "layer_{}/attention_output": "model.layers.{}.self_attn.o_proj",
    "layer_{}/intermediate_norm": "model.layers.{}.post_attention_layernorm",
    "layer_{}/gate": "model.layers.{}.mlp.gate_proj",
    "layer_{}/intermediate": "model.layers.{}.mlp.up_proj",
    "layer_{}/output": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    HEAD: "lm_head",
}
_FEED_FORWARD: _Names = {
    WORD: "embeddings",
    "layer_{}/intermediate": "layers.{}",
    HEAD: "head",
}
_NAMES = {
    "bert": _BERT,
    "distilbert": _DISTILBERT,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "feed-forward": _FEED_FORWARD,
}
_BODY = ("embeddings.", "encoder.", "transformer.", "pooler.", "wte.", "wpe.", "h.", "ln_f.")
_LLAMA_BODY = ("embed_tokens.", "layers.", "norm.")
_LAYER = re.compile(r"^layer_(\d+)")
_SUFFIXES = {"kernel": ".weight", "gain": ".weight", "table": ".weight", "bias": ".bias"}


def tensors_of(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of a parameter's tensors in Hugging Face's layout; empty if it has none.

    A fused query-key-value kernel consists of three tensors.
    """
    table = _NAMES[config.kind]
    module, leaf = (name, "table") if name in table else name.rpartition("/")[::2]
    layer = _LAYER.match(module)
    theirs = table.get(_LAYER.sub("layer_{}", module), ())
    if leaf not in _SUFFIXES:
        return ()
    return tuple(
        tensor.format(layer and layer[1]) + _SUFFIXES[leaf]
        for tensor in ((theirs,) if isinstance(theirs, str) else theirs)
    )


def to_hf(parameters: Mapping[str, NDArray[np.float32]], config: ModelConfig) -> Arrays:
    """Return the parameters by their names in Hugging Face's layout.

    Raises:
            BadInput: a parameter has no name there and would be lost, like unmerged adapters.
    """
    out: Arrays = {}
    names = {ours: tensors_of(ours, config) for ours in parameters}
    if unnamed := [ours for ours, theirs in names.items() if not theirs]:
        raise BadInput(
            f"{len(unnamed)} parameters have no name in Hugging Face's layout, for example "
            f"{min(unnamed)}",
            where="model",
            fix="Merge adapters before the model is written.",
        )
    for ours, theirs in names.items():
        parts = np.split(parameters[ours], len(theirs), axis=-1)
        pairs = zip(theirs, parts, strict=True)
        out |= {name: transposed(ours, part, config) for name, part in pairs}
    return out


def _from_hf(
    tensors: Mapping[str, NDArray[np.float32]], config: ModelConfig, names: Iterable[str]
) -> Arrays:
    """Return the named parameters that the tensors contain, by our names.

    Reads the older names `gamma` and `beta`, and models saved without the architecture's prefix.
    """
    known = {_modern(name, config): value for name, value in tensors.items()}
    out: Arrays = {}
    for ours in names:
        theirs = tensors_of(ours, config)
        if all(name in known for name in theirs):
            parts = [transposed(ours, known[name].astype(np.float32), config) for name in theirs]
            out[ours] = np.ascontiguousarray(np.concatenate(parts, axis=-1))
    return out


def _modern(name: str, config: ModelConfig) -> str:
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    # Models that were saved without a head lack the prefix of the body.
    prefix = str(_NAMES[config.kind][WORD]).split(".", 1)[0] + "."
    body = _LLAMA_BODY if isinstance(config, LlamaConfig) else _BODY
    return prefix + name if name.startswith(body) and not name.startswith(prefix) else name


def transposed(ours: str, value: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """Convert a parameter between the two layouts: kernels are transposed, except in GPT-2."""
    transpose = ours.endswith("/kernel") and not isinstance(config, Gpt2Config)
    return np.ascontiguousarray(value.T if transpose else value)


CONFIG, WEIGHTS, VOCABULARY = "config.json", "model.safetensors", "vocab.txt"
ADAPTER_FOLDER = "adapter"  # a subfolder: next to a merged model, PEFT would apply it again
_SHARDS = "model.safetensors.index.json"
_TOKENIZER = (VOCABULARY, "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
_CLASSIFIERS = {TAGGER: "ForTokenClassification", CLASSIFIER: "ForSequenceClassification"}
_OF_CLASSIFIER = {
    TAGGER: (f"{TAGGER}/kernel", f"{TAGGER}/bias", TRANSITIONS),
    CLASSIFIER: tuple(
        f"{name}/{leaf}" for name in (CLASSIFIER, POOLER) for leaf in ("kernel", "bias")
    ),
}
_UNUSABLE = (
    *(OSError, SafetensorError, TypeError, ValueError, KeyError, AttributeError),
    ArithmeticError,  # a size of zero or infinity
    RecursionError,  # deeply nested JSON
)
_KINDS: dict[str, type[ModelConfig]] = {
    "bert": BertConfig,
    "distilbert": BertConfig,
    "gpt2": Gpt2Config,
    "llama": LlamaConfig,
    "feed-forward": FeedForwardConfig,
}


def save(model: AnyModel, folder: Path, vocabulary: Path | None = None) -> None:
    """Write a model, and copy the tokenizer files of the folder `vocabulary` to it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = model.config.to_hf()
    for head, task in _CLASSIFIERS.items():
        if f"{head}/kernel" in model.parameters:
            about["architectures"] = [about["architectures"][0].removesuffix("ForMaskedLM") + task]
            about["id2label"] = {str(i): label for i, label in enumerate(model.labels)}
            about["label2id"] = {label: i for i, label in enumerate(model.labels)}
    save_file(to_hf(model.parameters, model.config), folder / WEIGHTS, metadata={"format": "pt"})
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
    if not isinstance(model.config, BertConfig):
        raise BadInput("a causal model", where=str(folder), fix="This needs a BERT.")
    return Model(model.config, model.parameters, model.labels)


def load_model(folder: Path) -> AnyModel:
    """Read a model with its head: the classifier that `architectures` names, or the MLM head.

    A missing MLM head is initialised from a public seed.

    Raises:
        BadInput: missing files, an unsupported architecture, or tensors of the wrong shape.
    """
    about = _read_config(folder)
    kind = about.get("model_type", "bert")
    if not isinstance(kind, str) or kind not in _KINDS:
        fix = f"Supported architectures are {', '.join(_KINDS)}."
        raise BadInput(f"model_type is {kind!r}", where=f"{folder}/{CONFIG}", fix=fix)
    config = _KINDS[kind].from_hf(about)
    head, shapes = _classifier(about), parameter_shapes(config)
    encoder = [name for name in shapes if not name.startswith(HEADS)]
    names = [*encoder, *_OF_CLASSIFIER[head]] if head else list(shapes)
    parameters = _from_hf(_read_tensors(folder), config, names)
    for name, shape in shapes.items():
        if name not in parameters and not name.startswith(HEADS):
            raise BadInput(f"{name} is missing", where=f"{folder}/{WEIGHTS}")
        if name in parameters and parameters[name].shape != shape:
            raise BadInput(
                f"{name} is {parameters[name].shape}, but {CONFIG} states {shape}",
                where=f"{folder}/{WEIGHTS}",
            )
    if head is None:
        return language_model(Model(config, parameters))
    if f"{head}/kernel" not in parameters:
        raise BadInput("the classifier is missing", where=f"{folder}/{WEIGHTS}")
    return Model(config, parameters, _labels(about))


def _classifier(about: dict[str, Any]) -> str | None:
    """Return the classifier that the config names, if any."""
    words = about.get("architectures") or ()
    if not (isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)):
        raise BadInput("architectures is not a list of names", where=CONFIG)
    for head, ending in _CLASSIFIERS.items():
        if any(word.endswith(ending) for word in words):
            return head
    return None


def _read_tensors(folder: Path) -> Arrays:
    """Return the floating-point tensors of a model folder, of one file or of all its shards.

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
        return {k: v for name in files for k, v in _floats_of(folder / name).items()}
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


_FLOATS = ("F64", "F32", "F16")
_BFLOAT16 = "BF16"


def _floats_of(file: Path) -> Arrays:
    """Return the floating-point tensors of a safetensors file as float32.

    Parameters are floats. Tensors of other types, such as the buffer `position_ids` of older
    checkpoints, are not read. NumPy has no bfloat16, which is the upper half of a float32.
    """
    out: Arrays = {}
    with safe_open(file, "np") as tensors:
        names = tensors.keys()
        kinds = {name: tensors.get_slice(name).get_dtype() for name in names}
        for name in (name for name, kind in kinds.items() if kind in _FLOATS):
            out[name] = tensors.get_tensor(name).astype(np.float32)
    if _BFLOAT16 not in kinds.values():
        return out
    content = np.memmap(file, np.uint8, "r")
    start = 8 + int(content[:8].view("<u8")[0])
    header = json.loads(bytes(content[8:start]))
    for name in (name for name, kind in kinds.items() if kind == _BFLOAT16):
        first, last = header[name]["data_offsets"]
        words = content[start + first : start + last].view("<u2").astype(np.uint32) << 16
        out[name] = words.view(np.float32).reshape(header[name]["shape"])
    return out


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


_BYTE_LEVEL, _WHOLE = "vocab.json", "tokenizer.json"
_CONTINUES = "##"
_END_OF_TEXT = "<|endoftext|>"  # GPT-2's only special token, both before and after a text
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
    old, prefix = _names_for(tokens, *_stored_vocabulary(folder))
    if isinstance(model.config, CausalConfig):  # begin and end tokens may have other names
        old = {"[CLS]": model.config.begin, "[SEP]": model.config.end} | old
    table = model.parameters[WORD]
    if max(old.values(), default=0) >= len(table):
        raise BadInput("the vocabulary is larger than the model's table", where=str(folder))
    pairs = np.array(
        [(new, old[token]) for new, token in enumerate(tokens) if token in old], np.int64
    ).reshape(-1, 2)
    spelt = {
        new: pieces
        for new, token in enumerate(tokens)
        if token not in old and (pieces := _spelt(token, old, prefix))
    }
    changed = {WORD: _exchanged(WORD, table, pairs, spelt, len(tokens), seed)}
    if (head := model.parameters.get(f"{HEAD}/kernel")) is not None:
        by_token = _exchanged(HEAD, head.T, pairs, spelt, len(tokens), seed)
        changed[f"{HEAD}/kernel"] = np.ascontiguousarray(by_token.T)
    for name in {MLM_BIAS, HEAD_BIAS} & model.parameters.keys():
        changed[name] = _moved(model.parameters[name], pairs, len(tokens))
    config = model.config.with_vocabulary(len(tokens))
    return Model(config, model.parameters | changed, model.labels)


def _spelt(token: str, old: Mapping[str, int], prefix: str) -> list[int]:
    """Return the ids of old tokens that spell a new token, longest first; [] if none do.

    Args:
        token: the new token, with the prefix if it continues a word.
        old: ids by token, with the same prefix.
        prefix: the continuation prefix `##` of WordPiece; empty for byte-level tokens.
    """
    rest = token
    pieces: list[int] = []
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
    name: str,
    table: NDArray[np.float32],
    pairs: NDArray[np.int64],
    spelt: Mapping[int, Sequence[int]],
    size: int,
    seed: int,
) -> NDArray[np.float32]:
    """Return the new table, (V, D) -> (size, D): kept rows, means of pieces, and random rows."""
    draws = initial_values({name: (size, table.shape[1])}, 1.0, seed)[name]
    out: NDArray[np.float32] = table.mean(0) + table.std(0) * draws
    for new, pieces in spelt.items():
        out[new] = table[list(pieces)].mean(0)
    out[pairs[:, 0]] = table[pairs[:, 1]]
    return out


def _moved(bias: NDArray[np.float32], pairs: NDArray[np.int64], size: int) -> NDArray[np.float32]:
    out = np.full(size, bias.mean(), np.float32)
    out[pairs[:, 0]] = bias[pairs[:, 1]]
    return out


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Return the ids of a model folder's tokens, spelled as in the folder.

    Raises:
        BadInput: the folder has no readable vocabulary.
    """
    return _stored_vocabulary(folder)[0]


_Marking = Literal["wordpiece", "byte-level", "marked"]  # marked: SentencePiece


def _stored_vocabulary(folder: Path) -> tuple[dict[str, int], _Marking]:
    """Return the ids of a folder's tokens, and how tokens mark the start of a word."""
    try:
        if (folder / VOCABULARY).is_file():
            lines = (folder / VOCABULARY).read_text(encoding="utf-8").split("\n")
            return {token.rstrip("\r"): i for i, token in enumerate(lines) if token}, "wordpiece"
        if (folder / _BYTE_LEVEL).is_file():
            tokens = dict(json.loads((folder / _BYTE_LEVEL).read_text(encoding="utf-8")))
            return tokens, "byte-level"
        about = json.loads((folder / _WHOLE).read_text(encoding="utf-8"))["model"]
        vocabulary: dict[str, int] = dict(about["vocab"])
        if about["type"] == "BPE":
            marked = any(token.startswith(_SPACE) for token in vocabulary)
            return vocabulary, "marked" if marked else "byte-level"
        return vocabulary, "wordpiece"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"no readable {VOCABULARY}, {_BYTE_LEVEL} or {_WHOLE}", where=str(folder)
        ) from error


def _names_for(
    tokens: Sequence[str], stored: dict[str, int], names: _Marking
) -> tuple[dict[str, int], str]:
    """Return stored ids by names in the form of a new vocabulary, and its continuation prefix."""
    if set(pre_tokenizers.ByteLevel.alphabet()) <= set(tokens):
        if names == "marked":
            stored = {token.replace(_SPACE, "\u0120"): i for token, i in stored.items()}
        return _with_end_of_text(stored, stored), ""
    if names == "wordpiece":
        return stored, _CONTINUES
    return (_by_marks if names == "marked" else _as_wordpiece)(stored), _CONTINUES


def _by_marks(pieces: dict[str, int]) -> dict[str, int]:
    """Rename SentencePiece's tokens: tokens with the mark start a word, others continue it."""
    return {
        token[1:] if token.startswith(_SPACE) else _CONTINUES + token: i
        for token, i in pieces.items()
    }


def _as_wordpiece(byte_level: dict[str, int]) -> dict[str, int]:
    """Rename byte-level tokens: tokens with a leading space start a word, others continue it."""
    decoder = decoders.ByteLevel()
    out = {}
    for token, i in byte_level.items():
        text = decoder.decode([token])
        out[text[1:] if text.startswith(" ") else _CONTINUES + text] = i
    return _with_end_of_text(out, byte_level)


def _with_end_of_text(names: Mapping[str, int], byte_level: Mapping[str, int]) -> dict[str, int]:
    """Map [CLS] and [SEP] to GPT-2's end-of-text token, unless the tokens contain them."""
    end = byte_level.get(_END_OF_TEXT)
    return dict(names) if end is None else {"[CLS]": end, "[SEP]": end, **names}
