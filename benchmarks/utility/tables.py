"""The tables of docs/phrases.md: accuracy of the models of a recipe, by number of patients.

python -m benchmarks.utility.tables
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.utility.runs import Results
from benchmarks.utility.shares import QUANTITIES, mean_of, share_of
from benchmarks.vocabulary_tables import filled

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "phrases.md"
RESULTS = ROOT / "benchmarks" / "results" / "utility.jsonl"
CORPUS, EPSILON = "made-up", 5.8
TABLES = {  # name in the page -> recipe
    "gains": "phrases + gradients"
}
_HEAD = (
    "patients (seeds) | trained on | MLM accuracy, private text held out | entity F1 "
    "| share of the gain without privacy: MLM, F1"
)
Line = Mapping[str, Any]


def tables(lines: Mapping[str, Line]) -> dict[str, str]:
    """Return the page's tables by name, from the lines of the results file."""
    return {name: _gains(lines, recipe) for name, recipe in TABLES.items()}


def _gains(lines: Mapping[str, Line], recipe: str) -> str:
    cells = [
        line
        for line in lines.values()
        if (line.get("recipe"), line["corpus"], line.get("epsilon")) == (recipe, CORPUS, EPSILON)
        and line["reference"] in lines
    ]
    rows = [_HEAD, " | ".join(["---"] * 5)]
    for units in sorted({cell["units"] for cell in cells}):
        selected = [cell for cell in cells if cell["units"] == units]
        references = [lines[cell["reference"]] for cell in selected]
        shares = ", ".join(
            _share(share_of(metric, cell, lines[cell["reference"]]) for cell in selected)
            for metric in QUANTITIES
            if not metric.startswith("perplexity")
        )
        rows += [
            f"{units:,} ({len(selected)}) | public text only | {_means(references, 'public')} | ",
            f" | then text written from phrases | {_means(selected, 'phrases')} | ",
            f" | then DP-SGD | {_means(selected, 'dp')} | {shares}",
            f" | the notes without privacy | {_means(references, 'nonprivate')} | ",
        ]
    return "\n".join(f"| {row} |" for row in rows)


def _means(lines: Iterable[Line], model: str) -> str:
    figures = [line[model] for line in lines]
    return " | ".join(
        f"{100 * statistics.fmean(values):.1f}{sign}" if values else "–"
        for metric, sign in (("mlm_accuracy_private", "%"), ("f1", ""))
        for values in [
            [values_of_run[metric] for values_of_run in figures if metric in values_of_run]
        ]
    )


def _share(shares: Iterable[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if not known:
        return "–"
    interval = mean_of(known)
    text = "below 0" if interval.mean < 0 else f"**{interval.mean:.0%}**"
    if interval.low is None or interval.high is None:
        return text
    low = "below 0" if interval.low < 0 else f"{100 * interval.low:.0f}"
    return f"{text} ({low} to {100 * interval.high:.0f})"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), tables(Results(RESULTS).lines)))
