"""Normalised ids, and the normal form: every document, in an order that tells nothing."""

import csv
import json
import random
import stat
import unicodedata
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_core.data.corpus import Document, normalised_id, open_corpus, write_corpus
from dp_core.data.ner import Sentence
from dp_core.data.privacy_units import iter_units
from dp_core.data.readers.registry import read_corpus
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit

COMPOSED, DECOMPOSED = "Ren\u00e9", "Rene\u0301"


@pytest.mark.parametrize(
    ("value", "form"),
    [
        *((v, "7") for v in (7, 7.0, "7", "7.0", " 7 ", "7\u00a0", "7\r", "7.00", " 7.0\t")),
        *((v, "07") for v in ("07", "07 ")),
        *((v, "-7") for v in (-7, -7.0, "-7.0")),
        *((v, COMPOSED) for v in (COMPOSED, DECOMPOSED, f" {DECOMPOSED} ")),
        *((v, "") for v in (None, "", " ", "\n\u2003")),
        *((v, v) for v in ("7.5", "p7.0", ".0", "7.0.0", "\u0667.0", "rene", "Rene")),
    ],
)
def test_the_one_form_of_an_id(value: object, form: str) -> None:
    assert normalised_id(value) == form == normalised_id(form)


@pytest.mark.parametrize(
    "value", [True, 7.5, float("nan"), float("inf"), 2.0**53, [7], {"a": 7}, b"7"], ids=range(8)
)
def test_what_is_no_id(value: object) -> None:
    with pytest.raises(ValueError, match="not an id"):
        normalised_id(value)


def test_whoever_makes_a_document_or_a_sentence_its_ids_are_normalised() -> None:
    assert Document(" 1.0", DECOMPOSED, " x ", "2 ") == Document("1", COMPOSED, " x ", "2")
    assert Sentence((), (), f"{DECOMPOSED} ").document_id == COMPOSED


# The same six notes, of two people: every patient's id is spelled in three ways.
SPELLINGS = {"7": ("7", " 7 ", "7.0"), COMPOSED: (COMPOSED, DECOMPOSED, f"{COMPOSED} ")}
NOTES = [(p, s, f"{p}{i}", f"note {i}") for p in SPELLINGS for i, s in enumerate(SPELLINGS[p])]


def as_jsonl(folder: Path) -> None:
    rows = [{"patient_id": s, "document_id": d, "text": t} for _, s, d, t in NOTES]
    rows[0]["patient_id"], rows[2]["patient_id"] = 7, 7.0  # type: ignore[assignment]
    (folder / "n.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_noteevents(folder: Path) -> None:
    with (folder / "n.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["SUBJECT_ID", "ROW_ID", "TEXT"])
        table.writerows((s, d, t) for _, s, d, t in NOTES)


def as_text(folder: Path) -> None:
    for _, spelled, document, text in NOTES:
        (folder / spelled).mkdir(exist_ok=True)
        (folder / spelled / f"{document}.txt").write_text(text)


@pytest.mark.parametrize(
    ("format", "write"),
    [("jsonl", as_jsonl), ("noteevents", as_noteevents), ("text", as_text)],
)
def test_the_same_corpus_is_the_same_units_in_every_format(
    tmp_path: Path, format: str, write: object
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")  # type: ignore[operator]
    write_corpus(read_corpus(format, tmp_path / "in"), tmp_path / "out")
    found = {
        unit.unit_id: sorted(unit.texts)
        for unit in iter_units(tmp_path / "out", PrivacyUnit.PATIENT, 1)
    }
    assert found == {p: ["note 0", "note 1", "note 2"] for p in SPELLINGS}
    assert len(list(open_corpus(tmp_path / "out"))) == len(NOTES)
    assert all(unicodedata.is_normalized("NFC", p) for p in found)


DOCUMENTS = st.lists(
    st.builds(
        Document,
        document_id=st.text(max_size=3),
        patient_id=st.text(max_size=2),
        text=st.text(max_size=20),
        admission_id=st.text(max_size=2),
    ),
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS)
def test_round_trip_groups_and_keeps_everything(
    tmp_path_factory: pytest.TempPathFactory, docs: list[Document]
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(docs, folder)
    back = list(open_corpus(folder))
    as_key = repr
    assert sorted(back, key=as_key) == sorted(docs, key=as_key)
    for key in (
        lambda d: d.patient_id or f"of nobody: {d.document_id}",
        lambda d: (d.patient_id, d.document_id),
    ):
        groups = [k for k, _ in groupby(back, key=key)]
        assert len(groups) == len(set(groups))


def test_order_of_the_source_leaves_no_trace(tmp_path: Path) -> None:
    docs = [Document(str(i), f"p{i % 40}", f"text {i}") for i in range(200)]
    write_corpus(docs, tmp_path / "a")
    random.Random(0).shuffle(docs)
    write_corpus(docs, tmp_path / "b")
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["corpus.json", *(f"shard-{i:04d}.parquet" for i in range(16))]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    patients = [d.patient_id for d in open_corpus(tmp_path / "a")]
    assert patients != sorted(patients)


def test_private_text_is_for_the_owner_alone(tmp_path: Path) -> None:
    write_corpus([Document("1", "p", "x")], tmp_path)
    assert {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.glob("*.parquet")} == {0o600}


def test_an_interrupted_corpus_is_none(tmp_path: Path) -> None:
    write_corpus([Document("1", "p", "old")], tmp_path)

    def breaks() -> object:
        yield Document("1", "p", "new")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_corpus(breaks(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="not a finished corpus"):
        open_corpus(tmp_path)
    assert not list(tmp_path.glob(".partial*"))


def test_another_version_is_refused(tmp_path: Path) -> None:
    write_corpus([Document("1", "p", "x")], tmp_path)
    (tmp_path / "corpus.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(BadInput, match="version 99"):
        open_corpus(tmp_path)
