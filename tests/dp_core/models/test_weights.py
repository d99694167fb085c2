from __future__ import annotations

import contextlib
import json
import re

import numpy as np
import pytest
from bfloat16_files import as_bfloat16, call_them_bfloat16
from random_models import random_model
from safetensors.numpy import load_file, save_file

from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, Gpt2Config, LlamaConfig
from dp_core.models.hugging_face import load, load_model, save, to_hf
from dp_core.models.parameters import Bert, fresh, language_model

CONFIG = BertConfig(vocab_size=6, hidden=8, layers=1, heads=2, intermediate=12, max_positions=5)
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "pain"]

# as transformers' BertForMaskedLM.save_pretrained stores them
STORED = {
    "bert.embeddings.word_embeddings.weight": (6, 8),
    "bert.embeddings.position_embeddings.weight": (5, 8),
    "bert.embeddings.token_type_embeddings.weight": (2, 8),
    "bert.embeddings.LayerNorm.weight": (8,),
    "bert.embeddings.LayerNorm.bias": (8,),
    "bert.encoder.layer.0.attention.self.query.weight": (8, 8),
    "bert.encoder.layer.0.attention.self.query.bias": (8,),
    "bert.encoder.layer.0.attention.self.key.weight": (8, 8),
    "bert.encoder.layer.0.attention.self.key.bias": (8,),
    "bert.encoder.layer.0.attention.self.value.weight": (8, 8),
    "bert.encoder.layer.0.attention.self.value.bias": (8,),
    "bert.encoder.layer.0.attention.output.dense.weight": (8, 8),
    "bert.encoder.layer.0.attention.output.dense.bias": (8,),
    "bert.encoder.layer.0.attention.output.LayerNorm.weight": (8,),
    "bert.encoder.layer.0.attention.output.LayerNorm.bias": (8,),
    "bert.encoder.layer.0.intermediate.dense.weight": (12, 8),
    "bert.encoder.layer.0.intermediate.dense.bias": (12,),
    "bert.encoder.layer.0.output.dense.weight": (8, 12),
    "bert.encoder.layer.0.output.dense.bias": (8,),
    "bert.encoder.layer.0.output.LayerNorm.weight": (8,),
    "bert.encoder.layer.0.output.LayerNorm.bias": (8,),
    "cls.predictions.transform.dense.weight": (8, 8),
    "cls.predictions.transform.dense.bias": (8,),
    "cls.predictions.transform.LayerNorm.weight": (8,),
    "cls.predictions.transform.LayerNorm.bias": (8,),
    "cls.predictions.bias": (6,),
}


@pytest.fixture()
def folder(tmp_path):
    rng = np.random.default_rng(0)
    model = fresh(CONFIG, 0)
    values = {
        n: rng.standard_normal(a.shape).astype(np.float32) for n, a in model.parameters.items()
    }
    vocabulary = tmp_path / "vocabulary"
    vocabulary.mkdir()
    (vocabulary / "vocab.txt").write_text("".join(f"{p}\n" for p in PIECES))
    save(Bert(CONFIG, values), tmp_path / "model", vocabulary)
    return tmp_path / "model"


def test_saved_tensors_have_the_names_and_shapes_of_transformers(folder):
    assert {n: a.shape for n, a in load_file(folder / "model.safetensors").items()} == STORED
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


def test_kernels_are_transposed_and_the_fused_kernel_is_split(folder):
    stored, model = load_file(folder / "model.safetensors"), load(folder)
    fused = model.parameters["layer_0/qkv/kernel"]
    name = "bert.encoder.layer.0.attention.self.key.weight"
    np.testing.assert_array_equal(stored[name], fused[:, 8:16].T)


def test_older_names_and_missing_heads_are_read(folder):
    stored = load_file(folder / "model.safetensors")
    whole = load(folder)
    old = {
        n.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma"): a
        for n, a in stored.items()
        if n.startswith("bert.")
    }
    save_file(old, folder / "model.safetensors")
    headless = load(folder)
    for name, value in whole.parameters.items():
        same = np.array_equal(value, headless.parameters[name])
        assert same != name.startswith("mlm/"), name


def test_saved_tagger_keeps_its_labels(tmp_path):
    model = fresh(CONFIG, 0)
    encoder = {n: a for n, a in model.parameters.items() if not n.startswith("mlm/")}
    head = {"tagger/kernel": np.ones((8, 3), "f"), "tagger/bias": np.arange(3, dtype="f")}
    save(Bert(CONFIG, encoder | head, ("O", "B-x", "I-x")), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["architectures"] == ["BertForTokenClassification"]
    assert load_file(tmp_path / "model.safetensors")["classifier.weight"].shape == (3, 8)
    loaded = load(tmp_path)
    assert loaded.labels == ("O", "B-x", "I-x")
    np.testing.assert_array_equal(loaded.parameters["tagger/bias"], [0, 1, 2])


@pytest.mark.parametrize("field,value", [("hidden_act", "relu"), ("is_decoder", True)])
def test_unsupported_variant_of_bert_is_refused(folder, field, value):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {field: value}))
    with pytest.raises(BadInput, match=field):
        load(folder)


@pytest.mark.parametrize("kind", ["roberta", "modernbert", "qwen2", 7, ["bert"]])
def test_unsupported_architecture_is_refused_with_a_list_of_supported_ones(folder, kind):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"model_type": kind}))
    supported = "Supported architectures are bert, distilbert, gpt2, llama, feed-forward"
    with pytest.raises(BadInput, match=f"{re.escape(repr(kind))}. {supported}"):
        load(folder)


def test_tensors_of_wrong_shape_are_refused(folder):
    stored = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    save_file(stored | {name: np.zeros((8, 11), "f")}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=r"layer_0/output/kernel is \(11, 8\)"):
        load(folder)
    save_file({n: a for n, a in stored.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="layer_0/output/kernel is missing"):
        load(folder)


def test_truncated_file_is_refused(folder):
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(BadInput, match="cannot be read"):
        load(folder)


def test_bfloat16_checkpoint_with_unused_tensors_of_other_types_is_read(folder):
    file = folder / "model.safetensors"
    stored = load_file(file)
    unused = {
        "bert.embeddings.position_ids": np.arange(5)[None],
        "attention.masked_bias": np.array(True),
        "scales": np.ones(3, np.uint8),
    }
    save_file({n: as_bfloat16(a) for n, a in stored.items()} | unused, file)
    call_them_bfloat16(file)
    read = to_hf(load(folder).parameters, CONFIG)
    assert read.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_allclose(read[name], value, rtol=2**-7, err_msg=name)


def test_integers_are_not_read_as_parameters(folder):
    """The stored integers of a quantised model are not its weights."""
    name = "bert.encoder.layer.0.output.dense.weight"
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {name: np.ones((8, 12), np.int8)}, folder / "model.safetensors")
    with pytest.raises(BadInput, match="layer_0/output/kernel is missing"):
        load(folder)


def test_missing_weights_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"model\.safetensors is missing"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(BadInput, match=r"the only weights are 'pytorch_model\.bin', a pickle"):
        load(folder)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"x": np.zeros(1, "f")}, folder / "a.safetensors")
    with pytest.raises(BadInput, match=r"1 of 2 shards are missing, the first is 'b\.safetensors'"):
        load(folder)


def test_initial_values_do_not_depend_on_the_other_parameters():
    larger = BertConfig(vocab_size=6, hidden=8, layers=2, heads=2, intermediate=12, max_positions=5)
    small, large = fresh(CONFIG, 1).parameters, fresh(larger, 1).parameters
    for name, value in small.items():
        np.testing.assert_array_equal(value, large[name])
    assert np.abs(small["embeddings/word"]).max() <= 2 * CONFIG.initializer_range
    assert not np.array_equal(
        small["embeddings/word"], fresh(CONFIG, 2).parameters["embeddings/word"]
    )


def test_inconsistent_sizes_are_refused():
    with pytest.raises(BadInput, match="not a multiple"):
        BertConfig(vocab_size=6, hidden=9, layers=1, heads=2, intermediate=12)
    with pytest.raises(BadInput, match="layers is 0"):
        BertConfig(vocab_size=6, hidden=8, layers=0, heads=2, intermediate=12)


SIZES = {"vocab_size": 6, "hidden": 8, "layers": 2, "heads": 2, "intermediate": 12}
SHAPES = {
    "bert": BertConfig(**SIZES),
    "distilbert": BertConfig(**SIZES, type_vocab=0),
    "gpt2": Gpt2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, key_heads=1),
}
PREFIXES = {"gpt2": "transformer.", "llama": "model."}


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_models_saved_without_head_or_in_shards_are_read(tmp_path, name, bfloat16):
    """As `BertModel` and `GPT2Model` save themselves, and larger models in bfloat16."""
    model = random_model(SHAPES[name], 1)
    save(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = PREFIXES.get(name, f"{name}.")
    body = {n.removeprefix(prefix): a for n, a in stored.items() if n.startswith(prefix)}
    body |= {n: a for n, a in stored.items() if n == "lm_head.weight"}
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for file, names in {"a": sorted(body)[::2], "b": sorted(body)[1::2]}.items():
        path = tmp_path / f"{file}.safetensors"
        save_file({n: as_bfloat16(body[n]) if bfloat16 else body[n] for n in names}, path)
        if bfloat16:
            call_them_bfloat16(path)
        weight_map |= dict.fromkeys(names, path.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = load_model(tmp_path).parameters
    for parameter, value in model.parameters.items():
        if parameter.startswith("mlm/"):
            continue
        np.testing.assert_allclose(read[parameter], value, rtol=2**-7 if bfloat16 else 0)
        assert not (bfloat16 and (read[parameter].view(np.uint32) & 0xFFFF).any())


def test_shard_index_cannot_point_outside_its_folder(tmp_path):
    folder = tmp_path / "model"
    save(fresh(CONFIG, 0), folder)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"x": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match="1 of 1 shards are missing"):
        load(folder)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", [None, -1, 0, "8", [8], {}, 10**12, 0.5, True])
def test_damaged_config_never_raises_an_unexpected_error(name, value):
    about, read = SHAPES[name].to_hf(), type(SHAPES[name]).from_hf
    assert read(about) == SHAPES[name]
    for key in about:
        with contextlib.suppress(BadInput):
            read(about | {key: value})


def test_classifier_is_read_without_mlm_head(tmp_path):
    model = fresh(CONFIG, 0)
    encoder = {n: a for n, a in model.parameters.items() if not n.startswith("mlm/")}
    shapes = {
        "pooler/kernel": (8, 8),
        "pooler/bias": (8,),
        "classifier/kernel": (8, 2),
        "classifier/bias": (2,),
    }
    head = {n: np.ones(s, np.float32) for n, s in shapes.items()}
    save(Bert(CONFIG, encoder | head, ("no", "yes")), tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["architectures"] == ["BertForSequenceClassification"]
    read = load(tmp_path)
    assert read.labels == ("no", "yes")
    assert read.parameters.keys() == (encoder | head).keys()
    again = language_model(read)  # for training: no classifier, and a fresh MLM head
    assert again.parameters.keys() == model.parameters.keys()
    stored = load_file(tmp_path / "model.safetensors")
    del stored["classifier.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match="classifier is missing"):
        load(tmp_path)
