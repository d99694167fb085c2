"""Measures the share of the non-private gain that private training keeps. It takes hours.

    python -m benchmarks.utility [--corpora NAME …] [--recipes NAME …]
        [--units N …] [--seeds N …] [--epsilons ε …]

Each result is written at once as a line of benchmarks/results/utility.jsonl; a later run skips
finished cells. At the end (or with --aggregate only) shares and intervals are written to
benchmarks/results/utility.json and the figure to docs/figures; `python -m
benchmarks.utility.tables` writes the tables of docs/phrases.md. `CONFIDE_DATA` names the folder of
real text; without it, only made-up notes are measured. --quick takes minutes and tests the harness;
--list prints the missing cells.
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
    options = _arguments()
    name = "utility-quick" if options.quick else "utility"
    results = Results(options.results / f"{name}.jsonl")
    wanted = cells(
        corpora=options.corpora,
        recipes=options.recipes,
        units=options.units,
        seeds=options.seeds,
        epsilons=options.epsilons,
        quick=options.quick,
    )
    if "CONFIDE_DATA" not in os.environ:
        wanted = [cell for cell in wanted if not CORPORA[cell.corpus].files]
    todo = [cell for cell in wanted if cell.key not in results]
    print(f"{len(wanted)} cells, {len(wanted) - len(todo)} of them done", flush=True)
    if options.list:
        print("\n".join(cell.key for cell in todo))
        return 0
    runner = Runner(options.home / name, results, quick=options.quick)
    started = time.monotonic()
    for cell in [] if options.aggregate else todo:
        if options.minutes and time.monotonic() - started > 60 * options.minutes:
            print("the time is up; run the same command to continue", flush=True)
            break
        runner.run(cell)
        line = results.lines[cell.key]
        print(f"{cell.key}: {line['dp']} in {line['seconds']:.0f} s", flush=True)
    _write(results, options, name)
    return 0


def _write(results: Results, options: argparse.Namespace, name: str) -> None:
    """Write shares, figure and, for a whole measurement, the curve that the advice uses."""
    rows = aggregate(results.lines)
    body = {"rows": rows, "cells": sorted(key for key in results.lines if key.count("/") > 2)}
    (options.results / f"{name}.json").write_text(
        json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    )
    draw(rows, options.figures / f"{name}.svg", FIGURED)
    draw(rows, options.figures / f"{name}.png", FIGURED)
    if options.quick or not options.curve:
        return
    replace_curves(options.curve, curves(results.lines, ADVISABLE, _where_measured(results.lines)))


def _where_measured(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a description of the patients and ε of the trainings that the curves are made of."""
    recipes = {name for names in ADVISABLE.values() for name in names}
    selected = [line for line in lines.values() if line.get("recipe") in recipes]
    *most, last = (f"{n:,}" for n in sorted({line["units"] for line in selected}))
    units = f"{', '.join(most)} and {last}" if most else last
    epsilons = ", ".join(f"{e:g}" for e in sorted({line["epsilon"] for line in selected}))
    return f"{units} patients at ε = {epsilons}, one to three trainings each"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", nargs="*", default=[], choices=CORPORA, metavar="NAME")
    parser.add_argument("--recipes", nargs="*", default=[], choices=RECIPES, metavar="NAME")
    parser.add_argument("--units", type=int, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--epsilons", type=float, nargs="*", default=EPSILONS)
    parser.add_argument("--quick", action="store_true", help="test the harness, in minutes")
    parser.add_argument("--minutes", type=float, default=0, help="start no cell after this time")
    parser.add_argument("--list", action="store_true", help="print the missing cells, and stop")
    parser.add_argument(
        "--aggregate", action="store_true", help="use existing results, and run nothing"
    )
    parser.add_argument("--home", type=Path, default=ROOT / ".confide-utility")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures")
    parser.add_argument("--curve", type=Path, help="write the curve of the advice to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
