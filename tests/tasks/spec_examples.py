"""The smallest valid specs, of which tests change some fields, and a function that runs them."""

from typing import Any, TypeVar

from tasks.execution import contract
from tasks.protocol.specs import (
    ChargedPrivacyConfig,
    CorpusSpec,
    EntitiesSpec,
    ExposureSpec,
    FinetuneSpec,
    PretrainSpec,
    StepSpec,
    TokenStoreSpec,
    VocabularySpec,
)
from tasks.protocol.step_process import data_uri

Spec = TypeVar("Spec", bound=StepSpec)

PLAN = ChargedPrivacyConfig(
    dataset="notes", unit="patient", declared_units=40, noise_multiplier=4.0, clip_norm=0.5,
    delta=1e-5,
)  # fmt: skip
_TRAINING: dict[str, Any] = {
    "plan": PLAN, "training": {"learning_rate": 0.001}, "batches": {"batch_size": 8},
    "updates": 2, "device": "cpu",
}  # fmt: skip
_DEFAULTS: dict[type[StepSpec], dict[str, Any]] = {
    CorpusSpec: {
        "role": "private", "format": "text", "dataset": "notes", "data_version": "1",
        "synthetic_patients": 50,
    },
    EntitiesSpec: {"format": "columns", "public": True, "data_version": "1"},
    TokenStoreSpec: {
        "corpus_uri": "corpus", "vocabulary_uri": "vocabulary", "canaries_uri": "canaries",
        "units": {"declared_units": 40}, "holdout": 0.0,
        "rows": {"sequence_length": 16, "max_examples_per_unit": 1},
    },
    VocabularySpec: {
        "corpus_uri": "corpus", "dataset": "notes",
        "config": {
            "vocabulary_source": "private", "declared_units": 40, "words_per_unit": 16,
            "vocabulary_epsilon": 8.0, "vocabulary_delta": 1e-6, "vocabulary_size": 100,
        },
    },
    PretrainSpec: {"mode": "dp", "shape": {"layers": 1, "hidden": 64}, **_TRAINING},
    FinetuneSpec: {"epochs": 1, "sequence_length": 16, **_TRAINING},
    ExposureSpec: {"device": "cpu"},
}  # fmt: skip


def spec_of(kind: type[Spec], **changes: Any) -> Spec:
    """Return a spec of that kind, of private data, with these fields in place of the defaults."""
    shared = {"made_up": False, "seed": 1}
    return kind.model_validate({**shared, **_DEFAULTS.get(kind, {}), **changes})


def run(spec: StepSpec) -> int:
    return contract.main(spec.step, data_uri(spec.model_dump_json().encode()))
