import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_models import SHAPES, SIZES

from dp_core.errors import BadInput
from dp_core.models.architectures import config_from_hf, config_to_hf
from dp_core.models.config import BertConfig, FeedForwardConfig, LlamaConfig, RopeScaling

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
BERT = partial(BertConfig, **SIZES)
DENSE = partial(FeedForwardConfig, vocab_size=30, hidden=8, window=4, max_positions=12)


UNSUPPORTED = json.loads((Path(__file__).parent / "unsupported_configs.json").read_text())


@pytest.mark.parametrize(("name", "changed", "what"), UNSUPPORTED)
def test_unsupported_config_is_refused(name, changed, what):
    with pytest.raises(BadInput, match=what):
        config_from_hf(config_to_hf(SHAPES[name]) | changed)


@pytest.mark.parametrize(
    ("make", "changed", "what"),
    [
        (BERT, {"hidden": 9}, "not a multiple"),
        (BERT, {"layers": 0}, "layers is 0"),
        (BERT, {"type_vocab": 0, "layer_norm_epsilon": 1e-5}, "layer_norm_epsilon"),
        (BERT, {"initializer_range": float("nan")}, "initializer_range is nan"),
        (BERT, {"unknown": 1}, "unknown"),
        *((DENSE, {"units": u}, "units") for u in ((), (0,), (5, -1), (2.5,), [5], (True,))),
    ],
)
def test_invalid_shape_is_refused(make, changed, what):
    with pytest.raises(BadInput, match=what):
        make(**changed)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("value", [None, -1, 0, "8", [8], [], {}, 10**12, 0.5, True])
def test_damaged_config_never_raises_an_unexpected_error(name, value):
    about = config_to_hf(SHAPES[name])
    for key in about:
        with contextlib.suppress(BadInput):
            config_from_hf(about | {key: value})


def test_both_layouts_of_a_published_config_are_read():
    """Llama 3.2's config, as written by versions 4 and 5 of transformers."""
    rope = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    about = {
        **config_to_hf(LlamaConfig(**SIZES)), "rope_parameters": None, "rope_scaling": rope,
        "rope_theta": 500_000.0, "head_dim": 64, "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
    }  # fmt: skip
    older: Any = config_from_hf(about)
    assert older.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert (older.rope_theta, older.head_width) == (500_000.0, 64)
    assert (older.begin, older.end) == (128_000, 128_001)
    newer = about | {"rope_scaling": None, "rope_parameters": LLAMA3, "rope_theta": None}
    assert config_from_hf(newer) == older
    written = config_to_hf(older)
    assert written["rope_parameters"] == written["rope_scaling"] == LLAMA3


def test_positions_of_a_published_roberta_begin_after_its_padding():
    written = config_to_hf(SHAPES["roberta"])
    assert (written["pad_token_id"], written["max_position_embeddings"]) == (0, 1 + 12)
    for pad, usable in ((1, 512), (0, 513)):
        about = written | {"max_position_embeddings": 514, "pad_token_id": pad}
        assert config_from_hf(about).max_positions == usable


def test_layers_of_a_modernbert_are_read_from_both_layouts():
    """As versions 4 and 5 of transformers write them."""
    older = config_to_hf(SHAPES["modernbert"])
    whole, local = "full_attention", "sliding_attention"
    names = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")
    newer = {name: value for name, value in older.items() if name not in names} | {
        "layer_types": [whole, local, whole],
        "rope_parameters": {whole: {"rope_theta": 60.0}, local: {"rope_theta": 9.0}},
    }
    assert config_from_hf(newer) == config_from_hf(older) == SHAPES["modernbert"]


def test_published_defaults_fill_omitted_fields():
    omitted = {"n_inner": None, "layer_norm_epsilon": None, "bos_token_id": None}
    assert config_from_hf(config_to_hf(SHAPES["gpt2"]) | omitted).intermediate == 4 * 8
