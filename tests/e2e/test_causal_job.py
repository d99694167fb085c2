import json

import pytest
from pydantic import ValidationError
from small_job import SIZES, folder_of, result_of, run, run_all

from dp_core.config.training import BatchConfig, TrainingConfig
from dp_core.models.config import Gpt2Config
from dp_core.models.hugging_face import load_model
from dp_core.privacy.ledger import State
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import FinetuneSpec

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow, SQLAlchemy and TensorFlow.

SETTINGS = JobSettings(
    model_kind="gpt2", audit_canaries=40, extraction_rows=20, extraction_prefix=4,
    extraction_suffix=4, **SIZES,
)  # fmt: skip


def test_causal_model_is_trained_charged_audited_and_exported(untracked, capfd):
    steps = job_steps(SETTINGS)
    assert not [name for name in steps if "finetuning" in name]
    ledger = run_all(untracked, steps.values(), capfd)
    assert [e.state for e in ledger.history("synthetic-notes")] == [State.SETTLED] * 2

    folder = folder_of(steps["With DP / pretraining"])
    model = load_model(folder)
    assert isinstance(model.config, Gpt2Config)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert (folder / "vocab.json").exists() and (folder / "merges.txt").exists()
    result = result_of(steps["With DP / pretraining"])
    assert len(result.releases) == 2  # the releases of the vocabulary and of the training
    assert json.loads((folder / "privacy_statement.json").read_text())["private"] is True
    labels = {m.name: m.label for m in result.metrics}
    assert labels["perplexity_public"] == labels["perplexity_curve"] == "dp"
    assert labels["perplexity_private"] == "operator"
    assert not [name for name in labels if name.startswith("mlm")]

    pages = folder_of(steps["report"])
    table = json.loads((pages / "report" / "tables.json").read_text())["closing"]
    column = [c["name"] for c in table["headers"]].index("Perplexity")
    measured = {m.name: m.value for m in result.metrics}
    assert table["rows"][1][column]["value"] == measured["perplexity_public"] > 1
    page = (pages / "report" / "report.html").read_text()
    assert "GPT-2, 1 layer × 64" in page
    assert "entity extraction" not in page  # the job has no entity extraction

    audit = folder_of(steps["With DP / exposure"])
    read = result_of(steps["With DP / exposure"])
    exposures = {m.name: m for m in read.metrics if m.name.startswith("exposure")}
    within = {name for name in exposures if "in_rows" in name or "/in rows/" in name}
    assert within and {exposures[name].label for name in within} == {"operator"}
    # The other canaries are scored in contexts that contain no private text.
    assert {m.label for name, m in exposures.items() if name not in within} == {"dp"}
    column = [c["name"] for c in table["headers"]].index("Exposure")
    assert table["rows"][1][column]["value"] == exposures["exposure"].value
    assert "as the next token after the hints" in page

    # Extraction: the results for canaries are published, the results for rows are for the operator.
    extraction_labels = {m.name: m.label for m in read.metrics if m.name.startswith("extraction")}
    for decoding in ("greedy", "sampling"):
        for side in ("", "_control"):
            assert extraction_labels[f"extraction_targeted/{decoding}{side}"] == "dp"
            assert extraction_labels[f"extraction_discoverable/{decoding}{side}"] == "operator"
    labels = read.facts["artifacts"]
    assert (labels["findings_dp.json"], labels["findings_operator.json"]) == ("dp", "operator")
    by_key = {f["key"]: f for f in json.loads((audit / "findings_operator.json").read_text())}
    assert "extraction_targeted" not in by_key
    rows = by_key["extraction_discoverable"]["details"]
    assert rows["fixed_before_training"] and rows["settings"]["extraction_prefix"] == 4
    assert rows["rows"][0]["ceiling"] <= 1 and 0 < rows["rows"][0]["control_tried"] < 20
    assert "The protocol was fixed before the training" in page
    assert "training rows" in page and "secrets of planted canaries" in page

    (record,) = json.loads((folder_of(steps["With DP / audit"]) / "findings_dp.json").read_text())
    assert record["verdict"] == "inconclusive"  # so few canaries could not refute such an ε
    assert record["interval"][0] <= record["ceiling"] <= result.facts["epsilon_training"]
    assert result.facts["plan"]["declared_units"] == SETTINGS.declared_units + 40
    assert "is inconclusive about the claimed ε" in page and record["finding"] in page
    assert "ε at least, by the audit" in page
    assert table["lead"].endswith(f"inconclusive. {record['finding']}")

    # A fine-tuning step started by hand is refused before it charges or lists anything.
    spec = FinetuneSpec(
        made_up=True, device="cpu", seed=1,
        model_uri=steps["With DP / pretraining"].output, entities_uri=steps["private_store"].output,
        epochs=1, training=TrainingConfig(), batches=BatchConfig(batch_size=1), sequence_length=16,
    )  # fmt: skip
    assert run(spec) == 2
    output = "".join(capfd.readouterr())
    assert "reads both sides of a word, and this one is causal" in output
    assert len(ledger.history("synthetic-notes")) == 2


def test_private_finetuning_of_a_causal_model_is_refused():
    labels = {
        "finetune_privacy": "dp", "entities_format": "columns", "entities_dataset": "labels",
        "entities_train": "a", "entities_test": "b", "entity_types": "problem",
        "entities_declared_units": 40, "finetune_batch_size": 4,
    }  # fmt: skip
    with pytest.raises(ValidationError, match="a causal model is not fine-tuned"):
        JobSettings.model_validate(SIZES | labels | {"model_kind": "gpt2"})
