import shutil
from pathlib import Path

import pytest
from child_processes import completed

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "audit"
VULNERABLE = 'echo "Name Version ID"; echo "bad 2.0 PYSEC-1"; exit 1'
UNKNOWN = 'echo "Name Skip Reason"; echo "other Dependency not found on PyPI"'
AWAY = "echo ERROR:pip_audit: no route >&2; exit 1"
FINE = "echo No known vulnerabilities found >&2"


def audit(folder, installer=FINE, task=FINE, *options, script=SCRIPT):
    """Run the script in a minimal checkout with a stub of pip-audit that answers by lock."""
    tool = folder / ".venv" / "audit" / "bin" / "pip-audit"
    for place in (tool.parent, folder / "scripts", folder / "requirements"):
        place.mkdir(parents=True)
    shutil.copy(script, folder / "scripts")
    for name in ("installer", "task"):
        (folder / "requirements" / f"{name}.txt").touch()
    tool.write_text(f"#!/bin/bash\nif [[ $2 = *task* ]]; then {task}; else {installer}; fi\n")
    tool.chmod(0o755)
    return completed(folder / "scripts" / "audit", *options)


@pytest.mark.parametrize("before", ["", f"{UNKNOWN}; "])
def test_known_vulnerability_fails_the_check_even_with_an_unknown_package(tmp_path, before):
    answer = audit(tmp_path, FINE, before + VULNERABLE)
    assert answer.returncode == 1
    assert "requirements/task.txt\n" in answer.stdout
    assert "Name Version ID\nbad 2.0 PYSEC-1" in answer.stdout


@pytest.mark.cases
def test_accepted_vulnerability_is_accepted_until_its_date(tmp_path, accepted, fails):
    script = tmp_path / "audit"
    script.write_text(SCRIPT.read_text().replace("accepted=(", f"accepted=(PYSEC-{accepted}", 1))
    script.chmod(0o755)
    answering = f'if [[ "$*" = *"--ignore-vuln PYSEC-1"* ]]; then {FINE}; else {VULNERABLE}; fi'
    assert audit(tmp_path / "checkout", FINE, answering, script=script).returncode == fails


def test_locks_without_known_vulnerability_pass(tmp_path):
    answer = audit(tmp_path)
    assert answer.returncode == 0
    assert "Audited every lock" in answer.stdout
    assert "NOT AUDITED" not in answer.stderr


@pytest.mark.parametrize("options", [[], ["--strict"]])
@pytest.mark.parametrize(
    ("installer", "task"), [(AWAY, FINE), (UNKNOWN, FINE), (FINE, AWAY), (FINE, UNKNOWN)]
)
def test_audit_without_an_answering_service_reports_not_audited(tmp_path, installer, task, options):
    """pip-audit prints "No known vulnerabilities found" even if it could not check a package."""
    answer = audit(tmp_path, installer, task, *options)
    assert answer.returncode == len(options)
    assert answer.stderr.count("NOT AUDITED") == 1
    assert "Audited" not in answer.stdout
