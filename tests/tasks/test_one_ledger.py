"""A deployment opens only the ledger that its seeds and its store refer to."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from command_line import Confide
from release_examples import NOTES, UNIT, bench_of, charged

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from tasks.commands import doctor_command
from tasks.commands.backup_command import copied
from tasks.releases.charge import record_operator_use
from tasks.releases.deployment_ledger import IDENTITY, open_ledger
from tasks.runtime.deployment import Deployment
from tasks.storage import Store


def release(deployment: Deployment) -> None:
    charged(bench_of(deployment)).settle(b"released")


@pytest.fixture
def used(registered: Deployment) -> Deployment:
    """A deployment with one settled release."""
    release(registered)
    return registered


def delete_ledger(deployment: Deployment) -> None:
    for file in deployment.home.glob("ledger.db*"):
        file.unlink()


def test_deleted_ledger_is_not_replaced_by_a_new_budget(
    confide: Confide, used: Deployment, at_home: None
) -> None:
    delete_ledger(used)
    words = ("ledger", "register", "notes", "--unit", "patient", "--epsilon", "2", "--delta")
    code, _, err = confide(*words, "1e-5")
    assert code == 2
    assert "the privacy ledger is missing" in err and "Restore ledger and seeds" in err
    with pytest.raises(BadInput, match="ledger is missing"):
        release(used)
    findings = {f.name: f for f in doctor_command.ledger(used)}
    assert not findings["ledger's integrity"].ok
    assert "ledger is missing" in findings["ledger's integrity"].found


def test_store_remembers_the_ledger_of_uses_without_a_seed(deployment: Deployment) -> None:
    """A training without privacy is listed, and its results refer to an entry without a seed."""
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    record_operator_use(bench_of(deployment), NOTES)
    delete_ledger(deployment)
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    with pytest.raises(BadInput, match="name the entries of another ledger"):
        record_operator_use(bench_of(deployment), NOTES)
    store = Store(deployment.store, deployment.cache)
    remembered = store.read(IDENTITY)
    assert remembered != Ledger.open(deployment.ledger).identity().encode()


def test_restored_backup_is_accepted_as_the_same_ledger(used: Deployment, tmp_path: Path) -> None:
    copied(used, tmp_path / "backup")
    delete_ledger(used)
    used.seeds.rename(tmp_path / "moved away")
    (tmp_path / "backup" / "ledger.db").rename(used.home / "ledger.db")
    (tmp_path / "backup" / "seeds").rename(used.seeds)
    release(used)  # the entry is found and accepted again
    store = Store(used.store, used.cache)
    assert len(open_ledger(used, store).history("notes")) == 1
    assert all(finding.ok for finding in doctor_command.ledger(used) if finding.needed)


def test_backup_omits_temporary_seed_files(used: Deployment, tmp_path: Path) -> None:
    (used.seeds / ".left.0123456789abcdef").write_text("{}")
    copied(used, tmp_path / "backup")
    names = {file.name for file in (tmp_path / "backup" / "seeds").iterdir()}
    assert names == {file.name for file in used.seeds.iterdir() if file.name[0] != "."}


@pytest.mark.parametrize("damage", ["overwritten", "a row", "an entry is gone"])
def test_doctor_reports_a_broken_ledger_and_continues(
    confide: Confide, used: Deployment, at_home: None, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    file = used.home / "ledger.db"
    if damage == "overwritten":
        delete_ledger(used)
        file.write_bytes(b"no database" * 1000)
    else:
        with sqlite3.connect(file) as db:
            db.execute(
                "UPDATE entries SET event = '{'" if damage == "a row" else "DELETE FROM entries"
            )
    monkeypatch.setattr(
        doctor_command,
        "LOOKS",
        (doctor_command._secrets, doctor_command.ledger, doctor_command.storage),
    )
    code, out, _ = confide("doctor")
    assert code == 1
    assert "✗ ledger" in out
    assert "Restore" in out
    assert "✓ store" in out  # the command continues after the broken ledger


# --- paths and URLs


@pytest.mark.parametrize(
    "environment",
    [
        {"CONFIDE_HOME": "home"},
        {"CONFIDE_SEEDS": "./seeds"},
        {"CONFIDE_STORE": "store"},
        {"CONFIDE_STORE": "file://store"},
        {"CONFIDE_LEDGER": "sqlite:///ledger.db"},
        {"CONFIDE_LEDGER": "sqlite+pysqlite:///ledger.db"},
        {"CONFIDE_TRACKING": "sqlite:///mlflow.db"},
    ],
)
def test_relative_path_is_refused(environment: dict[str, str]) -> None:
    (name,) = environment
    with pytest.raises(BadInput, match=f"{name}: a relative place"):
        Deployment.from_environment(environment)


def test_absolute_paths_and_urls_are_accepted() -> None:
    environment = {
        "CONFIDE_HOME": "~/confide",
        "CONFIDE_SEEDS": "/srv/seeds",
        "CONFIDE_STORE": "gs://bucket/store",
        "CONFIDE_LEDGER": "postgresql://host/ledger",
        "CONFIDE_TRACKING": "https://somebody:hunter2@mlflow.example.org/",
    }
    deployment = Deployment.from_environment(environment)
    assert deployment.home == Path.home() / "confide"
    assert deployment.ledger == environment["CONFIDE_LEDGER"]
    assert deployment.tracking == environment["CONFIDE_TRACKING"]
    assert deployment.tracking_ui == "https://mlflow.example.org"


@pytest.mark.parametrize(
    "inside", [[], ["ledger.db"], ["seeds", "notes.txt"], ["messages"], ["specs"]]
)
def test_accessible_home_is_closed_to_other_users(tmp_path: Path, inside: list[str]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    for name in inside:
        (home / name).touch()
    Deployment.from_environment({"CONFIDE_HOME": str(home)}).prepare()
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "inside"), [(0o755, "thesis.tex"), (0o1777, "seeds")])
def test_folder_with_foreign_files_is_refused_as_home(
    tmp_path: Path, mode: int, inside: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / inside).touch()
    home.chmod(mode)
    with pytest.raises(BadInput, match=f"others can reach.*chmod 700 {home}"):
        Deployment.from_environment({"CONFIDE_HOME": str(home)}).prepare()
    assert home.stat().st_mode & 0o7777 == mode


def test_new_home_is_accessible_to_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        deployment = Deployment.from_environment({"CONFIDE_HOME": str(tmp_path / "home")})
        list(doctor_command.ledger(deployment))
    finally:
        os.umask(before)
    assert deployment.home.stat().st_mode & 0o777 == 0o700


def test_password_in_a_url_option_is_not_printed(
    confide: Confide, at_home: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql://127.0.0.1:1/ledger?user=confide&password=hunter2"
    monkeypatch.setenv("CONFIDE_LEDGER", url)
    monkeypatch.setattr(doctor_command, "LOOKS", (doctor_command.ledger,))
    for words in (["doctor"], ["doctor", "--json"], ["ledger"], ["--debug", "ledger", "--json"]):
        # the variable that --debug sets is reset after the test
        monkeypatch.setenv("CONFIDE_DEBUG", "")
        _, out, err = confide(*words)
        assert "127.0.0.1:1/ledger" in out + err
        assert "hunter2" not in out + err, words
