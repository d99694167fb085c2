from dataclasses import replace

import pytest
from report_examples import exposure_rows, job_report, sweep_report, with_models

from dp_core.labels import Dp, Label, Operator
from tasks.report.first_screen import first_screen
from tasks.report.model import Edition, Exposures, Report, edition_of

ROWS = {
    "none": (Exposures(Label.DP, exposure_rows({}, 7)),),
    "clear": (Exposures(Label.DP, exposure_rows({0.005: 0.01, 0.02: 0.0008}, 27)),),
    "vague": (Exposures(Label.DP, exposure_rows({0.005: 0.35, 0.02: 0.35}, 7)),),
    "not measured": (),
}


@pytest.mark.cases
def test_verdict_is_good_only_without_memory_of_canaries_that_the_control_remembers(
    private, control, tone, words
):
    memory = {"dp": private, "nonprivate": control}
    models = tuple(
        replace(model, exposures=ROWS[of_kind])
        for model in job_report().models
        if (of_kind := memory.get(model.kind)) in ROWS
    )
    report = job_report(models=models)
    result = first_screen(report)
    assert result.tone == tone
    text = f"{result.headline} {' '.join(_sentences(report).values())}"
    assert all(part in text for part in words.split("|"))


def test_publishable_verdict_ignores_withheld_exposure():
    report = job_report(made_up=False)
    assert first_screen(report).tone == "good"
    assert "remembers them" in _sentences(report)["Remembered"]
    published = edition_of(report, Edition.PUBLISHABLE)
    assert first_screen(published).tone == "open"
    assert "remembers them" not in _sentences(published)["Remembered"]


@pytest.mark.cases
def test_first_screen_states_the_gain_by_dp_training(f1, masked, words):
    public, *others = job_report().models
    public = replace(public, f1=Operator(f1), mlm_private=Operator(masked))
    assert words in _sentences(job_report(models=(public, *others)))["Useful"]


def test_gain_within_the_interval_of_the_score_is_next_to_nothing():
    public, private, _ = job_report().models
    public = replace(public, f1=Dp(0.66), mlm_private=None)
    private = replace(private, f1=Dp(0.69), interval=(Dp(0.65), Dp(0.72)), mlm_private=None)
    useful = _sentences(job_report(models=(public, private)))["Useful"]
    assert "69.0% (95% interval 65.0% – 72.0%)" in useful
    assert "added next to nothing to “Public only”: +3.0 points" in useful
    narrow = replace(private, interval=(Dp(0.67), Dp(0.71)))
    assert "next to nothing" not in _sentences(job_report(models=(public, narrow)))["Useful"]


def test_sentence_with_a_number_for_the_operator_is_labelled_so():
    whole = job_report(made_up=False)
    published = edition_of(whole, Edition.PUBLISHABLE)
    labels = [{s.topic: s.label for s in first_screen(r).sentences} for r in (whole, published)]
    assert [label["Useful"] for label in labels] == [Label.OPERATOR, Label.DP]
    assert [label["Remembered"] for label in labels] == [Label.OPERATOR, Label.DP]
    useful = _sentences(published)["Useful"]
    assert useful.endswith("public text of 33.2%. Control “Public only”: 31.4%.")


def test_usefulness_without_labelled_text_is_the_accuracy_on_masked_tokens():
    report = with_models(job_report(by_epoch=()), f1=None, f1_by_type={})
    assert _sentences(report)["Useful"].startswith(
        "The model with DP reaches an accuracy on masked tokens of private text of 37.7%."
    )


def test_first_screen_of_a_sweep_counts_settings_and_states_ranges():
    report = sweep_report(why_not_audited="a sweep has no audit")
    control = replace(report.models[0], name="public", kind="public", baseline="public")
    masked = {"mlm_private": None, "mlm_public": None}
    control = replace(control, f1=Operator(0.69), **masked)
    rows = tuple(replace(row, **masked) for row in report.models)
    sentences = _sentences(replace(report, models=(*rows, control)))
    assert "Each of 18 settings protects each patient" in sentences["Protected"]
    assert "ε = 1.49 – 7.11" in sentences["Protected"]
    assert "F1 of 66.0% – 74.0%. Control “public”: 69.0%." in sentences["Useful"]
    large = sum(row.spread is not None and row.spread.interval[0] > 0.69 for row in rows)
    assert f"in {large} of 18 settings" in sentences["Useful"]
    assert sentences["Remembered"].startswith("0 of 19 private models remember canaries.")
    assert sentences["Audited"] == "The claimed ε was not audited: a sweep has no audit."


def test_known_seed_protects_no_unit():
    assert "No patient" in _sentences(job_report(known_seed=True))["Protected"]


def _sentences(report: Report) -> dict[str, str]:
    return {sentence.topic: sentence.text for sentence in first_screen(report).sentences}
