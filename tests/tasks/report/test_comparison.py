"""Tests of the figures by which runs are compared: an edition contains only its labels."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report_examples import causal_sweep_report, job_report, sweep_report

from dp_core.labels import Label
from tasks.report.model import Edition, Report, edition_of
from tasks.report.page import figures_of, report_page

PRIVATE = [
    job_report(made_up=False),
    sweep_report(made_up=False),
    causal_sweep_report(made_up=False),
]


@pytest.mark.parametrize("report", PRIVATE)
def test_publishable_figures_contain_no_operator_value(
    report: Report,
) -> None:
    shown = figures_of(edition_of(report, Edition.PUBLISHABLE))
    figures = [figure for model in shown["models"].values() for figure in model.values()]
    assert {figure.get("label") for figure in figures} <= {Label.PUBLIC, Label.DP, None}
    assert any(figure.get("withheld") for figure in figures)
    whole = figures_of(edition_of(report, Edition.OPERATOR))
    secret = {
        str(figure["value"])
        for model in whole["models"].values()
        for figure in model.values()
        if figure["label"] == Label.OPERATOR
    }
    text = json.dumps(shown)
    assert secret and not any(value in text for value in secret)


def test_causal_models_are_compared_by_perplexity_instead_of_masked_accuracy() -> None:
    (point, *_) = figures_of(edition_of(PRIVATE[2], Edition.PUBLISHABLE))["models"].values()
    assert point["perplexity_public"] == {"value": "317.5", "label": Label.DP}
    assert point["perplexity_private"] == {"withheld": True}
    assert not {"f1", "mlm_accuracy_public", "mlm_accuracy_private"} & point.keys()
    (full, *_) = figures_of(edition_of(PRIVATE[2], Edition.OPERATOR))["models"].values()
    assert full["perplexity_private"] == {"value": "431.7", "label": Label.OPERATOR}


def test_publishable_figures_of_a_known_seed_are_public_only() -> None:
    shown = edition_of(replace(PRIVATE[0], known_seed=True), Edition.PUBLISHABLE)
    models = figures_of(shown)["models"].values()
    assert {f["label"] for m in models for f in m.values() if "label" in f} == {Label.PUBLIC}


def test_page_has_the_figures_of_its_edition() -> None:
    for edition in Edition:
        page = report_page(PRIVATE[0], edition)
        assert page.figures == figures_of(edition_of(PRIVATE[0], edition))
