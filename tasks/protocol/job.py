"""Pure functions from the settings of a job or sweep to the specs of its steps.

Airflow, the command line and the tests therefore run the same job, and a person can repeat a task
from its spec alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dp_core.config.audit_settings import AuditCanariesConfig, ExtractionConfig
from dp_core.config.data import (
    CanaryConfig,
    ReaderConfig,
    RowsConfig,
    SequenceConfig,
    VersionConfig,
)
from dp_core.config.fields import named_paths
from dp_core.config.privacy import (
    PhrasesConfig,
    PrivacyConfig,
    SelectionConfig,
    UnitConfig,
    VocabularyConfig,
    WrittenTextConfig,
)
from dp_core.config.training import (
    AdapterConfig,
    ArchitectureConfig,
    BatchConfig,
    RunConfig,
    SeedConfig,
    TaggingConfig,
    TrainingConfig,
    is_causal,
)
from tasks.protocol.measurements import MEASUREMENTS, MeasuredModel
from tasks.protocol.points import OF_JOB, Point, first_private
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import Promotion
from tasks.protocol.specs import (
    Asked,
    BudgetSpec,
    CalibrationTarget,
    CanariesSpec,
    Charged,
    ChargedPrivacyConfig,
    CheckpointSpec,
    ClippedConfig,
    CorpusSpec,
    EntitiesSpec,
    FinetuneSpec,
    PhrasesSpec,
    PretrainSpec,
    ReportSpec,
    ReserveSpec,
    SelectSpec,
    StepSpec,
    TokenStoreSpec,
    VocabularySpec,
    WrittenTextSpec,
)
from tasks.protocol.sweep import SweepSettings

_OF_POINT = " / "  # separates the name of a point from its task's name
MOST_EXAMPLES = 1_000_000  # most rows kept of a public document, in effect all
ALONE: dict[str, Any] = {"examples_per_step": 1, "maskings_per_example": 1}  # per unit, per row
WITHOUT_NOISE = {  # settings of trainings without DP, which update all parameters
    **AdapterConfig().model_dump(),
    "noise_floor": 0.0,
}
# Settings of every fine-tuning, with DP and without.
FINETUNED_ALIKE = ("adam_epsilon", "checkpoint_every", "device_memory", "dropout", "micro_rows")
POINT_STEPS = ("pretraining", *MEASUREMENTS, "finetuning")  # of one model


def front_half(s: JobSettings) -> dict[str, StepSpec]:
    """Return the steps before DP pre-training, which the points of a sweep share.

    Without labelled text, no model is fine-tuned. A causal model never is, because the heads need
    the context on both sides of a word.
    """
    common: dict[str, Any] = {"made_up": s.made_up}
    seeded = common | s.part(SeedConfig).model_dump()
    corpora = seeded | s.part(ReaderConfig).model_dump()
    private = CorpusSpec(
        **corpora,
        role="private",
        format=s.private_format,
        path=s.private_path,
        columns=s.private_columns,
        dataset=s.private_dataset,
    )
    public = CorpusSpec(
        **corpora,
        role="public",
        format=s.public_format,
        path=s.public_path,
        columns=s.public_columns,
        dataset="public",
    )
    entities = EntitiesSpec(
        **seeded,
        head=s.head,
        format=s.entities_format,
        scheme=None if s.entities_scheme == "auto" else s.entities_scheme,
        public=s.entities_shown,
        dataset=s.entities_charged_to,
        entities_unit=s.entities_unit,
        train_path=s.entities_train,
        test_path=s.entities_test,
        folded=bool(s.entities_folds),
        patients_path=s.entities_patients,
        data_version=s.data_version,
    )
    config = s.part(VocabularyConfig)
    checkpoint, keeps = None, config.keeps_a_checkpoint
    if s.public_model:
        checkpoint = CheckpointSpec(
            **common,
            **s.part(VersionConfig).model_dump(),
            public_model=s.public_model,
            keeps_tokens=keeps,
        )
    vocabulary = VocabularySpec(
        **seeded,
        corpus_uri=private.output if config.reads_private_text else "",
        public_corpus_uri=public.output if config.reads_public_text else "",
        checkpoint_uri=checkpoint.output if checkpoint and keeps else "",
        dataset=s.private_dataset,
        subwords="byte-level-bpe" if is_causal(s.model_kind) else "wordpiece",
        holdout=s.holdout,
        config=config,
    )
    canaries = CanariesSpec(**seeded, vocabulary_uri=vocabulary.output, config=s.part(CanaryConfig))
    private_store = TokenStoreSpec(
        **seeded,
        corpus_uri=private.output,
        vocabulary_uri=vocabulary.output,
        canaries_uri=canaries.output,
        units=s.part(UnitConfig),
        rows=s.part(RowsConfig),
        holdout=s.holdout,
        audit_canaries=s.audit_canaries,
    )
    public_store = _store_of_public_text(s, public, vocabulary, s.holdout)
    public_pretraining = PretrainSpec(
        **common,
        **s.part(RunConfig).model_dump(),
        mode="public",
        store_uri=public_store.output,
        public_store_uri=public_store.output,
        private_store_uri=private_store.output,
        vocabulary_uri=vocabulary.output,
        shape=s.part(ArchitectureConfig),
        extraction=s.part(ExtractionConfig),
        development_share=s.development_share,
        public_model=s.public_model,
        training=_ordinary(s, learning_rate=s.public_learning_rate),
        batches=BatchConfig(batch_size=s.public_batch_size, **ALONE),
        updates=s.public_steps,
    )
    steps: dict[str, StepSpec] = {
        "private_corpus": private,
        "public_corpus": public,
        **({"entities": entities} if s.fine_tunes else {}),
        **({"checkpoint": checkpoint} if checkpoint else {}),
        "vocabulary": vocabulary,
        "canaries": canaries,
        "private_store": private_store,
        "public_store": public_store,
        "public_pretraining": public_pretraining,
    }
    if not s.phrases_epsilon:
        return steps
    phrases = PhrasesSpec(
        **seeded,
        corpus_uri=private.output,
        vocabulary_uri=vocabulary.output,
        canaries_uri=canaries.output,
        dataset=s.private_dataset,
        holdout=s.holdout,
        config=s.part(PhrasesConfig),
    )
    written = WrittenTextSpec(
        **seeded,
        phrases_uri=phrases.output,
        vocabulary_uri=vocabulary.output,
        public_corpus_uri=public.output if s.written_public_share else "",
        config=s.part(WrittenTextConfig),
    )
    store = _store_of_public_text(s, written, vocabulary, 0.0)
    training = public_pretraining.model_copy(
        update={
            "mode": "released",
            "public_model": "",
            "store_uri": store.output,
            "init_uri": public_pretraining.output,
            "updates": s.phrases_steps,
        }
    )
    return steps | {
        "phrases": phrases,
        "written_text": written,
        "phrases_store": store,
        "phrases_pretraining": training,
    }


def _store_of_public_text(
    s: JobSettings, corpus: StepSpec, vocabulary: StepSpec, holdout: float
) -> TokenStoreSpec:
    """Return the rows of public or written text, without units and canaries."""
    return TokenStoreSpec(
        made_up=s.made_up,
        seed=s.seed,
        corpus_uri=corpus.output,
        vocabulary_uri=vocabulary.output,
        units=None,
        rows=s.part(RowsConfig, max_examples_per_unit=MOST_EXAMPLES),
        holdout=holdout,
    )


def _ordinary(s: JobSettings, learning_rate: float) -> TrainingConfig:
    """Return a training without DP, adapters or noise floor."""
    return s.part(TrainingConfig, **(WITHOUT_NOISE | {"learning_rate": learning_rate}))


def pretraining(
    s: JobSettings,
    front: dict[str, StepSpec],
    mode: Literal["dp", "nonprivate"],
    seed: int | None = None,
) -> PretrainSpec:
    """Return the training on private rows with DP, or for the same epochs without DP.

    It starts from random weights if `private_start` is `fresh`. Otherwise it starts from the public
    model, or, with DP, from the model of released phrases if there is one. Its public seed is the
    job's, unless a point has another one.
    """
    base, private = front["public_pretraining"], mode == "dp"
    start = front.get("phrases_pretraining", base) if private else base
    assert isinstance(base, PretrainSpec)  # noqa: S101 - narrows the type
    target = None
    if private and s.target_epsilon is not None:
        others = [step for step in front.values() if isinstance(step, VocabularySpec | PhrasesSpec)]
        charged = tuple(step for step in others if step.charges)
        target = CalibrationTarget(epsilon=s.target_epsilon, alongside=charged)
    clipped = None
    if not private and s.nonprivate_clip_norm is not None:
        sigma = s.nonprivate_noise_multiplier
        clipped = ClippedConfig(clip_norm=s.nonprivate_clip_norm, noise_multiplier=sigma)
    plan = ChargedPrivacyConfig(
        dataset=s.private_dataset,
        **s.part(PrivacyConfig).model_dump(),
        **s.part(AuditCanariesConfig).model_dump(),
    )
    return base.model_copy(
        update={
            "mode": mode,
            "seed": base.seed if seed is None else seed,
            "public_model": "",
            "store_uri": front["private_store"].output,
            "init_uri": "" if s.private_start == "fresh" else start.output,
            "plan": plan if private else None,
            "training": s.part(TrainingConfig, trained_parameters=s.trained_parameters or "all")
            if private
            else _ordinary(s, learning_rate=s.nonprivate_learning_rate),
            "batches": s.part(BatchConfig)
            if private
            else BatchConfig(
                batch_size=s.nonprivate_batch_size,
                **ALONE | {"examples_per_step": s.examples_per_step},
            ),
            "updates": s.updates_after(mode, s.epochs),
            "kept_updates": s.kept_updates(mode),
            "target": target,
            "clipped": clipped,
        }
    )


def finetuning(
    s: JobSettings, front: dict[str, StepSpec], model: StepSpec, model_updates: int = 0
) -> FinetuneSpec:
    """Return the fine-tuning of a model, which is private only for DP models and only on request.

    Args:
        s: settings of the job.
        front: the steps before DP pre-training.
        model: the training of the model.
        model_updates: updates after which the training kept the model; 0 means its last model.
    """
    entities = front["entities"]
    assert isinstance(entities, EntitiesSpec)  # noqa: S101 - narrows the type
    private = s.finetune_privacy == "dp" and model.charges
    s = s.for_fine_tuning(private=private)
    plan, target, optimizer = None, None, {"beta2": 0.999}
    names = [*FINETUNED_ALIKE]
    if private:
        if s.finetune_epsilon is not None:
            target = CalibrationTarget(epsilon=s.finetune_epsilon)
        plan = ChargedPrivacyConfig(
            dataset=entities.dataset,
            unit=s.entities_unit,
            declared_units=s.entities_declared_units,
            noise_multiplier=s.finetune_noise_multiplier,
            clip_norm=s.finetune_clip_norm,
            delta=s.finetune_delta,
        )
        # Only with DP a stop by the time box does not reveal the number of sentences.
        names += [*AdapterConfig.model_fields, "noise_floor", "time_box_minutes"]
        optimizer = {}
    kept = {name: getattr(s, name) for name in names}
    training = TrainingConfig(learning_rate=s.finetune_learning_rate, **optimizer, **kept)
    return FinetuneSpec(
        made_up=model.made_up,
        **s.part(RunConfig).model_dump(),
        **s.part(SequenceConfig).model_dump(),
        **s.part(TaggingConfig).model_dump(),
        model_uri=model.output,
        model_updates=model_updates,
        entities_uri=entities.output,
        plan=plan,
        target=target,
        entity_types=_names(s.entity_types) if s.head == "entities" else (),
        class_names=_names(s.class_names) if s.head != "entities" else (),
        training=training,
        batches=BatchConfig(
            batch_size=s.finetune_batch_size,
            **ALONE | {"examples_per_step": s.finetune_rows_per_unit if private else 1},
        ),
        updates=s.finetune_updates if private else 0,
        epochs=s.finetune_epochs,
        folds=s.entities_folds,
    )


def _names(listed: str) -> tuple[str, ...]:
    """Return the listed names, sorted and without repetitions, so that order is irrelevant."""
    return tuple(sorted({name.strip() for name in listed.split(",")})) if listed else ()


def point_and_task(name: str) -> tuple[str, str]:
    """Return the point, or an empty string, and the task in the name of a step."""
    point, _, task = name.rpartition(_OF_POINT)
    return point, task


def is_of_job(name: str) -> bool:
    """Return whether a step is of the last model of a training with all settings of its job."""
    return point_and_task(name)[0] in OF_JOB.values()


def names_of(point: Point) -> dict[str, str]:
    """Return the names of a point's steps by task; several points may share a step."""
    return {
        "vocabulary": f"{point.front.name}{_OF_POINT}vocabulary"
        if point.has_separate_front
        else "vocabulary",
        "pretraining": f"{point.training.name}{_OF_POINT}pretraining",
        **{task: f"{point.model.name}{_OF_POINT}{task}" for task in MEASUREMENTS},
        "finetuning": f"{point.name}{_OF_POINT}finetuning",
    }


def job_steps(settings: JobSettings, promotion: Promotion = "audited") -> dict[str, StepSpec]:
    """Return the specs of a job or a sweep by name, in an order in which they can run.

    The name of a model's step begins with the model's name (`point_and_task`).
    """
    points: Sequence[Point] = ()
    if isinstance(settings, SweepSettings) and settings.is_asked:
        # The trainings that will be charged, at the bounds of the search.
        steps = _shared(settings, front_half(settings.job(settings.costliest)))
        for number in range(settings.most_trainings):
            training = asked_training(settings, settings.costliest, number)
            steps[f"{number}{_OF_POINT}pretraining"] = training
    else:
        points = settings.points()
        steps = _steps_of_points(settings, points)
    budget = _budget_of(settings, steps)
    planned: dict[str, StepSpec] = {"budget": budget}
    for name, spec in steps.items():
        if name == "vocabulary":  # after the corpora, labels and checkpoints that `reserve` checks
            planned |= {n: s for n, s in steps.items() if isinstance(s, CheckpointSpec)}
            planned["reserve"] = _reserve_of(settings, steps, budget.charged)
        planned[name] = spec
    return planned | {"report": report_of(settings, planned, points, promotion)}


def _steps_of_points(settings: JobSettings, points: Sequence[Point]) -> dict[str, StepSpec]:
    """Return the steps of all models; they share their front half, and some share a training.

    The training of the public model, and of the model of released phrases, is a step of the front
    half.
    """
    front = front_half(settings.job(first_private(points)))
    steps, shared = _shared(settings, front), {spec.output for spec in front.values()}
    for point in points:
        of_point, names = point_steps(settings, point), names_of(point)
        steps |= {
            f"{point.front.name}{_OF_POINT}{task}": spec
            for task, spec in of_point.items()
            if task not in POINT_STEPS and spec.output not in shared
        }
        steps |= {names[task]: of_point[task] for task in POINT_STEPS if task in of_point}
    return steps


def _shared(settings: JobSettings, front: Mapping[str, StepSpec]) -> dict[str, StepSpec]:
    """Return the shared steps of a job by name; those that train are steps of the job's models."""
    named = {task: names_of(start)["pretraining"] for task, start in settings.starts.items()}
    return {named.get(task, task): spec for task, spec in front.items()}


def point_steps(
    settings: JobSettings,
    point: Point,
    training: PretrainSpec | None = None,
    after: Sequence[str] = (),
) -> dict[str, StepSpec]:
    """Return the specs of one model by task: the shared steps of its job, then its own steps.

    The point's seeds and fold change only the steps that use them.

    Args:
        settings: settings of the job or the sweep.
        point: the model.
        training: the training of a point that an optimiser chose (`asked_training`).
        after: fine-tunings whose F1 determined that choice.
    """
    job = settings.job(point)
    front = front_half(job)
    steps = front | {"pretraining": training or _training(settings, point, job, front)}
    steps |= _measured(job, front, steps["pretraining"], point)
    if "finetuning" in steps:
        fields = {"seed": point.finetune_seed, "fold": point.fold, "after": tuple(after) or None}
        replicate = {name: value for name, value in fields.items() if value is not None}
        steps["finetuning"] = steps["finetuning"].model_copy(update=replicate)
    return steps


def _training(
    settings: JobSettings, point: Point, job: JobSettings, front: dict[str, StepSpec]
) -> StepSpec:
    """Return the step that makes a model: a step of the front half, a training or a selection."""
    if point.is_chosen:
        assert isinstance(settings, SweepSettings)  # noqa: S101 - narrows the type
        jobs = [settings.job(candidate) for candidate in settings.candidates()]
        return SelectSpec(
            made_up=job.made_up,
            candidates=tuple(pretraining(candidate, front, "dp", point.seed) for candidate in jobs),
            selection=settings.part(SelectionConfig),
        )
    match point.mode:
        case "public" | "phrases" as start:
            return front[f"{start}_pretraining"]
        case mode:
            return pretraining(job, front, mode, point.seed)


def _measured(
    job: JobSettings, front: dict[str, StepSpec], training: StepSpec, point: Point
) -> dict[str, StepSpec]:
    """Return the steps that measure a model, which its training may have kept before its end.

    The class of each measurement states which models it measures (`MEASUREMENTS`).
    """
    updates = 0
    if point.is_on_the_way and point.epochs is not None:
        updates = job.updates_after(point.mode, point.epochs)
    model = MeasuredModel(job, front, training, updates)
    specs = {task: kind.of_model(model) for task, kind in MEASUREMENTS.items()}
    measured: dict[str, StepSpec] = {task: spec for task, spec in specs.items() if spec}
    if "entities" in front:
        measured["finetuning"] = finetuning(job, front, training, updates)
    return measured


def asked_training(
    settings: SweepSettings, point: Point, number: int, after: Sequence[str] = ()
) -> PretrainSpec:
    """Return the private training of a point that an optimiser chose.

    Args:
        settings: settings of the sweep.
        point: the optimiser's choice.
        number: number of the registered release that the training uses, from 0.
        after: fine-tunings whose F1 determined the choice.
    """
    job, costliest = settings.job(point), settings.job(settings.costliest)
    asked = Asked(
        search=settings.search,
        number=number,
        least_noise_multiplier=costliest.noise_multiplier or 0.0,
        most_updates=costliest.updates,
    )
    training = pretraining(job, front_half(job), "dp")
    return PretrainSpec.model_validate(training.model_dump() | {"asked": asked, "after": after})


def _budget_of(settings: JobSettings, steps: Mapping[str, StepSpec]) -> BudgetSpec:
    """Return the first step of a run, with all sources and releases of its steps.

    A private training that several points share is registered and charged once. Baselines release
    nothing, but their sources are listed.
    """
    charged = {
        spec.output: spec for spec in steps.values() if isinstance(spec, Charged) and spec.charges
    }
    read = dict.fromkeys(source for spec in steps.values() for source in spec.sources)
    return BudgetSpec(made_up=settings.made_up, charged=tuple(charged.values()), reads=tuple(read))


def _reserve_of(
    settings: JobSettings, steps: Mapping[str, StepSpec], charged: tuple[Charged, ...]
) -> ReserveSpec:
    """Return the step that checks a run's text and labels and registers its releases."""
    entities = steps.get("entities")
    learned = None
    if isinstance(entities, EntitiesSpec) and not entities.public:
        free = (s for s in steps.values() if isinstance(s, FinetuneSpec) and s.plan is None)
        learned = next(free, None)
    return ReserveSpec(
        made_up=settings.made_up,
        charged=charged,
        corpus_uri=steps["private_corpus"].output,
        units=settings.part(UnitConfig),
        entities_uri=entities.output if entities else "",
        learned=learned,
        checkpoint_uri=steps["checkpoint"].output if "checkpoint" in steps else "",
        compared={
            f"sweep_checkpoints: {spec.public_model}": spec.output
            for name, spec in steps.items()
            if isinstance(spec, CheckpointSpec) and name != "checkpoint"
        },
        shape=settings.part(ArchitectureConfig),
        row_tokens=settings.sequence_length,
        public_updates=settings.public_steps,
    )


def report_of(
    settings: JobSettings,
    steps: Mapping[str, StepSpec],
    points: Sequence[Point] = (),
    promotion: Promotion = "audited",
) -> ReportSpec:
    """Return the spec of the last step of a job, or of a sweep of these points."""
    sources = [source for spec in steps.values() for source in spec.sources]
    return ReportSpec(
        made_up=settings.made_up,
        title="dp_sweep" if isinstance(settings, SweepSettings) else "dp_bert",
        results={name: spec.output for name, spec in steps.items()},
        points={point.name: point for point in points},
        settings=settings.model_dump(mode="json", exclude_none=True),
        private_paths=tuple(dict.fromkeys(s.field for s in sources if not s.public)),
        promotion=promotion,
    )


def budget_of_run(settings: JobSettings) -> BudgetSpec:
    """Return the first step of a job or a sweep."""
    budget = job_steps(settings)["budget"]
    assert isinstance(budget, BudgetSpec)  # noqa: S101 - narrows the type
    return budget


def missing_file(settings: JobSettings) -> tuple[str, str] | None:
    """Return the first setting whose local file a step cannot read, with the reason, or None.

    The check is valid for steps that run on this machine as this user, but not for containers,
    which see other files.
    """
    named = named_paths(type(settings), settings.model_dump())
    if not settings.membership_units:
        named.pop("membership_codes", None)
    if not settings.fine_tunes:  # labelled text is not read
        named = {name: files for name, files in named.items() if not name.startswith("entities_")}
    for name, path in ((name, path) for name, files in named.items() for path in files):
        if "://" in path:
            continue
        local = os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser can raise
        if not os.path.isabs(local):  # noqa: PTH117 - as the line above
            return name, f"a path must be absolute: {path}"
        if "\0" in local or not os.access(local, os.F_OK):
            return name, f"no such file or folder: {path}"
        is_folder = os.path.isdir(local)  # noqa: PTH112 - as the line above
        if not (is_folder or os.path.isfile(local)):  # noqa: PTH113 - as the line above
            return name, f"neither a file nor a folder: {path}"
        if not os.access(local, os.R_OK | os.X_OK if is_folder else os.R_OK):
            return name, f"may not be read: {path}"
    return None
