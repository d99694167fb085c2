"""Paths of real text below the folder that `CONFIDE_DATA` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dp_core.errors import BadInput

NOTES = "noteevents_format/NOTEEVENTS_derived.csv.xz"
ARTICLES = "pmc_rct_articles/articles.jsonl.xz"
PUBLIC = "wikitext-2/train.txt.xz"

# By the setting that takes each path.
PUBLIC_AND_ENTITIES = {
    "public_path": PUBLIC,
    "entities_train": "ner_bc5cdr/train.tsv",
    "entities_test": "ner_bc5cdr/test.tsv",
}
NOTES_AND_ENTITIES = {"private_path": NOTES, **PUBLIC_AND_ENTITIES}


def existing_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return files by setting, as absolute paths.

    Args:
        files: each relative to the folder.

    Raises:
        BadInput: a file is missing in the folder that `CONFIDE_DATA` names.
    """
    folder = Path(os.environ.get("CONFIDE_DATA") or "/nowhere")
    for name, file in files.items():
        if not (folder / file).exists():
            raise BadInput(f"there is no {file}", where=f"CONFIDE_DATA, {name}")
    return {name: str((folder / file).resolve()) for name, file in files.items()}
