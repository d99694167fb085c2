import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from release_examples import NOTES, UNIT, bench_of, charged
from step_outputs import output_folder
from test_vocabulary_source import SMALL

from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.ledger.database import LedgerDamaged
from tasks.commands import doctor_command
from tasks.commands.local_stack import copied
from tasks.context import content_key
from tasks.execution import contract
from tasks.protocol.job import job_steps
from tasks.protocol.messages import StepResult
from tasks.protocol.settings import MADE_UP, JobSettings
from tasks.protocol.specs import RunContext
from tasks.releases.charge import record_operator_use
from tasks.releases.deployment_ledger import IDENTITY, confirm_releases, open_ledger
from tasks.runtime.deployment import Deployment

CONTEXT = RunContext(run_key="moved", run_name="moved", task="vocabulary")
TASKS = ("budget", "private_corpus", "public_corpus", "vocabulary")


def release(deployment: Deployment, spec_hash: str = "a" * 64) -> ReleaseRecord:
    settled = charged(bench_of(deployment, spec_hash)).settle(spec_hash.encode())
    result = StepResult(
        step="pretrain", spec_hash=spec_hash, outputs={}, metrics=[], releases=[settled],
        facts={"made_up": False},
    )  # fmt: skip
    address = f"store://pretrain/{spec_hash[:16]}"
    deployment.open_store().write(f"{address}/result.json", result.model_dump_json().encode())
    return settled


def delete_ledger(deployment: Deployment) -> None:
    for file in deployment.home.glob("ledger.db*"):
        file.unlink()


def restore(deployment: Deployment, backup: Path) -> None:
    delete_ledger(deployment)
    shutil.copy2(backup / "ledger.db", deployment.home / "ledger.db")
    for kept in (backup / "seeds", backup / "keys"):
        if kept.exists():
            shutil.rmtree(deployment.home / kept.name)
            shutil.copytree(kept, deployment.home / kept.name)


def findings(deployment: Deployment) -> dict[str, doctor_command.Check]:
    return {finding.name: finding for finding in doctor_command.ledger(deployment)}


@pytest.fixture
def used(registered: Deployment) -> Deployment:
    release(registered)
    return registered


@pytest.fixture
def older(registered: Deployment, tmp_path: Path) -> tuple[Deployment, ReleaseRecord]:
    release(registered)
    copied(registered, tmp_path / "backup")
    second = release(registered, "b" * 64)
    assert all(finding.ok for finding in findings(registered).values())
    restore(registered, tmp_path / "backup")
    return registered, second


def test_release_that_the_restored_ledger_lacks_is_refused_as_input(older):
    deployment, second = older
    for use in (
        lambda context: charged(context),
        lambda context: record_operator_use(context, NOTES),
    ):
        context = bench_of(deployment, "c" * 64)
        context.releases.append(second)
        with pytest.raises(BadInput, match=r"does not hold it.*Restore ledger and seeds"):
            use(context)
    assert len(Ledger.open(deployment.ledger).history("notes")) == 1


def test_doctor_reports_an_output_that_is_newer_than_the_ledger(older):
    deployment, second = older
    finding = findings(deployment)["releases in the store"]
    assert not finding.ok and finding.needed
    assert second.ledger_id in finding.found and "does not hold it" in finding.found


def test_doctor_reports_missing_outputs_and_seeds_of_settled_releases(used):
    used.open_store().clear("store://pretrain/aaaaaaaaaaaaaaaa")
    for file in used.seeds.glob("*.json"):
        file.unlink()
    reported = findings(used)
    assert reported["releases in the store"].ok
    assert "1 settled releases have no output" in reported["outputs of releases"].found
    seeds = reported["seeds of releases"]
    assert not seeds.ok and seeds.needed and "the seeds of 1 releases are missing" in seeds.found


def test_record_must_agree_with_its_settled_entry(registered):
    settled, ledger = release(registered), Ledger.open(registered.ledger)
    open_entry = charged(bench_of(registered, "d" * 64)).entry
    confirm_releases(ledger, [settled], "x")
    changes: list[tuple[dict[str, object], str]] = [
        ({"ledger_id": "0" * 32}, "does not hold it"),
        ({"ledger_id": open_entry.id}, "has not settled it: it is reserved"),
        ({"dataset": "letters"}, "another release"),
        ({"delta": 1e-9}, "another release"),
        ({"released": "00"}, "another digest"),
        ({"released": ""}, "another digest"),
    ]
    for change, words in changes:
        with pytest.raises(BadInput, match=words):
            confirm_releases(ledger, [settled.model_copy(update=change)], "x")


def test_emptied_ledger_is_refused_by_store_or_seeds(registered, tmp_path):
    release(registered)
    registered.seeds.rename(tmp_path / "seeds")
    for file in registered.home.glob("ledger.db*"):
        file.write_bytes(b"")
    # the store remembers the ledger
    with pytest.raises(BadInput, match="the privacy ledger is missing"):
        open_ledger(registered)
    (tmp_path / "seeds").rename(registered.seeds)
    shutil.rmtree(registered.home / "store")
    # the seeds remember the ledger
    with pytest.raises(BadInput, match="the privacy ledger is missing"):
        open_ledger(registered)


def test_ledger_with_a_garbled_page_is_refused_when_it_is_opened(used):
    file = used.home / "ledger.db"
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = db.execute("PRAGMA page_size").fetchone()[0]
        table = "SELECT rootpage FROM sqlite_schema WHERE name = 'entries'"
        page = db.execute(table).fetchone()[0]
    content = bytearray(file.read_bytes())
    content[(page - 1) * size + 8 : page * size] = b"\xa5" * (size - 8)
    file.write_bytes(content)
    with pytest.raises(LedgerDamaged, match="it is damaged") as caught:
        Ledger.open(used.ledger)
    assert "\n" not in str(caught.value)


def run(deployment: Deployment) -> list[StepResult]:
    steps = job_steps(JobSettings.model_validate(SMALL))
    return [contract.run_step(steps[task], deployment, CONTEXT) for task in TASKS]


def test_moved_home_reuses_its_outputs_without_a_charge(untracked, tmp_path):
    made = run(untracked)
    before = Ledger.open(untracked.ledger).history(MADE_UP)
    untracked.home.rename(tmp_path / "another place%2F")
    moved = Deployment.from_environment(
        {"CONFIDE_HOME": str(tmp_path / "another place%2F"), "CONFIDE_TRACKING": untracked.tracking}
    )
    for again, result in zip(run(moved), made, strict=True):
        if result.step == "budget":  # the budget step runs again in every run
            assert (again.outputs, again.facts) == (result.outputs, result.facts)
        else:
            assert again == result  # including the seconds of the first run
    after = Ledger.open(moved.ledger).history(MADE_UP)
    assert [(e.id, e.state) for e in after] == [(e.id, e.state) for e in before]
    assert not untracked.home.exists()
    for result in made:
        for uri in result.outputs.values():
            assert output_folder(moved, uri).is_relative_to(moved.home)
    assert str(untracked.home) not in "".join(result.model_dump_json() for result in made)


def test_finished_step_is_refused_if_the_ledger_lacks_its_release(untracked):
    run(untracked)
    with closing(sqlite3.connect(untracked.home / "ledger.db")) as db, db:
        db.execute("UPDATE entries SET state = 'reserved', released_hash = ''")
    with pytest.raises(BadInput, match="has not settled it"):
        run(untracked)


def test_deleted_ledger_is_not_replaced_by_a_new_budget(confide, used, at_home):
    delete_ledger(used)
    words = ("ledger", "register", "notes", "--unit", "patient", "--epsilon", "2", "--delta")
    code, _, err = confide(*words, "1e-5")
    assert code == 2
    assert "the privacy ledger is missing" in err and "Restore ledger and seeds" in err
    with pytest.raises(BadInput, match="ledger is missing"):
        release(used)
    finding = findings(used)["ledger's integrity"]
    assert not finding.ok and "ledger is missing" in finding.found


def test_store_remembers_the_ledger_of_uses_without_a_seed(deployment):
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    record_operator_use(bench_of(deployment), NOTES)
    delete_ledger(deployment)
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    with pytest.raises(BadInput, match="name the entries of another ledger"):
        record_operator_use(bench_of(deployment), NOTES)
    remembered = deployment.open_store().read(IDENTITY)
    assert remembered != Ledger.open(deployment.ledger).identity().encode()


def test_restored_backup_has_every_entry_seed_and_key(used, tmp_path):
    charged(bench_of(used, "d" * 64))  # begun and not settled
    before = Ledger.open(used.ledger).history("notes")
    key = content_key(used, "content-digest")
    (used.seeds / ".left.0123456789abcdef").write_text("{}")  # a file that is being written
    kept = copied(used, tmp_path / "backup")
    assert set(kept) == {"ledger", "seeds", "keys", "mlflow"}
    assert not list((tmp_path / "backup" / "seeds").glob(".*"))
    restore(used, tmp_path / "backup")
    assert content_key(used, "content-digest") == key  # unfinished work can continue
    release(used)  # the entry is found and accepted again
    assert open_ledger(used, used.open_store()).history("notes") == before
    assert all(finding.ok for finding in findings(used).values() if finding.needed)


def test_ledger_in_use_is_copied_consistently(used, tmp_path):
    with closing(sqlite3.connect(used.home / "ledger.db")) as busy, busy:
        busy.execute("BEGIN IMMEDIATE")
        busy.execute("UPDATE entries SET run = 'half-way'")
        copied(used, tmp_path / "backup")
        busy.rollback()
    copy = Ledger.open(f"sqlite:///{tmp_path}/backup/ledger.db")
    assert copy.history("notes") == Ledger.open(used.ledger).history("notes")


def test_backup_is_readable_by_its_owner_only_and_replaces_nothing(
    confide, used, at_home, tmp_path
):
    assert confide("backup", tmp_path / "backup")[0] == 0
    for file in (tmp_path / "backup", *(tmp_path / "backup").rglob("*")):
        assert file.stat().st_mode & 0o077 == 0, file.name
    assert "already" in confide.refused("backup", tmp_path / "backup")
    assert "is copied" in confide.refused("backup", used.seeds / "backup")


def test_backup_of_a_damaged_database_is_refused(used, tmp_path):
    (used.home / "mlflow.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfideError, match="not complete"):
        copied(used, tmp_path / "backup")


@pytest.mark.parametrize("damage", ["overwritten", "a row", "an entry is gone"])
def test_doctor_reports_a_broken_ledger_and_continues(confide, used, at_home, monkeypatch, damage):
    file = used.home / "ledger.db"
    if damage == "overwritten":
        delete_ledger(used)
        file.write_bytes(b"no database" * 1000)
    else:
        with closing(sqlite3.connect(file)) as db, db:
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


@pytest.mark.cases
def test_relative_path_is_refused(environment):
    (name,) = environment
    with pytest.raises(BadInput, match=f"{name}: a relative place"):
        Deployment.from_environment(environment)


def test_absolute_paths_and_urls_are_accepted():
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


@pytest.mark.parametrize("inside", [None, "", "ledger.db", "seeds", "messages", "specs"])
def test_new_or_accessible_home_is_closed_to_other_users(tmp_path, inside):
    home = tmp_path / "home"
    if inside is not None:
        home.mkdir(mode=0o755)
    if inside:
        (home / inside).touch()
    Deployment.from_environment({"CONFIDE_HOME": str(home)}).prepare()
    assert home.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "inside"), [(0o755, "thesis.tex"), (0o1777, "seeds")])
def test_folder_with_foreign_files_is_refused_as_home(tmp_path, mode, inside):
    home = tmp_path / "home"
    home.mkdir()
    (home / inside).touch()
    home.chmod(mode)
    with pytest.raises(BadInput, match=f"others can reach.*chmod 700 {home}"):
        Deployment.from_environment({"CONFIDE_HOME": str(home)}).prepare()
    assert home.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize(
    "place", ["127.0.0.1:1/ledger?password=hunter2", "u:hunter2@127.0.0.1:1/ledger"]
)
def test_password_in_a_url_is_not_printed(confide, at_home, monkeypatch, place):
    monkeypatch.setenv("CONFIDE_LEDGER", f"postgresql://{place}")
    monkeypatch.setattr(doctor_command, "LOOKS", (doctor_command.ledger,))
    monkeypatch.setenv("CONFIDE_DEBUG", "1")
    for words in (["doctor", "--json"], ["ledger", "--json"]):
        _, out, err = confide(*words)
        assert "127.0.0.1:1/ledger" in out + err
        assert "hunter2" not in out + err, words
