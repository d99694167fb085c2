"""Runs the study, and writes its tables and figures from MLflow. Hours; goes on.

    python -m benchmarks.study [NAME …] [--seeds N …] [--write]

What is done is not done again. --write alone reads MLflow and writes docs/reproduction.md (between
its marks), docs/figures and benchmarks/results/study.json. `CONFIDE_DATA` names the folder of real
text; what needs it is left out without it. --list says what is left to do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from pathlib import Path

from benchmarks.study.experiments import EXPERIMENTS, SEEDS
from benchmarks.study.runs import ROOT, ModelFigures, Study
from benchmarks.study.tables import differences, draw_models, rows_of, table

PAGE = ROOT / "docs" / "reproduction.md"
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results" / "study.json"


def main() -> int:
    told = _arguments()
    study = Study(told.home)
    failed = 0
    wanted = [
        (EXPERIMENTS[name], variant, seed)
        for seed in told.seeds
        for name in told.names or EXPERIMENTS
        for variant in EXPERIMENTS[name].variants
        if not EXPERIMENTS[name].files or "CONFIDE_DATA" in os.environ
    ]
    for experiment, variant, seed in [] if told.write else wanted:
        key = study.key(experiment, variant, seed)
        if study.done(key) is not None:
            continue
        print(key, flush=True)
        if not told.list:
            try:
                study.run(experiment, variant, seed)
            except subprocess.CalledProcessError:
                failed += 1
    if told.write:
        write(study)
    return min(failed, 1)


def write(study: Study) -> None:
    """Write every table and figure that the finished runs give."""
    kept, page = {}, PAGE.read_text()
    for experiment in EXPERIMENTS.values():
        runs: list[tuple[str, list[ModelFigures]]] = [
            (variant, study.figures(key))
            for variant in experiment.variants
            for seed in SEEDS
            if study.done(key := study.key(experiment, variant, seed)) is not None
        ]
        if not runs:
            continue
        rows = rows_of(experiment, runs)
        kept[experiment.name] = [
            {"variant": row.variant, "model": row.model, **row.values} for row in rows
        ]
        told = "\n".join([table(experiment, rows), differences(experiment, rows)]).rstrip()
        page = _between(page, experiment.name, told)
        if experiment.name == "models":
            for suffix in ("svg", "png"):
                draw_models(rows, FIGURES / f"study-models.{suffix}")
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page)


def _between(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks of that name."""
    begin, end = f"<!-- study: {name} -->", f"<!-- end: {name} -->"
    marked = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not marked.search(page):
        raise SystemExit(f"docs/reproduction.md has no place for {name}: put {begin} {end} there")
    return marked.sub(lambda _: f"{begin}\n{text}\n{end}", page)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*EXPERIMENTS, []], metavar="NAME")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--home", type=Path, default=ROOT / ".confide-study")
    parser.add_argument("--write", action="store_true", help="tables and figures alone")
    parser.add_argument("--list", action="store_true", help="say what is left, and run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
