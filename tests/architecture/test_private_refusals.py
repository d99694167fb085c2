import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.token_store import TokenStoreWriter
from dp_core.errors import BadInput, ConfideError, PrivateTextRefusal
from tasks.steps.corpus_step import listed

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = CHECKOUT / "docs" / "privacy.md"
REFUSAL = PrivateTextRefusal.__name__
OTHERS = (BadInput.__name__, ConfideError.__name__)
TABLE = tomllib.loads(Path(__file__).with_name("private_refusals.toml").read_text())
READS_PRIVATE_TEXT, OTHER_ERRORS = TABLE["reads_private_text"], TABLE["other_errors"]


def errors_in(file: Path, names: tuple[str, ...]) -> Iterator[str]:
    """Yield `file.Class.function` for each function of the file that raises a named error."""

    def walk(node: ast.AST, above: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and getattr(child.func, "id", "") in names:
                yield above
            yield from walk(child, f"{above}.{child.name}" if inside else above)

    yield from walk(ast.parse(file.read_text()), file.stem)


def test_docs_list_every_refusal_that_depends_on_private_text():
    files = [file for room in ("dp_core", "tasks") for file in (CHECKOUT / room).rglob("*.py")]
    raised = {name for file in files for name in errors_in(file, (REFUSAL,))}
    section = PAGE.read_text().split("## Refusals that depend on private text")[1].split("\n## ")[0]
    rows = [line.rsplit(" | ", 1)[1] for line in section.splitlines() if line.startswith("| ")]
    listed = {name for row in rows[1:] for name in re.findall(r"`([\w.]+)`", row)}
    assert listed == raised


def test_other_errors_where_private_text_is_read_have_a_stated_cause():
    files = {file for pattern in READS_PRIVATE_TEXT for file in CHECKOUT.glob(pattern)}
    assert len(files) > len(READS_PRIVATE_TEXT)
    made = {name for file in files for name in errors_in(file, OTHERS)}
    causes = [name for names in OTHER_ERRORS.values() for name in names]
    assert len(causes) == len(set(causes))
    assert made == set(causes)


def test_refusal_of_a_source_keeps_its_kind_through_the_list_of_rejected_items(tmp_path):
    context: Any = SimpleNamespace(durable=tmp_path, out=tmp_path)
    quarantine = Quarantine()
    with (
        pytest.raises(PrivateTextRefusal, match="nothing to read"),
        listed(quarantine, context, "rejected.json"),
    ):
        quarantine.finish("notes")


def test_store_without_a_row_is_a_refusal_that_depends_on_private_text(tmp_path):
    with pytest.raises(PrivateTextRefusal, match="there is no text"):
        TokenStoreWriter(tmp_path, 8, 100).finish()
