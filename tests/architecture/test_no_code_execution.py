import tomllib
from pathlib import Path

import pytest
from forbidden_calls import ARRAYS, EXECUTING_CALLS, EXECUTING_MODULES, findings

CHECKOUT = Path(__file__).resolve().parents[2]
ROOMS = ("dp_core", "tasks", "dags", "docker", "scripts", "benchmarks", "tests")


def test_no_source_executes_file_contents():
    forbidden = [
        f"{file.relative_to(CHECKOUT)}:{call}"
        for room in ROOMS
        for file in sorted((CHECKOUT / room).rglob("*.py"))
        for call in findings(file.read_text())
    ]
    assert forbidden == []


def test_linter_rules_against_execution_apply_to_every_package():
    lint = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    assert not [rule for rule in lint["ignore"] if rule.startswith("S1") or rule.startswith("S3")]
    lifted = {
        place for place, rules in lint["per-file-ignores"].items() if {"S301", "S602"} & set(rules)
    }
    assert lifted == set()
    rooms = {place.split("/")[0] for place in lint["per-file-ignores"]}
    assert not rooms & {"dp_core", "tasks", "dags"}


@pytest.mark.parametrize(
    "line",
    [
        *(f"import {module}" for module in sorted(EXECUTING_MODULES)),
        *(f"from {module} import loads" for module in sorted(EXECUTING_MODULES)),
        *(f"{call}(path, x)" for call in sorted(EXECUTING_CALLS)),
        *(f"{call}(path)" for call in sorted(ARRAYS)),
        "np.load(path, allow_pickle=True)",
        "np.save(path, x, allow_pickle=flag)",
        "subprocess.run(words, shell=True)",
        "subprocess.Popen(words, shell=flag)",
        "archive.extractall(folder)",
    ],
)
def test_forbidden_calls_are_found(line):
    assert list(findings(line))


@pytest.mark.cases
def test_safe_calls_are_not_reported(line):
    assert not list(findings(line))
