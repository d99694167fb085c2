"""The report's first sentence: what the audit found, claiming no more than it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dp_core.audit.exposure import ExposureSummary, summarise
from dp_core.report import cells
from dp_core.report.model import Exposures, JobReport, ModelRow


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
