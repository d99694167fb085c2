from __future__ import annotations

import json

import numpy as np
import pytest
from random_models import random_model

from dp_core.errors import BadInput
from dp_core.models.config import LlamaConfig, RopeScaling
from dp_core.models.hugging_face import load_with_vocabulary, save

SIZES = {
    "vocab_size": 30, "hidden": 16, "layers": 2, "heads": 4, "intermediate": 24,
    "max_positions": 12,
}  # fmt: skip
GROUPED = LlamaConfig(**SIZES, key_heads=2, rope_theta=50.0)


LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type"),
        ({"head_dim": 7}, "odd width"),
        ({"head_dim": "8"}, "head_width"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor is missing"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor below"),
        (LLAMA3 | {"factor": 0.5}, "at least 1"),
        (LLAMA3 | {"factor": "8"}, "factor is '8'"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position"),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"rope_theta": "a", "rope_parameters": None}, "rope_theta"),
    ],
)
def test_unsupported_decoder_config_is_refused(changed, what) -> None:
    if "rope_type" in changed:
        changed = {"rope_parameters": changed}
    with pytest.raises(BadInput, match=what):
        LlamaConfig.from_hf(GROUPED.to_hf() | changed)


def test_both_layouts_of_a_published_config_are_read() -> None:
    """Llama 3.2's config, as written by versions 4 and 5 of transformers."""
    rope = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    about = {
        **GROUPED.to_hf(), "rope_parameters": None, "rope_scaling": rope, "rope_theta": 500_000.0,
        "head_dim": 64, "bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009],
    }  # fmt: skip
    older = LlamaConfig.from_hf(about)
    assert older.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert (older.rope_theta, older.head_width) == (500_000.0, 64)
    assert (older.begin, older.end) == (128_000, 128_001)
    newer = about | {"rope_scaling": None, "rope_parameters": LLAMA3, "rope_theta": None}
    assert LlamaConfig.from_hf(newer) == older
    written = older.to_hf()
    assert written["rope_parameters"] == written["rope_scaling"] == LLAMA3


@pytest.mark.parametrize("tied", [False, True])
def test_new_vocabulary_replaces_rows_of_table_and_head(tmp_path, tied) -> None:
    """Pieces with SentencePiece's mark begin a word; markers are recognised by their ids."""
    config = LlamaConfig(**(SIZES | {"vocab_size": 6}), tied=tied, begin=1, end=2)
    old = random_model(config)
    save(old, tmp_path)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁pain": 3, "pain": 4, "ing": 5}
    whole = {"model": {"type": "BPE", "vocab": vocabulary}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    new = load_with_vocabulary(tmp_path, ["new", "[CLS]", "pain", "##ing", "##pain"], seed=0)
    kept, before = [1, 2, 3, 4], [1, 3, 5, 4]
    word = "embeddings/word"
    np.testing.assert_array_equal(new.parameters[word][kept], old.parameters[word][before])
    if not tied:
        head = new.parameters["head/kernel"]
        assert head.shape == (16, 5)
        np.testing.assert_array_equal(head[:, kept], old.parameters["head/kernel"][:, before])
        assert np.isfinite(head).all()
