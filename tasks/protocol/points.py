"""The models of a job: the settings in which each differs from the job, its seeds and its fold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

from dp_core.config.fields import Config

TRAINING_AXES = {  # setting of a job -> setting of the sweep with its values
    "noise_multiplier": "sweep_noise_multipliers",
    "batch_size": "sweep_batch_sizes",
    "epochs": "sweep_epochs",
}
FINETUNING_AXES = {
    "finetune_noise_multiplier": "sweep_finetune_noise_multipliers",
    "finetune_batch_size": "sweep_finetune_batch_sizes",
    "finetune_epochs": "sweep_finetune_epochs",
    "finetune_learning_rate": "sweep_finetune_learning_rates",
}
AXES = TRAINING_AXES | FINETUNING_AXES
REPLICATES = ("seed", "finetune_seed", "fold")  # reports average over these
# The models to compare private trainings with; `…-training` shares the job's vocabulary.
Baseline = Literal[
    "public", "public-training", "phrases", "checkpoint", "nonprivate", "nonprivate-training"
]
Mode = Literal["public", "phrases", "dp", "nonprivate"]  # of a model's last training
OF_JOB: Mapping[Mode, str] = {  # names of the models that have all settings of their job
    "public": "Public text only",
    "phrases": "Released phrases only",
    "dp": "With DP",
    "nonprivate": "Without privacy",
}
BASELINE_NAMES: Mapping[Baseline, str] = {
    "public": "public text only",
    "public-training": "public training",
    "phrases": "released phrases",
    "checkpoint": "checkpoint",
    "nonprivate": "without privacy",
    "nonprivate-training": "training without privacy",
}
BASELINE_SETTINGS: Mapping[Baseline, Mapping[str, Any]] = {  # where they differ from the job
    "public": {"vocabulary_source": "public"},
    "checkpoint": {"vocabulary_source": "checkpoint", "public_steps": 0},
    "nonprivate": {"vocabulary_source": "nonprivate"},
}


class Point(Config):
    """A model of a job: one fine-tuning, and the training that it starts from.

    A field that is None has its value from the job's settings. Points share one training if they
    differ only in fine-tuning, or are models that one training kept after different epochs. A
    private training is one release and is charged once. σ, batch size and epochs of pre-training
    are all zero if the training is the best of a random number of trainings, or if a baseline of a
    sweep has no such training.
    """

    noise_multiplier: float | None = None
    batch_size: int | None = None
    epochs: float | None = None
    seed: int | None = None  # public seed of the training; with DP, each seed is one release
    finetune_noise_multiplier: float | None = None
    finetune_batch_size: int | None = None
    finetune_epochs: int | None = None
    finetune_learning_rate: float | None = None
    finetune_seed: int | None = None
    fold: int | None = None  # test fold of the labelled documents, from 0
    baseline: Baseline | None = None  # comparison, whose training is not charged
    checkpoint: str = ""  # folder of the baseline's public model
    private_start: Literal["public", "fresh"] | None = None  # start of the private training
    # Epochs after which the training keeps a model, including the last; empty: only the last model.
    of_epochs: tuple[float, ...] = ()

    @property
    def training(self) -> Point:
        """The point's training, which other points may share."""
        return self.model.model_copy(update={"epochs": self.training_epochs})

    @property
    def model(self) -> Point:
        """The point's model before fine-tuning, which other points may share."""
        of_model = {*TRAINING_AXES, "seed", *_OF_A_FRONT, "private_start", "of_epochs"}
        return Point.model_validate(self.model_dump(include=of_model))

    @property
    def training_epochs(self) -> float | None:
        """Number of epochs of the whole training."""
        return self.of_epochs[-1] if self.of_epochs else self.epochs

    @property
    def is_on_the_way(self) -> bool:
        """Whether its training continues for more epochs and also releases later models."""
        return bool(self.of_epochs) and self.epochs != self.of_epochs[-1]

    @property
    def front(self) -> Point:
        """The shared steps before the training: vocabulary, rows and public model."""
        return Point.model_validate(NO_TRAINING | self.model_dump(include=set(_OF_A_FRONT)))

    @property
    def has_separate_front(self) -> bool:
        """Whether it is a baseline with another vocabulary than the job."""
        return self.baseline in BASELINE_SETTINGS

    @property
    def differences(self) -> dict[str, Any]:
        """The settings in which the model differs from the job, without seeds and fold.

        Released phrases are a release, so of the baselines only `phrases` uses them.
        """
        settings = self.model_dump(include={*AXES, "private_start"}, exclude_none=True)
        if not self.batch_size:  # a grid's training supplies the settings of a missing training
            settings = {name: v for name, v in settings.items() if v or name not in TRAINING_AXES}
        if self.baseline is not None:
            settings |= BASELINE_SETTINGS.get(self.baseline, {})
            settings |= {} if self.baseline == "phrases" else {"phrases_epsilon": 0.0}
        if self.checkpoint:
            settings["public_model"] = self.checkpoint
        if self.of_epochs:
            settings["epochs"] = self.training_epochs
        return settings

    def compared_with(self, baseline: Point) -> Point:
        """Return the baseline with this point's fine-tuning without DP, and for as many epochs."""
        names = set(FINETUNING_AXES) - {"finetune_noise_multiplier"}
        if baseline.mode == "nonprivate":
            names |= {"epochs", "of_epochs"}
        return baseline.model_copy(update=self.model_dump(include=names))

    @property
    def mode(self) -> Mode:
        """The mode of the model's last training."""
        if self.baseline is None:
            return "dp"
        if self.baseline == "phrases":
            return "phrases"
        return "nonprivate" if self.baseline.startswith("nonprivate") else "public"

    @property
    def setting(self) -> Point:
        """The point without seeds and fold."""
        return self.model_copy(update=dict.fromkeys(REPLICATES))

    @property
    def is_chosen(self) -> bool:
        """Whether its training is the best of a random number of trainings."""
        return self.batch_size == 0 and self.baseline is None

    @property
    def name(self) -> str:
        """The point's name for people, in the mapped task and the child run."""
        epochs = "" if self.epochs is None else f"epochs={self.epochs:g}"
        epochs += f" of {self.training_epochs:g}" if self.is_on_the_way else ""
        if self.noise_multiplier is None:
            parts = [OF_JOB[self.mode], *([epochs] if self.is_on_the_way else [])]
        elif self.baseline is not None:
            checkpoint = PurePosixPath(self.checkpoint).name
            parts = [f"{BASELINE_NAMES[self.baseline]} {checkpoint}".strip()]
            parts += [epochs] if self.epochs else []
        elif self.is_chosen:
            parts = ["the best of a random number"]
        else:
            parts = [f"σ={self.noise_multiplier:g}", f"B={self.batch_size}", epochs]
        parts += ["from random weights"] if self.private_start == "fresh" else []
        for words, value in (
            ("seed", self.seed),
            ("tuning σ", self.finetune_noise_multiplier),
            ("tuning B", self.finetune_batch_size),
            ("tuning epochs", self.finetune_epochs),
            ("tuning rate", self.finetune_learning_rate),
            ("tuning seed", self.finetune_seed),
            ("fold", None if self.fold is None else self.fold + 1),
        ):
            parts += [] if value is None else [f"{words}={value:.10g}"]
        return " · ".join(parts)


NO_TRAINING: dict[str, Any] = dict.fromkeys(TRAINING_AXES, 0)
_OF_A_FRONT = ("baseline", "checkpoint")
DP_MODEL = Point()  # the model that a job trains with DP


def first_private(points: Iterable[Point]) -> Point:
    """Return the first model with DP."""
    return next(point for point in points if point.mode == "dp")


def unique(points: Iterable[Point]) -> list[Point]:
    """Return the points in their order, without repetitions."""
    return list(dict.fromkeys(points))
