"""The locks: pinned, hashed, free of anyone's index, and each superset what it says it is."""

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).resolve().parents[2] / "requirements"
NAMES = sorted(file.name for file in LOCKS.glob("*.txt") if file.name != "task-overrides.txt")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")


def pins(name: str) -> dict[str, str]:
    lines = (LOCKS / name).read_text().splitlines()
    return dict(found.groups() for found in map(PIN.match, lines) if found)


def test_every_environment_has_a_lock():
    assert {"installer.txt", "task.txt", "dev.txt", "orchestrator.txt"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_requirement_is_pinned_and_hashed(name):
    text = (LOCKS / name).read_text()
    entries = [part for part in re.split(r"\n(?=\S)", text) if part and not part.startswith("#")]
    assert entries
    for entry in entries:
        assert PIN.match(entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
def test_no_lock_names_an_index(name):
    text = (LOCKS / name).read_text()
    assert not re.search(r"--(extra-)?index-url|--find-links|--trusted-host|https?://", text)


@pytest.mark.parametrize(
    ("larger", "smaller"), [("dev.txt", "task.txt"), ("orchestrator-dev.txt", "orchestrator.txt")]
)
def test_the_developers_locks_hold_the_products_locks(larger, smaller):
    """`scripts/environments.py` relies on it: one environment serves both."""
    missing = {
        name: version
        for name, version in pins(smaller).items()
        if pins(larger).get(name) != version
    }
    assert not missing


def test_the_split_is_real():
    assert "apache-airflow" not in pins("task.txt")
    assert not {"tensorflow", "tensorflow-cpu", "mlflow"} & set(pins("orchestrator.txt"))
    assert "tensorflow" not in pins("task.txt")  # tensorflow-cpu stands in for it
