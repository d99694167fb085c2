import re
import tomllib
from pathlib import Path

import pytest
from child_processes import completed

CHECKOUT = Path(__file__).resolve().parents[2]
LARGEST = 1_000_000  # bytes
MACHINE = re.compile(r"(?<![\w.~-])/(?:home|Users|root|mnt|media|workspace)/\w")
SHARED_FOLDER = re.compile(r"\.\./shared\b")
MAY_USE_SHARED_FOLDER = ("tests/", "benchmarks/", ".ci/")


def tracked() -> list[Path]:
    answer = completed("git", "ls-files", "-z", cwd=CHECKOUT)
    if answer.returncode:
        pytest.skip("not a git checkout: the tracked files are unknown")
    files = [CHECKOUT / name for name in answer.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    places = []
    for file in tracked():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        name = str(file.relative_to(CHECKOUT))
        places += [
            f"{name}:{n}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)
        ]
    return places


def test_no_tracked_file_contains_a_machine_path():
    assert MACHINE.search("data = '/home/someone/notes'")
    assert not MACHINE.search("https://example.org/home/page and a/root/b")
    this_file = "tests/architecture/test_tree.py"
    assert [place for place in lines_with(MACHINE) if not place.startswith(this_file)] == []


def test_only_tests_and_benchmarks_mention_the_shared_folder():
    assert SHARED_FOLDER.search("../shared/data")
    assert [
        place for place in lines_with(SHARED_FOLDER) if not place.startswith(MAY_USE_SHARED_FOLDER)
    ] == []


def test_no_large_file_is_tracked():
    assert [file.name for file in tracked() if file.stat().st_size > LARGEST] == []


def test_patterns_of_fast_tests_match_files():
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    patterns = settings["tool"]["confide"]["fast-tests"]
    assert [pattern for pattern in patterns if not list(CHECKOUT.glob(pattern.lstrip("!")))] == []
