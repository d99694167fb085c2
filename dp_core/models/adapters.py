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

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dp_core.config.training import AdapterConfig, TrainedParameters
from dp_core.errors import BadInput
from dp_core.models.architectures import tensors_of, transposed
from dp_core.models.config import CausalConfig, Gpt2Config
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
_TARGETS = {"attention": _ATTENTION, "mlp": _MLP, "attention-and-mlp": (*_ATTENTION, *_MLP)}


def trained_names(model: AnyModel, config: AdapterConfig) -> frozenset[str]:
    """Return the names of the trained parameters. A fresh classifier is always trained.

    Args:
        model: the model, with adapters if these are trained.
        config: selects the trained part.
    """
    part, layers = config.trained_parameters, model.config.layers
    names = model.parameters.keys() - {LORA_SCALE}
    return frozenset(n for n in names if n.startswith(CLASSIFIERS) or _is_trained(n, part, layers))


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
            return name.startswith((f"layer_{layers - 1}/", "mlm/", "final_norm/", "prediction/"))


def prepared(model: Model[C], config: AdapterConfig, seed: int) -> Model[C]:
    """Return the start of a training: the model with fresh adapters if `config` trains adapters.

    Adapters of an earlier training are merged first. A has standard deviation 1/√(3·in), as in
    PEFT. B is zero, so that no output changes.

    Args:
        model: the model.
        config: trained part, and rank, alpha and targets of adapters.
        seed: public; draws A.
    """
    model = merged(model)
    if config.trained_parameters != "lora":
        return model
    added: Arrays = {LORA_SCALE: np.array(config.lora_alpha / config.lora_rank, np.float32)}
    rank, targets = config.lora_rank, "|".join(_TARGETS[config.lora_targets])
    for name, kernel in model.parameters.items():
        if match := re.fullmatch(rf"(layer_\d+/({targets}))/kernel", name):
            module, (d_in, d_out) = match[1], kernel.shape
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
    p = model.parameters
    if not (adapted := adapters_of(p)):
        raise BadInput("the model has no adapters", where=str(folder))
    tensors: Arrays = {}
    modules: list[str] = []
    for module in adapted:
        theirs = [
            name.removesuffix(".weight") for name in tensors_of(f"{module}/kernel", model.config)
        ]
        parts = (np.split(p[f"{module}/{leaf}"], len(theirs), axis=1) for leaf in (LORA_A, LORA_B))
        for their, a, b in zip(theirs, *parts, strict=True):
            tensors[f"{_PREFIX}{their}.lora_A.weight"] = np.ascontiguousarray(a.T)
            tensors[f"{_PREFIX}{their}.lora_B.weight"] = np.ascontiguousarray(b.T)
        modules += theirs
    classifiers: set[str] = set()
    for name in p:
        # The transitions of a CRF are only in the merged model: PEFT has no module for them.
        if name.startswith(CLASSIFIERS) and name != TRANSITIONS:
            (their,) = tensors_of(name, model.config)
            tensors[_PREFIX + their] = transposed(name, p[name], model.config)
            classifiers.add(their.rpartition(".")[0])
    rank = p[f"{adapted[0]}/{LORA_B}"].shape[0]
    causal = isinstance(model.config, CausalConfig)
    kind = "TOKEN_CLS" if f"{TAGGER}/kernel" in p else "CAUSAL_LM" if causal else None
    about: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": kind,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "lora_bias": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": float(p[LORA_SCALE]) * rank,
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
