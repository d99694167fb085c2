import os
import shutil
import subprocess
from pathlib import Path

import pytest
from child_processes import completed, program

ON_ODD_DAYS = ("test-transformers", "test-jax-privacy", "test-tpu", "test-gpu", "test-wheel")
FAILING = [(1, "check"), (1, "mutants"), (0, "test"), (0, "test-ray"), (0, "docs")]
FAILING += [(day, ON_ODD_DAYS[day % 5]) for day in (1, 3, 5, 7, 9)]
SCRIPT = Path(__file__).parents[2] / "docker" / "ci"


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_docker_ci_without_an_engine_fails_in_continuous_integration(tmp_path, ci, code):
    program(tmp_path / "docker", "exit 1")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CI": ci}
    answer = completed(SCRIPT, env=environment)
    assert answer.returncode == code
    assert "was NOT tried" in answer.stderr


def test_docker_ci_runs_every_file_that_needs_stack_or_images():
    """`make test` skips these files, so `docker/ci` must name each of them."""
    files = Path(__file__).parent.glob("test_*.py")
    needing = [f.name for f in files if "\nfrom running_stack import " in f.read_text()]
    assert len(needing) >= 4
    script = SCRIPT.read_text()
    for name in (*needing, "test_images.py"):
        assert f" tests/platform/{name} " in script, name


def continuous_integration(
    folder: Path, make: str, day: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run .ci/run on a day since 1970 with a stub of `make`, and without a container engine."""
    (folder / "repository" / ".ci").mkdir(parents=True)
    script = folder / "repository" / ".ci" / "run"
    shutil.copy(SCRIPT.parents[1] / ".ci" / "run", script)
    commands = folder / "bin"
    stubs = {"make": make, "docker": "exit 1", "apt-get": "exit 0", "date": f"echo {day * 86400}"}
    for name, body in stubs.items():
        program(commands / name, body)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "CONFIDE_ENGINE_FILES": str(folder / "no-engine"),
    }
    return completed("bash", script, env=environment)


@pytest.mark.parametrize("answered", [False, True])
def test_summary_states_a_missing_vulnerability_check(tmp_path, answered):
    """`make check` passes without a vulnerability service, so the summary must state it."""
    says = "Audited every lock" if answered else "NOT AUDITED: no vulnerability service answers"
    answer = continuous_integration(tmp_path, f'[ "$1" != check ] || echo "{says}" >&2')
    assert answer.returncode == 0
    summary = answer.stdout.partition("== CI, in short")[2]
    assert "make check: passed" in summary
    assert ("known vulnerabilities: NOT AUDITED" in summary) is not answered


@pytest.mark.parametrize(("day", "target"), FAILING)
def test_failure_of_any_part_fails_continuous_integration(tmp_path, day, target):
    """This includes the parts that run concurrently with the stack, and those that run in turn."""
    make = f'echo "words of $1"; [ "$1" != {target} ] || exit 3'
    answer = continuous_integration(tmp_path, make, day)
    assert answer.returncode == 3
    summary = answer.stdout.partition("== CI, in short")[2]
    lines = [line for line in summary.splitlines() if line.startswith("make ")]
    assert len(lines) == 5
    (failed,) = (line for line in lines if "FAILED (3)" in line)
    assert failed.startswith((f"make {target}:", f"make {target},"))
    assert all(": passed, " in line for line in lines if line != failed)
    assert "compose: SKIPPED, NOT TRIED" in summary
    assert f"words of {'mutants' if day % 2 else 'test-presets'}" in answer.stdout
