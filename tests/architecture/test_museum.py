"""The museum of bugs names tests and planted bugs that there are, and says what becomes of each."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "museum.md").read_text()
ENTRIES = PAGE.split("\n### ")[1:]
PLANTED = {
    bug["name"]
    for file in (ROOT / "tests" / "mutants").glob("*.toml")
    for bug in tomllib.loads(file.read_text())["bug"]
}


def test_every_entry_says_what_becomes_of_it_and_by_which_test() -> None:
    assert len(ENTRIES) >= 20
    for number, entry in enumerate(ENTRIES, 1):
        assert entry.startswith(f"{number}. ")
        assert re.findall(r"\*\*(Impossible|Refused|Caught|Contradicted)\.\*\*", entry), entry
        assert "Test: `" in entry, entry


def test_its_tests_are_there() -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE):
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{file}::{name}"


def test_its_planted_bugs_are_planted() -> None:
    told = " ".join(re.findall(r"Planted: (.+)", PAGE))
    named = re.findall(r"\*([^*]+)\*", told)
    assert len(named) > 40
    assert not set(named) - PLANTED


def test_what_is_called_caught_is_planted_or_held_to_a_definition() -> None:
    for entry in ENTRIES:
        if "**Caught.**" in entry:
            assert "Planted: *" in entry, entry
