import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from release_examples import record
from step_outputs import publish

from dp_core.privacy.mechanisms import PrivacyUnit, Unaccounted
from tasks.runtime.deployment import Deployment
from tasks.storage.store import RESULT, Store

FILES = {"config.json": "{}", "PRIVACY.md": "ε = 1", "tokens/vocab.txt": "a"}


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
    return {f.relative_to(folder).as_posix(): f.read_text() for f in files}


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
    assert code == 0 and "3 files" in output
    assert _content(folder) == FILES
    assert [f.name for f in folder.parent.iterdir()] == ["given"]
    assert sorted(f.name for f in folder.iterdir()) == ["PRIVACY.md", "config.json", "tokens"]
    assert "not empty" in confide.refused("export", folder)


def test_export_defaults_to_the_last_of_the_kept_models(confide, published, tmp_path):
    folders = {"": "", "after/30/": "after/30", "after/60/": "after/60"}
    names = ("config.json", "PRIVACY.md")
    uri = published("pretrain", {f + name: text for f, text in folders.items() for name in names})
    for given, words, content in (("last", (), ""), ("early", ("--after", "30"), "after/30")):
        assert confide("export", tmp_path / given, "--uri", uri, *words)[0] == 0
        assert _content(tmp_path / given) == {"config.json": content, "PRIVACY.md": content}
    output = confide.refused("export", tmp_path / "none", "--uri", uri, "--after", "45")
    assert "no model was kept after 45 updates" in output
    assert "There are those after 30, 60" in output and not (tmp_path / "none").exists()


def test_operator_artifacts_are_not_exported(confide, published, tmp_path):
    files = dict.fromkeys(("config.json", "PRIVACY.md", "errors.json"), "{}")
    artifacts = {"errors.json": "operator", "config.json": "dp"}
    uri = published("finetune", files, artifacts=artifacts)
    assert confide("export", tmp_path / "given", "--uri", uri)[0] == 0
    assert set(_content(tmp_path / "given")) == {"config.json", "PRIVACY.md"}


def test_model_is_exported_to_the_current_folder_but_not_into_a_file(
    confide, monkeypatch, tmp_path, model
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert confide("export", ".", "--uri", f"{model}/")[0] == 0
    assert _content(Path()) == FILES
    folder = tmp_path / "here" / "config.json" / "given"
    assert f"{folder}: cannot be made (Not a directory)" in confide.refused("export", folder)


def test_report_without_a_model_is_refused_with_a_fix(confide, tmp_path, store):
    publish(store, f"store://report/{'a' * 16}", created="2026-01-01")
    output = confide.refused("export", tmp_path / "given")
    assert "Run the job again" in output and "store://pretrain/" in output


@pytest.mark.parametrize("command", ["export given", "report"])
@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("foo", "a path must be absolute"),
        ("~nosuch/x", "a path must be absolute"),
        ("/", "not below this deployment's store"),
        ("gs://bucket/a", "not below this deployment's store"),
        ("ftp://host/a", "unknown kind of URI"),
    ],
)
def test_invalid_uri_is_refused_as_typed(confide, store, command, uri, words):
    errors = confide.refused(*command.split(), "--uri", uri)
    assert errors.startswith(f"confide: --uri {uri}: ") and words in errors
    assert RESULT not in errors


def test_nonprivate_model_is_not_exported(confide, store, model, tmp_path):
    used = Unaccounted("training without privacy", unit=PrivacyUnit.PATIENT)
    publish(store, model, releases=[record("used", used)])
    vocabulary = publish(store, f"store://vocabulary/{'a' * 16}")
    for uri, reason in ((model, "the operator's alone"), (vocabulary, "no model there")):
        assert reason in confide.refused("export", tmp_path / "out", "--uri", uri)
    assert not (tmp_path / "out").exists()
