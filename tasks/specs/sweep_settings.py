"""The settings of a sweep: a job, and a grid over three of its settings."""

from __future__ import annotations

import itertools

from pydantic import model_validator

from tasks.specs.base import Frozen
from tasks.specs.fields import setting
from tasks.specs.settings import JobSettings


class SweepPoint(Frozen):
    """One point of the grid."""

    noise_multiplier: float
    batch_size: int
    epochs: float

    @property
    def name(self) -> str:
        """What people see: the mapped task and the child run carry this name."""
        return f"σ={self.noise_multiplier:g} · B={self.batch_size} · epochs={self.epochs:g}"


class SweepSettings(JobSettings):
    """Everything `dp_sweep` can be told: a job, and a grid over three of its settings."""

    sweep_noise_multipliers: str = setting(
        "0.6,1.0,2.0",
        "0. Grid",
        "Noise multipliers σ",
        "Comma-separated.",
        pattern=r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$",
    )
    sweep_batch_sizes: str = setting(
        "128,256", "0. Grid", "Batch sizes", "Comma-separated.", pattern=r"^[0-9]+(,[0-9]+)*$"
    )
    sweep_epochs: str = setting(
        "5,10", "0. Grid", "Epochs", "Comma-separated.", pattern=r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$"
    )

    def points(self) -> list[SweepPoint]:
        """Return the grid, in reading order; each point is a release of its own."""
        grid = itertools.product(
            (float(x) for x in self.sweep_noise_multipliers.split(",")),
            (int(x) for x in self.sweep_batch_sizes.split(",")),
            (float(x) for x in self.sweep_epochs.split(",")),
        )
        return [
            SweepPoint(noise_multiplier=s, batch_size=b, epochs=e)
            for s, b, e in dict.fromkeys(grid)
        ]

    def job(self, point: SweepPoint) -> JobSettings:
        """Return the settings of the job at one point."""
        own = {k: v for k, v in self.model_dump().items() if k in JobSettings.model_fields}
        return JobSettings.model_validate(own | point.model_dump())

    @model_validator(mode="after")
    def _every_point_is_a_job(self) -> SweepSettings:
        for point in self.points():
            self.job(point)
        return self
