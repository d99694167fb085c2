"""A person with a table of notes gets from `confide init` to an exported private model.

A Parquet file gives the same corpus as a CSV file, and therefore the same job.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers, read_source
from dp_core.models import hugging_face
from tasks.demo_data.notes import notes
from tasks.protocol.settings import JobSettings

pytestmark = pytest.mark.slow

HEADER = ("PatNr", "DokNr", "Datum", "Befundtext")
PATIENTS = 50  # who write about 120 notes
TINY = {  # the smallest model
    "vocabulary_size": 300, "layers": 1, "hidden": 64, "sequence_length": 16, "epochs": 1,
    "public_steps": 2, "public_batch_size": 8, "device": "cpu",
}  # fmt: skip


def rows() -> list[tuple[str, ...]]:
    return [
        (note.patient_id, str(number), f"{number % 28 + 1:02}.03.2024", f"Übergabe. {note.text}")
        for number, note in enumerate(notes(PATIENTS, seed=5))
    ]


def write_csv(folder: Path) -> Path:
    file = folder / "Station 5.csv"
    with file.open("w", encoding="utf-8-sig", newline="") as stream:
        table = csv.writer(stream, delimiter=";")
        table.writerows([HEADER, *rows()])
    return file


def write_parquet(folder: Path) -> Path:
    columns = dict(zip(HEADER, zip(*rows(), strict=True), strict=True))
    pq.write_table(pa.table(columns), folder / "ward.parquet")
    return folder / "ward.parquet"


class Person:
    """A user of the command line, with a folder for settings and the deployment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {"CONFIDE_HOME": str(folder / "home")}

    def confide(self, *words: object, code: int = 0) -> str:
        """Return the output of a command, or the line on standard error of a refused one."""
        done = subprocess.run(
            [sys.executable, "-m", "tasks.cli", *map(str, words)],
            cwd=Path(__file__).parents[2],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def init(self, file: Path) -> list[list[str]]:
        """Write settings for a table; return the words of the suggested commands."""
        words = ("--units", 60, "--out", self.folder / "settings.json")
        return commands(self.confide("init", file, *words))


def commands(shown: str) -> list[list[str]]:
    """Return the words of the commands at the end of an output."""
    return [line.split()[1:] for line in shown.splitlines() if line.startswith("  confide")]


def test_a_table_of_notes_becomes_an_exported_private_model(tmp_path):
    person = Person(tmp_path)
    confide = person.confide
    sizes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    advise, _, _ = person.init(write_csv(tmp_path))
    register, run = commands(confide(*advise, *sizes))
    confide(*register)
    before = confide("ledger", "--json")

    line = confide(*run, "--set", "private_columns=text:Befundtext,patient:Patient", code=2)
    assert "a header lacks Patient" in line and ", ".join(HEADER) in line
    assert confide("ledger", "--json") == before

    confide(*run)
    confide("export", tmp_path / "model")
    assert hugging_face.load(tmp_path / "model").config.hidden == TINY["hidden"]
    statement = (tmp_path / "model" / "PRIVACY.md").read_text()
    (budget,) = json.loads(confide("ledger", "--json")).values()
    assert budget["history"] and f"ε = {budget['epsilon']:g}" in statement


def test_settings_for_a_parquet_table_read_the_same_documents(tmp_path):
    """`confide init` suggests the same commands for both formats."""
    person, made = Person(tmp_path), []
    for write in (write_csv, write_parquet):
        suggested = [words[0] for words in person.init(write(tmp_path))]
        s = JobSettings.model_validate_json((tmp_path / "settings.json").read_bytes())
        readers = corpus_readers(s.private_columns)
        documents = read_source(readers, s.private_format, Path(s.private_path), Quarantine())
        columns = "private_columns=text:Befundtext,patient:Patient"
        settings = ("--settings", tmp_path / "settings.json")
        line = person.confide("run", *settings, "--set", columns, code=2)
        assert "a header lacks Patient" in line and ", ".join(HEADER) in line
        made.append((suggested, s.unit, s.declared_units, list(documents)))
    assert made[0] == made[1]
    assert len(made[0][-1]) == len(rows())
