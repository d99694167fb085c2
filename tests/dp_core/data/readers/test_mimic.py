from __future__ import annotations

import csv
import gzip
import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_contract import NAME, SECRET, BadItem, ReaderContract
from reader_contract import read as read_format

from dp_core.data.corpus import Document
from dp_core.data.readers.mimic import Diagnoses
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import read_corpus
from dp_core.errors import BadInput

HEADER = '"ROW_ID","SUBJECT_ID","HADM_ID","CATEGORY","ISERROR","TEXT"'


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


def test_multi_line_text_doubled_quotes_and_errors_left_out(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "header",
    [
        "row_id,subject_id,hadm_id,category,iserror,text",
        "\ufeffRow_Id,Subject_Id,Hadm_Id,Category,IsError,Text",
        '"row_id", "subject_id", "hadm_id","category","iserror","text"'.replace(", ", ","),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_any_case_of_the_header(tmp_path: Path, header: str, end: str) -> None:
    file = write(tmp_path, end.join([header, '1,10,100,"c",,"x"', ""]))
    assert read(file)[0] == [Document("1", "10", "x", "100")]


def test_columns_in_another_order_and_ids_missing(tmp_path: Path) -> None:
    docs, _ = read(write(tmp_path, 'TEXT,SUBJECT_ID\n"a\nb",7\nc,8\n'))
    assert docs == [Document("", "7", "a\nb"), Document("", "8", "c")]


@pytest.mark.parametrize(
    "row",
    [
        '2,10,1,"c",,"secretword",extra',
        '2,10,1,"c"',
        '2,10,1,"c",,"secretword" oops',
        '2,10,1,"c",,"said "secretword" twice"',
        '2,10,1,"c",,"secretword',
        '2,10,1,"c",,secretword"',
        '2,1"0,1,"c",,"secretword"',
        '2, "10",1,"c",,"secretword"',
        '2,"10\n",1,"c",,"secretword"',
        '2,10,1,"c",,secret\rword',
        '2,10,1,"c",,secretword\nPt stable, on room air',
        '2,10,1,"c",,"' + "secretword\n" * 2_000_000 + '"',  # 22 MB
    ],
    ids=range(12),
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_broken_quoting_refuses_the_source(tmp_path: Path, row: str, end: str) -> None:
    """After a misplaced quote, a line of a note could be mistaken for a row."""
    good = [f'{i},10,1,"c",,"x"' for i in range(60)]
    text = end.join([HEADER, *good, row, *good, ""])
    q = Quarantine()
    with pytest.raises(BadInput, match="broken quoting") as caught:
        list(read_corpus("noteevents", write(tmp_path, text), q))
    assert "secretword" not in str(caught.value)
    assert q.counts == {Reason.WRONG_COLUMNS: 1}
    at = 63 if "Pt stable" in row else 62  # the first line is a whole row
    assert q.locations[Reason.WRONG_COLUMNS] == [f"NOTEEVENTS.csv:{at}"]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="broken quoting"):
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
def test_a_quote_anywhere_makes_no_patient_and_moves_no_text(tmp_path: Path, mark: str) -> None:
    """A mark at any position is refused, or adds no patient and moves no word to another one."""
    true = {d.patient_id: letters(d) for d in read(write(tmp_path, NOTES))[0]}
    assert set(true) == {"10", "11", "12"}
    refused = 0
    for at in range(len(NOTES) + 1):
        file = write(tmp_path, NOTES[:at] + mark + NOTES[at:])
        try:
            docs, _ = read(file)
        except BadInput:
            refused += 1
            continue
        assert mark != '"', at  # an odd number of quotes is always invalid
        for d in docs:
            assert letters(d) in true.get(d.patient_id, ""), at
    assert refused > len(NOTES) // 3


def test_a_file_without_its_columns_is_not_named(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.csv").write_text("a,b\n1,2\n")
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="a header lacks SUBJECT_ID and TEXT") as refusal:
        list(read_corpus("noteevents", tmp_path, quarantine))
    assert NAME not in str(refusal.value)
    assert quarantine.locations[Reason.WRONG_COLUMNS] == [f"{NAME}.csv"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_every_output_of_a_csv_writer_is_read(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    texts = ["x" + t.encode("utf-8", "replace").decode().replace("\r", " ") for t in texts]
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(["ROW_ID", "SUBJECT_ID", "TEXT"])
    writer.writerows([i, "p", t] for i, t in enumerate(texts))
    file = write(tmp_path_factory.mktemp("n"), out.getvalue())
    docs, _ = read(file)
    assert [d.text for d in docs] == texts


TABLE = """"ROW_ID","SUBJECT_ID","HADM_ID","SEQ_NUM","ICD9_CODE"
1,109,172335,1,"40301"
2,109,172335.0,2,"486"
3,109,173633,1,"58281"
4,7.0,200001,1,"486"
5,8,200002,,
"""


def read_codes(folder: Path, text: str | bytes, name: str = "DIAGNOSES_ICD.csv") -> Diagnoses:
    return Diagnoses(write(folder, text, name), where="membership_codes")


def of(patient: str, admission: str = "") -> Document:
    return Document("d", patient, "text", admission)


@pytest.mark.parametrize("packed", [False, True])
def test_codes_are_looked_up_by_patient_or_by_admission(tmp_path: Path, packed: bool) -> None:
    content = TABLE.encode()
    name = "D.csv.gz" if packed else "D.csv"
    table = read_codes(tmp_path, gzip.compress(content) if packed else content, name)
    assert table.of_patient(of("109")) == {"40301", "486", "58281"}
    assert table.of_admission(of("109", "172335")) == {"40301", "486"}
    assert table.of_admission(of("109", "173633.0")) == {"58281"}
    assert table.of_admission(of("109")) == table.of_patient(of("109"))
    assert table.of_admission(of("7", "172335")) == frozenset()  # another patient's admission
    assert table.of_patient(of("7")) == {"486"}
    assert table.of_patient(of("8")) == table.of_patient(of("9")) == frozenset()  # no code


def test_equal_codes_of_two_icd_versions_are_distinct(tmp_path: Path) -> None:
    table = read_codes(tmp_path, "subject_id,hadm_id,icd_code,icd_version\n1,2,V10,9\n1,2,V10,10\n")
    assert table.of_patient(of("1")) == {"9:V10", "10:V10"}


def test_unreadable_items_are_counted_by_reason(tmp_path: Path) -> None:
    file = tmp_path / "D.csv"
    broken = '6,,3,1,"1"\n7,8\n8,9,3,1,"un"closed\n9,1,3,1,"2"\n'
    file.write_text(TABLE + broken + TABLE.split("\n", 1)[1] * 9)
    quarantine = Quarantine()
    Diagnoses(file, quarantine)
    assert quarantine.counts == {Reason.NO_PATIENT: 1, Reason.WRONG_COLUMNS: 2}
    assert (quarantine.taken, quarantine.left_out) == (41, 10)


@pytest.mark.parametrize(
    "text",
    [
        "", "SUBJECT_ID,HADM_ID\nzyxsecret,2\n", "HADM_ID,ICD9_CODE\nzyxsecret,2\n",
        "SUBJECT_ID,ICD9_CODE,ICD_CODE\nzyxsecret,1,2\n",
        "SUBJECT_ID,SUBJECT_ID,ICD9_CODE\nzyxsecret,1,2\n",
        "SUBJECT_ID,ICD9_CODE\nzyxsecret\nzyxsecret,2\n",
    ],
)  # fmt: skip
def test_a_table_with_other_columns_is_refused_without_quoting_it(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(BadInput) as refused:
        read_codes(tmp_path, text)
    assert "membership_codes" in str(refused.value) and "zyxsecret" not in str(refused.value)
