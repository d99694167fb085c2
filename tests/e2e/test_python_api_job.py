"""A notebook trains a model on strings, and the command line finds the same job and ledger."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dp_core.errors import BadInput, BudgetExceeded
from tasks import python_api as confide
from tasks.releases.deployment_ledger import open_ledger
from tasks.storage.backends import local_path

pytestmark = pytest.mark.slow

TEXTS = [f"Patient {n} has fever on ward {n % 7}, aspirin {3 * n} mg quorvathin" for n in range(24)]
TINY = {  # the smallest model
    "vocabulary_size": 300, "layers": 1, "hidden": 64, "sequence_length": 16, "epochs": 1,
    "public_steps": 2, "public_batch_size": 8, "synthetic_patients": 50, "canary_patterns": "HS",
    "holdout": 0, "device": "cpu", "declared_units": 30,
}  # fmt: skip


def test_ten_lines_train_audit_and_save_a_model_that_the_command_line_knows(
    e2e_home, tmp_path, monkeypatch, capsys
):
    notes = confide.read(TEXTS)
    terms = {"epsilon": 50, "delta": 1e-3, "unit": "document"}
    budget = confide.Ledger(tmp_path / "ledger.db").register("ward-notes", **terms)
    model = confide.train(notes, budget=budget, epsilon=20, **TINY)
    ledger = open_ledger(budget.deployment)
    history = [(entry.event, entry.delta, entry.state) for entry in ledger.history("ward-notes")]

    assert model.epsilon is not None and 19 < model.epsilon <= 20
    assert f"one **document** of the data set “{budget.name}”" in model.privacy_statement()
    audit = model.audit()
    assert "not audited" in audit.verdict.sentence
    assert "exposure" in {record.key for record in audit.records}
    folder = model.save(tmp_path / "ward-bert")
    assert (folder / "PRIVACY.md").read_text() == model.privacy_statement()
    shown = capsys.readouterr()
    assert "quorvathin" not in f"{shown}{model!r}{model._repr_html_()}{audit!r}{budget!r}"

    # the command line, with the same settings, finds every output and charges nothing
    (copy,) = (budget.deployment.work / "read").iterdir()
    settings = TINY | {
        "private_format": "jsonl", "private_path": str(copy), "private_columns": "text:text",
        "private_dataset": "ward-notes", "unit": "document",
        "target_epsilon": 20, "target_delta": 1e-3 * 20 / 50 / 2,
    }  # fmt: skip
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "tasks.cli", "run", "--settings", tmp_path / "settings.json",
         "--json"],
        cwd=Path(__file__).parents[2], env=os.environ | budget.deployment.variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert steps["pretraining · With DP"]["output"] == model.uri
    assert steps["pretraining · With DP"]["metrics"]["epsilon"] == model.epsilon
    now = ledger.history("ward-notes")
    assert history == [(entry.event, entry.delta, entry.state) for entry in now]

    # attacks
    with pytest.raises(BudgetExceeded, match="no room"):
        confide.train(notes, budget=budget, epsilon=40, **TINY)
    with pytest.raises(BadInput, match="transformers is not installed"):
        monkeypatch.setitem(sys.modules, "transformers", None)
        model.to_transformers()
    loaded = SimpleNamespace(from_pretrained=lambda path: sorted(f.name for f in path.iterdir()))
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(BertForMaskedLM=loaded))
    assert "model.safetensors" in model.to_transformers()
    weights = local_path(budget.deployment.open_store().location(model.uri)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])  # other weights under the same name
    for claim in (model.audit, model.privacy_statement, lambda: model.epsilon):
        with pytest.raises(BadInput, match="changed since its training"):
            claim()
    with pytest.raises(BadInput, match="changed since its training"):
        model.save(tmp_path / "forged")
