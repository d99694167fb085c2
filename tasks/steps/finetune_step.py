"""Fine-tune a model with a head on labelled text; score it by strict entity F1 or accuracy."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dp_core.config.training import is_causal
from dp_core.data.hashing import digest64
from dp_core.data.labelled_text import (
    Entity,
    LabelledItem,
    LabelledText,
    Sentence,
    all_entities,
    class_scores,
    fold_of,
    joined,
    label_set,
    owner_of,
    score,
    tagging_errors,
    tags_of_types,
    unit_ids,
    with_types,
)
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.labels import Dp, Label, Operator, Public
from dp_core.models.parameters import Bert
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.statement import operator_only
from dp_core.training.bootstrap import Replicate, mean_f1
from dp_core.training.devices import strategy_for
from dp_core.training.finetune import Epochs, finetune
from dp_core.training.heads import ClassHead, Head, TaggingHead
from dp_core.training.loop import PrivateUpdates, Progress
from dp_core.vocabulary import tokenizer_files
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import FinetuneSpec
from tasks.releases.charge import charge, planned_release, record_operator_use, training_plan
from tasks.releases.manifest import manifest, weights_released
from tasks.releases.provenance import fact, model_at, output_of, private_units, vocabulary_digest
from tasks.report.job_results import DOCUMENTS_FILE, EXPECTED_ENTITIES, LABEL_COUNTS
from tasks.results import Input, released_after
from tasks.steps.entities_step import PARTS, read_items
from tasks.steps.training_files import TrainingCurve, write_model
from tasks.storage.store import sha256_of

ERRORS = "errors.json"  # labels and positions only, no word of the test part
_AROUND = 8  # number of words shown on each side of an error


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
    tuned, head, epsilon = _tuned(spec, context, model, entities)
    label, task = _label(context, entities), task_of(spec)
    test = task.learned(items_of(spec, entities, "test"))
    predicted = head.predict(
        tuned,
        test,
        tokenizer_files.load(model.folder),
        max_length=spec.sequence_length,
        device=spec.device,
    )
    scores = task.scores(test, predicted)
    _measure(context, scores, label)
    count = Public if public else Operator
    for part in PARTS:
        counts = task.count(task.learned(items_of(spec, entities, part)))
        for name in scores.f1_by_label:
            context.measure(f"{part}{LABEL_COUNTS}{name}", count(counts[name]))
    after = released_after(model.result)
    write_model(context, tuned, model, released_after=after)
    errors = {"spec": spec.model_dump(mode="json"), **errors_of(task, test, predicted)}
    (context.out / ERRORS).write_text(json.dumps(errors))
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
            "epsilon_training": epsilon,
            # Counts by document are written only if they are not private, because facts are public.
            **({"documents": dict(scores.counts)} if label is Dp else {}),
            "vocabulary_digest": vocabulary_digest(model),
            "began_with": model.facts.get("weights_digest", ""),
            "released_after": list(after),
        },
        artifacts=dict.fromkeys(kept, Label.OPERATOR),
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
    if not spec.folds:
        return read_items(entities.folder, part, spec.head)
    every = read_items(entities.folder, "train", spec.head)
    of_part = [s for s in every if (fold_of(s, spec.folds) == spec.fold) == (part == "test")]
    if not of_part and entities.facts["public"]:  # for private labels this fact is private
        raise BadInput(
            f"fold {spec.fold + 1} of {spec.folds} leaves nothing for the {part} part",
            where="entities_folds",
            fix="Use fewer folds; documents without names are all in one.",
        )
    return of_part


def _label(context: StepContext, entities: Input) -> type[Dp] | type[Operator]:
    """Return the label of scores on these labels; every charge has been made by this point."""
    return Operator if operator_only(context.releases) or not fact(entities, "public") else Dp


def _tuned(
    spec: FinetuneSpec, context: StepContext, model: Input, entities: Input
) -> tuple[Bert, Head[Any, Any], float | None]:
    """Return the model, fine-tuned by DP-SGD or without privacy, its head, and ε of its release.

    DP-SGD reserves its release, trains and settles. Training on private labels without privacy is
    listed as the operator's use.
    """
    task, charged, updates = task_of(spec), None, None
    if spec.plan:
        strategy_for(spec.device)  # refuses an absent device before the charge
        plan, units = training_plan(spec), private_units(entities)
        content = _manifest(spec, model, entities, plan)
        charged = charge(context, units, planned_release(spec), content=content)
        # The labels may be read only after the charge.
        context.refuse_altered(entities)
        updates = PrivateUpdates(plan, charged.seed, content)
    elif not entities.facts["public"]:
        reason = "fine-tuning on private labels without privacy"
        record_operator_use(context, private_units(entities), reason=reason)
    label = _label(context, entities)
    train = task.learned(items_of(spec, entities, "train"))
    labels = spec.label_names if charged else task.labels(train)
    if not labels:
        raise PrivateTextRefusal("the training part has no label", where="entities_train")
    head = task.head(labels)

    def progress(now: Progress) -> None:
        # In epochs, because the number or share of updates reveals the number of sentences.
        epochs = spec.epochs * now.update // now.updates
        if now.at_point:
            context.measure("finetuning_loss", label(now.loss), epochs)
        context.progress(epochs, spec.epochs)

    trained = finetune(
        model.folder,
        train,
        tokenizer_files.load(model.folder),
        head=head,
        updates=updates or Epochs(spec.epochs, spec.batches.batch_size),
        units=unit_ids(train, updates.plan.unit) if updates else None,
        config=spec.training,
        max_length=spec.sequence_length,
        seed=spec.seed,
        checkpoints=context.checkpoints(
            f"checkpoints-{charged.entry.id}" if charged else "checkpoints"
        ),
        device=spec.device,
        progress=TrainingCurve(context, updates.plan, spec.updates) if updates else progress,
    )
    epsilon = charged.settle(weights_released(trained.parameters)).epsilon if charged else None
    return trained, head, epsilon


def _manifest(spec: FinetuneSpec, model: Input, entities: Input, plan: ExecutionPlan) -> bytes:
    return manifest(
        kind="finetune",
        entities=entities.facts["digest"],
        initial=sha256_of(model.folder / "model.safetensors"),
        vocabulary=vocabulary_digest(model),
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


@dataclass(frozen=True)
class Scores:
    """The scores of predictions.

    Attributes:
        headline: the measure that models are compared by, `f1` or `accuracy`.
        values: score by name; they include the headline unless it is undefined.
        f1_by_label: F1 by entity type or class.
        counts: (right, predicted, expected) by the hash of the name of the patient or document; for
            accuracy, which equals micro F1 here, predicted equals expected.
    """

    headline: str
    values: Mapping[str, float]
    f1_by_label: Mapping[str, float]
    counts: Mapping[str, tuple[int, int, int]]

    @property
    def interval(self) -> tuple[float, float] | None:
        """The headline's 95% bootstrap interval over patients or documents; None for too few."""
        if self.headline not in self.values:
            return None
        return mean_f1([Replicate("", 0, self.counts)]).interval


def errors_of(
    task: Tagging | Classifying, items: Sequence[Any], predicted: Sequence[Any]
) -> dict[str, Any]:
    """Return every wrong prediction by the number of its text, and counts; no word of a text.

    The label is `operator`, because the labels of private texts are private too.
    """
    listed: list[dict[str, Any]] = []
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number, (item, guess) in enumerate(zip(items, predicted, strict=True)):
        for label, kind, error in task.mistakes(item, guess):
            counts[label][kind] += 1
            listed.append({"item": number} | error)
    by_label = {label: dict(sorted(kinds.items())) for label, kinds in sorted(counts.items())}
    return {"counts": by_label, "errors": listed}


def task_of(spec: FinetuneSpec) -> Tagging | Classifying:
    """Return the task of the spec's head."""
    return Tagging(spec) if spec.head == "entities" else Classifying(spec)


@dataclass(frozen=True)
class Tagging:
    """Entity recognition: tags of words, scored by strict F1."""

    spec: FinetuneSpec

    def learned(self, items: Sequence[Sentence]) -> list[Any]:
        """Return the sentences, or whole documents, with the entities of the configured types."""
        types = self.spec.entity_types
        chosen = with_types(items, types) if types else list(items)
        return joined(chosen) if self.spec.tagging_context == "document" else chosen

    def labels(self, train: Sequence[Sentence]) -> tuple[str, ...]:
        """Return the entity types."""
        types = tuple(dict.fromkeys(tag[2:] for tag in label_set(train)[1:]))
        return self.spec.entity_types or types

    def count(self, items: Sequence[Sentence]) -> Counter[str]:
        """Return the number of entities by type."""
        return Counter(kind for item in items for kind, _, _ in all_entities(item))

    def head(self, labels: Sequence[str]) -> TaggingHead:
        """Return the head that tags words with these types."""
        return TaggingHead(tags_of_types(labels), self.spec.crf, self.spec.window_overlap)

    def scores(self, items: Sequence[Sentence], predicted: Sequence[tuple[str, ...]]) -> Scores:
        """Return strict F1, precision and recall."""
        strict = score(items, predicted)
        micro = strict.micro

        def counts(numbers: list[int]) -> tuple[int, int, int]:
            of_owner = score([items[i] for i in numbers], [predicted[i] for i in numbers]).micro
            return of_owner.correct, of_owner.predicted, of_owner.expected

        values: dict[str, float] = {EXPECTED_ENTITIES: micro.expected}
        if micro.expected:  # F1 is undefined, not 0, if the text has no entity.
            values |= {"f1": micro.f1, "precision": micro.precision, "recall": micro.recall}
        by_type = {kind: of_type.f1 for kind, of_type in strict.by_type.items() if of_type.expected}
        return Scores("f1", values, by_type, _by_owner(items, counts))

    def mistakes(
        self, item: Sentence, guess: tuple[str, ...]
    ) -> list[tuple[str, str, dict[str, Any]]]:
        """Return the wrong entities; a spurious one counts under its predicted type."""
        return [
            (
                (error.expected or error.predicted or ("",))[0],
                error.kind,
                {"error": error.kind, "expected": error.expected, "predicted": error.predicted},
            )
            for error in tagging_errors(item, guess)
        ]

    def in_words(self, items: Sequence[Sentence], error: Mapping[str, Any]) -> dict[str, str]:
        """Return an error with eight words on each side."""
        item, wanted, guessed = items[error["item"]], error["expected"], error["predicted"]
        spans = [(begin, end) for _, begin, end in (e for e in (wanted, guessed) if e is not None)]
        first = max(0, min(begin for begin, _ in spans) - _AROUND)
        last = max(end for _, end in spans) + _AROUND
        return {
            "document": item.document_id,
            "error": error["error"],
            "expected": _shown(item, wanted),
            "predicted": _shown(item, guessed),
            "context": " ".join(item.tokens[first:last]),
        }


@dataclass(frozen=True)
class Classifying:
    """Classification of texts or of pairs of texts, scored by accuracy."""

    spec: FinetuneSpec

    def learned(self, items: Sequence[LabelledText]) -> list[Any]:
        """Return the texts of the configured classes."""
        classes = self.spec.class_names
        return [text for text in items if not classes or text.label in classes]

    def labels(self, train: Sequence[LabelledText]) -> tuple[str, ...]:
        """Return the classes."""
        return self.spec.class_names or tuple(sorted({text.label for text in train}))

    def count(self, items: Sequence[LabelledText]) -> Counter[str]:
        """Return the number of texts by class."""
        return Counter(item.label for item in items)

    def head(self, labels: Sequence[str]) -> ClassHead:
        """Return the head that learns these classes."""
        return ClassHead(tuple(labels))

    def scores(self, items: Sequence[LabelledText], predicted: Sequence[str]) -> Scores:
        """Return accuracy and macro F1."""
        of_classes = class_scores([text.label for text in items], predicted)

        def counts(numbers: list[int]) -> tuple[int, int, int]:
            right = sum(items[i].label == predicted[i] for i in numbers)
            return right, len(numbers), len(numbers)

        values = {"accuracy": of_classes.micro.recall, "f1_macro": of_classes.macro_f1}
        by_class = {name: of_class.f1 for name, of_class in of_classes.by_type.items()}
        return Scores("accuracy", values, by_class, _by_owner(items, counts))

    def mistakes(self, item: LabelledText, guess: str) -> list[tuple[str, str, dict[str, Any]]]:
        """Return a wrong class, which counts under the expected and the predicted class."""
        error = {"error": "wrong class", "expected": item.label, "predicted": guess}
        return [] if guess == item.label else [(item.label, guess, error)]

    def in_words(self, items: Sequence[LabelledText], error: Mapping[str, Any]) -> dict[str, str]:
        """Return an error with the whole text or pair."""
        item = items[error["item"]]
        shown = {name: error[name] for name in ("error", "expected", "predicted")}
        context = " ⏎ ".join(text for text in (item.first, item.second) if text)
        return {"document": item.document_id, **shown, "context": context}


def _shown(item: Sentence, entity: Entity | None) -> str:
    if entity is None:
        return "–"
    kind, begin, end = entity
    return f"{kind}: {' '.join(item.tokens[begin:end])}"


def _by_owner(
    items: Iterable[LabelledItem], counts: Callable[[list[int]], tuple[int, int, int]]
) -> dict[str, tuple[int, int, int]]:
    """Return the counts of each patient's or document's items, by the hash of its name."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        numbers[f"{digest64(b'', 'document', owner_of(item)):016x}"].append(number)
    return {owner: counts(of_owner) for owner, of_owner in sorted(numbers.items())}
