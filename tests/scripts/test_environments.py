"""Setting up: pip's settings reach uv, and an environment that is current costs nothing."""

import hashlib
import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """The script as a module, on folders of its own."""
    spec = importlib.util.spec_from_file_location(
        "environments", CHECKOUT / "scripts" / "environments.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "environments", module)
    spec.loader.exec_module(module)
    module.VENVS, module.LOCKS = tmp_path / ".venv", tmp_path / "requirements"
    module.LOCKS.mkdir()
    for name in ("installer", "task", "dev", "orchestrator", "orchestrator-dev"):
        (module.LOCKS / f"{name}.txt").write_text(f"# {name}\n")
    return module


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


def test_what_pip_is_told_uv_is_told(environments):
    told = environments.uv_settings(PIP_CONFIG, {})
    assert told["UV_DEFAULT_INDEX"] == "https://install.example/simple"  # [install] over [global]
    assert told["UV_INDEX"] == "https://a.example/simple https://b.example/simple"
    assert told["UV_FIND_LINKS"] == "/wheels,/more"
    assert told["UV_INSECURE_HOST"] == "a.example b.example"
    assert told["SSL_CERT_FILE"] == "/etc/ca.crt"
    assert told["UV_HTTP_TIMEOUT"] == "180"
    assert told["UV_PYTHON_DOWNLOADS"] == "never"


def test_the_users_own_uv_settings_win(environments):
    told = environments.uv_settings(PIP_CONFIG, {"UV_DEFAULT_INDEX": "https://mine.example"})
    assert "UV_DEFAULT_INDEX" not in told


def test_without_pip_settings_no_index_is_named(environments):
    told = environments.uv_settings("", {})
    assert not {"UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "SSL_CERT_FILE"} & set(told)


@pytest.fixture
def installed(environments, monkeypatch):
    """Return the locks that were installed, with uv, pip and venv only pretending."""
    done = []

    def sync(installer, folder, lock):
        done.append(lock.name)
        return True

    def venv(folder):
        python = environments.python_in(folder)
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)

    monkeypatch.setattr(environments, "sync_with_uv", sync)
    monkeypatch.setattr(environments, "make_venv", venv)
    monkeypatch.setattr(environments, "installer_python", lambda: Path(sys.executable))
    return done


def test_a_second_call_installs_nothing(environments, installed):
    environments.ensure_environment("task")
    environments.ensure_environment("task")
    assert installed == ["task.txt"]


def test_the_developers_environment_serves_the_product_too(environments, installed):
    environments.ensure_environment("task-dev")
    environments.ensure_environment("task")
    assert installed == ["dev.txt"]


def test_a_changed_lock_is_installed_anew(environments, installed):
    environments.ensure_environment("task-dev")
    (environments.LOCKS / "task.txt").write_text("# newer\n")
    environments.ensure_environment("task")
    assert installed == ["dev.txt", "task.txt"]
    environments.ensure_environment("task-dev")  # the product's lock took the tools away
    assert installed == ["dev.txt", "task.txt", "dev.txt"]


def test_an_interrupted_set_up_is_done_again(environments, installed, monkeypatch):
    environments.ensure_environment("task")
    (environments.LOCKS / "task.txt").write_text("# newer\n")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments, "sync_with_uv", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environments.ensure_environment("task")
    (environments.LOCKS / "task.txt").write_text("# task\n")  # even back at the old lock
    environments.ensure_environment("task")
    assert installed == ["task.txt", "task.txt"]


def test_where_uv_cannot_pip_does(environments, installed, monkeypatch):
    by_pip = []
    monkeypatch.setattr(environments, "sync_with_uv", lambda *_: False)
    monkeypatch.setattr(
        environments, "install_with_pip", lambda i, f, lock: not by_pip.append(lock.name)
    )
    environments.ensure_environment("orchestrator")
    assert by_pip == ["orchestrator.txt"]
    stamp = environments.stamp_of("orchestrator", "orchestrator.txt").read_text()
    assert stamp == hashlib.sha256(b"# orchestrator\n").hexdigest()


def test_where_neither_can_one_line_says_what_to_do(environments, installed, monkeypatch):
    monkeypatch.setattr(environments, "sync_with_uv", lambda *_: False)
    monkeypatch.setattr(environments, "install_with_pip", lambda *_: False)
    with pytest.raises(environments.SetupError, match="pip config list"):
        environments.ensure_environment("task")
    assert not environments.is_current(environments.ENVIRONMENTS["task"])


def test_two_set_ups_at_once_make_one_installer(environments, monkeypatch):
    """Each environment has a lock of its own, and the installer serves them all."""
    made = []

    def venv(folder):
        made.append(folder.name)
        time.sleep(0.3)  # long enough for the other one to find half of it
        python = environments.python_in(folder)
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)

    monkeypatch.setattr(environments, "make_venv", venv)
    monkeypatch.setattr(environments, "run", lambda *_: 0)
    both = [threading.Thread(target=environments.installer_python) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert made == ["installer"]


def test_without_python_3_11_one_line_says_so(tmp_path):
    for name in ("python3.11", "python3", "python"):
        other = tmp_path / name
        other.write_text("#!/bin/sh\nexit 1\n")  # another version answers the probe so
        other.chmod(0o755)
    (tmp_path / "bash").symlink_to("/bin/bash")
    answer = subprocess.run(
        ["/bin/bash", CHECKOUT / "scripts" / "python3.11", "-V"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.count("\n") == 1
    assert "Python 3.11 is needed" in answer.stderr
