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


def test_every_entry_states_its_outcome_its_test_and_its_planted_bug():
    assert len(ENTRIES) >= 20
    for number, entry in enumerate(ENTRIES, 1):
        assert entry.startswith(f"{number}. ")
        assert re.findall(r"\*\*(Impossible|Refused|Caught|Contradicted)\.\*\*", entry), entry
        assert "Test: `" in entry, entry
        assert "**Caught.**" not in entry or "Planted: *" in entry, entry


def test_tests_named_by_the_page_exist():
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE):
        tree = ast.parse((ROOT / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in defined, f"{file}::{name}"


def test_planted_bugs_named_by_the_page_exist():
    lines = " ".join(re.findall(r"Planted: (.+)", PAGE))
    named = re.findall(r"\*([^*]+)\*", lines)
    assert len(named) > 40
    assert not set(named) - PLANTED
