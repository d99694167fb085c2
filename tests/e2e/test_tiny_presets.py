import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import PRESETS, presets_of

ROOT = Path(__file__).resolve().parents[2]
TINY = [name for name in PRESETS if name.endswith("-tiny")]

SCORES = ("Entity F1", "Accuracy", "Perplexity")

pytestmark = [pytest.mark.presets, pytest.mark.slow]


def is_number(cell: dict[str, Any]) -> bool:
    return isinstance(cell.get("value"), float)


@pytest.mark.parametrize("preset", TINY)
def test_preset_ends_with_a_table_of_costs_and_scores(preset: str, tmp_path: Path):
    job = "dp_bert" if preset in presets_of(JobSettings) else "dp_sweep"
    process = subprocess.run(
        [str(ROOT / "confide"), "run", job, "--preset", preset, "--json"],
        env={**os.environ, "CONFIDE_HOME": str(tmp_path / "home")},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert process.returncode == 0
    answer = json.loads(process.stdout)
    table = answer["table"]
    titles = [column["name"] for column in table["headers"]]
    rows = [list(zip(titles, row, strict=True)) for row in table["rows"]]  # column titles repeat
    # ε of a model without privacy is the word `inf`, and ε of public text is 0.
    private = [row for row in rows if is_number(dict(row)["ε"]) and dict(row)["ε"]["value"]]
    assert private, "no model with a finite ε above 0"
    assert any(is_number(c) for row in private for title, c in row if title.startswith(SCORES))
    # step names of a sweep include the point
    assert any("pretraining" in step for step in answer["steps"])
