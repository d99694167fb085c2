"""Fine-tune a model with a head on labelled text; score it by strict entity F1 or accuracy."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer

from dp_core.config.training import is_causal
from dp_core.data.hashing import digest64
from dp_core.data.labelled_text import (
    Entity,
    LabelledItem,
    LabelledText,
    Sentence,
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
from dp_core.labels import Dp, Label, Operator
from dp_core.models.parameters import Bert
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.training.bootstrap import Replicate, mean_f1
from dp_core.training.finetune import Head, finetune, finetune_privately
from dp_core.training.heads import ClassHead, TaggingHead, classes_of, tag
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
from tasks.report.results import EXPECTED_ENTITIES
from tasks.report.sweep_results import DOCUMENTS_FILE
from tasks.results.inputs import Input
from tasks.results.statements import released_after
from tasks.steps.entities_step import read_part, read_text_part
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


_AROUND = 8  # number of words shown on each side of an error


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


class HeadOfStep(Protocol):
    """The interface of a head in a fine-tuning step."""

    def read(self, folder: Any, part: str) -> list[Any]:
        """Return the labelled texts that the entities step wrote."""

    def learned(self, items: Sequence[Any]) -> list[Any]:
        """Return the texts of a part that are learned and scored."""

    def labels(self, train: Sequence[Any]) -> tuple[str, ...]:
        """Return the entity types or classes: those in the settings, or else all in the texts."""

    def head(self, labels: Sequence[str]) -> Head[Any, Any]:
        """Return the head that learns these labels."""

    def predict(self, model: Bert, items: Sequence[Any], tokenizer: Tokenizer) -> list[Any]:
        """Return the model's prediction for each text, without reading the text's labels."""

    def scores(self, items: Sequence[Any], predicted: Sequence[Any]) -> Scores:
        """Return the scores of the predictions."""

    def errors(self, items: Sequence[Any], predicted: Sequence[Any]) -> dict[str, Any]:
        """Return every wrong prediction by the number of its text, and counts; no word of a text.

        The label is `operator`, because the labels of private texts are private too.
        """

    def in_words(self, items: Sequence[Any], error: Mapping[str, Any]) -> dict[str, str]:
        """Return one of these errors with the words around it."""


def head_of(spec: FinetuneSpec) -> HeadOfStep:
    """Return the head that the spec names."""
    return Tagging(spec) if spec.head == "entities" else Classifying(spec)


@dataclass(frozen=True)
class Tagging:
    """Entity recognition: tags of words, scored by strict F1."""

    spec: FinetuneSpec

    def read(self, folder: Any, part: str) -> list[Sentence]:
        """As in `HeadOfStep`."""
        return read_part(folder, part)

    def learned(self, items: Sequence[Sentence]) -> list[Sentence]:
        """Return the sentences, or whole documents, with the entities of the configured types."""
        types = self.spec.entity_types
        chosen = with_types(items, types) if types else list(items)
        return joined(chosen) if self.spec.tagging_context == "document" else chosen

    def labels(self, train: Sequence[Sentence]) -> tuple[str, ...]:
        """As in `HeadOfStep`."""
        if self.spec.entity_types:
            return self.spec.entity_types
        return tuple(dict.fromkeys(tag[2:] for tag in label_set(train)[1:]))

    def head(self, labels: Sequence[str]) -> TaggingHead:
        """As in `HeadOfStep`."""
        return TaggingHead(tags_of_types(labels), self.spec.crf, self.spec.window_overlap)

    def predict(
        self, model: Bert, items: Sequence[Sentence], tokenizer: Tokenizer
    ) -> list[tuple[str, ...]]:
        """As in `HeadOfStep`."""
        return tag(
            model,
            items,
            tokenizer,
            max_length=self.spec.sequence_length,
            overlap=self.spec.window_overlap,
            device=self.spec.device,
        )

    def scores(self, items: Sequence[Sentence], predicted: Sequence[tuple[str, ...]]) -> Scores:
        """As in `HeadOfStep`."""
        found = score(items, predicted)
        micro = found.micro
        counts = {}
        for owner, own in _by_owner(items).items():
            one = score([items[i] for i in own], [predicted[i] for i in own]).micro
            counts[owner] = (one.correct, one.predicted, one.expected)
        values: dict[str, float] = {EXPECTED_ENTITIES: micro.expected}
        if micro.expected:  # F1 is undefined, not 0, if the text has no entity.
            values |= {"f1": micro.f1, "precision": micro.precision, "recall": micro.recall}
        return Scores(
            "f1",
            values,
            {kind: of_type.f1 for kind, of_type in found.by_type.items() if of_type.expected},
            counts,
        )

    def errors(
        self, items: Sequence[Sentence], predicted: Sequence[tuple[str, ...]]
    ) -> dict[str, Any]:
        """As in `HeadOfStep`; counts are by type, for a spurious entity by its predicted type."""
        listed: list[dict[str, Any]] = []
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for number, (item, guess) in enumerate(zip(items, predicted, strict=True)):
            for error in tagging_errors(item, guess):
                kind = (error.expected or error.predicted or ("",))[0]
                counts[kind][error.kind] += 1
                own = {"expected": error.expected, "predicted": error.predicted}
                listed.append({"item": number, "error": error.kind} | own)
        by_type = {kind: dict(sorted(own.items())) for kind, own in sorted(counts.items())}
        return {"counts": by_type, "errors": listed}

    def in_words(self, items: Sequence[Sentence], error: Mapping[str, Any]) -> dict[str, str]:
        """As in `HeadOfStep`; eight words are shown on each side."""
        item, wanted, found = items[error["item"]], error["expected"], error["predicted"]
        spans = [(begin, end) for _, begin, end in (e for e in (wanted, found) if e is not None)]
        first = max(0, min(begin for begin, _ in spans) - _AROUND)
        last = max(end for _, end in spans) + _AROUND
        return {
            "document": item.document_id,
            "error": error["error"],
            "expected": _shown(item, wanted),
            "predicted": _shown(item, found),
            "context": " ".join(item.tokens[first:last]),
        }


@dataclass(frozen=True)
class Classifying:
    """Classification of texts or of pairs of texts, scored by accuracy."""

    spec: FinetuneSpec

    def read(self, folder: Any, part: str) -> list[LabelledText]:
        """As in `HeadOfStep`."""
        return read_text_part(folder, part)

    def learned(self, items: Sequence[LabelledText]) -> list[LabelledText]:
        """Return the texts of the configured classes."""
        told = self.spec.class_names
        return [text for text in items if not told or text.label in told]

    def labels(self, train: Sequence[LabelledText]) -> tuple[str, ...]:
        """As in `HeadOfStep`."""
        return self.spec.class_names or tuple(sorted({text.label for text in train}))

    def head(self, labels: Sequence[str]) -> ClassHead:
        """As in `HeadOfStep`."""
        return ClassHead(tuple(labels))

    def predict(
        self, model: Bert, items: Sequence[LabelledText], tokenizer: Tokenizer
    ) -> list[str]:
        """As in `HeadOfStep`."""
        return classes_of(
            model,
            items,
            tokenizer,
            max_length=self.spec.sequence_length,
            device=self.spec.device,
        )

    def scores(self, items: Sequence[LabelledText], predicted: Sequence[str]) -> Scores:
        """As in `HeadOfStep`."""
        found = class_scores([text.label for text in items], predicted)
        counts = {}
        for owner, own in _by_owner(items).items():
            right = sum(items[i].label == predicted[i] for i in own)
            counts[owner] = (right, len(own), len(own))
        return Scores(
            "accuracy",
            {"accuracy": found.accuracy, "f1_macro": found.macro_f1},
            found.f1_by_class,
            counts,
        )

    def errors(self, items: Sequence[LabelledText], predicted: Sequence[str]) -> dict[str, Any]:
        """As in `HeadOfStep`; counts are by expected class and predicted class."""
        listed = []
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for number, (item, guess) in enumerate(zip(items, predicted, strict=True)):
            if guess != item.label:
                counts[item.label][guess] += 1
                own = {"expected": item.label, "predicted": guess}
                listed.append({"item": number, "error": "wrong class"} | own)
        by_class = {label: dict(sorted(own.items())) for label, own in sorted(counts.items())}
        return {"counts": by_class, "errors": listed}

    def in_words(self, items: Sequence[LabelledText], error: Mapping[str, Any]) -> dict[str, str]:
        """As in `HeadOfStep`; the whole text or pair is shown."""
        item = items[error["item"]]
        told = {name: error[name] for name in ("error", "expected", "predicted")}
        context = " ⏎ ".join(text for text in (item.first, item.second) if text)
        return {"document": item.document_id, **told, "context": context}


def _shown(item: Sentence, entity: Entity | None) -> str:
    if entity is None:
        return "–"
    kind, begin, end = entity
    return f"{kind}: {' '.join(item.tokens[begin:end])}"


def _by_owner(items: Iterable[LabelledItem]) -> dict[str, list[int]]:
    """Return the numbers of the items of each patient or document, by the hash of its name."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        found[f"{digest64(b'', 'document', owner_of(item)):016x}"].append(number)
    return dict(sorted(found.items()))
