"""The experiments of the study, each a job's settings in one or several variants.

An experiment is data. To answer another question, add one: its variants are run for every seed, and
its columns select figures of MLflow for its table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.real_text import NOTES_AND_ENTITIES, existing_files
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import preset
from tasks.protocol.sweep import SweepSettings
from tasks.releases.training_advice import PrivacyBudget, RunReleases, calibrated

SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Column:
    """A figure of a model, as logged in MLflow.

    Attributes:
        title: the title in the table.
        metric: its name in MLflow, on the run of the model or of one of its steps.
        unit: "%" shows a share times 100.
        decimals: number of decimal places.
    """

    title: str
    metric: str
    unit: str = ""
    decimals: int = 1


EPSILON = Column("ε in total", "epsilon", decimals=2)
F1 = Column("entity F1", "f1", "%")
ACCURACY = Column("masked tokens, private text", "mlm_accuracy_private", "%")
EXPOSURE = Column("exposure, bits", "exposure")
LARGEST = Column("largest exposure", "exposure_largest")
PERPLEXITY = Column("perplexity, private text", "perplexity_private", decimals=0)
ADVANTAGE = Column("loss, by patient: advantage", "membership/patient/loss/pl", "%")
BOUND = Column("ε at least, by audit", "audit/epsilon_lower_bound", decimals=2)


@dataclass(frozen=True)
class Experiment:
    """A question, with the runs that answer it.

    Attributes:
        name: the name on the command line and in docs/reproduction.md.
        job: "dp_bert" or "dp_sweep".
        columns: the columns of its table.
        variants: changed settings, by the name of a row group; a single one has an empty name.
        preset: the preset with the initial settings.
        settings: changes of the preset in every variant.
        files: settings that name files, relative to the folder `CONFIDE_DATA`.
        epsilon: if above 0, the noise multiplier is calibrated to this ε in total.
        models: names of the models in MLflow whose rows are shown; all if empty.
        compared: pairs of rows, by name, whose difference in a column is shown below the table.
    """

    name: str
    job: str
    columns: tuple[Column, ...]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})
    preset: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    epsilon: float = 0.0
    models: tuple[str, ...] = ()
    compared: tuple[tuple[str, str, Column], ...] = ()

    def of(self, variant: str, seed: int) -> dict[str, Any]:
        """Return the settings of one run.

        Raises:
            BadInput: a required file is missing in the folder that `CONFIDE_DATA` names.
            ValueError: the settings are refused.
        """
        made = preset(self.preset) if self.preset else {}
        made = {**made, **self.settings, **self.variants[variant], "seed": seed}
        made |= existing_files(self.files)
        if self.epsilon:
            settings = JobSettings.model_validate(made)
            delta = RunReleases.of(settings).delta
            calibrated_settings = calibrated(settings, PrivacyBudget(self.epsilon, delta))
            made["noise_multiplier"] = calibrated_settings.noise_multiplier
        model = SweepSettings if self.job == "dp_sweep" else JobSettings
        model.model_validate(made)
        return made


# Small enough for two cores, and large enough that counts of phrases exceed the noise.
_SMALL: dict[str, Any] = {
    "synthetic_patients": 2000,
    "declared_units": 2000,
    "layers": 1,
    "hidden": 128,
    "sequence_length": 32,
    "public_steps": 600,
    "vocabulary_epsilon": 1.2,
    "epochs": 6,
    "batch_size": 341,
    "canaries_per_group": 1,
    "canary_patterns": "HS",
    "finetune_epochs": 2,
}
# As many updates of three times as many units, of which there are six times as many.
_EXAMPLES = {"unit": "example", "declared_units": 12000, "batch_size": 1023, "epochs": 3.069}
# A split that was chosen on made-up notes.
_WORDS_AND_PHRASES = {"vocabulary_epsilon": 1.2, "phrases_epsilon": 4.8}
# Batches without privacy are small on real notes, so that few epochs have more than a thousand
# updates.
_NOTES: dict[str, Any] = {
    **_WORDS_AND_PHRASES,
    "layers": 1,
    "phrases_steps": 1000,
    "public_steps": 1000,
    "epochs": 8,
    "batch_size": 341,
    "nonprivate_batch_size": 8,
    "canaries_per_group": 1,
    "canary_patterns": "HS",
}

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "models",
            "dp_bert",
            (EPSILON, BOUND, F1, ACCURACY, EXPOSURE, LARGEST),
            preset="demo",
            settings={
                **_WORDS_AND_PHRASES,
                "epochs": 2,
                "batch_size": 512,
                "noise_multiplier": 1.03,
            },
            compared=(
                ("Public text only", "With DP", F1),
                ("Without privacy", "With DP", F1),
                ("Released phrases only", "With DP", F1),
                ("Without privacy", "With DP", LARGEST),
            ),
        ),
        Experiment(
            "table2", "dp_sweep", (EPSILON, F1, EXPOSURE, LARGEST), preset="hoory2021-table2-tiny"
        ),
        Experiment("fig1", "dp_sweep", (EPSILON, F1, EXPOSURE), preset="hoory2021-fig1-tiny"),
        Experiment(
            "vocabularies",
            "dp_bert",
            (EPSILON, F1),
            settings=_SMALL,
            variants={
                "public and released words": {},
                "released words alone": {"vocabulary_source": "private"},
                "public words alone": {"vocabulary_source": "public"},
            },
        ),
        Experiment(
            "units",
            "dp_bert",
            (Column("σ", "noise_multiplier", decimals=2), EPSILON, F1, ACCURACY),
            settings=_SMALL,
            epsilon=5.8,
            compared=(("patient, With DP", "example, With DP", ACCURACY),),
            variants={"patient": {}, "example": _EXAMPLES},
            models=("With DP",),
        ),
        Experiment(
            "real-text",
            "dp_bert",
            (EPSILON, F1, ACCURACY),
            preset="real-text",
            settings=_NOTES,
            files=NOTES_AND_ENTITIES,
            epsilon=5.8,
            compared=tuple(
                (first, second, column)
                for first, second in (
                    ("Public text only", "With DP"),
                    ("Public text only", "Released phrases only"),
                    ("Released phrases only", "With DP"),
                    ("Public text only", "Without privacy"),
                )
                for column in (F1, ACCURACY)
            ),
        ),
        Experiment(
            "regimes",
            "dp_bert",
            (
                EPSILON,
                PERPLEXITY,
                Column("perplexity, public text", "perplexity_public", decimals=0),
            ),
            preset="kerrigan2020-tiny",
            compared=(
                ("Public text only", "With DP", PERPLEXITY),
                ("σ=1.1 · B=64 · epochs=10 · from random weights", "With DP", PERPLEXITY),
            ),
        ),
        Experiment(
            "attacks",
            "dp_bert",
            (
                EPSILON,
                ADVANTAGE,
                Column("loss, by row", "membership/sample/loss/pl", "%"),
                Column("gradients, by patient", "membership/patient/gradients/pl", "%"),
                Column("attention, by patient", "membership/patient/attention/pl", "%"),
                Column("most that ε leaves", "membership_ceiling/pl", "%"),
            ),
            variants={"GPT-2": {}, "BERT": preset("jagannatha2021-bert-tiny")},
            preset="jagannatha2021-gpt2-tiny",
            compared=tuple(
                (f"{family}, With DP", f"{family}, Without privacy", ADVANTAGE)
                for family in ("GPT-2", "BERT")
            ),
        ),
    )
}
