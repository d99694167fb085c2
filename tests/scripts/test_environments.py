import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from child_processes import completed, program

from scripts import environments as script

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environments(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "VENVS", tmp_path / ".venv")
    monkeypatch.setattr(script, "LOCKS", tmp_path / "requirements")
    script.LOCKS.mkdir()
    for name in ("installer", "task", "task-dev", "orchestrator"):
        (script.LOCKS / f"{name}.txt").write_text(f"# {name}\n")
    return script


@pytest.mark.cases
def test_tensorflow_is_the_build_for_the_accelerator_of_the_machine(
    environments, tmp_path, monkeypatch, machine, lock
):
    program(tmp_path / machine, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert environments.lock_for("task", tmp_path / "dev") == lock
    assert environments.lock_for("task-dev", tmp_path / "dev") == "task-dev"


PIP_CONFIG = """\
:env:.cert='/etc/ca.crt'
global.index-url='https://pypi.example/simple'
install.index-url='https://install.example/simple'
global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'
global.find-links='/wheels /more'
global.trusted-host='a.example b.example'
:env:.default-timeout='180'
list.format='columns'
nonsense
"""


def test_uv_receives_the_settings_of_pip(environments):
    settings = environments.uv_settings(PIP_CONFIG)
    assert settings.items() >= {
        ("UV_DEFAULT_INDEX", "https://install.example/simple"),  # [install] overrides [global]
        ("UV_INDEX", "https://a.example/simple https://b.example/simple"),
        ("UV_FIND_LINKS", "/wheels,/more"),
        ("UV_INSECURE_HOST", "a.example b.example"),
        ("SSL_CERT_FILE", "/etc/ca.crt"),
        ("UV_HTTP_TIMEOUT", "180"),
        ("UV_PYTHON_DOWNLOADS", "never"),
    }
    given = {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE"}
    assert given.isdisjoint(environments.uv_settings(""))


def test_uv_settings_of_the_user_override_settings_of_pip(environments, monkeypatch):
    received = {}
    monkeypatch.setattr(environments, "uv_settings", lambda _: {"UV_INDEX": "pip's", "CERT": "x"})
    monkeypatch.setattr(environments, "INSTALLER", Path(sys.executable).parent)
    monkeypatch.setattr(environments, "run", lambda *_, environment: received.update(environment))
    monkeypatch.setenv("UV_INDEX", "https://mine.example")
    environments.uv("sync")
    assert (received["UV_INDEX"], received["CERT"]) == ("https://mine.example", "x")


class Commands:
    """A fake `run` that creates the folders of venv and records the installed locks."""

    def __init__(self) -> None:
        self.installed: list[tuple[str, str]] = []  # tool, lock
        self.venvs: list[str] = []
        self.fails: set[str] = set()

    def __call__(self, *words, environment=None):
        tool = "venv" if "venv" in words else Path(words[0]).name
        if tool == "venv":
            self.venvs.append(words[-1].name)
            time.sleep(0.1)  # long enough for a concurrent setup to see a partial one
            (words[-1] / "bin").mkdir(parents=True)
            (words[-1] / "bin" / "python").symlink_to(sys.executable)
        else:
            lock = next(w.stem for w in words if isinstance(w, Path) and w.suffix == ".txt")
            self.installed.append((tool, lock))
        return tool not in self.fails


@pytest.fixture
def commands(environments, monkeypatch):
    monkeypatch.setattr(environments, "INSTALLER", environments.VENVS / "installer" / "bin")
    monkeypatch.setattr(environments, "run", fake := Commands())
    return fake


@pytest.mark.parametrize("first", ["task", "task-dev"])
def test_environment_that_serves_the_product_is_not_installed_again(environments, commands, first):
    environments.ensure(first)
    environments.ensure("task")
    assert commands.installed == [("python", "installer"), ("uv", first)]
    assert commands.venvs == ["task", "installer"]


def test_changed_lock_is_installed_again(environments, commands):
    environments.ensure("task-dev")
    (environments.LOCKS / "task.txt").write_text("# newer\n")
    environments.ensure("task")
    environments.ensure("task-dev")  # installing the product's lock has removed the tools
    assert [lock for _, lock in commands.installed[1:]] == ["task-dev", "task", "task-dev"]


def test_interrupted_setup_is_repeated(environments, commands, monkeypatch):
    environments.ensure("task")
    (environments.LOCKS / "task.txt").write_text("# newer\n")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments, "sync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environments.ensure("task")
    (environments.LOCKS / "task.txt").write_text("# task\n")  # even with the old lock again
    environments.ensure("task")
    assert [lock for _, lock in commands.installed[1:]] == ["task", "task"]


def test_pip_installs_if_uv_fails_and_failure_of_both_ends_with_the_fix(environments, commands):
    commands.fails = {"uv"}
    environments.ensure("orchestrator")
    assert commands.installed[1:] == [("uv", "orchestrator"), ("python", "orchestrator")]
    assert environments.holds(environments.VENVS / "orchestrator", "orchestrator")
    commands.fails = {"uv", "python"}
    with pytest.raises(SystemExit, match="pip config list"):
        environments.ensure("task")
    assert not environments.holds(environments.VENVS / "task", "task")


def test_two_concurrent_setups_make_one_installer(environments, commands):
    with ThreadPoolExecutor(2) as both:
        list(both.map(environments.ensure, ("task", "orchestrator")))
    assert sorted(commands.venvs) == ["installer", "orchestrator", "task"]


def test_unsupported_python_ends_with_one_line(tmp_path):
    for name in ("python3.11", "python3.12", "python3.13", "python3", "python"):
        program(tmp_path / name, "exit 1")  # the probe's exit code for another version
    (tmp_path / "bash").symlink_to("/bin/bash")
    finder = CHECKOUT / "scripts" / "python3"
    answer = completed("/bin/bash", finder, "-V", env={"PATH": str(tmp_path)})
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (1, "", 1)
    assert "Python 3.11, 3.12 or 3.13 is needed" in answer.stderr


def test_python_of_another_user_ends_with_one_line(environments, monkeypatch):
    """`Path.exists` raises an error below a folder that this user may not read."""
    folder = environments.VENVS / "task"
    folder.mkdir(parents=True)
    (folder / ".locks").write_text(environments.digest("task"))
    exists = Path.exists

    def closed(path):
        if path.name == "python":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    with pytest.raises(SystemExit) as ended:
        environments.command_line(["ensure", "task"])
    assert f"this user may not use {folder / 'bin' / 'python'}" in ended.value.code
    assert "\n" not in ended.value.code
