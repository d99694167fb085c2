import shutil
import subprocess
import sys
from pathlib import Path

from child_processes import completed

CHECKOUT = Path(__file__).resolve().parents[2]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("lint-imports")
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    return completed(tool, "--no-cache", cwd=folder, env=environment)


def test_packages_keep_the_import_contracts():
    result = lint(CHECKOUT)
    assert result.returncode == 0, result.stdout


def test_import_against_a_contract_is_reported(tmp_path):
    for room in ("dp_core", "tasks", "dags"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / room, tmp_path / room, ignore=ignored)
    (tmp_path / "pyproject.toml").write_text((CHECKOUT / "pyproject.toml").read_text())
    (tmp_path / "dp_core" / "errors.py").write_text("import tasks.protocol\n")
    (tmp_path / "dp_core" / "nn.py").write_text("import dp_core.privacy.mechanisms\n")
    (tmp_path / "dags" / "dp_bert.py").write_text("import tasks.execution.contract\n")
    (tmp_path / "tasks" / "results.py").write_text("import tasks.report.model\n")
    result = lint(tmp_path)
    assert result.returncode != 0
    assert "tasks.results -> tasks.report.model" in result.stdout
    assert "dp_core.errors -> tasks.protocol" in result.stdout
    assert "dp_core.nn -> dp_core.privacy.mechanisms" in result.stdout
    assert "dags.dp_bert -> tasks.execution.contract" in result.stdout
