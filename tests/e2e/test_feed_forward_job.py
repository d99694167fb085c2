"""A small version of Kerrigan et al. 2020."""

import json

import pytest
from small_job import SIZES, folder_of, result_of, run_all

from dp_core.models.config import FeedForwardConfig
from dp_core.models.hugging_face import load_model
from dp_core.privacy.ledger import State
from tasks.evidence.audits import JUDGED
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow, SQLAlchemy and TensorFlow.

SETTINGS = JobSettings.model_validate(
    SIZES
    | {
        "model_kind": "feed-forward", "window": 4, "dense_units": "16,8", "nonprivate": True,
        "vocabulary_source": "public", "noise_multiplier": 3.0, "private_start": "public",
        "more_trainings": "noise_multiplier=1,private_start=fresh", "sample_texts": 2,
        "sample_prompt": "The", "sample_tokens": 5,
    }
)  # fmt: skip
PRIVATE_ONLY = "σ=1 · B=20 · epochs=0.5 · from random weights"
MODELS = ["Public text only", "With DP", PRIVATE_ONLY, "Without privacy"]


def test_four_regimes_in_one_job_are_charged_separately(untracked, capfd):
    steps = job_steps(SETTINGS)
    ledger = run_all(untracked, steps.values(), capfd)
    # Two private trainings, and one unaccounted use by the training without privacy.
    assert [e.state for e in ledger.history("synthetic-notes")] == [State.SETTLED] * 3

    trained = {name: steps[f"{name} / pretraining"] for name in MODELS}
    results = {name: result_of(spec) for name, spec in trained.items()}
    entries_of = {name: [r.ledger_id for r in result.releases] for name, result in results.items()}
    assert [len(entries_of[name]) for name in MODELS] == [0, 1, 1, 1]
    assert len({entry for entries in entries_of.values() for entry in entries}) == 3
    epsilons = [results[name].facts["epsilon_training"] for name in MODELS]
    assert epsilons[0] == 0 < epsilons[1] < epsilons[2] and epsilons[3] is None
    model = load_model(folder_of(trained[MODELS[2]]))
    assert isinstance(model.config, FeedForwardConfig)
    assert (model.config.window, model.config.units) == (4, (16, 8))

    for name, spec in trained.items():
        labels = {m.name: m.label for m in result_of(spec).metrics}
        shown = "operator" if name == "Without privacy" else "dp"
        assert labels["perplexity_curve"] == labels["perplexity_public"] == shown
        assert labels["perplexity_private_curve"] == labels["perplexity_private"] == "operator"
        audit = steps[f"{name} / exposure"]
        files = result_of(audit).facts["artifacts"]
        assert files["samples.json"] == shown
        written = json.loads((folder_of(audit) / "samples.json").read_text())
        assert written["prompt"] == "The" and len(written["texts"]) == 2

    report = result_of(steps["report"])
    pages = folder_of(steps["report"])
    tables = json.loads((pages / "report" / "tables.json").read_text())
    assert [row[0]["text"] for row in tables["closing"]["rows"]] == MODELS
    assert [row[0]["text"] for row in tables["samples"]["rows"][::2]] == MODELS
    assert (pages / "report" / "training.svg").read_text().count("Perplexity, private text") == 1
    # The report states the joint cost of both private models, because it shows both.
    metrics = {m.name: m.value for m in report.metrics}
    assert metrics["epsilon"] > epsilons[1]
    assert metrics["delta"] == pytest.approx(2 * SETTINGS.delta)
    page = (pages / "report" / "report.html").read_text()
    assert "Feed-forward model, 2 layers × 64" in page
    assert all(entry in page for name in MODELS[1:3] for entry in entries_of[name])
    judged = {model_facts["name"]: model_facts["promoted"] for model_facts in report.facts[JUDGED]}
    assert judged.keys() == {f"{name} / pretraining" for name in MODELS[1:3]}
    assert not any(judged.values())
