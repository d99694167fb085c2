"""Model folders against real `transformers` in both directions: logits equal to 1e-4.

`make test-transformers` installs its environment and runs this; otherwise these tests are skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file
from small_models import logits_of, randomised

from dp_core.config.training import AdapterConfig
from dp_core.models.adapters import prepared, save_adapter
from dp_core.models.bert import class_logits
from dp_core.models.hugging_face import load, load_model, load_with_vocabulary, save
from dp_core.models.parameters import CLASSIFIER, AnyModel, Model
from dp_core.nn import Layers
from dp_core.training.heads import TaggingHead
from dp_core.vocabulary import subwords, tokenizer_files

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv" / "transformers" / "bin" / "python"
TOLERANCE = 1e-4
LANGUAGE_MODELS = [
    *("bert", "distilbert", "roberta", "modernbert", "gpt2", "llama", "tied-llama", "llama-3")
]
NAMES = [
    *(*LANGUAGE_MODELS, "tagger", "classifier", "distilled-classifier", "roberta-classifier"),
    *("modernbert-tagger", "modernbert-classifier"),
]

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv/transformers: run `make test-transformers`"
)


def transformers(command: str, folder: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1"}
    script = Path(__file__).with_name("transformers_side.py")
    subprocess.run([PYTHON, script, command, folder], check=True, env=os.environ | offline)


def our_logits(model: AnyModel, folder: Path) -> np.ndarray:
    """Return our logits of the folder's inputs, NaN for padding."""
    asked = dict(np.load(folder / "asked.npz", allow_pickle=False))
    ids, lengths = asked["ids"], asked["lengths"]
    if f"{CLASSIFIER}/kernel" in model.parameters:
        seconds = np.argmax(asked["types"], 1, keepdims=True)
        arguments = (tf.constant(a, tf.int32) for a in (ids, lengths, seconds))
        return class_logits(Layers(model.parameters), model.config, *arguments).numpy()
    logits = logits_of(model, ids, lengths)
    logits[np.arange(ids.shape[1]) >= lengths[:, None]] = np.nan
    return logits


def assert_equal(ours: np.ndarray, theirs: np.ndarray) -> None:
    answered = np.isfinite(ours)
    assert answered.mean() > 0.5
    np.testing.assert_allclose(ours[answered], theirs[answered], atol=TOLERANCE, rtol=0)
    assert ours[answered].std() > 100 * TOLERANCE


def assert_transformers_agrees(folder: Path) -> None:
    theirs = np.load(folder / "logits.npy", allow_pickle=False)
    assert_equal(our_logits(load_model(folder), folder), theirs)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that transformers created and saved."""
    folder = tmp_path_factory.mktemp("theirs")
    transformers("make", folder)
    return folder


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the old pieces, in another order, mixed with new ones."""
    folder = tmp_path_factory.mktemp("vocabulary")
    tokenizer_files.save(subwords.learn(dict.fromkeys(("ab", "fa", "bed", "cab"), 50), 24), folder)
    return folder


BYTES = "GPT-2 of byte-level tokens"


@pytest.fixture(scope="module")
def byte_level_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level tokens that this project learned from counts."""
    folder = tmp_path_factory.mktemp("byte-level")
    counts = {"Ġbed": 50, "Ġfab": 40, "ab": 30, "ĠcafÃ©": 20}
    tokenizer = subwords.learn(counts, 290, ["ĠcafÃ©"], tokenizer_files.GPT2)
    tokenizer_files.save(tokenizer, folder)  # one word without merges
    return folder


@pytest.fixture(scope="module")
def ours(
    theirs: Path,
    vocabulary: Path,
    byte_level_vocabulary: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Models that this project saved, and the logits of transformers for them."""
    folder = tmp_path_factory.mktemp("ours")
    models = {name: load_model(theirs / name) for name in NAMES}
    pieces = list(tokenizer_files.stored_ids(vocabulary)[0])
    for name in LANGUAGE_MODELS:
        models[f"{name} of a new vocabulary"] = load_with_vocabulary(theirs / name, pieces, 1)
    byte_tokens = list(tokenizer_files.stored_ids(byte_level_vocabulary)[0])
    models[BYTES] = load_with_vocabulary(theirs / "gpt2", byte_tokens, 1)
    for name, model in models.items():
        size = model.config.vocab_size
        tokens = vocabulary if size == len(pieces) else None
        save(model, folder / name, byte_level_vocabulary if name == BYTES else tokens)
        rng = np.random.default_rng(1)
        asked = {
            "ids": rng.integers(1, size, (3, 8)),
            "lengths": np.array([8, 3, 6]),
            "types": (np.arange(8) >= np.array([[8], [2], [4]])).astype(int),
        }
        np.savez(folder / name / "asked.npz", **asked)
    transformers("read", folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_outputs_equal_transformers_on_its_models(theirs, name):
    assert_transformers_agrees(theirs / name)


SAVED = [*NAMES, BYTES, *(f"{n} of a new vocabulary" for n in LANGUAGE_MODELS)]


@pytest.mark.parametrize("name", SAVED)
def test_transformers_computes_the_same_from_saved_models(ours, name):
    folder = ours / name
    assert_transformers_agrees(folder)
    loading = json.loads((folder / "loading.json").read_text())
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_transformers_reads_saved_vocabularies(ours, name):
    folder = ours / f"{name} of a new vocabulary"
    pieces = json.loads((folder / "loading.json").read_text())["pieces"]
    assert pieces == tokenizer_files.load(folder).encode("ab fa bed").ids


def test_transformers_reads_saved_byte_level_tokens(ours):
    loading = json.loads((ours / BYTES / "loading.json").read_text())
    assert loading["pieces"] == tokenizer_files.load(ours / BYTES).encode("ab fa bed").ids
    assert loading["words"] == "ab fa bed"  # decoded again


def test_shared_tokens_keep_the_embeddings_of_transformers(ours, theirs):
    old, new = load(theirs / "bert"), load(ours / "bert of a new vocabulary")
    lines = (theirs / "bert" / "vocab.txt").read_text().split()
    kept = 0
    for piece, i in tokenizer_files.stored_ids(ours / "bert of a new vocabulary")[0].items():
        if piece in lines:
            kept += 1
            for name in ("embeddings/word", "mlm/bias"):
                before = old.parameters[name][lines.index(piece)]
                np.testing.assert_array_equal(new.parameters[name][i], before)
    assert 5 < kept < new.config.vocab_size


# --- adapters, in real `peft`


ADAPTED = [*LANGUAGE_MODELS, "tagger"]
LORA = AdapterConfig(trained_parameters="lora", lora_rank=3, lora_alpha=7.0)


@pytest.fixture(scope="module")
def adapters(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers with our adapters, and the logits of `peft` for them."""
    finder = [PYTHON, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('peft'))"]
    if subprocess.run(finder, check=False).returncode:
        pytest.skip("no peft in .venv/transformers")
    folder = tmp_path_factory.mktemp("adapters")
    for name in ADAPTED:
        base: AnyModel = load_model(theirs / ("bert" if name == "tagger" else name))
        save(base, folder / name / "base")
        if name == "tagger":
            rng = np.random.default_rng(5)
            base = TaggingHead(("O", "B-x", "I-x")).begin(base, 0)
            kernel = rng.standard_normal((base.config.hidden, 3)).astype("f")
            base = Model(base.config, base.parameters | {"tagger/kernel": kernel}, base.labels)
        learned = prepared(base, LORA, 0)
        model = randomised(learned, 4, 0.2, ("_a", "_b"))  # the base is unchanged, as in training
        save_adapter(model, folder / name / "adapter")
        rng = np.random.default_rng(1)
        np.savez(
            folder / name / "asked.npz",
            ids=rng.integers(1, base.config.vocab_size, (3, 8)),
            lengths=np.array([8, 3, 6]),
        )
        bare, logits = our_logits(base, folder / name), our_logits(model, folder / name)
        assert np.nanmax(np.abs(bare - logits)) > 100 * TOLERANCE
        np.save(folder / name / "ours.npy", logits)
    transformers("peft", folder)
    return folder


@pytest.mark.parametrize("name", ADAPTED)
def test_peft_computes_the_same_as_our_adapters_before_and_after_merging(adapters, name):
    folder_of_model = adapters / name
    loading = json.loads((folder_of_model / "loading.json").read_text())
    assert not loading["zero"]
    tensors = load_file(folder_of_model / "adapter" / "adapter_model.safetensors")
    assert loading["tensors"] == sum("lora_" in n for n in tensors)
    ours = np.load(folder_of_model / "ours.npy", allow_pickle=False)
    for file in ("logits.npy", "merged.npy"):
        assert_equal(ours, np.load(folder_of_model / file, allow_pickle=False))
