"""Write the tables of docs/vocabulary.md from the results files.

    python -m benchmarks.vocabulary_tables

In the page a table is between `<!-- NAME -->` and `<!-- end -->`. Rows without measurements are
omitted; a table without rows states that nothing is measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "vocabulary.md"
RESULTS = ROOT / "benchmarks" / "results"
MECHANISMS = ("elimination", "mad2r", "mad", "weighted", "policy", "gaussian")
CORPUS = "noteevents_format"
_MARKED = re.compile(r"<!-- (\w[\w ]*) -->\n.*?<!-- end -->", re.DOTALL)

Row = Mapping[str, Any]


def tables(fits: Row, trainings: Row, selection: Row) -> dict[str, str]:
    """Return the page's tables by name, from the results of both benchmarks."""
    makers: dict[str, Callable[[], str]] = {
        "released": lambda: _released(selection.get("released", [])),
        "planted": lambda: _planted(selection.get("planted", [])),
        f"sources {CORPUS}": lambda: _sources(fits.get(CORPUS, {})),
        f"mechanisms {CORPUS}": lambda: _mechanisms(fits.get(CORPUS, {})),
        f"models {CORPUS}": lambda: _models(trainings.get(CORPUS, {})),
    }
    return {name: make() or "Not measured yet." for name, make in makers.items()}


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + " --- |" * head.count("|") + " --- |"
    return "\n".join([f"| {head} |", rule, *lines]) if lines else ""


def _sources(rows: Mapping[str, Row]) -> str:
    """Return the sources with the default mechanism."""
    names = ["public", "checkpoint"]
    for source in ("private", "public+private", "checkpoint+private"):
        names += [f"{source} · elimination · ε {epsilon}" for epsilon in (1, 3, 8)]
    names.append("nonprivate")
    return _table(
        "source | ε_V | private words | tokens | coverage | fertility | unknown",
        ([*_named(name, without="elimination"), _words(rows[name]), f"{rows[name]['tokens']:,.0f}",
          *_fit(rows[name])] for name in names if name in rows),
    )  # fmt: skip


def _mechanisms(rows: Mapping[str, Row]) -> str:
    """Return every mechanism at ε = 3, for two sources."""
    kinds = [(mechanism, " · ε 3") for mechanism in MECHANISMS] + [("paper", "")]
    lines = []
    for mechanism, epsilon in kinds:
        names = [f"{source} · {mechanism}{epsilon}" for source in ("private", "public+private")]
        if all(name in rows for name in names):
            charged = f"{rows[names[0]]['epsilon']:.3g}"
            cells = [cell for n in names for cell in (_words(rows[n]), *_fit(rows[n]))]
            lines.append([charged, f"`{mechanism}`", *cells])
    return _table(
        "ε | mechanism | `private`: words | coverage | fertility | unknown "
        "| `public+private`: words | coverage | fertility | unknown",
        lines,
    )


def _models(rows: Mapping[str, Row]) -> str:
    """Return the results of trainings with each source; words are released at ε = 3."""
    return _table(
        "source | mechanism | ε_V | private words | tokens | MLM, public | MLM, DP "
        "| F1, public | F1, DP",
        ([*_source_mechanism(name), f"{row['words_released']:,}", f"{row['tokens']:,}",
          *(f"{100 * row[k]:.1f}" for k in ("public_mlm", "dp_mlm", "public_f1", "dp_f1"))]
         for name, row in rows.items()
         if "·" not in name or name.endswith("elimination · ε 3")),
    )  # fmt: skip


def _released(rows: list[Row]) -> str:
    """Return the items that each mechanism released from sets of items at ε = 3."""
    kinds = dict.fromkeys(
        (row["corpus"], row["public_items"], 3.0) for row in rows if row["epsilon"] == 3
    )
    lines = []
    for kind in kinds:
        of_kind = {
            row["mechanism"]: row for row in rows
            if (row["corpus"], row["public_items"], row["epsilon"]) == kind
        }  # fmt: skip
        best = max(of_kind.values(), key=lambda row: float(row["items_released"]))
        cells = []
        for mechanism in MECHANISMS:
            row = of_kind.get(mechanism)
            text = f"{row['items_released']:,.0f}" if row else "–"
            cells.append(f"**{text}**" if row is best else text)
        lines.append([kind[0], kind[1], f"{kind[2]:g}", *cells])
    return _table("corpus | public items | ε | " + " | ".join(f"`{m}`" for m in MECHANISMS), lines)


def _planted(rows: list[Row]) -> str:
    return _table(
        "mechanism | N | ε | δ | draws | given away | δ allows | 95%: at least | p",
        ([row["mechanism"], str(row["items_per_unit"]), f"{row['epsilon']:.3g}",
          f"{row['delta']:g}", f"{row['draws']:,}", str(row["given_away"]),
          f"{row['at_most']:.3g}", f"{row['least_rate_95']:.3g}", _p(row["p_value"])]
         for row in rows),
    )  # fmt: skip


def _p(value: float) -> str:
    return f"{value:.2g}" if value > 0 else "< 1e-300"


def _named(name: str, without: str) -> list[str]:
    source, _, epsilon = _source_mechanism(name.replace(f" · {without}", " · "))
    free = {"nonprivate": "∞"}.get(source.strip("`"), "0")
    return [source, epsilon if epsilon != "–" else free]


def _source_mechanism(name: str) -> list[str]:
    parts = [part.strip() for part in name.split("·")] + ["", ""]
    epsilon = parts[2].removeprefix("ε ") or ("0.518" if parts[1] == "paper" else "–")
    return [f"`{parts[0]}`", f"`{parts[1]}`" if parts[1] else "–", epsilon]


def _words(row: Row) -> str:
    least, most = row["words_released_least_and_most"]
    text = f"{row['words_released']:,.0f}"
    return text if row["releases"] == 1 else f"{text} ({least:,}–{most:,})"


def _fit(row: Row) -> list[str]:
    return [f"{row['coverage']:.1%}", f"{row['fertility']:.2f}", f"{row['unknown']:.2%}"]


def filled(page: str, by_name: Mapping[str, str]) -> str:
    """Return the page with its tables."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{by_name[match[1]]}\n<!-- end -->"

    return _MARKED.sub(replaced, page)


def measured() -> dict[str, str]:
    """Return the tables of the existing results."""
    vocabulary, selection = (
        json.loads(path.read_text()) if path.exists() else {}
        for path in (RESULTS / "vocabulary.json", RESULTS / "partition_selection.json")
    )
    return tables(vocabulary.get("fits", {}), vocabulary.get("trainings", {}), selection)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), measured()))
