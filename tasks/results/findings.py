"""Findings of audits in the output of a step: one file for each audience."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from dp_core.audit.protocol import Finding
from dp_core.labels import Label
from tasks.protocol import StepResult
from tasks.results.inputs import Input

# Facts of an audit step's output that identify the audited model and the canaries.
SUBJECT, PROBES = "audited_weights", "canaries_digest"
FINDINGS = {label: f"findings_{label.value}" for label in Label}  # outputs, and .json
_FILE: TypeAdapter[tuple[Finding, ...]] = TypeAdapter(tuple[Finding, ...])


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
    found = read_findings(audited.result, audited.folder)
    return tuple(finding for finding in found if finding.key == key)
