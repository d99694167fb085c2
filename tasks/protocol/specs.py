"""What each step is told: a versioned spec, whose hash names the output.

Settings stand in it as the configuration models that the step's algorithm takes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self, Union

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from dp_core.config.audit_settings import (
    AuditCanariesConfig,
    BlackBoxAuditConfig,
    ExtractionConfig,
    MembershipConfig,
    SamplesConfig,
)
from dp_core.config.data import (
    CanaryConfig,
    HoldoutConfig,
    ReaderConfig,
    RowsConfig,
    SequenceConfig,
    VersionConfig,
)
from dp_core.config.fields import Config, paths
from dp_core.config.privacy import (
    PhrasesConfig,
    PrivacyConfig,
    RelationName,
    SelectionConfig,
    UnitConfig,
    UnitName,
    VocabularyConfig,
    WrittenTextConfig,
    refuse_many_bands,
)
from dp_core.config.training import (
    ArchitectureConfig,
    BatchConfig,
    CheckpointConfig,
    HeadConfig,
    RunConfig,
    SeedConfig,
    TaggingConfig,
    TrainingConfig,
    refuse_masks,
    refuse_short_growth,
)
from tasks.protocol.promotion import Promotion
from tasks.protocol.settings import EntitiesFormat, PrivateFormat, PublicFormat
from tasks.protocol.sweep import SweepPoint

MODEL_NAMES = {  # a job's models, by what the names of their tasks begin with
    "public": "Public text only",
    "phrases": "Released phrases only",
    "dp": "With DP",
    "nonprivate": "Without privacy",
}
ALIKE = (
    "updates must be alike: sampling=poisson, noise_bands=1, first_batch_size=0, or fewer of them "
    "would be another mechanism"
)
STORE_SCHEME = "store://"  # begins the address of an output, relative to the deployment's store
_OF_A_MODEL = ("pretraining", "finetuning", "exposure", "membership", "audit")


class RunContext(Config):
    """Which run a step belongs to. Never hashed: the same work in another run is the same work."""

    run_key: str  # one MLflow parent run per key: the DAG run's id
    run_name: str
    task: str  # the task's name within the run, for example `dp_pretraining`
    point: str = ""  # the sweep point's name, empty outside sweeps
    ended: str = ""  # runs whose keys begin so have all ended, except this one; empty: unknown
    # The run trains a secret random number of models: no time of its steps may be published.
    hides_count: bool = False

    def has_ended(self, run: str) -> bool:
        """Return whether another run is known to have ended, by its key."""
        return bool(self.ended) and run != self.run_key and run.startswith(self.ended)

    @property
    def model(self) -> str:
        """The model that the task makes or measures: the sweep's point, or one of the job's."""
        kind, _, part = self.task.partition("_")
        return self.point or (MODEL_NAMES.get(kind, "") if part in _OF_A_MODEL else "")


class Source(Config):
    """A file or folder outside the store that a step reads."""

    field: str  # the setting that names it
    uri: str
    public: bool  # the spec says so; only the operator's declaration in the ledger makes it true
    dataset: str = ""  # whose text it is; empty for what belongs to no data set


class Need(StrEnum):
    """One thing that a step may be given."""

    SOURCES = "sources"  # the folders with files that were supplied from outside, read only
    LEDGER = "ledger"  # to read the ledger, as a user of the database who cannot write
    CHARGING = "charging"  # the ledger's own user, and the secret seeds
    CLUSTER = "cluster"  # if there is a Ray cluster: its address and its secrets


class StepSpec(Config):
    """What one step is told. Subclasses add the fields; `step` names them in JSON."""

    unhashed: ClassVar[dict[str, Any]] = {}  # fields that no output depends on, as to pydantic
    repeated: ClassVar[bool] = False  # whether an earlier result does not answer for the step
    privileges: ClassVar[frozenset[Need]]  # of the step; each step declares its own
    hides_duration: ClassVar[bool] = False  # whether its duration would reveal a secret
    ends_run: ClassVar[bool] = False  # whether it is the last step of a run
    follows_run: ClassVar[bool] = False  # whether it runs after the last step, in every case

    version: Literal[4] = 4
    step: str
    made_up: bool  # every input is made up or public: nothing needs hiding

    def digest(self) -> str:
        """Return the spec hash: SHA-256 over everything that determines the output, in hex."""
        canonical = json.dumps(
            self.hashed(), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def hashed(self) -> dict[str, Any]:
        """Return what the output depends on, as plain JSON data."""
        return self.model_dump(mode="json", exclude=self.unhashed)

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the step reads from outside, and whether it calls it public."""
        return ()

    @property
    def needs(self) -> frozenset[Need]:
        """The privileges that the step receives with these settings."""
        return self.privileges

    @property
    def charges(self) -> bool:
        """Whether the step releases something of private data with a guarantee."""
        return False

    @property
    def checks_sources(self) -> bool:
        """Whether a result is refused after the files that the step read have changed."""
        return False

    @property
    def hides_count(self) -> bool:
        """Whether the number of the run's trainings is a secret."""
        return False

    @property
    def coordinates(self) -> dict[str, float]:
        """The settings by which the tracker compares models, or none."""
        return {}

    @property
    def run_settings(self) -> dict[str, bool | int | float | str]:
        """The settings of the whole run, in the specs of its report."""
        return {}

    @property
    def output(self) -> str:
        """Store address of the folder that only this step writes: `store://STEP/HASH`.

        The address names the output within any store. Each deployment resolves it against its own
        store when a step runs, so a store that was moved holds the same outputs.
        """
        return f"{STORE_SCHEME}{self.step}/{self.digest()[:16]}"


class CorpusSpec(StepSpec, ReaderConfig, SeedConfig):
    """Read a corpus, group it by privacy unit, and keep it in one normal form."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.LEDGER})
    step: Literal["corpus"] = "corpus"
    role: Literal["private", "public"]
    format: PrivateFormat | PublicFormat
    path: str
    dataset: str

    @property
    def sources(self) -> tuple[Source, ...]:
        """The corpus, unless it is of the project's own making."""
        if self.format == "synthetic":
            return ()
        private = self.role == "private"
        source = Source(
            field=f"{self.role}_path",
            uri=self.path,
            public=self.made_up or not private,
            dataset=self.dataset if private else "",
        )
        return (source,)

    @property
    def checks_sources(self) -> bool:
        """Whether a result is refused after the files that the step read have changed."""
        return True


class EntitiesSpec(StepSpec, VersionConfig, SeedConfig, HeadConfig):
    """Read labelled text: a training and a test part, or one to make folds of.

    Sentences with entities, or texts, or pairs of texts, with a class.
    """

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.LEDGER})
    step: Literal["entities"] = "entities"
    format: EntitiesFormat
    public: bool  # the labels may be shown; else F1 on them is the operator's
    dataset: str = ""  # to which uses of private labels are charged; empty if they are public
    entities_unit: UnitName = "patient"
    train_path: str
    test_path: str
    folded: bool = False  # there is no test part: who fine-tunes takes a fold of the training part
    patients_path: str = ""  # which patient each training document is of; empty: nobody says

    @property
    def sources(self) -> tuple[Source, ...]:
        """Both parts, and the list of patients, unless they are of the project's own making."""
        if self.format == "synthetic":
            return ()
        public = self.made_up or self.public
        dataset = "" if self.public else self.dataset
        paths = {"train": self.train_path, "test": self.test_path, "patients": self.patients_path}
        return tuple(
            Source(field=f"entities_{part}", uri=uri, public=public, dataset=dataset)
            for part, uri in paths.items()
            if uri
        )

    @property
    def checks_sources(self) -> bool:
        """Whether a result is refused after the files that the step read have changed."""
        return True


class CheckpointSpec(StepSpec):
    """Bring the tokens of a public model into the store, for a vocabulary that keeps them."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.LEDGER})
    step: Literal["checkpoint"] = "checkpoint"
    public_model: str  # a Hugging Face folder

    @property
    def sources(self) -> tuple[Source, ...]:
        """The public model."""
        return (Source(field="public_model", uri=self.public_model, public=True),)


class VocabularySpec(StepSpec, HoldoutConfig, SeedConfig):
    """Make the tokens: of public words, released private ones, or a checkpoint's own.

    Charged where private words are released. Each input is named where the source reads it, and
    nowhere else, so that a vocabulary of public text cannot open the private corpus.
    """

    # of private words
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING, Need.CLUSTER})
    step: Literal["vocabulary"] = "vocabulary"
    corpus_uri: str = ""  # the private corpus
    public_corpus_uri: str = ""
    checkpoint_uri: str = ""
    dataset: str  # the private data set
    subwords: Literal["wordpiece", "byte-level-bpe"] = "wordpiece"
    relation: RelationName = "add-or-remove-one"  # under which it is charged: the training's
    config: VocabularyConfig

    @model_validator(mode="after")
    def _reads_what_its_source_says(self) -> Self:
        config = self.config
        for field, reads in (
            ("corpus_uri", config.reads_private_text),
            ("public_corpus_uri", config.reads_public_text),
            ("checkpoint_uri", config.keeps_a_checkpoint),
        ):
            if bool(getattr(self, field)) != reads:
                needs = "needs" if reads else "does not read"
                raise ValueError(f"{field}: the source {config.vocabulary_source} {needs} it")
        return self

    @property
    def needs(self) -> frozenset[Need]:
        """The privileges that the step receives with this source of words."""
        if not self.config.reads_private_text:
            return frozenset({Need.CLUSTER})
        return self.privileges

    @property
    def charges(self) -> bool:
        """Whether the step releases something of private data with a guarantee."""
        return self.config.releases_private_words


class CanariesSpec(StepSpec, SeedConfig):
    """Draw canaries from the released vocabulary with public coins."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["canaries"] = "canaries"
    vocabulary_uri: str
    config: CanaryConfig


class PhrasesSpec(StepSpec, HoldoutConfig, SeedConfig):
    """Release phrases that many units share. Charged."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING, Need.CLUSTER})
    step: Literal["phrases"] = "phrases"
    corpus_uri: str
    vocabulary_uri: str
    canaries_uri: str = ""
    dataset: str
    config: PhrasesConfig

    @property
    def charges(self) -> bool:
        """Whether the step releases something of private data with a guarantee."""
        return True


class WrittenTextSpec(StepSpec, SeedConfig):
    """Write a corpus from released phrases and words, with public documents among them."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["written_text"] = "written_text"
    phrases_uri: str
    vocabulary_uri: str  # whose released words are written too, each by itself
    public_corpus_uri: str = ""  # empty: written text alone
    config: WrittenTextConfig


class TokenStoreSpec(StepSpec, AuditCanariesConfig, HoldoutConfig, SeedConfig):
    """Cut a corpus into rows of token ids, by unit, with canaries planted where they are given.

    Audit canaries, where there are any, are units of their own, in a store of their own.
    """

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CLUSTER})
    step: Literal["token_store"] = "token_store"
    corpus_uri: str
    vocabulary_uri: str
    canaries_uri: str = ""
    units: UnitConfig | None  # None: public or written text, by document: nothing is declared
    rows: RowsConfig

    @property
    def role(self) -> Literal["private", "public"]:
        """Whose text it is: what has units to protect is private."""
        return "private" if self.units else "public"

    @model_validator(mode="after")
    def _audits_private_rows(self) -> Self:
        if self.audit_canaries and not self.units:
            raise ValueError("audit_canaries: only a training on private rows is audited")
        return self


class PrivacyPlan(PrivacyConfig, AuditCanariesConfig):
    """The numbers of an `ExecutionPlan`, and the data set in whose ledger it is charged."""

    dataset: str

    @property
    def all_units(self) -> int:
        """Units that the plan declares: the private ones, and all audit canaries, in or out."""
        return self.declared_units + self.audit_canaries


def _without(hashed: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in hashed.items() if name not in names}


class TrainingSpec(StepSpec, RunConfig):
    """What pre-training and fine-tuning are both told."""

    unhashed: ClassVar[dict[str, Any]] = {"training": set(CheckpointConfig.model_fields)}

    training: TrainingConfig
    batches: BatchConfig
    updates: int
    plan: PrivacyPlan | None = None  # charged
    # Fine-tunings by whose F1 an optimiser chose the settings: the output descends from them.
    after: tuple[str, ...] = ()

    def hashed(self) -> dict[str, Any]:
        """Return what the output depends on; what nobody has searched for is named as ever."""
        hashed = super().hashed()
        return hashed if self.after else _without(hashed, "after")

    @model_validator(mode="after")
    def _batches_have_time_to_grow(self) -> Self:
        batches = self.batches
        refuse_short_growth(batches.first_batch_size, self.updates)
        if self.plan:
            refuse_many_bands(self.plan, batches.batch_size, batches.first_batch_size, self.updates)
        return self

    @property
    def charges(self) -> bool:
        """Whether the step releases something of private data with a guarantee."""
        return self.plan is not None


class Asked(Config):
    """What a training that an optimiser asks for may cost at most.

    The bounds are fixed before the first is asked for. More noise or fewer updates are
    post-processing of a training at the bounds, whatever they were chosen by: so each asked
    training is charged as one at the bounds, in an entry that is registered before the sweep.
    """

    search: str  # whose entries are its own: another would ask for other trainings
    number: int = Field(ge=0)  # of the entry
    least_noise_multiplier: float
    most_updates: int


class PretrainSpec(TrainingSpec):
    """Language-model pre-training: on public or released text, with DP, or without privacy.

    It is told how text will be sought in the model, and hands that on: what was fixed before the
    training can be told from what was chosen after it. The model does not depend on it.
    """

    unhashed: ClassVar[dict[str, Any]] = TrainingSpec.unhashed | {"extraction": True}

    # on private rows
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING, Need.CLUSTER})
    step: Literal["pretrain"] = "pretrain"
    mode: Literal["public", "released", "dp", "nonprivate"]
    store_uri: str
    public_store_uri: str  # its held-out part measures every model's MLM accuracy
    private_store_uri: str  # likewise, for the operator
    vocabulary_uri: str
    init_uri: str = ""  # empty: a public model from elsewhere, or a fresh one from `seed`
    public_model: str = ""  # mode `public` only: a Hugging Face folder to start from
    shape: ArchitectureConfig
    extraction: ExtractionConfig = ExtractionConfig()
    asked: Asked | None = None  # by an optimiser
    kept_updates: tuple[int, ...] = ()  # after which the model is kept too, beside the last one

    def hashed(self) -> dict[str, Any]:
        """Return what the output depends on; nobody has asked for an ordinary training."""
        unused = {n for n in ("asked", "kept_updates") if not getattr(self, n)}
        return _without(super().hashed(), *unused)

    @property
    def charged_as(self) -> PretrainSpec:
        """The training whose release is charged: this one, or the costliest that may be asked."""
        if self.asked is None or self.plan is None:
            return self
        least = {"noise_multiplier": self.asked.least_noise_multiplier}
        return self.model_copy(
            update={
                "plan": self.plan.model_copy(update=least),
                "updates": self.asked.most_updates,
                "after": (),
            }
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        """The public model that it starts from, if it comes from elsewhere."""
        if not self.public_model:
            return ()
        return (Source(field="public_model", uri=self.public_model, public=True),)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        # Who reads files from outside holds no seed.
        if self.public_model and self.mode != "public":
            raise ValueError("public_model: only public pre-training starts from files")
        if self.updates < (0 if self.mode == "public" else 1):
            raise ValueError("updates: only a public model may be taken as it is, without any")
        maskings = self.batches.maskings_per_example
        refuse_masks(
            self.shape.model_kind,
            whole_words=self.training.whole_words,
            maskings_per_example=maskings,
        )
        if maskings > 1 and self.mode != "dp":
            raise ValueError("maskings_per_example: only DP pre-training repeats a row")
        kept = self.kept_updates
        if kept != tuple(sorted(set(kept))) or not all(0 < one < self.updates for one in kept):
            raise ValueError("kept_updates: they must rise, and lie below updates")
        if self.asked:
            self._refuse_beyond_the_bounds(self.asked)
        return self

    def _refuse_beyond_the_bounds(self, asked: Asked) -> None:
        if self.plan is None:
            raise ValueError("asked: only a training with DP is charged")
        if self.kept_updates:
            raise ValueError("asked: of an asked training the last model alone is released")
        if self.plan.noise_multiplier < asked.least_noise_multiplier:
            raise ValueError("asked: less noise than what is charged has")
        if self.updates > asked.most_updates:
            raise ValueError("asked: more updates than what is charged has")
        alike = (self.plan.sampling, self.plan.noise_bands, self.batches.first_batch_size)
        if alike != ("poisson", 1, 0):
            raise ValueError(f"asked: {ALIKE}")

    @property
    def needs(self) -> frozenset[Need]:
        """The privileges that the step receives in this mode."""
        if self.mode == "public":
            # A model from elsewhere is parsed, and the ledger holds the operator's declaration.
            return frozenset({Need.SOURCES, Need.LEDGER} if self.public_model else {Need.CLUSTER})
        if self.mode == "released":
            return frozenset({Need.CLUSTER})  # released text is read, and nothing is charged
        return self.privileges

    @property
    def coordinates(self) -> dict[str, float]:
        """The settings by which the tracker compares private models."""
        if self.plan is None:
            return {}
        sizes = {"batch_size": self.batches.batch_size, "updates": self.updates}
        return sizes | {"σ": self.plan.noise_multiplier}


class OfModelSpec(StepSpec):
    """What reads one model of those that a training has left."""

    model_uri: str
    model_updates: int = Field(default=0, ge=0)  # of its training, where it kept it; 0: the last

    def hashed(self) -> dict[str, Any]:
        """Return what the output depends on; the last model is named as ever."""
        hashed = super().hashed()
        return hashed if self.model_updates else _without(hashed, "model_updates")


class FinetuneSpec(TrainingSpec, OfModelSpec, SequenceConfig, TaggingConfig):
    """Fine-tune a model with a head, and score it: by strict entity F1, or by accuracy.

    Charged where the labels are private and there is a plan.
    """

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    step: Literal["finetune"] = "finetune"
    entities_uri: str
    updates: int = 0  # with a plan; else epochs say it
    entity_types: tuple[str, ...] = ()  # that are learned and scored; empty: those of the training
    class_names: tuple[str, ...] = ()  # likewise, of the other heads
    epochs: int
    folds: int = 0  # of the labelled documents or patients; 0: a test part of its own
    fold: int = 0  # the one that is tested on

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not 0 <= self.fold < max(1, self.folds):
            raise ValueError(f"fold: {self.fold} is none of {self.folds}")
        if self.batches.maskings_per_example > 1:
            raise ValueError("maskings_per_example: fine-tuning masks nothing")
        if self.plan and self.plan.audit_canaries:
            raise ValueError("audit_canaries: only pre-training is audited")
        if self.plan and not self.label_names:
            raise ValueError("entity_types, class_names: private fine-tuning is told its labels")
        if self.plan and self.plan.unit == "example" and self.tagging_context == "document":
            raise ValueError("tagging_context: a row holds sentences of a whole document")
        return self

    @property
    def label_names(self) -> tuple[str, ...]:
        """The entity types, or the classes, that are public knowledge; empty: none are told."""
        return self.entity_types if self.head == "entities" else self.class_names


class SelectSpec(StepSpec):
    """Train a secret random number of drawn candidates; keep the best. One charge for all."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    hides_duration: ClassVar[bool] = True  # it grows with the secret number of trainings
    step: Literal["select"] = "select"
    candidates: tuple[PretrainSpec, ...]  # the declared, public list: mode `dp`, alike but in plan
    selection: SelectionConfig

    @model_validator(mode="after")
    def _releases_one_model(self) -> Self:
        if any(one.kept_updates for one in self.candidates):
            raise ValueError("kept_updates: a selection releases its best model alone")
        return self

    @property
    def delta(self) -> float:
        """δ at which the selection is charged: that of each training."""
        assert self.candidates[0].plan is not None  # noqa: S101 - narrows the type
        return self.candidates[0].plan.delta

    def hashed(self) -> dict[str, Any]:
        """Return the hashes of the candidates in place of their specs."""
        return super().hashed() | {"candidates": [spec.digest() for spec in self.candidates]}

    @property
    def charges(self) -> bool:
        """Whether the step releases something of private data with a guarantee."""
        return True

    @property
    def hides_count(self) -> bool:
        """A selection on private data trains a secret number of candidates."""
        return not self.made_up


Charged = VocabularySpec | PhrasesSpec | PretrainSpec | FinetuneSpec | SelectSpec


class ChargedStepsSpec(StepSpec):
    """A step about all charged steps of a run. It runs again in every run (`repeated`)."""

    repeated: ClassVar[bool] = True
    charged: tuple[Charged, ...]

    def hashed(self) -> dict[str, Any]:
        """Return the hashes of the charged steps in place of their specs."""
        return super().hashed() | {"charged": [spec.digest() for spec in self.charged]}


class BudgetSpec(ChargedStepsSpec):
    """Record the sources of a run, and refuse a run that its budgets do not hold."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.CHARGING})
    step: Literal["budget"] = "budget"
    reads: tuple[Source, ...] = ()  # the sources outside the store, each once

    @property
    def called_public(self) -> tuple[Source, ...]:
        """The sources that the run calls public: refused here if the operator did not say so."""
        return tuple(source for source in self.reads if source.public)


class ReserveSpec(ChargedStepsSpec):
    """Check the text and labels of a run, then register all of its releases: all fit, or none."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    step: Literal["reserve"] = "reserve"
    corpus_uri: str
    units: UnitConfig  # of the private corpus
    entities_uri: str = ""  # empty where nothing is fine-tuned
    learned: FinetuneSpec | None = None  # a fine-tuning on private labels without privacy, if any


class GiveBackSpec(StepSpec):
    """Give back the plans that a run registered and of which no release has begun."""

    repeated: ClassVar[bool] = True
    follows_run: ClassVar[bool] = True
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    step: Literal["give_back"] = "give_back"


class ExposureSpec(OfModelSpec, RunConfig):
    """Measure how well a model remembers the canaries, and what comes out of a causal one."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["exposure"] = "exposure"
    canaries_uri: str
    private_store_uri: str
    extraction: ExtractionConfig = ExtractionConfig()
    samples: SamplesConfig = SamplesConfig()


class MembershipSpec(StepSpec, RunConfig, VersionConfig):
    """Attack a model: tell units that it was trained on from units that were held out."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["membership"] = "membership"
    model_uri: str
    reference_uris: tuple[str, ...] = ()  # models that never saw the members, nor descend from them
    corpus_uri: str
    canaries_uri: str
    private_store_uri: str
    units: UnitConfig  # of the private store
    config: MembershipConfig
    dataset: str = ""  # whose codes of diseases are read

    @property
    def sources(self) -> tuple[Source, ...]:
        """The table of codes, where there is one."""
        uri, field = self.config.membership_codes, "membership_codes"
        source = Source(field=field, uri=uri, public=self.made_up, dataset=self.dataset)
        return (source,) if uri else ()

    @property
    def checks_sources(self) -> bool:
        """Whether a result is refused after the files that the step read have changed."""
        return bool(self.sources)  # without codes, TensorFlow is not imported for the check

    @property
    def needs(self) -> frozenset[Need]:
        """The privileges that the step receives, with or without a table of codes."""
        if self.sources:
            return frozenset({Need.SOURCES})  # a table of codes is parsed, and nothing is charged
        return self.privileges


class AuditSpec(StepSpec, RunConfig):
    """Guess from a model which audit canaries its training held; bound ε by the right guesses."""

    # the coins follow from the seed of the audited release
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    step: Literal["audit"] = "audit"
    model_uri: str
    start_uri: str  # the model before the first update
    private_store_uri: str


class ReportSpec(StepSpec):
    """Gather the results of a job into one page; judge and register the models that it made."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.LEDGER})  # it shows the account
    ends_run: ClassVar[bool] = True
    step: Literal["report"] = "report"
    title: str
    results: dict[str, str]  # task name -> output URI
    promotion: Promotion = "audited"
    settings: dict[str, bool | int | float | str]

    @property
    def run_settings(self) -> dict[str, bool | int | float | str]:
        """The settings of the whole run."""
        return self.settings


class PrivacyAuditSpec(StepSpec, BlackBoxAuditConfig):
    """Audit one model from outside, by canaries and texts from outside the store."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES})
    ends_run: ClassVar[bool] = True
    step: Literal["privacy_audit"] = "privacy_audit"

    @property
    def model_uri(self) -> str:
        """Address of the model if it is an output of the store, or empty if it is a folder."""
        return self.audited_model if self.audited_model.startswith(STORE_SCHEME) else ""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files, and the model from elsewhere."""
        named = {name: str(getattr(self, name)) for name in paths(BlackBoxAuditConfig)}
        if self.model_uri:
            del named["audited_model"]
        return tuple(
            Source(field=name, uri=uri, public=False) for name, uri in named.items() if uri
        )

    @property
    def checks_sources(self) -> bool:
        """Whether a result is refused after the files that the step read have changed."""
        return True


class PromoteSpec(StepSpec):
    """Give a job's model the alias `promotable`, now that a person has approved of it."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    ends_run: ClassVar[bool] = True
    step: Literal["promote"] = "promote"
    report_uri: str


class SweepReportSpec(StepSpec):
    """Gather the results of a sweep: the paper's Figs. 1 and 2. Judge and register its models."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.LEDGER})
    ends_run: ClassVar[bool] = True
    step: Literal["sweep_report"] = "sweep_report"
    title: str
    points: dict[str, SweepPoint]
    results: dict[str, dict[str, str]]  # point name -> task name -> output URI
    readers: dict[str, str]  # task name -> output URI, of steps that read a source
    settings: dict[str, bool | int | float | str]

    @property
    def run_settings(self) -> dict[str, bool | int | float | str]:
        """The settings of the whole run."""
        return self.settings

    @property
    def hides_count(self) -> bool:
        """Whether the sweep selects among a secret number of trainings."""
        return not self.made_up and self.settings.get("selection") == "random-count"


def _classes(kind: type[StepSpec]) -> dict[str, type[StepSpec]]:
    """Return the classes below `kind` that name a step, by the name of the step."""
    classes: dict[str, type[StepSpec]] = {}
    for child in kind.__subclasses__():
        name = child.model_fields["step"].default
        if isinstance(name, str):  # a class that several steps share has no name
            classes[name] = child
        classes |= _classes(child)
    return classes


STEP_CLASSES = _classes(StepSpec)
STEPS = tuple(STEP_CLASSES)
_ANY_SPEC: Any = Annotated[Union[tuple(STEP_CLASSES.values())], Field(discriminator="step")]  # noqa: UP007
_ADAPTER: TypeAdapter[StepSpec] = TypeAdapter(_ANY_SPEC, config=ConfigDict(defer_build=True))


def hides_count(specs: Iterable[StepSpec]) -> bool:
    """Return whether steps of one run select privately among a secret number of trainings."""
    return any(spec.hides_count for spec in specs)


def spec_from_json(text: str | bytes) -> StepSpec:
    """Return the spec written as JSON.

    Raises:
        pydantic.ValidationError: not a spec of a known step; `one_line` makes it readable.
    """
    return _ADAPTER.validate_json(text)
