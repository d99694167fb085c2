from dataclasses import replace

import pytest
from report_examples import exposure_rows, job_report

from dp_core.labels import Label
from tasks.report.model import Edition, Exposures, edition_of
from tasks.report.page import verdict

ROWS = {
    "none": (Exposures(Label.DP, exposure_rows({}, 7)),),
    "clear": (Exposures(Label.DP, exposure_rows({0.005: 0.01, 0.02: 0.0008}, 27)),),
    "vague": (Exposures(Label.DP, exposure_rows({0.005: 0.35, 0.02: 0.35}, 7)),),
    "not measured": (),
}


@pytest.mark.parametrize(
    ("private", "control", "tone", "words"),
    [
        ("none", "clear", "good", "the non-private one does|ε = 6.61|every patient"),
        ("none", None, "open", "open whether these canaries can be learned"),
        ("none", "none", "open", "too rare for a conclusion"),
        ("clear", "none", "bad", "The private model remembers canaries"),
        ("clear", "clear", "bad", "The private model remembers canaries"),
        ("vague", "clear", "open", "The private model may remember some canaries"),
        ("not measured", None, "open", "Memory was not measured"),
        (None, "none", "open", "Memory was not measured"),
    ],
)
def test_verdict_is_good_only_without_memory_of_canaries_that_the_control_remembers(
    private: str | None, control: str | None, tone: str, words: str
) -> None:
    memory = {"dp": private, "nonprivate": control}
    models = tuple(
        replace(model, exposures=ROWS[of_kind])
        for model in job_report().models
        if (of_kind := memory.get(model.kind)) is not None
    )
    result = verdict(job_report(models=models))
    assert result.tone == tone
    assert all(part in f"{result.headline} {result.detail}" for part in words.split("|"))


def test_publishable_verdict_ignores_withheld_exposure() -> None:
    report = job_report(made_up=False)
    assert verdict(report).tone == "good"
    published = verdict(edition_of(report, Edition.PUBLISHABLE))
    assert published.tone == "open"
    assert "without privacy" not in published.detail
