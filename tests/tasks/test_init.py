"""Tests of `confide init` and of the columns that are checked before a run begins."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from command_line import set_options

from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers, read_source
from dp_core.errors import BadInput
from tasks.commands.init_command import NoteSource

pytestmark = pytest.mark.usefixtures("at_home")

SECRET = "zyxsecret"  # represents the private text of a note
HEADER = ("PatNr", "DokNr", "Datum", "Befund")
MIMIC_IV = ("note_id", "subject_id", "hadm_id", "note_type", "charttime", "text")


def write(
    file: Path,
    header: tuple[str, ...] = HEADER,
    encoding: str = "utf-8",
    delimiter: str = ";",
    patients: int = 58,
) -> Path:
    """Write two notes of each patient."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "wt", encoding=encoding, newline="") as stream:
        table = csv.writer(stream, delimiter=delimiter)
        table.writerow(header)
        for n in range(2 * patients):
            text = f"{SECRET} Übelkeit;\nkein Fieber, {n}"
            cells = [n % patients if c in ("PatNr", "subject_id") else n for c in header[:-1]]
            table.writerow([*cells, text])
    return file


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "windows-1252"])
def test_init_proposes_columns_encoding_and_unit(confide, tmp_path, encoding):
    file = write(tmp_path / "Station 5.csv", encoding=encoding)
    out = tmp_path / "settings.json"
    words = ["--units", 1000] + ["--encoding", encoding] * (encoding == "windows-1252")
    answer = confide.json("init", file, *words, "--out", out)
    columns = "text:Befund,patient:PatNr,document:DokNr,date:Datum"
    assert (
        json.loads(out.read_text())
        == answer["settings"]
        == {
            "private_format": "csv",
            "private_path": str(file),
            "private_columns": columns + ",encoding:windows-1252" * (encoding == "windows-1252"),
            "private_dataset": "station-5",
            "unit": "patient",
            "declared_units": 1000,
        }
    )
    assert (answer["found"]["notes"], answer["found"]["patients"]) == (116, 58)
    code, shown, err = confide("init", file, *words, "--out", out)
    assert (code, err) == (0, "")
    assert SECRET not in shown
    assert "confide ledger register station-5 --unit patient" in shown
    assert confide.json("ledger") == {}


def test_settings_and_commands_are_the_same_for_every_number_of_patients(confide, tmp_path):
    out, public = tmp_path / "s.json", set()
    for patients in (*range(10, 102), 149, 150, 151, 999, 1000):
        file = write(tmp_path / "ward.csv", patients=patients)
        answer = confide.json("init", file, "--units", 1000, "--out", out)
        assert answer["found"]["patients"] == patients
        public.add((out.read_text(), *answer["next"]))
    assert len(public) == 1


def test_init_knows_the_notes_of_mimic_iv(confide, tmp_path):
    file = write(tmp_path / "discharge.csv.gz", MIMIC_IV, delimiter=",")
    settings = confide.json("init", file, "--units", 58, "--out", tmp_path / "s.json")["settings"]
    assert settings["private_columns"] == (
        "text:text,patient:subject_id,document:note_id,admission:hadm_id,date:charttime"
    )
    assert (settings["private_dataset"], settings["unit"]) == ("discharge", "patient")


def test_init_takes_a_folder_of_texts_for_documents_or_patients(confide, tmp_path):
    for folder in ("flat", "patients"):
        for n in range(24):
            file = tmp_path / folder / ("" if folder == "flat" else f"p{n % 12}") / f"{n}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(SECRET)
    out = tmp_path / "s.json"
    for folder, unit in (("flat", "document"), ("patients", "patient")):
        shown = confide("init", tmp_path / folder, "--units", 24, "--out", out)[1]
        assert (
            json.loads(out.read_text()).items() >= {"private_format": "text", "unit": unit}.items()
        )
        assert ("No column or folder names patients" in shown) == (unit == "document")
    (tmp_path / "patients" / "a.txt").write_text(SECRET)
    assert "only some notes name" in confide.refused("init", tmp_path / "patients", "--out", out)


@pytest.mark.cases
def test_init_refuses_what_it_cannot_decide_and_names_the_option(
    confide, tmp_path, header, options, words
):
    out = tmp_path / "s.json"
    line = confide.refused("init", write(tmp_path / "ward.csv", header), "--out", out, *options)
    assert all(word in line for word in words), line
    assert SECRET not in line and not out.exists()


TABLE = [b"PatNr;Text", *(b"%d;Tag %d: \xc3\x9cbelkeit" % (n // 2, n) for n in range(24))]
OBJECTS = [b'{"PatNr": %d, "note_id": %d, "text": "Tag %d"}' % (n // 2, n, n) for n in range(24)]


@pytest.mark.cases
def test_one_row_changes_neither_the_settings_nor_the_other_notes(tmp_path, suffix, row):
    file, lines = tmp_path / f"n{suffix}", {".csv": TABLE, ".jsonl": OBJECTS}[suffix]
    read = []
    added = row.encode("latin-1")
    for more in (lines, [*lines, added], [*lines[:1], added, *lines[1:]]):
        file.write_bytes(b"\n".join(more))
        source = NoteSource.of(file, {})
        readers = corpus_readers(source.settings["private_columns"])
        notes = read_source(readers, source.format, file, Quarantine())
        others = [note for note in notes if note.text.startswith("Tag")]
        read.append((source.settings, [*source.units], others))
    assert read[0] == read[1] == read[2] and len(others) == 24


@pytest.mark.cases
def test_unreadable_file_is_refused_with_its_own_remedy(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content.encode("utf-16" if "UTF-16" in words else "latin-1"))
    with pytest.raises(BadInput, match=words) as refused:
        NoteSource.of(tmp_path / name, {})
    assert "--text" not in str(refused.value)


def test_a_wrong_column_is_refused_before_anything_is_reserved(confide, tmp_path):
    confide.register()
    before = confide.json("ledger", "history", "notes")
    for header, columns, what in (
        (HEADER, "text:Note,patient:PatNr", "a header lacks Note. Its columns: PatNr, DokNr,"),
        (("Bett", "Befund"), "", "no column of patients is named"),
    ):
        settings = set_options(
            private_format="csv", private_path=write(tmp_path / "ward.csv", header),
            private_dataset="notes", private_columns=columns,
        )  # fmt: skip
        line = confide.refused("run", *settings)
        assert line.startswith("confide: private_columns: ") and what in line, line
        assert confide.json("ledger", "history", "notes") == before


def test_written_settings_replace_no_other_file(confide, tmp_path):
    notes, out = write(tmp_path / "notes.csv"), tmp_path / "settings.json"
    for words in (["init", notes, "--out"], ["advise", "--epsilon", 8, "--write"]):
        assert "it holds no settings" in confide.refused(*words, notes, "--units", 100)
    assert SECRET in notes.read_text()
    out.touch()
    confide.json("init", notes, "--units", 100, "--out", out)
    (tmp_path / "earlier.json").hardlink_to(out)
    confide.json("init", notes, "--units", 200, "--out", out)
    # the earlier file is never cut off, so a full disk leaves it whole
    assert json.loads((tmp_path / "earlier.json").read_text())["declared_units"] == 100
