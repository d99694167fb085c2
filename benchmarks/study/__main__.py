"""Runs the study, and writes its tables and figures from MLflow. It takes hours and can be resumed.

    python -m benchmarks.study [NAME …] [--seeds N …] [--write]

Finished runs are not repeated. With --write, nothing is run: docs/reproduction.md (between its
marks), docs/figures and benchmarks/results/study.json are written from MLflow. `CONFIDE_DATA` names
the folder of real text; without it, experiments on real text are skipped. --list prints the missing
runs.
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
    options = _arguments()
    study = Study(options.home)
    failed = 0
    wanted = [
        (EXPERIMENTS[name], variant, seed)
        for seed in options.seeds
        for name in options.names or EXPERIMENTS
        for variant in EXPERIMENTS[name].variants
        if not EXPERIMENTS[name].files or "CONFIDE_DATA" in os.environ
    ]
    for experiment, variant, seed in [] if options.write else wanted:
        if study.is_current(experiment, variant, seed):
            continue
        print(study.key(experiment, variant, seed), flush=True)
        if not options.list:
            try:
                study.run(experiment, variant, seed)
            except subprocess.CalledProcessError:
                failed += 1
    if options.write:
        write(study)
    return min(failed, 1)


def write(study: Study) -> None:
    """Write every table and figure that the finished runs provide."""
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
        text = "\n".join([table(experiment, rows), differences(experiment, rows)]).rstrip()
        page = _between(page, experiment.name, text)
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
    parser.add_argument("--write", action="store_true", help="write tables and figures only")
    parser.add_argument(
        "--list", action="store_true", help="print the missing runs, and run nothing"
    )
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
