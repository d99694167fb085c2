"""The benchmark of recipes by gradients alone: the page and advice's curve are what it measured."""

from __future__ import annotations

import json

from benchmarks import bench_recipe
from benchmarks.vocabulary_tables import filled
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.advice import measured_curves

KEPT = json.loads(bench_recipe.RESULT.read_text())


def test_the_page_s_table_is_what_was_measured() -> None:
    page = bench_recipe.PAGE.read_text()
    assert filled(page, bench_recipe.tables(KEPT)) == page


def test_advice_goes_by_what_was_measured() -> None:
    assert measured_curves("gradients") == (bench_recipe.curve(KEPT),)


def test_the_noise_of_a_recipe_is_that_of_its_epsilon() -> None:
    """By the event of its plan, at the δ that the results name."""
    for name in ("base", "20,000 patients, 564 updates of 3,413, 4 maskings"):
        recipe, sigma = bench_recipe.RECIPES[name], KEPT["trials"][name]["recipe"]["noise"]
        plan = bench_recipe.plan_of(recipe, sigma, recipe.batch, recipe.patients)
        assert abs(epsilon_pld(plan.event(), KEPT["delta"]) - KEPT["epsilon"]) < 0.02
