"""The settings of a sweep: a job, and a grid over three of its settings."""

from __future__ import annotations

import itertools
from typing import Literal, Self

from pydantic import model_validator

from tasks.specs.base import Frozen
from tasks.specs.fields import setting
from tasks.specs.settings import JobSettings
from tasks.specs.steps import CAUSAL

GRID = "0. Grid"


class SweepPoint(Frozen):
    """One point of the grid; all zero: the best of a random number of points."""

    noise_multiplier: float
    batch_size: int
    epochs: float

    @property
    def name(self) -> str:
        """What people see: the mapped task and the child run carry this name."""
        if self == CHOSEN:
            return "the best of a random number"
        return f"σ={self.noise_multiplier:g} · B={self.batch_size} · epochs={self.epochs:g}"


CHOSEN = SweepPoint(noise_multiplier=0, batch_size=0, epochs=0)


class SweepSettings(JobSettings):
    """Everything `dp_sweep` can be told: a job, and a grid over three of its settings."""

    sweep_noise_multipliers: str = setting(
        "0.6,1.0,2.0",
        GRID,
        "Noise multipliers σ",
        "Comma-separated.",
        pattern=r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$",
    )
    sweep_batch_sizes: str = setting(
        "128,256", GRID, "Batch sizes", "Comma-separated.", pattern=r"^[0-9]+(,[0-9]+)*$"
    )
    sweep_epochs: str = setting(
        "5,10", GRID, "Epochs", "Comma-separated.", pattern=r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$"
    )
    selection: Literal["publish-all", "random-count"] = setting(
        "publish-all",
        GRID,
        "Release",
        "publish-all: every point is trained, charged and shown. random-count: a secret random "
        "number of points is drawn and trained, only the best by accuracy on public text leaves, "
        "at two to three times the ε of one (Papernot and Steinke 2022).",
    )
    selection_law: Literal["geometric", "logarithmic", "poisson"] = setting(
        "geometric", GRID, "Random count: law", "Of the number of trainings; poisson may be 0."
    )
    selection_mean: float = setting(
        6.0, GRID, "Random count: mean", "Expected number of trainings.", gt=1, le=10_000
    )

    def grid(self) -> list[SweepPoint]:
        """Return the points that are declared, in reading order."""
        grid = itertools.product(
            (float(x) for x in self.sweep_noise_multipliers.split(",")),
            (int(x) for x in self.sweep_batch_sizes.split(",")),
            (float(x) for x in self.sweep_epochs.split(",")),
        )
        return [
            SweepPoint(noise_multiplier=s, batch_size=b, epochs=e)
            for s, b, e in dict.fromkeys(grid)
        ]

    def points(self) -> list[SweepPoint]:
        """Return what is released: every point of the grid, or the best of a random number."""
        return self.grid() if self.selection == "publish-all" else [CHOSEN]

    def job(self, point: SweepPoint) -> JobSettings:
        """Return the settings of the job at one point of the grid."""
        own = {k: v for k, v in self.model_dump().items() if k in JobSettings.model_fields}
        return JobSettings.model_validate(own | point.model_dump())

    @model_validator(mode="after")
    def _every_point_is_a_job(self) -> Self:
        if self.model_kind == CAUSAL:
            raise ValueError(
                "model_kind: a sweep compares entity F1, which a causal model does not have; "
                "train gpt2 by dp_bert"
            )
        for point in self.grid():
            self.job(point)
        if self.selection == "random-count" and self.sampling == "truncated-poisson":
            raise ValueError("selection: no Rényi bound of truncated-poisson sampling is known")
        return self
