"""Runs a cell by the job's steps, in this process, and writes each result as a JSON line.

Outputs of earlier cells with the same specs (corpora, vocabulary, public and non-private models)
are reused from the store, so references are trained once, and a stopped run can be resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.utility.cells import RECIPES, Cell
from dp_core.privacy.ledger import Ledger
from tasks.execution.contract import run_step
from tasks.protocol.job import POINT_STEPS, job_steps, point_and_task
from tasks.protocol.messages import StepResult
from tasks.protocol.points import OF_JOB, Mode
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import RunContext, StepSpec
from tasks.releases.declarations import declare_public
from tasks.releases.training_advice import PrivacyBudget, RunReleases, advised, calibrated
from tasks.runtime.deployment import Deployment

MEASURED = ("f1", "mlm_accuracy_private", "mlm_accuracy_public", "perplexity_private")
_NO_TRACKER = "http://127.0.0.1:9"  # no server listens there, because the results are written here


class Results:
    """The JSON lines of finished cells and references; a truncated line is ignored."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.lines: dict[str, dict[str, Any]] = {}
        if file.exists():
            self.lines = {line["key"]: line for line in _whole_lines(file.read_text())}

    def __contains__(self, key: str) -> bool:
        return key in self.lines

    def add(self, key: str, line: Mapping[str, Any]) -> None:
        """Write a line to the disk before returning."""
        self.lines[key] = {"key": key, **line}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        cut = self._file.exists() and self._file.read_bytes()[-1:] not in (b"", b"\n")
        with self._file.open("a") as out:
            out.write(("\n" if cut else "") + json.dumps(self.lines[key], ensure_ascii=False))
            out.write("\n")


def _whole_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the process ended during the write
            continue


class Runner:
    """Runs cells in a separate deployment.

    Args:
        home: the folder of the deployment, which keeps finished steps.
        results: the file of the results.
        quick: use settings that take minutes instead of hours.
    """

    def __init__(self, home: Path, results: Results, *, quick: bool = False) -> None:
        places = {"CONFIDE_HOME": str(home.resolve()), "CONFIDE_TRACKING": _NO_TRACKER}
        self._deployment = Deployment.from_environment(places)
        self._deployment.prepare()
        self._results, self._quick = results, quick

    def run(self, cell: Cell) -> None:
        """Run the reference of a cell, then the cell, unless they are finished."""
        if cell.reference not in self._results:
            self._results.add(cell.reference, self._reference(cell))
        if cell.key not in self._results:
            self._results.add(cell.key, self._cell(cell))

    def settings(self, cell: Cell) -> JobSettings:
        """Return a cell's settings, calibrated to its ε; the total δ is that in the settings."""
        settings = JobSettings.model_validate(cell.settings(quick=self._quick))
        budget = PrivacyBudget(cell.epsilon, RunReleases.of(settings).delta)
        settings = _affordable(settings, cell.epsilon)
        if RECIPES[cell.recipe].advised:
            return advised(settings, budget).settings
        return calibrated(settings, budget)

    def _reference(self, cell: Cell) -> dict[str, Any]:
        settings = JobSettings.model_validate(cell.settings(reference=True, quick=self._quick))
        started = time.monotonic()
        steps = self._steps(settings)
        models = self._measured(cell.reference, steps, ("public", "nonprivate"))
        return {
            "corpus": cell.corpus,
            "units": cell.units,
            "seed": cell.seed,
            **models,
            "seconds": round(time.monotonic() - started, 1),
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        settings = self.settings(cell)
        started = time.monotonic()
        steps = self._steps(settings)
        between = ("phrases",) if settings.phrases_epsilon else ()
        models = self._measured(cell.key, steps, ("dp", *between))
        spending = RunReleases.of(settings)
        return {
            "corpus": cell.corpus,
            "units": cell.units,
            "seed": cell.seed,
            "epsilon": cell.epsilon,
            "recipe": cell.recipe,
            "reference": cell.reference,
            "epsilon_spent": spending.epsilon,
            "delta": spending.delta,
            "figure": spending.figure,
            "batch_size": settings.batch_size,
            "updates": settings.updates,
            "noise_multiplier": settings.noise_multiplier,
            "vocabulary_epsilon": settings.vocabulary_epsilon,
            **models,
            "seconds": round(time.monotonic() - started, 1),
        }

    def _steps(self, settings: JobSettings) -> dict[str, StepSpec]:
        """Return the job's steps, after declaring its sources and data set public."""
        steps = job_steps(settings)
        ledger = Ledger.open(self._deployment.ledger)
        if settings.private_format != "synthetic":
            if settings.private_dataset not in ledger.datasets():
                ledger.register_made_up(settings.private_dataset)
            for source in steps["budget"].called_public:  # type: ignore[attr-defined]
                declare_public(source.uri, self._deployment, known_private=False)
        return steps

    def _measured(
        self, run: str, steps: Mapping[str, StepSpec], models: tuple[Mode, ...]
    ) -> dict[str, Any]:
        """Run the steps of the models; return their metrics and the digest of their vocabulary."""
        wanted = {(OF_JOB[mode], task) for mode in models for task in ("pretraining", "finetuning")}
        named = {point_and_task(name): spec for name, spec in steps.items()}
        results = {
            names: self._step(run, names[1], spec)
            for names, spec in named.items()
            if names in wanted or names[1] not in (*POINT_STEPS, "report")
        }
        figures = {
            mode: {
                metric.name: metric.value
                for (model, _), result in results.items()
                if model == OF_JOB[mode]
                for metric in result.metrics
                if metric.name in MEASURED
            }
            for mode in models
        }
        return {"vocabulary": results["", "vocabulary"].facts["digest"], **figures}

    def _step(self, run: str, task: str, spec: StepSpec) -> StepResult:
        context = RunContext(run_key=run, run_name=run, task=task)
        return run_step(spec, self._deployment, context)


def _affordable(settings: JobSettings, epsilon: float) -> JobSettings:
    """Return the settings with a vocabulary that takes a third of ε at most."""
    if settings.vocabulary_epsilon <= epsilon / 1.5:
        return settings
    return settings.model_copy(update={"vocabulary_epsilon": round(epsilon / 3, 3)})
