"""The evidence pack as a folder: data, schema, model card, page, statement, ledger, and a check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tasks.evidence import check_evidence
from tasks.evidence.gather import Gathered
from tasks.evidence.model import Evidence, LedgerFile
from tasks.evidence.page import model_card, page
from tasks.releases.statements import DATA, WORDS
from tasks.storage import sha256_of

CARD, PAGE, SCRIPT = "README.md", "evidence.html", "check_evidence.py"


def write_pack(gathered: Gathered, folder: Path) -> None:
    """Write the pack; evidence.json last, which names the digest of every other file.

    Args:
        gathered: the evidence.
        folder: empty.
    """
    evidence, ledger = gathered.evidence, gathered.ledger
    _write_json(folder / check_evidence.LEDGER, ledger.model_dump(mode="json"))
    _write_json(folder / check_evidence.SCHEMA, schema())
    for name in (DATA, WORDS):
        shutil.copyfile(gathered.folder / name, folder / name)
    shutil.copyfile(check_evidence.__file__, folder / SCRIPT)
    (folder / CARD).write_text(model_card(evidence), encoding="utf-8")
    (folder / PAGE).write_text(page(evidence, ledger), encoding="utf-8")
    files = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
    whole = evidence.model_copy(update={"files": files})
    _write_json(folder / check_evidence.EVIDENCE, whole.model_dump(mode="json"))


def schema() -> dict[str, Any]:
    """Return the JSON Schema of evidence.json: every field is there, and no other."""
    whole = Evidence.model_json_schema(mode="serialization")
    for definition in (whole, *whole["$defs"].values()):
        if "properties" in definition:  # also those that have a default: nothing is left out
            definition["required"] = list(definition["properties"])
    return whole


def read_pack(folder: Path) -> tuple[Evidence, LedgerFile]:
    """Return what a pack holds, checked against the models and not only against the schema.

    Raises:
        pydantic.ValidationError: a field is missing or false.
    """
    evidence = Evidence.model_validate_json((folder / check_evidence.EVIDENCE).read_bytes())
    ledger = LedgerFile.model_validate_json((folder / check_evidence.LEDGER).read_bytes())
    return evidence, ledger


def _write_json(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")
