"""The normal form keeps every document, in an order that tells nothing of the source's."""

import json
import random
import stat
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_core.data.corpus import Document, open_corpus, write_corpus
from dp_core.errors import BadInput

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
    for key in (lambda d: d.patient_id, lambda d: (d.patient_id, d.document_id)):
        groups = [k for k, _ in groupby(back, key=key)]
        assert len(groups) == len(set(groups))


def test_order_of_the_source_leaves_no_trace(tmp_path: Path) -> None:
    docs = [Document(str(i), f"p{i % 40}", f"text {i}") for i in range(200)]
    write_corpus(docs, tmp_path / "a")
    random.Random(0).shuffle(docs)
    write_corpus(docs, tmp_path / "b")
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert names == ["corpus.json", "documents.jsonl.gz"]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    patients = [d.patient_id for d in open_corpus(tmp_path / "a")]
    assert patients != sorted(patients)


def test_private_text_is_for_the_owner_alone(tmp_path: Path) -> None:
    write_corpus([Document("1", "p", "x")], tmp_path)
    assert stat.S_IMODE((tmp_path / "documents.jsonl.gz").stat().st_mode) == 0o600


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
