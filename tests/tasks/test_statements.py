import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from release_examples import record

from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput
from dp_core.labels import Operator
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, Unaccounted, compose
from dp_core.privacy.statement import PrivacyStatement, privacy_statement
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.points import DP_MODEL
from tasks.report.first_screen import first_screen
from tasks.report.job_results import model_row
from tasks.report.model import Edition, ModelRow, Report, edition_of
from tasks.report.models_table import model_runs, models_table
from tasks.report.tables import significant
from tasks.results import STATEMENT_DATA, STATEMENT_WORDS, Input, refuse_own_model, write_statement

RELEASE = record("entry-1", PoissonGaussian.single(0.01, 2.0, 100, unit=PrivacyUnit.PATIENT))


def test_statement_names_ledger_entries_and_no_seed(tmp_path):
    write_statement(tmp_path, [RELEASE], made_up=False)
    data = json.loads((tmp_path / STATEMENT_DATA).read_text())
    assert data["private"] is True
    assert data["ledger_ids"] == ["entry-1"]
    assert 0 < data["epsilon"] < 1
    assert "entry-1" in (tmp_path / STATEMENT_WORDS).read_text()
    assert "seed_hash" not in (tmp_path / STATEMENT_DATA).read_text()


def _used(dataset: str) -> ReleaseRecord:
    event = Unaccounted("training without privacy", unit=PrivacyUnit.DOCUMENT)
    return record(f"used-{dataset}", event, dataset)


def test_statement_of_a_nonprivate_model_is_marked(tmp_path):
    write_statement(tmp_path, [_used("notes")], made_up=False)
    data = json.loads((tmp_path / STATEMENT_DATA).read_text())
    assert (data["private"], data["epsilon"]) == (False, "inf")
    assert "must not be exported" in (tmp_path / STATEMENT_WORDS).read_text()


def test_unaccounted_use_of_any_data_set_is_stated_first(tmp_path):
    write_statement(tmp_path, [RELEASE, _used("labels")], made_up=False)
    data = json.loads((tmp_path / STATEMENT_DATA).read_text())
    assert (data["private"], data["epsilon"], data["dataset"]) == (False, "inf", "labels")
    assert data["others"][0]["dataset"] == "notes"
    assert (tmp_path / STATEMENT_WORDS).read_text().startswith("# Not private")


def test_infinite_epsilon_round_trips_through_json():
    used = _used("notes")
    assert json.loads(used.model_dump_json())["epsilon"] == "inf"
    assert ReleaseRecord.model_validate_json(used.model_dump_json()) == used
    for wrong in (math.nan, -1.0, -math.inf):
        with pytest.raises(ValueError, match="epsilon"):
            ReleaseRecord.model_validate(used.model_dump() | {"epsilon": wrong})


@pytest.mark.parametrize("name", [STATEMENT_WORDS, STATEMENT_DATA, "result.json", "Privacy.md"])
def test_model_made_by_confide_is_refused_as_public_model(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    refuse_own_model(tmp_path, "public_model")
    (tmp_path / name).write_text("{}")
    with pytest.raises(BadInput, match="init_uri"):
        refuse_own_model(tmp_path, "public_model")


def test_statement_has_one_line_per_item():
    words = privacy_statement([RELEASE], made_up=False).paragraphs
    assert sum(line.startswith("• ") for line in words) >= 2
    assert not any("**" in line or line.startswith(("#", "- ")) for line in words)


P = PrivacyUnit.PATIENT
VOCABULARY = PoissonGaussian.single(0.1, 3.0, 5, unit=P)
TRAINING = PoissonGaussian.single(0.1, 2.0, 50, unit=P)
TUNING = PoissonGaussian.single(0.2, 0.8, 20, unit=P)
NO_PRIVACY = Unaccounted("fine-tuning on private labels without privacy", unit=P)


def made(step: str, *releases: ReleaseRecord, **facts: object) -> Input:
    result = StepResult(
        step=step, spec_hash="0", outputs={}, releases=list(releases), facts=facts,
        metrics=[MetricRecord(name="f1", value=0.5, label="operator")],
    )  # fmt: skip
    return Input(result, Path())


FRONT = (record("v", VOCABULARY), record("t", TRAINING))


def row(tuning: ReleaseRecord | None) -> ModelRow:
    vocabulary = made("vocabulary", FRONT[0], dataset="notes")
    model = made("pretrain", *FRONT, epsilon_training=1.0, shape={})
    tuned = made("finetune", *FRONT, *([tuning] if tuning else []))
    results = {"vocabulary": vocabulary, "pretraining": model, "finetuning": tuned}
    return replace(model_row(DP_MODEL, results, 1.0, "notes"), f1=Operator(0.5))


def report(row_of_model: ModelRow) -> Report:
    return Report(
        title="", run_key="", shown_run="", created="2026-01-01", made_up=False, known_seed=False,
        private_dataset="notes", public_dataset="", entities_dataset="", unit=P,
        model_size="", statement=PrivacyStatement({}),
        models=(row_of_model,),
    )  # fmt: skip


def shown(row_of_model: ModelRow, edition: Edition) -> dict[str, float | str | None]:
    table = models_table(edition_of(report(row_of_model), edition).models, P)
    names = [f"{header.name} {header.unit}" for header in table.headers]
    return dict(zip(names, (cell.value for cell in table.rows[0]), strict=True))


@pytest.mark.parametrize("dataset", ["notes", "labels"])
def test_total_includes_private_fine_tuning_of_the_same_patients(dataset):
    whole = epsilon_pld(compose(VOCABULARY, TRAINING, TUNING), 3e-6)
    before = epsilon_pld(compose(VOCABULARY, TRAINING), 2e-6)
    assert whole > 1.5 * before
    row_of_model = row(record("f", TUNING, dataset, budget="notes"))
    for edition in Edition:
        cells = shown(row_of_model, edition)
        assert cells["ε in total, per patient"] == pytest.approx(whole)
        assert cells["ε before fine-tuning"] == pytest.approx(before)
        assert cells["δ in total"] == pytest.approx(3e-6)
        assert not any("labels" in name for name in cells)
    assert row_of_model.pretrained.corpus.epsilon == pytest.approx(before)
    protected, *_ = first_screen(report(row_of_model)).sentences
    assert f"ε = {significant(whole)}" in protected.text


@pytest.mark.parametrize("budget", ["notes", "labels"])
def test_model_that_read_labels_alone_has_the_epsilon_of_the_budget_they_share(budget):
    tuned = made("finetune", record("f", TUNING, "labels", budget=budget))
    model = made("pretrain", epsilon_training=0.0, shape={})
    results = {"vocabulary": made("vocabulary"), "pretraining": model, "finetuning": tuned}
    alone = report(model_row(DP_MODEL, results, 1.0, "notes"))
    (run,) = model_runs(SimpleNamespace(points={}), alone, {}, [])
    shared = epsilon_pld(TUNING, 1e-6) if budget == "notes" else 0.0
    numbers = {number["name"]: number["value"] for number in run["numbers"]}
    assert f"· ε {numbers['epsilon']:g} ·" in run["name"]
    assert numbers["epsilon"] == pytest.approx(shared, rel=1e-3)


def test_labels_of_another_data_set_have_a_separate_total():
    cells = shown(row(record("f", TUNING, "labels")), Edition.PUBLISHABLE)
    before = epsilon_pld(compose(VOCABULARY, TRAINING), 2e-6)
    assert cells["ε in total, per patient"] == pytest.approx(before)
    assert cells["ε of “labels”, per patient"] == pytest.approx(epsilon_pld(TUNING, 1e-6))
    assert cells["δ of “labels”"] == pytest.approx(1e-6)


@pytest.mark.parametrize("dataset", ["notes", "labels"])
def test_total_is_infinite_after_fine_tuning_without_privacy(dataset):
    row_of_model = row(record("f", NO_PRIVACY, dataset))
    name = "ε in total, per patient" if dataset == "notes" else "ε of “labels”, per patient"
    assert shown(row_of_model, Edition.OPERATOR)[name] == math.inf
    # Without F1, the row shows the cost of the pre-trained model.
    cells = shown(row_of_model, Edition.PUBLISHABLE)
    before = epsilon_pld(compose(VOCABULARY, TRAINING), 2e-6)
    assert cells["ε in total, per patient"] == pytest.approx(before)
    assert not [n for n in cells if "labels" in n or "before" in n]


def test_model_trained_without_privacy_has_an_infinite_total_under_any_name():
    vocabulary = made("vocabulary", FRONT[0], dataset="notes")
    model = made("pretrain", FRONT[0], record("u", NO_PRIVACY), epsilon_training=None, shape={})
    row_of_model = model_row(
        DP_MODEL, {"vocabulary": vocabulary, "pretraining": model}, 1.0, "notes"
    )
    assert (row_of_model.cost.corpus.epsilon, row_of_model.epsilon_training) == (math.inf, math.inf)
