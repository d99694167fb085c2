import json

import pytest

from benchmarks import real_model
from benchmarks.vocabulary_tables import filled
from dp_core.privacy.accounting.accountants import epsilon_pld
from tasks.protocol.defaults import private_labels

KEPT = json.loads(real_model.RESULT.read_text())
LABELS = KEPT["labels"]


def test_page_and_advice_match_the_results_file():
    page = real_model.PAGE.read_text()
    assert filled(page, real_model.tables(KEPT)) == page
    advice = [real_model.advice_on_notes(KEPT["continued"]), real_model.advice(LABELS)]
    assert real_model.ADVICE.read_text().splitlines() == advice


def test_default_of_private_labels_is_the_measured_recipe():
    labels = real_model.PRIVATE
    defaults = private_labels(4560, None)
    training = {k.removeprefix("finetune_"): v for k, v in defaults.items()}
    assert labels.training.items() - {"micro_rows": 8}.items() <= training.items()
    assert labels.batch == training["batch_size"]
    assert 0 <= training["epochs"] * 4560 / labels.batch - labels.updates < 4560 / labels.batch


@pytest.mark.parametrize("name", [name for name in LABELS if real_model.NO_PRIVACY not in name])
def test_noise_of_private_labels_yields_its_epsilon(name):
    (labels,) = (labels for labels in real_model.MEASURED if labels.name == name)
    for cell in LABELS[name]["seeds"].values():
        plan = labels.plan(cell["sentences"], cell["noise"], labels.batch)
        assert 0.99 * labels.epsilon < epsilon_pld(plan.event(), plan.delta) <= labels.epsilon
