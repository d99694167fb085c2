"""Results of finished steps: inputs of later steps, privacy statements, and findings of audits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dp_core.audit.protocol import Finding
from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from dp_core.privacy.statement import operator_only, privacy_statement
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.storage.store import RESULT, Store

STATEMENT_WORDS, STATEMENT_DATA = "PRIVACY.md", "privacy_statement.json"
KEPT = "after"  # subfolder of a model with the models of earlier epochs, by updates done

_OPERATOR = """# Not private

This model, or one that it was made from, was trained on private text **without privacy** (its ε is
infinite) or for a study, with a budget whose ε has no meaning. It stays with the operator of the
data, who compares with it. It must not be exported, published or promoted. What each data set gave
to it follows.

"""
# Facts of an audit step's output that identify the audited model and the canaries.
SUBJECT, PROBES = "audited_weights", "canaries_digest"
FIGURES_FILE = "figures.json"  # of a report, in the folder of each edition
MODEL_RUNS = "operator_report/model_runs.json"  # of a report: the rows of MLflow's list
FINETUNED = "finetuned"  # fact of a report: the fine-tunings of each model's score
FINDINGS = {label: f"findings_{label.value}" for label in Label}  # outputs, and .json
_FILE: TypeAdapter[tuple[Finding, ...]] = TypeAdapter(tuple[Finding, ...])
TYPES: dict[Label, type[Labelled]] = {Label.DP: Dp, Label.PUBLIC: Public, Label.OPERATOR: Operator}


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


# --- privacy statements


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
    updates = (*kept, result.facts["updates"]) if kept else ()
    return tuple(result.facts.get("released_after", updates))


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
    statement = privacy_statement(releases, made_up=made_up, released_after=released_after)
    kept = _OPERATOR if operator_only(releases) else ""
    (folder / STATEMENT_WORDS).write_text(kept + statement.words)
    (folder / STATEMENT_DATA).write_text(json.dumps(statement.data, indent=1) + "\n")


def refuse_own_model(folder: Path, field: str) -> None:
    """Refuse a model that Confide made as an external first model, since it has a history.

    Raises:
        BadInput: the weights' folder also holds a privacy statement or a step's result.
    """
    here = folder if folder.is_dir() else folder.parent
    ours = {name.lower() for name in (STATEMENT_WORDS, STATEMENT_DATA, RESULT)}
    if any(file.name.lower() in ours for file in here.iterdir()):
        raise BadInput(
            "the folder holds a privacy statement: the model was made from private text",
            where=field,
            fix="Give the step's output as init_uri, where its releases count, or a public model.",
        )


# --- findings of audits: one file for each audience


def write_findings(folder: Path, findings: Sequence[Finding]) -> dict[str, Label]:
    """Write the findings, and return the names of their files, each with its label."""
    written = {}
    for label, name in FINDINGS.items():
        if shown := [finding for finding in findings if finding.label is label]:
            (folder / f"{name}.json").write_bytes(_FILE.dump_json(tuple(shown), indent=1))
            written[f"{name}.json"] = label
    return written


def read_findings(result: StepResult, folder: Path) -> tuple[Finding, ...]:
    """Return all findings in a step's output."""
    names = [name for name in FINDINGS.values() if name in result.outputs]
    files = [_FILE.validate_json((folder / f"{name}.json").read_bytes()) for name in names]
    return tuple(finding for findings in files for finding in findings)


def findings_of(audited: Input | None, key: str) -> tuple[Finding, ...]:
    """Return the findings of one audit in a step's output; none without an output."""
    if audited is None:
        return ()
    findings = read_findings(audited.result, audited.folder)
    return tuple(finding for finding in findings if finding.key == key)
