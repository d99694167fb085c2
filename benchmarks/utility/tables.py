"""The tables of docs/phrases.md: what models of one recipe are worth, by number of patients.

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
    "gains": "phrases + gradients",
    "gains with more computing": "phrases + gradients, more computing",
    "gains with few words": "phrases + gradients, few words",
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
        own = [cell for cell in cells if cell["units"] == units]
        held_to = [lines[cell["reference"]] for cell in own]
        shares = ", ".join(
            _share(share_of(metric, cell, lines[cell["reference"]]) for cell in own)
            for metric in QUANTITIES
            if not metric.startswith("perplexity")
        )
        rows += [
            f"{units:,} ({len(own)}) | public text only | {_means(held_to, 'public')} | ",
            f" | then text written from phrases | {_means(own, 'phrases')} | ",
            f" | then DP-SGD | {_means(own, 'dp')} | {shares}",
            f" | the notes without privacy | {_means(held_to, 'nonprivate')} | ",
        ]
    return "\n".join(f"| {row} |" for row in rows)


def _means(lines: Iterable[Line], model: str) -> str:
    found = [line[model] for line in lines]
    return " | ".join(
        f"{100 * statistics.fmean(values):.1f}{sign}" if values else "–"
        for metric, sign in (("mlm_accuracy_private", "%"), ("f1", ""))
        for values in [[one[metric] for one in found if metric in one]]
    )


def _share(shares: Iterable[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if not known:
        return "–"
    found = mean_of(known)
    said = "below 0" if found.mean < 0 else f"**{found.mean:.0%}**"
    if found.low is None or found.high is None:
        return said
    low = "below 0" if found.low < 0 else f"{100 * found.low:.0f}"
    return f"{said} ({low} to {100 * found.high:.0f})"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), tables(Results(RESULTS).lines)))
