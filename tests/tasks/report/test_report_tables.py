import io
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_examples import (
    VOCABULARY_SIZE,
    entries,
    extractions,
    job_report,
    membership,
    sweep_report,
    with_models,
)
from rich.console import Console

from dp_core.audit.exposure import EMBEDDED, IN_ROWS
from dp_core.labels import Dp, Label, Operator
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, RandomCountSelection
from dp_core.privacy.statement import DatasetTotal, epsilons
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.report import audit_tables, models_table, tables
from tasks.report.first_screen import first_screen
from tasks.report.job_results import _label_counts, _realised_batch, audit_time, last_values
from tasks.report.model import Cost, Edition, Exposures, Membership, Samples, Withheld, edition_of
from tasks.report.page import figures_of, report_page
from tasks.report.tables import NOT_MEASURED, WITHHELD_MARK, Cell, Header, Table, rich_table
from tasks.results import Input


def _closing() -> Table:
    report = job_report()
    return models_table.models_table(report.models, report.unit)


def test_closing_table_has_one_row_per_model_with_cost_scores_and_exposure():
    table = _closing()
    assert [row[0].text for row in table.rows] == ["Public only", "DP", "Non-private"]
    private, unprotected = ([cell.text for cell in row[1:8]] for row in table.rows[1:])
    units = [f"{header.name}, {header.unit}" for header in table.headers[1:]]
    assert dict(zip(units, private, strict=False)) == {
        "ε_V, vocabulary": "1",
        "ε_T, training": "6.27",
        "ε, in total, per patient": "6.61",
        "δ, in total": "1.1·10⁻⁶",
        "MLM accuracy, public text, %": "33.2",
        "MLM accuracy, private text, %": "37.7",
        "Entity F1, strict, micro, %": "68.3",
    }
    assert units[7:] == ["Exposure, mean, bits", "Exposure, largest, bits"]
    assert unprotected[1:4] == ["∞", "∞", NOT_MEASURED]
    (note,) = table.notes
    assert f"always ranked first is {math.log2(VOCABULARY_SIZE):.1f}" in note
    assert "about 1 bit" in note


def test_every_measured_cell_has_a_label_and_a_value():
    report = job_report()
    for table in (
        _closing(),
        tables.entity_table(report.models),
        audit_tables.exposure_table(report.models, report.occurrences),
        audit_tables.membership_table(report.models),
        audit_tables.extraction_table(report.models),
        models_table.results_table(sweep_report()),
        tables.facts_table("training", report.training),
    ):
        for row in table.rows:
            for header, cell in zip(table.headers, row, strict=True):
                if header.numeric and cell.text != NOT_MEASURED:
                    assert cell.label is not None, (table.key, header)
                    assert cell.value is not None, (table.key, header)


def test_only_exposures_that_show_memory_raise_an_alarm():
    alarms = [[cell.alarm for cell in row[-2:]] for row in _closing().rows]
    assert alarms == [[False, False], [False, False], [True, True]]
    detail = audit_tables.exposure_table(job_report().models, job_report().occurrences)
    remembered = {(row[0].text, row[-1].text) for row in detail.rows}
    assert remembered == {("Public only", "no"), ("DP", "no"), ("Non-private", "yes")}
    assert len(detail.rows) == 3 * 2 * 3 * 2  # models, contexts, patterns, rates


def test_counted_occurrences_are_for_the_operator_and_expected_occurrences_are_public():
    report = job_report(made_up=False)
    for edition, counted in ((Edition.OPERATOR, "81.3"), (Edition.PUBLISHABLE, WITHHELD_MARK)):
        shown = edition_of(report, edition)
        table = audit_tables.exposure_table(shown.models, shown.occurrences)
        rows = [row for row in table.rows if row[2].detail == "p = 0.02" and row[1].text == "HSH"]
        assert rows and {(row[2].text, row[3].text) for row in rows} == {("80", counted)}
        assert {row[2].label for row in rows} == {Label.PUBLIC}
        assert {row[3].label for row in rows} == {Label.OPERATOR}


def test_exposure_in_training_rows_is_shown_to_the_operator_only():
    dp = job_report().model("dp")
    assert dp is not None
    within = tuple(
        replace(row, context=IN_ROWS) for row in dp.audits[0].rows if row.context == EMBEDDED
    )
    row = replace(dp, exposures_in_rows=Exposures(Label.OPERATOR, within))
    report = job_report(made_up=False, models=(row,))
    shown = {}
    for edition in Edition:
        models = edition_of(report, edition).models
        table = audit_tables.exposure_table(models, {})
        shown[edition] = [r for r in table.rows if r[0].detail == "in training rows"]
    assert len(shown[Edition.OPERATOR]) == len(within) and not shown[Edition.PUBLISHABLE]
    assert {r[4].label for r in shown[Edition.OPERATOR]} == {Label.OPERATOR}
    ranked = shown[Edition.OPERATOR][0][7]
    rank = within[0]
    band = f"{rank.rank_exposure_null_low:.1f} – {rank.rank_exposure_null_high:.1f}"
    assert ranked.detail == f"{band}; {rank.rank_exposure_p_value:.2f}"


def test_membership_table_shows_each_attack_with_the_maximum_under_the_guarantee():
    report = job_report()
    table = audit_tables.membership_table(report.models)
    assert len(table.rows) == 3 * 4
    public, private, unprotected = (table.rows[place] for place in (0, 4, 8))
    assert "397 against 283" in private[0].detail
    assert (private[2].text, private[2].detail) == ("28.7", "24.6 – 32.9, ≤ 97.0")
    assert all("≤" in cell.detail for row in (public, private) for cell in row[2:])
    assert not any("≤" in cell.detail for cell in unprotected)
    assert not any(cell.alarm for row in table.rows for cell in row)
    loss_attack = next(row for row in membership(0.9, 0.5)[0].rows if row.attack == "loss")
    assert loss_attack.above
    model = replace(report.models[1], memberships=membership(0.9, 0.5))
    assert all(row[2].alarm for row in audit_tables.membership_table([model]).rows)
    shown = edition_of(job_report(made_up=False), Edition.PUBLISHABLE)
    assert audit_tables.membership_table(shown.models).rows == ()


def test_epoch_tables_begin_with_the_model_from_which_the_training_started():
    public, dp, unprotected = job_report().models
    assert audit_tables.epoch_tables([public, dp, unprotected])[1].rows == ()
    kept = {
        kind: tuple(
            Membership(attacks.rows, {"members": 3.0 - e / 4, "others": 3.2 - e / 5}, e)
            for e, share in ((1.0, leakage / 2), (2.5, leakage))
            for attacks in membership(share, 0.9)
        )
        for kind, leakage in (("dp", 0.1), ("nonprivate", 0.4))
    }
    start = replace(membership(0.01, 0.0)[0], losses={"members": 3.5, "others": 3.4999})
    models = [
        replace(public, memberships=(start,)),
        replace(dp, memberships=kept["dp"]),
        replace(unprotected, memberships=kept["nonprivate"]),
    ]
    losses, table = audit_tables.epoch_tables(models)
    assert [header.name for header in losses.headers[1:]] == ["Epoch 0", "Epoch 1", "Epoch 2.5"]
    assert [cell.text for cell in losses.rows[0]] == ["DP", "3.500", "3.000", "2.700"]
    assert losses.rows[1][2].detail == "2.750 on training rows"
    assert len(table.rows) == 2 * 4  # two trainings, each with all attacks at all levels
    assert [cell.text for cell in table.rows[4]] == ["Non-private", "loss", "1.0", "20.0", "40.0"]
    assert table.rows[4][0].detail == "by sample"
    assert {c.label for row in table.rows for c in row[2:]} == {Label.OPERATOR}
    report = job_report(made_up=False, models=tuple(models))
    shown = edition_of(report, Edition.PUBLISHABLE)
    assert [table.rows for table in audit_tables.epoch_tables(shown.models)] == [(), ()]
    assert figures_of(shown)["leakage"] == []
    leakages = figures_of(report)["leakage"]
    assert [row["epoch"] for row in leakages if row["model"] == "DP"] == [1.0] * 4 + [2.5] * 4
    assert [row["epoch"] for row in leakages if row["model"] == "Public only"] == [None] * 4


def test_extraction_table_compares_training_text_with_the_control():
    table = audit_tables.extraction_table(job_report().models)
    assert len(table.rows) == 3 * (3 + 2)
    private, unprotected = table.rows[5:10], table.rows[10:]
    assert [row[1].text for row in private] == ["top-k", "greedy", "sampling", "greedy", "sampling"]
    assert private[0][0].detail == "36 secrets of planted canaries, 211 never planted"
    assert private[3][0].detail == "317 training rows, 211 held out"
    assert [row[2].text for row in private] == ["5.6"] * 3 + ["50.5"] * 2
    assert [row[3].text for row in private] == ["1.4"] * 3 + ["47.9"] * 2
    assert all("≤ 67.3" in row[2].detail for row in private[3:])
    assert not any("≤" in row[2].detail for row in (*private[:3], *unprotected))
    assert {row[2].alarm for row in unprotected} == {True}
    assert {row[2].alarm for row in private} == {False}
    notes = " ".join(table.notes)
    assert "fixed before the training" in notes and "first 10 tokens of a row" in notes
    shown = edition_of(job_report(made_up=False), Edition.PUBLISHABLE)
    table = audit_tables.extraction_table(shown.models)
    assert {row[0].text for row in table.rows} == {"Public only", "DP"}
    assert {cell.label for row in table.rows for cell in row} == {None, Label.DP}
    assert "Rows:" not in " ".join(table.notes)
    (targeted, _) = extractions(Label.DP, 4, 1)
    late = targeted.model_copy(
        update={"details": targeted.details | {"fixed_before_training": False}}
    )
    table = audit_tables.extraction_table([replace(job_report().models[1], extractions=(late,))])
    assert "chosen after the training" in " ".join(table.notes)


def test_samples_of_a_model_without_privacy_are_shown_to_the_operator_only():
    rows = job_report().models
    samples = [Samples(row.audits[0].label, "Bob is", (f"{row.name} wrote",)) for row in rows]
    models = [replace(row, samples=s) for row, s in zip(rows, samples, strict=True)]
    report = job_report(made_up=False, models=tuple(models))
    texts = {
        edition: [
            row[1].text
            for row in audit_tables.samples_table(edition_of(report, edition).models).rows
        ]
        for edition in Edition
    }
    assert texts[Edition.OPERATOR] == ["Public only wrote", "DP wrote", "Non-private wrote"]
    assert texts[Edition.PUBLISHABLE] == ["Public only wrote", "DP wrote"]
    assert not audit_tables.samples_table(rows).rows
    page = report_page(report, Edition.PUBLISHABLE).html
    assert "DP wrote" in page and "Non-private wrote" not in page


def test_entity_types_without_a_publishable_value_are_not_named():
    report = job_report(made_up=False)
    public, dp, nonprivate = report.models
    assert all(not row.f1_by_type for row in edition_of(report, Edition.PUBLISHABLE).models)
    on_public_labels = replace(dp, f1=Dp(0.6), f1_by_type={"problem": Dp(0.5)})
    mixed = replace(report, models=(public, on_public_labels, nonprivate))
    table = tables.entity_table(edition_of(mixed, Edition.PUBLISHABLE).models)
    assert [row[0].text for row in table.rows] == ["problem", "all (micro)", "95% interval"]
    assert [cell.withheld for cell in table.rows[0][1:]] == [True, False, True]
    full = tables.entity_table(edition_of(mixed, Edition.OPERATOR).models)
    assert [row[0].text for row in full.rows] == ["problem", "test", "treatment", "all (micro)"]
    assert full.rows[1][2].text == NOT_MEASURED


def test_labels_are_counted_by_type_and_part_for_the_operator_only():
    report = job_report(made_up=False)
    table = tables.entity_table(report.models, report.labels)
    assert [h.title for h in table.headers[1:3]] == ["Labels, train part", "Labels, test part"]
    assert [cell.value for cell in table.rows[0][1:3]] == [1913, 2826]
    assert [cell.text for cell in table.rows[3][1:3]] == [NOT_MEASURED] * 2  # of all types
    assert edition_of(report, Edition.PUBLISHABLE).labels == ()
    many = tables.entity_table(report.models * 5, report.labels)  # too many columns
    assert [header.name for header in many.headers] == ["Entity type", "Labels", "Labels"]


@pytest.mark.parametrize("folds", [0, 2])
def test_labels_of_a_single_part_are_counted_over_its_folds(folds):
    numbers = {"train_labels/test": 5, "test_labels/test": 2, "f1/test": 0.5}
    metrics = [MetricRecord(name=n, value=v, label="public") for n, v in numbers.items()]
    result = SimpleNamespace(result=SimpleNamespace(metrics=metrics))
    spec = SimpleNamespace(settings={"entities_folds": folds})
    facts = _label_counts(spec, {"public": {}, "dp": {"finetuning": result}})
    expected = {"all folds": 7} if folds else {"train part": 5, "test part": 2}
    assert {fact.note: fact.value for fact in facts} == expected
    assert {(fact.name, fact.label) for fact in facts} == {("test", Label.PUBLIC)}


def test_ledger_table_shows_epsilon_by_pld_and_by_rdp():
    patient = PrivacyUnit.PATIENT
    training = PoissonGaussian.single(0.1, 4.0, 3, unit=patient)
    chosen = RandomCountSelection((training,), "poisson", 1e-6, mean=2.0, unit=patient)
    table = tables.ledger_table(entries(chosen), "notes", patient)
    assert "per patient" in table.caption
    histogram, trained, _ = table.rows
    assert [cell.text for cell in histogram[3:]] == [NOT_MEASURED, "10⁻⁷", "settled"]
    expected = [tables.significant(value) for value in epsilons(entries()[1].event, 1e-6)]
    assert [cell.text for cell in trained[2:]] == [*expected, "10⁻⁶", "settled"]
    assert trained[0].detail == "seed c2ffe90112bd"
    assert [row[2].detail for row in table.rows] == ["", "", "by RDP: no PLD is known"]


def test_undefined_f1_is_shown_as_no_entities_to_the_operator_only():
    counts = {"expected_entities": 0.0, "loss": 1.0}
    metrics = [MetricRecord(name=n, value=v, label="operator") for n, v in counts.items()]
    result = StepResult(step="finetune", spec_hash="0", outputs={}, metrics=metrics, facts={})
    undefined = last_values(result)["f1"]
    report = with_models(job_report(made_up=False), f1=undefined, interval=None, f1_by_type={})
    for edition, text in ((Edition.OPERATOR, "no entities"), (Edition.PUBLISHABLE, WITHHELD_MARK)):
        shown = edition_of(report, edition)
        cells_of_f1 = [*tables.entity_table(shown.models).rows[0][1:]]
        closing = models_table.results_table(shown)
        column = [header.name for header in closing.headers].index("Entity F1")
        cells_of_f1 += [row[column] for row in closing.rows]
        assert {cell.text for cell in cells_of_f1} == {text}
        assert all(cell.value is None for cell in cells_of_f1)
    assert "nan" not in json.dumps(figures_of(report), default=str).lower()


def test_json_of_a_table_keeps_unrounded_values_and_writes_infinity_as_text():
    record = json.loads(json.dumps(_closing().to_json(), allow_nan=False))
    assert (record["rows"][2][2]["text"], record["rows"][2][2]["value"]) == ("∞", "inf")
    assert (record["rows"][1][7]["value"], record["rows"][1][7]["label"]) == (0.6827, "operator")
    assert record["headers"][3] == {"name": "ε", "unit": "in total, per patient", "numeric": True}
    assert tables.TABLE.validate_python(record).to_json() == record


def test_table_with_rows_and_headers_of_different_length_is_refused():
    with pytest.raises(ValueError, match="table x"):
        Table("x", "x", (Header("a"), Header("b")), ((Cell("1"),),))


@pytest.mark.parametrize("width", [60, 80])
def test_terminal_shows_every_cell_in_full_with_the_mark_of_its_label(width):
    exposure = audit_tables.exposure_table(job_report().models, job_report().occurrences)
    closing = replace(_closing(), lead="Audit of the private training: consistent.")
    shown = rich_table(exposure if width == 60 else closing)
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(shown)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    if width > 60:
        assert text.startswith(closing.lead)
        for value in ("1.1·10⁻⁶", "33.2ᵈ", "68.3°", "∞", "Non-private", "operator"):
            assert value in text


@pytest.mark.cases
def test_numbers_are_written_with_three_significant_digits(value, text):
    assert tables.significant(value) == text


def test_percentage_shows_its_label_and_whether_it_was_measured_or_withheld():
    cells = [tables.percentage(v) for v in (Dp(0.3321), Operator(0.5), Withheld(), None)]
    assert [(cell.text, cell.value, cell.label) for cell in cells] == [
        ("33.2", 0.3321, Label.DP),
        ("50.0", 0.5, Label.OPERATOR),
        (WITHHELD_MARK, None, Label.OPERATOR),
        (NOT_MEASURED, None, None),
    ]
    assert [cell.withheld for cell in cells] == [False, False, True, False]


def test_guarantees_without_a_total_keep_their_epsilons_and_claim_no_sum():
    none = Cost(DatasetTotal(("notes",), None, None, 0.0))
    public, private, unprotected = job_report().models
    dp = replace(private, cost=none, pretrained=none)
    report = job_report(models=(public, dp, unprotected), curves=())
    row = models_table.results_table(report).rows[1]
    assert (row[3].text, row[3].value) == (tables.NO_TOTAL, None)
    assert "different neighbours" in row[3].detail
    assert row[4].text == tables.NOT_MEASURED  # no δ without a total
    assert (row[1].value, row[2].value) == (dp.epsilon_vocabulary, dp.epsilon_training)
    protected, *_ = first_screen(report).sentences
    assert "have no total" in protected.text and "ε =" not in protected.text
    html = report_page(replace(report, models=(dp,)), Edition.PUBLISHABLE).html
    assert tables.NO_TOTAL in html and tables.WHY_NO_TOTAL in html


def test_audit_time_is_a_share_of_training_time_for_the_operator():
    def took(seconds: float) -> Input:
        result = StepResult(step="", spec_hash="", outputs={}, metrics=[], seconds=seconds)
        return Input(result, Path(), f"store://step/{seconds}")

    training = {"pretraining": took(80.0), "vocabulary": took(50.0)}
    measured = {"finetuning": took(15.0), "exposure": took(4.0), "audit": took(3.0)}
    public = {"pretraining": took(5.0), "membership": took(2.0)}
    kept = training | {"exposure": took(4.0)}  # a training is counted once for all of its models
    assert audit_time([training | measured, public, kept]) == Operator(9 / 100)
    assert audit_time([training]) is None


def test_every_epoch_has_the_epsilon_of_all_epochs_and_private_scores_are_withheld():
    report = job_report(made_up=False)
    table = models_table.by_epoch_table(report.by_epoch, report.unit)
    titles = [f"{header.name} {header.unit}".strip() for header in table.headers]
    assert titles[2:4] == ["ε in total, per patient", "δ in total"]
    assert titles[4:] == ["Epoch 2", "Epoch 4", "Epoch 6"]
    assert [(row[0].text, row[1].text, row[1].detail) for row in table.rows[:3]] == [
        ("DP", "Entity F1", "strict, micro, %"),
        ("DP", "Exposure", "mean, bits"),
        ("DP", "Exposure", "largest, bits"),
    ]
    assert {row[2].value for row in table.rows[:3]} == {6.61}  # one total for all three epochs
    assert [cell.text for cell in table.rows[0][4:]] == ["64.1", "66.3", "68.3"]
    assert any("has the ε of all" in note for note in table.notes)
    assert any("would give another model" in note for note in table.notes)
    shown = edition_of(report, Edition.PUBLISHABLE)
    public = models_table.by_epoch_table(shown.by_epoch, shown.unit)
    hidden = [all(cell.withheld for cell in row[4:]) for row in public.rows]
    # F1, and all rows of the model without privacy.
    assert hidden == [True, False, False, True, True, True]
    assert not any(cell.withheld for row in public.rows[1:3] for cell in row)
    assert models_table.by_epoch_table((), report.unit).rows == ()


def test_publishable_report_of_a_private_selection_has_no_date():
    report = sweep_report(made_up=False)
    chosen = sweep_report(made_up=False, settings={"selection": "random-count"})
    assert edition_of(report, Edition.PUBLISHABLE).created == report.created[:10]
    assert edition_of(chosen, Edition.PUBLISHABLE).created == "withheld"
    assert edition_of(chosen, Edition.OPERATOR).created == report.created


def trained_with_batch(realised: float) -> StepResult:
    """Return a training whose mean batch is `realised`, where 10 was expected."""
    phases = [{"steps": 10, "expected_batch": 5.0}, {"steps": 10, "expected_batch": 15.0}]
    means = {10: 5.0, 20: 2 * realised - 5.0}  # the second half is drawn as often as the first
    metrics = [
        MetricRecord(name="batch", value=value, step=step, label="operator")
        for step, value in [*means.items(), (20, means[20])]  # a resumed run repeats a point
    ]
    return StepResult(
        step="pretrain", spec_hash="a", outputs={}, metrics=metrics, releases=[],
        facts={"plan": {"schedule": phases}},
    )  # fmt: skip


BATCHES = {11.0: False, 7.9: True, 12.1: True}  # realised mean, and whether a warning follows


@pytest.mark.parametrize(("realised", "warned"), BATCHES.items())
def test_operator_learns_that_batches_differ_from_the_expected_ones(realised, warned):
    result = trained_with_batch(realised)
    (fact,) = _realised_batch(Input(result, Path()), "Realised batch")
    assert f"{realised:.4g} on average, {realised * 10:.0f}% of the expected" in fact.value
    assert ("differ by more than a fifth" in fact.value) == warned
    assert ("declare fewer units" in fact.value) == (realised < 8)
    assert (fact.label, fact.note) == (Label.OPERATOR, "")
    other = result.model_copy(update={"metrics": []})
    assert not list(_realised_batch(Input(other, Path()), ""))


@pytest.mark.parametrize("example", [job_report, sweep_report])
def test_realised_batches_are_not_published(example):
    """The realised batch tells the number of units, so nothing about it is published."""
    facts = [
        fact
        for realised in BATCHES
        for fact in _realised_batch(Input(trained_with_batch(realised), Path()), "Realised batch")
    ]
    report = example(made_up=False, training=tuple(facts))
    pages = {edition: report_page(report, edition) for edition in Edition}
    published = pages[Edition.PUBLISHABLE]
    for realised, fact in zip(BATCHES, facts, strict=True):
        assert fact.value in pages[Edition.OPERATOR].html
        assert f"{realised:.4g} on average" not in published.html + json.dumps(published.figures)
    assert "differ by more" not in published.html and "declare fewer" not in published.html
