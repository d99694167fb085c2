"""What must not be in the tree: this or that machine's paths, and large files."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LARGEST = 1_000_000  # bytes
MACHINE = re.compile(r"(?<![\w.~-])/(?:home|Users|root|mnt|media|workspace)/\w")
BESIDE = re.compile(r"\.\./shared\b")
MAY_LOOK_BESIDE = ("tests/", "benchmarks/", ".ci/")


def tracked() -> list[Path]:
    answer = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        pytest.skip("not a git checkout: what is tracked is unknown")
    files = [CHECKOUT / name for name in answer.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for file in tracked():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        name = str(file.relative_to(CHECKOUT))
        found += [
            f"{name}:{n}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)
        ]
    return found


def test_no_path_of_a_machine_stands_in_the_tree():
    own = "tests/architecture/test_tree.py"
    assert [place for place in lines_with(MACHINE) if not place.startswith(own)] == []


def test_the_folder_beside_the_checkout_is_looked_for_by_tests_alone():
    assert [place for place in lines_with(BESIDE) if not place.startswith(MAY_LOOK_BESIDE)] == []


def test_no_large_file_is_tracked():
    assert [file.name for file in tracked() if file.stat().st_size > LARGEST] == []


def test_every_fast_test_is_there():
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    patterns = settings["tool"]["confide"]["fast-tests"]
    assert [pattern for pattern in patterns if not list(CHECKOUT.glob(pattern.lstrip("!")))] == []


def test_the_patterns_find_what_they_are_for():
    assert MACHINE.search("data = '/home/someone/notes'")
    assert not MACHINE.search("https://example.org/home/page and a/root/b")
    assert BESIDE.search("../shared/data")
