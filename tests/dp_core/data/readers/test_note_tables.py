import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.csv import write_csv
from reader_contract import NAME, SECRET, BadItem, ReaderContract, read_corpus, read_format

from dp_core.data.corpus import Document
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import LONGEST
from dp_core.errors import BadInput, PrivateTextRefusal

HEADER = '"ROW_ID","SUBJECT_ID","HADM_ID","CATEGORY","ISERROR","TEXT"'
PLAIN = HEADER.replace('"', "")


class TestNoteevents(ReaderContract):
    FORMAT, SUFFIX, GOOD = "noteevents", ".csv", "SUBJECT_ID,TEXT\n1,good\n"
    MANY = "ROW_ID,SUBJECT_ID,HADM_ID,ISERROR,TEXT\n" + "".join(
        f'{i},{i % 5},1,,"{SECRET} note ""{i}""\nline"\n' for i in range(30)
    )
    BAD_ITEMS = tuple(
        BadItem(
            {"N.csv": HEADER.encode() + b'\n1,10,1,"c",,"x"\n' + row + b'\n1,10,1,"c",,"x"\n'},
            reason,
            "N.csv:3",
            2,
        )
        for row, reason in (
            (b'2,10,1,"c",,"' + b"zyxsecret " * 900_000 + b'"', Reason.TOO_LONG),  # 9 MB
            (b'2,10,1,"c",," \n "', Reason.EMPTY),
            (b'2,,1,"c",,"zyxsecret"', Reason.NO_PATIENT),
            (b'2,10,1,"c",,"zyxsecret \xff"', Reason.ENCODING),
        )
    )


def read(file: Path) -> tuple[list[Document], Quarantine]:
    return read_format("noteevents", file)


def write(folder: Path, text: str | bytes, name: str = "NOTEEVENTS.csv") -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def test_multi_line_text_doubled_quotes_and_errors_left_out(tmp_path):
    rows = [
        HEADER,
        '1,10,100,"Physician ",,"Line one\r\nsaid ""ok"", bye\n\nend"',
        '2,10,,"Echo",1,"wrong patient"',
        '3,11.0,101.0,"Echo",0,"x"',
    ]
    docs, q = read(write(tmp_path, "\n".join(rows)))
    assert docs == [
        Document("1", "10", 'Line one\nsaid "ok", bye\n\nend', "100"),
        Document("3", "11", "x", "101"),
    ]
    assert (q.left_out, q.rejected) == (1, 0)


@pytest.mark.parametrize("header", [HEADER.lower(), PLAIN.lower(), "\ufeff" + PLAIN.title()])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_case_of_the_header(tmp_path, header, end):
    file = write(tmp_path, end.join([header, '1,10,100,"c",,"x"', ""]))
    assert read(file)[0] == [Document("1", "10", "x", "100")]


BROKEN = json.loads((Path(__file__).parent / "broken_rows.json").read_text())


@pytest.mark.parametrize(
    "row",
    [*BROKEN, '2,10,1,"c",,"' + "secretword\n" * 2_000_000 + '"'],  # the last has 22 MB
    ids=range(12),
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_broken_quoting_refuses_the_source(tmp_path, row, end):
    """After a misplaced quote, a line of a note could be mistaken for a row."""
    good = [f'{i},10,1,"c",,"x"' for i in range(60)]
    text = end.join([HEADER, *good, row, *good, ""])
    q = Quarantine()
    with pytest.raises(BadInput, match="broken quoting") as caught:
        list(read_corpus("noteevents", write(tmp_path, text), q))
    assert "secretword" not in str(caught.value)
    assert q.counts == {Reason.WRONG_COLUMNS: 1}
    line = 63 if "Pt stable" in row else 62  # the first line is a whole row
    assert q.locations[Reason.WRONG_COLUMNS] == [f"NOTEEVENTS.csv:{line}"]


def test_two_columns_of_one_name_are_refused(tmp_path):
    with pytest.raises(BadInput, match="several columns could hold the patient"):
        read(write(tmp_path, "SUBJECT_ID,subject_id,TEXT\n1,2,x\n"))


NOTES = (
    "ROW_ID,SUBJECT_ID,HADM_ID,ISERROR,TEXT\r\n"
    '1,10,,,"Said ""ok"",\r\nPt stable, on air, 2, 3"\r\n'
    "2,11,5,0,plain\r\n"
    '3,12,,,"x, y\nPt stable,Pt stable,1,,again\n"\r\n'
)


def letters(document: Document) -> str:
    return "".join(re.findall(r"\w", document.text))


@pytest.mark.parametrize("mark", ['"', '""', '"\n', ',"', '",', '"\r\n"'])
def test_a_quote_anywhere_makes_no_patient_and_moves_no_text(tmp_path, mark):
    """A mark at any position is refused, or adds no patient and moves no word to another one."""
    true = {d.patient_id: letters(d) for d in read(write(tmp_path, NOTES))[0]}
    assert set(true) == {"10", "11", "12"}
    refused = 0
    for position in range(len(NOTES) + 1):
        file = write(tmp_path, NOTES[:position] + mark + NOTES[position:])
        try:
            docs, _ = read(file)
        except BadInput:
            refused += 1
            continue
        assert mark != '"', position  # an odd number of quotes is always invalid
        for d in docs:
            assert letters(d) in true.get(d.patient_id, ""), position
    assert refused > len(NOTES) // 3


def test_a_file_without_its_columns_is_not_named(tmp_path):
    (tmp_path / f"{NAME}.csv").write_text("a,b\n1,2\n")
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="a header lacks TEXT and SUBJECT_ID") as refusal:
        list(read_corpus("noteevents", tmp_path, quarantine))
    assert NAME not in str(refusal.value)
    assert quarantine.locations[Reason.WRONG_COLUMNS] == [f"{NAME}.csv"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_every_output_of_a_csv_writer_is_read(tmp_path_factory, texts):
    texts = ["x" + t.encode("utf-8", "replace").decode().replace("\r", " ") for t in texts]
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["ROW_ID", "SUBJECT_ID", "TEXT"])
    writer.writerows([i, "p", t] for i, t in enumerate(texts))
    file = write(tmp_path_factory.mktemp("n"), out.getvalue())
    docs, _ = read(file)
    assert [d.text for d in docs] == texts


ROW = {"text": "Line one.\r\nLine two.", "document_id": "d1", "patient_id": 7, "admission_id": "a"}
GOOD = json.dumps(ROW).encode()


class TestJsonl(ReaderContract):
    FORMAT, SUFFIX, GOOD = "jsonl", ".jsonl", '{"text": "good"}'
    MANY = "".join(
        json.dumps({"text": f"{SECRET} note {i}\nline", "patient_id": i % 5}) + "\n"
        for i in range(30)
    )
    BAD_ITEMS = tuple(
        BadItem({"n.jsonl": GOOD + b"\n" + line + b"\n" + GOOD + b"\n"}, reason, "n.jsonl:2", 2)
        for line, reason in (
            (b'{"text": "zyxsecret"', Reason.NOT_JSON),
            (b'["zyxsecret"]', Reason.NOT_JSON),
            (b"[" * 100_000, Reason.NOT_JSON),
            (b'{"text": 5}', Reason.WRONG_FIELD),
            (b'{"remark": "zyxsecret"}', Reason.WRONG_FIELD),
            (b'{"text": "zyxsecret", "patient_id": true}', Reason.WRONG_FIELD),
            (b'{"text": "zyxsecret", "patient_id": {"a": 1}}', Reason.WRONG_FIELD),
            (b'{"text": " \\n"}', Reason.EMPTY),
            (b'{"text": "zyxsecret \xff"}', Reason.ENCODING),
            (b'{"text": "zyxsecret \\ud800"}', Reason.ENCODING),
            (b'{"text": "' + b"zyxsecret " * (LONGEST // 10) + b'"}', Reason.TOO_LONG),
        )
    )


def test_ids_line_ends_and_blank_lines(tmp_path):
    text = "\ufeff" + json.dumps(ROW) + "\r\n\n" + json.dumps({"text": "x"}) + "\n"
    (tmp_path / "notes.jsonl").write_bytes(text.encode())
    documents, _ = read_format("jsonl", tmp_path)
    expected = Document("d1", "7", "Line one.\nLine two.", "a")
    assert documents == [expected, Document("", "", "x")]


# --- columns of any table

WARD = 'PatNr;DocId;Datum;Befund\n7;1;03.01.2024;Fieber\n7;1;04.01.2024;"kein; Fieber"\n'
NOTES_OF_WARD = [Document("1", "7", "Fieber"), Document("1", "7", "kein; Fieber")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_common_columns_and_the_delimiter_are_recognised_by_the_header(tmp_path, delimiter):
    rows = csv.reader(io.StringIO(WARD), delimiter=";")
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(rows)
    file = write(
        tmp_path, "\ufeff" + out.getvalue(), "ward.tsv" if delimiter == "\t" else "ward.csv"
    )
    assert read_format("csv", file)[0] == NOTES_OF_WARD


def test_a_date_is_part_of_the_name_of_a_document(tmp_path):
    file = write(tmp_path, WARD + "7;;04.01.2024;x\n", "ward.csv")
    both = "text:Befund,patient:PatNr,document:DocId,date:Datum"
    documents, _ = read_format("csv", file, columns=both)
    assert [d.document_id for d in documents] == ["03.01.2024 1", "04.01.2024 1", ""]
    numbered, dates = WARD.replace("DocId", "Nummer"), ["03.01.2024", "04.01.2024"]
    nameless = numbered.replace("PatNr", "Bett")  # two patients may share a date
    for text, names in ((numbered, dates), (nameless, ["", ""])):
        documents, _ = read_format("csv", write(tmp_path, text, "ward.csv"), columns="date:datum")
        assert [d.document_id for d in documents] == names


def test_an_encoding_is_a_setting_and_never_guessed_from_the_rows(tmp_path):
    rows = "PatNr;Text\n1;Übelkeit\n2;Fieber\n"
    file = write(tmp_path, rows.encode("windows-1252"), "ward.csv")
    documents, quarantine = read_format("csv", file)
    assert ([d.text for d in documents], quarantine.counts) == (["Fieber"], {Reason.ENCODING: 1})
    documents, _ = read_format("csv", file, columns="encoding:windows-1252")
    assert [d.text for d in documents] == ["Übelkeit", "Fieber"]
    for encoding, what in (("windows-1252", "not UTF-8"), ("utf-16", "UTF-16")):
        file = write(tmp_path, "Überschrift;Text\n1;x\n".encode(encoding), "ward.csv")
        with pytest.raises(BadInput, match=f"a header is {what}"):
            read_format("csv", file)


@pytest.mark.cases
def test_a_missing_column_lists_the_columns_unless_they_may_be_a_text(
    tmp_path, header, columns, what, shown
):
    file = write(tmp_path, f"{header}\n1,{SECRET}\n", "ward.csv")
    with pytest.raises(BadInput, match=what) as refusal:
        read_format("csv", file, columns=columns)
    assert (header.replace(",", ", ") in str(refusal.value)) is shown
    assert ("may have no header" in str(refusal.value)) is not shown
    assert SECRET not in str(refusal.value)


def test_the_own_names_of_columns_win_over_other_common_names(tmp_path):
    file = write(tmp_path, "note,Text,subject_id,patient_id\na,b,1,2\n", "ward.csv")
    assert read_format("csv", file)[0] == [Document("", "2", "b")]


def test_keys_of_one_object_say_nothing_about_another(tmp_path):
    lines = (
        '{"note": "a", "PatNr": 1}\n{"befund": "b", "note_id": 2}\n{"note": "c", "brief": "d"}\n'
    )
    documents, quarantine = read_format("jsonl", write(tmp_path, lines, "n.jsonl"))
    assert documents == [Document("", "1", "a"), Document("2", "", "b")]
    assert quarantine.counts == {Reason.WRONG_FIELD: 1}


NAMED = {"text": "Befund", "patient": "PatNr", "document": "Nummer", "admission": "Fall"}
WHOLE = dict(zip(NAMED.values(), "x123", strict=True)) | {"mrn": "m", "doc_id": "d", "note": "y"}


def table(format: str, rows: Sequence[Mapping[str, str]]) -> bytes:
    """Return a file of a format; its first row has all columns."""
    if format == "jsonl":
        return "\n".join(map(json.dumps, rows)).encode()
    out = io.BytesIO()
    write_csv(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue() if format == "csv" else parquet(rows)


@pytest.mark.parametrize("format", ["csv", "parquet", "jsonl"])
@settings(max_examples=16, deadline=None)
@given(st.sets(st.sampled_from([*NAMED])))
def test_a_named_column_is_never_replaced_by_another(tmp_path_factory, format, lacks):
    columns = ",".join(f"{role}:{column}" for role, column in NAMED.items())
    other = {k: v for k, v in WHOLE.items() if k not in [NAMED[role] for role in lacks]}
    file = tmp_path_factory.mktemp("n") / f"n.{format}"
    file.write_bytes(table(format, [WHOLE, other]))
    documents, _ = read_format(format, file, columns=columns)
    text, *ids = ("" if role in lacks else WHOLE[column] for role, column in NAMED.items())
    is_kept = text and ids[0]
    wanted = [["x", "1", "2", "3"], [text, *ids]][: 2 if is_kept else 1]
    assert [[d.text, d.patient_id, d.document_id, d.admission_id] for d in documents] == wanted
    if lacks and format != "jsonl":
        file.write_bytes(table(format, [other]))
        with pytest.raises(BadInput, match="a header lacks"):
            read_format(format, file, columns=columns)


@pytest.mark.parametrize("format", ["csv", "parquet", "jsonl"])
def test_ids_of_all_files_have_one_name(tmp_path, format):
    for name in ("mrn", "MRN", "patient_id"):
        (tmp_path / f"{name}.{format}").write_bytes(table(format, [{"text": "a", name: "1"}]))
    with pytest.raises(PrivateTextRefusal, match="patient under several names: MRN, patient_id"):
        read_format(format, tmp_path)


def test_ids_of_objects_have_one_key(tmp_path):
    both, one = '{"text": "a", "patient_id": 5, "mrn": 1}\n', '{"text": "b", "mrn": 2}\n'
    for lines in (both + one, one + both, one + one + both):
        file = write(tmp_path, lines, "n.jsonl")
        with pytest.raises(PrivateTextRefusal, match="patient under several names"):
            read_format("jsonl", file)
        documents, _ = read_format("jsonl", file, columns="patient:MRN")
        assert {d.patient_id for d in documents} == {"1", "2"}


def test_a_row_without_a_patient_is_rejected_where_a_column_names_patients(tmp_path):
    documents, quarantine = read_format(
        "csv", write(tmp_path, "PatNr,Text\n,a\n1,b\nnan,c\n", "n.csv")
    )
    assert (len(documents), quarantine.counts) == (1, {Reason.NO_PATIENT: 2})
    lines = '{"Text": "a"}\n{"Text": "b", "PatNr": " "}\n{"Text": "c", "PatNr": 1}\n'
    file = write(tmp_path, lines, "n.jsonl")
    for columns, rejected in (("", 1), ("patient:patnr", 2)):
        documents, quarantine = read_format("jsonl", file, columns=columns)
        assert (len(documents), quarantine.counts) == (3 - rejected, {Reason.NO_PATIENT: rejected})


def parquet(rows: Sequence[Mapping[str, Any]], **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), out, **options)
    return out.getvalue()


class TestParquet(ReaderContract):
    FORMAT, SUFFIX, GOOD = "parquet", ".parquet", parquet([{"text": "good"}])
    MANY = parquet(
        [{"text": f"{SECRET} note {i}\nline", "patient_id": f"{i % 5}"} for i in range(30)]
    )
    BAD_ITEMS = tuple(
        BadItem(
            {"n.parquet": parquet([{"text": "x", "patient_id": "1"}, row])},
            reason,
            "n.parquet:2",
            1,
        )
        for row, reason in (
            ({"text": " ", "patient_id": "1"}, Reason.EMPTY),
            ({"text": None, "patient_id": "1"}, Reason.WRONG_FIELD),
            ({"text": SECRET, "patient_id": None}, Reason.NO_PATIENT),
            ({"text": SECRET * (LONGEST // 8), "patient_id": "1"}, Reason.TOO_LONG),
        )
    )

    def write(self, folder: Path, name: str, content: str | bytes, packing: str = "") -> Path:
        """Write a file; in place of blank text, a table without rows."""
        whole = parquet([]) if isinstance(content, str) else content
        return super().write(folder, name, whole, packing)


def test_parquet_has_ids_as_numbers_and_dates_in_iso_8601(tmp_path):
    row = {"SUBJECT_ID": 7.0, "ROW_ID": 3, "Datum": date(2024, 1, 3), "TEXT": "a\r\nb"}
    (tmp_path / "n.parquet").write_bytes(parquet([row] * 600, row_group_size=100))
    columns = "text:TEXT,patient:SUBJECT_ID,document:ROW_ID,date:Datum"
    documents, _ = read_format("parquet", tmp_path, columns=columns)
    assert documents == [Document("2024-01-03 3", "7", "a\nb")] * 600


def test_a_small_parquet_file_cannot_become_a_huge_one(tmp_path):
    (tmp_path / "n.parquet").write_bytes(
        parquet([{"text": "x" * 7_000_000 + str(i)} for i in range(4)], compression="zstd")
    )
    with pytest.raises(BadInput, match="unpacks to far more than text does"):
        read_format("parquet", tmp_path)
