import json

import pytest

from benchmarks import real_model
from benchmarks.vocabulary_tables import filled
from dp_core.privacy.accounting.accountants import epsilon_pld

KEPT = json.loads(real_model.RESULT.read_text())["labels"]


def test_page_and_advice_match_the_results_file():
    page = real_model.PAGE.read_text()
    assert filled(page, real_model.tables(KEPT)) == page
    assert json.loads(real_model.ADVICE.read_text()) == real_model.advice(KEPT)


@pytest.mark.parametrize("name", [name for name in KEPT if real_model.NO_PRIVACY not in name])
def test_noise_of_private_labels_yields_its_epsilon(name):
    (labels,) = (labels for labels in real_model.LABELS if labels.name == name)
    for cell in KEPT[name]["seeds"].values():
        plan = labels.plan(cell["sentences"], cell["noise"], labels.batch)
        assert 0.99 * labels.epsilon < epsilon_pld(plan.event(), plan.delta) <= labels.epsilon
