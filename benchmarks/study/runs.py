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
INFINITE = 1e300  # numbers from here on represent ∞, which MLflow stores as the largest float
_FOLD = re.compile(r" · fold=\d+$")  # suffix of the name of a sweep's point


@dataclass
class ModelFigures:
    """The metrics of one model of one run in MLflow.

    Attributes:
        model: its name in MLflow.
        metrics: the last value of each metric of the model's run and of its steps' runs.
    """

    model: str
    metrics: dict[str, float] = field(default_factory=dict)


class Study:
    """The runs of the study, in a separate deployment.

    Args:
        home: the folder of the deployment, where finished runs are kept.
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
        """Return the settings and the MLflow key of a successful run."""
        return self._done.lines.get(key)

    def is_current(self, experiment: Experiment, variant: str, seed: int) -> bool:
        """Return whether a run with today's settings of the experiment was successful."""
        run = self.done(self.key(experiment, variant, seed))
        return run is not None and run["settings"] == experiment.of(variant, seed)

    def run(self, experiment: Experiment, variant: str, seed: int) -> None:
        """Run one job to its end, and store its key.

        Raises:
            subprocess.CalledProcessError: the job failed; its output was printed.
        """
        settings = experiment.of(variant, seed)
        self._declare_public(settings)
        started = time.monotonic()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as settings_file:
            json.dump(settings, settings_file)
            settings_file.flush()
            out = self._confide("run", experiment.job, "--settings", settings_file.name, "--json")
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

    def _declare_public(self, settings: dict[str, Any]) -> None:
        """Declare the sources of the study public; all of them are public text."""
        files = [
            str(v)
            for k, v in settings.items()
            if k.endswith(("_path", "_train", "_test", "_model"))
        ]
        if settings.get("private_path"):
            self._confide("ledger", "register", settings["private_dataset"], "--public")
        if any(files):
            self._confide("ledger", "declare-public", *filter(None, files))

    def figures(self, key: str) -> list[ModelFigures]:
        """Return the metrics of a finished run by model, averaged over the folds of a sweep."""
        from mlflow.tracking import MlflowClient  # noqa: TID251

        client = MlflowClient(tracking_uri=self.deployment.tracking)
        line = self._done.lines[key]
        by_model: dict[str, ModelFigures] = {}
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(
            experiments,
            f"tags.`confide.run_key` = '{line['run_key']}'",
            order_by=["attributes.start_time ASC"],
        )
        for run in runs:
            model = run.data.tags.get("confide.model")
            if model is None:
                continue
            model_figures = by_model.setdefault(model, ModelFigures(model))
            # The model's run has the total cost of the model, and a step's run the cost of the
            # step.
            metrics = run.data.metrics
            of_model = "confide.step" not in run.data.tags
            model_figures.metrics.update(
                metrics
                if of_model
                else {k: v for k, v in metrics.items() if k not in model_figures.metrics}
            )
            for name, value in run.data.params.items():
                if name.endswith(".noise_multiplier"):
                    model_figures.metrics.setdefault("noise_multiplier", float(value))
        return over_folds(by_model.values())


def _mean(values: list[float]) -> float:
    """Return the mean; an infinite mean is the largest number, as in MLflow."""
    return max(values) if max(values) >= INFINITE else statistics.fmean(values)


def over_folds(models: Iterable[ModelFigures]) -> list[ModelFigures]:
    """Return a sweep's models without folds: the mean of each metric over its folds."""
    of_setting: dict[str, list[ModelFigures]] = {}
    for fold in models:
        of_setting.setdefault(_FOLD.sub("", fold.model), []).append(fold)
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
