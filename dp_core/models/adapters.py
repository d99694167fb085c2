"""Trained parts of a model, and LoRA: low-rank adapters of its matrices.

LoRA (Hu et al. 2021, arXiv:2106.09685) computes y = x·W + b + (α / rank)·(x·A)·B. W and b are
frozen, A is drawn from a public seed and B is zero, so that training starts from the model itself.
Under DP the noise of an update has one coordinate for each trained parameter, while the norm of the
clipped gradient stays the same (Yu et al. 2021, arXiv:2110.06500). BitFit trains only biases and
norms (Ben Zaken et al. 2021, arXiv:2106.10199; under DP: Bu et al. 2022, arXiv:2210.00036).

The parameters of a `Model` with adapters hold A and B next to each adapted matrix, and every
function of `dp_core` computes with them. A model folder contains either the merged model
(`hugging_face.save`) or the adapters without the model in PEFT's layout (`save_adapter`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dp_core.config.training import AdapterConfig, TrainedParameters
from dp_core.errors import BadInput
from dp_core.models.config import CausalConfig, Gpt2Config
from dp_core.models.hugging_face import tensors_of, transposed
from dp_core.models.parameters import (
    CLASSIFIERS,
    TABLES,
    TAGGER,
    TRANSITIONS,
    AnyModel,
    Arrays,
    C,
    Model,
    initial_values,
)
from dp_core.nn import LORA_A, LORA_B, LORA_SCALE

_ATTENTION = ("qkv", "query", "key", "value", "attention_output")
_MLP = ("gate", "intermediate", "output")
_TARGETS = {
    "attention": _ATTENTION,
    "mlp": _MLP,
    "attention-and-mlp": (*_ATTENTION, *_MLP),
}


def trained_names(model: AnyModel, config: AdapterConfig) -> frozenset[str]:
    """Return the names of the trained parameters. A fresh classifier is always trained.

    Args:
        model: the model, with adapters if these are trained.
        config: selects the trained part.
    """
    names = [name for name in model.parameters if name != LORA_SCALE]
    chosen = {n for n in names if _is_trained(n, config.trained_parameters, model.config.layers)}
    return frozenset(chosen | {n for n in names if n.startswith(CLASSIFIERS)})


def _is_trained(name: str, part: TrainedParameters, layers: int) -> bool:
    match part:
        case "all":
            return True
        case "lora":
            return name.endswith((f"/{LORA_A}", f"/{LORA_B}"))
        case "biases-and-norms":
            return name.endswith(("/bias", "/gain"))
        case "no-embeddings":
            return name not in TABLES
        case "top-layer":
            return name.startswith((f"layer_{layers - 1}/", "mlm/", "final_norm/"))


def prepared(model: Model[C], config: AdapterConfig, seed: int) -> Model[C]:
    """Return the start of a training: the model with fresh adapters if `config` trains adapters.

    Adapters of an earlier training are merged first.
    """
    start = merged(model)
    return with_adapters(start, config, seed) if config.trained_parameters == "lora" else start


def with_adapters(model: Model[C], config: AdapterConfig, seed: int) -> Model[C]:
    """Return the model with a fresh adapter for each matrix of the config's targets.

    A has standard deviation 1/√(3·in), as in PEFT. B is zero, so that no output changes.

    Args:
        model: without adapters.
        config: rank, alpha and targets.
        seed: public; draws A.
    """
    added: Arrays = {LORA_SCALE: np.array(config.lora_alpha / config.lora_rank, np.float32)}
    targets, rank = _TARGETS[config.lora_targets], config.lora_rank
    for name, kernel in model.parameters.items():
        module, _, leaf = name.rpartition("/")
        if (
            leaf == "kernel"
            and module.startswith("layer_")
            and module.endswith(tuple(f"/{t}" for t in targets))
        ):
            d_in, d_out = kernel.shape
            blocks = len(tensors_of(name, model.config))
            shape = {f"{module}/{LORA_A}": (d_in, blocks * rank)}
            added |= initial_values(shape, 1 / math.sqrt(3 * d_in), seed)
            added[f"{module}/{LORA_B}"] = np.zeros((rank, d_out), np.float32)
    return Model(model.config, model.parameters | added, model.labels)


def adapters_of(parameters: Arrays) -> list[str]:
    """Return the names of the modules that have an adapter."""
    leaf = f"/{LORA_A}"
    return [name.removesuffix(leaf) for name in parameters if name.endswith(leaf)]


def merged(model: Model[C]) -> Model[C]:
    """Return an equivalent model without adapters, whose matrices are W + (α / rank)·A·B."""
    p = dict(model.parameters)
    for module in adapters_of(model.parameters):
        a, b = p.pop(f"{module}/{LORA_A}"), p.pop(f"{module}/{LORA_B}")
        p[f"{module}/kernel"] = p[f"{module}/kernel"] + p[LORA_SCALE] * _product(a, b)
    p.pop(LORA_SCALE, None)
    return Model(model.config, p, model.labels)


def _product(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    blocks = a.shape[1] // b.shape[0]
    pairs = zip(np.split(a, blocks, 1), np.split(b, blocks, 1), strict=True)
    return np.concatenate([left @ right for left, right in pairs], axis=1)


ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every tensor's name in PEFT's files
_KIND = {  # the settings of PEFT that describe these adapters
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}


def save_adapter(model: AnyModel, folder: Path, base: str = "") -> None:
    """Write the adapters of a model, and its fresh classifier, in PEFT's layout.

    `peft.PeftModel.from_pretrained(base, folder)` reads the folder.

    Args:
        model: a model with adapters.
        folder: receives `adapter_config.json` and `adapter_model.safetensors`.
        base: name or path of the base model; readers may change it.

    Raises:
        BadInput: the model has no adapters.
    """
    tensors, modules = _peft_tensors(model)
    if not modules:
        raise BadInput("the model has no adapters", where=str(folder))
    rank = model.parameters[f"{adapters_of(model.parameters)[0]}/{LORA_B}"].shape[0]
    tags = f"{TAGGER}/kernel" in model.parameters
    classifiers = {their.rpartition(".")[0] for their in _classifier_names(model).values()}
    causal = isinstance(model.config, CausalConfig)
    kind = "TOKEN_CLS" if tags else "CAUSAL_LM" if causal else None
    about: dict[str, Any] = {
        **_KIND,
        "task_type": kind,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": float(model.parameters[LORA_SCALE]) * rank,
        "lora_dropout": 0.0,
        "fan_in_fan_out": isinstance(model.config, Gpt2Config),  # whose kernels are [in, out]
        "target_modules": modules,  # full names, because suffixes match further modules
        "modules_to_save": sorted(classifiers) or None,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(about, indent=2) + "\n")


def _peft_tensors(model: AnyModel) -> tuple[Arrays, list[str]]:
    """Return the tensors of the adapters by their names in PEFT, and the adapted modules."""
    p = model.parameters
    tensors: Arrays = {}
    modules: list[str] = []
    for module in adapters_of(p):
        theirs = [
            their.removesuffix(".weight") for their in tensors_of(f"{module}/kernel", model.config)
        ]
        parts = (np.split(p[f"{module}/{leaf}"], len(theirs), axis=1) for leaf in (LORA_A, LORA_B))
        for their, a, b in zip(theirs, *parts, strict=True):
            tensors[f"{_PREFIX}{their}.lora_A.weight"] = np.ascontiguousarray(a.T)
            tensors[f"{_PREFIX}{their}.lora_B.weight"] = np.ascontiguousarray(b.T)
            modules.append(their)
    for name, their in _classifier_names(model).items():
        tensors[_PREFIX + their] = transposed(name, p[name], model.config)
    return tensors, modules


def _classifier_names(model: AnyModel) -> dict[str, str]:
    """Return Hugging Face's names for the parameters of the model's classifier, if it has one.

    The transitions of a CRF are only in the merged model, because PEFT has no module for them.
    """
    names = [n for n in model.parameters if n.startswith(CLASSIFIERS) and n != TRANSITIONS]
    return {name: tensors_of(name, model.config)[0] for name in names}
