"""The specs of the steps that measure a model, each with its rule for which models it measures.

A new measurement is a class here and a file in `tasks/steps`: jobs, sweeps and the graphs of both
take it from `MEASUREMENTS`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from dp_core.config.audit_settings import ExtractionConfig, MembershipConfig, SamplesConfig
from dp_core.config.data import VersionConfig
from dp_core.config.privacy import UnitConfig
from dp_core.config.training import RunConfig
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import Need, OfModelSpec, PretrainSpec, Source, StepSpec


@dataclass(frozen=True)
class MeasuredModel:
    """A model of a job, before its measurements are planned.

    Attributes:
        job: settings of the job with the model's differences.
        front: the steps before DP pre-training, by task.
        training: the step that makes the model.
        updates: updates after which the training kept the model; 0: its last model.
    """

    job: JobSettings
    front: Mapping[str, StepSpec]
    training: StepSpec
    updates: int

    @property
    def common(self) -> dict[str, Any]:
        """The fields that all measurements of the model share."""
        return {
            "made_up": self.training.made_up,
            "model_uri": self.training.output,
            "private_store_uri": self.front["private_store"].output,
            **self.job.part(RunConfig).model_dump(),
        }


class MeasurementSpec(StepSpec, RunConfig):
    """A step that measures one model, or all models that a training has kept."""

    model_uri: str
    private_store_uri: str

    @classmethod
    @abstractmethod
    def of_model(cls, model: MeasuredModel) -> Self | None:
        """Return the spec for a model, or None if the job's settings do not measure it."""


class ExposureSpec(MeasurementSpec, OfModelSpec):
    """Measure a model's exposure of canaries, and the extraction and samples of a causal model."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["exposure"] = "exposure"
    canaries_uri: str
    extraction: ExtractionConfig = ExtractionConfig()
    samples: SamplesConfig = SamplesConfig()

    @classmethod
    def of_model(cls, model: MeasuredModel) -> Self:
        """Return the spec for a model; every model is measured."""
        return cls(
            **model.common,
            model_updates=model.updates,
            canaries_uri=model.front["canaries"].output,
            extraction=model.job.part(ExtractionConfig),
            samples=model.job.part(SamplesConfig),
        )


class MembershipSpec(MeasurementSpec, VersionConfig):
    """Attack a model by distinguishing its training units from held-out units."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["membership"] = "membership"
    # Models that were not trained on the members and do not descend from models that were.
    reference_uris: tuple[str, ...] = ()
    corpus_uri: str
    canaries_uri: str
    units: UnitConfig  # of the private store
    config: MembershipConfig
    dataset: str = ""  # data set of the table of codes

    @classmethod
    def of_model(cls, model: MeasuredModel) -> Self | None:
        """Return the spec for the last model of a training, which includes its kept models."""
        job, front, public = model.job, model.front, model.front["public_pretraining"]
        if not job.membership_units or model.updates:
            return None
        return cls(
            **model.common,
            reference_uris=() if model.training == public else (public.output,),
            corpus_uri=front["private_corpus"].output,
            canaries_uri=front["canaries"].output,
            units=job.part(UnitConfig),
            config=job.part(MembershipConfig),
            dataset=job.private_dataset,
            data_version=job.data_version,
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        """The table of disease codes, if there is one."""
        uri, field = self.config.membership_codes, "membership_codes"
        source = Source(field=field, uri=uri, public=self.made_up, dataset=self.dataset)
        return (source,) if uri else ()

    @property
    def needs(self) -> frozenset[Need]:
        """The privileges that the step receives, with or without a table of codes."""
        if self.sources:
            return frozenset({Need.SOURCES})  # a table of codes is parsed, and nothing is charged
        return self.privileges


class AuditSpec(MeasurementSpec):
    """Guess the audit canaries in a model's training, and bound ε by the correct guesses."""

    # The seed of the audited release determines the coins.
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    step: Literal["audit"] = "audit"
    start_uri: str  # the model before the first update

    @classmethod
    def of_model(cls, model: MeasuredModel) -> Self | None:
        """Return the spec for the last model of a DP training with audit canaries."""
        training = model.training
        if not isinstance(training, PretrainSpec) or training.plan is None:
            return None
        if not model.job.audit_canaries or model.updates:
            return None
        return cls(**model.common, start_uri=training.init_uri)


MEASUREMENTS: dict[str, type[MeasurementSpec]] = {
    kind.model_fields["step"].default: kind for kind in MeasurementSpec.__subclasses__()
}
