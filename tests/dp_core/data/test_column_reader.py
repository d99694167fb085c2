"""Token and tag columns: IOB and IOB2, tabs and spaces."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.data.ner import Sentence, entities
from dp_core.data.readers.columns import iob2
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import read_sentences
from dp_core.errors import BadInput


def read(path: Path, share: float = 1.0) -> tuple[list[Sentence], Quarantine]:
    q = Quarantine(share)
    return list(read_sentences("columns", path, q)), q


@pytest.mark.parametrize("separator", ["\t", " ", "  "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_sentences(tmp_path: Path, separator: str, end: str) -> None:
    lines = [
        "",
        "Chest|B-problem",
        "pain|I-problem",
        "",
        " ",
        "No|O",
        "",
        "-DOCSTART-|O",
        "",
        "x|O",
    ]
    text = "\ufeff" + end.join(line.replace("|", separator) for line in lines)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(text.encode()))
    sentences, q = read(tmp_path / "a.tsv.gz")
    assert sentences == [
        Sentence(("Chest", "pain"), ("B-problem", "I-problem"), "a.tsv#0"),
        Sentence(("No",), ("O",), "a.tsv#0"),
        Sentence(("x",), ("O",), "a.tsv#1"),
    ]
    assert q.rejected == 0


def test_the_last_column_is_the_tag(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("pain NN I-NP B-problem\n")
    assert read(tmp_path)[0][0].tags == ("B-problem",)


def test_iob_becomes_iob2() -> None:
    assert iob2(["I-a", "I-a", "B-a", "O", "I-b", "I-a"]) == (
        "B-a", "I-a", "B-a", "O", "B-b", "B-a",
    )  # fmt: skip


@given(st.lists(st.sampled_from(["O", "B-a", "I-a", "B-b", "I-b"]), max_size=12))
def test_every_tag_then_belongs_to_an_entity(tags: list[str]) -> None:
    converted = iob2(tags)
    covered = sum(end - start for _, start, end in entities(converted))
    assert covered == sum(t != "O" for t in tags)
    assert iob2(list(converted)) == converted


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"secretword", Reason.WRONG_COLUMNS),
        (b"\tO", Reason.WRONG_COLUMNS),
        (b"secretword\tX-problem", Reason.TAG),
        (b"secretword\tB-", Reason.TAG),
        (b"secretword \xff\tO", Reason.ENCODING),
    ],
)
def test_a_bad_line_costs_its_sentence(tmp_path: Path, line: bytes, reason: Reason) -> None:
    (tmp_path / "a.tsv").write_bytes(b"a\tO\n\nb\tO\n" + line + b"\nc\tO\n\nd\tO")
    sentences, q = read(tmp_path)
    assert [s.tokens for s in sentences] == [("a",), ("d",)]
    assert q.counts == {reason: 1}
    assert q.places[reason] == ["a.tsv:4"]
    with pytest.raises(BadInput) as caught:
        read(tmp_path, share=0.1)
    assert "secretword" not in str(caught.value) + json.dumps(q.summary())


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not an entities format"):
        list(read_sentences("brat", tmp_path))
