"""The vocabulary benchmark: its fits are the step's, and what is measured is not measured again."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import bench_vocabulary as bench
from benchmarks import vocabulary_tables as told
from benchmarks.bench_partition_selection import _judged
from benchmarks.vocabulary_corpora import tuples
from dp_core.data.privacy_units import Unit
from dp_core.data.tokens import split_words
from dp_core.vocabulary import subwords, wordpiece


def test_the_fit_of_counted_words_is_that_of_the_running_text() -> None:
    texts = ["Pain, pains; arm pain? \u4e2d x", "arm arm knee"]
    tokenizer = wordpiece.learn({"pain": 50, "arm": 40, "s": 1, "kne": 2}, 80)
    counted = Counter(word for text in texts for word in split_words(text))
    wanted = subwords.fit(tokenizer, texts)
    assert wanted is not None and 0 < wanted.unknown < 1
    found = bench.fit_of(tokenizer, counted)
    for name in ("coverage", "fertility", "unknown"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name))


def test_rows_that_are_there_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "RESULT", tmp_path / "vocabulary.json")
    asked: list[str] = []

    def measure(row: bench.Row) -> dict[str, float]:
        asked.append(row.name)
        return {"tokens": 1.0}

    def rows() -> list[bench.Row]:
        return [bench.Row("public"), bench.Row("private", "mad", 3.0)]

    later = time.monotonic() + 60
    bench.measure_missing("fits", "notes", iter(rows()[:1]), later, measure)
    bench.measure_missing("fits", "notes", iter(rows()), 0.0, measure)  # no time is left
    assert asked == ["public"]
    bench.measure_missing("fits", "notes", iter(rows()), later, measure)
    assert asked == ["public", "private · mad · ε 3"]
    assert set(json.loads(bench.RESULT.read_text())["fits"]["notes"]) == set(asked)


def test_every_source_and_mechanism_has_its_row_once() -> None:
    for rows in (list(bench.fit_rows()), list(bench.training_rows())):
        names = [row.name for row in rows]
        assert len(set(names)) == len(names)
        assert {row.mechanism for row in rows} == {None, *bench.MECHANISMS}


def test_words_are_cut_into_tuples_up_to_a_number() -> None:
    units = [Unit("a", ["one two three", "four"]), Unit("b", ["five six seven"])]
    found = list(tuples(units, 2, 6))
    assert [words for _, words in found] == [{"one", "two"}, {"three"}, {"four"}, {"five", "six"}]
    assert len({unit for unit, _ in found}) == 4


def test_more_than_delta_is_told_from_chance() -> None:
    assert _judged("x", 1, 1.0, 0.002, 10_000, 20)["p_value"] > 0.4
    assert _judged("x", 1, 1.0, 0.002, 10_000, 60)["p_value"] < 1e-6
    assert _judged("x", 1, 1.0, 0.002, 10_000, 60)["least_rate_95"] > 0.002


def test_the_pages_tables_are_those_of_the_results() -> None:
    page = told.PAGE.read_text()
    by_name = told.measured()
    assert set(told._MARKED.findall(page)) == set(by_name)
    assert told.filled(page, by_name) == page, "run python -m benchmarks.vocabulary_tables"


def test_what_is_not_measured_is_said() -> None:
    tables = told.tables({}, {}, {})
    assert set(tables.values()) == {"Not measured yet."}
    row = {"words_released": 7, "tokens": 90, "public_mlm": 0.1, "dp_mlm": 0.2,
           "public_f1": 0.3, "dp_f1": 0.45}  # fmt: skip
    models = told.tables({}, {"noteevents_format": {"private \u00b7 mad \u00b7 \u03b5 3": row}}, {})
    line = models["models noteevents_format"].splitlines()[-1]
    assert line == "| `private` | `mad` | 3 | 7 | 90 | 10.0 | 20.0 | 30.0 | 45.0 |"
