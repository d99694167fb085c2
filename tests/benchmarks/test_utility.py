import math

import pytest

from benchmarks.utility import tables as page_tables
from benchmarks.utility.cells import RECIPES, REFERENCE, Cell
from benchmarks.utility.runs import Results, Runner
from benchmarks.utility.shares import aggregate, curves, mean_of, share_of
from benchmarks.vocabulary_tables import filled
from tasks.protocol.settings import JobSettings

ALONE = {"gradients": (REFERENCE,)}
FIRST = Cell("made-up", 2000, 1, 3.0, REFERENCE)


def reference(seed: int = 1, public: float = 0.2, best: float = 0.6) -> dict:
    return {
        "corpus": "made-up", "units": 2000, "seed": seed, "vocabulary": "v",
        "public": {"f1": public, "mlm_accuracy_private": 0.1, "perplexity_private": 90.0},
        "nonprivate": {"f1": best, "mlm_accuracy_private": 0.5, "perplexity_private": 10.0},
    }  # fmt: skip


def line(f1: float, seed: int = 1, vocabulary: str = "v", **more) -> dict:
    return {
        "corpus": "made-up", "units": 2000, "seed": seed, "epsilon": 3.0, "recipe": REFERENCE,
        "reference": f"made-up/2000/{seed}", "vocabulary": vocabulary, "figure": 1e-3,
        "dp": {"f1": f1, "mlm_accuracy_private": 0.2, "perplexity_private": 30.0}, **more,
    }  # fmt: skip


def test_share_is_the_fraction_of_the_nonprivate_gain():
    assert share_of("f1", line(0.3), reference()) == pytest.approx(0.25)
    assert share_of("mlm_accuracy_private", line(0.3), reference()) == pytest.approx(0.25)
    lost = share_of("f1", line(0.1), reference())
    # A result worse than public text only yields a negative share.
    assert lost == pytest.approx(-0.25)
    way = math.log(90 / 30) / math.log(90 / 10)
    assert share_of("perplexity_private", line(0.3), reference()) == pytest.approx(way)
    for best in (0.605, 0.5):  # no positive gain, or too small
        assert share_of("f1", line(0.3), reference(public=0.6, best=best)) is None


def test_accuracies_with_different_vocabularies_have_no_share():
    other = line(0.3, vocabulary="w")
    assert share_of("mlm_accuracy_private", other, reference()) is None
    assert share_of("perplexity_private", other, reference()) is None
    assert share_of("f1", other, reference()) == pytest.approx(0.25)


def test_interval_of_the_mean_uses_students_t():
    interval = mean_of([0.2, 0.3, 0.4])
    reach = 4.302653 * 0.1 / math.sqrt(3)  # t of 2 degrees of freedom, from a table
    assert interval.mean == pytest.approx(0.3)
    assert (interval.low, interval.high) == pytest.approx((0.3 - reach, 0.3 + reach))
    assert mean_of([0.2]).low is None


def test_cells_are_aggregated_over_seeds_only():
    lines = {
        **{f"made-up/2000/{seed}": reference(seed) for seed in (1, 2)},
        "a": line(0.3, 1),
        "b": line(0.5, 2),
        "c": line(0.6, 1, epsilon=8.0),
        "d": line(0.6, 3),  # its reference has not been measured
    }
    rows = {(r["epsilon"], r["quantity"]): r for r in aggregate(lines)}
    three = rows[3.0, "entity F1"]
    assert (three["share"], three["seeds"]) == (pytest.approx(0.5), 2)
    assert three["low"] < 0.25 < 0.75 < three["high"]
    assert rows[8.0, "entity F1"]["share"] == pytest.approx(1.0)
    assert rows[8.0, "entity F1"]["low"] is None


def test_curve_uses_only_recipes_that_advice_may_name():
    lines = {"made-up/2000/1": reference(1)}
    for i, figure in enumerate((1e-4, 2e-4, 4e-4, 8e-4)):
        lines[f"a{i}"] = line(0.5 - i / 10, figure=figure)
        lines[f"b{i}"] = line(0.6, figure=figure, recipe="learning rate ×3")
    by_quantity = {curve.quantity: curve for curve in curves(lines, ALONE, "a test")}
    assert by_quantity["entity F1"].figures == (1e-4, 2e-4, 4e-4, 8e-4)
    assert by_quantity["entity F1"].shares == pytest.approx((0.75, 0.5, 0.25, 0.0))
    assert curves({"made-up/2000/1": reference(1), "a": line(0.3)}, ALONE, "") == []


def test_curve_excludes_cells_with_a_small_gain():
    small = reference(2, public=0.2, best=0.39)
    lines = {"made-up/2000/1": reference(1), "made-up/2000/2": small}
    for i, figure in enumerate((1e-4, 2e-4, 4e-4, 8e-4)):
        lines[f"a{i}"] = line(0.5 - i / 10, figure=figure)
        lines[f"b{i}"] = line(0.35, 2, figure=figure / 3)
    (curve,) = [c for c in curves(lines, ALONE, "a test") if c.quantity == "entity F1"]
    assert curve.figures == (1e-4, 2e-4, 4e-4, 8e-4)


def test_noise_is_calibrated_to_the_epsilon_of_the_cell(tmp_path):
    from tasks.releases.training_advice import RunReleases

    runner = Runner(tmp_path / "home", Results(tmp_path / "lines.jsonl"))
    for epsilon in (1.0, 8.0):
        settings = runner.settings(Cell("made-up", 2000, 1, epsilon, REFERENCE))
        spending = RunReleases.of(settings)
        assert 0.99 * epsilon < spending.epsilon <= epsilon
        assert spending.delta == pytest.approx(1.1e-6)
        assert settings.vocabulary_epsilon == 0.6


def test_every_recipe_has_valid_settings():
    for name in RECIPES:
        JobSettings.model_validate(Cell("made-up", 2000, 1, 3.0, name).settings())


def test_tables_on_the_page_match_the_results():
    page = page_tables.PAGE.read_text()
    tables = page_tables.tables(Results(page_tables.RESULTS).lines)
    assert all(f"<!-- {name} -->" in page and "DP-SGD" in table for name, table in tables.items())
    assert filled(page, tables) == page, "run python -m benchmarks.utility.tables"


def test_table_shows_means_over_seeds_and_their_shares():
    few = {"recipe": "phrases + gradients", "epsilon": 5.8}
    lines = {f"made-up/2000/{seed}": reference(seed) for seed in (1, 2)}
    lines |= {str(seed): line(0.4, seed) | few | {"phrases": {"f1": 0.3}} for seed in (1, 2)}
    table = page_tables.tables(lines)["gains"].splitlines()
    assert len(table) == 2 + 4
    assert table[2].startswith("| 2,000 (2) | public text only | 10.0% | 20.0 |")
    assert table[4].endswith("| **25%** (25 to 25), **50%** (50 to 50) |")
