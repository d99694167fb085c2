"""A deployment opens one ledger: the one that its seeds and its store remember."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from command_line import Confide
from release_examples import NOTES, UNIT, bench_of, charged

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from tasks.commands import doctor, doctor_services
from tasks.commands.backup import copied
from tasks.releases.charge import record_operator_use
from tasks.releases.deployment_ledger import IDENTITY, open_ledger
from tasks.runtime.deployment import Deployment
from tasks.storage import Store


def release(deployment: Deployment) -> None:
    charged(bench_of(deployment)).settle(b"released")


@pytest.fixture
def used(registered: Deployment) -> Deployment:
    """A deployment that has released something."""
    release(registered)
    return registered


def delete_ledger(deployment: Deployment) -> None:
    for file in deployment.home.glob("ledger.db*"):
        file.unlink()


def test_a_deleted_ledger_opens_no_new_budget(
    confide: Confide, used: Deployment, at_home: None
) -> None:
    delete_ledger(used)
    words = ("ledger", "register", "notes", "--unit", "patient", "--epsilon", "2", "--delta")
    code, _, err = confide(*words, "1e-5")
    assert code == 2
    assert "the privacy ledger is missing" in err and "Restore ledger and seeds" in err
    with pytest.raises(BadInput, match="ledger is missing"):
        release(used)
    asked = {f.name: f for f in doctor_services.ledger(used)}
    assert not asked["ledger's integrity"].ok
    assert "ledger is missing" in asked["ledger's integrity"].found


def test_the_store_remembers_uses_that_drew_no_seed(deployment: Deployment) -> None:
    """A training without privacy is listed; its results name an entry, and it has no seed."""
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    record_operator_use(bench_of(deployment), NOTES)
    delete_ledger(deployment)
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    with pytest.raises(BadInput, match="name the entries of another ledger"):
        record_operator_use(bench_of(deployment), NOTES)
    store = Store(deployment.store, deployment.cache)
    remembered = store.read(IDENTITY)
    assert remembered != Ledger.open(deployment.ledger).identity().encode()


def test_a_restored_backup_is_the_same_ledger(used: Deployment, tmp_path: Path) -> None:
    copied(used, tmp_path / "backup")
    delete_ledger(used)
    used.seeds.rename(tmp_path / "moved away")
    (tmp_path / "backup" / "ledger.db").rename(used.home / "ledger.db")
    (tmp_path / "backup" / "seeds").rename(used.seeds)
    release(used)  # found again, and accepted again
    store = Store(used.store, used.cache)
    assert len(open_ledger(used, store).history("notes")) == 1
    assert all(finding.ok for finding in doctor_services.ledger(used) if finding.needed)


def test_a_backup_copies_no_seed_twice(used: Deployment, tmp_path: Path) -> None:
    (used.seeds / ".left.0123456789abcdef").write_text("{}")
    copied(used, tmp_path / "backup")
    names = {file.name for file in (tmp_path / "backup" / "seeds").iterdir()}
    assert names == {file.name for file in used.seeds.iterdir() if file.name[0] != "."}


@pytest.mark.parametrize("damage", ["overwritten", "a row", "an entry is gone"])
def test_doctor_survives_a_broken_ledger_and_names_it(
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
        doctor, "LOOKS", (doctor._secrets, doctor_services.ledger, doctor_services.storage)
    )
    code, out, _ = confide("doctor")
    assert code == 1
    assert "✗ ledger" in out
    assert "Restore" in out
    assert "✓ store" in out  # it went on


# --- places


@pytest.mark.parametrize(
    "told",
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
def test_a_relative_place_is_refused(told: dict[str, str]) -> None:
    (name,) = told
    with pytest.raises(BadInput, match=f"{name}: a relative place"):
        Deployment.from_environment(told)


def test_whole_places_are_taken() -> None:
    told = {
        "CONFIDE_HOME": "~/confide",
        "CONFIDE_SEEDS": "/srv/seeds",
        "CONFIDE_STORE": "gs://bucket/store",
        "CONFIDE_LEDGER": "postgresql://host/ledger",
        "CONFIDE_TRACKING": "https://somebody:hunter2@mlflow.example.org/",
    }
    found = Deployment.from_environment(told)
    assert found.home == Path.home() / "confide"
    assert found.ledger == told["CONFIDE_LEDGER"]
    assert found.tracking == told["CONFIDE_TRACKING"]
    assert found.tracking_ui == "https://mlflow.example.org"


@pytest.mark.parametrize(
    "inside", [[], ["ledger.db"], ["seeds", "notes.txt"], ["messages"], ["specs"]]
)
def test_a_home_that_others_can_reach_is_closed(tmp_path: Path, inside: list[str]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    for name in inside:
        (home / name).touch()
    Deployment.from_environment({"CONFIDE_HOME": str(home)}).prepare()
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "inside"), [(0o755, "thesis.tex"), (0o1777, "seeds")])
def test_a_folder_of_somebody_elses_is_not_closed(tmp_path: Path, mode: int, inside: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / inside).touch()
    home.chmod(mode)
    with pytest.raises(BadInput, match=f"others can reach.*chmod 700 {home}"):
        Deployment.from_environment({"CONFIDE_HOME": str(home)}).prepare()
    assert home.stat().st_mode & 0o7777 == mode


def test_a_new_home_is_its_owners_alone_whoever_makes_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        deployment = Deployment.from_environment({"CONFIDE_HOME": str(tmp_path / "home")})
        list(doctor_services.ledger(deployment))
    finally:
        os.umask(before)
    assert deployment.home.stat().st_mode & 0o777 == 0o700


def test_no_password_of_an_option_is_shown(
    confide: Confide, at_home: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "postgresql://127.0.0.1:1/ledger?user=confide&password=hunter2"
    monkeypatch.setenv("CONFIDE_LEDGER", url)
    monkeypatch.setattr(doctor, "LOOKS", (doctor_services.ledger,))
    for words in (["doctor"], ["doctor", "--json"], ["ledger"], ["--debug", "ledger", "--json"]):
        monkeypatch.setenv("CONFIDE_DEBUG", "")  # and what --debug sets ends with the test
        _, out, err = confide(*words)
        assert "127.0.0.1:1/ledger" in out + err
        assert "hunter2" not in out + err, words
