"""From a job's settings to the specs of its steps: a pure function, so that Airflow, the CLI and

a test all run the very same job, and a task can be repeated by hand from its spec alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeGuard

from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import (
    CAUSAL,
    BudgetSpec,
    CanariesSpec,
    CorpusSpec,
    EntitiesSpec,
    ExposureSpec,
    FinetuneSpec,
    ModelShape,
    PretrainSpec,
    PrivacyPlan,
    ReportSpec,
    SelectSpec,
    StepSpec,
    SweepReportSpec,
    TokenStoreSpec,
    VocabularySpec,
)
from tasks.protocol.sweep_settings import CHOSEN, SweepPoint, SweepSettings

HOLDOUT = 0.05  # share of units that measure and never train


def front_half(s: JobSettings, root: str) -> dict[str, StepSpec]:
    """Return the steps before DP pre-training: a sweep shares them among its points."""
    common = {"root": root, "made_up": s.made_up}
    fields = tuple(s.jsonl_fields.split(","))
    private = CorpusSpec(
        **common,
        role="private",
        format=s.private_format,
        path=s.private_path,
        fields=fields,
        dataset=s.private_dataset,
        data_version=s.data_version,
        synthetic_patients=s.synthetic_patients,
        seed=s.seed,
    )
    public = CorpusSpec(
        **common,
        role="public",
        format=s.public_format,
        path=s.public_path,
        fields=fields,
        dataset="public",
        data_version=s.data_version,
        synthetic_patients=s.synthetic_patients,
        seed=s.seed,
    )
    entities = EntitiesSpec(
        **common,
        format=s.entities_format,
        public=s.entities_shown,
        dataset=s.entities_charged_to,
        unit=s.entities_unit,
        train_path=s.entities_train,
        test_path=s.entities_test,
        patients_path=s.entities_patients,
        data_version=s.data_version,
        seed=s.seed,
    )
    vocabulary = VocabularySpec(
        **common,
        corpus_uri=private.output,
        dataset=s.private_dataset,
        unit=s.unit,
        declared_units=s.declared_units,
        words_per_unit=s.words_per_unit,
        epsilon=s.vocabulary_epsilon,
        delta=s.vocabulary_delta,
        relation=s.relation,
        size=s.vocabulary_size,
    )
    canaries = CanariesSpec(
        **common,
        vocabulary_uri=vocabulary.output,
        patterns=tuple(s.canary_patterns.split(",")),
        rates=tuple(float(p) for p in s.canary_rates.split(",")),
        per_group=s.canaries_per_group,
        seed=s.seed,
    )
    private_store = TokenStoreSpec(
        **common,
        corpus_uri=private.output,
        vocabulary_uri=vocabulary.output,
        canaries_uri=canaries.output,
        role="private",
        unit=s.unit,
        sequence_length=s.sequence_length,
        words_per_unit=s.words_per_unit,
        max_examples_per_unit=s.max_examples_per_unit,
        declared_units=s.declared_units,
        holdout=HOLDOUT,
        seed=s.seed,
    )
    public_store = TokenStoreSpec(
        **common,
        corpus_uri=public.output,
        vocabulary_uri=vocabulary.output,
        role="public",
        unit="document",
        sequence_length=s.sequence_length,
        words_per_unit=s.words_per_unit,
        max_examples_per_unit=1_000_000,
        declared_units=0,
        holdout=HOLDOUT,
        seed=s.seed,
    )
    public_pretraining = PretrainSpec(
        **common,
        mode="public",
        store_uri=public_store.output,
        public_store_uri=public_store.output,
        private_store_uri=private_store.output,
        vocabulary_uri=vocabulary.output,
        shape=ModelShape(layers=s.layers, hidden=s.hidden, kind=s.model_kind),
        public_model=s.public_model,
        examples_per_step=1,
        batch_size=s.public_batch_size,
        updates=s.public_steps,
        learning_rate=s.public_learning_rate,
        weight_decay=s.weight_decay,
        decay_power=s.decay_power,
        whole_words=s.whole_words,
        precision=s.precision,
        keep_checkpoints=s.keep_checkpoints,
        time_box_minutes=s.time_box_minutes,
        device=s.device,
        seed=s.seed,
    )
    return {
        "private_corpus": private,
        "public_corpus": public,
        "entities": entities,
        "vocabulary": vocabulary,
        "canaries": canaries,
        "private_store": private_store,
        "public_store": public_store,
        "public_pretraining": public_pretraining,
    }


def pretraining(s: JobSettings, front: dict[str, StepSpec], mode: str) -> PretrainSpec:
    """Return the training on private rows: with DP, or without (mode `nonprivate`)."""
    private = mode == "dp"
    base = front["public_pretraining"]
    assert isinstance(base, PretrainSpec)  # noqa: S101 - narrows the type
    plan = PrivacyPlan(
        dataset=s.private_dataset,
        unit=s.unit,
        declared_units=s.declared_units,
        noise_multiplier=s.noise_multiplier,
        clip_norm=s.clip_norm,
        delta=s.delta,
        examples_per_step=s.examples_per_step,
        sampling=s.sampling,
        batch_cap=s.batch_cap,
        clip_quantile=s.clip_quantile if s.clipping == "adaptive" else None,
    )
    return PretrainSpec.model_validate(
        base.model_dump()
        | {
            "mode": mode,
            "public_model": "",
            "store_uri": front["private_store"].output,
            "init_uri": base.output,
            "plan": plan if private else None,
            "examples_per_step": s.examples_per_step,
            "batch_size": s.batch_size if private else s.nonprivate_batch_size,
            "updates": s.updates if private else s.nonprivate_updates,
            "learning_rate": s.learning_rate if private else s.nonprivate_learning_rate,
            "first_batch_size": s.first_batch_size if private else 0,
            "clipping": "automatic" if private and s.clipping == "automatic" else "flat",
            "engine": s.engine if private else base.engine,
        }
    )


def finetuning(s: JobSettings, front: dict[str, StepSpec], model: StepSpec) -> FinetuneSpec:
    """Return the fine-tuning of a model; private for the DP model alone, where asked for."""
    entities = front["entities"]
    assert isinstance(entities, EntitiesSpec)  # noqa: S101 - narrows the type
    trained = isinstance(model, SelectSpec) or (
        isinstance(model, PretrainSpec) and bool(model.plan)
    )
    private = s.finetune_privacy == "dp" and trained
    plan = PrivacyPlan(
        dataset=entities.dataset,
        unit=s.entities_unit,
        declared_units=s.entities_declared_units,
        noise_multiplier=s.finetune_noise_multiplier,
        clip_norm=s.finetune_clip_norm,
        delta=s.finetune_delta,
        examples_per_step=s.finetune_rows_per_unit,
    )
    return FinetuneSpec(
        root=model.root,
        made_up=model.made_up,
        model_uri=model.output,
        entities_uri=entities.output,
        plan=plan if private else None,
        entity_types=tuple(sorted(set(s.entity_types.split(",")))) if private else (),
        updates=s.finetune_updates if private else 0,
        keep_checkpoints=s.keep_checkpoints,
        time_box_minutes=s.time_box_minutes,
        epochs=s.finetune_epochs,
        batch_size=s.finetune_batch_size,
        learning_rate=s.finetune_learning_rate,
        sequence_length=s.sequence_length,
        device=s.device,
        seed=s.seed,
    )


def exposure(s: JobSettings, front: dict[str, StepSpec], model: StepSpec) -> ExposureSpec:
    """Return the audit of a model."""
    return ExposureSpec(
        root=model.root,
        made_up=model.made_up,
        model_uri=model.output,
        canaries_uri=front["canaries"].output,
        private_store_uri=front["private_store"].output,
        device=s.device,
        seed=s.seed,
    )


def dp_bert_steps(settings: JobSettings, root: str) -> dict[str, StepSpec]:
    """Return the specs of `dp_bert`, by task name, in an order in which they can be run.

    A causal model is not fine-tuned for entities, which ask for what stands on both sides of a
    word: it ends with its perplexity and its exposure.
    """
    front = front_half(settings, root)
    causal = settings.model_kind == CAUSAL
    if causal:
        del front["entities"]
    steps: dict[str, StepSpec] = {"budget": front["vocabulary"], **front}  # its place: the first
    models: dict[str, StepSpec] = {"public": front["public_pretraining"]}
    modes = ["dp", "nonprivate"] if settings.nonprivate else ["dp"]
    for mode in modes:
        models[mode] = steps[f"{mode}_pretraining"] = pretraining(settings, front, mode)
    for mode, model in () if causal else models.items():
        steps[f"{mode}_finetuning"] = finetuning(settings, front, model)
    for mode, model in models.items():
        steps[f"{mode}_exposure"] = exposure(settings, front, model)
    steps["budget"] = budget_of(steps.values())
    steps["report"] = ReportSpec(
        root=root,
        made_up=settings.made_up,
        title="dp_bert",
        results={name: spec.output for name, spec in steps.items()},
        settings=settings.model_dump(mode="json"),
    )
    return steps


def budget_of(steps: Iterable[StepSpec]) -> BudgetSpec:
    """Return the registration of all releases among the steps, each once.

    It also names what the steps read from outside.
    """
    own = list(steps)
    charged = {spec.output: spec for spec in own if is_charged(spec)}
    first = next(iter(charged.values()))
    read = dict.fromkeys(source for spec in own for source in spec.sources)
    return BudgetSpec(
        root=first.root,
        made_up=first.made_up,
        charged=tuple(charged.values()),
        reads=tuple(read),
    )


def is_charged(
    spec: StepSpec,
) -> TypeGuard[VocabularySpec | PretrainSpec | FinetuneSpec | SelectSpec]:
    """Return whether a step releases something of private data with a guarantee."""
    if isinstance(spec, PretrainSpec | FinetuneSpec):
        return spec.plan is not None
    return isinstance(spec, VocabularySpec | SelectSpec)


OWN = ("dp_pretraining", "dp_finetuning", "dp_exposure")


def sweep_point_steps(settings: SweepSettings, point: SweepPoint, root: str) -> dict[str, StepSpec]:
    """Return the specs of one point of `dp_sweep`: shared front half, then its own back half."""
    return {"budget": sweep_budget(settings, root), **_point(settings, point, root)}


def sweep_budget(settings: SweepSettings, root: str) -> BudgetSpec:
    """Return the registration of a whole sweep: the vocabulary, and what each point releases."""
    steps = [_point(settings, point, root) for point in settings.points()]
    shared = [spec for task, spec in steps[0].items() if task not in OWN]
    return budget_of([*shared, *(point[task] for task in OWN[:2] for point in steps)])


def budget_of_run(settings: JobSettings, root: str) -> BudgetSpec:
    """Return the registration of a whole run, be it a job or a sweep."""
    if isinstance(settings, SweepSettings):
        return sweep_budget(settings, root)
    return budget_of(
        spec for name, spec in dp_bert_steps(settings, root).items() if name != "budget"
    )


def sweep_report(settings: SweepSettings, root: str) -> SweepReportSpec:
    """Return the spec of the sweep's last step."""
    steps = {p.name: _point(settings, p, root) for p in settings.points()}
    return SweepReportSpec(
        root=root,
        made_up=settings.made_up,
        title="dp_sweep",
        points={p.name: p.model_dump(mode="json") for p in settings.points()},
        results={
            name: {
                task: spec.output for task, spec in point.items() if task in (*OWN, "vocabulary")
            }
            for name, point in steps.items()
        },
        settings=settings.model_dump(mode="json"),
    )


def _point(settings: SweepSettings, point: SweepPoint, root: str) -> dict[str, StepSpec]:
    job = settings.job(settings.grid()[0] if point == CHOSEN else point)
    front = front_half(job, root)
    model: PretrainSpec | SelectSpec = pretraining(job, front, "dp")
    if point == CHOSEN:
        model = _selection(settings, job, front)
    return {
        **front,
        "dp_pretraining": model,
        "dp_finetuning": finetuning(job, front, model),
        "dp_exposure": exposure(job, front, model),
    }


def _selection(settings: SweepSettings, job: JobSettings, front: dict[str, StepSpec]) -> SelectSpec:
    jobs = [settings.job(point) for point in settings.grid()]
    candidates = tuple(pretraining(one, front, "dp") for one in jobs)
    return SelectSpec(
        root=candidates[0].root,
        made_up=job.made_up,
        candidates=candidates,
        law=settings.selection_law,
        mean=settings.selection_mean,
        delta=job.delta,
    )


def missing_file(settings: JobSettings) -> tuple[str, str] | None:
    """Return the first setting whose file a step here could not read, and why; None: all are there.

    Only where steps run on this machine, as this user: what containers see, it cannot know.
    """
    for name, path in local_files(settings).items():
        place = os.path.expanduser(path)  # noqa: PTH111 - Path's refuses what it cannot expand
        if not os.path.isabs(place):  # noqa: PTH117 - as the line above
            return name, f"a path must be absolute: {path}"
        if "\0" in place or not os.access(place, os.F_OK):
            return name, f"no such file or folder: {path}"
        is_folder = os.path.isdir(place)  # noqa: PTH112 - as the line above
        if not (is_folder or os.path.isfile(place)):  # noqa: PTH113 - as the line above
            return name, f"neither a file nor a folder: {path}"
        if not os.access(place, os.R_OK | os.X_OK if is_folder else os.R_OK):
            return name, f"may not be read: {path}"
    return None


def local_files(settings: JobSettings) -> dict[str, str]:
    """Return the local files that the job reads, by setting. Formats that read none have none."""
    named = {
        "private_path": settings.private_path,
        "public_path": settings.public_path,
        "public_model": settings.public_model,
    }
    if settings.model_kind != CAUSAL:  # which is not fine-tuned for entities
        named |= {
            "entities_train": settings.entities_train,
            "entities_test": settings.entities_test,
            "entities_patients": settings.entities_patients,
        }
    return {name: path for name, path in named.items() if path and "://" not in path}
