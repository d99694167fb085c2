"""What every exported model carries: its privacy, in words and as data."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from dp_core.privacy.events import (
    FixedSizeGaussian,
    MechanismEvent,
    PoissonGaussian,
    RandomCountSelection,
    Restated,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    Unaccounted,
)
from dp_core.privacy.statement import PrivacyStatement, Release, privacy_statement
from dp_core.privacy.units import PrivacyUnit
from dp_core.report.model import Statement
from tasks.specs import ReleaseRecord

WORDS, DATA = "PRIVACY.md", "privacy_statement.json"

_OPERATOR = """# Not private

This model was trained on private text **without privacy**: its ε is infinite. It stays with the
operator of the data, who compares with it. It must not be exported, published or promoted.
"""


def write_statement(folder: Path, releases: Sequence[ReleaseRecord], *, made_up: bool) -> None:
    """Write the statement of everything that the folder's model was made from.

    Data sets that hold other people (the corpus, the labelled sentences) have each their own
    guarantee, in a statement of its own: in words one after the other, in JSON under `others`.
    """
    names = dict.fromkeys(r.dataset for r in releases) or {"": None}
    parts = [_statement([r for r in releases if r.dataset == n], made_up) for n in names]
    data = dict(parts[0].data)
    if len(parts) > 1:
        data["others"] = [part.data for part in parts[1:]]
        data["private"] = all(part.data["private"] for part in parts)
        data["ledger_ids"] = [r.ledger_id for r in releases]
    (folder / WORDS).write_text("\n".join(part.words for part in parts))
    (folder / DATA).write_text(json.dumps(data, indent=1) + "\n")


def write_operator_notice(folder: Path) -> None:
    """Say in the folder of a model without privacy that it is one."""
    (folder / WORDS).write_text(_OPERATOR)
    (folder / DATA).write_text(json.dumps({"private": False, "epsilon": "inf"}, indent=1) + "\n")


def statement_of(releases: Sequence[ReleaseRecord], *, made_up: bool) -> Statement:
    """Return the statement as the report shows it: paragraphs without Markdown's marks."""
    statement = _statement(releases, made_up)
    lines = statement.words.replace("**", "").splitlines()
    paragraphs = [line for line in lines if line and not line.startswith("#")]
    return Statement(tuple(re.sub(r"^- ", "• ", p) for p in paragraphs), statement.data)


def _statement(releases: Sequence[ReleaseRecord], made_up: bool) -> PrivacyStatement:
    parts = [
        Release(
            dataset=r.dataset,
            unit=PrivacyUnit(r.unit),
            event=MechanismEvent.from_json(r.event),
            delta=r.delta,
            ledger_id=r.ledger_id,
            seed_known=r.seed_known,
            plan=r.plan,
        )
        for r in releases
    ]
    return privacy_statement(parts, made_up=made_up)


def release_in_words(event: MechanismEvent) -> str:
    """Return what was released."""
    match event:
        case ThresholdedHistogram():
            return "word histogram"
        case Restated(event=inner):
            return release_in_words(inner)
        case RandomCountSelection():
            return "the best of several DP pre-trainings"
        case (
            PoissonGaussian()
            | TruncatedPoissonGaussian()
            | FixedSizeGaussian()
            | ShuffledGaussian()
        ):
            return "DP training"
        case Unaccounted(reason=reason):
            return reason
        case _:
            return event.kind.replace("_", " ")
