import json
import random
import stat
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_core.data import corpus
from dp_core.data.corpus import (
    Document,
    id_in_cell,
    normalised_id,
    open_corpus,
    read_shard,
    remake_shards,
    shards_of,
    write_corpus,
)
from dp_core.data.hashing import given_id
from dp_core.data.labelled_text import Sentence
from dp_core.errors import BadInput

COMPOSED, DECOMPOSED = "Ren\u00e9", "Rene\u0301"


@pytest.mark.cases
def test_all_spellings_of_an_id_have_one_normal_form(value, form):
    assert normalised_id(value) == form == normalised_id(form)
    assert normalised_id(None) == ""


@pytest.mark.parametrize(
    "value", [True, 7.5, float("nan"), float("inf"), 2.0**53, [7], {"a": 7}, b"7"], ids=range(8)
)
def test_values_other_than_text_and_whole_numbers_are_no_ids(value):
    with pytest.raises(ValueError, match="not an id"):
        normalised_id(value)


@pytest.mark.cases
def test_marks_of_missing_values_and_rounded_numbers_are_no_ids(cell, name):
    assert id_in_cell(cell) == name


def test_documents_and_sentences_normalise_their_ids():
    assert Document(" 1.0", DECOMPOSED, " x ", "2 ") == Document("1", COMPOSED, " x ", "2")
    assert Sentence((), (), f"{DECOMPOSED} ").document_id == COMPOSED


IDS = st.text(max_size=2)
DOCUMENTS = st.lists(st.builds(Document, IDS, IDS, st.text(max_size=20), IDS), max_size=20)


@settings(max_examples=40, deadline=None)
@given(DOCUMENTS)
def test_round_trip_groups_and_keeps_everything(tmp_path_factory, docs):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(docs, folder)
    back = list(open_corpus(folder))

    def as_read(document: Document) -> str:
        return repr(replace(document, document_id=given_id(document.document_id)))

    assert sorted(map(as_read, back)) == sorted(map(as_read, docs))
    for key in (
        lambda d: d.patient_id or f"without patient: {d.document_id}",
        lambda d: (d.patient_id, d.document_id),
    ):
        groups = [k for k, _ in groupby(back, key=key)]
        assert len(groups) == len(set(groups))


def test_order_of_the_source_leaves_no_trace(tmp_path):
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


def test_private_text_is_for_the_owner_alone(tmp_path):
    write_corpus([Document("1", "p", "x")], tmp_path)
    assert {stat.S_IMODE(f.stat().st_mode) for f in tmp_path.glob("*.parquet")} == {0o600}


def test_an_interrupted_corpus_is_refused(tmp_path):
    write_corpus([Document("1", "p", "old")], tmp_path)

    def breaks() -> object:
        yield Document("1", "p", "new")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_corpus(breaks(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="not a finished corpus"):
        open_corpus(tmp_path)
    assert not list(tmp_path.glob(".partial*"))


def test_another_version_is_refused(tmp_path):
    write_corpus([Document("1", "p", "x")], tmp_path)
    (tmp_path / "corpus.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(BadInput, match="version 99"):
        open_corpus(tmp_path)


# --- shards


def many() -> list[Document]:
    """Return 300 documents of 70 patients, and 300 documents without a patient."""
    of_patients = [Document(str(i), f"p{i % 70}", f"text {i}", f"a{i % 3}") for i in range(300)]
    return [*of_patients, *(Document(f"n{i}", "", f"note {i}") for i in range(300))]


@pytest.mark.parametrize("shards", [1, 2, 3, 16, 300])
def test_the_order_does_not_depend_on_the_number_of_shards(tmp_path, shards):
    write_corpus(many(), tmp_path, 4)
    in_four = list(open_corpus(tmp_path))
    write_corpus(many(), tmp_path, shards)
    assert list(open_corpus(tmp_path)) == in_four
    assert len(shards_of(tmp_path)) == shards == len(list(tmp_path.glob("*.parquet")))


def test_patients_are_in_one_shard_and_notes_without_patient_in_all(tmp_path):
    write_corpus(many(), tmp_path)
    patients: dict[str, set[str]] = {}
    nobody: set[str] = set()
    for shard in shards_of(tmp_path):
        for document in read_shard(shard):
            if document.patient_id:
                patients.setdefault(document.patient_id, set()).add(shard.name)
            else:
                nobody.add(shard.name)
    assert len(patients) == 70 and all(len(where) == 1 for where in patients.values())
    assert len(nobody) == 16 and len(set.union(*patients.values())) > 10


def test_spilling_rows_to_files_changes_no_byte(tmp_path, monkeypatch):
    twice = [Document("1", "p", f"part {i}") for i in range(50)]
    write_corpus([*many(), *twice], tmp_path / "held")
    spilled = []

    def files(self: corpus._Rows) -> None:
        spill(self)
        spilled.extend(stat.S_IMODE(f.stat().st_mode) for f in self.scratch.iterdir())

    spill = corpus._Rows._spill
    monkeypatch.setattr(corpus._Rows, "_spill", files)
    monkeypatch.setattr(corpus, "_TOGETHER", 1000)
    monkeypatch.setattr(corpus, "_BUFFERED", 5000)
    write_corpus([*many(), *twice], tmp_path / "spilled")
    assert len(spilled) > 500 and set(spilled) == {0o600}
    for file in (tmp_path / "held").iterdir():
        assert file.read_bytes() == (tmp_path / "spilled" / file.name).read_bytes()
    texts = [d.text for d in open_corpus(tmp_path / "spilled") if d.text.startswith("part")]
    assert texts == sorted(d.text for d in twice)


@pytest.mark.parametrize("piece", [1 << 23, 40])
def test_more_text_makes_more_shards_of_the_same_documents(tmp_path, monkeypatch, piece):
    """A range of hashes that is too large for one sort is divided again."""
    write_corpus(many(), tmp_path / "one", 1)
    monkeypatch.setattr(corpus, "_PARTS", 4)
    monkeypatch.setattr(corpus, "_TOGETHER", 1000)
    monkeypatch.setattr(corpus, "_PIECE_TEXT", piece)
    text = sum(len(d.text) for d in many())
    for shards, bound, expected in ((3, text, 3), (3, text // 6 + 1, 6), (3, text // 7, 12)):
        monkeypatch.setattr(corpus, "SHARD_TEXT", bound)
        folder = tmp_path / f"{bound}"
        write_corpus(many(), folder, shards)
        written = shards_of(folder)
        assert len(written) == expected
        assert list(open_corpus(folder)) == list(open_corpus(tmp_path / "one"))
        assert max(sum(len(d.text) for d in read_shard(s)) for s in written) < 3 * text / expected
        (folder / written[1].name).unlink()
        remake_shards(many(), folder, [written[1].name])
        assert list(read_shard(written[1]))
        assert {f.name for f in folder.iterdir()} == {"corpus.json", *(s.name for s in written)}


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def other(file: Path) -> None:
    """Replace the file by another, intact shard of the corpus."""
    file.write_bytes((file.parent / "shard-0006.parquet").read_bytes())


@pytest.mark.parametrize("harm", [damage, other, Path.unlink, lambda f: f.write_bytes(b"")])
def test_a_damaged_shard_is_named_and_made_again_alone(tmp_path, harm):
    write_corpus(many(), tmp_path)
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in tmp_path.iterdir()}
    name = "shard-0005.parquet"
    harm(tmp_path / name)  # type: ignore[operator]
    with pytest.raises(BadInput, match=r"shard-0005\.parquet: a shard .* missing or damaged") as e:
        list(open_corpus(tmp_path))
    assert "\n" not in str(e.value) and "text" not in str(e.value)
    remake_shards(many(), tmp_path, [name])
    assert {f.name for f in tmp_path.iterdir()} == set(before)
    for file in tmp_path.iterdir():
        content, written = before[file.name]
        assert file.read_bytes() == content
        assert (file.stat().st_mtime_ns == written) == (file.name != name)


def test_a_shard_of_another_source_is_not_put_in_place(tmp_path):
    write_corpus(many(), tmp_path)
    (tmp_path / "shard-0005.parquet").unlink()
    others = [Document(d.document_id, d.patient_id, d.text + "!") for d in many()]
    with pytest.raises(BadInput, match="cannot be made again as they were"):
        remake_shards(others, tmp_path, ["shard-0005.parquet"])
    assert not (tmp_path / "shard-0005.parquet").exists()
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize(
    "shards",
    [None, [], {}, {"../x": "0"}, {"shard-0001.parquet": "0"},
     {"shard-0000.parquet": "0", "x": "1"}],
)  # fmt: skip
def test_a_mark_with_wrong_shard_names_is_refused(tmp_path, shards):
    write_corpus(many(), tmp_path, 2)
    about = json.loads((tmp_path / "corpus.json").read_text())
    (tmp_path / "corpus.json").write_text(json.dumps(about | {"shards": shards}))
    with pytest.raises(BadInput, match="not a finished corpus"):
        open_corpus(tmp_path)


def test_a_corpus_may_lie_in_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "a name, %20 and é"
    write_corpus(many(), folder, 2)
    assert sum(1 for shard in shards_of(folder) for _ in read_shard(shard)) == len(many())


def test_lone_surrogates_become_question_marks(tmp_path):
    write_corpus([Document("1", "p", "a \ud800 b"), Document("2", "p", "é")], tmp_path)
    assert [d.text for d in open_corpus(tmp_path)] == ["a ? b", "é"]
