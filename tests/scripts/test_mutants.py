import tomllib
from collections import Counter
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

from scripts import mutants
from scripts.shares import numbered, share_of

CHECKOUT = Path(__file__).resolve().parents[2]
CODE = "def double(x: int) -> int:\n    return 2 * x\n"
TESTS = """
import pytest
from code_under_test import double

def test_it_doubles():
    assert double(3) == 6

def test_nothing():
    pass

@pytest.mark.skip
def test_skipped():
    raise AssertionError
"""
BUG = """
[[bug]]
name = "{name}"
file = "code_under_test.py"
now = '2 * x'
planted = '{planted}'
tests = ["test_it.py::{test}"]
why = "It doubles."
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one function and three tests, which imports no slow library."""
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / mutants.DATA).mkdir(parents=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "warm", lambda: None)
    files = ["code_under_test.py", "test_it.py"]
    monkeypatch.setattr(mutants, "files_of_tree", lambda: files)
    return tmp_path


@pytest.fixture(scope="module")
def planted_bugs() -> list[mutants.Mutant]:
    return mutants.load(CHECKOUT)


def plant(project: Path, name: str, planted: str, test: str) -> None:
    with (project / mutants.DATA / "room.toml").open("a") as file:
        file.write(BUG.format(name=name, planted=planted, test=test))


def test_every_room_has_planted_bugs_with_a_reason(planted_bugs):
    assert len(planted_bugs) >= 80
    rooms = Counter(mutant.room for mutant in planted_bugs)
    for room in ("noise", "sampling", "clipping", "accounting", "vocabulary", "ledger", "labels"):
        assert rooms[room] >= 5, room
    assert rooms["resume"] >= 5
    assert all(mutant.why for mutant in planted_bugs)


def test_example_of_contributing_page_is_a_planted_bug(planted_bugs):
    page = (CHECKOUT / "CONTRIBUTING.md").read_text()
    (example,) = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])["bug"]
    named = {mutant.name: mutant for mutant in planted_bugs}
    written = example | {"tests": tuple(example["tests"])}
    assert vars(named[example["name"]]).items() >= written.items()


@pytest.mark.cases
def test_bug_that_no_test_detects_fails_the_run(project, capsys, planted, test, code, word):
    plant(project, "triples", planted, test)
    assert mutants.main(["--workers", "1"]) == code
    output = capsys.readouterr().out
    assert word in output and f"{1 - code} of 1 caught" in output
    assert (project / "code_under_test.py").read_text() == CODE


def test_failing_test_without_planted_bug_fails_the_run(project, capsys):
    (project / "test_it.py").write_text(TESTS.replace("== 6", "== 7"))
    plant(project, "triples", "3 * x", "test_it_doubles")
    assert mutants.main(["--workers", "1"]) == 1
    assert "without any bug" in capsys.readouterr().out


def test_bug_that_cannot_be_planted_is_named(project, capsys):
    plant(project, "gone", "3 * x", "test_it_doubles")
    (project / "code_under_test.py").write_text(CODE.replace("2 * x", "x + x"))
    assert mutants.main([]) == 1
    assert "gone: its `now` occurs 0 times" in capsys.readouterr().err


@pytest.mark.cases
def test_stale_bug_is_reported_with_its_reason(project, change, word):
    bug = mutants.Mutant("room", "bug", "code_under_test.py", "2 * x", "3 * x", ("test_it.py",), "")
    assert mutants.stale(project, bug) == ""
    assert word in mutants.stale(project, replace(bug, **change))


def test_only_chooses_a_room_or_bugs_by_name():
    bugs = [mutants.Mutant(r, f"{r} {n}", "", "", "", (), "") for r in "ab" for n in range(7)]
    assert len(mutants.chosen(bugs, "a")) == 7
    assert [bug.name for bug in mutants.chosen(bugs, "b 3")] == ["b 3"]


def test_shares_of_consecutive_days_contain_every_item():
    days = [date(2026, 12, 31) + timedelta(days=n) for n in range(3)]
    shares = [share_of(range(14), numbered("today/3", day)) for day in days]
    assert sorted(item for share in shares for item in share) == list(range(14))
    assert [share_of(range(5), f"{k}/2") for k in (1, 2)] == [range(0, 5, 2), range(1, 5, 2)]
    with pytest.raises(ValueError, match="not one of 1/3 to 3/3"):
        share_of(range(14), "0/3")
