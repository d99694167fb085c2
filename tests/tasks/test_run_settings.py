import json
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import set_options

from dp_core.errors import BadInput
from tasks.commands.settings_options import PRESETS, settings_of_options
from tasks.execution import run_job as process
from tasks.execution.run_job import Job, JobOutcome
from tasks.local import demo
from tasks.protocol.fork_server import OFF, SERVER
from tasks.protocol.job import job_steps
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import RunContext
from tasks.protocol.step_process import Work
from tasks.protocol.sweep import SweepSettings
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.usefixtures("at_home")


CORPUS = StepResult(
    step="corpus", spec_hash="0", outputs={}, metrics=[], facts={"made_up": False}, seconds=3.5
)
PATHS = {"private_path": ".", "public_path": ".", "entities_train": ".", "entities_test": "."}


@pytest.mark.cases
def test_invalid_or_ambiguous_settings_file_is_refused(confide, tmp_path, content, reason):
    file = tmp_path / "settings.json"
    if content == "pipe":
        os.mkfifo(file)
    elif content == "device":
        file = Path("/dev/zero")
    else:
        text = " " * ((1 << 20) + 1) if content == "too large" else content
        file.write_bytes(text.encode("latin-1"))
    assert reason in confide.refused("run", "--settings", file)


def test_options_override_the_file_and_the_file_overrides_the_preset(tmp_path):
    (tmp_path / "s.json").write_text('{"weight_decay": 0.5, "epochs": 20, "layers": 3}')
    file = tmp_path / "s.json"
    settings = settings_of_options(JobSettings, "large-batches", file, ["layers=4"])
    assert (settings.batch_size, settings.weight_decay, settings.layers) == (1024, 0.5, 4)


PAPERS = tomllib.loads(Path(__file__).with_name("preset_values.toml").read_text())


def settings_of_preset(preset: str) -> JobSettings:
    """Return a preset's settings, with a folder for each path that the user has to name."""
    values = json.loads(PRESETS[preset].read_text())
    named = dict(PATHS) if "private_format" in values else {}
    if "kerrigan" in preset or not values.get("entities_format"):  # it fine-tunes nothing
        named = {name: path for name, path in named.items() if "entities" not in name}
    if values.get("entities_folds"):
        named.pop("entities_test", None)
    if values.get("vocabulary_source") == "checkpoint":
        named["public_model"] = "."
    kind = SweepSettings if "sweep_points" in values else JobSettings
    words = [f"{name}={path}" for name, path in named.items()]
    return settings_of_options(kind, preset, words=words)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_valid_with_the_paper_values(preset):
    settings, paper = settings_of_preset(preset), preset.partition("-")[0]
    if "tiny" in preset:
        assert settings.made_up and settings.device == "cpu"
    elif paper in PAPERS:
        printed = PAPERS[paper] | PAPERS.get(preset, {})
        assert {name: getattr(settings, name) for name in printed} == printed
        assert settings.private_format != "synthetic"
        # Such a preset cannot run on made-up notes by mistake.
        assert paper == "kerrigan2020" or not settings.made_up
    if paper == "jagannatha2021":
        assert (settings.head == "pairs") is ("gpt2" not in preset)
        if not isinstance(settings, SweepSettings):
            assert settings.membership_units and len(settings.kept_updates("dp")) == 2


def test_regimes_of_kerrigan_are_a_job_and_a_sweep_of_the_same_training():
    job, sweep = settings_of_preset("kerrigan2020"), settings_of_preset("kerrigan2020-sweep")
    more = [(regime.noise_multiplier, regime.private_start) for regime in job.more_jobs()]
    assert (more, job.delta) == ([(0.1, "public"), (1.1, "fresh")], 1e-5)
    changed = {name for name, value in job.model_dump().items() if value != getattr(sweep, name)}
    assert changed == {"delta", "more_trainings", "sample_texts", "sample_prompt"}
    assert isinstance(sweep, SweepSettings)
    assert sweep.candidates()[0].noise_multiplier == 1.1 and sweep.sweep_seeds == 3


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the started runs, which are not executed."""
    started: list[str] = []

    def start(job: Job, deployment: Deployment, watch: object) -> JobOutcome:
        started.append(job.name)
        return JobOutcome(job, deployment.logs, exit_code=1, failed="not run by a test")

    monkeypatch.setattr(process, "run_job", start)
    monkeypatch.setattr(process, "send_all", lambda _: None)
    return started


@pytest.mark.cases
def test_missing_path_is_refused_before_the_run_starts(
    confide, monkeypatch, steps, tmp_path, field, launcher, more
):
    monkeypatch.setenv("CONFIDE_LAUNCHER", launcher)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("Fever is common.")
    monkeypatch.chdir(tmp_path / "data")
    assert confide("ledger", "declare-public", ".")[0] == 0
    for path, code, starts in (("/nonexist/a", 2, 0), (".", 1, 1), ("gs://bucket/a", 1, 2)):
        exit_code, _, err = confide("run", *set_options(**more | {field: path}))
        assert (exit_code, len(steps)) == (code, starts)
        assert (f"{field}: no such file or folder: {path}" in err) is (code == 2)


@pytest.mark.parametrize(("launcher", "starts"), [("process", 0), ("docker", 1)])
def test_demo_checks_paths_only_with_the_process_launcher(confide, monkeypatch, launcher, starts):
    started: list[JobSettings] = []

    def start(deployment: Deployment, settings: JobSettings, console: object) -> str:
        started.append(settings)
        raise BadInput("not run by a test")

    monkeypatch.setattr(demo, "run", start)
    monkeypatch.setenv("CONFIDE_LAUNCHER", launcher)
    err = confide.refused("demo", "--set", "public_model=/nonexist/a")
    assert len(started) == starts
    assert ("no such file or folder" in err) is (not starts)


def test_causal_model_needs_no_labels(confide, steps):
    paths = {"entities_train": "/nonexist", "entities_test": "/nonexist"}
    given = set_options(entities_format="i2b2", **paths)
    assert confide("run", *given)[0] == 2
    assert confide("run", *given, "--set", "model_kind=gpt2")[0] == 1
    assert steps == ["dp_bert"]


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_device_without_a_matching_tensorflow_is_refused(
    confide, monkeypatch, steps, tmp_path, device
):
    monkeypatch.setenv("CONFIDE_TASK_PYTHON", sys.executable)
    words = ["run", "--set", f"device={device}"]
    assert f"tensorflow-cpu) drives no {device}" in confide.refused(*words)
    assert steps == []
    other = tmp_path / "other" / "bin" / "python"  # an environment with unknown packages
    other.parent.mkdir(parents=True)
    other.touch(mode=0o755)
    monkeypatch.setenv("CONFIDE_TASK_PYTHON", str(other))
    assert confide(*words)[0] == 1
    assert steps == ["dp_bert"]


def test_show_settings_prints_effective_values(confide, monkeypatch, tmp_path, steps):
    (tmp_path / "settings.json").write_text('{"epochs": 3, "layers": 4}')
    given = ["--settings", tmp_path / "settings.json", "--set", "layers=5"]
    words = ["run", "dp_sweep", "--show-settings", *given]
    shown_settings = confide.json(*words)
    assert set(shown_settings) == set(SweepSettings.model_fields)
    assert (shown_settings["epochs"]["value"], shown_settings["epochs"]["default"]) == (3, 6)
    assert (shown_settings["layers"]["value"], shown_settings["seed"]["value"]) == (5, 1)
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = confide(*words)
    assert code == 0
    for name in shown_settings:
        assert name in shown.split()  # not truncated
    sections = [shown.index(name) for name in ("Essentials", "Grid of the sweep", "Expert: audit")]
    assert sections == sorted(sections)
    assert max(map(len, shown.splitlines())) <= 80
    assert confide("run", "--show-settings", "--set", "layers=-1")[0] == 2
    assert steps == []


def test_at_most_twenty_settings_are_outside_the_expert_sections():
    fields = JobSettings.model_json_schema()["properties"]
    everyday = [name for name, field in fields.items() if field["section"] == "Essentials"]
    assert len(everyday) <= 20
    assert {"private_path", "unit", "target_epsilon", "layers", "epochs"} <= set(everyday)


@pytest.mark.parametrize("made_up", [True, False])
def test_duration_of_a_step_is_shown_for_made_up_data_only(tmp_path, made_up):
    result = CORPUS.model_copy(update={"facts": {"made_up": made_up}})
    job = Job(name="dp_bert", run_key="r", run_name="r", steps=[])
    done = JobOutcome(job, tmp_path, results={"corpus": result}, outputs={"corpus": "file:///a"})
    assert ("seconds" in done.summary()["steps"]["corpus"]) is made_up


@pytest.mark.parametrize("selection", ["publish-all", "random-count"])
def test_steps_of_a_private_selection_hide_its_count(deployment, selection, monkeypatch):
    settings = SweepSettings(
        selection=selection, private_format="jsonl", private_path="/p", private_dataset="notes"
    )
    contexts: list[RunContext] = []

    def run_step(work: Work, *_: object) -> tuple[int, str]:
        contexts.append(work.context)
        return 1, "stopped"

    monkeypatch.setattr(process, "_run_step", run_step)
    steps = [("", name, spec) for name, spec in job_steps(settings).items()]
    monkeypatch.setenv(SERVER, OFF)
    process.run_job(Job("dp_sweep", "r", "r", steps), deployment, lambda *_: None)
    assert [context.hides_count for context in contexts] == [selection == "random-count"]


def test_run_without_tensorflow_ends_before_its_first_step(deployment, monkeypatch):
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    here = replace(deployment, task_python=sys.executable)
    with pytest.raises(BadInput, match="TensorFlow is not installed"):
        process.run_job(Job("dp_bert", "r", "r", []), here, lambda *_: None)
    assert not any(here.logs.glob("*"))


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_run_warns_of_items_that_readers_left_out(confide, monkeypatch, words):
    counts = {"documents_quarantined": 3, "documents_quarantined/encoding": 3, "documents": 97}
    metrics = [
        MetricRecord(name=name, value=value, label="operator") for name, value in counts.items()
    ]

    def start(job: Job, deployment: Deployment, watch: object) -> JobOutcome:
        result = CORPUS.model_copy(update={"metrics": metrics})
        return JobOutcome(job, deployment.logs, {"private_corpus": result}, {"private_corpus": "a"})

    monkeypatch.setattr(process, "run_job", start)
    monkeypatch.setattr(process, "send_all", lambda _: None)
    _, out, err = confide("run", *words)
    line = "confide: warning: private_corpus: documents left out: 3 (not UTF-8: 3)"
    assert err.count(line) == 1
    # the summary may be forwarded by programs
    assert "quarantined" not in out and "not UTF-8" not in out
