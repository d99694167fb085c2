"""The script that tries the compose stack, where there is no engine to try it on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "ci"


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_without_an_engine_continuous_integration_does_not_pass(
    tmp_path: Path, ci: str, code: int
) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\nexit 1\n")
    engine.chmod(0o755)
    told = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CI": ci}
    answer = subprocess.run([SCRIPT], env=told, capture_output=True, text=True, check=False)
    assert answer.returncode == code
    assert "was NOT tried" in answer.stderr


def test_every_file_that_needs_the_stack_or_the_images_is_run_on_them() -> None:
    """`make test` skips these; `docker/ci` names each."""
    files = Path(__file__).parent.glob("test_*.py")
    needing = [f.name for f in files if "\nfrom running_stack import " in f.read_text()]
    assert len(needing) >= 4
    script = SCRIPT.read_text()
    for name in (*needing, "test_images.py"):
        assert f" tests/platform/{name} " in script, name


@pytest.mark.parametrize("answered", [False, True])
def test_a_vulnerability_check_that_did_not_run_stands_in_the_summary(
    tmp_path: Path, answered: bool
) -> None:
    """`make check` passes where nobody can be asked; its word must not be lost above the rest."""
    (tmp_path / "repository" / ".ci").mkdir(parents=True)
    script = tmp_path / "repository" / ".ci" / "run"
    shutil.copy(SCRIPT.parents[1] / ".ci" / "run", script)
    commands = tmp_path / "bin"
    commands.mkdir()
    says = "Audited every lock" if answered else "NOT AUDITED: no vulnerability service answers"
    for name, body in {
        "make": f'[ "$1" != check ] || echo "{says}" >&2',
        "docker": "exit 1",
        "apt-get": "exit 0",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    told = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "CONFIDE_ENGINE_FILES": str(tmp_path / "no-engine"),
    }
    answer = subprocess.run(["bash", script], env=told, capture_output=True, text=True, check=True)
    summary = answer.stdout.partition("== CI, in short")[2]
    assert "make check: passed" in summary
    assert ("known vulnerabilities: NOT AUDITED" in summary) is not answered
