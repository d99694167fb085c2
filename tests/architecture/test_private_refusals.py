import ast
import re
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
READS_PRIVATE_TEXT = (
    "dp_core/data/**/*.py",
    "dp_core/vocabulary/item_sets.py",
    "dp_core/training/finetune.py",
    "dp_core/training/heads.py",
    "dp_core/audit/black_box.py",
    "dp_core/audit/membership_sample.py",
    "tasks/context.py",
    "tasks/releases/declarations.py",
    *(
        f"tasks/steps/{name}.py"
        for name in (
            "corpus_step", "entities_step", "exposure_step", "finetune_step",
            "membership_step", "phrases_step", "reserve_step", "token_store_step",
            "training_files", "vocabulary_step",
        )
    ),
)  # fmt: skip
# Errors in these files that depend on no private text, by their cause.
OTHER_ERRORS = {
    "a setting, a path or the machine": {
        "black_box._coin_bound",
        "entity_formats.read_pairs", "item_sets.BoundedSets.__post_init__", "masking.mask_rows",
        "labelled_texts.read_patients", "privacy_units._examples", "registry._read",
        "sources.entries",
        "token_store.RowPacker.add_unit", "token_store_step._canaries",
        "token_store.rows_of_units", "training_files.KeptModels.weights", "declarations._copied",
        "declarations._ledger",
    },
    "public text or labels": {
        "declarations.declare_public", "entities_step.run", "finetune_step.items_of",
        "heads.TaggingHead.__post_init__", "vocabulary_step._read_checkpoint",
    },
    "whether a digest was declared public": {"declarations._refuse_undeclared"},
    "a released model or vocabulary": {
        "declarations._refuse_our_weights", "finetune_step.run",
        "tokens.SpecialIds.of",
        "training_files.refuse_other_architecture",
    },
    "an output of another step": {
        "context.StepContext.beside", "context.StepContext._result",
        "context.StepContext.refuse_altered", "context.read_checked",
        "corpus_step.restore", "corpus._unfinished", "corpus.read_shard", "corpus.shards_of_mark",
        "exposure_step.run", "finetune.finetune",
        "membership_step._sample", "membership_sample._Places.rows",
        "token_store.TokenStore.open",
        "token_store.TokenStoreWriter.add_units_of",
        "training_files.TrainingInputs.train_store", "training_files.audit_canaries_of",
    },
}  # fmt: skip


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
