"""Tokenizers of checkpoints; those of real `transformers` need `make test-transformers`."""

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from dp_core.data.tokens import SpecialIds
from dp_core.vocabulary import tokenizer_files
from dp_core.vocabulary.tokenizer_files import of_checkpoint, stored_ids

HERE = Path(__file__).parent
SCRIPTS = tomllib.loads((HERE / "ten_scripts.toml").read_text())
TEXTS = [text for texts in SCRIPTS.values() for text in texts]
PYTHON = HERE.parents[2] / ".venv" / "transformers" / "bin" / "python"
KINDS = [
    *("uncased BERT", "cased BERT", "uncased BERT with accents", "cased BERT of Chinese runs"),
    *("RoBERTa", "RoBERTa with a space before", "GPT-2"),
]
FORMS = [*KINDS, *(f"{kind} without tokenizer.json" for kind in KINDS), "ModernBERT", "Llama 3"]
needs_transformers = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venv/transformers: run `make test-transformers`"
)


def transformers(command: str, folder: Path) -> None:
    script = HERE / "transformers_tokenizers.py"
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command_line = [PYTHON, script, command, folder, json.dumps(TEXTS)]
    subprocess.run(command_line, check=True, env=os.environ | offline)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers that transformers saved, and their ids of each text."""
    folder = tmp_path_factory.mktemp("theirs")
    transformers("make", folder)
    return folder


@pytest.fixture(scope="module")
def ours(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizers as this project saves them, and the ids of transformers."""
    folder = tmp_path_factory.mktemp("ours")
    for name in FORMS:
        tokenizer_files.save(of_checkpoint(theirs / name), folder / name)
    transformers("read", folder)
    return folder


@needs_transformers
@pytest.mark.parametrize("name", FORMS)
def test_checkpoint_is_tokenized_as_by_transformers(theirs, name):
    tokenizer, (old, _) = of_checkpoint(theirs / name), stored_ids(theirs / name)
    assert SpecialIds.of(tokenizer) == SpecialIds()
    expected = json.loads((theirs / name / "ids.json").read_text())
    for text, ids in zip(TEXTS, expected, strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=False).tokens
        assert [old[token] for token in tokens] == ids, text


@needs_transformers
@pytest.mark.parametrize("name", FORMS)
def test_transformers_reads_saved_tokenizers(ours, name):
    tokenizer = tokenizer_files.load(ours / name)
    expected = json.loads((ours / name / "ids.json").read_text())
    assert [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)] == expected
    assert of_checkpoint(ours / name).to_str() == tokenizer.to_str()


def test_commands_in_a_text_remain_text():
    pass
