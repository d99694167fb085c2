"""Results of finished steps as inputs of later steps and of the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from tasks.protocol import MetricRecord, ReleaseRecord, StepResult
from tasks.storage import RESULT, Store

TYPES: dict[Label, type[Labelled]] = {
    Label.DP: Dp,
    Label.PUBLIC: Public,
    Label.OPERATOR: Operator,
}


@dataclass(frozen=True)
class Input:
    """An earlier step's output: its result, and its files on local disk.

    Attributes:
        result: the step's result.
        folder: the step's files; for a corpus, all but the shards.
        uri: the output's store address.
    """

    result: StepResult
    folder: Path
    uri: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that the step recorded about its output."""
        return self.result.facts


def read_result(store: Store, uri: str) -> StepResult | None:
    """Return the result in an output folder, or None if there is none yet.

    Raises:
        BadInput: the file exists but is not a result.
    """
    content = store.read(f"{uri}/{RESULT}")
    if content is None:
        return None
    try:
        return StepResult.model_validate_json(content)
    except ValidationError as error:
        raise BadInput(
            "not a result of this version" if content else "the file is empty",
            where=f"{uri}/{RESULT}",
            fix="Delete the file and run the same command again: a settled release is made again "
            "with the same noise, and is not charged twice.",
        ) from error


def merged(releases: Iterable[ReleaseRecord]) -> list[ReleaseRecord]:
    """Return each release once, in the order of first appearance."""
    return list({r.ledger_id: r for r in releases}.values())


def labelled(record: MetricRecord) -> Labelled:
    """Return a recorded number as a value of its label's type."""
    return TYPES[Label(record.label)](record.value)
