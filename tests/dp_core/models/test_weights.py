import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_models import SHAPES, random_model

from dp_core.errors import BadInput
from dp_core.models.architectures import tensors_to_hf
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import load, load_model, save
from dp_core.models.parameters import Bert, fresh, language_model

CONFIG = BertConfig(vocab_size=6, hidden=8, layers=1, heads=2, intermediate=12, max_positions=5)
BFLOAT16 = ml_dtypes.bfloat16
WEIGHTS = "model.safetensors"
OUTPUT = "bert.encoder.layer.0.output.dense.weight"
KEY = "bert.encoder.layer.0.attention.self.key.weight"

# Shapes by name, as transformers' BertForMaskedLM.save_pretrained stores them.
STORED = json.loads((Path(__file__).parent / "bert_tensors.json").read_text())


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    save(random_model(CONFIG), tmp_path / "model")
    return tmp_path / "model"


def write_shards(folder: Path, **files: dict[str, np.ndarray]) -> None:
    (folder / WEIGHTS).unlink()
    weight_map = {}
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{file}.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", SHAPES)
def test_saved_folder_is_read_back(name, tmp_path):
    model = random_model(SHAPES[name])
    save(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert again.parameters.keys() == model.parameters.keys()
    for parameter, value in model.parameters.items():
        np.testing.assert_array_equal(value, again.parameters[parameter])
    if "bert" not in name:
        with pytest.raises(BadInput, match="causal"):
            load(tmp_path)


def test_saved_tensors_have_the_names_shapes_and_orientation_of_transformers(folder):
    stored = load_file(folder / WEIGHTS)
    assert {n: list(a.shape) for n, a in stored.items()} == STORED
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
    fused = load(folder).parameters["layer_0/qkv/kernel"]
    np.testing.assert_array_equal(stored[KEY], fused[:, 8:16].T)


def test_older_names_and_missing_heads_are_read(folder):
    stored, whole = load_file(folder / WEIGHTS), load(folder)
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): a
        for n, a in stored.items()
        if n.startswith("bert.")
    }
    for prefix in ("bert.", ""):
        save_file({n.removeprefix(prefix): a for n, a in old.items()}, folder / WEIGHTS)
        headless = load(folder)
        for name, value in whole.parameters.items():
            same = np.array_equal(value, headless.parameters[name])
            assert same != name.startswith("mlm/"), name


@pytest.mark.cases
def test_classifier_and_its_labels_are_read_without_mlm_head(tmp_path, shapes, architecture):
    model = fresh(CONFIG, 0)
    encoder = {n: a for n, a in model.parameters.items() if not n.startswith("mlm/")}
    head = {n: np.full(shape, 2, np.float32) for n, shape in shapes.items()}
    save(Bert(CONFIG, encoder | head, ("no", "yes")), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]
    read = load(tmp_path)
    assert read.labels == ("no", "yes")
    assert read.parameters.keys() == (encoder | head).keys()
    for name, value in head.items():
        np.testing.assert_array_equal(read.parameters[name], value)
    again = language_model(read)  # for training: no classifier, and a fresh MLM head
    assert again.parameters.keys() == model.parameters.keys()
    stored = load_file(tmp_path / WEIGHTS)
    assert stored.pop("classifier.weight").shape == (2, 8)
    save_file(stored, tmp_path / WEIGHTS)
    with pytest.raises(BadInput, match="classifier is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda stored: stored | {OUTPUT: np.zeros((8, 11), "f")}, r"kernel is \(11, 8\)"),
        (lambda stored: stored | {OUTPUT: np.ones((8, 12), np.int8)}, "kernel is missing"),
        (lambda stored: {n: a for n, a in stored.items() if n != OUTPUT}, "kernel is missing"),
    ],
    ids=["wrong shape", "integers of a quantised model", "missing"],
)
def test_unusable_tensor_is_refused(folder, change, what):
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    with pytest.raises(BadInput, match=f"layer_0/output/{what}"):
        load(folder)


def test_bfloat16_checkpoint_with_unused_tensors_of_other_types_is_read(folder):
    stored = load_file(folder / WEIGHTS)
    unused = {
        "bert.embeddings.position_ids": np.arange(5)[None],
        "attention.masked_bias": np.array(True),
        "scales": np.ones(3, np.uint8),
    }
    save_file({n: a.astype(BFLOAT16) for n, a in stored.items()} | unused, folder / WEIGHTS)
    read = tensors_to_hf(load(folder).parameters, CONFIG)
    assert read.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(read[name], value.astype(BFLOAT16).astype("f"), err_msg=name)


def test_truncated_and_missing_weights_are_named(folder):
    (folder / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(BadInput, match="cannot be read"):
        load(folder)
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors is missing"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(BadInput, match=r"the only weights are 'pytorch_model\.bin', a pickle"):
        load(folder)
    index = {"weight_map": {"x": "a.safetensors", "y": "../elsewhere.safetensors"}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    save_file({"x": np.zeros(1, "f")}, folder / "a.safetensors")
    missing = r"1 of 2 shards are missing, the first is 'elsewhere\.safetensors'"
    with pytest.raises(BadInput, match=missing):  # an index cannot point outside of its folder
        load(folder)


def test_initial_values_do_not_depend_on_the_other_parameters():
    larger = BertConfig(vocab_size=6, hidden=8, layers=2, heads=2, intermediate=12, max_positions=5)
    small, large = fresh(CONFIG, 1).parameters, fresh(larger, 1).parameters
    for name, value in small.items():
        np.testing.assert_array_equal(value, large[name])
    word = "embeddings/word"
    assert np.abs(small[word]).max() <= 2 * CONFIG.initializer_range
    assert not np.array_equal(small[word], fresh(CONFIG, 2).parameters[word])


PREFIXES = {"gpt2": "transformer.", "llama": "model.", "modernbert": "model."}


@pytest.mark.parametrize("kind", [np.float32, BFLOAT16])
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "feed-forward"])
def test_models_saved_without_head_or_in_shards_are_read(tmp_path, name, kind):
    """As `BertModel` and `GPT2Model` save themselves, and larger models in bfloat16."""
    model = random_model(SHAPES[name], 1)
    save(model, tmp_path)
    prefix = PREFIXES.get(name, f"{name}.")
    body = {
        n.removeprefix(prefix): a.astype(kind)
        for n, a in load_file(tmp_path / WEIGHTS).items()
        if n.startswith((prefix, "lm_head.weight"))
    }
    first = dict(list(body.items())[::2])
    write_shards(tmp_path, a=first, b={n: a for n, a in body.items() if n not in first})
    read = load_model(tmp_path).parameters
    for parameter, value in model.parameters.items():
        if not parameter.startswith(("mlm/", "prediction/")):
            np.testing.assert_array_equal(read[parameter], value.astype(kind).astype("f"))
