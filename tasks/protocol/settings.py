"""The user's settings of a job, for Airflow's trigger form and the command line.

The JSON schema of these models is the trigger form. `dp_core.config` declares the settings of the
algorithms. This module adds the data, the comparison and the fine-tuning of a job, and the rules
that combine several groups of settings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ValidationError, model_validator

from dp_core.config.audit_settings import (
    AuditCanariesConfig,
    ExtractionConfig,
    MembershipConfig,
    SamplesConfig,
)
from dp_core.config.data import CanaryConfig, HoldoutConfig, ReaderConfig, RowsConfig, TagScheme
from dp_core.config.fields import (
    CLASSES_OR_NONE,
    COLUMNS_OR_NONE,
    ESSENTIALS,
    MORE_DATA,
    MORE_TRAINING,
    NAME,
    NAME_OR_NONE,
    NUMBERS_OR_NONE,
    POINTS_OR_NONE,
    PRIVATE_LABELS,
    TYPES_OR_NONE,
    later,
    listed_points,
    numbers,
    one_line,
    setting,
)
from dp_core.config.privacy import (
    LEAST_BYTE_LEVEL,
    LEAST_EPSILON,
    LEAST_UNITS,
    MOST_EPSILON,
    ClipNorm,
    Delta,
    NoiseMultiplier,
    PhrasesConfig,
    PrivacyConfig,
    UnitName,
    VocabularyConfig,
    WrittenTextConfig,
)
from dp_core.config.training import (
    ArchitectureConfig,
    BatchConfig,
    BatchSize,
    LearningRate,
    OptimizerConfig,
    RunConfig,
    TaggingConfig,
    TrainingConfig,
    is_causal,
    refuse_impossible_updates,
    refuse_masks,
)
from tasks.protocol.defaults import (
    FINE_TUNING,
    LEAST_AUDITED_UNITS,
    MOST_AUDIT_CANARIES,
    could_contradict,
    private_labels,
    with_defaults,
)
from tasks.protocol.points import Mode, Point

MADE_UP = "synthetic-notes"
PublicFormat = Literal["synthetic", "text", "csv", "parquet", "jsonl"]
PrivateFormat = Literal[PublicFormat, "noteevents"]
EntitiesFormat = Literal[
    "none", "synthetic", "i2b2", "i2b2-2012", "columns", "brat", "pubtator", "jsonl", "tsv"
]
PAGE = 256  # points of one Airflow run: Airflow maps 1,024 tasks, and a point has 4 measurements
EMPTY = tuple(with_defaults({}, audited=True))  # settings that are left empty by default
MORE = ("noise_multiplier", "batch_size", "epochs", "private_start")  # settings of more_trainings
_OF_LABELS = (*TaggingConfig.model_fields, "entity_types", "class_names")
CLASS_FORMATS = ("jsonl", "tsv")  # for texts with a class; other formats hold entities


class DataSettings(ReaderConfig, HoldoutConfig, section=ESSENTIALS):
    """Settings of the private corpus, the public corpus and the labelled text.

    Attributes:
        private_format: synthetic: the project's made-up notes; text: .txt files, in a folder per
            patient; csv (also .tsv), parquet and jsonl (a JSON object per line): tables whose
            columns private_columns names; noteevents: CSV like MIMIC-III's NOTEEVENTS. Files may be
            .gz or .xz.
        private_path: File or folder (local or gs://); empty for synthetic.
        private_columns: Columns of a table: text:NoteText,patient:PatNr,document:DocId,date:Datum;
            of csv also delimiter:semicolon and encoding:windows-1252. Common names of other roles
            are recognised, and the header shows the delimiter. `confide init FILE` proposes them.
        private_dataset: Its name in the privacy ledger: every release of it is charged to this
            name.
        public_format: synthetic, text, csv, parquet or jsonl, as for the private corpus; it needs
            no privacy. synthetic: made-up text, which teaches a model little of real language.
        public_path: File or folder (local or gs://) that is declared public; empty for synthetic.
        public_columns: Columns of a public table, as private_columns.
        entities_format: With entities: i2b2 (folders of .txt and .con, 2010 and 2011, or .extent,
            2012), i2b2-2012 (.xml), columns (token and tag, also .conll, .txt, .iob and .bio), brat
            (folders of .txt and .ann) or pubtator. With classes and pairs: jsonl or tsv, with the
            fields text and label, or sentence1, sentence2 and gold_label, and optionally
            document_id and patient_id. none: no model is fine-tuned. Empty: made-up labels with
            the made-up private corpus, otherwise none.
        entities_scheme: Scheme of the tags in columns: iob1, iob2, iobes, bilou or bios; other tags
            are refused. auto: each of these; the list of items set aside names the scheme.
        entities_train: File or folder (local or gs://) of labelled text to learn from; empty for
            synthetic.
        entities_test: File or folder (local or gs://) of labelled text for F1 or accuracy; empty
            for synthetic.
        entities_folds: Number of folds of the labelled documents of entities_train, by the hash of
            the document's or patient's name. A job is tested on the first fold and learns from the
            others; a sweep takes each in turn. 0: no folds, but a separate test path.
        entities_patients: File (.csv or .tsv, local or gs://) with the patient of each training
            document, for private fine-tuning of patients if texts do not name them (patient_id).
            Documents are named in i2b2, i2b2-2012 and brat by path without suffix, in pubtator by
            id, in columns by path and #0 (#1 if -DOCSTART- begins the file), in jsonl and tsv by
            document_id.
        entities_dataset: Its name in the privacy ledger if the labels are private; empty: the
            private data set.
        entities_public: Whether both label files are declared public; otherwise F1 on them is for
            the operator.
        development_share: Share of the held-out private units on which the operator compares
            settings; predictions of private text are then reported on the other held-out units, and
            separately on these. 0: all held-out units are one part.
        all_public: Whether the operator has declared all corpora and labels public, and registered
            the data set so; nothing is then hidden. A run without these declarations is refused.
    """

    private_format: PrivateFormat = setting("synthetic", "Private corpus: format")
    private_path: str = setting("", "Private corpus: path", path=True)
    private_columns: str = setting("", "Private corpus: columns", pattern=COLUMNS_OR_NONE)
    private_dataset: str = setting(MADE_UP, "Private data set", pattern=NAME)
    public_format: PublicFormat = setting("synthetic", "Public corpus: format")
    public_path: str = setting("", "Public corpus: path", path=True)
    public_columns: str = setting(
        "", "Public corpus: columns", section=MORE_DATA, pattern=COLUMNS_OR_NONE
    )
    entities_format: EntitiesFormat = setting("synthetic", "Labelled text: format")
    entities_scheme: Literal["auto", TagScheme] = setting(
        "auto", "Labelled text: tags", section=MORE_DATA
    )
    entities_train: str = setting("", "Labelled text: training path", path=True)
    entities_test: str = setting("", "Labelled text: test path", path=True)
    entities_folds: int = setting(0, "Labelled text: folds", section=MORE_DATA, ge=0, le=100)
    entities_patients: str = setting("", "Labelled text: patients", section=MORE_DATA, path=True)
    entities_dataset: str = setting(
        "", "Labelled text: data set", section=MORE_DATA, pattern=NAME_OR_NONE
    )
    entities_public: bool = setting(False, "Labelled text: public", section=MORE_DATA)
    development_share: float = later(0.0, "Development share", section=MORE_DATA, ge=0, le=0.9)
    all_public: bool = setting(False, "Everything may be shown", section=MORE_DATA)

    @property
    def entities_shown(self) -> bool:
        """Whether no labelled text is private: it is public, synthetic, or there is none."""
        return self.all_public or self.entities_public or self._makes_up_labels

    @property
    def entities_charged_to(self) -> str:
        """The ledger's data set for private labels, or empty if they are public or synthetic."""
        if self.entities_shown:
            return ""
        private = self.private_dataset if self.private_format != "synthetic" else ""
        return self.entities_dataset or private or "private-labels"

    @property
    def made_up(self) -> bool:
        """Whether the run declares every input synthetic or public; the ledger must agree."""
        return self.all_public or (self.private_format == "synthetic" and self._makes_up_labels)

    @property
    def _makes_up_labels(self) -> bool:
        """Whether no file of labels is read: they are made up, or there are none."""
        return self.entities_format in ("none", "synthetic")

    @model_validator(mode="after")
    def _settings_of_labels_have_labels(self) -> Self:
        fields = type(self).model_fields
        changed = [
            name
            for name in fields
            if (name in _OF_LABELS or name.startswith(("entities_", "finetune_")))
            and name != "entities_format"
            and getattr(self, name) not in (fields[name].default, FINE_TUNING.get(name))
        ]
        if changed and self.entities_format == "none":
            raise ValueError(
                f"{', '.join(changed)}: no labelled text is read: give its entities_format and "
                "paths, or leave these settings out"
            )
        return self

    @model_validator(mode="after")
    def _paths_belong_to_formats(self) -> Self:
        if self.entities_folds == 1:
            raise ValueError("entities_folds: one fold leaves nothing to learn from; 2 or more")
        if self.entities_folds and self.entities_test:
            raise ValueError(
                "entities_folds: folds are made within entities_train; leave entities_test empty"
            )
        labels = ["entities_train"] if self.entities_folds else ["entities_train", "entities_test"]
        names = {"private": ["private_path"], "public": ["public_path"], "entities": labels}
        for kind, paths in names.items():
            fmt, given = getattr(self, f"{kind}_format"), [getattr(self, path) for path in paths]
            if fmt not in ("synthetic", "none") and not all(given):
                raise ValueError(f"{kind}_format: {fmt} needs {' and '.join(paths)}")
            if fmt in ("synthetic", "none") and any(given):
                raise ValueError(f"{kind}_format: {fmt} takes no {' or '.join(paths)}")
        if self.entities_format == "synthetic" and self.entities_patients:
            raise ValueError("entities: format synthetic takes no list of patients")
        if self.private_format == "synthetic" and self.private_dataset != MADE_UP:
            raise ValueError(f"the synthetic corpus is the data set {MADE_UP!r}")
        if self.private_format != "synthetic" and self.private_dataset == MADE_UP:
            raise ValueError(f"private_dataset must name your data set: {MADE_UP!r} is made up")
        if self.entities_dataset and self.entities_shown:
            raise ValueError("entities_dataset: public or made-up labels are charged to nobody")
        if self.entities_dataset == MADE_UP:
            raise ValueError(f"entities_dataset must name your data set: {MADE_UP!r} is made up")
        return self


class FinetuneSettings(TaggingConfig, DataSettings, section=PRIVATE_LABELS):
    """Settings of fine-tuning. On private labels it uses DP-SGD and is charged separately.

    Attributes:
        finetune_privacy: none: a model fine-tuned on private labels stays with the operator. dp:
            the DP model is fine-tuned by DP-SGD, charged, and may be released (its F1 on private
            sentences may not).
        entities_unit: Unit that private fine-tuning protects. example: a sentence or text;
            document: texts with the same document_id, or else the same first text; patient: needs
            patient_id in the texts, or entities_patients. Labels charged to the private data set
            have its unit.
        entities_declared_units: A public upper bound on the labelled units, not derived from the
            texts; 0 without labels.
        entity_types: Entities that are learned and scored, comma-separated; empty: all in the
            training part. Private fine-tuning needs them from public knowledge, because the types
            that occur are private.
        class_names: Classes that are learned and scored, comma-separated; other texts are left out.
            Empty: all in the training part. Private fine-tuning needs them from public knowledge.
        finetune_epsilon: ε of the private fine-tuning of one model at finetune_delta, to which its
            σ is calibrated. Empty: finetune_noise_multiplier holds.
        finetune_noise_multiplier: Effective noise of one update of private fine-tuning, in units of
            its clip norm. Empty: 1; with public_model 2.75; or calibrated to finetune_epsilon.
        finetune_clip_norm: Bound on one unit's gradient in private fine-tuning. Empty: 1; with
            public_model 0.1.
        finetune_delta: δ of private fine-tuning; far below one divided by the number of units with
            labels.
        finetune_rows_per_unit: Sentences, windows or texts of a drawn unit that one update reads,
            drawn anew in each update and clipped together; always 1 with the unit example.
        finetune_epochs: Passes of fine-tuning over the labelled text. Empty: 3; for private
            fine-tuning of public_model, as many as 240 updates take.
        finetune_batch_size: Rows per update of fine-tuning; expected units where it is private.
            Empty: 32; for private fine-tuning of public_model 1,024, at most a quarter of
            entities_declared_units.
        finetune_learning_rate: Peak learning rate of fine-tuning. Empty: 0.0005; for private
            fine-tuning of public_model 0.004.
    """

    finetune_privacy: Literal["none", "dp"] = setting("none", "Private fine-tuning")
    entities_unit: UnitName = setting("document", "Private labels: unit")
    entities_declared_units: int = setting(
        0, "Private fine-tuning: declared units", ge=0, le=1_000_000_000
    )
    entity_types: str = setting(
        "", "Tagging: entity types", section=MORE_TRAINING, pattern=TYPES_OR_NONE
    )
    class_names: str = setting("", "Classes", section=MORE_TRAINING, pattern=CLASSES_OR_NONE)
    finetune_epsilon: float | None = setting(
        None, "Private fine-tuning: target ε", ge=LEAST_EPSILON, le=MOST_EPSILON
    )
    finetune_noise_multiplier: NoiseMultiplier | None = setting(None, "Private fine-tuning: σ")
    finetune_clip_norm: ClipNorm = setting(None, "Private fine-tuning: clip norm")
    finetune_delta: Delta = setting(1e-6, "Private fine-tuning: δ")
    finetune_rows_per_unit: int = setting(4, "Private fine-tuning: rows per unit", ge=1, le=256)
    finetune_epochs: int = setting(
        None, "Fine-tuning: epochs", section=MORE_TRAINING, ge=1, le=1000
    )
    finetune_batch_size: BatchSize = setting(None, "Fine-tuning: batch size", section=MORE_TRAINING)
    finetune_learning_rate: LearningRate = setting(
        None, "Fine-tuning: learning rate", section=MORE_TRAINING
    )

    @property
    def finetune_updates(self) -> int:
        """Number of updates of private fine-tuning: epochs over the declared units."""
        passes = self.finetune_epochs * self.entities_declared_units
        return max(1, math.ceil(passes / self.finetune_batch_size))

    @model_validator(mode="after")
    def _labels_are_of_the_head(self) -> Self:
        of_classes = self.entities_format in CLASS_FORMATS
        if not self._makes_up_labels and of_classes == (self.head == "entities"):
            labels = "classes" if of_classes else "entities"
            raise ValueError(
                f"entities_format: {self.entities_format} holds {labels}, and head is {self.head}"
            )
        if self.entities_scheme != "auto" and self.entities_format != "columns":
            raise ValueError("entities_scheme: only the format columns has tags: leave it auto")
        return self

    @model_validator(mode="after")
    def _private_fine_tuning_is_told_what_it_needs(self) -> Self:
        if self.finetune_privacy == "none":
            if self.finetune_epsilon is not None:
                raise ValueError("finetune_epsilon: fine-tuning is not private here")
            return self
        names = "entity_types" if self.head == "entities" else "class_names"
        if not getattr(self, names) or not self.entities_declared_units:
            raise ValueError(f"private fine-tuning needs {names} and entities_declared_units")
        if self.tagging_context == "document" and self.entities_unit == "example":
            raise ValueError(
                "tagging_context: a row of a document holds many sentences, and cannot protect "
                "one: choose entities_unit document or patient"
            )
        if self.entities_declared_units < LEAST_UNITS:
            raise ValueError(f"entities_declared_units: must be at least {LEAST_UNITS}")
        if self.finetune_epsilon is not None and self.finetune_noise_multiplier is not None:
            raise ValueError(
                "finetune_epsilon: finetune_noise_multiplier follows from it: set only one"
            )
        if (self.finetune_batch_size or 0) > self.entities_declared_units:
            raise ValueError("finetune_batch_size is above entities_declared_units")
        return self


class JobSettings(
    RunConfig,
    CanaryConfig,
    AuditCanariesConfig,
    MembershipConfig,
    ExtractionConfig,
    SamplesConfig,
    TrainingConfig,
    BatchConfig,
    RowsConfig,
    ArchitectureConfig,
    PrivacyConfig,
    VocabularyConfig,
    PhrasesConfig,
    WrittenTextConfig,
    FinetuneSettings,
    section=MORE_TRAINING,
    empty=EMPTY,
):
    """All settings of `dp_bert`. The defaults are the demo.

    Attributes:
        target_epsilon: ε of all releases of the private data set in a run together: vocabulary,
            phrases and training. Their shares and σ are calibrated to it. Empty: noise_multiplier
            and the ε of the parts hold.
        target_delta: δ of the same guarantee. Empty: the largest power of ten that is at most
            1/(100 · declared_units).
        epochs: Passes over the declared units in DP pre-training.
        kept_epochs: Epochs before the last, comma-separated, after which trainings with and without
            DP also keep their models. Each model is fine-tuned and measured; the charge of a DP
            training covers all its models. Empty: only the last. A sweep uses sweep_epochs
            (sweep_epochs_from).
        public_model: Folder (local or gs://) of a BERT, DistilBERT, RoBERTa or ModernBERT (for gpt2
            or llama, of one of these) in Hugging Face's layout, in place of a fresh model. Its
            vocabulary is exchanged unless vocabulary_source keeps it. The operator must have
            declared the folder public (confide ledger declare-public).
        private_start: Start of private training. public: the model of public or written text;
            fresh: random.
        more_trainings: Private trainings to compare with: points with semicolons between them, each
            setting=value,setting=value over noise_multiplier, batch_size, epochs and private_start.
            Other settings have the job's values. Each is a release and is charged.
        nonprivate: Also pre-train on the same rows without privacy. The result stays with the
            operator. Empty: only if the text is made up or public.
        nonprivate_batch_size: Units per update without privacy, if there are as many as declared.
        nonprivate_epochs: Epochs of the training without privacy, which then keeps only its last
            model. Empty: those of the DP training.
        nonprivate_clip_norm: Bound on each unit's gradient in the training without privacy, whose
            batches are then drawn as with DP. Its ε stays infinite, and the model stays with the
            operator. Empty: no clipping.
        nonprivate_noise_multiplier: Noise σ of that training, of any size, in units of
            nonprivate_clip_norm. It is from a public seed and protects nothing.
        nonprivate_learning_rate: Peak learning rate of the training without privacy, of AdamW.
            Empty: 0.003; 0.0001 if it continues a public_model.
        public_steps: Updates on public text; 0: none, the model is as public_model has it, or
            fresh.
        public_batch_size: Rows per update of public pre-training.
        public_learning_rate: Peak learning rate of public pre-training, of AdamW. Empty: 0.003;
            with a public_model 0.0001.
        phrases_steps: Updates on text written from released phrases, with the settings of public
            pre-training.
    """

    target_epsilon: float | None = setting(
        None, "Target ε", section=ESSENTIALS, ge=LEAST_EPSILON, le=MOST_EPSILON
    )
    target_delta: Delta | None = setting(None, "Target δ", section=ESSENTIALS)
    epochs: float = setting(6.0, "Epochs", section=ESSENTIALS, gt=0, le=10_000)
    # The models that private trainings start from, by the names of their steps.
    starts: ClassVar[Mapping[str, Point]] = {
        "public_pretraining": Point(baseline="public-training"),
        "phrases_pretraining": Point(baseline="phrases"),
    }
    audited: ClassVar[bool] = True  # whether an audit by canaries is possible

    kept_epochs: str = setting("", "Keep the model after these epochs", pattern=NUMBERS_OR_NONE)
    public_model: str = setting("", "Public model to start from", section=ESSENTIALS, path=True)
    private_start: Literal["public", "fresh"] = setting("public", "Private training: start")
    more_trainings: str = setting("", "More private trainings", pattern=POINTS_OR_NONE)
    nonprivate: bool = setting(None, "Compare with non-private training")
    nonprivate_batch_size: BatchSize = setting(64, "Non-private batch size")
    nonprivate_epochs: float | None = setting(None, "Non-private epochs", gt=0, le=10_000)
    nonprivate_clip_norm: ClipNorm | None = setting(None, "Non-private clip norm")
    nonprivate_noise_multiplier: float = later(0.0, "Non-private noise", ge=0, le=1000)
    nonprivate_learning_rate: LearningRate = setting(None, "Non-private learning rate")
    public_steps: int = setting(900, "Public pre-training: updates", ge=0, le=100_000_000)
    public_batch_size: BatchSize = setting(64, "Public pre-training: batch size")
    public_learning_rate: LearningRate = setting(None, "Public learning rate")

    phrases_steps: int = setting(1800, "Training on written text: updates", ge=1, le=100_000_000)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_empty_settings(cls, values: Any) -> Any:
        """Fill in the settings that are left empty, before any rule combines them."""
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        may_be_empty = {name for name in values if name in fields and fields[name].default is None}
        given = {n: v for n, v in values.items() if v not in (None, "") or n not in may_be_empty}
        return with_defaults(given, audited=cls.audited)

    @property
    def why_unaudited(self) -> str:
        """The reason why the private training has no audit by canaries; empty if it has one."""
        if self.audit_canaries:
            return ""
        if not self.audited:
            return "a sweep has no audit canaries"
        if self.private_start == "fresh":
            return "a training from random weights has no model to compare it with"
        if self.declared_units < LEAST_AUDITED_UNITS:
            return (
                f"an audit needs {LEAST_AUDITED_UNITS} units to show a noticeable ε, and "
                f"{self.declared_units} are declared"
            )
        if not could_contradict(MOST_AUDIT_CANARIES, self.target_epsilon):
            return (
                f"{MOST_AUDIT_CANARIES} canaries could not contradict ε = {self.target_epsilon:g}"
            )
        return "no audit canaries were planned (audit_canaries=0)"

    def for_fine_tuning(self, *, private: bool) -> Self:
        """Return the settings, those left empty filled in for fine-tuning with DP or without."""
        units, batch = self.entities_declared_units, self.finetune_batch_size
        values = FINE_TUNING | (private_labels(units, batch) if private else {})
        del values["finetune_noise_multiplier"]  # it is empty only if finetune_epsilon is set
        return self.model_copy(update={n: v for n, v in values.items() if getattr(self, n) is None})

    @property
    def fine_tunes(self) -> bool:
        """Whether models are fine-tuned: there is labelled text, and they are not causal."""
        return self.entities_format != "none" and not is_causal(self.model_kind)

    @property
    def updates(self) -> int:
        """Number of DP updates: epochs over the declared units at the expected batch size.

        Audit canaries count as declared units, so that private units take part equally often.
        """
        return self.updates_after("dp", self.epochs)

    def kept_updates(self, mode: Literal["dp", "nonprivate"]) -> tuple[int, ...]:
        """Return the update numbers, before the last, after which a training keeps its model."""
        return tuple(self.updates_after(mode, epochs) for epochs in self.epochs_kept)

    @property
    def epochs_kept(self) -> list[float]:
        """The epochs, before the last, after which a training keeps its model."""
        return numbers(self.kept_epochs) if self.kept_epochs else []

    def updates_after(self, mode: Mode, epochs: float) -> int:
        """Return the number of updates of a training in so many epochs."""
        if mode == "dp":
            units, batch = self.declared_units + self.audit_canaries, self.batch_size
        else:
            units, batch = self.declared_units, self.nonprivate_batch_size
        return max(1, math.ceil(epochs * units / batch))

    @property
    def nonprivate_changes(self) -> dict[str, Any]:
        """The epochs in which a training without privacy differs from the DP training."""
        if self.nonprivate_epochs is None:
            return {}
        return {"epochs": self.nonprivate_epochs, "of_epochs": ()}

    def points(self) -> list[Point]:
        """Return the models of the job: of public text, with and without DP, and kept models."""
        kept = (*self.epochs_kept, self.epochs) if self.epochs_kept else ()
        trained = [Point(epochs=self.epochs if kept else None, of_epochs=kept)]
        if self.nonprivate:
            changes = {"baseline": "nonprivate-training", **self.nonprivate_changes}
            trained.append(trained[0].model_copy(update=changes))
        public, phrases = self.starts.values()
        starts = [public, phrases] if self.phrases_epsilon else [public]
        more = [
            Point.model_validate({name: getattr(job, name) for name in MORE})
            for job in self.more_jobs()
        ]
        on_the_way = [
            point.model_copy(update={"epochs": epochs})
            for point in trained
            for epochs in point.of_epochs[:-1]
        ]
        return [*starts, *trained, *more, *on_the_way]

    def pages(self) -> list[list[Point]]:
        """Return the points in pages, each small enough for the mapped tasks of one Airflow run.

        A training that points of two pages share is one release: the second page finds its output.
        """
        points = self.points()
        return [points[start : start + PAGE] for start in range(0, len(points), PAGE)]

    def job(self, point: Point, **settings: Any) -> JobSettings:
        """Return the job's settings at one point, without seeds and fold.

        Args:
            point: the model; where it differs, its settings replace all others.
            settings: settings that replace the job's.
        """
        kept = ",".join(repr(epochs) for epochs in point.of_epochs[:-1])
        return self.part(
            JobSettings, **settings | point.differences, kept_epochs=kept, more_trainings=""
        )

    def more_jobs(self) -> list[JobSettings]:
        """Return the job's settings for each further private training.

        Raises:
            ValueError: a point is invalid, or repeats the job's training or another point.
        """
        jobs: list[JobSettings] = []
        alone = self
        if self.more_trainings:  # further trainings release only their last models
            alone = self.part(JobSettings, more_trainings="", kept_epochs="")
        for changes in listed_points(self.more_trainings, MORE, "more_trainings"):
            try:
                job = JobSettings.model_validate(alone.model_dump() | changes)
            except ValidationError as error:
                raise ValueError(f"more_trainings: {one_line(error)}") from None
            if any(_alike(job, other) for other in (alone, *jobs)):
                point = ",".join(f"{name}={value}" for name, value in changes.items())
                raise ValueError(f"more_trainings: {point} is trained already")
            jobs.append(job)
        return jobs

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.batch_size > self.declared_units:
            raise ValueError("batch_size is above declared_units: the sampling rate would pass 1")
        if self.development_share and not self.holdout:
            raise ValueError("development_share: it divides held-out units, but holdout is 0")
        refuse_impossible_updates(self, self, self.updates)
        refuse_masks(
            self.model_kind,
            whole_words=self.whole_words,
            maskings_per_example=self.maskings_per_example,
        )
        adapted = (self.model_kind, self.trained_parameters, self.lora_targets)
        if adapted == ("feed-forward", "lora", "attention"):
            raise ValueError("lora_targets: feed-forward models have no attention: choose mlp")
        if self.audit_canaries > self.declared_units:
            raise ValueError("audit_canaries is above declared_units: it would train on them alone")
        self._refuse_a_target_of_other_releases()
        self._refuse_kept_epochs_out_of_order()
        if self.membership_codes and self.private_format == "synthetic":
            raise ValueError("membership_codes: made-up patients have no codes")
        self._refuse_texts_that_cannot_go_on()
        self._refuse_a_source_without_its_model()
        if self.finetune_privacy == "dp":
            self._refuse_private_finetuning()
        if self.audit_canaries and self.private_start == "fresh":
            raise ValueError(
                "audit_canaries: a training from random weights has no earlier model that the "
                "audit could compare it with"
            )
        if self.nonprivate_noise_multiplier and self.nonprivate_clip_norm is None:
            raise ValueError("nonprivate_noise_multiplier: set nonprivate_clip_norm, its unit")
        self.more_jobs()  # refuses wrong points
        for name in ("public_learning_rate", "nonprivate_learning_rate"):
            try:
                self.part(OptimizerConfig, learning_rate=getattr(self, name))
            except ValidationError as error:
                raise ValueError(f"{name}: {one_line(error)}") from None
        return self

    def _refuse_a_target_of_other_releases(self) -> None:
        """Refuse a target with a σ besides, with other private trainings, or below its parts."""
        if self.target_epsilon is None:
            if self.target_delta is not None:
                raise ValueError("target_delta: belongs to target_epsilon, which is empty")
            return
        if self.noise_multiplier is not None:
            raise ValueError("target_epsilon: noise_multiplier follows from it: set only one")
        if self.more_trainings:
            raise ValueError("target_epsilon: is of one private training: empty more_trainings")
        if self.tunes_the_private_data_set:
            raise ValueError(
                "target_epsilon: does not divide ε with private fine-tuning: name a data set of "
                "the labels in entities_dataset, or set noise_multiplier"
            )
        parts = [self.delta]
        parts += [self.vocabulary_delta] if self.releases_private_words else []
        parts += [self.phrases_delta] if self.phrases_epsilon else []
        if math.fsum(parts) > (self.target_delta or 0.0):
            raise ValueError(
                f"target_delta: the δ of the parts sum to {math.fsum(parts):.3g}, above "
                f"{self.target_delta:.3g}: leave them empty"
            )

    def _refuse_kept_epochs_out_of_order(self) -> None:
        """Refuse epochs that do not rise, or two of which end after the same update."""
        modes: tuple[Literal["dp", "nonprivate"], ...] = ("dp", "nonprivate")
        kept = self.epochs_kept
        alike = self.nonprivate and self.nonprivate_epochs is None
        for mode in modes[: 1 + alike] if kept else ():
            updates = [*self.kept_updates(mode), self.updates_after(mode, self.epochs)]
            if min(kept) <= 0 or any(m >= n for m, n in itertools.pairwise(updates)):
                raise ValueError(
                    f"kept_epochs: {self.kept_epochs} must rise, above 0 and below epochs "
                    f"({self.epochs:g}), each with an update of its own"
                )

    def _refuse_texts_that_cannot_go_on(self) -> None:
        """Refuse to continue texts with a masked model or with too few tokens in a row."""
        if self.extraction_rows and not is_causal(self.model_kind):
            raise ValueError(f"extraction_rows: {self.model_kind} continues no text: choose gpt2")
        if self.sample_texts and not is_causal(self.model_kind):
            raise ValueError(f"sample_texts: {self.model_kind} writes no text: choose gpt2")
        if self.extraction_rows and self.extraction_tokens > self.sequence_length:
            raise ValueError(
                f"extraction_prefix, extraction_suffix: a row needs {self.extraction_tokens} "
                f"tokens, and sequence_length is {self.sequence_length}"
            )

    def _refuse_a_source_without_its_model(self) -> None:
        """Refuse a vocabulary without the checkpoint it keeps, or too small for all bytes."""
        causal = is_causal(self.model_kind)
        if self.keeps_a_checkpoint and not self.public_model:
            raise ValueError(
                f"vocabulary_source: {self.vocabulary_source} keeps the tokens of public_model: "
                "give one"
            )
        if self.vocabulary_source == "checkpoint+private" and causal:
            raise ValueError(
                "vocabulary_source: private words cannot be added to the merges of a gpt2 "
                "checkpoint: choose checkpoint"
            )
        if causal and self.vocabulary_size < LEAST_BYTE_LEVEL:
            raise ValueError(
                f"vocabulary_size: gpt2 needs {LEAST_BYTE_LEVEL} tokens or more, for bytes and "
                "special tokens"
            )

    @property
    def tunes_the_private_data_set(self) -> bool:
        """Whether private fine-tuning is charged to the data set of the private corpus."""
        private = self.finetune_privacy == "dp"
        return private and self.entities_charged_to == self.private_dataset

    def _refuse_private_finetuning(self) -> None:
        """Refuse private fine-tuning that has no use, or whose unit does not fit its data set."""
        if self.entities_shown:
            raise ValueError("finetune_privacy: public or made-up labels need no privacy")
        if is_causal(self.model_kind):
            raise ValueError("finetune_privacy: a causal model is not fine-tuned")
        if self.tunes_the_private_data_set and self.entities_unit != self.unit:
            raise ValueError(
                f"entities_unit: the labels are charged to {self.private_dataset}, whose unit is "
                f"{self.unit}, not {self.entities_unit}: choose {self.unit}, "
                "or name a data set of their own in entities_dataset"
            )
        if self.tunes_the_private_data_set and self.unit == "example":
            raise ValueError(
                "entities_unit: a labelled sentence is another unit than an example of "
                f"{self.words_per_unit} words of {self.private_dataset}: name a data set of the "
                "labels in entities_dataset, or choose document or patient for both"
            )
        nameless = self.head == "entities" and not self.entities_patients
        if self.entities_unit == "patient" and nameless:
            raise ValueError(
                "entities_unit: no labelled document names its patient: choose document, or give "
                "entities_patients, a list of documents and their patients"
            )


def _alike(one: JobSettings, other: JobSettings) -> bool:
    """Return whether two private trainings would have the same name."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in MORE]
    return all(a == b if isinstance(a, str) else f"{a:g}" == f"{b:g}" for a, b in pairs)
