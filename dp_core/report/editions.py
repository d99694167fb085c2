"""The publishable edition: operator values are taken out before anything is drawn or written.

What was removed cannot leak through a figure's coordinates, an axis limit or a hidden attribute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from dp_core.privacy.labels import Label
from dp_core.privacy.statement import DatasetTotal
from dp_core.report.model import (
    Cost,
    Edition,
    Exposures,
    Fact,
    JobReport,
    ModelRow,
    SweepReport,
    SweepRow,
    Value,
    Withheld,
)

Labels = frozenset[Label]
Row = TypeVar("Row", ModelRow, SweepRow)


def job_edition(report: JobReport, edition: Edition) -> JobReport:
    """Return the report as that edition may show it; made-up data hides nothing."""
    hidden = _hidden(report, edition)
    types = _types(report.models, hidden)
    return replace(
        report,
        run_key=_run(report, edition),
        created=_created(report, edition),
        models=tuple(_model(row, hidden, types) for row in report.models),
        curves=tuple(curve for curve in report.curves if curve.label not in hidden),
        training=tuple(_fact(fact, hidden) for fact in report.training),
        vocabulary=tuple(_fact(fact, hidden) for fact in report.vocabulary),
    )


def sweep_edition(report: SweepReport, edition: Edition) -> SweepReport:
    """Return the sweep as that edition may show it; made-up data hides nothing."""
    hidden = _hidden(report, edition)
    return replace(
        report,
        run_key=_run(report, edition),
        created=_created(report, edition),
        points=tuple(_point(point, hidden) for point in report.points),
    )


def _run(report: JobReport | SweepReport, edition: Edition) -> str:
    # Airflow's key of a run says when it began.
    return report.run_key if edition is Edition.OPERATOR or report.made_up else report.shown_run


def _created(report: JobReport | SweepReport, edition: Edition) -> str:
    # The second in which a run ended, beside that in which it began, tells how large the data are.
    day = len("2026-01-01")
    return report.created if edition is Edition.OPERATOR or report.made_up else report.created[:day]


def _hidden(report: JobReport | SweepReport, edition: Edition) -> Labels:
    if edition is Edition.OPERATOR or report.made_up:
        return frozenset()
    if report.known_seed:  # whoever knows it can subtract the noise: no `dp` label holds
        return frozenset({Label.OPERATOR, Label.DP})
    return frozenset({Label.OPERATOR})


def _value(value: Value, hidden: Labels) -> Value:
    return Withheld() if value is not None and value.label in hidden else value


def _private(value: Value, hidden: Labels) -> Value:
    """Withhold what is measured on private text, also that there was none to measure on."""
    return Withheld() if Label.OPERATOR in hidden else _value(value, hidden)


def _types(rows: Iterable[ModelRow], hidden: Labels) -> frozenset[str]:
    """Return the entity types that may be named: which ones private labels have is private too."""
    return frozenset(
        kind
        for row in rows
        for kind, value in row.f1_by_type.items()
        if not isinstance(_value(value, hidden), Withheld)
    )


def _exposures(
    exposures: Exposures | Withheld | None, hidden: Labels
) -> Exposures | Withheld | None:
    return Withheld() if exposures is not None and exposures.label in hidden else exposures


def _shown(row: Row, hidden: Labels) -> Row:
    """Return the row without the cost of a fine-tuning whose model is not shown.

    Fine-tuned without privacy, a model stays with the operator, and its F1 is withheld: what is
    left in the row is the pre-trained model's.
    """
    whole = Cost(DatasetTotal("", None, row.epsilon_total, row.delta), row.others)
    withheld = isinstance(_value(row.f1, hidden), Withheld)
    if row.untuned is None or not withheld or not whole.infinite:
        return row
    own = row.untuned.corpus
    return replace(
        row,
        epsilon_total=own.epsilon,
        delta=own.delta,
        others=row.untuned.others,
        untuned=None,
    )


def _model(row: ModelRow, hidden: Labels, types: frozenset[str]) -> ModelRow:
    return replace(
        _shown(row, hidden),
        mlm_public=_value(row.mlm_public, hidden),
        mlm_private=_private(row.mlm_private, hidden),
        perplexity_public=_value(row.perplexity_public, hidden),
        perplexity_private=_private(row.perplexity_private, hidden),
        f1=_value(row.f1, hidden),
        f1_by_type={k: _value(v, hidden) for k, v in row.f1_by_type.items() if k in types},
        exposures=_exposures(row.exposures, hidden),
    )


def _point(point: SweepRow, hidden: Labels) -> SweepRow:
    return replace(
        _shown(point, hidden),
        f1=_value(point.f1, hidden),
        mlm_public=_value(point.mlm_public, hidden),
        mlm_private=_private(point.mlm_private, hidden),
    )


def _fact(fact: Fact, hidden: Labels) -> Fact:
    return replace(fact, value=Withheld()) if fact.label in hidden else fact
