"""A folder may hold a file for each patient: no error names one, the quarantine does."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import read_corpus, read_sentences
from dp_core.errors import BadInput

NAME = "doe_john_1961"


@pytest.mark.parametrize(
    ("reader", "format", "suffix"),
    [
        (read_corpus, "jsonl", ".jsonl"),
        (read_corpus, "noteevents", ".csv"),
        (read_corpus, "text", ".txt"),
        (read_sentences, "columns", ".tsv"),
        (read_sentences, "pubtator", ".txt"),
    ],
)
def test_a_damaged_file_is_not_named(
    tmp_path: Path, reader: Callable[..., Any], format: str, suffix: str
) -> None:
    whole = gzip.compress(b"SUBJECT_ID,TEXT\n" * 1000, mtime=0)
    (tmp_path / f"{NAME}{suffix}.gz").write_bytes(whole[: len(whole) // 2])
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="unreadable") as told:
        list(reader(format, tmp_path, quarantine))
    assert NAME not in str(told.value)
    assert told.value.__cause__ is None
    assert [NAME in place for place in quarantine.places[Reason.UNREADABLE]] == [True]


def test_a_file_without_its_columns_is_not_named(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.csv").write_text("a,b\n1,2\n")
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="a header lacks SUBJECT_ID and TEXT") as told:
        list(read_corpus("noteevents", tmp_path, quarantine))
    assert NAME not in str(told.value)
    assert quarantine.places[Reason.WRONG_COLUMNS] == [f"{NAME}.csv"]
