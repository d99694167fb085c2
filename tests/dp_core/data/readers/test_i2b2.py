import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reader_contract import SECRET, BadItem, ReaderContract, read_format

from dp_core.data.labelled_text import Score, Sentence, TaskScores, joined, score
from dp_core.data.readers.entity_formats import read_i2b2
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import LONGEST
from dp_core.errors import BadInput

TEXT = "Has chest  pain today .\n\nGiven Aspirin 81 mg ; repeat EKG .\n"
CONCEPTS = [
    'c="chest pain" 1:1 1:2||t="problem"',
    'c="aspirin" 3:1 3:1||t="treatment"',
    'c="repeat ekg" 3:5 3:6||t="test"',
]
EXPECTED = [
    Sentence(
        ("Has", "chest", "pain", "today", "."), ("O", "B-problem", "I-problem", "O", "O"), "r1"
    ),
    Sentence(
        ("Given", "Aspirin", "81", "mg", ";", "repeat", "EKG", "."),
        ("O", "B-treatment", "O", "O", "O", "B-test", "I-test", "O"),
        "r1",
    ),
]


def write(folder: Path, concepts: list[str], text: str = TEXT) -> None:
    (folder / "r1.txt").write_text(text)
    (folder / "r1.con").write_text("\n".join(concepts) + "\n")


class TestI2b2(ReaderContract):
    FORMAT, SUFFIX, GOOD = "i2b2", ".txt", "good\n"
    MANY = f"Has {SECRET} pain .\n" * 20
    BESIDE = (
        ".con",
        "".join(f'c="{SECRET} pain" {i}:1 {i}:2||t="problem"\n' for i in range(1, 21)),
    )
    BAD_ITEMS = tuple(
        BadItem({"a.txt": text, "a.con": concepts}, reason, where, kept)
        for text, concepts, reason, where, kept in (
            (b"good\nzyxsecret \xff\n", b"", Reason.ENCODING, "a.txt:2", 1),
            (b"good\n", b"zyxsecret\n", Reason.WRONG_FIELD, "a.con:1", 1),
            (b"good\n", b"\xff\n", Reason.ENCODING, "a.con:1", 1),
            (b"good\nzyxsecret\n", b'c="no" 2:0 2:0||t="x"\n', Reason.OFFSETS, "a.txt:2", 1),
            (b"good\n" + b"zyxsecret " * (LONGEST // 9), b"", Reason.TOO_LONG, "a.txt:2", 1),
        )
    )


def read(path: Path, share: float = 1.0) -> tuple[list[Sentence], Quarantine]:
    return read_format("i2b2", path, share)


CASES = tomllib.loads((Path(__file__).parent / "i2b2_cases.toml").read_text())
LAYOUTS = CASES["layouts"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_layout_gives_the_same_sentences(tmp_path, layout, end):
    texts, concepts, documents = LAYOUTS[layout]
    contents = dict.fromkeys(texts, TEXT) | dict.fromkeys(concepts, "\n".join(CONCEPTS) + "\n")
    contents["chains/r-3.txt.chains"] = 'c="pain" 1:2 1:2||t="coref problem"\n'  # of 2011
    for name, content in (contents | {"pairs/r-3.txt.pairs": "", ".DS_Store": "x"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.replace("\n", end).encode())
    sentences, q = read(tmp_path)
    assert sentences == [replace(s, document_id=name) for name in documents for s in EXPECTED]
    assert (q.rejected, q.passed_over) == (0, 1)


def test_events_and_times_of_2012_are_concepts(tmp_path):
    """Events have further fields after their type, and some have none; SECTIME repeats a time."""
    (tmp_path / "7.xml.txt").write_text("Admission Date :\n7/3/99\nHas chest pain .\n")
    (tmp_path / "7.xml.extent").write_text(
        'EVENT="Admission" 1:0 1:0||type="OCCURRENCE"||modality="FACTUAL"||polarity="POS"\n'
        'TIMEX3="7/3/99" 2:0 2:0||type="DATE"||val="1999-07-03"||mod="NA"\n'
        'SECTIME="7/3/99" 2:0 2:0||type="ADMISSION"||dvalue="1999-07-03"\n'
        'EVENT="chest pain" 3:1 3:2||type=""||modality="FACTUAL"||polarity="POS"\n'
    )
    for beside in ("7.xml", "7.xml.tlink"):
        (tmp_path / beside).write_text("")
    sentences, q = read(tmp_path)
    assert [s.tags for s in sentences] == [
        ("B-OCCURRENCE", "O", "O"), ("B-DATE",), ("O", "B-EVENT", "I-EVENT", "O"),
    ]  # fmt: skip
    assert {s.document_id for s in sentences} == {"7"}
    assert (q.rejected, q.passed_over) == (0, 0)


def spread(folder: Path, concepts: list[str]) -> tuple[list[Sentence], Quarantine]:
    write(folder, concepts, "No fever .\nHas severe\nleft sided chest\npain since May .\nOk .\n")
    return read(folder)


def test_lines_that_share_a_concept_are_one_sentence(tmp_path):
    """A concept spans three lines and covers the middle one completely."""
    sentences, q = spread(
        tmp_path,
        [
            'c="fever" 1:1 1:1||t="problem"',
            'c="severe left sided chest pain" 2:1 4:0||t="problem"',
            'c="since may" 4:1 4:2||t="time"',
        ],
    )
    assert q.rejected == 0
    assert sentences == [
        Sentence(("No", "fever", "."), ("O", "B-problem", "O"), "r1"),
        Sentence(
            ("Has", "severe", "left", "sided", "chest", "pain", "since", "May", "."),
            ("O", "B-problem", *["I-problem"] * 4, "B-time", "I-time", "O"),
            "r1",
        ),
        Sentence(("Ok", "."), ("O", "O"), "r1"),
    ]


def test_concepts_that_share_a_line_make_one_sentence_of_all_their_lines(tmp_path):
    concepts = ['c="left" 3:0 3:0||t="side"', 'c="chest pain" 3:2 4:0||t="problem"']
    sentences, q = spread(tmp_path, ['c="has severe" 2:0 2:1||t="problem"', *concepts])
    assert q.rejected == 0
    assert [s.tags for s in sentences] == [
        ("O", "O", "O"),
        ("B-problem", "I-problem"),
        ("B-side", "O", "B-problem", "I-problem", "O", "O", "O"),
        ("O", "O"),
    ]


@pytest.mark.parametrize(
    ("bad", "kept"),
    [
        *CASES["wrong"]["concepts"],
        (f'c="no" 1:{"1" * 5000} 1:0||t="problem"', "No Has left pain Ok"),
        (f'c="no" {"1" * 5000}:1 1:0||t="problem"', "No Has left pain Ok"),
    ],
    ids=range(11),
)
def test_every_line_that_a_wrong_concept_claims_is_put_aside(tmp_path, bad, kept):
    sentences, q = spread(tmp_path, [bad])
    assert [s.tokens[0] for s in sentences] == kept.split()
    assert set(q.counts) == {Reason.OFFSETS}
    with pytest.raises(BadInput, match="offsets do not fit") as caught:
        read(tmp_path, share=0.1)
    assert "secretword" not in str(caught.value) + json.dumps(q.summary())


def test_of_overlapping_concepts_the_longest_is_tagged_and_none_is_lost(tmp_path):
    write(tmp_path, ['c="pain" 1:2 1:2||t="test"', *CONCEPTS, 'c="pain" 1:2 1:2||t="test"'])
    sentences, q = read(tmp_path)
    assert [s.tags for s in sentences] == [s.tags for s in EXPECTED]
    assert [s.overlapped for s in sentences] == [(("test", 2, 3),) * 2, ()]
    assert q.rejected == 0


@pytest.mark.parametrize("concept", ["left sided chest pain", "left sidedchest pain"])
def test_over_lines_a_space_may_be_left_out_and_nothing_else(tmp_path, concept):
    write(tmp_path, [f'c="{concept}" 1:0 2:1||t="problem"'], "left sided\nchest pain .\n")
    (sentence,) = read(tmp_path)[0]
    assert sentence.tags == ("B-problem", "I-problem", "I-problem", "I-problem", "O")
    write(tmp_path, [f'c="{concept}" 1:0 1:3||t="problem"'], "left sided chest pain .\nOk .\n")
    assert len(read(tmp_path)[0]) == 1 + ("sidedchest" not in concept)


def test_files_that_are_no_pair_are_rejected_and_a_single_file_is_refused(tmp_path):
    write(tmp_path, CONCEPTS)
    for name in ("r2.txt", "r3.con", "r4.con", "r4.txt", "r4.TXT"):
        (tmp_path / name).write_text("")
    sentences, q = read(tmp_path)
    assert sentences == EXPECTED
    assert q.counts == {Reason.UNREADABLE: 2, Reason.TWICE: 1}
    assert q.locations[Reason.TWICE] == ["r4"]
    with pytest.raises(BadInput, match="from a folder"):
        read(tmp_path / "r1.txt")


FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "i2b2_scorer.json").read_text())
Case = dict[str, Any]


def write_case(folder: Path, name: str, lines: list[int], concepts: list[list[Any]]) -> None:
    words = {(i, j): f"w{i}.{j}" for i, size in enumerate(lines, 1) for j in range(size)}
    text = [
        " ".join(words[line, token] for token in range(size)) for line, size in enumerate(lines, 1)
    ]
    concept_lines = []
    for kind, *ends in concepts:
        begin, end = (ends[0], ends[1]), (ends[2], ends[3])
        phrase = " ".join(word for place, word in words.items() if begin <= place <= end)
        concept_lines.append(f'c="{phrase}" {begin[0]}:{begin[1]} {end[0]}:{end[1]}||t="{kind}"')
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(text) + "\n")
    (folder / f"{name}.con").write_text("".join(line + "\n" for line in concept_lines))


def scored(folder: Path, cases: list[Case]) -> TaskScores:
    parts = {}
    for part in ("reference", "system"):
        for number, case in enumerate(cases):
            write_case(folder / part, f"{number:03}", case["lines"], case[part])
        quarantine = Quarantine()
        parts[part] = joined(read_i2b2(folder / part, quarantine))
        assert quarantine.rejected == 0
    return score(parts["reference"], [document.tags for document in parts["system"]])


def counts(scores: TaskScores) -> dict[str, list[int]]:
    kinds = {kind: scores.by_type.get(kind, Score(0, 0, 0)) for kind in FROZEN["total"]}
    kinds["all"] = scores.micro
    return {
        kind: [score.correct, score.expected - score.correct, score.predicted - score.correct]
        for kind, score in kinds.items()
    }


@pytest.mark.parametrize("case", FROZEN["cases"], ids=lambda case: case["name"])
def test_counts_equal_the_counts_of_the_scorer_of_2010(tmp_path, case):
    assert counts(scored(tmp_path, [case])) == case["counts"]


def test_all_documents_together_are_scored_as_one(tmp_path):
    scores = scored(tmp_path, FROZEN["cases"])
    assert counts(scores) == FROZEN["total"]
    right, missed, spurious = FROZEN["total"]["all"]
    assert scores.micro.f1 == pytest.approx(2 * right / (2 * right + missed + spurious))
