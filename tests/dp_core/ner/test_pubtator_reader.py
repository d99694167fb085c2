"""PubTator: sentences and tokens from offsets."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.corpus.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput
from dp_core.ner.readers import read_sentences
from dp_core.ner.scoring import entities
from dp_core.ner.sentence import Sentence
from dp_core.ner.sentence_splitting import sentence_spans, token_spans

ARTICLE = """\
one|t|Lithium-induced tremor.
one|a|We saw Dr. A. Smith, e.g. twice. Tremor (p<0.05) stopped! It did not return.
one\t0\t7\tLithium\tChemical\tD1
one\t16\t22\ttremor\tDisease\tD2
one\t57\t63\tTremor\tDisease\tD2
one\tCID\tD1\tD2
"""


def read(folder: Path, text: str, share: float = 1.0) -> tuple[list[Sentence], Quarantine]:
    (folder / "p.txt").write_text(text)
    q = Quarantine(share)
    return list(read_sentences("pubtator", folder / "p.txt", q)), q


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_article(tmp_path: Path, end: str) -> None:
    sentences, q = read(
        tmp_path, (ARTICLE + "\n" + ARTICLE.replace("one", "two")).replace("\n", end)
    )
    assert q.rejected == 0
    first = [s for s in sentences if s.document_id == "one"]
    assert [" ".join(s.tokens) for s in first] == [
        "Lithium - induced tremor .",
        "We saw Dr . A . Smith , e . g . twice .",
        "Tremor ( p < 0 . 05 ) stopped !",
        "It did not return .",
    ]
    assert [entities(s.tags) for s in first] == [
        [("Chemical", 0, 1), ("Disease", 3, 4)],
        [],
        [("Disease", 0, 1)],
        [],
    ]


def test_overlaps_keep_the_longer(tmp_path: Path) -> None:
    spans = "1\t6\t19\trenal failure\tB\n1\t0\t19\tacute renal failure\tA\n"
    text = "1|t|acute renal failure\n1|a|\n" + spans
    sentences, q = read(tmp_path, text)
    assert entities(sentences[0].tags) == [("A", 0, 3)]
    assert q.rejected == 0


def test_entities_cut_tokens(tmp_path: Path) -> None:
    sentences, _ = read(tmp_path, "1|t|nonCancer cells\n1|a|\n1\t3\t9\tCancer\tD\n")
    assert sentences[0].tokens == ("non", "Cancer", "cells")
    assert sentences[0].tags == ("O", "B-D", "O")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("one\t1\t8\tLithium\tChemical\tD1", Reason.OFFSETS),
        ("one\t900\t907\tLithium\tChemical\tD1", Reason.OFFSETS),
        ("one\t8\t3\tsecretword\tChemical\tD1", Reason.OFFSETS),
        ("secretword", Reason.WRONG_COLUMNS),
    ],
)
def test_a_bad_line_costs_its_article(tmp_path: Path, line: str, reason: Reason) -> None:
    good = ARTICLE.replace("one", "two")
    sentences, q = read(tmp_path, ARTICLE + line + "\n\n" + good)
    assert {s.document_id for s in sentences} == {"two"}
    assert q.counts == {reason: 1}
    assert q.places[reason] == ["p.txt:1"]
    with pytest.raises(BadInput) as caught:
        read(tmp_path, ARTICLE + line, share=0.1)
    assert "secretword" not in str(caught.value) + json.dumps(q.summary())


TEXT = st.text(st.sampled_from("aB. !?\n(1"), max_size=60)


@given(TEXT, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=3))
def test_no_sentence_or_token_cuts_an_entity_and_nothing_is_lost(
    text: str, marks: list[tuple[int, int]]
) -> None:
    marked: list[tuple[int, int]] = []
    for start, size in marks:
        end = min(start + size, len(text))
        if start < end and all(end <= a or b <= start for a, b in marked):
            marked.append((start, end))
    spans = sentence_spans(text, marked)
    covered = "".join(text[a:b] for a, b in spans)
    assert "".join(covered.split()) == "".join(text.split())
    for a, b in marked:
        assert not any(a < cut < b for span in spans for cut in span)
    tokens = [t for a, b in spans for t in token_spans(text, a, b, marked)]
    assert "".join(text[a:b] for a, b in tokens) == "".join(text.split())
    for a, b in marked:
        assert not any(s < edge < e for s, e in tokens for edge in (a, b))
