import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_contract import SECRET, BadItem, ReaderContract, read_format

from dp_core.data.labelled_text import Sentence, entities, sentence_spans, token_spans
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import LONGEST

ARTICLE = """\
one|t|Lithium-induced tremor.
one|a|We saw Dr. A. Smith, e.g. twice. Tremor (p<0.05) stopped! It did not return.
one\t0\t7\tLithium\tChemical\tD1
one\t16\t22\ttremor\tDisease\tD2
one\t57\t63\tTremor\tDisease\tD2
one\tCID\tD1\tD2
"""


class TestPubtator(ReaderContract):
    FORMAT, SUFFIX, GOOD = "pubtator", ".txt", "1|t|good\n1|a|\n"
    MANY = "".join(
        f"{i}|t|Has {SECRET} pain.\n{i}|a|It went.\n{i}\t4\t13\t{SECRET}\tDisease\tD\n\n"
        for i in range(20)
    )
    BAD_ITEMS = tuple(  # a bad line rejects its article
        BadItem(
            {"p.txt": f"{ARTICLE}{line}\n\n{ARTICLE.replace('one', 'two')}".encode()},
            reason,
            "p.txt:1",
            4,
        )
        for line, reason in (
            ("one\t1\t8\tLithium\tChemical\tD1", Reason.OFFSETS),
            ("one\t900\t907\tLithium\tChemical\tD1", Reason.OFFSETS),
            ("one\t8\t3\tzyxsecret\tChemical\tD1", Reason.OFFSETS),
            (SECRET, Reason.WRONG_COLUMNS),
            (f"one\t{'1' * 5000}\t8\tLithium\tChemical\tD1", Reason.OFFSETS),
            (f"one\t1\t{'1' * 5000}\tLithium\tChemical\tD1", Reason.OFFSETS),
            (SECRET * (LONGEST // 8), Reason.TOO_LONG),
        )
    )


def read(folder: Path, text: str) -> tuple[list[Sentence], Quarantine]:
    (folder / "p.txt").write_text(text)
    return read_format("pubtator", folder / "p.txt")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_article(tmp_path, end):
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


TEXT = st.text(st.sampled_from("aB. !?\n(1"), max_size=60)


@given(TEXT, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=3))
def test_no_sentence_or_token_cuts_an_entity_and_nothing_is_lost(text, marks):
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


def plain(text: str, spans: dict[tuple[int, int], str]) -> list[Sentence]:
    """Return the expected sentences by a short algorithm of quadratic time."""
    kept: dict[tuple[int, int], str] = {}
    for a, b in sorted(spans, key=lambda s: (s[0] - s[1], s[0])):
        if all(b <= start or end <= a for start, end in kept):
            kept[a, b] = spans[a, b]
    sentences, begun = [], set()
    for begin, end in sentence_spans(text, sorted(kept), [2]):
        tokens = token_spans(text, begin, end, sorted(kept))
        tags = []
        for a, b in tokens:
            [inside] = [s for s in kept if s[0] <= a and b <= s[1]] or [None]
            tags.append(f"{'I' if inside in begun else 'B'}-{kept[inside]}" if inside else "O")
            begun.add(inside)
        sentences.append(Sentence(tuple(text[a:b] for a, b in tokens), tuple(tags), "1"))
    return sentences


@given(
    st.text(st.sampled_from("aB. 1"), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.sampled_from("XY")), max_size=9),
)
def test_tags_of_nested_and_overlapping_spans_equal_the_plain_algorithm(
    tmp_path_factory, text, marks
):
    whole = f"A {text}"
    spans: dict[tuple[int, int], str] = {}
    for start, size, kind in marks:
        if start < len(whole):
            spans.setdefault((start, min(start + size, len(whole))), kind)
    lines = [f"1\t{a}\t{b}\t{whole[a:b]}\t{kind}" for (a, b), kind in spans.items()]
    content = f"1|t|A\n1|a|{text}\n" + "".join(f"{line}\n" for line in lines)
    sentences, q = read(tmp_path_factory.mktemp("p"), content)
    assert q.rejected == 0
    assert sentences == plain(whole, spans)


def test_time_grows_linearly_with_the_article(tmp_path):
    """Four times the spans run about four times as many lines of Python, not sixteen times."""

    def lines_run(count: int) -> int:
        words = " ".join(["pain"] * (count // 2) + ["Pain."] * (count // 2))
        places = [i * 5 for i in range(count // 2)]
        places += [5 * (count // 2) + i * 6 for i in range(count // 2)]
        spans = "".join(f"1\t{a}\t{a + 4}\t{words[a : a + 4]}\tD\n" for a in places)
        ran = 0

        def trace(*_: object) -> object:
            nonlocal ran
            ran += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            sentences, q = read(tmp_path, f"1|t|{words}\n1|a|\n{spans}")
        finally:
            sys.settrace(before)
        assert q.rejected == 0
        assert sum(tag == "B-D" for s in sentences for tag in s.tags) == count
        return ran

    assert lines_run(800) < 6 * lines_run(200)
