"""Measures the share of the non-private gain that private training keeps. Hours; goes on.

    python -m benchmarks.utility [--corpora NAME …] [--recipes NAME …]
        [--units N …] [--seeds N …] [--epsilons ε …]

Answers go to benchmarks/results/utility.jsonl, a line each as soon as it is there; started again,
what is done is left out. At the end (or with --aggregate alone) shares and intervals go to
benchmarks/results/utility.json and the figure to docs/figures;
`python -m benchmarks.utility.tables` writes the tables of docs/phrases.md. `CONFIDE_DATA` names the
folder of real text; without it, only made-up notes are measured. --quick takes minutes, and asks
whether the harness works; --list says what is left to do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

from benchmarks.utility.cells import ADVISABLE, CORPORA, EPSILONS, FIGURED, RECIPES, SEEDS, cells
from benchmarks.utility.figure import draw
from benchmarks.utility.runs import Results, Runner
from benchmarks.utility.shares import aggregate, curves, replace_curves


def main() -> int:
    told = _arguments()
    name = "utility-quick" if told.quick else "utility"
    results = Results(told.results / f"{name}.jsonl")
    wanted = cells(
        corpora=told.corpora,
        recipes=told.recipes,
        units=told.units,
        seeds=told.seeds,
        epsilons=told.epsilons,
        quick=told.quick,
    )
    if "CONFIDE_DATA" not in os.environ:
        wanted = [cell for cell in wanted if not CORPORA[cell.corpus].files]
    todo = [cell for cell in wanted if cell.key not in results]
    print(f"{len(wanted)} cells, {len(wanted) - len(todo)} of them done", flush=True)
    if told.list:
        print("\n".join(cell.key for cell in todo))
        return 0
    runner = Runner(told.home / name, results, quick=told.quick)
    started = time.monotonic()
    for cell in [] if told.aggregate else todo:
        if told.minutes and time.monotonic() - started > 60 * told.minutes:
            print("time is up; the same command goes on", flush=True)
            break
        runner.run(cell)
        line = results.lines[cell.key]
        print(f"{cell.key}: {line['dp']} in {line['seconds']:.0f} s", flush=True)
    _write(results, told, name)
    return 0


def _write(results: Results, told: argparse.Namespace, name: str) -> None:
    """Write shares, figure and, of a whole measurement, the curve that advice goes by."""
    rows = aggregate(results.lines)
    body = {"rows": rows, "cells": sorted(key for key in results.lines if key.count("/") > 2)}
    (told.results / f"{name}.json").write_text(
        json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    )
    draw(rows, told.figures / f"{name}.svg", FIGURED)
    draw(rows, told.figures / f"{name}.png", FIGURED)
    if told.quick or not told.curve:
        return
    replace_curves(told.curve, curves(results.lines, ADVISABLE, _where_measured(results.lines)))


def _where_measured(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return, in words, of how many patients and at which ε the trainings are that make curves."""
    recipes = {name for names in ADVISABLE.values() for name in names}
    own = [line for line in lines.values() if line.get("recipe") in recipes]
    *most, last = (f"{n:,}" for n in sorted({line["units"] for line in own}))
    units = f"{', '.join(most)} and {last}" if most else last
    epsilons = ", ".join(f"{e:g}" for e in sorted({line["epsilon"] for line in own}))
    return f"{units} patients at ε = {epsilons}, one to three trainings each"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", nargs="*", default=[], choices=CORPORA, metavar="NAME")
    parser.add_argument("--recipes", nargs="*", default=[], choices=RECIPES, metavar="NAME")
    parser.add_argument("--units", type=int, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--epsilons", type=float, nargs="*", default=EPSILONS)
    parser.add_argument("--quick", action="store_true", help="minutes: does the harness work?")
    parser.add_argument("--minutes", type=float, default=0, help="begin no cell after so many")
    parser.add_argument("--list", action="store_true", help="name what is left to do; stop")
    parser.add_argument("--aggregate", action="store_true", help="from what is done; run nothing")
    parser.add_argument("--home", type=Path, default=ROOT / ".confide-utility")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--curve", type=Path, help="write advice's curve there: MEASURED of it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
