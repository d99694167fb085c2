"""Fine-tune a model with a head on labelled text; score it by strict entity F1 or accuracy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from dp_core.config.training import is_causal
from dp_core.data.labelled_text import LabelledItem, fold_of, unit_ids
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.labels import Dp, Label, Operator
from dp_core.models.parameters import Bert
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.training.finetune import finetune, finetune_privately
from dp_core.training.loop import PrivateUpdates, Progress
from dp_core.vocabulary import wordpiece
from tasks.context import StepArtifact, StepContext, StepOutput
from tasks.protocol import FinetuneSpec, ReleaseRecord
from tasks.releases.charge import charge, record_operator_use
from tasks.releases.manifest import manifest, weights_released
from tasks.releases.plans import planned_release, training_plan
from tasks.releases.provenance import (
    fact,
    model_at,
    operator_only,
    output_of,
    private_units,
    unlisted_patients,
    vocabulary_digest,
)
from tasks.report.sweep_results import DOCUMENTS_FILE
from tasks.results import Input, released_after
from tasks.steps.heads import Scores, head_of
from tasks.steps.training_outputs import SpendingReporter, write_model
from tasks.storage import sha256_of

ERRORS = "errors.json"  # labels and positions only, no word of the test part
Item = TypeVar("Item", bound=LabelledItem)


@dataclass(frozen=True)
class _Tuned:
    """A fine-tuned model, its labels, and the record of its release, if one was charged."""

    model: Bert
    labels: tuple[str, ...]
    release: ReleaseRecord | None = None


def run(spec: FinetuneSpec, context: StepContext) -> StepOutput:
    """Train on the training part, predict the test part, and score the predictions.

    The model may be released if its initial model may be, and either its labels are public or its
    training was private. Its score is `dp` on public labels only: on private labels, the score is a
    function of private texts without noise, even if the model is released.
    """
    model = model_at(context, spec.model_uri, field="model_uri", updates=spec.model_updates)
    if is_causal(model.facts.get("shape", {}).get("kind", "")):
        raise BadInput(
            "fine-tuning needs a model that reads both sides of a word, and this one is causal",
            where="model_uri",
            fix="Give the output of a pre-training of kind bert or distilbert.",
        )
    context.descends_from_choice(spec.after)
    entities = output_of(context, spec.entities_uri, "entities")
    if (held := fact(entities, "head")) != spec.head:
        raise BadInput(f"the labels are of {held}, the head is for {spec.head}", where="head")
    public = bool(fact(entities, "public"))
    if public and spec.plan is not None:
        raise BadInput("public labels need no privacy", where="finetune spec, plan")
    tuned = (
        _privately(spec, context, model, entities)
        if spec.plan
        else _freely(spec, context, model, entities)
    )
    label, head = _label(context, entities), head_of(spec)
    test = head.learned(items_of(spec, entities, "test"))
    predicted = head.predict(tuned.model, test, wordpiece.load(model.folder))
    scores = head.scores(test, predicted)
    _measure(context, scores, label)
    after = released_after(model.result)
    write_model(context, tuned.model, model, released_after=after)
    told = {"spec": spec.model_dump(mode="json"), **head.errors(test, predicted)}
    (context.out / ERRORS).write_text(json.dumps(told))
    kept = [ERRORS]
    if label is not Dp:
        (context.out / DOCUMENTS_FILE).write_text(json.dumps(dict(scores.counts)))
        kept.append(DOCUMENTS_FILE)
    names = sorted(scores.f1_by_label) if public else list(spec.label_names)
    return StepOutput(
        outputs={"model": ""},
        facts={
            "head": spec.head,
            "labels": names,
            "epsilon_training": tuned.release.epsilon if tuned.release else None,
            # Counts by document are written only if they are not private, because facts are public.
            **({"documents": dict(scores.counts)} if label is Dp else {}),
            "vocabulary_digest": vocabulary_digest(model),
            "began_with": model.facts.get("weights_digest", ""),
            "released_after": list(after),
        },
        artifacts=[StepArtifact(file, Label.OPERATOR) for file in kept],
    )


def _measure(context: StepContext, scores: Scores, label: type[Dp] | type[Operator]) -> None:
    """Measure every score, and the confidence interval of the headline score."""
    for name, value in scores.values.items():
        context.measure(name, label(value))
    for name, value in scores.f1_by_label.items():
        context.measure(f"f1/{name}", label(value))
    if scores.interval is not None:
        for end, value in zip(("low", "high"), scores.interval, strict=True):
            context.measure(f"{scores.headline}_{end}", label(value))


def items_of(spec: FinetuneSpec, entities: Input, part: str) -> list[Any]:
    """Return the texts of the part `train` or `test`, in the step's own fold.

    Raises:
        BadInput: the labels are public, and the part is empty.
    """
    read = head_of(spec).read
    if not spec.folds:
        return read(entities.folder, part)
    every = read(entities.folder, "train")
    own = [s for s in every if (fold_of(s, spec.folds) == spec.fold) == (part == "test")]
    if not own and entities.facts["public"]:  # for private labels this fact is private
        raise BadInput(
            f"fold {spec.fold + 1} of {spec.folds} leaves nothing for the {part} part",
            where="entities_folds",
            fix="Use fewer folds; documents without names are all in one.",
        )
    return own


def _label(context: StepContext, entities: Input) -> type[Dp] | type[Operator]:
    """Return the label of scores on these labels; every charge has been made by this point."""
    return Operator if operator_only(context.releases) or not fact(entities, "public") else Dp


def _freely(spec: FinetuneSpec, context: StepContext, model: Input, entities: Input) -> _Tuned:
    """Fine-tune without noise; with private labels, list the training as the operator's use."""
    if not entities.facts["public"]:
        reason = "fine-tuning on private labels without privacy"
        record_operator_use(context, private_units(entities), reason=reason)
    head, label = head_of(spec), _label(context, entities)
    train = head.learned(items_of(spec, entities, "train"))
    labels = head.labels(train)
    if not labels:
        raise PrivateTextRefusal("the training part has no label", where="entities_train")

    def progress(now: Progress) -> None:
        # In epochs, because the number or share of updates reveals the number of sentences.
        epochs = spec.epochs * now.update // now.updates
        if now.at_point:
            context.measure("finetuning_loss", label(now.loss), epochs)
        context.progress(epochs, spec.epochs)

    trained = finetune(
        model.folder,
        train,
        wordpiece.load(model.folder),
        head=head.head(labels),
        epochs=spec.epochs,
        batch_size=spec.batches.batch_size,
        config=spec.training,
        max_length=spec.sequence_length,
        seed=spec.seed,
        checkpoints=context.checkpoints("checkpoints"),
        device=spec.device,
        progress=progress,
    )
    return _Tuned(trained, labels)


def _privately(spec: FinetuneSpec, context: StepContext, model: Input, entities: Input) -> _Tuned:
    """Fine-tune by DP-SGD: reserve the release, train, settle it."""
    plan, units = training_plan(spec), private_units(entities)
    content = manifest(
        kind="finetune",
        entities=entities.facts["digest"],
        initial=sha256_of(model.folder / "model.safetensors"),
        vocabulary=sha256_of(model.folder / "vocab.txt"),
        plan=plan.to_json(),
        training_config=spec.training.identity(),
        head=spec.head,
        labels=",".join(spec.label_names),
        context=spec.tagging_context,
        overlap=spec.window_overlap,
        crf=spec.crf,
        folds=spec.folds,
        fold=spec.fold,
        max_length=spec.sequence_length,
        seed=spec.seed,
        device=spec.device,
    )
    charged = charge(context, units, planned_release(spec), content=content)
    # The labels may be read only after the charge.
    context.refuse_altered(entities)
    head = head_of(spec)
    train = head.learned(items_of(spec, entities, "train"))
    trained = finetune_privately(
        model.folder,
        train,
        wordpiece.load(model.folder),
        head=head.head(spec.label_names),
        units=units_of(train, plan.unit),
        updates=PrivateUpdates(plan, charged.seed, content),
        config=spec.training,
        init_seed=spec.seed,
        max_length=spec.sequence_length,
        checkpoints=context.checkpoints(f"checkpoints-{charged.entry.id}"),
        device=spec.device,
        progress=SpendingReporter(context, plan, spec.updates).tell,
    )
    release = charged.settle(weights_released(trained.parameters))
    return _Tuned(trained, spec.label_names, release)


def units_of(items: list[Item], unit: PrivacyUnit) -> list[str]:
    """Return the id of each text's unit: its patient, its document, or the text itself.

    Raises:
        BadInput: the unit is the patient, and a text names no patient.
    """
    if unit is PrivacyUnit.PATIENT and not all(item.patient_id for item in items):
        raise unlisted_patients()
    return unit_ids(items, unit)
