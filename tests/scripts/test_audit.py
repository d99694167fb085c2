"""The audit: what is known fails the check, what nobody knows is said, and neither is the other."""

import importlib.util
import json
import sys
from datetime import date
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
VULNERABLE = {
    "dependencies": [
        {"name": "good", "version": "1", "vulns": []},
        {
            "name": "bad",
            "version": "2.0",
            "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2026-1"], "fix_versions": ["2.1"]}],
        },
        {"name": "other", "skip_reason": "Dependency not found on PyPI"},
    ]
}


@pytest.fixture
def audit(monkeypatch, tmp_path):
    """The script as a module, on locks of its own."""
    spec = importlib.util.spec_from_file_location("audit", CHECKOUT / "scripts" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "audit", module)
    spec.loader.exec_module(module)
    for name in ("installer.txt", "task.txt", "task-overrides.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "accepted.toml").write_text("")
    module.LOCKS, module.ACCEPTED = tmp_path, tmp_path / "accepted.toml"
    monkeypatch.setattr(module, "binding_licences", lambda: [])
    return module


def clean(module):
    return module.StepOutput((), 3, ())


def test_a_known_vulnerability_fails_the_check(audit, capsys):
    answers = {"installer.txt": clean(audit), "task.txt": audit.parsed(json.dumps(VULNERABLE))}
    assert audit.main([], lambda lock: answers[lock.name]) == 1
    said = capsys.readouterr()
    assert "VULNERABLE  bad 2.0: PYSEC-1 (fixed in 2.1)" in said.out
    assert "NOT AUDITED: other" in said.err


def test_nothing_known_passes(audit, capsys):
    assert audit.main([], lambda lock: clean(audit)) == 0
    assert "Audited 2 locks" in capsys.readouterr().out


@pytest.mark.parametrize("silence", ["nobody", "an index that knows no vulnerabilities"])
def test_where_nobody_answers_it_says_so_and_claims_nothing(audit, capsys, silence):
    """pip-audit itself says "No known vulnerabilities found" of packages it could not look up."""
    skipped = audit.StepOutput((), 0, ("uv",))
    assert audit.main([], lambda lock: None if silence == "nobody" else skipped) == 0
    said = capsys.readouterr()
    assert "NOT AUDITED" in said.err
    assert "Audited" not in said.out
    assert audit.main(["--strict"], lambda lock: None) == 1


def test_a_service_that_goes_away_midway_is_no_all_clear(audit, capsys):
    assert audit.main([], lambda lock: clean(audit) if lock.name == "installer.txt" else None) == 0
    assert "NOT AUDITED" in capsys.readouterr().err


@pytest.mark.parametrize(("until", "fails"), [("2999-01-01", 0), ("2020-01-01", 1)])
def test_what_is_accepted_is_accepted_with_a_reason_and_an_end(audit, until, fails):
    audit.ACCEPTED.write_text(
        f'[[accepted]]\nid = "CVE-2026-1"\npackage = "bad"\nreason = "not used"\nuntil = {until}\n'
    )
    assert audit.main([], lambda lock: audit.parsed(json.dumps(VULNERABLE))) == fails


def test_an_acceptance_without_a_reason_is_refused(audit):
    audit.ACCEPTED.write_text('[[accepted]]\nid = "CVE-1"\npackage = "bad"\nuntil = 2999-01-01\n')
    with pytest.raises(SystemExit, match="needs package, reason and until"):
        audit.read_accepted(audit.ACCEPTED, date(2026, 1, 1))


def test_an_acceptance_is_for_one_package(audit):
    found = audit.Found("bad", "2", "PYSEC-1", ("CVE-1",), ())
    assert audit.accepts({"CVE-1": "bad"}, found)
    assert not audit.accepts({"CVE-1": "another"}, found)


@pytest.mark.parametrize("output", ["", "No known", "{}", '{"dependencies": [{"name": "x"}]}'])
def test_an_answer_that_is_none_is_not_taken_for_one(audit, output):
    assert audit.parsed(output) is None


@pytest.mark.parametrize(
    ("licence", "binds"),
    [
        ("License: GPL-3.0-only", True),
        ("License-Expression: AGPL-3.0-or-later", True),
        ("Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)", True),
        ("License: LGPL with exceptions", False),
        ("Classifier: License :: OSI Approved :: GNU Lesser General Public License v3", False),
        ("License: Artistic License\nClassifier: License :: OSI Approved :: GPL", False),
        ("License: MIT", False),
    ],
)
def test_a_licence_that_would_bind_our_users_is_named(tmp_path, licence, binds):
    spec = importlib.util.spec_from_file_location("audit2", CHECKOUT / "scripts" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["audit2"] = module
    spec.loader.exec_module(module)
    about = tmp_path / "x-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: x\nVersion: 1\n{licence}\n")
    assert bool(list(module.binding_licences([tmp_path]))) is binds
