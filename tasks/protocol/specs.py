"""The versioned specs of the steps, whose hashes name the outputs.

A spec holds settings as the configuration models that the step's algorithm takes.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dp_core.config.audit_settings import AuditCanariesConfig, BlackBoxAuditConfig, ExtractionConfig
from dp_core.config.data import (
    CanaryConfig,
    HoldoutConfig,
    ReaderConfig,
    RowsConfig,
    SequenceConfig,
    TagScheme,
    VersionConfig,
)
from dp_core.config.fields import Config, paths
from dp_core.config.privacy import (
    ClipNorm,
    PhrasesConfig,
    PrivacyConfig,
    SelectionConfig,
    UnitConfig,
    UnitName,
    VocabularyConfig,
    WrittenTextConfig,
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
    refuse_impossible_updates,
    refuse_masks,
)
from tasks.protocol.points import Point
from tasks.protocol.settings import EntitiesFormat, PrivateFormat
from tasks.protocol.settings_file import Promotion

STORE_SCHEME = "store://"  # prefix of an output's address in the deployment's store
_CODE_OF_TRAINING = (
    "dp_core.training.loop",
    "dp_core.vocabulary.tokenizer_files",  # which pieces continue a word: masks of whole words
    "dp_core.audit.canaries",  # which audit canaries are in
    "tasks.steps.training_files",  # rows, first weights, and kept models
    "dp_core.models.hugging_face",
)
# hashed only if they are set
_IF_SET = ("after", "asked", "clipped", "kept_updates", "model_updates", "scheme", "target")


class RunContext(Config):
    """The run of a step. It is not hashed, so that other runs can use the output of equal work."""

    run_key: str  # one MLflow parent run per key: the DAG run's id
    run_name: str
    task: str  # the task's name within the run, for example `pretraining`
    point: str = ""  # name of the model that the task makes or measures; empty for shared steps
    ended: str = ""  # key prefix of runs that have ended, except this run; empty: unknown
    # The run trains a secret random number of models, so no duration of its steps may be published.
    hides_count: bool = False

    def has_ended(self, run: str) -> bool:
        """Return whether the run with this key is another run that is known to have ended."""
        return bool(self.ended) and run != self.run_key and run.startswith(self.ended)


class Source(Config):
    """A file or folder outside the store that a step reads."""

    field: str  # setting that contains the path
    uri: str
    public: bool  # claimed by the spec; valid only if the operator's declaration is in the ledger
    dataset: str = ""  # data set of the text; empty if it belongs to none


class Need(StrEnum):
    """A privilege that a step can receive."""

    SOURCES = "sources"  # read-only access to the folders of files from outside
    LEDGER = "ledger"  # read access to the ledger, as a database user who cannot write
    CHARGING = "charging"  # write access to the ledger, and the secret seeds
    CLUSTER = "cluster"  # the address and secrets of the Ray cluster, if any


class StepSpec(Config):
    """The spec of one step. Subclasses add fields, and `step` names the subclass in JSON."""

    unhashed: ClassVar[dict[str, Any]] = {}  # fields that no output depends on, for `exclude`
    repeated: ClassVar[bool] = False  # whether the step runs again despite an earlier result
    privileges: ClassVar[frozenset[Need]]  # of the step; each subclass declares them
    code: ClassVar[tuple[str, ...]] = ()  # modules that shape a release before it settles
    hides_duration: ClassVar[bool] = False  # whether its duration would reveal a secret
    ends_run: ClassVar[bool] = False  # whether it is the last step of a run
    follows_run: ClassVar[bool] = False  # whether it runs after the last step, in every case

    version: Literal[4] = 4
    step: str
    made_up: bool  # every input is synthetic or public, so nothing needs hiding

    def digest(self) -> str:
        """Return the spec hash: SHA-256 over everything that determines the output, in hex."""
        canonical = json.dumps(
            self.hashed(), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def hashed(self) -> dict[str, Any]:
        """Return the fields that determine the output, as plain JSON data."""
        fields = self.model_dump(mode="json", exclude=self.unhashed)
        return {name: value for name, value in fields.items() if value or name not in _IF_SET}

    @property
    def sources(self) -> tuple[Source, ...]:
        """The step's sources outside the store, and whether the spec claims they are public."""
        return ()

    @property
    def needs(self) -> frozenset[Need]:
        """The privileges that the step receives with these settings."""
        return self.privileges

    @property
    def charges(self) -> bool:
        """Whether the step makes a release of private data with a guarantee."""
        return False

    @property
    def hides_count(self) -> bool:
        """Whether the number of the run's trainings is a secret."""
        return False

    @property
    def coordinates(self) -> dict[str, float]:
        """The settings by which the tracker compares models, or an empty dictionary."""
        return {}

    @property
    def run_settings(self) -> dict[str, bool | int | float | str]:
        """The settings of the whole run that anyone may see, in the spec of a report."""
        return {}

    @property
    def output(self) -> str:
        """Store address of the folder that only this step writes: `store://STEP/HASH`.

        The address names the output within any store. Each deployment resolves it in its own
        store when a step runs, so a store can be moved.
        """
        return f"{STORE_SCHEME}{self.step}/{self.digest()[:16]}"


class CorpusSpec(StepSpec, ReaderConfig, SeedConfig):
    """Read a corpus, group it by privacy unit, and store it in a normal form."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.LEDGER})
    step: Literal["corpus"] = "corpus"
    role: Literal["private", "public"]
    format: PrivateFormat
    path: str
    columns: str = ""
    dataset: str

    @property
    def sources(self) -> tuple[Source, ...]:
        """The corpus, unless it is synthetic."""
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


class EntitiesSpec(StepSpec, VersionConfig, SeedConfig, HeadConfig):
    """Read labelled text, as a training and a test part or as one part to divide into folds.

    The items are sentences with entities, or texts or pairs of texts with a class.
    """

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.LEDGER})
    step: Literal["entities"] = "entities"
    format: EntitiesFormat
    scheme: TagScheme | None = None  # of the tags in columns; None: every scheme is read
    public: bool  # the labels may be shown; otherwise F1 on them is for the operator only
    dataset: str = ""  # data set charged for private labels; empty if they are public
    entities_unit: UnitName = "patient"
    train_path: str
    test_path: str
    folded: bool = False  # no test part: fine-tuning tests on a fold of the training part
    patients_path: str = ""  # table with each training document's patient, or empty

    @property
    def sources(self) -> tuple[Source, ...]:
        """Both parts and the list of patients, unless they are synthetic."""
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


class CheckpointSpec(StepSpec, VersionConfig):
    """Describe a public model, and copy its tokens to the store if a vocabulary keeps them."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.LEDGER})
    step: Literal["checkpoint"] = "checkpoint"
    public_model: str  # a Hugging Face folder
    keeps_tokens: bool = True

    @property
    def sources(self) -> tuple[Source, ...]:
        """The public model."""
        return (Source(field="public_model", uri=self.public_model, public=True),)


class VocabularySpec(StepSpec, HoldoutConfig, SeedConfig):
    """Make the vocabulary from public words, released private words or a checkpoint's tokens.

    The step is charged if it releases private words. The spec names an input only if the word
    source reads it, so that a vocabulary of public text cannot open the private corpus.
    """

    # for a source of private words
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING, Need.CLUSTER})
    code: ClassVar[tuple[str, ...]] = (
        "dp_core.vocabulary.partition_selection",
        "dp_core.data.privacy_units",
        "dp_core.vocabulary.subwords",  # how texts are split into the words that are counted
    )
    step: Literal["vocabulary"] = "vocabulary"
    corpus_uri: str = ""  # the private corpus
    public_corpus_uri: str = ""
    checkpoint_uri: str = ""
    dataset: str  # the private data set
    subwords: Literal["wordpiece", "byte-level-bpe"] = "wordpiece"
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
        """The privileges that the step receives with its source of words."""
        if not self.config.reads_private_text:
            return frozenset({Need.CLUSTER})
        return self.privileges

    @property
    def charges(self) -> bool:
        """Whether the step makes a release of private data with a guarantee."""
        return self.config.releases_private_words


class CanariesSpec(StepSpec, SeedConfig):
    """Draw canaries from the released vocabulary with public randomness."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["canaries"] = "canaries"
    vocabulary_uri: str
    config: CanaryConfig


class PhrasesSpec(StepSpec, HoldoutConfig, SeedConfig):
    """Release phrases that many units share. The step is charged."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING, Need.CLUSTER})
    code: ClassVar[tuple[str, ...]] = (
        "dp_core.vocabulary.ngram_release",
        "dp_core.vocabulary.partition_selection",  # how a round releases
        "dp_core.data.privacy_units",
        "dp_core.audit.canaries",  # which units carry a canary
    )
    step: Literal["phrases"] = "phrases"
    corpus_uri: str
    vocabulary_uri: str
    canaries_uri: str = ""
    dataset: str
    config: PhrasesConfig

    @property
    def charges(self) -> bool:
        """Whether the step makes a release of private data with a guarantee."""
        return True


class WrittenTextSpec(StepSpec, SeedConfig):
    """Write a corpus from released phrases and words, mixed with public documents."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    step: Literal["written_text"] = "written_text"
    phrases_uri: str
    vocabulary_uri: str  # its released words are also written, each separately
    public_corpus_uri: str = ""  # empty: only written text
    config: WrittenTextConfig


class TokenStoreSpec(StepSpec, AuditCanariesConfig, HoldoutConfig, SeedConfig):
    """Divide a corpus into rows of token ids by unit, and plant canaries if there are any.

    Audit canaries, if any, are additional units in a separate store.
    """

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CLUSTER})
    step: Literal["token_store"] = "token_store"
    corpus_uri: str
    vocabulary_uri: str
    canaries_uri: str = ""
    units: UnitConfig | None  # None: public or written text, by document, undeclared
    rows: RowsConfig

    @property
    def role(self) -> Literal["private", "public"]:
        """Whether the text is private: it is if it has units to protect."""
        return "private" if self.units else "public"

    @model_validator(mode="after")
    def _audits_private_rows(self) -> Self:
        if self.audit_canaries and not self.units:
            raise ValueError("audit_canaries: only a training on private rows is audited")
        return self


class ChargedPrivacyConfig(PrivacyConfig, AuditCanariesConfig):
    """Privacy settings of a training that is charged, and the data set in the ledger."""

    dataset: str

    @property
    def all_units(self) -> int:
        """Declared units of the plan: the private units and all audit canaries, in or out."""
        return self.declared_units + self.audit_canaries


class ClippedConfig(Config):
    """Clipping, and noise of any size, of a training without a guarantee."""

    clip_norm: ClipNorm
    noise_multiplier: float = Field(ge=0, le=1000)


class CalibrationTarget(Config):
    """The ε of a private training together with other releases of its data set, instead of σ."""

    epsilon: float  # at the sum of the releases' δ
    alongside: tuple[VocabularySpec | PhrasesSpec, ...] = ()


class TrainingSpec(StepSpec, RunConfig):
    """The settings that pre-training and fine-tuning share."""

    unhashed: ClassVar[dict[str, Any]] = {"training": set(CheckpointConfig.model_fields)}

    training: TrainingConfig
    batches: BatchConfig
    updates: int
    plan: ChargedPrivacyConfig | None = None  # of a charged training
    target: CalibrationTarget | None = None  # from which the plan's σ is calibrated
    # Fine-tunings whose F1 an optimiser used to choose the settings; the output depends on them.
    after: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _batches_have_time_to_grow(self) -> Self:
        refuse_impossible_updates(self.batches, self.plan, self.updates)
        if self.target and (self.plan is None or self.plan.noise_multiplier is not None):
            raise ValueError("target: replaces the noise multiplier of a private training")
        return self

    @property
    def charges(self) -> bool:
        """Whether the step makes a release of private data with a guarantee."""
        return self.plan is not None

    @property
    def private_plan(self) -> ChargedPrivacyConfig:
        """The plan of a training that is charged."""
        assert self.plan is not None  # noqa: S101 - narrows the type
        return self.plan


class Asked(Config):
    """Bounds on the privacy cost of a training that an optimiser chooses.

    The bounds are fixed before the first choice. A training with more noise or fewer updates is
    post-processing of a training at the bounds, however its settings were chosen. Each chosen
    training is therefore charged as one at the bounds, in an entry registered before the sweep.
    """

    search: str  # id of the search; another search has other entries
    number: int = Field(ge=0)  # of the entry
    least_noise_multiplier: float
    most_updates: int


class PretrainSpec(TrainingSpec):
    """Language-model pre-training on public or released text, with DP, or without privacy.

    The spec also holds the settings of later extraction attacks and passes them on, so that attacks
    fixed before the training can be distinguished from later ones. They do not change the model.
    """

    unhashed: ClassVar[dict[str, Any]] = TrainingSpec.unhashed | {"extraction": True}

    # for training on private rows
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING, Need.CLUSTER})
    code: ClassVar[tuple[str, ...]] = _CODE_OF_TRAINING
    step: Literal["pretrain"] = "pretrain"
    mode: Literal["public", "released", "dp", "nonprivate"]
    store_uri: str
    public_store_uri: str  # its held-out part measures every model's MLM accuracy
    private_store_uri: str  # likewise, for the operator
    vocabulary_uri: str
    init_uri: str = ""  # empty: an external public model, or a fresh one from `seed`
    public_model: str = ""  # initial Hugging Face folder, in mode `public` only
    shape: ArchitectureConfig
    extraction: ExtractionConfig = ExtractionConfig()
    # Of the held-out private units; hashed only if it is set, here and in a selection's candidates.
    development_share: float = Field(0.0, ge=0, le=0.9, exclude_if=lambda share: share == 0)
    asked: Asked | None = None  # bounds if an optimiser chose it
    kept_updates: tuple[int, ...] = ()  # updates after which a model is kept, besides the last
    clipped: ClippedConfig | None = None  # of a training without privacy; its ε stays infinite

    @property
    def charged_as(self) -> PretrainSpec:
        """The training that is charged: this one, or the costliest that an optimiser may choose."""
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
        """The initial public model, if it is outside the store."""
        if not self.public_model:
            return ()
        return (Source(field="public_model", uri=self.public_model, public=True),)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        # A step that reads files from outside may not hold a seed.
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
        if kept != tuple(sorted(set(kept))) or not all(0 < n < self.updates for n in kept):
            raise ValueError("kept_updates: they must rise, and lie below updates")
        if self.asked:
            self._refuse_beyond_the_bounds(self.asked)
        if self.clipped and (self.mode != "nonprivate" or self.plan):
            raise ValueError("clipped: clipping without a guarantee is no training with DP")
        return self

    def _refuse_beyond_the_bounds(self, asked: Asked) -> None:
        if self.plan is None:
            raise ValueError("asked: only a training with DP is charged")
        if self.kept_updates:
            raise ValueError("asked: of an asked training the last model alone is released")
        if (self.plan.noise_multiplier or 0.0) < asked.least_noise_multiplier:
            raise ValueError("asked: less noise than what is charged has")
        if self.updates > asked.most_updates:
            raise ValueError("asked: more updates than what is charged has")
        updates = (self.plan.sampling, self.plan.noise_bands, self.batches.first_batch_size)
        if updates != ("poisson", 1, 0):
            raise ValueError(
                "asked: updates must be alike: sampling=poisson, noise_bands=1, "
                "first_batch_size=0, or fewer of them would be another mechanism"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """The privileges that the step receives in this mode."""
        if self.mode == "public":
            # An external model is parsed, and the ledger holds the operator's declaration.
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
        sigma = self.plan.noise_multiplier  # None: it follows from the target
        return sizes | ({} if sigma is None else {"σ": sigma})


class OfModelSpec(StepSpec):
    """A step that reads one of the models that a training has kept."""

    model_uri: str
    model_updates: int = Field(default=0, ge=0)  # updates of a kept model; 0: the last model


class FinetuneSpec(TrainingSpec, OfModelSpec, SequenceConfig, TaggingConfig):
    """Fine-tune a model with a head, and score it by strict entity F1 or by accuracy.

    The step is charged if the labels are private and it has a plan.
    """

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    code: ClassVar[tuple[str, ...]] = (
        "dp_core.training.finetune",
        "dp_core.training.heads",
        "dp_core.vocabulary.tokenizer_files",
    )
    step: Literal["finetune"] = "finetune"
    entities_uri: str
    updates: int = 0  # used with a plan; otherwise `epochs` is used
    entity_types: tuple[str, ...] = ()  # learned and scored; empty: all in the training part
    class_names: tuple[str, ...] = ()  # likewise, for the other heads
    epochs: int
    folds: int = 0  # of the labelled documents or patients; 0: a separate test part
    fold: int = 0  # the test fold, from 0

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not 0 <= self.fold < max(1, self.folds):
            raise ValueError(f"fold: {self.fold} is none of {self.folds}")
        if self.batches.maskings_per_example > 1:
            raise ValueError("maskings_per_example: fine-tuning masks nothing")
        if self.plan and self.plan.audit_canaries:
            raise ValueError("audit_canaries: only pre-training is audited")
        if self.plan and not self.label_names:
            raise ValueError("entity_types, class_names: private fine-tuning needs its labels")
        if self.plan and self.plan.unit == "example" and self.tagging_context == "document":
            raise ValueError("tagging_context: a row holds sentences of a whole document")
        return self

    @property
    def label_names(self) -> tuple[str, ...]:
        """The entity types or classes that are public knowledge, or empty."""
        return self.entity_types if self.head == "entities" else self.class_names


class SelectSpec(StepSpec):
    """Train a secret random number of drawn candidates and keep the best, for one charge."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    hides_duration: ClassVar[bool] = True  # it grows with the secret number of trainings
    code: ClassVar[tuple[str, ...]] = (
        *_CODE_OF_TRAINING,
        "dp_core.privacy.private_selection",
        "dp_core.training.objectives",  # the score decides which training is released
    )
    step: Literal["select"] = "select"
    candidates: tuple[PretrainSpec, ...]  # the declared, public list of DP trainings
    selection: SelectionConfig

    @model_validator(mode="after")
    def _releases_one_model(self) -> Self:
        if any(candidate.kept_updates for candidate in self.candidates):
            raise ValueError("kept_updates: a selection releases its best model alone")
        varied = {"plan", "training", "batches", "updates"}
        first, *others = (candidate.model_dump(exclude=varied) for candidate in self.candidates)
        if any(other != first for other in others):
            raise ValueError("candidates: they may differ only in plan, training and batches")
        if self.candidates[0].mode != "dp" or not self.candidates[0].init_uri:
            raise ValueError("candidates: must be DP trainings of a public model")
        if any(candidate.training.time_box_minutes for candidate in self.candidates):
            # Each restart is logged, so restarts would reveal the number of trainings.
            raise ValueError("time_box_minutes: a selection by a secret count has no time box")
        return self

    @property
    def delta(self) -> float:
        """δ at which the selection is charged, equal to the δ of each training."""
        return self.candidates[0].private_plan.delta

    def hashed(self) -> dict[str, Any]:
        """Return the hashes of the candidates in place of their specs."""
        return super().hashed() | {"candidates": [spec.digest() for spec in self.candidates]}

    @property
    def charges(self) -> bool:
        """Whether the step makes a release of private data with a guarantee."""
        return True

    @property
    def hides_count(self) -> bool:
        """Whether the number of trainings is secret, which it is on private data."""
        return not self.made_up


Charged = VocabularySpec | PhrasesSpec | PretrainSpec | FinetuneSpec | SelectSpec


class ChargedStepsSpec(StepSpec):
    """A step that reads all charged steps of a run. It runs in every run (`repeated`)."""

    repeated: ClassVar[bool] = True
    charged: tuple[Charged, ...]

    def hashed(self) -> dict[str, Any]:
        """Return the hashes of the charged steps in place of their specs."""
        return super().hashed() | {"charged": [spec.digest() for spec in self.charged]}


class BudgetSpec(ChargedStepsSpec):
    """Record the sources of a run, and refuse a run that exceeds its budgets."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES, Need.CHARGING})
    step: Literal["budget"] = "budget"
    reads: tuple[Source, ...] = ()  # the sources outside the store, each once

    @property
    def called_public(self) -> tuple[Source, ...]:
        """The sources that the run claims are public, which the operator must have declared."""
        return tuple(source for source in self.reads if source.public)


class ReserveSpec(ChargedStepsSpec):
    """Check a run's public model, text and labels, then register its releases, if they all fit."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    step: Literal["reserve"] = "reserve"
    corpus_uri: str
    units: UnitConfig  # of the private corpus
    entities_uri: str = ""  # empty without fine-tuning
    learned: FinetuneSpec | None = None  # a fine-tuning on private labels without privacy, if any
    checkpoint_uri: str = ""  # empty without a public model
    # The checkpoints that a sweep compares: setting and folder -> output.
    compared: dict[str, str] = Field({}, exclude_if=lambda checkpoints: not checkpoints)
    shape: ArchitectureConfig = ArchitectureConfig()  # as the settings state it
    row_tokens: int = 0
    public_updates: int = 0


class GiveBackSpec(StepSpec):
    """Give back the plans that a run registered, if none of their releases has begun."""

    repeated: ClassVar[bool] = True
    follows_run: ClassVar[bool] = True
    privileges: ClassVar[frozenset[Need]] = frozenset({Need.CHARGING})
    step: Literal["give_back"] = "give_back"


class ReportSpec(StepSpec):
    """Collect the results of a job or a sweep on one page, and judge and register its models."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.LEDGER})  # the report shows the account
    ends_run: ClassVar[bool] = True
    unhashed: ClassVar[dict[str, Any]] = {"private_paths": True}  # they follow from the settings
    step: Literal["report"] = "report"
    title: str
    results: dict[str, str]  # name of the step -> output URI
    points: dict[str, Point]  # the models, by name
    promotion: Promotion = "audited"
    settings: dict[str, bool | int | float | str]
    private_paths: tuple[str, ...] = ()  # settings that name files of private text

    @property
    def is_sweep(self) -> bool:
        """Whether the models are the points of a sweep."""
        return self.title == "dp_sweep"

    @property
    def run_settings(self) -> dict[str, bool | int | float | str]:
        """The settings of the whole run, without the paths of private text."""
        return self.settings | dict.fromkeys(self.private_paths, "withheld")

    @property
    def hides_count(self) -> bool:
        """Whether the run selects among a secret number of trainings."""
        return not self.made_up and self.settings.get("selection") == "random-count"


class PrivacyAuditSpec(StepSpec, BlackBoxAuditConfig):
    """Audit one model as a black box, with canaries and texts from outside the store."""

    privileges: ClassVar[frozenset[Need]] = frozenset({Need.SOURCES})
    ends_run: ClassVar[bool] = True
    step: Literal["privacy_audit"] = "privacy_audit"

    @property
    def model_uri(self) -> str:
        """Address of the model if it is an output of the store, or empty if it is a folder."""
        return self.audited_model if self.audited_model.startswith(STORE_SCHEME) else ""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files, and the model unless it is in the store."""
        named = {name: str(getattr(self, name)) for name in paths(BlackBoxAuditConfig)}
        if self.model_uri:
            del named["audited_model"]
        return tuple(
            Source(field=name, uri=uri, public=False) for name, uri in named.items() if uri
        )


class PromoteSpec(StepSpec):
    """Give a job's model the alias `promotable` after a person has approved it."""

    privileges: ClassVar[frozenset[Need]] = frozenset()
    ends_run: ClassVar[bool] = True
    step: Literal["promote"] = "promote"
    report_uri: str
