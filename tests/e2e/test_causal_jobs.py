"""Jobs of causal models: an audited adapter, and the four regimes of Kerrigan et al. 2020."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from safetensors.numpy import load_file
from small_job import SIZES, folder_of, result_of, run, run_all

from dp_core.config.training import BatchConfig, TrainingConfig
from dp_core.models.config import FeedForwardConfig, LlamaConfig
from dp_core.models.hugging_face import load_model, to_hf
from dp_core.privacy.ledger import State
from tasks.commands.export_command import command as export
from tasks.evidence.audits import JUDGED
from tasks.protocol import FinetuneSpec, JobSettings, StepSpec, job_steps
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow, SQLAlchemy and TensorFlow.

ADAPTED = JobSettings(
    model_kind="llama", trained_parameters="lora", lora_rank=2, learning_rate=0.05,
    audit_canaries=40, extraction_rows=20, extraction_prefix=4, extraction_suffix=4, **SIZES,
)  # fmt: skip


def findings_in(spec: StepSpec, label: str) -> dict[str, dict[str, Any]]:
    findings = json.loads((folder_of(spec) / f"findings_{label}.json").read_text())
    return {finding["key"]: finding for finding in findings}


def test_adapted_causal_model_is_trained_charged_audited_and_exported(
    untracked: Deployment, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = job_steps(ADAPTED)
    assert not [name for name in steps if "finetuning" in name]
    ledger = run_all(untracked, steps.values(), capfd)
    assert [e.state for e in ledger.history("synthetic-notes")] == [State.SETTLED] * 2

    folder, base = (folder_of(steps[f"{kind}_pretraining"]) for kind in ("dp", "public"))
    result, whole = result_of(steps["dp_pretraining"]), load_model(base)
    assert len(result.releases) == 2  # the releases of the vocabulary and of the training
    assert json.loads((folder / "privacy_statement.json").read_text())["private"] is True
    assert isinstance(whole.config, LlamaConfig)
    assert result.facts["parameters"] == whole.size
    assert 0 < result.facts["trained"]["parameters"] < whole.size / 10
    labels = {m.name: m.label for m in result.metrics}
    assert labels["perplexity_public"] == labels["perplexity_curve"] == "dp"
    assert labels["perplexity_private"] == "operator"
    assert not [name for name in labels if name.startswith("mlm")]

    pages = folder_of(steps["report"]) / "report"
    page, table = (pages / "report.html").read_text(), closing_table(pages)
    shown = table["rows"][1]
    measured = {m.name: m.value for m in result.metrics}
    assert shown["Perplexity"]["value"] == measured["perplexity_public"] > 1
    assert "Llama, 1 layer × 64" in page
    assert "entity extraction" not in page  # the job has no entity extraction

    read = result_of(steps["dp_exposure"])
    exposures = {m.name: m for m in read.metrics if m.name.startswith("exposure")}
    within = {name for name in exposures if "in_rows" in name or "/in rows/" in name}
    assert within and {exposures[name].label for name in within} == {"operator"}
    # The other canaries are scored in contexts that contain no private text.
    assert {m.label for name, m in exposures.items() if name not in within} == {"dp"}
    assert shown["Exposure"]["value"] == exposures["exposure"].value
    assert "as the next token after the hints" in page

    # Extraction: the results for canaries are published, the results for rows are for the operator.
    extraction_labels = {m.name: m.label for m in read.metrics if m.name.startswith("extraction")}
    for decoding in ("greedy", "sampling"):
        for side in ("", "_control"):
            assert extraction_labels[f"extraction_targeted/{decoding}{side}"] == "dp"
            assert extraction_labels[f"extraction_discoverable/{decoding}{side}"] == "operator"
    labels = {file: label for file, label, _ in read.facts["artifacts"]}
    assert (labels["findings_dp.json"], labels["findings_operator.json"]) == ("dp", "operator")
    operators = findings_in(steps["dp_exposure"], "operator")
    assert "extraction_targeted" not in operators
    rows = operators["extraction_discoverable"]["details"]
    assert rows["fixed_before_training"] and rows["settings"]["extraction_prefix"] == 4
    assert rows["rows"][0]["ceiling"] <= 1 and 0 < rows["rows"][0]["control_tried"] < 20
    assert "The protocol was fixed before the training" in page
    assert "training rows" in page and "secrets of planted canaries" in page

    (record,) = findings_in(steps["dp_audit"], "dp").values()
    assert record["verdict"] == "inconclusive"  # so few canaries could not refute such an ε
    assert record["interval"][0] <= record["ceiling"] <= result.facts["epsilon_training"]
    assert result.facts["plan"]["declared_units"] == ADAPTED.declared_units + 40
    assert "is inconclusive about the claimed ε" in page and record["finding"] in page
    assert "ε at least, by the audit" in page
    assert table["lead"].endswith(f"inconclusive. {record['finding']}")

    # A fine-tuning step started by hand is refused before it charges or lists anything.
    spec = FinetuneSpec(
        made_up=True, device="cpu", seed=1,
        model_uri=steps["dp_pretraining"].output, entities_uri=steps["private_store"].output,
        epochs=1, training=TrainingConfig(), batches=BatchConfig(batch_size=1), sequence_length=16,
    )  # fmt: skip
    assert run(spec) == 2
    output = "".join(capfd.readouterr())
    assert "reads both sides of a word, and this one is causal" in output
    assert len(ledger.history("synthetic-notes")) == 2
    assert_exported(untracked.home, steps, base)


def closing_table(pages: Path) -> dict[str, Any]:
    """Return the closing table of a report, with a dict of cells by title for each row."""
    table = json.loads((pages / "tables.json").read_text())["closing"]
    titles = [column["name"] for column in table["headers"]][::-1]  # of equal titles, the first
    rows = [dict(zip(titles, row[::-1], strict=True)) for row in table["rows"]]
    return {**table, "rows": rows}


def assert_exported(home: Path, steps: dict[str, StepSpec], base: Path) -> None:
    """The base and the exported adapter, (α / r)·B·A, are the released model."""
    private, public = (steps[f"{kind}_pretraining"].output for kind in ("dp", "public"))
    whole, alone = home / "whole", home / "alone"
    for words in ([str(whole)], [str(alone), "--adapter"]):
        done = CliRunner().invoke(export, [*words, "--uri", private])
        assert done.exit_code == 0, done.output
    names = {f.relative_to(whole).as_posix() for f in whole.rglob("*")}
    assert {"config.json", "model.safetensors", "PRIVACY.md", "vocab.json"} <= names
    # an adapter in the folder would be applied a second time
    assert not [name for name in names if "adapter" in name]
    names = {f.name for f in alone.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "PRIVACY.md"} <= names
    assert not {"config.json", "model.safetensors"} & names
    statement = json.loads((alone / "privacy_statement.json").read_text())
    assert statement["private"] is True

    about = json.loads((alone / "adapter_config.json").read_text())
    adapter = load_file(alone / "adapter_model.safetensors")
    model = load_model(base)
    start, changed = to_hf(model.parameters, model.config), 0
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
    refused = CliRunner().invoke(export, [str(home / "none"), "--adapter", "--uri", public])
    assert "no adapter" in str(refused.exception)


def test_private_finetuning_of_a_causal_model_is_refused() -> None:
    labels = {
        "finetune_privacy": "dp", "entities_format": "columns", "entities_dataset": "labels",
        "entities_train": "a", "entities_test": "b", "entity_types": "problem",
        "entities_declared_units": 40,
    }  # fmt: skip
    with pytest.raises(ValidationError, match="a causal model is not fine-tuned"):
        JobSettings.model_validate(SIZES | labels | {"model_kind": "gpt2"})


REGIMES = JobSettings.model_validate(
    SIZES
    | {
        "model_kind": "feed-forward", "window": 4, "dense_units": "16,8", "nonprivate": True,
        "vocabulary_source": "public", "noise_multiplier": 3.0, "private_start": "public",
        "more_trainings": "noise_multiplier=1,private_start=fresh", "sample_texts": 2,
        "sample_prompt": "The", "sample_tokens": 5,
    }
)  # fmt: skip
PRIVATE_ONLY = "σ=1 · B=20 · epochs=0.5 · from random weights"
MODELS = ["public", "dp", f"{PRIVATE_ONLY} / dp", "nonprivate"]


def test_four_regimes_in_one_job_are_charged_separately(
    untracked: Deployment, capfd: pytest.CaptureFixture[str]
) -> None:
    steps = job_steps(REGIMES)
    ledger = run_all(untracked, steps.values(), capfd)
    trained = {name: steps[f"{name}_pretraining"] for name in MODELS}
    results = {name: result_of(spec) for name, spec in trained.items()}
    entries_of = {name: [r.ledger_id for r in result.releases] for name, result in results.items()}
    assert [len(entries) for entries in entries_of.values()] == [0, 1, 1, 1]
    # Two private trainings, and one unaccounted use by the training without privacy.
    states = {e.id: e.state for e in ledger.history("synthetic-notes")}
    charged = {entry for entries in entries_of.values() for entry in entries}
    assert [states[entry] for entry in charged] == [State.SETTLED] * 3
    epsilons = [results[name].facts["epsilon_training"] for name in MODELS]
    assert epsilons[0] == 0 < epsilons[1] < epsilons[2] and epsilons[3] is None
    model = load_model(folder_of(trained[MODELS[2]]))
    assert isinstance(model.config, FeedForwardConfig)
    assert (model.config.window, model.config.units) == (4, (16, 8))

    for name, result in results.items():
        labels = {m.name: m.label for m in result.metrics}
        shown = "operator" if name == "nonprivate" else "dp"
        assert labels["perplexity_curve"] == labels["perplexity_public"] == shown
        assert labels["perplexity_private_curve"] == labels["perplexity_private"] == "operator"
        audit = steps[f"{name}_exposure"]
        files = {file: label for file, label, _ in result_of(audit).facts["artifacts"]}
        assert files["samples.json"] == shown
        written = json.loads((folder_of(audit) / "samples.json").read_text())
        assert written["prompt"] == "The" and len(written["texts"]) == 2

    report = result_of(steps["report"])
    pages = folder_of(steps["report"]) / "report"
    tables = json.loads((pages / "tables.json").read_text())
    names = ["Public text only", "With DP", PRIVATE_ONLY, "Without privacy"]
    assert [row[0]["text"] for row in tables["closing"]["rows"]] == names
    assert [row[0]["text"] for row in tables["samples"]["rows"][::2]] == names
    assert (pages / "training.svg").read_text().count("Perplexity, private text") == 1
    # The report states the joint cost of both private models, because it shows both.
    metrics = {m.name: m.value for m in report.metrics}
    assert metrics["epsilon"] > epsilons[1]
    assert metrics["delta"] == pytest.approx(2 * REGIMES.delta)
    page = (pages / "report.html").read_text()
    assert "Feed-forward model, 2 layers × 64" in page
    assert all(entry in page for name in MODELS[1:3] for entry in entries_of[name])
    judged = {model_facts["name"]: model_facts["promoted"] for model_facts in report.facts[JUDGED]}
    assert judged.keys() == {f"{name}_pretraining" for name in MODELS[1:3]}
    assert not any(judged.values())
