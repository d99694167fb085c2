"""The publishable edition: operator values are taken out before anything is drawn or written.

What was removed cannot leak through a figure's coordinates, an axis limit or a hidden attribute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dp_core.errors import BadInput
from dp_core.privacy.labels import Label
from dp_core.report.model import (
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


def job_edition(report: JobReport, edition: Edition) -> JobReport:
    """Return the report as that edition may show it; made-up data hides nothing.

    Raises:
        BadInput: the edition is publishable, the data private and the privacy seed known.
    """
    if _shows_all(report, edition):
        return report
    return replace(
        report,
        models=tuple(_model(row) for row in report.models),
        curves=tuple(c for c in report.curves if c.label is not Label.OPERATOR),
        training=tuple(_fact(fact) for fact in report.training),
        vocabulary=tuple(_fact(fact) for fact in report.vocabulary),
    )


def sweep_edition(report: SweepReport, edition: Edition) -> SweepReport:
    """Return the sweep as that edition may show it; raises as `job_edition` does."""
    if _shows_all(report, edition):
        return report
    return replace(report, points=tuple(_point(point) for point in report.points))


def _shows_all(report: JobReport | SweepReport, edition: Edition) -> bool:
    if edition is Edition.OPERATOR or report.made_up:
        return True
    if report.known_seed:  # whoever knows it can subtract the noise: no `dp` label holds
        raise BadInput(
            "the privacy seed is known, so nothing of this run is private",
            where="report",
            fix="Train again without a fixed privacy seed, or make the operator edition.",
        )
    return False


def _value(value: Value) -> Value:
    return Withheld() if value is not None and value.label is Label.OPERATOR else value


def _values(values: Mapping[str, Value]) -> dict[str, Value]:
    return {name: _value(value) for name, value in values.items()}


def _exposures(exposures: Exposures | Withheld | None) -> Exposures | Withheld | None:
    return Withheld() if exposures is not None and exposures.label is Label.OPERATOR else exposures


def _model(row: ModelRow) -> ModelRow:
    return replace(
        row,
        mlm_public=_value(row.mlm_public),
        mlm_private=_value(row.mlm_private),
        f1=_value(row.f1),
        f1_by_type=_values(row.f1_by_type),
        exposures=_exposures(row.exposures),
    )


def _point(point: SweepRow) -> SweepRow:
    return replace(
        point,
        f1=_value(point.f1),
        mlm_public=_value(point.mlm_public),
        mlm_private=_value(point.mlm_private),
    )


def _fact(fact: Fact) -> Fact:
    return replace(fact, value=Withheld()) if fact.label is Label.OPERATOR else fact
