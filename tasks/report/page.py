"""The report for readers: one self-contained HTML file, plus the figures as separate files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dp_core.audit.exposure import ExposureSummary, summarise
from dp_core.labels import Label
from tasks.report import audit_tables, tables
from tasks.report.figures import (
    Drawing,
    entity_figure,
    epochs_figure,
    exposure_figure,
    training_figure,
)
from tasks.report.model import (
    QUANTITIES,
    Edition,
    ModelRow,
    Report,
    edition_of,
    measure_of,
    number_of,
)
from tasks.report.models_table import (
    by_epoch_table,
    cost_columns,
    models_table,
    results_table,
)
from tasks.report.sweep_figures import sweep_exposure_figure, sweep_figure
from tasks.report.tables import Header, Table
from tasks.results import FIGURES_FILE


@dataclass(frozen=True)
class Verdict:
    """A headline, a line of details, and the tone in which they are shown."""

    tone: Literal["good", "bad", "open"]
    headline: str
    detail: str


def verdict(report: Report) -> Verdict:
    """Return the result of the audits: the gate's objection, the bound on ε, and memory."""
    memory, audit = _memory(report), report.audit
    if report.against and (audit is None or audit.verdict != "contradicted"):
        headline = "An audit of another run contradicts the claimed ε: do not release this model"
        return Verdict("bad", headline, f"{report.against} {memory.headline}. {memory.detail}")
    if audit is None:
        return memory
    headline = {
        "contradicted": "An audit contradicts the claimed ε: do not release this model",
        "consistent": "An audit of the private training is consistent with the claimed ε",
        "invalid": "An audit of the private training is invalid: do not release this model",
    }.get(audit.verdict, "An audit of the private training is inconclusive about the claimed ε")
    tone = "bad" if audit.blocks_promotion else memory.tone
    return Verdict(tone, headline, f"{audit.finding} {memory.headline}. {memory.detail}")


def _memory(report: Report) -> Verdict:
    """Return the result of the exposure audit of the DP model, with the other models as control.

    The absence of memory is evidence only if the canaries can be learned at all. The verdict is
    therefore open unless a non-private model remembers them.
    """
    private = report.model("dp")
    summary = _summary(private)
    if private is None or summary is None:
        return Verdict("open", "No audit of a private model", "Memory was not measured.")
    control = _summary(report.model("nonprivate"))
    claim = _claim(private, report.unit)
    reading = (
        f"exposure {summary.mean:.1f} bits on average and {summary.largest:.1f} at most "
        f"({summary.largest_group}), where a model without memory stays below "
        f"{summary.mean_null_high:.1f} and {summary.largest_null_high:.1f} in 97.5% of cases"
    )
    tone: Literal["good", "bad", "open"] = "open"
    if summary.remembers:
        tone = "bad"
        headline = "The private model remembers canaries"
        meaning = (
            "The guarantee limits memory, but does not exclude it: memory of canaries grows with ε"
            " and with the number of their occurrences."
        )
    elif summary.above_chance:
        headline = "The private model may remember some canaries"
        meaning = (
            "This is above chance, but no single group of canaries is clearly remembered; an audit"
            " with more canaries would be conclusive."
        )
    elif control is None:
        headline = "The private model shows no memory of its canaries"
        meaning = (
            "No non-private model is shown for comparison, so it is open whether these canaries can"
            " be learned at all."
        )
    elif not control.remembers:
        headline = "Neither model shows memory of the canaries"
        meaning = (
            f"The non-private model does not remember them either ({control.largest:.1f} bits):"
            " these canaries are too rare for a conclusion."
        )
    else:
        tone = "good"
        headline = "The private model shows no memory of its canaries; the non-private one does"
        meaning = (
            f"Trained on the same rows without privacy: {control.largest:.1f} bits"
            f" ({control.largest_group})."
        )
    return Verdict(tone, headline, f"Trained with {claim}; {reading}. {meaning}")


def _claim(private: ModelRow, unit: str) -> str:
    """Return the guarantee of the audited model; exposure is measured before fine-tuning."""
    cost = private.pretrained
    if cost.corpus.epsilon is None:
        return f"guarantees that have no total ({tables.WHY_NO_TOTAL})"
    totals = [
        f"ε = {tables.significant(total.epsilon)}, δ = {tables.significant(total.delta, 2)} for"
        f" every {total.unit or unit}" + (f" of “{total.dataset}”" if total in cost.others else "")
        for total in (cost.corpus, *cost.others)
        if total.epsilon is not None
    ]
    return " and ".join(totals)


def _summary(model: ModelRow | None) -> ExposureSummary | None:
    return summarise(model.audits[0].rows) if model and model.audits else None


_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Page:
    """A rendered report: the HTML page, its drawings, its tables, and figures for comparisons."""

    html: str
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]
    figures: Mapping[str, Any]  # for comparisons between runs

    def write(self, folder: Path) -> Path:
        """Write report.html, two files of numbers (JSON), and each drawing as .svg and .png."""
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in self.drawings:
            (folder / f"{drawing.key}.svg").write_text(drawing.svg, encoding="utf-8")
            (folder / f"{drawing.key}.png").write_bytes(drawing.png)
        tables_in_json = {table.key: table.to_json() for table in self.tables}
        for file, content in (("tables.json", tables_in_json), (FIGURES_FILE, self.figures)):
            text = json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False)
            (folder / file).write_text(text + "\n", encoding="utf-8")
        page = folder / "report.html"
        page.write_text(self.html, encoding="utf-8")
        return page


def report_page(report: Report, edition: Edition) -> Page:
    """Return the report of a job or a sweep in that edition."""
    shown = edition_of(report, edition)
    figures: tuple[Drawing | None, ...]
    if shown.is_sweep:
        headline = Verdict(
            "open",
            "Effect of noise, batch size and epochs on privacy and usefulness",
            "Every private training is a release; to publish all of them costs their total ε.",
        )
        figures = (sweep_figure(shown.models), sweep_exposure_figure(shown.models))
        content = {"points": results_table(shown)}
    else:
        headline = verdict(shown)
        figures = (
            exposure_figure(shown.models),
            epochs_figure(shown.by_epoch, measure_of(shown.models)),
            training_figure(shown.curves, shown.models),
            entity_figure(shown.models),
        )
        losses, leakages = audit_tables.epoch_tables(shown.models)
        content = {
            "closing": results_table(shown),
            "exposure": audit_tables.exposure_table(shown.models, shown.occurrences),
            "samples": audit_tables.samples_table(shown.models),
            "extraction": audit_tables.extraction_table(shown.models),
            "membership": audit_tables.membership_table(shown.models),
            "by_epoch": by_epoch_table(shown.by_epoch, shown.unit, measure_of(shown.models)),
            "loss_by_epoch": losses,
            "leakage_by_epoch": leakages,
            "entities": tables.entity_table(shown.models),
            "training": tables.facts_table("training", "Training facts", shown.training),
            "vocabulary": tables.facts_table("vocabulary", "Vocabulary", shown.vocabulary),
            "phrases": tables.facts_table("phrases", "Released phrases", shown.phrases),
        }
    if shown.ledger is not None:
        content["ledger"] = shown.ledger
    drawings = {drawing.key: drawing for drawing in figures if drawing is not None}
    private = shown.model("dp")
    record = shown.statement.data
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["significant"] = tables.significant
    html = environment.get_template("sweep.html.j2" if shown.is_sweep else "job.html.j2").render(
        {"ledger": None} | content,
        report=shown,
        edition=edition.value,
        verdict=headline,
        marks=_sweep_marks(shown) if shown.is_sweep else _job_marks(shown),
        drawings=drawings,
        style=(_TEMPLATES / "style.css").read_text(encoding="utf-8"),
        withheld_mark=tables.WITHHELD_MARK,
        statement_json=json.dumps(record, ensure_ascii=False, indent=2) if record else "",
        chosen=None if private is None else private.name,
        hidden_curves=[
            f"{QUANTITIES[curve.quantity]} ({curve.model})"
            for curve in report.curves
            if curve not in shown.curves
        ],
    )
    return Page(
        html,
        tuple(drawings.values()),
        tuple(table for table in content.values() if table.rows),
        figures_of(shown),
    )


Mark = tuple[str, str]  # a figure in large type at the top of a report, and its name


def _job_marks(report: Report) -> list[Mark]:
    """Return the cost and scores of the DP model."""
    private = report.model("dp")
    if private is None:
        return []
    costs = cost_columns([replace(private, pretrained=private.cost)], report.unit)
    marks = [
        (text, f"{header.name} {header.unit}")
        for header, cell in costs
        if (text := cell(private).text) != tables.NOT_MEASURED
    ]
    for value, title, percent in (
        (private.score, measure_of(report.models).title, True),
        (private.mlm_public, "MLM accuracy, public text, %", True),
        (private.perplexity_public, "Perplexity, public text", False),
    ):
        if number_of(value) is not None:
            marks.append((tables.measured(value, percent=percent).text, title))
    return marks


def _sweep_marks(report: Report) -> list[Mark]:
    """Return the number of settings, and the ranges of their costs and scores."""
    measure = measure_of(report.models)
    private = [point for point in report.models if point.baseline is None]
    epsilons = [e for point in private if (e := point.cost.corpus.epsilon) is not None]
    scores = [score for point in private if (score := number_of(measure.of(point))) is not None]
    marks = [(str(len(private)), "settings")]
    for values, title, percent in (
        (epsilons, f"ε in total, per {report.unit}", False),
        (scores, measure.title, measure.is_share),
    ):
        if values:
            ends = (min(values), max(values))
            marks.append((tables.span_cell(ends, Label.PUBLIC, percent=percent).text, title))
    return marks


def figures_of(shown: Report) -> dict[str, Any]:
    """Return the settings of a run and the figures of its models, for one edition of its report.

    Args:
        shown: the report of that edition, without the values that it withholds.
    """
    results = models_table(shown.models, shown.unit).to_json()
    titles = [Header(**header).title for header in results["headers"]]
    return {
        "settings": dict(shown.settings),
        "models": {
            model["text"]: dict(zip(titles[1:], cells, strict=True))
            for model, *cells in results["rows"]
        },
        "leakage": [leakage for row in shown.models for leakage in _leakage(row)],
    }


def _leakage(row: ModelRow) -> Iterator[dict[str, Any]]:
    """Yield the leakage by each membership attack, after each epoch whose model was kept."""
    for membership in row.memberships:
        for attack in membership.rows:
            yield {
                "model": row.name,
                # None if only the last model was saved.
                "epoch": None if math.isinf(membership.epochs) else membership.epochs,
                "level": attack.level,
                "attack": attack.attack,
                "value": attack.leakage.value,
                "interval": [attack.leakage.low, attack.leakage.high],
                "label": membership.label,
            }
