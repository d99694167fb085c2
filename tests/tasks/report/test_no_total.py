"""Where guarantees do not add up, no page prints a sum: it says why, and shows each part."""

from __future__ import annotations

import json
from dataclasses import replace

import report_examples

from dp_core.privacy.statement import DatasetTotal
from tasks.report import tables
from tasks.report import tables as cells
from tasks.report.model import Cost, Edition, JobReport
from tasks.report.page import job_page, verdict


def without_total() -> JobReport:
    report = report_examples.job_report()
    models = tuple(
        replace(m, cost=Cost(DatasetTotal("", None, None, 0.0))) if m.kind == "dp" else m
        for m in report.models
    )
    return replace(report, models=models)


def test_the_table_says_that_there_is_no_total_and_keeps_the_parts() -> None:
    report = without_total()
    table = tables.closing_table(report.models, report.unit)
    (row,) = [r for r, m in zip(table.rows, report.models, strict=True) if m.kind == "dp"]
    total = row[3]
    assert (total.text, total.value) == (cells.NO_TOTAL, None)
    assert "unlike neighbours" in total.detail
    assert row[4].text == cells.NOT_MEASURED  # δ of nothing
    (dp,) = [m for m in report.models if m.kind == "dp"]
    assert (row[1].value, row[2].value) == (dp.epsilon_vocabulary, dp.epsilon_training)
    assert json.loads(json.dumps(table.to_json()))


def test_the_page_and_its_first_sentence_claim_no_sum() -> None:
    report = without_total()
    said = verdict(report)
    assert "have no total" in said.detail
    assert "ε =" not in said.detail
    html = job_page(report, Edition.PUBLISHABLE).html
    assert cells.NO_TOTAL in html and cells.WHY_NO_TOTAL in html
