from pathlib import Path

import pytest
from reader_contract import SECRET, BadItem, ReaderContract, read_format

from dp_core.data.labelled_text import Sentence, all_entities
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import LONGEST

TEXT = "Has pain in the left and right arm.\nNo fever today. Given Aspirin\n81 mg."


def mark(mention: str, kind: str = "problem", number: int = 1) -> str:
    start = TEXT.index(mention)
    return f"T{number}\t{kind} {start} {start + len(mention)}\t{mention}\n".replace(
        "Aspirin\n81", "Aspirin 81"
    )


class TestBrat(ReaderContract):
    FORMAT, SUFFIX, GOOD = "brat", ".txt", "good\n"
    MANY = f"Has {SECRET}.\n" * 20
    BESIDE = (
        ".ann",
        "".join(f"T{i}\tproblem {15 * i + 4} {15 * i + 13}\t{SECRET}\n" for i in range(20)),
    )
    BAD_ITEMS = tuple(  # a bad line rejects its document
        BadItem({"a.txt": text, "a.ann": ann, "b.txt": b"good", "b.ann": b""}, reason, "a", 1)
        for text, ann, reason in (
            (b"zyxsecret \xff\n", b"", Reason.ENCODING),
            (b"pain\n", b"\xff", Reason.ENCODING),
            (b"pain\n", b"zyxsecret", Reason.WRONG_FIELD),
            (b"pain\n", b"R1\tof Arg1:T1\n\nT1\tproblem 0\tpain", Reason.WRONG_FIELD),
            (b"pain\n", b"T1\tproblem 0 9\tzyxsecret", Reason.OFFSETS),
            (b"zyxsecret\n", b"T1\tproblem 0 4\tpain", Reason.OFFSETS),
            (b"pain\n", f"T1\tproblem 0 {'1' * 5000}\tpain".encode(), Reason.OFFSETS),
            (b"zyxsecret " * (LONGEST // 9), b"", Reason.TOO_LONG),
        )
    )


def read_brat(folder: Path, annotations: str, text: str = TEXT) -> list[Sentence]:
    (folder / "deep").mkdir(exist_ok=True)
    (folder / "deep" / "n.txt").write_bytes(text.encode())
    (folder / "deep" / "n.ann").write_bytes(annotations.encode())
    sentences, q = read_format("brat", folder)
    assert q.rejected == 0
    assert {s.document_id for s in sentences} == {"deep/n"}
    return sentences


def words(sentences: list[Sentence]) -> list[tuple[str, str]]:
    return [
        (kind, " ".join(s.tokens[begin:end]))
        for s in sentences
        for kind, begin, end in all_entities(s)
    ]


def test_a_line_begins_a_sentence_unless_an_entity_spans_it(tmp_path):
    sentences = read_brat(tmp_path, mark("Aspirin\n81 mg", "drug") + mark("fever", number=2))
    assert [" ".join(s.tokens) for s in sentences] == [
        "Has pain in the left and right arm .",
        "No fever today .",
        "Given Aspirin 81 mg .",
    ]
    assert words(sentences) == [("problem", "fever"), ("drug", "Aspirin 81 mg")]


def test_a_discontinuous_entity_is_the_span_from_its_first_to_its_last_fragment(tmp_path):
    start, end = TEXT.index("left"), TEXT.index("arm.")
    line = f"T2\tplace {start} {start + 4};{end} {end + 3}\tleft arm\n"
    sentences = read_brat(tmp_path, line + mark("right arm", "place"))
    assert words(sentences) == [("place", "left and right arm"), ("place", "right arm")]
    assert sentences[0].overlapped == (("place", 6, 8),)  # the longer entity has the tags


def test_other_annotations_of_brat_are_skipped(tmp_path):
    others = "R1\tof Arg1:T1 Arg2:T2\nE1\tproblem:T1\nA1\tNegation E1\nM2\tx E1\n*\tEquiv T1 T2\n"
    notes = "N1\tReference T1 UMLS:C1\tpain\n#1\tAnnotatorNotes T1\tsure\n"
    assert words(read_brat(tmp_path, mark("pain") + others + notes)) == [("problem", "pain")]


@pytest.mark.parametrize("counted", ["as two characters", "as one character"])
def test_windows_line_ends_count_as_one_or_two_characters(tmp_path, counted):
    text = TEXT.replace("\n", "\r\n")
    start = (text if counted == "as two characters" else TEXT).index("fever")
    sentences = read_brat(tmp_path, f"T1\tproblem {start} {start + 5}\tfever\r\n", text)
    assert words(sentences) == [("problem", "fever")]


# --- i2b2 2012


def xml(text: str, *tags: str) -> str:
    listed = "\n".join(tags)
    return (
        '<?xml version="1.0" encoding="UTF-8" ?>\n<ClinicalNarrativeTemporalAnnotation>\n'
        f"<TEXT><![CDATA[{text}]]></TEXT>\n<TAGS>\n{listed}\n</TAGS>\n"
        "</ClinicalNarrativeTemporalAnnotation>\n"
    )


def event(text: str, mention: str, kind: str = "PROBLEM", first: int = 0) -> str:
    start = text.index(mention) + first
    return (
        f'<EVENT id="E1" start="{start}" end="{start + len(mention)}" text="{mention}" '
        f'modality="FACTUAL" polarity="POS" type="{kind}" />'
    )


class TestI2b2Of2012(ReaderContract):
    FORMAT, SUFFIX, GOOD = "i2b2-2012", ".xml", xml("good")
    MANY = xml(f"Has {SECRET}.\n" * 20, event(f"Has {SECRET}.\n", SECRET))
    BAD_ITEMS = tuple(  # a bad tag rejects its document
        BadItem({"a.xml": content, "b.xml": xml("good").encode()}, reason, "a.xml", 1)
        for content, reason in (
            (xml("zyxsecret").encode().replace(b"z", b"\xff"), Reason.ENCODING),
            (b"zyxsecret", Reason.WRONG_FIELD),
            (xml("zyxsecret", "<EVENT >").encode(), Reason.WRONG_FIELD),
            (xml("zyxsecret", event("fever", "fever")).encode(), Reason.OFFSETS),
            (xml(" ").encode(), Reason.EMPTY),
            (xml("zyxsecret " * (LONGEST // 9)).encode(), Reason.TOO_LONG),
        )
    )


@pytest.mark.parametrize("first", [0, 1])
def test_events_and_times_are_entities_though_the_file_is_not_well_formed(tmp_path, first):
    text = "\nAdmission Date :\n07/03/1999\nC&S < 5 and pt's fever ."
    time = '<TIMEX3 id="T0" start="18" end="28" text="07/03/1999" type="DATE" val="" mod="NA" />'
    tags = [
        time.replace("18", str(18 + first)).replace("28", str(28 + first)),
        event(text, "C&S < 5", "TEST", first),
        event(text, "pt's fever", "", first).replace("pt's", "pt&apos;s"),
        '<SECTIME id="S0" start="18" end="28" text="07/03/1999" type="ADMISSION" dvalue="" />',
        '<TLINK id="TL0" fromID="E1" fromText="fever" toID="T0" toText="x" type="BEFORE" />',
    ]
    (tmp_path / "7.xml").write_text(xml(text, *tags))
    sentences, q = read_format("i2b2-2012", tmp_path)
    assert q.counts == Quarantine().counts
    assert words(sentences) == [
        ("DATE", "07 / 03 / 1999"), ("TEST", "C & S < 5"), ("EVENT", "pt ' s fever"),
    ]  # fmt: skip
    assert {s.document_id for s in sentences} == {"7"}
