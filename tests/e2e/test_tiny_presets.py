import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dp_core.data.labelled_text import entities
from tasks.demo_data.entities import labelled_sentences
from tasks.demo_data.notes import notes
from tasks.demo_data.public_text import public_text
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import PRESETS, presets_of

ROOT = Path(__file__).resolve().parents[2]
TINY = [name for name in PRESETS if name.endswith("-tiny")]

SMALL = {  # sizes for hoory2021-table2 on 60 patients
    "declared_units": 12000, "words_per_unit": 24, "vocabulary_epsilon": 50,
    "vocabulary_delta": 1e-6, "vocabulary_size": 400, "layers": 1, "hidden": 64,
    "sequence_length": 32, "public_steps": 5, "public_batch_size": 8, "batch_size": 128,
    "epochs": 0.05, "delta": 1e-6, "device": "cpu", "entities_folds": 2, "finetune_epochs": 1,
    "nonprivate_batch_size": 64, "canary_rates": "0.01",
}  # fmt: skip

SCORES = ("Entity F1", "Accuracy", "Perplexity")

pytestmark = [pytest.mark.presets, pytest.mark.slow]


def is_number(cell: dict[str, Any]) -> bool:
    return isinstance(cell.get("value"), float)


def confide(home: Path, *words: str) -> str:
    return subprocess.run(
        [str(ROOT / "confide"), *words],
        env={**os.environ, "CONFIDE_HOME": str(home / "home")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def write_corpora(folder: Path) -> None:
    """Write made-up notes as NOTEEVENTS, public text, and labelled notes in the i2b2 layout."""
    with (folder / "NOTEEVENTS.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ROW_ID", "SUBJECT_ID", "HADM_ID", "ISERROR", "TEXT"])
        for number, note in enumerate(notes(60, seed=1)):
            rows.writerow([number, note.patient_id.removeprefix("P"), number, "", note.text])
    (folder / "books").mkdir()
    for number, text in enumerate(public_text(60, seed=1)):
        (folder / "books" / f"{number}.txt").write_text(text.text)
    (folder / "i2b2").mkdir()
    sentences, _ = labelled_sentences(120)
    for number in range(20):
        lines, concepts = [], []
        for row, sentence in enumerate(sentences[6 * number : 6 * number + 6], start=1):
            lines.append(" ".join(sentence.tokens))
            for label, start, end in entities(sentence.tags):
                words = " ".join(sentence.tokens[start:end])
                concepts.append(f'c="{words}" {row}:{start} {row}:{end - 1}||t="{label}"')
        (folder / "i2b2" / f"r{number}.txt").write_text("\n".join(lines) + "\n")
        (folder / "i2b2" / f"r{number}.con").write_text("\n".join(concepts) + "\n")


def test_combination_of_table_2_runs_at_small_size(tmp_path):
    """The files, unit, vocabulary, folds and baselines of the full-size preset; smaller numbers."""
    write_corpora(tmp_path)
    settings = {
        "private_path": tmp_path / "NOTEEVENTS.csv",
        "public_path": tmp_path / "books",
        "entities_train": tmp_path / "i2b2",
        **SMALL,
    }
    options = [f"--set={name}={value}" for name, value in settings.items()]
    for dataset, unit in (("mimic-iii", "example"), ("i2b2-2010", "document")):
        budget = ("--unit", unit, "--epsilon", "500", "--delta", "1e-5")
        confide(tmp_path, "ledger", "register", dataset, *budget)
    confide(tmp_path, "ledger", "declare-public", str(tmp_path / "books"))
    preset = ("run", "dp_sweep", "--preset", "hoory2021-table2")
    answer = json.loads(confide(tmp_path, *preset, *options, "--json"))
    assert len(answer["table"]["rows"]) == 4  # two σ, public text only, and without privacy


@pytest.mark.parametrize("preset", TINY)
def test_preset_ends_with_a_table_of_costs_and_scores(preset, tmp_path):
    job = "dp_bert" if preset in presets_of(JobSettings) else "dp_sweep"
    answer = json.loads(confide(tmp_path, "run", job, "--preset", preset, "--json"))
    table = answer["table"]
    titles = [column["name"] for column in table["headers"]]
    rows = [list(zip(titles, row, strict=True)) for row in table["rows"]]  # column titles repeat
    # ε of a model without privacy is the word `inf`, and ε of public text is 0.
    private = [row for row in rows if is_number(dict(row)["ε"]) and dict(row)["ε"]["value"]]
    assert private, "no model with a finite ε above 0"
    assert any(is_number(c) for row in private for title, c in row if title.startswith(SCORES))
    # step names of a sweep include the point
    assert any("pretraining" in step for step in answer["steps"])
