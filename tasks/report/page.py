"""The report for readers: one self-contained HTML file, plus the figures as separate files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.report import audit_tables, figures, tables
from tasks.report.figures import Drawing
from tasks.report.first_screen import first_screen
from tasks.report.model import TEMPLATES, Edition, ModelRow, Report, edition_of, measure_of
from tasks.report.models_table import by_epoch_table, models_table, results_table
from tasks.report.sweep_figures import sweep_exposure_figure, sweep_figure
from tasks.report.tables import Header, Table
from tasks.results import FIGURES_FILE

_PAGES = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters["significant"] = tables.significant


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
            drawing.write(folder)
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
    drawn: tuple[Drawing | None, ...]
    numbers = figures_of(shown)
    training = tables.facts_table("training", shown.training)
    if shown.is_sweep:
        scaled = shown.settings.get("sweep_noise_scaling") == "sqrt-batch"
        drawn = (sweep_figure(shown.models, scaled=scaled), sweep_exposure_figure(shown.models))
        content = {"points": results_table(shown), "training": training}
    else:
        drawn = (
            figures.exposure_figure(shown.models),
            figures.epochs_figure(shown.by_epoch, shown.models),
            figures.leakage_figure(numbers["leakage"], figures.styles_of(shown.models)),
            figures.rarity_figure(shown.models),
            figures.entity_figure(shown.models),
            figures.training_figure(shown.curves, shown.models),
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
            "training": training,
            "vocabulary": tables.facts_table("vocabulary", shown.vocabulary),
            "phrases": tables.facts_table("phrases", shown.phrases),
        }
    if not shown.is_sweep or any(model.f1_by_type for model in shown.models):
        content["entities"] = tables.entity_table(shown.models, shown.labels)
    if shown.ledger is not None:
        content["ledger"] = shown.ledger
    drawings = {drawing.key: drawing for drawing in drawn if drawing is not None}
    private = shown.model("dp")
    record = shown.statement.data
    page = _PAGES.get_template("sweep.html.j2" if shown.is_sweep else "job.html.j2")
    html = page.render(
        {"ledger": None, "entities": {"rows": ()}} | content,
        report=shown,
        edition=edition.value,
        first=first_screen(shown),
        drawings=drawings,
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        withheld_mark=tables.WITHHELD_MARK,
        statement_json=json.dumps(record, ensure_ascii=False, indent=2) if record else "",
        chosen=None if private is None else private.name,
    )
    return Page(
        html,
        tuple(drawings.values()),
        tuple(table for table in content.values() if table.rows),
        numbers,
    )


def comparison_page(table: Table, leakage: Drawing | None, edition: str) -> Page:
    """Return the page that compares several runs, with what one edition of their reports shows."""
    drawings = () if leakage is None else (leakage,)
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    page = _PAGES.get_template("comparison.html.j2")
    html = page.render(table=table, drawings=drawings, edition=edition, style=style)
    return Page(html, drawings, (table,), {})


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
                "kind": row.kind,
                # None if only the last model was saved.
                "epoch": None if math.isinf(membership.epochs) else membership.epochs,
                "level": attack.level,
                "attack": attack.attack,
                "value": attack.leakage.value,
                "interval": [attack.leakage.low, attack.leakage.high],
                "label": membership.label,
            }
