"""Writes and reads evidence packs: folders with data, pages generated from them, and a script."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from tasks.evidence import check_evidence
from tasks.evidence.gather import Gathered
from tasks.evidence.pack_contents import Evidence, LedgerFile
from tasks.storage import sha256_of


def write_pack(gathered: Gathered, folder: Path) -> None:
    """Write the pack; evidence.json, with the digests of all other files, is written last.

    Args:
        gathered: the evidence.
        folder: an empty folder.

    Raises:
        BadInput: another version wrote the statement in the model's folder.
    """
    evidence, ledger, statement = (
        gathered.evidence.model_dump(mode="json"),
        gathered.ledger.model_dump(mode="json"),
        gathered.statement,
    )
    _write_json(folder / check_evidence.LEDGER, ledger)
    for name in (check_evidence.STATEMENT, check_evidence.WORDS):
        shutil.copyfile(gathered.folder / name, folder / name)
    pages = check_evidence.pages(evidence, ledger, statement)
    if (folder / check_evidence.WORDS).read_text(encoding="utf-8") != pages[check_evidence.WORDS]:
        raise BadInput(
            f"{check_evidence.WORDS} and {check_evidence.STATEMENT} of the model differ",
            where=str(gathered.folder),
            fix="Make the pack with the version of Confide that made the model.",
        )
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copyfile(check_evidence.__file__, folder / check_evidence.SCRIPT)
    evidence["files"] = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
    _write_json(folder / check_evidence.EVIDENCE, evidence)


def read_pack(folder: Path) -> tuple[Evidence, LedgerFile]:
    """Return the validated contents of a pack.

    Raises:
        pydantic.ValidationError: a field is missing or invalid.
    """
    evidence = Evidence.model_validate_json((folder / check_evidence.EVIDENCE).read_bytes())
    ledger = LedgerFile.model_validate_json((folder / check_evidence.LEDGER).read_bytes())
    return evidence, ledger


def _write_json(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")
