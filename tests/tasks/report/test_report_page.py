import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from report_examples import OMITTED, causal_sweep_report, job_report, sweep_report, with_models

from dp_core.audit.protocol import AuditRecord, Finding, NullDistribution
from dp_core.labels import Dp, Label, Operator
from tasks.report.model import Edition, Fact, Report, Withheld, edition_of
from tasks.report.models_table import results_table
from tasks.report.page import Page, report_page
from tasks.report.tables import WITHHELD_MARK

EXAMPLES = {
    "made up": (job_report(), Edition.PUBLISHABLE),
    "operator": (job_report(made_up=False), Edition.OPERATOR),
    "publishable": (job_report(made_up=False), Edition.PUBLISHABLE),
    "sweep": (sweep_report(), Edition.PUBLISHABLE),
    "published sweep": (sweep_report(made_up=False), Edition.PUBLISHABLE),
}


class _Pages(dict[str, Page]):
    """The pages of the examples; each is drawn when a test first reads it."""

    def __missing__(self, name: str) -> Page:
        return self.setdefault(name, report_page(*EXAMPLES[name]))


PAGES = _Pages()


@pytest.mark.parametrize("name", EXAMPLES)
def test_page_is_well_formed_and_refers_to_no_other_file(name):
    html = PAGES[name].html
    # As XML, in which elements without content are closed.
    root = ET.fromstring(re.sub(r"<(meta|br|img)\b([^>]*)>", r"<\1\2/>", html))  # noqa: S314
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    names = {"src", "href", "srcset", "action", "data"}
    references = {v for element in root.iter() for n, v in element.attrib.items() if n in names}
    references |= set(re.findall(r"url\(([^)]*)\)", html))
    assert all(reference.startswith("#") and reference[1:] in ids for reference in references)
    assert "://" not in html and "xmlns" not in html
    assert "@import" not in html
    assert "<script" not in html
    assert "{{" not in html
    assert "None" not in html


def test_page_has_all_sections_figures_and_labels():
    html = PAGES["made up"].html
    sections = (
        "statement", "results", "memory", "entities", "training", "vocabulary", "ledger", "repeat",
        "figure-exposure", "figure-training",
    )  # fmt: skip
    parts = [f'id="{name}"' for name in sections]
    parts += [f'<span class="chip {label.value}">{label.value}</span>' for label in Label]
    parts += ["./confide run", "mock-tpu:2", "2.15.1", "at most e^6.61"]
    parts += ["ε<sub>V</sub>", "of a budget of ε = 10", "poisson_gaussian", "c2ffe90112bd"]
    assert [part for part in parts if part not in html] == []


def _bare(**fields: object) -> Report:
    """Return a report of the DP model alone, without data for figures."""
    private = replace(job_report().model("dp"), exposures=(), f1=None, f1_by_type={})
    return job_report(models=(private,), curves=(), **fields)


def test_banner_names_the_edition_made_up_data_and_known_seeds():
    assert "made up or public" in PAGES["made up"].html
    assert "do not publish" in PAGES["operator"].html
    assert "Public edition.</b> Unprotected" in PAGES["publishable"].html
    seeded = _bare(known_seed=True)
    assert "Not private: known seed." in report_page(seeded, Edition.OPERATOR).html
    assert "known seed" not in PAGES["made up"].html


def _everything(page: Page) -> str:
    """Return all output of an edition: page, drawings, tables and figures for comparisons."""
    tables = json.dumps([table.to_json() for table in page.tables], ensure_ascii=False)
    figures = json.dumps(page.figures, ensure_ascii=False)
    return page.html + tables + figures + "".join(drawing.svg for drawing in page.drawings)


def _parts(content: object) -> Iterator[object]:
    yield content
    inner: Iterable[object] = ()
    if isinstance(content, Mapping):
        inner = content.values()
    elif isinstance(content, tuple):
        inner = content
    elif is_dataclass(content):
        inner = (getattr(content, field.name) for field in fields(content))
    for part in inner:
        yield from _parts(part)


@pytest.mark.parametrize("known_seed", [False, True])
@pytest.mark.parametrize("report", [job_report, sweep_report, causal_sweep_report])
def test_no_part_of_a_publishable_edition_has_a_hidden_label(report, known_seed):
    hidden = {Label.OPERATOR, Label.DP} if known_seed else {Label.OPERATOR}
    whole = replace(report(made_up=False), known_seed=known_seed)
    shown = list(_parts(edition_of(whole, Edition.PUBLISHABLE)))
    labelled = [part for part in shown if getattr(part, "label", None) in hidden]
    withheld = [getattr(part, "value", part) for part in labelled]
    assert withheld and all(isinstance(value, Withheld) for value in withheld)


BY_SETTINGS = {"f1", "accuracy", "exposures", "occurrences"}  # parts that a job always measures
PUBLIC_LABELS = {"f1": Dp(0.7), "f1_by_type": {"test": Dp(0.7)}, "interval": (Dp(0.6), Dp(0.8))}


def _moved(content: Any, coins: random.Random | None = None, secret: bool = False) -> Any:
    """Return the content with other numbers wherever the label is `operator`.

    With coins, some of these parts are left out, as if there were fewer units.
    """
    secret = secret or getattr(content, "label", None) is Label.OPERATOR

    def kept(part: object, name: str = "") -> bool:
        private = getattr(part, "label", None) is Label.OPERATOR and name not in BY_SETTINGS
        if name in ("interval", "spread"):
            private = not isinstance(getattr(content, "f1", None), Dp)
        return coins is None or not private or coins.random() < 0.5

    match content:
        case bool() | str():
            return content
        case int() | float():
            return content / 3 if secret else content
        case Mapping():
            return {name: _moved(p, coins, secret) for name, p in content.items() if kept(p)}
        case tuple() | list():
            return type(content)(_moved(part, coins, secret) for part in content if kept(part))
        case Fact():
            return replace(content, value=1.5) if secret else content
        case Finding():
            figures = {
                name: _moved(getattr(content, name), secret=secret) for name in Finding.model_fields
            }
            return content.model_copy(update=figures)
    if not is_dataclass(content) or isinstance(content, type):
        return content
    parts = {}
    for name, part in ((field.name, getattr(content, field.name)) for field in fields(content)):
        moved = _moved(part, None if name in BY_SETTINGS else coins, secret)
        parts[name] = moved if kept(part, name) else None
    return replace(content, **parts)


def test_publishable_edition_does_not_depend_on_operator_values():
    report = job_report(made_up=False)
    later = {"created": "2026-11-21T23:59:59+00:00", "run_key": "manual__2026-11-21T09:00:00+00:00"}
    other = replace(_moved(report), **later)
    before, after = (
        {part for part in _parts(whole) if isinstance(part, Operator)} for whole in (report, other)
    )
    assert len(before) > 15 and not before & after
    again = report_page(other, Edition.PUBLISHABLE)
    assert _everything(again) == _everything(PAGES["publishable"])
    assert _everything(again).count(WITHHELD_MARK) > 15
    assert WITHHELD_MARK not in _everything(PAGES["operator"])
    assert [d.png for d in again.drawings] == [d.png for d in PAGES["publishable"].drawings]


@pytest.mark.parametrize("seed", range(5))
def test_publishable_edition_does_not_show_which_operator_values_exist(seed):
    """An interval needs ten documents, and a curve on private text one held-out unit."""
    ends, sweep = (Operator(0.6), Operator(0.7)), sweep_report(made_up=False)
    job = with_models(job_report(made_up=False), interval=ends)
    mixed = replace(job, models=(replace(job.models[0], **PUBLIC_LABELS), *job.models[1:]))
    sweeps = with_models(sweep, best_three=Operator(0.7)), causal_sweep_report(made_up=False)
    for report in (job, mixed, *sweeps):
        thinned = _moved(report, random.Random(seed))
        assert thinned != report
        assert edition_of(thinned, Edition.PUBLISHABLE) == edition_of(report, Edition.PUBLISHABLE)


def test_publishable_sweep_of_causal_models_withholds_perplexity_on_private_text():
    report = causal_sweep_report(made_up=False)
    shown, whole = (report_page(report, edition) for edition in Edition)
    secret = ("432", "397 – 466", "13.9", "617")
    for value in secret:
        assert f">{value}<" in whole.html
        assert f">{value}<" not in shown.html
    published = json.dumps([table.to_json() for table in shown.tables])
    assert "431.7" not in published and "13.9" not in published
    assert ">318<" in shown.html  # perplexity on public text is as private as the model
    baselines = [
        "public training" in drawing.svg
        for page in (whole, shown)
        for drawing in page.drawings
        if drawing.key == "sweep"
    ]
    assert baselines == [True, False]
    notes = " ".join(whole.tables[0].notes)
    assert "lower is better" in notes and "3 trainings" in notes and "have other tokens" in notes
    # Causal models are compared by perplexity instead of masked accuracy.
    (point, *_), (full, *_) = (page.figures["models"].values() for page in (shown, whole))
    public, private = (f"Perplexity, {text} text, by token" for text in ("public", "private"))
    assert (point[public]["value"], point[public]["label"]) == (317.5, Label.DP)
    assert point[private]["withheld"] and point[private]["value"] is None
    assert (full[private]["value"], full[private]["label"]) == (431.7, Label.OPERATOR)
    assert not {title for title in point if title.startswith(("Entity", "MLM"))}


@pytest.mark.parametrize("made", [job_report, sweep_report])
def test_models_without_fine_tuning_are_compared_by_masked_accuracy(made):
    untuned = {"f1": None, "f1_by_type": {}, "interval": None, "spread": None}
    whole = report_page(with_models(made(), **untuned), Edition.OPERATOR)
    titles = [header["name"] for header in whole.tables[0].to_json()["headers"]]
    assert titles.count("MLM accuracy") == 2 and "Entity F1" not in titles
    assert "F1" not in "".join(table.caption for table in whole.tables)
    assert "Strict entity F1" not in whole.html


def test_publishable_edition_of_a_known_seed_shows_public_values_only():
    report = job_report(made_up=False, known_seed=True, curves=())
    published = report_page(report, Edition.PUBLISHABLE)
    assert "Not private: known seed." in published.html
    assert '<span class="chip public">' in published.html
    assert published.drawings == ()
    cells = [asdict(c) for table in published.tables for row in table.rows for c in row]
    cells += [cell for model in published.figures["models"].values() for cell in model.values()]
    assert all(cell["withheld"] or cell["label"] in (None, Label.PUBLIC) for cell in cells)
    points = report_page(sweep_report(made_up=False, known_seed=True), Edition.PUBLISHABLE)
    assert all(c.withheld for row in points.tables[0].rows for c in row[6:])


def test_publishable_edition_withholds_the_paths_of_private_text():
    paths = {"private_path": "/ward/quorvath", "public_path": "/wiki"}
    report = _bare(made_up=False, settings=paths, private_paths=("private_path",))
    pages = [report_page(report, edition) for edition in (Edition.OPERATOR, Edition.PUBLISHABLE)]
    shown = [page.html + json.dumps(dict(page.figures)) for page in pages]
    assert ["quorvath" in text for text in shown] == [True, False]
    assert all("/wiki" in text for text in shown)


def test_markup_in_names_is_escaped():
    evil = "<img src=x onerror=alert(1)>&"
    report = _bare(
        private_dataset=evil,
        settings={evil: evil},
        notes=(evil,),
        statement=SimpleNamespace(paragraphs=[evil], data={"unit": "</pre>" + evil}),
    )
    html = report_page(report, Edition.OPERATOR).html
    assert evil not in html
    assert "&lt;img src=x onerror=alert(1)&gt;&amp;" in html


def test_page_of_a_job_without_comparison_ledger_or_curves_renders():
    empty = dict.fromkeys(("training", "vocabulary", "phrases", "notes"), ())
    statement = SimpleNamespace(paragraphs=["One sentence."], data={})
    bare = _bare(ledger=None, statement=statement, **empty)
    html = report_page(bare, Edition.OPERATOR).html
    assert 'id="ledger"' not in html
    assert "No audit of a private model" in html
    without_budget = {"epsilon": None, "delta": None, "epsilon_so_far": None}
    html = report_page(_bare(budget=without_budget), Edition.OPERATOR).html
    section = html.partition('id="ledger"')[2].partition("</section>")[0]
    assert "no budget is kept" in section and "in total" not in section


def test_page_tables_and_figures_are_written_to_one_folder(tmp_path):
    page = PAGES["made up"].write(tmp_path / "report")
    assert page == tmp_path / "report" / "report.html"
    assert page.read_text(encoding="utf-8") == PAGES["made up"].html
    names = {path.name for path in page.parent.iterdir()}
    figures = {
        f"{key}.{kind}"
        for key in ("exposure", "training", "epochs", "entities")
        for kind in ("svg", "png")
    }
    assert names == figures | {"report.html", "tables.json", "figures.json"}
    record = json.loads((page.parent / "tables.json").read_text(encoding="utf-8"))
    assert set(record) == {
        "closing", "exposure", "extraction", "membership", "by_epoch", "entities", "training",
        "vocabulary", "phrases", "ledger",
    }  # fmt: skip
    assert record["closing"]["rows"][1][3]["value"] == 6.61


def _audited(verdict: str, label: Label = Label.DP) -> AuditRecord:
    low, ceiling = (3.5, 3.0) if verdict == "contradicted" else (1.0, 3.0)
    return AuditRecord(
        key="epsilon_lower_bound", name="A bound", level="canary", measured="ε", value=low,
        interval=(low, 5.0), confidence=0.999, ceiling=ceiling, power="100 canaries",
        null_control=NullDistribution(of="coins", low=0.0, high=0.5, alarm_rate=0.001),
        bounds_claim=True, verdict=verdict, finding="21 of 30 guesses were right.", label=label,
    )  # fmt: skip


@pytest.mark.cases
def test_headline_states_the_verdict_of_the_training_audit(verdict, headline):
    report = _bare(made_up=False, audit=_audited(verdict))
    html = report_page(report, Edition.PUBLISHABLE).html
    (first,) = re.findall(r"<h1>(.*?)</h1>", html)
    assert headline in first
    assert ("hero bad" in html) == (verdict == "contradicted")
    finding = "21 of 30 guesses were right."
    assert finding in html
    assert results_table(report).lead == f"Audit of the private training: {verdict}. {finding}"
    kept = replace(report, audit=_audited(verdict, Label.OPERATOR))
    assert "21 of 30" not in report_page(kept, Edition.PUBLISHABLE).html
    assert "21 of 30" in report_page(kept, Edition.OPERATOR).html


def test_headline_states_a_contradiction_by_an_audit_of_another_run():
    sentence = "ε = 4 at δ = 1e-06: contradicted by Given coins."
    report = _bare(made_up=False, audit=_audited("consistent"), against=sentence)
    html = report_page(report, Edition.PUBLISHABLE).html
    (first,) = re.findall(r"<h1>(.*?)</h1>", html)
    assert "another run contradicts the claimed ε" in first and "hero bad" in html
    assert sentence in html
    assert results_table(report).lead == sentence
    assert results_table(job_report()).lead == ""


def test_counts_of_left_out_private_text_are_in_the_operators_edition_only():
    publishable, operator = PAGES["publishable"].html, PAGES["operator"].html
    assert f"Not read, private_corpus:</b> {OMITTED}." in operator
    assert "Not read, public_corpus" in publishable
