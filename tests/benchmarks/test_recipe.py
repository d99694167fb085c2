import json

from benchmarks import bench_recipe
from benchmarks.vocabulary_tables import filled
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.advice import measured_curves

KEPT = json.loads(bench_recipe.RESULT.read_text())


def test_table_on_the_page_matches_the_results_file():
    page = bench_recipe.PAGE.read_text()
    assert filled(page, bench_recipe.tables(KEPT)) == page


def test_curve_of_the_advice_matches_the_results_file():
    assert measured_curves("gradients") == (bench_recipe.curve(KEPT),)


def test_noise_of_a_recipe_yields_its_epsilon():
    """The check uses the plan's event and the δ of the results file."""
    for name in ("base", "20,000 patients, 564 updates of 3,413, 4 maskings"):
        recipe, sigma = bench_recipe.RECIPES[name], KEPT["trials"][name]["recipe"]["noise"]
        plan = bench_recipe.plan_of(recipe, sigma, recipe.batch, recipe.patients)
        assert abs(epsilon_pld(plan.event(), KEPT["delta"]) - KEPT["epsilon"]) < 0.02
