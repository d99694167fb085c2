import math
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient  # noqa: TID251

from benchmarks import real_model
from benchmarks.study import __main__ as command
from benchmarks.study.experiments import EPSILON, EXPERIMENTS, F1, Column, Experiment
from benchmarks.study.runs import ModelFigures, Study, over_folds
from benchmarks.study.tables import Row, difference, differences, rows_of, shown, table
from dp_core.errors import BadInput
from tasks.protocol.settings import JobSettings
from tasks.releases.training_advice import RunReleases

TWO = Experiment("two", "dp_bert", (EPSILON, F1))
pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow and SQLAlchemy.

RUN_KEY = "cli/dp_bert/2026-01-01T00:00:00/1"


def model(name: str, **metrics: float) -> ModelFigures:
    return ModelFigures(name, metrics)


@pytest.fixture
def real_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Create empty files in place of the real text that the experiments read."""
    for file in (file for experiment in EXPERIMENTS.values() for file in experiment.files.values()):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setenv("CONFIDE_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_settings_of_every_variant_are_valid(name, real_text):
    for variant in EXPERIMENTS[name].variants:
        settings = EXPERIMENTS[name].of(variant, seed=2)
        assert settings["seed"] == 2
        for setting, file in EXPERIMENTS[name].files.items():
            assert settings[setting] == str(real_text / file)


def test_settings_of_the_jobs_with_a_real_model_are_valid(real_text):
    jobs = real_model.jobs(Path("/model"))
    for variant in jobs.variants:
        assert jobs.of(variant, seed=2)["public_model"] == "/model"


@pytest.mark.parametrize("name", [n for n, experiment in EXPERIMENTS.items() if experiment.epsilon])
def test_variants_at_equal_epsilon_cost_that_epsilon(name, real_text):
    experiment = EXPERIMENTS[name]
    for variant in experiment.variants:
        settings = JobSettings.model_validate(experiment.of(variant, 1))
        assert RunReleases.of(settings).epsilon == pytest.approx(experiment.epsilon, rel=1e-3)
        assert RunReleases.of(settings).epsilon <= experiment.epsilon


def test_missing_real_text_is_refused_with_its_path(monkeypatch):
    monkeypatch.delenv("CONFIDE_DATA", raising=False)
    real = Experiment("real", "dp_bert", (F1,), files={"public_path": "no/such.txt"})
    with pytest.raises(BadInput, match=r"no/such\.txt"):
        real.of("", 1)


def test_row_of_a_selected_model_shows_mean_and_spread_over_seeds():
    runs = [("", [model("With DP", epsilon=4.0, f1=f1)]) for f1 in (0.5, 0.6, 0.7)]
    (row,) = rows_of(TWO, runs)
    assert row.values["f1"] == (0.5, 0.6, 0.7)
    assert table(TWO, [row]).splitlines()[-1] == "| With DP | 4.00 | 60.0 ± 10.0 |"
    assert shown(EPSILON, [1.7976931348623157e308]) == "∞"  # MLflow's largest number
    assert shown(F1, []) == "–"
    assert shown(Column("x", "x", decimals=2), [1.0, 1.0]) == "1.00"
    experiment = Experiment("one", "dp_bert", (F1,), models=("With DP",))
    runs = [("", [model("With DP", f1=0.5), model("Public text only", f1=0.4)])]
    assert [row.model for row in rows_of(experiment, runs)] == ["With DP"]


def test_differences_are_paired_by_seed():
    first = Row("", "a", {"f1": (0.1, 0.5, 0.9)})
    second = Row("", "b", {"f1": (0.2, 0.6, 1.0)})
    paired = difference(first, second, "f1")
    assert paired.mean == pytest.approx(0.1)
    # the seeds agree, although the models of one seed differ
    assert paired.low == pytest.approx(0.1)
    assert difference(first, Row("", "c", {"f1": (math.inf,)}), "f1") is None


def test_comparisons_below_the_table_show_their_interval():
    compared = (("a", "b", F1), ("a", "not there", F1))
    rows = [Row("", "a", {"f1": (0.1, 0.5)}), Row("", "b", {"f1": (0.2, 0.6)})]
    text = differences(Experiment("x", "dp_bert", (F1,), compared=compared), rows)
    assert text.splitlines()[-1] == "- b, against a: entity F1 +10.0 (+10.0 to +10.0; 2 seeds)"
    assert "not there" not in text
    assert differences(TWO, rows) == ""


@pytest.fixture
def study(tmp_path: Path) -> Study:
    prepared = Study(tmp_path)
    prepared._done.add("two/1", {"settings": {}, "run_key": RUN_KEY})
    return prepared


def log(client: MlflowClient, tags: dict[str, str], **metrics: float) -> str:
    run = client.create_run("0", tags={"confide.run_key": RUN_KEY, **tags})
    for name, value in metrics.items():
        client.log_metric(run.info.run_id, name, value)
    return str(run.info.run_id)


def test_figures_come_from_the_run_and_keep_the_epsilon_of_the_model(study):
    client = MlflowClient(tracking_uri=study.deployment.tracking)
    log(client, {"confide.model": "With DP"}, epsilon=5.0, f1=0.8)
    step = {"confide.model": "With DP", "confide.step": "pretrain"}
    # The ε logged by a step covers its training only.
    trained = log(client, step, epsilon=3.0, mlm_accuracy_private=0.4)
    client.log_param(trained, "privacy.noise_multiplier", "1.25")
    client.log_metric(trained, "loss", 2.0, step=1)
    client.log_metric(trained, "loss", 1.0, step=2)
    log(client, {"confide.model": "With DP", "confide.run_key": "another"}, f1=0.1)
    log(client, {}, planned_epsilon=9.0)  # metrics of the job, which belongs to no model
    (figures,) = study.figures("two/1")
    assert figures.metrics == {
        "epsilon": 5.0, "f1": 0.8, "loss": 1.0,
        "mlm_accuracy_private": 0.4, "noise_multiplier": 1.25,
    }  # fmt: skip


def test_run_with_other_settings_is_repeated(study):
    assert not study.is_current(TWO, "", 1)
    study._done.add("two/1", {"settings": TWO.of("", 1), "run_key": RUN_KEY})
    assert study.is_current(TWO, "", 1)


def test_folds_of_a_sweep_are_averaged_into_one_row():
    folds = [model(f"σ=1 · fold={i}", epsilon=4.0, f1=f1) for i, f1 in ((1, 0.4), (2, 0.6))]
    training = model("σ=1", epsilon=4.0, exposure=1.5)
    (row,) = over_folds([training, *folds])
    assert row.model == "σ=1"
    assert row.metrics == pytest.approx({"epsilon": 4.0, "f1": 0.5, "exposure": 1.5})
    without = [model(f"nonprivate · fold={i}", epsilon=sys.float_info.max) for i in (1, 2)]
    (row,) = over_folds(without)
    assert shown(EPSILON, [row.metrics["epsilon"]]) == "∞"


def test_table_replaces_only_the_text_between_its_marks():
    page = "a\n<!-- study: two -->\nold\n<!-- end: two -->\nz\n"
    assert command._between(page, "two", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="no place for three"):
        command._between(page, "three", "new")
