"""The first sentence claims no more than the audit shows."""

import dataclasses

from report_examples import exposure_rows, job_report

from dp_core.labels import Label
from tasks.report.model import Edition, Exposures, JobReport, Kind, edition_of
from tasks.report.page import verdict

FORGETS, LEARNS = exposure_rows({}, 7), exposure_rows({0.005: 0.01, 0.02: 0.0008}, 27)


def _with(found: dict[Kind, Exposures | None]) -> JobReport:
    report = job_report()
    models = tuple(
        dataclasses.replace(model, exposures=found[model.kind])
        for model in report.models
        if model.kind in found
    )
    return dataclasses.replace(report, models=models)


def _read(rows: object) -> Exposures:
    return Exposures(Label.DP, rows)  # type: ignore[arg-type]


def test_good_needs_a_control_that_remembers() -> None:
    said = verdict(_with({"dp": _read(FORGETS), "nonprivate": _read(LEARNS)}))
    assert said.tone == "good"
    assert "the non-private one does" in said.headline
    assert "ε = 6.61" in said.detail
    assert "every patient" in said.detail


def test_open_without_a_control_or_with_a_forgetful_one() -> None:
    alone = verdict(_with({"dp": _read(FORGETS)}))
    assert alone.tone == "open"
    assert "open whether these canaries can be learned" in alone.detail
    forgetful = verdict(_with({"dp": _read(FORGETS), "nonprivate": _read(FORGETS)}))
    assert forgetful.tone == "open"
    assert "too rare to tell" in forgetful.detail


def test_bad_when_the_private_model_remembers_whatever_the_control() -> None:
    for control in (FORGETS, LEARNS):
        said = verdict(_with({"dp": _read(LEARNS), "nonprivate": _read(control)}))
        assert said.tone == "bad"
        assert said.headline == "The private model remembers canaries"


def test_above_chance_is_not_called_forgetful() -> None:
    vague = exposure_rows({0.005: 0.35, 0.02: 0.35}, 7)
    assert not any(row.remembers for row in vague)
    said = verdict(_with({"dp": _read(vague), "nonprivate": _read(LEARNS)}))
    assert said.tone == "open"
    assert said.headline == "The private model may remember some canaries"


def test_nothing_measured_says_nothing() -> None:
    assert verdict(_with({"dp": None})).tone == "open"
    assert verdict(_with({"public": _read(FORGETS)})).tone == "open"


def test_the_publishable_verdict_does_not_rest_on_withheld_exposure() -> None:
    report = job_report(made_up=False)
    assert verdict(report).tone == "good"
    published = verdict(edition_of(report, Edition.PUBLISHABLE))
    assert published.tone == "open"
    assert "without privacy" not in published.detail
