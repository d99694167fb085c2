import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file
from small_models import SHAPES, SIZES, logits_of, randomised

from dp_core.config.training import AdapterConfig
from dp_core.errors import BadInput
from dp_core.models.adapters import adapters_of, merged, prepared, save_adapter, trained_names
from dp_core.models.config import Gpt2Config
from dp_core.models.hugging_face import save
from dp_core.models.parameters import MLM_BIAS, POSITION, WORD, AnyModel, Model, fresh
from dp_core.nn import LORA_SCALE, Layers
from dp_core.training.heads import TaggingHead

TRANSFORMERS = ("bert", "distilbert", "gpt2", "llama")
BERT = SHAPES["bert"]
LORA = AdapterConfig(trained_parameters="lora", lora_rank=3, lora_alpha=6.0)
IDS = np.random.default_rng(1).integers(0, 30, (2, 6))


def adapted(name: str, config: AdapterConfig = LORA, *, tags: bool = False) -> AnyModel:
    """Return a model with adapters of random values."""
    start = fresh(SHAPES[name], 0)
    start = TaggingHead(tuple("OAB")).begin(start, 0) if tags else start
    return randomised(prepared(start, config, 0))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_merged_model_computes_the_same_without_adapters(name):
    model = adapted(name)
    merged_model = merged(model)
    assert merged_model.parameters.keys() == fresh(SHAPES[name], 0).parameters.keys()
    np.testing.assert_allclose(logits_of(merged_model, IDS), logits_of(model, IDS), atol=1e-4)
    bare = {n: a for n, a in model.parameters.items() if "lora" not in n}
    assert np.abs(logits_of(Model(model.config, bare), IDS) - logits_of(model, IDS)).max() > 0.1


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_adapter_adds_the_scaled_low_rank_product(name):
    """y = x·W + b + (α / rank)·(x·A)·B; parts of a query-key-value kernel have separate A and B."""
    model = adapted(name)
    p, x = model.parameters, np.random.default_rng(2).standard_normal((5, 8)).astype("f")
    module = "layer_1/query" if name == "llama" else "layer_1/qkv"
    got = Layers(p).linear(module, tf.constant(x)).numpy()
    parts = 1 if name in ("llama", "gpt2") else 3  # split as in Hugging Face's modules
    a, b = (np.split(p[f"{module}/lora_{leaf}"], parts, axis=1) for leaf in "ab")
    assert a[0].shape == (8, 3)
    expected = 2.0 * np.concatenate(
        [x @ left @ right for left, right in zip(a, b, strict=True)], axis=1
    )
    expected += x @ p[f"{module}/kernel"] + p.get(f"{module}/bias", 0)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.cases
def test_adapters_are_on_the_target_matrices_of_the_setting(targets, modules):
    config = LORA.model_copy(update={"lora_targets": targets})
    adapters = adapters_of(prepared(fresh(BERT, 0), config, 0).parameters)
    assert {name.split("/")[1] for name in adapters} == set(modules)
    assert len(adapters) == 2 * len(modules)


def test_fresh_adapters_do_not_change_the_model_and_follow_a_public_seed():
    for config in (SHAPES[name] for name in TRANSFORMERS):
        start = fresh(config, 0)
        first, same, other = (prepared(start, LORA, seed) for seed in (1, 1, 2))
        assert len(first.parameters) > len(start.parameters)
        np.testing.assert_array_equal(logits_of(first, IDS), logits_of(start, IDS))
        a = "layer_0/output/lora_a"
        np.testing.assert_array_equal(first.parameters[a], same.parameters[a])
        assert not np.array_equal(first.parameters[a], other.parameters[a])
        assert not first.parameters["layer_0/output/lora_b"].any()
    wide = prepared(
        fresh(Gpt2Config(**(SIZES | {"hidden": 256, "heads": 4})), 0),
        AdapterConfig(trained_parameters="lora", lora_rank=64),
        0,
    )
    drawn = wide.parameters["layer_0/qkv/lora_a"]
    assert drawn.std() == pytest.approx(0.88 / np.sqrt(3 * 256), rel=0.05)  # cut at 2 deviations


def test_setting_selects_the_trained_parameters():
    def of(kind: Any, name: str = "bert", *, tags: bool = False) -> set[str]:
        config = LORA.model_copy(update={"trained_parameters": kind})
        return set(trained_names(adapted(name, config, tags=tags), config))

    every = of("all")
    assert every == set(fresh(BERT, 0).parameters)
    assert {n.rsplit("/")[-1] for n in of("lora")} == {"lora_a", "lora_b"}
    vectors = of("biases-and-norms")
    assert {n.rsplit("/")[-1] for n in vectors} == {"bias", "gain"}
    assert MLM_BIAS in vectors
    assert every - of("no-embeddings") == {WORD, POSITION, "embeddings/type"}
    top = of("top-layer")
    assert {n.split("/")[0] for n in top} == {"layer_1", "mlm"}
    assert of("no-embeddings", "llama").isdisjoint({WORD, "head/kernel"})
    for kind in ("lora", "biases-and-norms", "top-layer"):  # a fresh classifier must learn
        assert {"tagger/kernel", "tagger/bias"} <= of(kind, tags=True)


def test_existing_adapters_are_merged_before_further_training():
    first = adapted("bert")
    again = prepared(first, LORA, 5)
    np.testing.assert_allclose(logits_of(again, IDS), logits_of(first, IDS), atol=1e-4)
    assert not again.parameters["layer_0/qkv/lora_b"].any()


def test_training_of_all_parameters_has_no_adapters():
    """The scale is constant, and training of all parameters merges the adapters first."""
    assert LORA_SCALE not in trained_names(adapted("bert"), AdapterConfig())
    assert not adapters_of(prepared(adapted("bert"), AdapterConfig(), 0).parameters)


def test_writing_a_model_with_unmerged_adapters_is_refused(tmp_path):
    """A folder without them would contain a different model."""
    with pytest.raises(BadInput, match="lora"):
        save(adapted("bert"), tmp_path)
    with pytest.raises(BadInput, match="no adapters"):  # of a model without adapters
        save_adapter(fresh(BERT, 0), tmp_path)


# --- PEFT's layout (equal logits in real `peft`: test_transformers.py)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_adapter_folder_has_the_names_and_orientation_of_peft(tmp_path, name):
    model = adapted(name, tags=name == "bert")
    save_adapter(model, tmp_path, "the/base")
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (3, 6.0)
    assert about["base_model_name_or_path"] == "the/base"
    assert about["fan_in_fan_out"] is (name == "gpt2")
    tensors, p = load_file(tmp_path / "adapter_model.safetensors"), model.parameters
    assert sum("lora_" in tensor for tensor in tensors) == 2 * len(about["target_modules"])
    if name == "bert":
        assert (about["task_type"], about["modules_to_save"]) == ("TOKEN_CLS", ["classifier"])
        prefix = "base_model.model."
        key = f"{prefix}bert.encoder.layer.1.attention.self.key.lora"
        for tensor, expected in (
            (f"{key}_A.weight", p["layer_1/qkv/lora_a"][:, 3:6]),
            (f"{key}_B.weight", p["layer_1/qkv/lora_b"][:, 8:16]),
            (f"{prefix}classifier.weight", p["tagger/kernel"]),
        ):
            np.testing.assert_array_equal(tensors[tensor], expected.T)
