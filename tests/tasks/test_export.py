import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from release_examples import record
from step_outputs import publish

from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, Unaccounted
from dp_core.privacy.statement import privacy_statement
from tasks.protocol.messages import MetricRecord
from tasks.runtime.deployment import Deployment
from tasks.storage.store import RESULT, Store

RELEASE = record("used", PoissonGaussian(((0.05, 1.5, 40),), unit=PrivacyUnit.PATIENT))
STATEMENT = {"privacy_statement.json": json.dumps(privacy_statement([RELEASE]).data)}
FILES = {"config.json": "{}", "PRIVACY.md": "ε = 1", "tokens/vocab.txt": "a", **STATEMENT}


@pytest.fixture
def store(at_home: None, deployment: Deployment) -> Store:
    return Store(deployment.store, deployment.cache)


@pytest.fixture
def published(store: Store, tmp_path: Path) -> Callable[..., str]:
    """Publishes the output of a step with these files."""

    def publish_output(step: str, files: Mapping[str, str], **facts: Any) -> str:
        for name, content in files.items():
            (tmp_path / step / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / step / name).write_text(content)
        return publish(store, f"store://{step}/{'a' * 16}", tmp_path / step, **facts)

    return publish_output


@pytest.fixture
def model(store: Store, published: Callable[..., str]) -> str:
    """A published model, and a report that names it."""
    uri = published("pretrain", FILES)
    report = f"store://report/{'a' * 16}"
    publish(store, report, created="2026-01-01", models={"With DP / pretraining": uri})
    return uri


def _content(folder: Path) -> dict[str, str]:
    files = (f for f in folder.rglob("*") if f.is_file())
    names = {f.relative_to(folder).as_posix(): f.read_text() for f in files}
    names.pop("README.md", None)  # the card
    return names


@pytest.mark.parametrize("there", [False, True])
def test_model_is_exported_completely_or_not_at_all(confide, monkeypatch, tmp_path, model, there):
    folder = tmp_path / "to" / "given"
    if there:
        folder.mkdir(parents=True)
    before, copy = folder.exists(), shutil.copyfile

    def interrupted(source: Path, target: Path) -> None:
        if target.name == "vocab.txt":
            raise KeyboardInterrupt
        copy(source, target)

    for removed in (True, False):  # a killed process does not clean up
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfile", interrupted)
            if not removed:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            assert confide("export", folder)[0] == 130
        assert folder.exists() is before
        assert bool(_content(folder.parent)) is not removed
    code, output, _ = confide("export", folder)
    assert code == 0 and "5 files" in output
    assert _content(folder) == FILES
    assert [f.name for f in folder.parent.iterdir()] == ["given"]
    names = ["PRIVACY.md", "README.md", "config.json", "privacy_statement.json", "tokens"]
    assert sorted(f.name for f in folder.iterdir()) == names
    assert "not empty" in confide.refused("export", folder)


def test_export_defaults_to_the_last_of_the_kept_models(confide, published, tmp_path):
    folders = {"": "", "after/30/": "after/30", "after/60/": "after/60"}
    names = ("config.json", "PRIVACY.md")
    files = {f + name: text for f, text in folders.items() for name in names}
    statements = {f + name: text for f in folders for name, text in STATEMENT.items()}
    metrics = [MetricRecord(name="mlm_accuracy", value=0.5, label="dp")]
    uri = published("pretrain", files | statements, metrics=metrics)
    for given, words, content in (("last", (), ""), ("early", ("--after", "30"), "after/30")):
        assert confide("export", tmp_path / given, "--uri", uri, *words)[0] == 0
        assert _content(tmp_path / given) == {
            "config.json": content,
            "PRIVACY.md": content,
            **STATEMENT,
        }
        card = (tmp_path / given / "README.md").read_text()
        assert ("mlm_accuracy" in card) is (given == "last")
    output = confide.refused("export", tmp_path / "none", "--uri", uri, "--after", "45")
    assert "no model was kept after 45 updates" in output
    assert "There are those after 30, 60" in output and not (tmp_path / "none").exists()


def test_operator_artifacts_are_not_exported(confide, published, tmp_path):
    files = dict.fromkeys(("config.json", "PRIVACY.md", "errors.json"), "{}") | STATEMENT
    artifacts = {"errors.json": "operator", "config.json": "dp"}
    uri = published("finetune", files, artifacts=artifacts)
    assert confide("export", tmp_path / "given", "--uri", uri)[0] == 0
    assert set(_content(tmp_path / "given")) == {"config.json", "PRIVACY.md", *STATEMENT}


def test_model_is_exported_to_the_current_folder_but_not_into_a_file(
    confide, monkeypatch, tmp_path, model
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert confide("export", ".", "--uri", f"{model}/")[0] == 0
    assert _content(Path()) == FILES
    folder = tmp_path / "here" / "config.json" / "given"
    assert f"{folder}: cannot be made (Not a directory)" in confide.refused("export", folder)


def test_card_states_the_guarantee_and_released_figures_alone(confide, store, model, tmp_path):
    metrics = [
        MetricRecord(name=name, value=value, label=label)
        for name, value, label in (("f1", 0.25, "dp"), ("private_accuracy", 0.125, "operator"))
    ]
    publish(store, model, metrics=metrics, releases=[RELEASE], shape={"kind": "bert"})
    words = ("--license", "mit", "--base-model", "public/bert")
    assert confide("export", tmp_path / "ward", *words)[0] == 0
    _, front, body = (tmp_path / "ward" / "README.md").read_text().split("---\n", 2)
    data = dict(line.split(": ", 1) for line in front.splitlines())
    assert (data["license"], data["base_model"]) == ('"mit"', '"public/bert"')
    epsilon = json.loads(STATEMENT["privacy_statement.json"])["epsilon"]
    assert f'"epsilon": {epsilon}' in data["differential_privacy"] and data["metrics"] == '["f1"]'
    assert "# ward" in body and "| f1 | 0.25 | dp |" in body and "## Privacy of this model" in body
    assert "private_accuracy" not in front + body and "0.125" not in front + body


def test_upload_to_a_hub_comes_after_the_export_and_names_its_failure(
    confide, monkeypatch, tmp_path, model
):
    monkeypatch.chdir(tmp_path)
    uploads = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> None:
            if name == "not/mine":
                raise RuntimeError("token hf_secret")
            uploads.append((name, options["private"]))

        def upload_folder(self, repo_id: str, folder_path: Path) -> None:
            uploads.append((repo_id, set(_content(folder_path)) == set(FILES)))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Hub))
    monkeypatch.setattr("tasks.commands.export_command.find_spec", lambda name: name)
    assert confide("export", "ward", "--push", "my/ward")[0] == 0
    assert uploads == [("my/ward", True), ("my/ward", True)]
    code, _, errors = confide("export", "other", "--push", "not/mine")
    assert code == 1 and "not/mine: not uploaded (RuntimeError)" in errors
    assert "hf_secret" not in errors and _content(Path("other")) == FILES
    monkeypatch.setattr("tasks.commands.export_command.find_spec", lambda name: None)
    assert "huggingface_hub is missing" in confide.refused("export", "third", "--push", "a/b")
    assert not Path("third").exists()


def test_report_without_a_model_is_refused_with_a_fix(confide, tmp_path, store):
    publish(store, f"store://report/{'a' * 16}", created="2026-01-01")
    output = confide.refused("export", tmp_path / "given")
    assert "run the job again" in output and "store://pretrain/" in output


@pytest.mark.parametrize("command", ["export given", "report"])
@pytest.mark.cases
def test_invalid_uri_is_refused_as_typed(confide, store, command, uri, words):
    errors = confide.refused(*command.split(), "--uri", uri)
    assert errors.startswith(f"confide: --uri {uri}: ") and words in errors
    assert RESULT not in errors


def test_model_without_privacy_or_of_a_study_is_not_exported(confide, store, model, tmp_path):
    used = Unaccounted("training without privacy", unit=PrivacyUnit.PATIENT)
    vocabulary = publish(store, f"store://vocabulary/{'a' * 16}")
    for release in (record("used", used), RELEASE.model_copy(update={"of_study": True})):
        publish(store, model, releases=[release])
        for uri, reason in ((model, "the operator's alone"), (vocabulary, "no model there")):
            assert reason in confide.refused("export", tmp_path / "out", "--uri", uri)
        assert not (tmp_path / "out").exists()
