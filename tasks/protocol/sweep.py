"""The settings of a sweep: a job, and points that vary its pre-training and fine-tuning."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import ValidationError, field_validator, model_validator

from dp_core.config.fields import (
    GRID,
    NUMBERS,
    NUMBERS_OR_NONE,
    POINTS_OR_NONE,
    WHOLE_NUMBERS,
    WHOLE_NUMBERS_OR_NONE,
    WORDS_OR_NONE,
    listed_points,
    numbers,
    one_line,
    setting,
    split_list,
)
from dp_core.config.privacy import SelectionConfig
from dp_core.config.training import is_causal
from tasks.protocol.points import (
    AXES,
    FINETUNING_AXES,
    NO_TRAINING,
    REPLICATES,
    TRAINING_AXES,
    Baseline,
    Point,
    unique,
)
from tasks.protocol.settings import PAGE, JobSettings

MOST_POINTS = 64 * PAGE
SEARCHED = {  # settings that an optimiser varies between the ends of their lists, and the scale
    "noise_multiplier": "number",
    "epochs": "number",
    "finetune_epochs": "whole",
    "finetune_batch_size": "whole",
    "finetune_learning_rate": "logarithm",
}
# Baselines that sweep_baselines can name.
_NAMED = tuple(name for name in get_args(Baseline) if name not in ("phrases", "checkpoint"))


class SweepSettings(SelectionConfig, JobSettings, section=GRID):
    """All settings of `dp_sweep`: a job, and points that vary its settings.

    Attributes:
        sweep_noise_multipliers: The grid's noise multipliers of DP pre-training, with commas
            between them.
        sweep_batch_sizes: The grid's expected units per DP update, with commas between them.
        sweep_epochs: The grid's passes over the declared units, with commas between them.
        sweep_epochs_from: trainings: each number of epochs is a separate training, which is
            charged. checkpoints: points that differ only in epochs share one training, which keeps
            its model after each of them. All these models have the ε and the learning rates of the
            whole training.
        sweep_noise_scaling: none: every σ with every batch size. sqrt-batch: the listed σ belong to
            the first batch size (with sweep_points to batch_size), and σ grows with the root of the
            batch size, which keeps ε about equal (Hoory et al. 2021, section 3.3).
        sweep_finetune_noise_multipliers: The grid's σ of private fine-tuning, with commas between
            them; empty: the job's.
        sweep_finetune_batch_sizes: The grid's batch sizes of fine-tuning, with commas between them;
            empty: the job's.
        sweep_finetune_epochs: The grid's epochs of fine-tuning, with commas between them; empty:
            the job's.
        sweep_finetune_learning_rates: The grid's peak learning rates of fine-tuning, likewise;
            empty: the job's.
        sweep_points: Points that replace all lists above, with semicolons between them, each
            setting=value,setting=value over noise_multiplier, batch_size, epochs,
            finetune_noise_multiplier, finetune_batch_size, finetune_epochs and
            finetune_learning_rate. Other settings have the job's values.
        sweep_seeds: Number of private trainings of each point, from the job's public seed. Each is
            charged.
        sweep_finetune_seeds: Fine-tunings of each model, from the job's public seed on. Private
            ones are charged.
        sweep_baselines: Models to compare with, comma-separated, with the same settings, seeds and
            folds. public: of public text, with a vocabulary of public text (ε 0). nonprivate: of
            private rows without privacy, with a vocabulary of exact private counts.
            public-training, nonprivate-training: likewise, with the sweep's vocabulary. Models
            without privacy are for the operator only.
        sweep_checkpoints: Folders (local or gs://) of public models in Hugging Face's layout,
            comma-separated. Each is compared as it is, with its own tokens (ε 0), and must be
            declared public. Causal models cannot be: their perplexity depends on the tokens.
        sweep_search: grid: all points. optuna: one point after the other, from the command line
            only. Optuna chooses noise, epochs and fine-tuning between the ends of the lists, by the
            F1 of earlier points. Each training is charged as the costliest of that space.
        sweep_trials: Largest number of points that Optuna chooses. As many releases are registered
            in advance, or one if the points differ only in fine-tuning.
        selection: publish-all: every point is trained, charged and shown. random-count: a secret
            random number of points is drawn and trained, and only the best by accuracy on public
            text is released, at two to three times the ε of one training (Papernot and Steinke
            2022).
    """

    starts: ClassVar[Mapping[str, Point]] = {
        name: point.model_copy(update=NO_TRAINING) for name, point in JobSettings.starts.items()
    }
    audited: ClassVar[bool] = False

    sweep_noise_multipliers: str = setting("0.6,1.0,2.0", "Noise multipliers σ", pattern=NUMBERS)
    sweep_batch_sizes: str = setting("128,256", "Batch sizes", pattern=WHOLE_NUMBERS)
    sweep_epochs: str = setting("5,10", "Epochs", pattern=NUMBERS)
    sweep_epochs_from: Literal["trainings", "checkpoints"] = setting("trainings", "Epochs from")
    sweep_noise_scaling: Literal["none", "sqrt-batch"] = setting(
        "none", "Noise with the batch size"
    )
    sweep_finetune_noise_multipliers: str = setting(
        "", "Fine-tuning: noise multipliers σ", pattern=NUMBERS_OR_NONE
    )
    sweep_finetune_batch_sizes: str = setting(
        "", "Fine-tuning: batch sizes", pattern=WHOLE_NUMBERS_OR_NONE
    )
    sweep_finetune_epochs: str = setting("", "Fine-tuning: epochs", pattern=WHOLE_NUMBERS_OR_NONE)
    sweep_finetune_learning_rates: str = setting(
        "", "Fine-tuning: learning rates", pattern=NUMBERS_OR_NONE
    )
    sweep_points: str = setting("", "Listed points", pattern=POINTS_OR_NONE)
    sweep_seeds: int = setting(1, "Seeds of private training", ge=1, le=100)
    sweep_finetune_seeds: int = setting(1, "Seeds of fine-tuning", ge=1, le=100)
    sweep_baselines: str = setting("", "Compare with", pattern=WORDS_OR_NONE)
    sweep_checkpoints: str = setting("", "Compare with checkpoints", path=True, several=True)
    sweep_search: Literal["grid", "optuna"] = setting("grid", "Search")
    sweep_trials: int = setting(10, "Search: points", ge=1, le=1024)
    selection: Literal["publish-all", "random-count"] = setting("publish-all", "Release")

    def grid(self) -> list[Point]:
        """Return the declared points in reading order, without seeds and folds."""
        if self.sweep_points:
            first: int | None = self.batch_size
            points = [self._listed(point) for point in self.sweep_points.split(";")]
        else:
            axes = {name: self._values(name) for name in AXES}
            points = [
                Point.model_validate(dict(zip(axes, values, strict=True)))
                for values in itertools.product(*axes.values())
            ]
            first = points[0].batch_size
        return self._sharing_trainings(unique(self._scaled(point, first or 1) for point in points))

    def _scaled(self, point: Point, first: int) -> Point:
        """Return a point whose σ grows with the root of its batch size, if noise is scaled."""
        if self.sweep_noise_scaling == "none":
            return point
        sigma = (point.noise_multiplier or 0.0) * math.sqrt((point.batch_size or 0) / first)
        return point.model_copy(update={"noise_multiplier": sigma})

    def _sharing_trainings(self, points: list[Point]) -> list[Point]:
        """Return the points, which share one training if epochs are taken from checkpoints.

        Such points differ in epochs and in fine-tuning. Their training runs for the most epochs.
        """
        if self.sweep_epochs_from == "trainings":
            return points
        epochs: dict[tuple[float | None, int | None], set[float]] = {}
        for p in points:
            epochs.setdefault((p.noise_multiplier, p.batch_size), set()).add(p.epochs or 0)
        left = {key: tuple(sorted(of_key)) for key, of_key in epochs.items() if len(of_key) > 1}
        return [
            p.model_copy(update={"of_epochs": left.get((p.noise_multiplier, p.batch_size), ())})
            for p in points
        ]

    @property
    def is_asked(self) -> bool:
        """Whether an optimiser chooses the points."""
        return self.sweep_search == "optuna"

    def space(self) -> dict[str, tuple[float, float]]:
        """Return the bounds of each setting that an optimiser varies."""
        listed = {name: [x for x in self._values(name) if x is not None] for name in SEARCHED}
        return {name: (min(ends), max(ends)) for name, ends in listed.items() if len(ends) > 1}

    @property
    def search(self) -> str:
        """A hash that identifies the search.

        It omits the number of points, because a longer search begins with the same points.
        """
        settings = self.model_dump_json(exclude={"sweep_trials"}, exclude_none=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:16]

    def asked_point(self, values: Mapping[str, float]) -> Point:
        """Return an optimiser's point, rounded to four significant digits and clipped to bounds."""
        given: dict[str, Any] = {name: (self._values(name) or [None])[0] for name in AXES}
        for name, (low, high) in self.space().items():
            given[name] = min(max(float(f"{values[name]:.4g}"), low), high)
        return Point.model_validate(given)

    @property
    def costliest(self) -> Point:
        """The private training with least noise and most updates that an optimiser may choose."""
        space, dearest = self.space(), {"noise_multiplier": 0, "epochs": 1}  # index of the bound
        ends = {name: space[name][end] for name, end in dearest.items() if name in space}
        return self.grid()[0].training.model_copy(update=ends)

    @property
    def most_trainings(self) -> int:
        """Largest number of private trainings of a search; points of fine-tuning share one."""
        return self.sweep_trials if self.space().keys() & TRAINING_AXES.keys() else 1

    def candidates(self) -> list[Point]:
        """Return the declared private trainings, without seeds."""
        return unique(point.training for point in self.grid())

    def points(self) -> list[Point]:
        """Return one point per grid point (or the best of a random number), seed and fold.

        Baselines follow. If a baseline trains on private rows, it has the grid's seeds, and its
        epochs unless `nonprivate_epochs` is given. Public models are trained once.
        """
        grid = settings = self.grid()
        if self.selection == "random-count":
            settings = unique(point.model_copy(update=NO_TRAINING) for point in grid)
        if self.is_asked:  # any point has the common settings
            return settings[:1]
        seeds = self._seeds(self.sweep_seeds)
        points = self._replicated(settings, seeds)
        for baseline in self._baselines():
            trained = baseline.mode == "nonprivate"
            changes = self.nonprivate_changes if trained else {}
            compared = unique(
                point.compared_with(baseline).model_copy(update=changes) for point in grid
            )
            points += self._replicated(compared, seeds if trained else [None])
        return points

    def _baselines(self) -> list[Point]:
        """Return the baselines, without a training and a fine-tuning."""
        listed = split_list(self.sweep_baselines)
        models = [{"baseline": name} for name in _NAMED if name in listed]
        folders = split_list(self.sweep_checkpoints)
        models += [{"baseline": "checkpoint", "checkpoint": folder} for folder in folders]
        return [Point.model_validate(NO_TRAINING | model) for model in models]

    def _replicated(self, settings: Sequence[Point], seeds: Sequence[int | None]) -> list[Point]:
        tunings = self._seeds(self.sweep_finetune_seeds)
        folds = range(self.entities_folds) if self.entities_folds else [None]
        return [
            point.model_copy(update=dict(zip(REPLICATES, replicate, strict=True)))
            for point, *replicate in itertools.product(settings, seeds, tunings, folds)
        ]

    def job(self, point: Point, **settings: Any) -> JobSettings:
        """Return the job's settings at one point, without seeds and fold."""
        training = self.candidates()[0].model_dump(include=set(TRAINING_AXES))
        return super().job(point, **training, audit_canaries=0, membership_units=0, **settings)

    def _values(self, name: str) -> Sequence[float | None]:
        """Return the grid's values of a setting, or None for the job's value."""
        listed = str(getattr(self, AXES[name]))
        return numbers(listed) if listed else [None]

    def _listed(self, point: str) -> Point:
        """Return a point of `sweep_points`.

        Raises:
            ValueError: the point has an unknown or repeated setting, or a value that is no number.
        """
        (changes,) = listed_points(point, AXES, "sweep_points")
        try:
            return Point.model_validate(self.model_dump(include=set(TRAINING_AXES)) | changes)
        except ValidationError as error:
            raise ValueError(f"sweep_points: {one_line(error)}") from None

    def _seeds(self, count: int) -> Sequence[int | None]:
        return [None] if count == 1 else [self.seed + i for i in range(count)]

    def _refuse_a_grid_without_end(self) -> None:
        """Refuse more points than a sweep may have, before any of them is computed."""
        axes = {field: str(getattr(self, field)).count(",") + 1 for field in AXES.values()}
        if self.sweep_points:
            axes = {"sweep_points": self.sweep_points.count(";") + 1}
        replicates = ("sweep_seeds", "sweep_finetune_seeds", "entities_folds")
        axes |= {field: max(1, getattr(self, field)) for field in replicates}
        axes = {field: n for field, n in axes.items() if n > 1 or field in TRAINING_AXES.values()}
        if (points := math.prod(axes.values())) > MOST_POINTS:
            raise ValueError(
                f"{', '.join(axes)}: {' × '.join(map(str, axes.values()))} = {points} points, but "
                f"a sweep has at most {MOST_POINTS}"
            )

    @field_validator(
        "sweep_noise_multipliers",
        "sweep_epochs",
        "sweep_finetune_noise_multipliers",
        "sweep_finetune_learning_rates",
    )
    @classmethod
    def _are_numbers(cls, value: str) -> str:
        if value:
            numbers(value)
        return value

    @model_validator(mode="after")
    def _every_point_is_a_job(self) -> Self:
        if self.more_trainings:
            raise ValueError("more_trainings: a sweep lists its points in sweep_points")
        if self.target_epsilon is not None:
            raise ValueError("target_epsilon: a sweep varies σ, and so ε: empty it")
        if self.phrases_epsilon and self.private_start == "fresh":
            raise ValueError(
                "phrases_epsilon: no training of a sweep begins with the phrases where "
                "private_start is fresh, and they are charged all the same: set it to 0"
            )
        self._refuse_a_grid_without_end()
        if not self.fine_tunes:
            self._refuse_what_needs_labels()
        for point in self.grid():
            try:
                self.job(point)
            except ValidationError as error:
                raise ValueError(self._reason(error, point)) from None
            if point.finetune_noise_multiplier is not None and self.finetune_privacy == "none":
                raise ValueError("finetune_noise_multiplier: fine-tuning is not private here")
        last = self.seed + max(self.sweep_seeds, self.sweep_finetune_seeds) - 1
        self.part(JobSettings, seed=last)  # refuse too large seeds
        self._refuse_wrong_baselines()
        points = self.points()
        for name, times in Counter(point.name for point in points).items():
            if times > 1:  # results go by names
                raise ValueError(f"two points differ by too little to be told apart: {name}")
        if len(points) > MOST_POINTS:
            raise ValueError(f"sweep_baselines: {len(points)} points, but at most {MOST_POINTS}")
        if self.is_asked:
            self._refuse_to_ask()
        if self.selection == "random-count" and self.sweep_epochs_from == "checkpoints":
            raise ValueError("sweep_epochs_from: of a selection the best model alone is released")
        if self.selection == "random-count" and self.sampling == "truncated-poisson":
            raise ValueError("selection: no Rényi bound of truncated-poisson sampling is known")
        if self.selection == "random-count" and self.private_start == "fresh":
            raise ValueError("private_start: a selection trains its candidates from a public model")
        if self.selection == "random-count" and not self.holdout:
            raise ValueError("holdout: a selection compares models by public text that is held out")
        if self.selection == "random-count" and self.time_box_minutes:
            raise ValueError(
                "time_box_minutes: must be 0 with selection=random-count, for each restart would "
                "tell how many trainings there are"
            )
        return self

    def _refuse_what_needs_labels(self) -> None:
        """Refuse axes of fine-tuning, and settings that need F1 or accuracy, without labels."""
        causal = is_causal(self.model_kind)
        measure = "perplexity" if causal else "accuracy of masked tokens"
        varied = [
            "sweep_points" if self.sweep_points else field
            for axis, field in FINETUNING_AXES.items()
            if any(getattr(point, axis) is not None for point in self.grid())
        ]
        varied += ["sweep_finetune_seeds"] if self.sweep_finetune_seeds > 1 else []
        varied += ["entities_folds"] if self.entities_folds else []
        if varied:
            reason = "a causal model is not fine-tuned" if causal else "no labelled text is read"
            raise ValueError(
                f"{', '.join(dict.fromkeys(varied))}: {reason}, so fine-tuning cannot vary"
            )
        if not self.holdout:
            raise ValueError(
                f"holdout: without fine-tuning, models are compared by the {measure} of text that "
                "is held out: give a share above 0"
            )
        if causal and self.selection == "random-count":
            raise ValueError(
                "selection: random-count chooses by accuracy under masks, which a causal model "
                "does not have: choose publish-all"
            )
        if self.sweep_epochs_from == "checkpoints":
            raise ValueError(
                f"sweep_epochs_from: without fine-tuning, models are compared by {measure}, which "
                "only the last model of a training has: choose trainings"
            )
        if self.is_asked:
            raise ValueError(
                f"sweep_search: without fine-tuning, models are compared by the {measure} of "
                "private text, which only the operator may see: choose grid"
            )
        if self.sweep_checkpoints:
            raise ValueError(
                f"sweep_checkpoints: without fine-tuning, models are compared by {measure}, which "
                "depends on a model's tokens: start the sweep from the checkpoint, by public_model "
                "and vocabulary_source=checkpoint"
            )

    def _refuse_wrong_baselines(self) -> None:
        """Refuse baselines that are unknown, share a name, or equal the start of the sweep."""
        for word in split_list(self.sweep_baselines):
            if word not in _NAMED:
                where = ": name its folder in sweep_checkpoints" if word == "checkpoint" else ""
                raise ValueError(f"sweep_baselines: {word} is none of {', '.join(_NAMED)}{where}")
        folders = split_list(self.sweep_checkpoints)
        for name, times in Counter(PurePosixPath(folder).name for folder in folders).items():
            if times > 1:  # results go by names
                raise ValueError(f"sweep_checkpoints: {times} folders are called {name}")
        for point in self._baselines():
            start = {n: v for n, v in point.differences.items() if n != "phrases_epsilon"}
            if start and all(getattr(self, name) == value for name, value in start.items()):
                raise ValueError(
                    f"sweep_baselines: what {point.baseline} begins with, this sweep begins with "
                    f"too: name {point.mode}-training"
                )
            try:
                self.job(point)
            except ValidationError as error:
                raise ValueError(f"baseline {point.baseline}: {one_line(error)}") from None

    def _refuse_to_ask(self) -> None:
        """Refuse a search that varies other settings, or whose results an optimiser may not see."""
        if not self.entities_shown:
            raise ValueError(
                "sweep_search: the F1 of private labels is the operator's, and the points that "
                "an optimiser suggests next would reveal it: choose grid"
            )
        if self.head != "entities":
            raise ValueError("sweep_search: an optimiser searches by the F1 of entities alone")
        if self.vocabulary_source == "nonprivate":
            raise ValueError("sweep_search: behind exact private counts all is the operator's")
        single = {
            "sweep_points": not self.sweep_points,
            "sweep_epochs_from": self.sweep_epochs_from == "trainings",
            "sweep_batch_sizes": len(numbers(self.sweep_batch_sizes)) == 1,
            "sweep_seeds": self.sweep_seeds == 1,
            "sweep_finetune_seeds": self.sweep_finetune_seeds == 1,
            "entities_folds": not self.entities_folds,
            "sweep_baselines": not self.sweep_baselines,
            "sweep_checkpoints": not self.sweep_checkpoints,
            "selection": self.selection == "publish-all",
            "sampling": self.sampling == "poisson",
            "noise_bands": self.noise_bands == 1,
            "first_batch_size": not self.first_batch_size,
        }
        if wrong := [name for name, holds in single.items() if not holds]:
            raise ValueError(
                f"{', '.join(wrong)}: points that an optimiser asks for are single ones of Poisson "
                "batches of one size, that differ in noise, epochs and fine-tuning"
            )
        if not self.space():
            raise ValueError("sweep_search: no list has two ends to search between")

    def _reason(self, error: ValidationError, point: Point) -> str:
        """Return the error of a point, with the sweep's names of its settings."""
        item = error.errors(include_url=False, include_input=False)[0]
        axis = str(item["loc"][0]) if item["loc"] else ""
        if axis not in AXES:
            return f"at the point {point.name}: {one_line(error)}"
        field = "sweep_points" if self.sweep_points else AXES[axis]
        return f"{field}: {item['msg'].replace('Input', f'{getattr(point, axis):g}', 1)}"
