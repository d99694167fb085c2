import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_job import SIZES, folder_of, result_of, run_all

from dp_core.models.architectures import tensors_to_hf
from dp_core.models.config import LlamaConfig
from dp_core.models.hugging_face import load_model
from dp_core.privacy.ledger import State
from tasks import cli
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow, SQLAlchemy and TensorFlow.

SETTINGS = JobSettings(
    model_kind="llama", trained_parameters="lora", lora_rank=2, learning_rate=0.05, **SIZES
)
NEEDED = ("private_corpus", "public_corpus", "vocabulary", "canaries", "private_store",
          "public_store", "Public text only / pretraining", "With DP / pretraining")  # fmt: skip


def test_adapter_training_is_charged_and_exports_merged_model_and_adapter(
    untracked, monkeypatch, capfd
):
    steps = job_steps(SETTINGS)
    public, private = steps["Public text only / pretraining"], steps["With DP / pretraining"]
    assert public.training.trained_parameters == "all"
    assert private.training.trained_parameters == "lora"
    ledger = run_all(untracked, [steps[task] for task in ("budget", *NEEDED)], capfd)
    assert [e.state for e in ledger.history("synthetic-notes")] == [State.SETTLED] * 2

    facts = result_of(private).facts
    assert facts["trained"]["which"] == "lora"
    assert facts["shape"]["kind"] == "llama"
    base = load_model(folder_of(public))
    assert isinstance(base.config, LlamaConfig)
    assert facts["parameters"] == base.size
    assert 0 < facts["trained"]["parameters"] < base.size / 10

    whole, alone = untracked.home / "whole", untracked.home / "alone"
    for words in ([str(whole)], [str(alone), "--adapter"]):
        monkeypatch.setattr(sys, "argv", ["confide", "export", *words, "--uri", private.output])
        assert cli.main() == 0, "".join(capfd.readouterr())
    names = {f.relative_to(whole).as_posix() for f in whole.rglob("*")}
    assert {"config.json", "model.safetensors", "PRIVACY.md", "vocab.json"} <= names
    # an adapter in the folder would be applied a second time
    assert not [name for name in names if "adapter" in name]
    names = {f.name for f in alone.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "PRIVACY.md"} <= names
    assert not {"config.json", "model.safetensors"} & names
    statement = json.loads((alone / "privacy_statement.json").read_text())
    assert statement["private"] is True

    # The base plus the exported adapter, (α / r)·B·A, is the released model.
    about = json.loads((alone / "adapter_config.json").read_text())
    adapter = load_file(alone / "adapter_model.safetensors")
    start = tensors_to_hf(base.parameters, base.config)
    changed = 0
    for name, value in load_file(whole / "model.safetensors").items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = start[name]
        if f"{module}.lora_A.weight" in adapter:
            b, a = (adapter[f"{module}.lora_{part}.weight"] for part in "BA")
            expected = expected + about["lora_alpha"] / about["r"] * (b @ a)
        np.testing.assert_allclose(value, expected, atol=1e-6, err_msg=name)
        changed += not np.array_equal(value, start[name])
    assert changed == 7  # the matrices of one block; every other parameter is unchanged

    # A model without adapters cannot be exported as an adapter.
    words = [str(untracked.home / "none"), "--adapter", "--uri", public.output]
    monkeypatch.setattr(sys, "argv", ["confide", "export", *words])
    assert cli.main() != 0
    assert "no adapter" in "".join(capfd.readouterr())
