"""The settings of a sweep: a job, and a grid over three of its settings."""

from __future__ import annotations

import itertools
import math
from typing import Literal, Self

from pydantic import ValidationError, field_validator, model_validator

from dp_core.config.fields import (
    GRID,
    NUMBERS,
    WHOLE_NUMBERS,
    Config,
    numbers,
    one_line,
    setting,
)
from dp_core.config.privacy import SelectionConfig
from dp_core.config.training import is_causal
from tasks.protocol.settings import JobSettings

MOST_POINTS = 1024  # Airflow expands one task into no more (core.max_map_length)


class SweepPoint(Config):
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
_AXES = {  # setting of a job -> where the sweep takes it from
    "noise_multiplier": "sweep_noise_multipliers",
    "batch_size": "sweep_batch_sizes",
    "epochs": "sweep_epochs",
}


class SweepSettings(SelectionConfig, JobSettings):
    """Everything `dp_sweep` can be told: a job, and a grid over three of its settings."""

    sweep_noise_multipliers: str = setting(
        "0.6,1.0,2.0",
        GRID,
        "Noise multipliers σ",
        "The grid's noise multipliers of DP pre-training, with commas between them.",
        pattern=NUMBERS,
    )
    sweep_batch_sizes: str = setting(
        "128,256",
        GRID,
        "Batch sizes",
        "The grid's expected units per DP update, with commas between them.",
        pattern=WHOLE_NUMBERS,
    )
    sweep_epochs: str = setting(
        "5,10",
        GRID,
        "Epochs",
        "The grid's passes over the declared units, with commas between them.",
        pattern=NUMBERS,
    )
    selection: Literal["publish-all", "random-count"] = setting(
        "publish-all",
        GRID,
        "Release",
        "publish-all: every point is trained, charged and shown. random-count: a secret random "
        "number of points is drawn and trained, only the best by accuracy on public text leaves, "
        "at two to three times the ε of one (Papernot and Steinke 2022).",
    )

    def grid(self) -> list[SweepPoint]:
        """Return the points that are declared, in reading order."""
        grid = itertools.product(
            numbers(self.sweep_noise_multipliers),
            (int(x) for x in self.sweep_batch_sizes.split(",")),
            numbers(self.sweep_epochs),
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
        return self.part(JobSettings, **point.model_dump(), audit_canaries=0)

    def _refuse_a_grid_without_end(self) -> None:
        """Refuse more points than one run may hold, before any of them is looked at."""
        axes = [str(getattr(self, field)).count(",") + 1 for field in _AXES.values()]
        if (points := math.prod(axes)) > MOST_POINTS:
            raise ValueError(
                f"{', '.join(_AXES.values())}: {' × '.join(map(str, axes))} = {points} points, but "
                f"a sweep has at most {MOST_POINTS}"
            )

    @field_validator("sweep_noise_multipliers", "sweep_epochs")
    @classmethod
    def _are_numbers(cls, value: str) -> str:
        numbers(value)
        return value

    @model_validator(mode="after")
    def _every_point_is_a_job(self) -> Self:
        if is_causal(self.model_kind):
            raise ValueError(
                "model_kind: a sweep compares entity F1, which a causal model does not have; "
                f"train {self.model_kind} by dp_bert"
            )
        self._refuse_a_grid_without_end()
        for point in self.grid():
            try:
                self.job(point)
            except ValidationError as error:
                raise ValueError(_reason(error, point)) from None
        self.refuse_large_deltas(len(self.points()))
        if self.selection == "random-count" and self.sampling == "truncated-poisson":
            raise ValueError("selection: no Rényi bound of truncated-poisson sampling is known")
        if self.selection == "random-count" and self.time_box_minutes:
            raise ValueError(
                "time_box_minutes: must be 0 with selection=random-count, for each restart would "
                "tell how many trainings there are"
            )
        return self


def _reason(error: ValidationError, point: SweepPoint) -> str:
    """Say what is wrong with a point by the names that the sweep has for it."""
    item = error.errors(include_url=False, include_input=False)[0]
    axis = str(item["loc"][0]) if item["loc"] else ""
    if axis not in _AXES:
        return f"at the point {point.name}: {one_line(error)}"
    return f"{_AXES[axis]}: {item['msg'].replace('Input', f'{getattr(point, axis):g}', 1)}"
