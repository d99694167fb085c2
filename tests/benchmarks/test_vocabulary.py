import json
import time
from collections import Counter

import pytest

from benchmarks import bench_vocabulary as bench
from benchmarks import vocabulary_tables
from benchmarks.bench_partition_selection import _judged
from benchmarks.vocabulary_corpora import tuples
from dp_core.data.privacy_units import Unit
from dp_core.data.tokens import split_words
from dp_core.vocabulary import subwords


def test_fit_of_counted_words_equals_fit_of_running_text():
    texts = ["Pain, pains; arm pain? \u4e2d x", "arm arm knee"]
    tokenizer = subwords.learn({"pain": 50, "arm": 40, "s": 1, "kne": 2}, 80)
    counted = Counter(word for text in texts for word in split_words(text))
    wanted = subwords.fit(tokenizer, texts)
    assert wanted is not None and 0 < wanted.unknown < 1
    fit = bench.fit_of(tokenizer, counted)
    for name in ("coverage", "fertility", "unknown"):
        assert getattr(fit, name) == pytest.approx(getattr(wanted, name))


def test_measured_rows_are_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULT", tmp_path / "vocabulary.json")
    measured: list[str] = []

    def measure(row: bench.Row) -> dict[str, float]:
        measured.append(row.name)
        return {"tokens": 1.0}

    def rows() -> list[bench.Row]:
        return [bench.Row("public"), bench.Row("private", "mad", 3.0)]

    later = time.monotonic() + 60
    bench.measure_missing("fits", "notes", iter(rows()[:1]), later, measure)
    bench.measure_missing("fits", "notes", iter(rows()), 0.0, measure)  # the time has expired
    assert measured == ["public"]
    bench.measure_missing("fits", "notes", iter(rows()), later, measure)
    assert measured == ["public", "private · mad · ε 3"]
    assert set(json.loads(bench.RESULT.read_text())["fits"]["notes"]) == set(measured)


def test_units_are_cut_into_tuples_up_to_a_word_limit():
    units = [Unit("a", ["one two three", "four"]), Unit("b", ["five six seven"])]
    cut = list(tuples(units, 2, 6))
    assert [words for _, words in cut] == [{"one", "two"}, {"three"}, {"four"}, {"five", "six"}]
    assert len({unit for unit, _ in cut}) == 4


def test_release_rate_above_delta_is_distinguished_from_chance():
    assert _judged("x", 1, 1.0, 0.002, 10_000, 20)["p_value"] > 0.4
    assert _judged("x", 1, 1.0, 0.002, 10_000, 60)["p_value"] < 1e-6
    assert _judged("x", 1, 1.0, 0.002, 10_000, 60)["least_rate_95"] > 0.002


def test_tables_on_the_page_match_the_results():
    page = vocabulary_tables.PAGE.read_text()
    by_name = vocabulary_tables.measured()
    assert set(vocabulary_tables._MARKED.findall(page)) == set(by_name)
    assert vocabulary_tables.filled(page, by_name) == page, (
        "run python -m benchmarks.vocabulary_tables"
    )


def test_tables_state_missing_measurements():
    tables = vocabulary_tables.tables({}, {}, {})
    assert set(tables.values()) == {"Not measured yet."}
    row = {"words_released": 7, "tokens": 90, "public_mlm": 0.1, "dp_mlm": 0.2,
           "public_f1": 0.3, "dp_f1": 0.45}  # fmt: skip
    models = vocabulary_tables.tables(
        {}, {"noteevents_format": {"private \u00b7 elimination \u00b7 \u03b5 3": row}}, {}
    )
    line = models["models noteevents_format"].splitlines()[-1]
    assert line == "| `private` | `elimination` | 3 | 7 | 90 | 10.0 | 20.0 | 30.0 | 45.0 |"
