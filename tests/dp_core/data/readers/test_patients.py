"""Tests of the list of labelled documents' patients, which is read strictly and never quoted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dp_core.data.labelled_text import Sentence
from dp_core.data.readers.labelled_texts import read_patients, with_patients
from dp_core.errors import BadInput

SECRET = "Zyqvarnex"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.csv", 'document,patient\nbeth/r1,p1\n"a, b",p2\n\n r2 ,p1\n'),
        ("list.tsv", "beth/r1\tp1\na, b\tp2\nr2\tp1\n"),
    ],
)
def test_each_document_gets_the_patient_in_the_list(
    tmp_path: Path, name: str, content: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    assert read_patients(file) == {"beth/r1": "p1", "a, b": "p2", "r2": "p1"}


def test_ids_that_look_alike_are_alike(tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    file.write_text("caf\u00e9,p\u00e9\n")
    (named,) = with_patients([Sentence(("a",), ("O",), "cafe\u0301")], read_patients(file))
    assert named.patient_id == "p\u00e9"


def test_one_patient_is_one_however_the_list_spells_the_id(tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    file.write_text("1.0,7\nb, 7.0 \n")
    sentences = [Sentence(("a",), ("O",), document) for document in ("1", "b")]
    assert [s.patient_id for s in with_patients(sentences, read_patients(file))] == ["7", "7"]


@pytest.mark.parametrize(
    "content",
    [
        f"{SECRET}\n",
        f"{SECRET},p,q\n",
        f"{SECRET},\n",
        f",{SECRET}\n",
        f"{SECRET},p\n{SECRET},q\n",
        f'"{SECRET},p\n',
        "",
        "document,patient\n",
        b"\xff\xfe,p\n",
    ],
)
def test_an_ambiguous_list_is_refused_without_quoting_it(
    tmp_path: Path, content: str | bytes
) -> None:
    file = tmp_path / "list.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadInput, match="entities_patients") as refused:
        read_patients(file)
    assert SECRET not in str(refused.value)
    with pytest.raises(BadInput, match="not a file"):
        read_patients(tmp_path)


def test_every_document_needs_its_patient() -> None:
    sentences = [Sentence(("a",), ("O",), "d1"), Sentence(("b",), ("O",), SECRET)]
    with pytest.raises(BadInput, match="every training document") as refused:
        with_patients(sentences, {"d1": "p1"})
    assert SECRET not in str(refused.value)
