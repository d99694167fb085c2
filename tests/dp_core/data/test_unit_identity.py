"""Tests of the first assumption of docs/proofs.md: a contribution depends on its unit alone.

For every registered reader and every privacy unit, a data set and its neighbour without one unit
must give the same contributions, except for the contribution of the missing unit.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dp_core.audit.canaries import Canary, plant, texts_with_canaries
from dp_core.data import corpus
from dp_core.data.corpus import Document, Shard, open_corpus, shards_of, write_corpus
from dp_core.data.hashing import (
    content_name,
    document_name,
    example_name,
    given_id,
    seed_key,
    with_copies_numbered,
)
from dp_core.data.labelled_text import LabelledText, Sentence, fold_of, unit_ids
from dp_core.data.privacy_units import units_of
from dp_core.data.readers import registry
from dp_core.data.readers.labelled_texts import with_patients
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.token_store import PackedRows, ShardRows, TokenStore
from dp_core.data.tokens import BERT, HeldItems
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.training.batches import choose_rows, masked_examples, row_keys
from dp_core.training.finetune import store_by_unit
from dp_core.training.heads import LabelledRow
from dp_core.vocabulary import subwords
from dp_core.vocabulary.item_sets import BoundedSets
from dp_core.vocabulary.ngram_release import Candidates
from dp_core.vocabulary.subwords import UnitWords

WORDS = 4  # words of an example
LENGTH = 10  # token ids of a row
SEED, HOLDOUT, FOLDS = 3, 0.3, 5
PIECES = (
    "pain denies fever cough ",
    "no chest pain today ",
    "stable and without fever ",
    "cough for two days ",
    "stable stable stable stable ",
)
VOCABULARY = Counter({word: 9 for piece in PIECES for word in piece.split()})
TOKENIZER: Tokenizer = subwords.learn(VOCABULARY, 200, ())


@dataclass(frozen=True)
class Note:
    """A note before it is written in a format."""

    number: int  # stays when another note is removed, like the name of a file
    patient: str
    document: str  # an id that the source may give; notes of a patient may share one
    pieces: tuple[str, ...]  # the examples, of `WORDS` words each

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@st.composite
def neighbours(draw: st.DrawFn, format: Format, unit: PrivacyUnit) -> tuple[list[Note], list[Note]]:
    pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(tuple)
    row = st.tuples(
        st.sampled_from(["p", "q", "r"]), st.sampled_from(["", "", "a", "1002", "402"]), pieces
    )
    rows = draw(st.lists(row, min_size=2, max_size=14))
    notes = format.unit_notes([Note(number, *row) for number, row in enumerate(rows)])
    gone = draw(st.sampled_from(notes))
    match unit:
        case PrivacyUnit.PATIENT:
            rest = [note for note in notes if note.patient != gone.patient]
        case PrivacyUnit.DOCUMENT:
            named = (gone.patient, gone.document)
            rest = [
                note
                for note in notes
                if ((note.patient, note.document) != named if gone.document else note is not gone)
            ]
        case PrivacyUnit.EXAMPLE:
            place = draw(st.integers(0, len(gone.pieces) - 1))
            less = replace(gone, pieces=gone.pieces[:place] + gone.pieces[place + 1 :])
            rest = [less if note is gone else note for note in notes]
    return notes, [note for note in rest if note.pieces]


def with_ids(notes: Sequence[Note]) -> list[Note]:
    """Return the notes with a distinct id for each, like the name of a file or article."""
    return [replace(note, document=f"n{note.number}") for note in notes]


def with_missing_ids(notes: Sequence[Note]) -> list[Note]:
    return [replace(note, document=note.document or f"n{note.number}") for note in notes]


def without_ids(notes: Sequence[Note]) -> list[Note]:
    return [replace(note, patient="", document="") for note in notes]


READERS: dict[str, Mapping[str, registry.Reader[Any]]] = {
    "corpus": registry.corpus_readers(),
    "sentences": registry.sentence_readers(),
    "classes": registry.labelled_text_readers(),
}


@dataclass(frozen=True)
class Format:
    """One format: writes notes, reads them again, and returns the contributions of units."""

    name: str
    kind: str  # kind and format of the reader
    write: Callable[[Sequence[Note], Path], None]
    unit_notes: Callable[[Sequence[Note]], list[Note]]  # the notes as the format stores them
    units: Sequence[PrivacyUnit] = tuple(PrivacyUnit)  # the units that the format can name

    def contributions(self, folder: Path, unit: PrivacyUnit) -> dict[str, Counter[object]]:
        """Return the contributions of all units, in no order, for every kind of choice."""
        kind, format = self.kind.split()
        items = registry.read_source(READERS[kind], format, folder, Quarantine())
        if kind == "corpus":
            return of_corpus(items, folder, unit)
        if kind == "classes":
            return of_labels(list(items), unit)
        patients = json.loads((folder / "patients.json").read_text())
        return of_labels(with_patients(items, patients), unit)


def of_corpus(
    documents: Iterable[Document], folder: Path, unit: PrivacyUnit
) -> dict[str, Counter[object]]:
    write_corpus(documents, folder / "corpus", 2)
    shards = shards_of(folder / "corpus")
    return {
        made.__name__: Counter(item for shard in shards for item in made(shard, unit))
        for made in (rows_of, texts_of, words_of, phrases_of)
    }


def of_labels(
    items: Sequence[Sentence] | Sequence[LabelledText], unit: PrivacyUnit
) -> dict[str, Counter[object]]:
    rows = [LabelledRow((1,), (0,), (0,), item) for item in range(len(items))]
    store, ordered = store_by_unit(rows, unit_ids(items, unit), max_length=3, vocabulary=9, pad=0)
    order = np.array([row.item for row in ordered])
    units = Counter(
        (
            int(store.unit_keys[u]),
            tuple((fold_of(items[i], FOLDS), repr(items[i])) for i in order[store.rows_of(u)]),
        )
        for u in range(store.n_units)
    )
    return {"labelled rows and folds": units}


CANARIES = tuple(
    Canary(f"c{i}", "HS", 0.3, (10 + 2 * i, 11 + 2 * i)) for i in range(3)
)  # two tokens of the vocabulary each


def rows_of(shard: Shard, unit: PrivacyUnit) -> list[object]:
    """Return side, kept rows with canaries, and masks of an update, for each unit."""
    planting = partial(plant, canaries=CANARIES, seed=SEED, sequence_length=LENGTH)
    cut = ShardRows(unit, WORDS, TOKENIZER.to_str(), LENGTH, 2, seed_key(SEED), HOLDOUT, planting)(
        shard
    )
    return [*masked("train", cut.train), *masked("held out", cut.held_out)]


def masked(side: str, rows: PackedRows) -> list[object]:
    store = TokenStore(
        rows.tokens, rows.lengths, rows.unit_rows, rows.unit_keys, LENGTH, 200, digest=""
    )
    if not store.n_units:
        return []
    units = np.arange(store.n_units)
    chosen, real = choose_rows(store, units, 2, 7, 1)
    keys = row_keys(store, units, chosen, 7, 1)
    made = masked_examples(store, chosen.ravel(), keys.ravel())
    ids = made.input_ids.reshape(*chosen.shape, LENGTH)
    return [
        (
            side,
            int(store.unit_keys[u]),
            store.tokens[store.rows_of(u)].tobytes(),
            ids[u][real[u]].tobytes(),
        )
        for u in units
    ]


def texts_of(shard: Shard, unit: PrivacyUnit) -> list[object]:
    """Return the id and the texts of each unit, with canaries, for a release of phrases."""
    spelled = [(canary, f"canary {canary.id}") for canary in CANARIES]
    return [
        (name, tuple(block.texts[begin:end].to_pylist()))
        for block in texts_with_canaries(unit, WORDS, HOLDOUT, SEED, spelled, shard)
        for name, begin, end in zip(block.unit_ids, block.rows, block.rows[1:], strict=False)
    ]


def words_of(shard: Shard, unit: PrivacyUnit) -> list[object]:
    return bounded(UnitWords(unit, WORDS, BERT, HOLDOUT, seed_key(SEED)), shard)


def phrases_of(shard: Shard, unit: PrivacyUnit) -> list[object]:
    read = partial(texts_with_canaries, unit, WORDS, HOLDOUT, SEED, ())
    return bounded(Candidates(2, 1, frozenset(VOCABULARY), read), shard)


def bounded(held: Callable[[Shard], Iterable[HeldItems]], shard: Shard) -> list[object]:
    sets = BoundedSets(held, 2, b"key")(shard)
    return [
        tuple(sets.items.take(sets.members[begin:end]).to_pylist())
        for begin, end in pairwise(sets.starts)
    ]


def write_text(notes: Sequence[Note], folder: Path) -> None:
    for note in notes:
        (folder / note.patient).mkdir(exist_ok=True)
        (folder / note.patient / f"{note.document}.txt").write_text(note.text)


def write_json_lines(file: Path, rows: Iterable[object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_jsonl(notes: Sequence[Note], folder: Path) -> None:
    rows = (
        ({"patient_id": n.patient} if n.patient else {})
        | {"document_id": n.document or None, "text": n.text}
        for n in notes
    )
    write_json_lines(folder / "notes.jsonl", rows)


def write_table(
    notes: Sequence[Note], folder: Path, name: str, header: Sequence[str], delimiter: str = ","
) -> None:
    with (folder / name).open("w", newline="") as file:
        table = csv.writer(file, delimiter=delimiter)
        table.writerow(header)
        table.writerows((n.document, n.patient, n.text) for n in notes)


def write_parquet(notes: Sequence[Note], folder: Path) -> None:
    rows = [{"patient_id": n.patient, "document_id": n.document, "text": n.text} for n in notes]
    pq.write_table(pa.Table.from_pylist(rows), folder / "ward.parquet", row_group_size=3)


def write_patients(notes: Sequence[Note], folder: Path, suffix: str = "") -> None:
    patients = {f"{n.document}{suffix}": n.patient for n in notes}
    (folder / "patients.json").write_text(json.dumps(patients))


def write_sentences(notes: Sequence[Note], folder: Path, format: str) -> None:
    for note in notes:
        lines = "\n".join(note.pieces)
        tagged = ("".join(f"{word}\tO\n" for word in p.split()) for p in note.pieces)
        files = {
            "i2b2": {".txt": lines, ".con": ""},
            "brat": {".txt": lines, ".ann": ""},
            "i2b2-2012": {".xml": f"<TEXT><![CDATA[{lines}]]></TEXT>"},
            "columns": {".tsv": "\n".join(tagged)},
        }
        for suffix, content in files[format].items():
            (folder / f"{note.document}{suffix}").write_text(content)
    write_patients(notes, folder, ".tsv#0" if format == "columns" else "")


def write_pubtator(notes: Sequence[Note], folder: Path) -> None:
    abstracts = [
        f"{n.document}|t|\n{n.document}|a|" + " ".join(f"{p.capitalize()}." for p in n.pieces)
        for n in notes
    ]
    (folder / "articles.txt").write_text("\n\n".join(abstracts) + "\n")
    write_patients(notes, folder)


COLUMNS = ("text", "label", "document_id", "patient_id")


def class_rows(notes: Sequence[Note]) -> list[tuple[str, ...]]:
    return [(piece, "yes", n.document, n.patient) for n in notes for piece in n.pieces]


def write_jsonl_classes(notes: Sequence[Note], folder: Path) -> None:
    rows = (dict(zip(COLUMNS, row, strict=True)) for row in class_rows(notes))
    write_json_lines(folder / "texts.jsonl", rows)


def write_tsv_classes(notes: Sequence[Note], folder: Path) -> None:
    lines = ("\t".join(row) + "\n" for row in (COLUMNS, *class_rows(notes)))
    (folder / "texts.tsv").write_text("".join(lines))


JSONL = Format("Jsonl", "corpus jsonl", write_jsonl, list)
NOTE_COLUMNS = {"name": "NOTEEVENTS.csv", "header": ("ROW_ID", "SUBJECT_ID", "TEXT")}
WARD = {"name": "ward.csv", "header": ("DocId", "PatNr", "Befund"), "delimiter": ";"}
NOTEEVENTS = Format("Noteevents", "corpus noteevents", partial(write_table, **NOTE_COLUMNS), list)
SENTENCES = {"I2b2": "i2b2", "I2b2Of2012": "i2b2-2012", "Brat": "brat", "Columns": "columns"}
NAMELESS = (PrivacyUnit.EXAMPLE, PrivacyUnit.DOCUMENT)
FORMATS = (
    Format("Text", "corpus text", write_text, with_ids),
    JSONL,
    Format("JsonlWithoutPatients", "corpus jsonl", write_jsonl, without_ids, NAMELESS),
    NOTEEVENTS,
    Format("Csv", "corpus csv", partial(write_table, **WARD), list),
    Format("Parquet", "corpus parquet", write_parquet, list),
    *(
        Format(name, f"sentences {kind}", partial(write_sentences, format=kind), with_ids)
        for name, kind in SENTENCES.items()
    ),
    Format("Pubtator", "sentences pubtator", write_pubtator, with_ids),
    Format("JsonlClasses", "classes jsonl", write_jsonl_classes, with_missing_ids),
    Format("TsvClasses", "classes tsv", write_tsv_classes, with_missing_ids),
)
CASES = [
    pytest.param(format, unit, id=f"{format.name}-{unit}")
    for format in FORMATS
    for unit in format.units
]


def test_every_registered_reader_has_its_property_test():
    assert {format.kind for format in FORMATS} == {
        *(f"{kind} {format}" for kind, readers in READERS.items() for format in readers)
    }


@pytest.fixture(autouse=True)
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread the rows of these small corpora over few ranges to run ten times faster."""
    monkeypatch.setattr(corpus, "_PARTS", 2)


@pytest.mark.parametrize(("format", "unit"), CASES)
def test_removing_one_unit_changes_no_contribution_of_another(format, unit):
    removed_any = False

    @settings(max_examples=20, deadline=None)
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        nonlocal removed_any
        before, after = (made(notes, format, unit) for notes in data.draw(neighbours(format, unit)))
        for choice, contributions in before.items():
            neighbour = after.get(choice, Counter())
            assert not neighbour - contributions, choice
            removed = (contributions - neighbour).total()
            assert removed <= 1, choice
            removed_any |= removed == 1

    compare()
    assert removed_any


@pytest.mark.parametrize("format", [JSONL, NOTEEVENTS], ids=["jsonl", "noteevents"])
def test_patient_with_many_notes_leaves_the_rows_of_other_patients(format):
    """Line numbers would have four digits with the patient's notes, and three without them."""
    gone = [Note(i, "p", "", ("cough for two days ",)) for i in range(600)]
    others = [
        Note(1000 * half + i, f"q{i}", "", (PIECES[half],) * 2)
        for half in (0, 1)
        for i in range(400)
    ]
    before = made([*gone, *others], format, PrivacyUnit.PATIENT)
    after = made(others, format, PrivacyUnit.PATIENT)
    for choice, contributions in before.items():
        assert not after[choice] - contributions, choice
        assert (contributions - after[choice]).total() == 1, choice


def made(notes: Sequence[Note], format: Format, unit: PrivacyUnit) -> dict[str, Counter[object]]:
    if not notes:
        return {}
    with TemporaryDirectory() as folder:
        format.write(notes, Path(folder))
        return format.contributions(Path(folder), unit)


# --- rules for ids


@pytest.mark.parametrize("format", [FORMATS[0], JSONL, NOTEEVENTS], ids=lambda f: f.name)
def test_all_spellings_of_a_patient_are_one_unit_in_every_format(tmp_path, format):
    spellings = {"7": ("7", " 7 ", "7.0"), "Ren\u00e9": ("Ren\u00e9", "Rene\u0301", "Ren\u00e9 ")}
    notes = [
        Note(i, spelling, f"{patient}-{i}", (f"note {i}",))
        for patient, listed in spellings.items()
        for i, spelling in enumerate(listed)
    ]
    format.write(notes, tmp_path)
    kind, name = format.kind.split()
    read = registry.read_source(READERS[kind], name, tmp_path, Quarantine())
    documents = corpus_of(tmp_path / "corpus", read)
    units = units_of(iter(documents), PrivacyUnit.PATIENT, 1)
    assert {unit.unit_id: sorted(unit.texts) for unit in units} == {
        patient: ["note 0", "note 1", "note 2"] for patient in spellings
    }
    assert len(documents) == len(notes)


def corpus_of(folder: Path, documents: Iterable[Document]) -> list[Document]:
    write_corpus(documents, folder)
    return list(open_corpus(folder))


def test_copies_of_a_document_without_id_are_separate_documents(tmp_path):
    same = Document("", "p", "pain")
    three = corpus_of(tmp_path / "a", [same, Document("", "p", "fever"), same, same])
    two = corpus_of(tmp_path / "b", [same, Document("", "p", "fever"), same])
    assert len({document.document_id for document in three}) == 4
    missing = {d.document_id for d in three} - {d.document_id for d in two}
    assert [name[-2:] for name in missing] == ["#2"]
    again = corpus_of(tmp_path / "c", three)
    assert again == three


def test_no_source_can_take_the_name_of_a_document(tmp_path):
    victim = Document("", "", "pain")
    (name,) = (document.document_id for document in corpus_of(tmp_path / "a", [victim]))
    intruder = Document(name, "", "other text")
    both = corpus_of(tmp_path / "b", [intruder, victim])
    assert {d.text: d.document_id for d in both}["pain"] == name
    assert len({document.document_id for document in both}) == 2
    assert len(list(units_of(iter(both), PrivacyUnit.DOCUMENT, 1))) == 2


def test_an_example_is_named_by_its_words_and_a_given_document_alone():
    derived = [document_name("p", "", "", text) for text in ("pain fever", "pain cough")]
    assert example_name("p", derived[0], "pain") == example_name("p", derived[1], "pain")
    named = [example_name(*parts) for parts in (("p", "a", "x"), ("p", "b", "x"), ("q", "a", "x"))]
    assert len({*named, example_name("p", "a", "y")}) == 4
    assert content_name("k", "ab", "c") != content_name("k", "a", "bc")


def test_only_derived_names_are_numbered():
    derived = content_name("k", "x")
    names = with_copies_numbered(["a", derived, "a", derived, derived])
    assert names == ["a", derived, "a", f"{derived}#1", f"{derived}#2"]
    assert (given_id(f"{derived}#1"), given_id("a")) == ("", "a")


def test_equal_documents_of_two_patients_are_two_labelled_units():
    items = [Sentence(("a",), ("O",), "d", patient) for patient in ("p", "q")]
    assert len(set(unit_ids(items, PrivacyUnit.DOCUMENT))) == 2
