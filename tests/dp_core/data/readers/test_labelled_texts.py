import json
from pathlib import Path

import pytest
from reader_contract import SECRET, BadItem, ReaderContract, read_labelled_texts

from dp_core.data.labelled_text import LabelledText, Sentence
from dp_core.data.readers.labelled_texts import read_patients, with_patients
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput, PrivateTextRefusal

HEADER = "text\tlabel\n"


class TestTsv(ReaderContract):
    FORMAT, SUFFIX, GOOD = "tsv", ".tsv", HEADER + "good\tyes\n"
    MANY = "doc_id\tlabel\ttext\n" + "".join(f"d{i}\tyes\t{SECRET} pain\n" for i in range(20))
    BAD_ITEMS = tuple(
        BadItem({"a.tsv": (HEADER + "good\tyes\n").encode() + bad}, reason, "a.tsv:3", 1)
        for bad, reason in (
            (b"zyxsecret\n", Reason.WRONG_COLUMNS),
            (b"zyxsecret\tyes\tno\n", Reason.WRONG_COLUMNS),
            (b"zyxsecret \xff\tyes\n", Reason.ENCODING),
            (b" \tyes\n", Reason.EMPTY),
            (b"zyxsecret\t \n", Reason.WRONG_FIELD),
        )
    )


def read(path: Path, *, pairs: bool = True) -> tuple[list[LabelledText], Quarantine]:
    quarantine = Quarantine(1.0)
    texts = read_labelled_texts(path.suffix[1:], path, quarantine, pairs=pairs)
    return list(texts), quarantine


NLI = {"sentence1": "He has pain.", "sentence2": "He is well.", "gold_label": "contradiction"}


def test_pairs_as_mednli_has_them(tmp_path):
    rows = [
        NLI | {"pairID": "1", "sentence1_parse": "(ROOT)"},
        NLI | {"sentence2": "He is ill.", "gold_label": "entailment", "patient_id": 7},
        NLI | {"gold_label": "-"},  # the annotators disagreed
        NLI | {"sentence2": None},
        {"sentence1": "x"},
        NLI | {"document_id": "n1", "gold_label": 2},
    ]
    file = tmp_path / "mli.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "[1]\nnot json\n\n")
    texts, q = read(file)
    assert [(t.second, t.label, t.patient_id) for t in texts] == [
        ("He is well.", "contradiction", ""),
        ("He is ill.", "entailment", "7"),
        ("He is well.", "2", ""),
    ]
    assert texts[0].document_id == texts[1].document_id != texts[2].document_id == "n1"
    assert q.left_out == 1
    assert q.counts == {Reason.WRONG_FIELD: 2, Reason.NOT_JSON: 2}


def test_ids_of_texts_have_the_common_names_of_columns_and_no_text_lacks_its_patient(tmp_path):
    rows = ["text\tlabel\tDocument ID\tPatNr"]
    rows += [f"text {n}\tyes\td1\t{patient}" for n, patient in enumerate(("7.0", "7", "", "NULL"))]
    (tmp_path / "a.tsv").write_text("\n".join(rows))
    texts, q = read(tmp_path / "a.tsv", pairs=False)
    assert [(t.document_id, t.patient_id) for t in texts] == [("d1", "7")] * 2
    assert q.counts == {Reason.NO_PATIENT: 2}


@pytest.mark.parametrize("rows", [[{"doc_id": 1, "note_id": 2}], [{"mrn": 1}, {"patient_id": 1}]])
def test_ids_of_texts_are_in_one_column(tmp_path, rows):
    lines = (json.dumps({"text": "a", "label": "yes", **ids}) for ids in rows)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(PrivateTextRefusal, match="under several names"):
        read(tmp_path / "a.jsonl", pairs=False)


def test_a_pair_read_as_a_text_is_its_first_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(NLI) + "\n")
    texts, _ = read(tmp_path / "a.jsonl", pairs=False)
    assert [(t.first, t.second) for t in texts] == [("He has pain.", "")]


def test_quotes_in_a_table_are_part_of_the_text(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text('\ufefflabel\tsentence1\tsentence2\ny\tan "open\tquote"\nn\t"\t"\r\n')
    assert [(t.first, t.second, t.label) for t in read(file)[0]] == [
        ('an "open', 'quote"', "y"),
        ('"', '"', "n"),
    ]


@pytest.mark.cases
def test_a_table_without_a_column_is_refused(tmp_path, header, lacks):
    file = tmp_path / "a.tsv"
    file.write_text(f"{header}\na\tb\n")
    with pytest.raises(BadInput, match=f"a header lacks {lacks}"):
        read(file)


SECRET = "Zyqvarnex"


@pytest.mark.cases
def test_each_document_gets_the_patient_in_the_list(tmp_path, name, content):
    file = tmp_path / name
    file.write_text(content)
    assert read_patients(file) == {"beth/r1": "p1", "a, b": "p2", "r2": "p1"}


@pytest.mark.cases
def test_an_ambiguous_list_is_refused_without_quoting_it(tmp_path, content):
    file = tmp_path / "list.csv"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(BadInput, match="entities_patients") as refused:
        read_patients(file)
    assert SECRET not in str(refused.value)
    with pytest.raises(BadInput, match="not a file"):
        read_patients(tmp_path)


def test_every_document_needs_its_patient():
    sentences = [Sentence(("a",), ("O",), "d1"), Sentence(("b",), ("O",), SECRET)]
    with pytest.raises(BadInput, match="every training document") as refused:
        with_patients(sentences, {"d1": "p1"})
    assert SECRET not in str(refused.value)
