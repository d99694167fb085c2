"""The settings of a run on the command line: parsing, refusals before the start, and display."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from command_line import Confide

from dp_core.errors import BadInput
from tasks.commands import run_command
from tasks.commands.settings_options import PRESETS, SettingsOptions, settings_of_options
from tasks.execution import run_job as process
from tasks.execution.run_job import Job, JobOutcome
from tasks.local import demo
from tasks.protocol import (
    JobSettings,
    MetricRecord,
    RunContext,
    StepResult,
    SweepSettings,
    job_steps,
)
from tasks.protocol.step_process import Work
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.usefixtures("at_home")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[["epochs", 1]]', "not a JSON object"),
        ('"epochs"', "not a JSON object"),
        ('{"epochs": 1,\n "seed" 3}', "line 2, column 9"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_invalid_settings_file_is_refused(
    confide: Confide, tmp_path: Path, content: str | bytes, reason: str
) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = confide("run", "--settings", str(file))
    assert (code, out) == (2, "")
    assert reason in err and "settings.json" in err


PATHS = {"private_path": ".", "public_path": ".", "entities_train": ".", "entities_test": "."}


@pytest.mark.parametrize(
    ("preset", "more", "expected"),
    [
        ("demo", {}, {"phrases_epsilon": 4.35}),
        ("real-text", PATHS, {"private_format": "noteevents", "all_public": True}),
        ("large-batches", {"epochs": "20"}, {"weight_decay": 1.0, "first_batch_size": 256}),
    ],
)
def test_preset_is_read_by_name(
    preset: str, more: dict[str, str], expected: dict[str, Any]
) -> None:
    settings = settings_of_options(
        JobSettings, SettingsOptions(preset, words=[f"{k}={v}" for k, v in more.items()])
    )
    assert settings.model_dump().items() >= expected.items()


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_settings_file_must_be_regular_and_small(
    tmp_path: Path, confide: Confide, kind: str
) -> None:
    """A device never ends, and opening a pipe would wait for its writer."""
    file = tmp_path / "settings.json"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file = Path("/dev/zero")
    else:
        file.write_bytes(b" " * ((1 << 20) + 1))
    code, _, err = confide("run", "--settings", str(file))
    reason = "more than 1 MiB" if kind == "large" else "not a regular file"
    assert code == 2 and f"{file}: cannot be read ({reason})" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"layers": 2, "epochs": 1, "layers": 4}', "layers: the key occurs twice"),
        ('{"layers": true}', "layers: true is not a number or text"),
        ('{"epochs": false}', "epochs: false is not a number or text"),
        ('{"device": true}', "device: true is not a number or text"),
    ],
)
def test_ambiguous_settings_are_refused(
    tmp_path: Path, confide: Confide, content: str, words: str
) -> None:
    (tmp_path / "settings.json").write_text(content)
    code, _, err = confide("run", "--settings", str(tmp_path / "settings.json"))
    assert code == 2 and words in err


def test_truth_values_of_boolean_settings_are_read() -> None:
    assert JobSettings.model_validate({"nonprivate": False}).nonprivate is False


def test_options_override_the_file_and_the_file_overrides_the_preset(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"weight_decay": 0.5, "epochs": 20, "layers": 3}')
    options = SettingsOptions("large-batches", tmp_path / "s.json", ["layers=4"])
    settings = settings_of_options(JobSettings, options)
    assert (settings.batch_size, settings.weight_decay, settings.layers) == (1024, 0.5, 4)


PAPER = [f"hoory2021-{name}{size}" for name in ("fig1", "table2", "fig2") for size in ("", "-tiny")]
KERRIGAN = [f"kerrigan2020{sweep}{size}" for sweep in ("", "-sweep") for size in ("", "-tiny")]

CLINICAL = [
    f"jagannatha2021-{name}{size}"
    for name in ("bert", "distilbert", "gpt2", "mednli")
    for size in ("", "-tiny")
]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_is_valid_with_the_paper_values(preset: str) -> None:
    assert set(PRESETS) == {"demo", "real-text", "large-batches", *PAPER, *CLINICAL, *KERRIGAN}
    values = json.loads(PRESETS[preset].read_text())
    kind = SweepSettings if "sweep_points" in values else JobSettings
    named = dict(PATHS) if "private_format" in values else {}
    if values.get("entities_folds"):
        named.pop("entities_test", None)
    if values.get("private_format") and not values.get("entities_format"):
        named = {name: path for name, path in named.items() if "entities" not in name}
    if values.get("vocabulary_source") == "checkpoint":
        named["public_model"] = "."
    if preset in KERRIGAN:  # a causal model is not fine-tuned
        named = {name: path for name, path in named.items() if not name.startswith("entities")}
    settings = settings_of_options(
        kind, SettingsOptions(preset, words=[f"{k}={v}" for k, v in named.items()])
    )
    if "tiny" in preset:
        assert settings.made_up and settings.device == "cpu"
    elif preset == "kerrigan2020":  # appendix A, section 4.2, and the public code of the paper
        shape = settings.window, settings.dense_units, settings.model_kind
        assert shape == (20, "500,250,50", "feed-forward")
        sigmas = [settings.noise_multiplier, *(j.noise_multiplier for j in settings.more_jobs())]
        assert (sigmas, settings.clip_norm, settings.delta) == ([1.1, 0.1, 1.1], 1.0, 1e-5)
        assert [job.private_start for job in settings.more_jobs()] == ["public", "fresh"]
        assert (settings.declared_units, settings.epochs, settings.batch_size) == (10_000, 5, 64)
        assert settings.nonprivate and settings.private_format != "synthetic"
    elif preset == "kerrigan2020-sweep":  # varies the training of the job's preset
        job = settings_of_options(
            JobSettings,
            SettingsOptions("kerrigan2020", words=[f"{k}={v}" for k, v in named.items()]),
        )
        changed = {
            name for name, value in job.model_dump().items() if value != getattr(settings, name)
        }
        assert changed == {"delta", "more_trainings", "sample_texts", "sample_prompt"}
        assert isinstance(settings, SweepSettings)
        assert settings.candidates()[0].noise_multiplier == 1.1 and settings.sweep_seeds == 3
    elif preset in PAPER:  # the paper's values in sections 3 and 5
        assert (settings.unit, settings.declared_units) == ("example", 83_000_000)
        assert (settings.noise_multiplier, settings.clip_norm) == (2.72, 0.01)
        assert (settings.batch_size, settings.updates) == (131_072, 31_250)
        assert not settings.made_up  # the preset cannot run on made-up notes by mistake
    elif preset in CLINICAL:  # the paper's values in appendix A
        assert (settings.unit, settings.holdout, settings.max_examples_per_unit) == (
            "patient", 0.3, 50,
        )  # fmt: skip
        assert (settings.noise_multiplier, settings.clip_norm, settings.epochs) == (1.0, 1.0, 3)
        assert settings.learning_rate == settings.nonprivate_learning_rate == 1e-5
        assert not settings.made_up
    if preset in CLINICAL and "gpt2" not in preset:
        assert settings.head == "pairs"
    if preset in CLINICAL and kind is JobSettings:
        assert settings.membership_units and len(settings.kept_updates("dp")) == 2


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the started runs, which are not executed."""
    started: list[str] = []

    def start(job: Job, deployment: Deployment, watch: object) -> JobOutcome:
        started.append(job.name)
        return JobOutcome(job, deployment.logs, exit_code=1, failed="not run by a test")

    monkeypatch.setattr(run_command, "run_job", start)
    monkeypatch.setattr(run_command, "send_all", lambda _: None)
    return started


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("private_path", {"private_format": "text", "private_dataset": "notes"}),
        ("public_path", {"public_format": "text"}),
        ("entities_train", {"entities_format": "i2b2", "entities_test": "."}),
        ("entities_test", {"entities_format": "i2b2", "entities_train": "."}),
        ("public_model", {}),
    ],
)
def test_missing_path_is_refused_before_the_run_starts(
    confide: Confide,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[str],
    tmp_path: Path,
    field: str,
    more: dict[str, str],
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("Fever is common.")
    monkeypatch.chdir(tmp_path / "data")
    assert confide("ledger", "declare-public", ".")[0] == 0
    given = [word for pair in more.items() for word in ("--set", "=".join(pair))]
    for path, code, starts in (("/nonexist/a", 2, 0), (".", 1, 1), ("gs://bucket/a", 1, 2)):
        words = ["run", *given, "--set", f"{field}={path}"]
        exit_code, _, err = confide(*words)
        assert (exit_code, len(steps)) == (code, starts)
        assert (f"{field}: no such file or folder: {path}" in err) is (code == 2)


@pytest.mark.parametrize("launcher", ["docker", "kubernetes"])
def test_local_run_checks_paths_under_every_launcher(
    confide: Confide, monkeypatch: pytest.MonkeyPatch, steps: list[str], launcher: str
) -> None:
    monkeypatch.setenv("CONFIDE_LAUNCHER", launcher)
    code, _, err = confide("run", "--set", "public_model=/nonexist/a")
    assert (code, steps) == (2, [])
    assert "public_model: no such file or folder: /nonexist/a" in err


@pytest.mark.parametrize(("launcher", "starts"), [("process", 0), ("docker", 1)])
def test_demo_checks_paths_only_with_the_process_launcher(
    confide: Confide, monkeypatch: pytest.MonkeyPatch, launcher: str, starts: int
) -> None:
    started: list[JobSettings] = []

    def start(deployment: Deployment, settings: JobSettings, console: object) -> str:
        started.append(settings)
        raise BadInput("not run by a test")

    monkeypatch.setattr(demo, "run", start)
    monkeypatch.setenv("CONFIDE_LAUNCHER", launcher)
    code, _, err = confide("demo", "--set", "public_model=/nonexist/a")
    assert (code, len(started)) == (2, starts)
    assert ("no such file or folder" in err) is (not starts)


@pytest.mark.parametrize("path", ["~nosuch/x", "a\0b"])
def test_invalid_path_is_refused_in_one_line(confide: Confide, path: str) -> None:
    code, out, err = confide("ledger", "cost", "--set", f"public_model={path}")
    assert (code, out) == (2, "")
    assert err == f"confide: public_model: cannot be a path: {path!r}\n"


def test_causal_model_needs_no_labels(confide: Confide, steps: list[str]) -> None:
    words = "entities_format=i2b2 entities_train=/nonexist entities_test=/nonexist"
    given = [word for pair in words.split() for word in ("--set", pair)]
    assert confide("run", *given)[0] == 2
    assert confide("run", *given, "--set", "model_kind=gpt2")[0] == 1
    assert steps == ["dp_bert"]


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_device_without_a_matching_tensorflow_is_refused(
    confide: Confide, monkeypatch: pytest.MonkeyPatch, steps: list[str], tmp_path: Path, device: str
) -> None:
    monkeypatch.setenv("CONFIDE_TASK_PYTHON", sys.executable)
    words = ["run", "--set", f"device={device}"]
    code, _, err = confide(*words)
    assert (code, steps) == (2, [])
    assert f"tensorflow-cpu) drives no {device}" in err
    other = tmp_path / "other" / "bin" / "python"  # an environment with unknown packages
    other.parent.mkdir(parents=True)
    other.touch(mode=0o755)
    monkeypatch.setenv("CONFIDE_TASK_PYTHON", str(other))
    assert confide(*words)[0] == 1
    assert steps == ["dp_bert"]


def test_show_settings_prints_effective_values(
    confide: Confide, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: list[str]
) -> None:
    (tmp_path / "settings.json").write_text('{"epochs": 3, "layers": 4}')
    given = ["--settings", str(tmp_path / "settings.json"), "--set", "layers=5"]
    words = ["run", "dp_sweep", "--show-settings", *given]
    shown_settings = confide.json(*words)
    assert set(shown_settings) == set(SweepSettings.model_fields)
    assert (shown_settings["epochs"]["value"], shown_settings["epochs"]["default"]) == (3, 6)
    assert (shown_settings["layers"]["value"], shown_settings["seed"]["value"]) == (5, 1)
    sections = [setting["section"] for setting in shown_settings.values()]
    assert sections == sorted(sections)
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = confide(*words)
    assert code == 0
    for name in shown_settings:
        assert f" {name} " in shown  # not truncated
    assert shown.index("0. Grid") < shown.index("1. Data") < shown.index("9. Advanced")
    assert max(map(len, shown.splitlines())) <= 80
    assert confide("run", "--show-settings", "--set", "layers=0")[0] == 2
    assert steps == []


def test_at_most_twenty_settings_are_outside_the_advanced_sections() -> None:
    fields = JobSettings.model_json_schema()["properties"]
    everyday = [name for name, field in fields.items() if "Advanced" not in field["section"]]
    assert len(everyday) <= 20
    assert {"private_path", "unit", "noise_multiplier", "layers", "epochs"} <= set(everyday)


@pytest.mark.parametrize("made_up", [True, False])
def test_duration_of_a_step_is_shown_for_made_up_data_only(tmp_path: Path, made_up: bool) -> None:
    result = StepResult(
        step="corpus",
        spec_hash="0",
        outputs={},
        metrics=[],
        facts={"made_up": made_up},
        seconds=3.5,
    )
    job = Job(name="dp_bert", run_key="r", run_name="r", steps=[])
    done = JobOutcome(job, tmp_path, results={"corpus": result}, outputs={"corpus": "file:///a"})
    assert ("seconds" in done.summary()["steps"]["corpus"]) is made_up


@pytest.mark.parametrize("selection", ["publish-all", "random-count"])
def test_steps_of_a_private_selection_hide_its_count(
    deployment: Deployment, selection: Literal["publish-all", "random-count"], monkeypatch: Any
) -> None:
    settings = SweepSettings(
        selection=selection, private_format="jsonl", private_path="/p", private_dataset="notes"
    )
    contexts: list[RunContext] = []

    def run_step(work: Work, *_: object) -> tuple[int, str]:
        contexts.append(work.context)
        return 1, "stopped"

    monkeypatch.setattr(process, "_run_step", run_step)
    steps = [("", name, spec) for name, spec in job_steps(settings).items()]
    process._run(Job("dp_sweep", "r", "r", steps), deployment, Path(), None, lambda *_: None)
    assert [context.hides_count for context in contexts] == [selection == "random-count"]


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_run_warns_of_items_that_readers_left_out(
    confide: Confide, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    counts = {"documents_quarantined": 3, "documents_quarantined/encoding": 3, "documents": 97}
    metrics = [
        MetricRecord(name=name, value=value, label="operator") for name, value in counts.items()
    ]

    def start(job: Job, deployment: Deployment, watch: object) -> JobOutcome:
        result = StepResult(
            step="corpus", spec_hash="0", outputs={}, metrics=metrics, facts={"made_up": False}
        )
        return JobOutcome(job, deployment.logs, {"private_corpus": result}, {"private_corpus": "a"})

    monkeypatch.setattr(run_command, "run_job", start)
    monkeypatch.setattr(run_command, "send_all", lambda _: None)
    _, out, err = confide("run", *words)
    line = "confide: warning: private_corpus: documents left out: 3 (not UTF-8: 3)"
    assert err.count(line) == 1
    # the summary may be forwarded by programs
    assert "quarantined" not in out and "not UTF-8" not in out


@pytest.mark.parametrize(
    ("key", "reason", "absent"),
    [
        ("target_epsilon", "No setting holds the ε of a training", "Did you mean"),
        ("epsilon", "`confide calibrate` and `confide advise` return σ", "Did you mean"),
        ("vocabulary_epsilo", "Did you mean vocabulary_epsilon?", "No setting holds"),
    ],
)
def test_unknown_epsilon_setting_is_refused_with_a_hint_to_calibrate(
    confide: Confide, steps: list[str], key: str, reason: str, absent: str
) -> None:
    code, _, err = confide("run", "--set", f"{key}=3")
    assert code == 2 and reason in err and absent not in err
    assert steps == []
