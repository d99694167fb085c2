"""Runs the study's jobs by the command line, and reads their figures from MLflow."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.study.experiments import Experiment
from benchmarks.utility.runs import Results
from tasks.runtime.deployment import Deployment

ROOT = Path(__file__).resolve().parents[2]
INFINITE = 1e300  # from here on a number stands for ∞: MLflow has the largest float for it
_FOLD = re.compile(r" · fold=\d+$")  # behind the name of a sweep's point


@dataclass
class ModelFigures:
    """What MLflow has of one model of one run.

    Attributes:
        model: its name there.
        metrics: the last value of each metric of the model's run and of its steps' runs.
    """

    model: str
    metrics: dict[str, float] = field(default_factory=dict)


class Study:
    """The study's runs, in a deployment of its own.

    Args:
        home: its folder; what is done stays there, and is not done again.
    """

    def __init__(self, home: Path) -> None:
        self._home = home.resolve()
        self._done = Results(self._home / "study.jsonl")
        self._environment = {**os.environ, "CONFIDE_HOME": str(self._home)}
        self.deployment = Deployment.from_environment({"CONFIDE_HOME": str(self._home)})

    @staticmethod
    def key(experiment: Experiment, variant: str, seed: int) -> str:
        """Return the name of one run."""
        return "/".join(filter(None, (experiment.name, variant, str(seed))))

    def done(self, key: str) -> dict[str, Any] | None:
        """Return what is kept of a run that ended well: its settings and its key in MLflow."""
        return self._done.lines.get(key)

    def run(self, experiment: Experiment, variant: str, seed: int) -> None:
        """Run one job to its end, and keep its key.

        Raises:
            subprocess.CalledProcessError: it failed; what it said stands above.
        """
        settings = experiment.of(variant, seed)
        self._may_be_read(settings)
        started = time.monotonic()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as told:
            json.dump(settings, told)
            told.flush()
            out = self._confide("run", experiment.job, "--settings", told.name, "--json")
        self._done.add(
            self.key(experiment, variant, seed),
            {
                "settings": settings,
                "run_key": json.loads(out)["run_key"],
                "seconds": round(time.monotonic() - started, 1),
            },
        )

    def _confide(self, *arguments: str) -> str:
        command = [str(ROOT / "confide"), *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, stdout=subprocess.PIPE, check=True, text=True
        )
        return done.stdout

    def _may_be_read(self, settings: dict[str, Any]) -> None:
        """Declare public what the study reads, all of which is."""
        files = [str(v) for k, v in settings.items() if k.endswith(("_path", "_train", "_test"))]
        if settings.get("private_path"):
            self._confide("ledger", "register", settings["private_dataset"], "--public")
        if any(files):
            self._confide("ledger", "declare-public", *filter(None, files))

    def figures(self, key: str) -> list[ModelFigures]:
        """Return what MLflow has of a finished run, model by model; of a sweep, over its folds."""
        from mlflow.tracking import MlflowClient  # noqa: TID251

        client = MlflowClient(tracking_uri=self.deployment.tracking)
        line = self._done.lines[key]
        found: dict[str, ModelFigures] = {}
        experiments = [one.experiment_id for one in client.search_experiments()]
        runs = client.search_runs(
            experiments,
            f"tags.`confide.run_key` = '{line['run_key']}'",
            order_by=["attributes.start_time ASC"],
        )
        for run in runs:
            model = run.data.tags.get("confide.model")
            if model is None:
                continue
            own = found.setdefault(model, ModelFigures(model))
            # The model's own run says what everything of it has cost; a step's what that step has.
            told = run.data.metrics
            of_model = "confide.step" not in run.data.tags
            own.metrics.update(
                told if of_model else {k: v for k, v in told.items() if k not in own.metrics}
            )
            for name, value in run.data.params.items():
                if name.endswith(".noise_multiplier"):
                    own.metrics.setdefault("noise_multiplier", float(value))
        return over_folds(found.values())


def _mean(values: list[float]) -> float:
    """Return the mean; an infinite one is the largest number, as in MLflow."""
    return max(values) if max(values) >= INFINITE else statistics.fmean(values)


def over_folds(models: Iterable[ModelFigures]) -> list[ModelFigures]:
    """Return a sweep's models without their folds: each metric's mean over those that have it."""
    of_setting: dict[str, list[ModelFigures]] = {}
    for one in models:
        of_setting.setdefault(_FOLD.sub("", one.model), []).append(one)
    return [
        ModelFigures(
            name,
            {
                metric: _mean([f.metrics[metric] for f in folds if metric in f.metrics])
                for metric in dict.fromkeys(metric for f in folds for metric in f.metrics)
            },
        )
        for name, folds in of_setting.items()
    ]
