"""Real files, where CONFIDE_DATA says they are, against the counts that came with them."""

import os
from pathlib import Path

import pytest

from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_corpus
from dp_core.errors import BadInput

pytestmark = pytest.mark.skipif(
    not os.environ.get("CONFIDE_DATA"), reason="CONFIDE_DATA does not name a folder of data sets"
)


def data(name: str) -> Path:
    path = Path(os.environ["CONFIDE_DATA"]) / name
    if not path.exists():
        pytest.skip(f"CONFIDE_DATA has no {name}")
    return path


def test_notes_in_noteevents_columns() -> None:
    q = Quarantine()
    docs = list(read_corpus("noteevents", data("noteevents_format/NOTEEVENTS_derived.csv.xz"), q))
    assert (q.taken, q.left_out, q.rejected) == (5173 - 11, 11, 0)
    assert len({d.document_id for d in docs}) == len(docs)
    assert len({d.patient_id for d in docs}) in (1152, 1153)  # one may have error rows alone
    by_patient: dict[str, set[str]] = {}
    for d in docs:
        by_patient.setdefault(d.text, set()).add(d.patient_id)
    assert max(map(len, by_patient.values())) == 1  # a text never crosses patients
    assert sum(len(d.text.split()) for d in docs) == 2_394_141  # 2,399,943 with the error rows


def test_a_header_without_notes() -> None:
    with pytest.raises(BadInput, match="nothing to read"):
        list(read_corpus("noteevents", data("noteevents_format/NOTEEVENTS_demo_header_only.csv")))


@pytest.mark.parametrize(
    ("file", "tokens", "articles"),
    [("train.txt.xz", 2_051_910, 629), ("valid.txt", 213_886, 60), ("test.txt", 241_211, 62)],
)
def test_wikitext_2(file: str, tokens: int, articles: int) -> None:
    docs = list(read_corpus("text", data(f"wikitext-2/{file}")))
    assert sum(len(d.text.split()) for d in docs) == tokens
    assert abs(len(docs) - articles) <= 3  # the published number of titles is approximate
    assert len({d.document_id for d in docs}) == len(docs)
