from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Confide
from release_examples import record
from step_outputs import publish

from dp_core.privacy.mechanisms import PrivacyUnit, Unaccounted
from tasks.protocol import ReleaseRecord
from tasks.runtime.deployment import Deployment
from tasks.storage.store import RESULT, Store

Export = Callable[..., tuple[int, str]]
FILES = {"config.json": "{}", "PRIVACY.md": "ε = 1", "tokens/vocab.txt": "a"}


@pytest.fixture
def store(at_home: None, deployment: Deployment) -> Store:
    return Store(deployment.store, deployment.cache)


def _result(store: Store, step: str, *releases: ReleaseRecord, **facts: object) -> str:
    return publish(store, f"store://{step}/{'a' * 16}", releases=releases, **facts)


@pytest.fixture
def model(store: Store, tmp_path: Path) -> str:
    """A published model, and a report that names it."""
    made = tmp_path / "made"
    for name, content in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(content)
    uri = publish(store, f"store://pretrain/{'a' * 16}", made)
    _result(store, "report", created="2026-01-01", models={"dp_pretraining": uri})
    return uri


@pytest.fixture
def export(confide: Confide) -> Export:
    """Calls `confide export …`, which must print one line."""

    def called(*words: object) -> tuple[int, str]:
        code, out, err = confide("export", *words)
        assert len((out + err).strip().splitlines()) == 1, out + err
        return code, out + err

    return called


def _content(folder: Path) -> dict[str, str]:
    files = (f for f in folder.rglob("*") if f.is_file())
    return {f.relative_to(folder).as_posix(): f.read_text() for f in files}


@pytest.mark.parametrize("there", [False, True])
def test_model_is_exported_completely_or_not_at_all(
    export: Export, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, there: bool
) -> None:
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
            assert export(folder)[0] == 130
        assert folder.exists() is before
        assert bool(_content(folder.parent)) is not removed
    code, output = export(folder)
    assert code == 0 and "3 files" in output
    assert _content(folder) == FILES
    assert [f.name for f in folder.parent.iterdir()] == ["given"]
    assert sorted(f.name for f in folder.iterdir()) == ["PRIVACY.md", "config.json", "tokens"]
    code, output = export(folder)
    assert code == 2 and "not empty" in output


def test_export_defaults_to_the_last_of_the_kept_models(
    export: Export, store: Store, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    for folder in ("", "after/30", "after/60"):
        (made / folder).mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "PRIVACY.md"):
            (made / folder / name).write_text(folder)
    uri = publish(store, f"store://pretrain/{'b' * 16}", made)
    for given, words, content in (("last", (), ""), ("early", ("--after", "30"), "after/30")):
        assert export(tmp_path / given, "--uri", uri, *words)[0] == 0
        assert _content(tmp_path / given) == {"config.json": content, "PRIVACY.md": content}
    code, output = export(tmp_path / "none", "--uri", uri, "--after", "45")
    assert code == 2 and "no model was kept after 45 updates" in output
    assert "There are those after 30, 60" in output and not (tmp_path / "none").exists()


def test_operator_artifacts_are_not_exported(export: Export, store: Store, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for name in ("config.json", "PRIVACY.md", "errors.json"):
        (made / name).write_text("{}")
    uri = publish(
        store,
        f"store://finetune/{'a' * 16}",
        made,
        artifacts={"errors.json": "operator", "config.json": "dp"},
    )
    assert export(tmp_path / "given", "--uri", uri)[0] == 0
    assert set(_content(tmp_path / "given")) == {"config.json", "PRIVACY.md"}


def test_model_is_exported_to_the_current_folder_but_not_into_a_file(
    export: Export, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert export(".", "--uri", f"{model}/")[0] == 0
    assert _content(Path()) == FILES
    folder = tmp_path / "here" / "config.json" / "given"
    code, output = export(folder)
    assert code == 2 and f"{folder}: cannot be made (Not a directory)" in output


def test_report_without_a_model_is_refused_with_a_fix(
    export: Export, tmp_path: Path, store: Store
) -> None:
    _result(store, "report", created="2026-01-01")
    code, output = export(tmp_path / "given")
    assert code == 2 and "Run the job again" in output and "store://pretrain/" in output


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
def test_invalid_uri_is_refused_as_typed(
    confide: Confide, store: Store, command: str, uri: str, words: str
) -> None:
    code, _, errors = confide(*command.split(), "--uri", uri)
    assert code == 2
    assert errors.startswith(f"confide: --uri {uri}: ") and words in errors
    assert RESULT not in errors


def test_nonprivate_model_is_not_exported(
    export: Export, store: Store, model: str, tmp_path: Path
) -> None:
    used = Unaccounted("training without privacy", unit=PrivacyUnit.PATIENT)
    _result(store, "pretrain", record("used", used))
    code, output = export(tmp_path / "out", "--uri", model)
    assert code == 2
    assert "the operator's alone" in output
    words = _result(store, "vocabulary")
    assert "no model there" in export(tmp_path / "out", "--uri", words)[1]
    assert not (tmp_path / "out").exists()
