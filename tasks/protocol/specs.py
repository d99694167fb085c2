"""The part that every step spec shares: version, hash, and where the output goes."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator


class Frozen(BaseModel):
    """A value object: immutable, and unknown fields are refused rather than ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunContext(Frozen):
    """Which run a step belongs to. Never hashed: the same work in another run is the same work."""

    run_key: str  # one MLflow parent run per key: the DAG run's id
    run_name: str
    task: str  # the task's name within the run, for example `dp_pretraining`
    point: str = ""  # the sweep point's name, empty outside sweeps


class Source(Frozen):
    """A file or folder outside the store that a step reads."""

    field: str  # the setting that names it
    uri: str
    public: bool  # the spec says so; only the operator's declaration in the ledger makes it true
    dataset: str = ""  # whose text it is; empty for what belongs to no data set


class StepSpec(Frozen):
    """What one step is told. Subclasses add the fields; `step` names them in JSON."""

    version: ClassVar[int] = 2  # of version 1, results named no use without a guarantee
    unhashed: ClassVar[frozenset[str]] = frozenset()  # fields that no output depends on

    step: str
    root: str  # URI of the store under which every output has its own folder
    made_up: bool  # every input is made up or public: nothing needs hiding

    def digest(self) -> str:
        """Return the spec hash: SHA-256 over everything that determines the output, in hex."""
        body = {"version": self.version, **self.hashed()}
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def hashed(self) -> dict[str, Any]:
        """Return what the output depends on, as plain JSON data."""
        return self.model_dump(mode="json", exclude=set(self.unhashed))

    @property
    def sources(self) -> tuple[Source, ...]:
        """What the step reads from outside, and whether it calls it public."""
        return ()

    @property
    def output(self) -> str:
        """URI of the folder that this step, and no other, writes."""
        return f"{self.root}/{self.step}/{self.digest()[:16]}"


Unit = Literal["example", "document", "patient"]
CAUSAL = "gpt2"  # the kind of model that reads from left to right
NeighboringRelation = Literal["add-or-remove-one", "zero-out-one", "replace-one"]


class CorpusSpec(StepSpec):
    """Read a corpus, group it by privacy unit, and keep it in one normal form."""

    version: ClassVar[int] = 2  # results of version 1 were read as public on a job's word

    step: Literal["corpus"] = "corpus"
    role: Literal["private", "public"]
    format: Literal["synthetic", "text", "jsonl", "noteevents"]
    path: str
    fields: tuple[str, str, str] = ("text", "document_id", "patient_id")  # of jsonl
    dataset: str
    data_version: str
    synthetic_patients: int
    seed: int

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


class EntitiesSpec(StepSpec):
    """Read sentences with entity labels: a training and a test part."""

    version: ClassVar[int] = 2  # as of CorpusSpec

    step: Literal["entities"] = "entities"
    format: Literal["synthetic", "i2b2", "columns", "pubtator"]
    public: bool  # the labels may be shown; else F1 on them is the operator's
    dataset: str = ""  # to which uses of private labels are charged; empty if they are public
    unit: Unit = "patient"
    train_path: str
    test_path: str
    patients_path: str = ""  # which patient each training document is of; empty: nobody says
    data_version: str
    seed: int

    @property
    def sources(self) -> tuple[Source, ...]:
        """Both parts, and the list of patients, unless they are of the project's own making."""
        if self.format == "synthetic":
            return ()
        public = self.made_up or self.public
        own = "" if self.public else self.dataset
        places = {"train": self.train_path, "test": self.test_path, "patients": self.patients_path}
        return tuple(
            Source(field=f"entities_{part}", uri=uri, public=public, dataset=own)
            for part, uri in places.items()
            if uri
        )


class VocabularySpec(StepSpec):
    """Release a noised word histogram and learn WordPiece from it alone. Charged."""

    step: Literal["vocabulary"] = "vocabulary"
    corpus_uri: str
    dataset: str
    unit: Unit
    declared_units: int
    words_per_unit: int
    epsilon: float
    delta: float
    relation: NeighboringRelation = "add-or-remove-one"  # under which it is charged: the training's
    size: int


class CanariesSpec(StepSpec):
    """Draw canaries from the released vocabulary with public coins."""

    step: Literal["canaries"] = "canaries"
    vocabulary_uri: str
    patterns: tuple[str, ...]
    rates: tuple[float, ...]
    per_group: int
    seed: int


class TokenStoreSpec(StepSpec):
    """Cut a corpus into rows of token ids, by unit, with canaries planted where they are given."""

    step: Literal["token_store"] = "token_store"
    corpus_uri: str
    vocabulary_uri: str
    canaries_uri: str = ""
    role: Literal["private", "public"]
    unit: Unit
    sequence_length: int
    words_per_unit: int
    max_examples_per_unit: int
    declared_units: int  # 0 for public text: nothing is declared
    holdout: float  # share of units kept out for measuring
    seed: int


class ModelShape(Frozen):
    """The model's architecture and size."""

    layers: int
    hidden: int
    kind: Literal["bert", "distilbert", "gpt2"] = "bert"


class PrivacyPlan(Frozen):
    """The numbers that become a `dp_core.privacy.execution_plan.ExecutionPlan`."""

    dataset: str
    unit: Unit
    declared_units: int
    noise_multiplier: float
    clip_norm: float
    delta: float
    examples_per_step: int
    sampling: Literal["poisson", "truncated-poisson"] = "poisson"
    batch_cap: int = 0  # truncated-poisson only
    clip_quantile: float | None = None  # adaptive clipping's; None keeps the clip norm


class PretrainSpec(StepSpec):
    """Language-model pre-training: on public text, with DP, or without privacy."""

    unhashed: ClassVar[frozenset[str]] = frozenset({"keep_checkpoints", "time_box_minutes"})

    step: Literal["pretrain"] = "pretrain"
    mode: Literal["public", "dp", "nonprivate"]
    store_uri: str
    public_store_uri: str  # its held-out part measures every model's MLM accuracy
    private_store_uri: str  # likewise, for the operator
    vocabulary_uri: str
    init_uri: str = ""  # empty: a public model from elsewhere, or a fresh one from `seed`
    public_model: str = ""  # mode `public` only: a Hugging Face folder to start from
    shape: ModelShape
    plan: PrivacyPlan | None = None  # with mode `dp` only; charged
    examples_per_step: int
    batch_size: int
    updates: int
    learning_rate: float
    first_batch_size: int = 0  # 0: all batches have one size
    weight_decay: float = 0.01
    decay_power: float = 1.0
    whole_words: bool = False
    clipping: Literal["flat", "automatic"] = "flat"
    engine: Literal["book-keeping", "tensorflow-privacy", "naive"] = "book-keeping"
    precision: Literal["float32", "bfloat16"] = "float32"
    keep_checkpoints: int = 2
    time_box_minutes: float = 0.0  # 0: none; a run that it ends goes on when it is run again
    device: str
    seed: int

    @property
    def sources(self) -> tuple[Source, ...]:
        """The public model that it starts from, if it comes from elsewhere."""
        if not self.public_model:
            return ()
        return (Source(field="public_model", uri=self.public_model, public=True),)

    @model_validator(mode="after")
    def _who_holds_seeds_reads_no_files_from_outside(self) -> Self:
        if self.public_model and self.mode != "public":
            raise ValueError("public_model: only public pre-training starts from files")
        return self

    @model_validator(mode="after")
    def _masks_only_where_there_are_masks(self) -> Self:
        if self.shape.kind == CAUSAL and self.whole_words:
            raise ValueError("whole_words: a causal model (gpt2) masks nothing")
        return self


class FinetuneSpec(StepSpec):
    """Fine-tune a model for entity extraction and score it by strict entity F1.

    Charged where the labels are private and there is a plan.
    """

    unhashed: ClassVar[frozenset[str]] = frozenset({"keep_checkpoints", "time_box_minutes"})

    step: Literal["finetune"] = "finetune"
    model_uri: str
    entities_uri: str
    plan: PrivacyPlan | None = None
    entity_types: tuple[str, ...] = ()  # public; with a plan only
    updates: int = 0  # with a plan; else epochs say it
    keep_checkpoints: int = 2
    time_box_minutes: float = 0.0
    epochs: int
    batch_size: int
    learning_rate: float
    sequence_length: int
    device: str
    seed: int


class SelectSpec(StepSpec):
    """Train a secret random number of drawn candidates; keep the best. One charge for all."""

    step: Literal["select"] = "select"
    candidates: tuple[PretrainSpec, ...]  # the declared, public list: mode `dp`, alike but in plan
    law: Literal["geometric", "logarithmic", "poisson"]
    mean: float  # E[K]
    delta: float

    def hashed(self) -> dict[str, Any]:
        """Return the hashes of the candidates in place of their specs."""
        return super().hashed() | {"candidates": [spec.digest() for spec in self.candidates]}


class BudgetSpec(StepSpec):
    """Register every charged release of a run at once, before the first: all of it, or none."""

    step: Literal["budget"] = "budget"
    charged: tuple[VocabularySpec | PretrainSpec | FinetuneSpec | SelectSpec, ...]
    reads: tuple[Source, ...] = ()  # what the run reads from outside, each once

    @property
    def called_public(self) -> tuple[Source, ...]:
        """What the run calls public: refused here if undeclared, before anything is charged."""
        return tuple(source for source in self.reads if source.public)

    def hashed(self) -> dict[str, Any]:
        """Return the hashes of the charged steps in place of their specs."""
        return super().hashed() | {"charged": [spec.digest() for spec in self.charged]}


class ExposureSpec(StepSpec):
    """Measure how well a model remembers the canaries."""

    step: Literal["exposure"] = "exposure"
    model_uri: str
    canaries_uri: str
    private_store_uri: str
    device: str
    seed: int


class ReportSpec(StepSpec):
    """Gather the results of a job into one self-contained page."""

    version: ClassVar[int] = 3  # earlier pages left private fine-tuning out of ε

    step: Literal["report"] = "report"
    title: str
    results: dict[str, str]  # task name -> output URI
    settings: dict[str, bool | int | float | str]


class SweepReportSpec(StepSpec):
    """Gather the results of a sweep: the paper's Fig. 1."""

    version: ClassVar[int] = 3  # earlier pages left private fine-tuning out of ε

    step: Literal["sweep_report"] = "sweep_report"
    title: str
    points: dict[str, dict[str, float]]  # point name -> its coordinates
    results: dict[str, dict[str, str]]  # point name -> task name -> output URI
    settings: dict[str, bool | int | float | str]


AnySpec = Annotated[
    BudgetSpec
    | CorpusSpec
    | EntitiesSpec
    | VocabularySpec
    | CanariesSpec
    | TokenStoreSpec
    | PretrainSpec
    | FinetuneSpec
    | ExposureSpec
    | ReportSpec
    | SelectSpec
    | SweepReportSpec,
    Field(discriminator="step"),
]
_ADAPTER: TypeAdapter[AnySpec] = TypeAdapter(AnySpec)


def spec_from_json(text: str | bytes) -> AnySpec:
    """Return the spec written as JSON.

    Raises:
        pydantic.ValidationError: not a spec of a known step; `one_line` makes it readable.
    """
    return _ADAPTER.validate_json(text)
