"""Privacy statements: every exported model carries its guarantee in words and as data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from dp_core.privacy.check_evidence import statement_words
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit
from dp_core.privacy.statement import DatasetTotal, Release, dataset_totals, privacy_statement
from tasks.protocol import ReleaseRecord, StepResult
from tasks.storage import RESULT

WORDS, DATA = "PRIVACY.md", "privacy_statement.json"
KEPT = "after"  # subfolder of a model with the models of earlier epochs, by updates done

_OPERATOR = """# Not private

This model, or one that it was made from, was trained on private text **without privacy**: its ε is
infinite. It stays with the operator of the data, who compares with it. It must not be exported,
published or promoted. What each data set gave to it follows.

"""
_OURS = (WORDS, DATA, RESULT)  # files in every model folder that this software made


@dataclass(frozen=True)
class Statement:
    """The privacy statement, as paragraphs and as data."""

    words: tuple[str, ...]
    record: Mapping[str, Any] = field(default_factory=dict)


def kept_folder(updates: int) -> str:
    """Return the subfolder that holds the model after this number of updates."""
    return f"{KEPT}/{updates}"


def released_after(result: StepResult) -> tuple[int, ...]:
    """Return the numbers of updates after which a pre-training released a model.

    The tuple is empty if it released only the last model.

    Args:
        result: result of the pre-training, or of a fine-tuning of one of its models.
    """
    kept = result.facts.get("kept_updates") or ()
    own = (*kept, result.facts["updates"]) if kept else ()
    return tuple(result.facts.get("released_after", own))


def of_last_model(names: Iterable[str]) -> list[str]:
    """Return the files of the last model in a folder, without the models of earlier epochs."""
    return [name for name in names if not name.startswith(f"{KEPT}/")]


def write_statement(
    folder: Path,
    releases: Sequence[ReleaseRecord],
    *,
    made_up: bool,
    released_after: Sequence[int] = (),
) -> None:
    """Write the statement of all releases that the folder's model descends from.

    Each data set of other people (the corpus, the labelled sentences) has a separate guarantee and
    statement: one after the other in words, under `others` in JSON. A use without privacy anywhere
    in the ancestry is listed first, and keeps the model with the operator.

    Args:
        folder: the model's folder.
        releases: the releases that the model descends from.
        made_up: whether the private text is made up or public.
        released_after: numbers of updates after which its pre-training released a model, including
            the last; empty if it released only the last model.
    """
    words, data = _statements(releases, made_up, released_after)
    if any(release.event.is_unaccounted for release in as_releases(releases)):
        words = _OPERATOR + words
    (folder / WORDS).write_text(words)
    (folder / DATA).write_text(json.dumps(data, indent=1) + "\n")


def statement_of(
    releases: Sequence[ReleaseRecord], *, made_up: bool, released_after: Sequence[int] = ()
) -> Statement:
    """Return the statement for the report, in paragraphs without Markdown's marks.

    It takes the same arguments as `write_statement`.
    """
    words, data = _statements(releases, made_up, released_after)
    lines = words.replace("**", "").splitlines()
    paragraphs = [line for line in lines if line and not line.startswith("#")]
    return Statement(tuple(re.sub(r"^- ", "• ", p) for p in paragraphs), data)


def refuse_own_model(folder: Path, field: str) -> None:
    """Refuse a model that Confide made as an external first model, since it has a history.

    Raises:
        BadInput: the weights' folder also holds a privacy statement or a step's result.
    """
    here = folder if folder.is_dir() else folder.parent
    ours = {name.lower() for name in _OURS}
    if any(file.name.lower() in ours for file in here.iterdir()):
        raise BadInput(
            "the folder holds a privacy statement: the model was made from private text",
            where=field,
            fix="Give the step's output as init_uri, where its releases count, or a public model.",
        )


def as_releases(records: Sequence[ReleaseRecord]) -> list[Release]:
    """Return the records as `Release` objects, for statements and totals."""
    return [
        Release(
            dataset=r.dataset,
            unit=PrivacyUnit(r.unit),
            event=MechanismEvent.from_json(r.event),
            delta=r.delta,
            ledger_id=r.ledger_id,
            seed_known=r.seed_known,
            plan=r.plan,
            declared_units=r.declared_units,
        )
        for r in records
    ]


def totals(releases: Sequence[ReleaseRecord]) -> tuple[DatasetTotal, ...]:
    """Return (ε, δ) of all releases of each data set, composed by PLD at the sum of their δ.

    ε is None if the releases protect different units or have different neighbouring relations.
    Then they have no total, and only the ε of each release can be stated.
    """
    return _totals(tuple(r.model_dump_json() for r in releases))


@cache
def _totals(records: tuple[str, ...]) -> tuple[DatasetTotal, ...]:
    releases = [ReleaseRecord.model_validate_json(record) for record in records]
    return dataset_totals(as_releases(releases))


def _statements(
    records: Sequence[ReleaseRecord], made_up: bool, released_after: Sequence[int]
) -> tuple[str, dict[str, Any]]:
    """Return all data sets' statements as words and data; statements with ε = ∞ come first."""
    releases = as_releases(records)
    names = dict.fromkeys(r.dataset for r in releases) or {"": None}
    parts = [
        privacy_statement([r for r in releases if r.dataset == name], made_up=made_up)
        for name in names
    ]
    parts.sort(key=lambda part: part.data["epsilon"] != "inf")
    data = dict(parts[0].data)
    if len(parts) > 1:
        data["others"] = [part.data for part in parts[1:]]
        data["private"] = all(part.data["private"] for part in parts)
        data["ledger_ids"] = [r.ledger_id for r in releases]
    if released_after:
        data["released_after_updates"] = list(released_after)
    return statement_words(data), data
