"""The report as people read it: one HTML file that needs nothing else, figures beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dp_core.audit.exposure import ExposureSummary, summarise
from dp_core.labels import Dp, Operator, Public
from tasks.report import tables
from tasks.report import tables as cells
from tasks.report.figures import (
    Drawing,
    entity_figure,
    exposure_figure,
    sweep_figure,
    training_figure,
)
from tasks.report.model import (
    Curve,
    Edition,
    Exposures,
    JobReport,
    Kind,
    LedgerView,
    ModelRow,
    SweepReport,
    Value,
    job_edition,
    sweep_edition,
)
from tasks.report.tables import Table


@dataclass(frozen=True)
class Verdict:
    """One line in large type, one beneath, and the tone they are shown in."""

    tone: Literal["good", "bad", "open"]
    headline: str
    detail: str


def verdict(report: JobReport) -> Verdict:
    """Return what the exposure audit of the DP model found, the other models as its control.

    That nothing was found is worth something only where the same canaries can be found: without
    a non-private model that remembers them, the verdict stays open.
    """
    private = report.model("dp")
    found = _summary(private)
    if private is None or found is None:
        return Verdict("open", "No audit of a private model", "Nothing is said about memory.")
    control = _summary(report.model("nonprivate"))
    claim = _claim(private, report.unit)
    reading = (
        f"exposure {found.mean:.1f} bits on average and {found.largest:.1f} at most "
        f"({found.largest_group}), where a model without memory stays below "
        f"{found.mean_null_high:.1f} and {found.largest_null_high:.1f} in 97.5% of cases"
    )
    if found.remembers:
        return Verdict(
            "bad",
            "The private model remembers canaries",
            f"Trained with {claim}; {reading}. The guarantee bounds memory, it does not forbid it: "
            "canaries planted more often, or a larger ε, are remembered sooner.",
        )
    if found.above_chance:
        return Verdict(
            "open",
            "The private model may remember some canaries",
            f"Trained with {claim}; {reading}. That is above chance, but no group of canaries "
            "shows it beyond doubt: more canaries would tell.",
        )
    if control is None:
        return Verdict(
            "open",
            "The private model shows no memory of its canaries",
            f"Trained with {claim}; {reading}. No non-private model is shown beside it, so it is "
            "open whether these canaries can be learned at all.",
        )
    if not control.remembers:
        return Verdict(
            "open",
            "Neither model shows memory of the canaries",
            f"Trained with {claim}; {reading}. The non-private model does not remember them "
            f"either ({control.largest:.1f} bits): these canaries are too rare to tell.",
        )
    return Verdict(
        "good",
        "The private model shows no memory of its canaries; the non-private one does",
        f"Trained with {claim}; {reading}. Trained on the same rows without privacy: "
        f"{control.largest:.1f} bits ({control.largest_group}).",
    )


def _claim(private: ModelRow, unit: str) -> str:
    """Return what the audited model cost: exposure is read before it is fine-tuned."""
    cost = private.pretrained
    if cost.corpus.epsilon is None:
        return f"guarantees that have no total ({cells.WHY_NO_TOTAL})"
    said = [
        f"ε = {cells.significant(total.epsilon)}, δ = {cells.significant(total.delta, 2)} for every"
        f" {total.unit or unit}" + (f" of “{total.dataset}”" if total in cost.others else "")
        for total in (cost.corpus, *cost.others)
        if total.epsilon is not None
    ]
    return " and ".join(said)


def _summary(model: ModelRow | None) -> ExposureSummary | None:
    if model is None or not isinstance(model.exposures, Exposures):
        return None
    return summarise(model.exposures.rows)


_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Page:
    """A rendered report: the page, its figures, and its tables for whoever counts on them."""

    html: str
    drawings: tuple[Drawing, ...]
    tables: tuple[Table, ...]

    def write(self, folder: Path) -> Path:
        """Write report.html, tables.json and every figure as .svg and .png; return the page."""
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in self.drawings:
            (folder / f"{drawing.key}.svg").write_text(drawing.svg, encoding="utf-8")
            (folder / f"{drawing.key}.png").write_bytes(drawing.png)
        record = {table.key: table.to_json() for table in self.tables}
        text = json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False)
        (folder / "tables.json").write_text(text + "\n", encoding="utf-8")
        page = folder / "report.html"
        page.write_text(self.html, encoding="utf-8")
        return page


def job_page(report: JobReport, edition: Edition) -> Page:
    """Return the report of one job in that edition."""
    shown = job_edition(report, edition)
    names = {model.kind: model.name for model in shown.models}
    drawings = _drawn(
        exposure_figure(shown.models),
        training_figure(shown.curves, names),
        entity_figure(shown.models),
    )
    content = {
        "closing": tables.closing_table(shown.models, shown.unit),
        "exposure": tables.exposure_table(shown.models),
        "entities": tables.entity_table(shown.models),
        "training": tables.facts_table("training", "Training facts", shown.training),
        "vocabulary": tables.facts_table("vocabulary", "Vocabulary", shown.vocabulary),
    }
    html = _render(
        "job.html.j2",
        shown,
        edition,
        verdict(shown),
        _job_marks(shown),
        drawings=drawings,
        chosen=names.get("dp"),
        hidden_curves=_hidden(report.curves, shown.curves, names),
        **content,
    )
    return Page(html, tuple(drawings.values()), _all_tables(content.values(), shown.ledger))


def sweep_page(report: SweepReport, edition: Edition) -> Page:
    """Return the report of a sweep in that edition."""
    shown = sweep_edition(report, edition)
    drawings = _drawn(sweep_figure(shown.points))
    points = tables.sweep_table(shown.points, shown.unit)
    said = Verdict(
        "open",
        "What noise, batch size and epochs do to privacy and to usefulness",
        f"{len(shown.points)} models, one for each point of the grid. Every one is a release: "
        "showing them all costs what they cost together.",
    )
    html = _render(
        "sweep.html.j2",
        shown,
        edition,
        said,
        _sweep_marks(shown),
        drawings=drawings,
        points=points,
    )
    return Page(html, tuple(drawings.values()), _all_tables([points], shown.ledger))


def _render(
    template: str,
    report: JobReport | SweepReport,
    edition: Edition,
    said: Verdict,
    marks: list[dict[str, str]],
    **content: Any,
) -> str:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    record = dict(report.statement.record)
    return environment.get_template(template).render(
        report=report,
        edition=edition.value,
        verdict=said,
        marks=marks,
        style=(_TEMPLATES / "style.css").read_text(encoding="utf-8"),
        withheld_mark=cells.WITHHELD_MARK,
        statement_json=json.dumps(record, ensure_ascii=False, indent=2) if record else "",
        ledger=None if report.ledger is None else tables.ledger_table(report.ledger),
        spent=None if report.ledger is None else _spent(report.ledger),
        **content,
    )


def _drawn(*drawings: Drawing | None) -> dict[str, Drawing]:
    return {drawing.key: drawing for drawing in drawings if drawing is not None}


def _all_tables(own: Iterable[Table], ledger: LedgerView | None) -> tuple[Table, ...]:
    """Return the tables, and the ledger's; one without rows says nothing."""
    last = () if ledger is None else (tables.ledger_table(ledger),)
    return tuple(table for table in (*own, *last) if table.rows)


def _job_marks(report: JobReport) -> list[dict[str, str]]:
    """Return the few figures that stand in large type: those of the DP model."""
    private = report.model("dp")
    if private is None:
        return []
    total = cells.total(private.epsilon_total)
    found = [_mark(total.text, total.detail or f"ε in total, per {report.unit}")]
    if private.epsilon_total is not None:
        found.append(_mark(cells.significant(private.delta, 2), "δ in total"))
    for other in private.others:
        spent = cells.total(other.epsilon)
        found.append(_mark(spent.text, spent.detail or f"ε of “{other.dataset}”, per {other.unit}"))
    for text, value in (
        ("entity F1, strict", private.f1),
        ("MLM accuracy, public text", private.mlm_public),
    ):
        if (share := _share(value)) is not None:
            found.append(_mark(f"{100 * share:.1f} %", text))
    if (perplexity := _share(private.perplexity_public)) is not None:
        found.append(_mark(cells.significant(perplexity), "perplexity, public text"))
    return found


def _sweep_marks(report: SweepReport) -> list[dict[str, str]]:
    epsilons = [p.epsilon_total for p in report.points if p.epsilon_total is not None]
    scores = [share for point in report.points if (share := _share(point.f1)) is not None]
    found = [_mark(str(len(report.points)), "points")]
    if epsilons:
        span = f"{cells.significant(min(epsilons))} – {cells.significant(max(epsilons))}"
        found.append(_mark(span, f"ε in total, per {report.unit}"))
    if scores:
        found.append(
            _mark(f"{100 * min(scores):.1f} – {100 * max(scores):.1f} %", "entity F1, strict")
        )
    return found


def _mark(text: str, name: str) -> dict[str, str]:
    return {"text": text, "name": name}


def _share(value: Value) -> float | None:
    return value.value if isinstance(value, Dp | Public | Operator) else None


def _hidden(
    before: tuple[Curve, ...], after: tuple[Curve, ...], names: Mapping[Kind, str]
) -> list[str]:
    """Return in words which curves the edition left out."""
    words = {"loss": "training loss", "mlm_public": "MLM accuracy on public text"}
    kept = {(curve.kind, curve.quantity) for curve in after}
    return [
        f"{words[curve.quantity]}, {names[curve.kind]}"
        for curve in before
        if (curve.kind, curve.quantity) not in kept
    ]


def _spent(ledger: LedgerView) -> dict[str, str | int]:
    """Return the account in figures fit for a sentence and a bar; empty without a budget."""
    spent, budget = ledger.spent_epsilon, ledger.budget_epsilon
    if spent is None or not budget:
        return {}
    delta = ledger.budget_delta
    return {
        "epsilon": cells.significant(spent),
        "delta": cells.significant(ledger.spent_delta or 0.0, 2),
        "budget": cells.significant(budget),
        "budget_delta": "" if delta is None else cells.significant(delta, 2),
        "percent": 100 if math.isinf(spent) else min(100, round(100 * spent / budget)),
    }
