"""Tests of strict F1 of concept files against counts of the official scorer of the 2010 task.

The counts in i2b2_scorer.json were computed outside of the project, by the program in its `source`
field, on made-up concepts that overlap, span lines, are repeated or have the wrong type.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dp_core.data.labelled_text import EntityScores, Score, joined, score
from dp_core.data.readers.i2b2 import read_i2b2
from dp_core.data.readers.quarantine import Quarantine

FROZEN: dict[str, Any] = json.loads((Path(__file__).parent / "i2b2_scorer.json").read_text())
Case = dict[str, Any]


def write(folder: Path, name: str, lines: list[int], concepts: list[list[Any]]) -> None:
    words = {(i, j): f"w{i}.{j}" for i, size in enumerate(lines, 1) for j in range(size)}
    text = [
        " ".join(words[line, token] for token in range(size)) for line, size in enumerate(lines, 1)
    ]
    concept_lines = []
    for kind, *ends in concepts:
        begin, end = (ends[0], ends[1]), (ends[2], ends[3])
        own = " ".join(word for place, word in words.items() if begin <= place <= end)
        concept_lines.append(f'c="{own}" {begin[0]}:{begin[1]} {end[0]}:{end[1]}||t="{kind}"')
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text("\n".join(text) + "\n")
    (folder / f"{name}.con").write_text("".join(line + "\n" for line in concept_lines))


def scored(folder: Path, cases: list[Case]) -> EntityScores:
    parts = {}
    for part in ("reference", "system"):
        for number, case in enumerate(cases):
            write(folder / part, f"{number:03}", case["lines"], case[part])
        quarantine = Quarantine()
        parts[part] = joined(read_i2b2(folder / part, quarantine))
        assert quarantine.rejected == 0
    return score(parts["reference"], [document.tags for document in parts["system"]])


def counts(found: EntityScores) -> dict[str, list[int]]:
    kinds = {kind: found.by_type.get(kind, Score(0, 0, 0)) for kind in FROZEN["total"]}
    kinds["all"] = found.micro
    return {
        kind: [own.correct, own.expected - own.correct, own.predicted - own.correct]
        for kind, own in kinds.items()
    }


@pytest.mark.parametrize("case", FROZEN["cases"], ids=lambda case: case["name"])
def test_counts_equal_the_counts_of_the_scorer_of_2010(tmp_path: Path, case: Case) -> None:
    assert counts(scored(tmp_path, [case])) == case["counts"]


def test_all_documents_together_are_scored_as_one(tmp_path: Path) -> None:
    found = scored(tmp_path, FROZEN["cases"])
    assert counts(found) == FROZEN["total"]
    right, missed, spurious = FROZEN["total"]["all"]
    assert found.micro.f1 == pytest.approx(2 * right / (2 * right + missed + spurious))
