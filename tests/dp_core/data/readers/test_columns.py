import gzip
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_contract import SECRET, BadItem, ReaderContract, read_format, read_sentences
from seqeval import scheme as seqeval
from seqeval.metrics.sequence_labeling import get_entities

from dp_core.config.data import TagScheme
from dp_core.data.labelled_text import Entity, Sentence, entities
from dp_core.data.readers.entity_formats import entities_of, fits, tags_of
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import LONGEST
from dp_core.errors import BadInput


class TestColumns(ReaderContract):
    FORMAT, SUFFIX, GOOD = "columns", ".tsv", "good O\n"
    MANY = f"Has O\n{SECRET} B-problem\npain I-problem\n\n" * 20
    BAD_ITEMS = tuple(  # a bad line rejects its sentence
        BadItem({"a.tsv": b"a\tO\n\nb\tO\n" + line + b"\nc\tO\n\nd\tO"}, reason, "a.tsv:4", 2)
        for line, reason in (
            (SECRET.encode(), Reason.WRONG_COLUMNS),
            (b"\tO", Reason.WRONG_COLUMNS),
            (b"zyxsecret \xff\tO", Reason.ENCODING),
            (SECRET.encode() * (LONGEST // 8) + b"\tO", Reason.TOO_LONG),
        )
    )


def read(path: Path) -> tuple[list[Sentence], Quarantine]:
    return read_format("columns", path)


@pytest.mark.parametrize("separator", ["\t", " ", "  "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_first_column_is_token_and_last_column_tag(tmp_path, separator, end):
    text = "\ufeff\nChest|B-problem\npain|NN|I-problem\n\n \nNo|O\n\n-DOCSTART-|O\n\nx|O"
    text = text.replace("|", separator).replace("\n", end)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(text.encode()))
    q = Quarantine()
    sentences = list(read_sentences("columns", tmp_path / "a.tsv.gz", q, public=True))
    assert sentences == [
        Sentence(("Chest", "pain"), ("B-problem", "I-problem"), "a.tsv#0"),
        Sentence(("No",), ("O",), "a.tsv#0"),
        Sentence(("x",), ("O",), "a.tsv#1"),
    ]
    assert q.rejected == 0


def test_private_file_is_one_document_or_refused(tmp_path):
    """A text with the word -DOCSTART- must not become two privacy units."""
    (tmp_path / "a.tsv").write_text("-DOCSTART-\tO\n\na\tO\n\nb\tO\n")
    assert {s.document_id for s in read(tmp_path)[0]} == {"a.tsv#1"}
    (tmp_path / "b.tsv").write_text(f"{SECRET}\tO\n\n-DOCSTART-\tO\n\nb\tO\n")
    with pytest.raises(BadInput, match="divided into documents") as refused:
        read(tmp_path)
    assert SECRET not in str(refused.value)


def test_files_of_one_name_in_two_folders_are_two_documents(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.tsv").write_text("a\tO\n")
    assert {s.document_id for s in read(tmp_path)[0]} == {"x/a.tsv#0", "y/a.tsv#0"}


SENTENCES = {  # the same entities in each scheme
    "iob1": "a I-x|b I-x|c B-x|d O|e I-y",
    "iob2": "a B-x|b I-x|c B-x|d O|e B-y",
    "iobes": "a B-x|b E-x|c S-x|d O|e S-y",
    "bilou": "a B-x|b L-x|c U-x|d O|e U-y",
    "bios": "a B-x|b I-x|c S-x|d O|e S-y",
}


@pytest.mark.parametrize("scheme", SENTENCES)
@pytest.mark.parametrize("suffix", [".tsv", ".conll", ".txt", ".iob", ".bio"])
def test_every_scheme_is_read_and_listed_for_the_operator(tmp_path, scheme, suffix):
    (tmp_path / f"a{suffix}").write_text(SENTENCES[scheme].replace("|", "\n") + "\n\nf O\n")
    for expected in (None, scheme):
        q = Quarantine()
        first, _ = read_sentences("columns", tmp_path, q, scheme=expected)
        assert first.tags == ("B-x", "I-x", "B-x", "O", "B-y")
        assert q.summary()["schemes"] == [scheme]
    for other in SENTENCES.keys() - {scheme}:
        q = Quarantine()
        with pytest.raises(BadInput, match="a tag does not fit the scheme"):
            list(read_sentences("columns", tmp_path, q, scheme=other))  # type: ignore[arg-type]
        assert q.counts == {Reason.TAG: 1}


def test_comments_before_a_sentence_are_skipped_and_the_token_of_their_sign_is_kept(tmp_path):
    (tmp_path / "a.conll").write_text(
        "# file\n\n# id = 7\n# O\nBed B-place\n# I-place\n5 I-place\n"
    )
    [sentence] = read(tmp_path)[0]
    assert sentence.tokens == ("#", "Bed", "#", "5")
    (tmp_path / "a.conll").write_text("Bed B-place\n# 5\n")  # a gap within a sentence
    with pytest.raises(BadInput, match="does not fit the scheme"):
        read(tmp_path)


@pytest.mark.parametrize("tag", ["X-problem", "B-", "b-problem", "o"])
@pytest.mark.parametrize("before", ["", "zyxsecret\n"])
def test_tag_of_unknown_scheme_refuses_the_source(tmp_path, tag, before):
    """IOBES tags read as IOB2 would lose all sentences with an entity of one token."""
    (tmp_path / "a.tsv").write_text("good\tO\n\n" * 200 + f"{before}zyxsecret\t{tag}\n")
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="a tag does not fit the scheme") as error:
        list(read_sentences("columns", tmp_path, quarantine))
    assert SECRET not in str(error.value)
    assert quarantine.counts == {Reason.TAG: 1}


# --- the parser of tags, compared with seqeval's

OF_SEQEVAL = {
    "iob1": seqeval.IOB1, "iob2": seqeval.IOB2, "iobes": seqeval.IOBES, "bilou": seqeval.BILOU,
}  # fmt: skip


def sequences(prefixes: str) -> st.SearchStrategy[list[str]]:
    tags = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in ("a", "b-c"))]
    return st.lists(st.sampled_from(tags), min_size=1, max_size=9)


def strict(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Return the entities that seqeval finds in its strict mode."""
    extents = seqeval.Entities([list(tags)], OF_SEQEVAL[scheme]).entities[0]
    return [(entity.tag, entity.start, entity.end) for entity in extents]


@pytest.mark.filterwarnings("ignore")  # seqeval names each unknown tag
@given(sequences("BIES"))
def test_entities_without_a_scheme_are_those_of_seqeval(tags):
    assert entities_of(tags) == [(kind, a, b + 1) for kind, a, b in get_entities(tags)]
    bilou = [tag.replace("E-", "L-", 1).replace("S-", "U-", 1) for tag in tags]
    assert entities_of(bilou) == entities_of(tags)


@pytest.mark.cases
def test_tags_fit_a_scheme_if_the_strict_seqeval_explains_each_of_them(
    scheme: TagScheme, prefixes: str
) -> None:
    @given(sequences(prefixes))
    def compare(tags: list[str]) -> None:
        expected = strict(tags, scheme)
        explained = sum(end - begin for _, begin, end in expected)
        assert fits(tags, scheme) == (explained == sum(tag != "O" for tag in tags))
        if fits(tags, scheme):
            assert entities_of(tags) == expected

    compare()


@given(sequences("BIESLU"), st.sampled_from([*SENTENCES]))
def test_entities_survive_every_scheme_and_iob2_is_read_as_scores_read_it(tags, scheme):
    listed = entities_of(tags)
    assert sum(end - begin for _, begin, end in listed) == sum(tag != "O" for tag in tags)
    written = tags_of(listed, len(tags), scheme)
    assert entities_of(written) == listed
    assert fits(written, scheme)
    assert entities(tags_of(listed, len(tags))) == listed


def test_bios_has_a_tag_for_single_words_and_none_for_last_words():
    assert fits(["S-a", "B-a", "I-a", "O", "S-b"], "bios")
    for wrong in (["B-a", "O"], ["B-a", "E-a"], ["I-a"], ["S-a", "I-a"]):
        assert not fits(wrong, "bios")
