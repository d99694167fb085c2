"""Tests of the verdict, which must not claim more than the audit shows."""

import dataclasses

from report_examples import exposure_rows, job_report

from dp_core.audit.exposure import ExposureRow
from dp_core.labels import Label
from tasks.report.model import Edition, Exposures, Kind, Report, edition_of
from tasks.report.page import verdict

NO_MEMORY, MEMORY = exposure_rows({}, 7), exposure_rows({0.005: 0.01, 0.02: 0.0008}, 27)


def _with(exposures: dict[Kind, tuple[Exposures, ...]]) -> Report:
    report = job_report()
    models = tuple(
        dataclasses.replace(model, exposures=exposures[model.kind])
        for model in report.models
        if model.kind in exposures
    )
    return dataclasses.replace(report, models=models)


def _exposures(rows: tuple[ExposureRow, ...]) -> tuple[Exposures, ...]:
    return (Exposures(Label.DP, rows),)


def test_verdict_is_good_only_if_the_control_remembers_canaries() -> None:
    result = verdict(_with({"dp": _exposures(NO_MEMORY), "nonprivate": _exposures(MEMORY)}))
    assert result.tone == "good"
    assert "the non-private one does" in result.headline
    assert "ε = 6.61" in result.detail
    assert "every patient" in result.detail


def test_verdict_is_open_if_no_control_remembers_canaries() -> None:
    alone = verdict(_with({"dp": _exposures(NO_MEMORY)}))
    assert alone.tone == "open"
    assert "open whether these canaries can be learned" in alone.detail
    with_control = verdict(
        _with({"dp": _exposures(NO_MEMORY), "nonprivate": _exposures(NO_MEMORY)})
    )
    assert with_control.tone == "open"
    assert "too rare for a conclusion" in with_control.detail


def test_verdict_is_bad_if_the_private_model_remembers_canaries() -> None:
    for control in (NO_MEMORY, MEMORY):
        result = verdict(_with({"dp": _exposures(MEMORY), "nonprivate": _exposures(control)}))
        assert result.tone == "bad"
        assert result.headline == "The private model remembers canaries"


def test_verdict_is_open_if_exposure_is_above_chance_without_clear_memory() -> None:
    vague = exposure_rows({0.005: 0.35, 0.02: 0.35}, 7)
    assert not any(row.remembers for row in vague)
    result = verdict(_with({"dp": _exposures(vague), "nonprivate": _exposures(MEMORY)}))
    assert result.tone == "open"
    assert result.headline == "The private model may remember some canaries"


def test_verdict_is_open_without_an_exposure_of_the_private_model() -> None:
    assert verdict(_with({"dp": ()})).tone == "open"
    assert verdict(_with({"public": _exposures(NO_MEMORY)})).tone == "open"


def test_publishable_verdict_ignores_withheld_exposure() -> None:
    report = job_report(made_up=False)
    assert verdict(report).tone == "good"
    published = verdict(edition_of(report, Edition.PUBLISHABLE))
    assert published.tone == "open"
    assert "without privacy" not in published.detail
