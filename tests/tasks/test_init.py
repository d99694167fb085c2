"""Tests of `confide init` and of the columns that are checked before a run begins."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from command_line import set_options

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
    answer = confide.json("init", file, "--units", 1000, "--out", out)
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
    code, shown, err = confide("init", file, "--units", 1000, "--out", out)
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
    words = ["init", file, "--units", 58, "--out", tmp_path / "s.json"]
    settings = confide.json(*words)["settings"]
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
        answer = confide.json("init", tmp_path / folder, "--units", 24, "--out", out)
        assert (answer["found"]["format"], answer["settings"]["unit"]) == ("text", unit)


@pytest.mark.parametrize(
    ("header", "options", "words"),
    [
        (("PatNr", "Verlauf"), [], ["a column of text", "--text COLUMN", "PatNr, Verlauf"]),
        (("PatNr", "Notiz", "Befund"), [], ["hold the text: Notiz, Befund", "--text COLUMN"]),
        (("PatNr", "MRN", "Befund"), [], ["hold the patient: PatNr, MRN", "--patient COLUMN"]),
        (HEADER, ["--patient", "Pat"], ["a header lacks Pat", "PatNr, DokNr"]),
        (("7", SECRET), [], ["may have no header"]),
        (HEADER, [], ["it has 58 patients", "Give --units N"]),
        (HEADER, ["--units", 57], ["more units than the declared bound of 57"]),
    ],
)  # fmt: skip
def test_init_refuses_what_it_cannot_decide_and_names_the_option(
    confide, tmp_path, header, options, words
):
    out = tmp_path / "s.json"
    line = confide.refused("init", write(tmp_path / "ward.csv", header), "--out", out, *options)
    assert all(word in line for word in words), line
    assert SECRET not in line and not out.exists()


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
