"""Fine-tune a model for entity extraction, and score it by strict entity F1."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tokenizers import Tokenizer

from dp_core.config.training import is_causal
from dp_core.data.hashing import digest64
from dp_core.data.ner import Sentence, fold_of, label_set, score, tags_of_types
from dp_core.errors import BadInput
from dp_core.labels import Dp, Operator
from dp_core.models.parameters import Bert
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.training.finetune import finetune, finetune_privately, tag
from dp_core.training.loop import PrivateUpdates, Progress
from dp_core.vocabulary import wordpiece
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
from tasks.runtime.context import Input, StepContext, StepOutput
from tasks.steps.entities import read_part
from tasks.steps.training_outputs import Spending, write_model
from tasks.storage import sha256_of


@dataclass(frozen=True)
class _Tuned:
    """A fine-tuned model, what it makes of the test sentences, and its own charge, if any."""

    model: Bert
    predictions: list[tuple[str, ...]]
    release: ReleaseRecord | None = None


def run(spec: FinetuneSpec, context: StepContext) -> StepOutput:
    """Train on the training part, tag the test part, score.

    The model may be released if the one it began with may, and its labels are public or its
    training was private. Its F1 is `dp` on public labels only: on private ones it is a function
    of private sentences without noise, whatever the model is.
    """
    model = model_at(context, spec.model_uri, field="model_uri")
    if is_causal(model.facts.get("shape", {}).get("kind", "")):
        raise BadInput(
            "entity extraction needs a model that reads both sides of a word, and this one is"
            " causal",
            where="model_uri",
            fix="Give the output of a pre-training of kind bert or distilbert.",
        )
    context.descends_from_choice(spec.after)
    entities = output_of(context, spec.entities_uri, "entities")
    public = bool(fact(entities, "public"))
    if public and spec.plan is not None:
        raise BadInput("public labels need no privacy", where="finetune spec, plan")
    tuned = (
        _privately(spec, context, model, entities)
        if spec.plan
        else _freely(spec, context, model, entities)
    )
    label = _label(context, entities)
    test = sentences_of(spec, entities, "test")
    scores = score([s.tags for s in test], tuned.predictions)
    context.measure("f1", label(scores.micro.f1))
    context.measure("precision", label(scores.micro.precision))
    context.measure("recall", label(scores.micro.recall))
    for kind, of_type in scores.by_type.items():
        context.measure(f"f1/{kind}", label(of_type.f1))
    write_model(context, tuned.model, model)
    types = sorted(scores.by_type) if public else list(spec.entity_types)
    return StepOutput(
        outputs={"model": ""},
        facts={
            "entity_types": types,
            "epsilon_training": tuned.release.epsilon if tuned.release else None,
            # By document only where anyone may see them: facts are for everyone.
            **({"documents": _by_document(test, tuned.predictions)} if label is Dp else {}),
            "vocabulary_digest": vocabulary_digest(model),
            "began_with": model.facts.get("weights_digest", ""),
        },
    )


def sentences_of(spec: FinetuneSpec, entities: Input, part: str) -> list[Sentence]:
    """Return the sentences of the part `train` or `test`, as the step's own fold divides them.

    Raises:
        BadInput: the labels are public, and the part is empty.
    """
    if not spec.folds:
        return read_part(entities.folder, part)
    every = read_part(entities.folder, "train")
    own = [s for s in every if (fold_of(s, spec.folds) == spec.fold) == (part == "test")]
    if not own and entities.facts["public"]:  # of private ones, that is nobody's business
        raise BadInput(
            f"fold {spec.fold + 1} of {spec.folds} leaves nothing for the {part} part",
            where="entities_folds",
            fix="Use fewer folds; documents without names are all in one.",
        )
    return own


def _by_document(
    sentences: list[Sentence], predictions: list[tuple[str, ...]]
) -> dict[str, tuple[int, int, int]]:
    """Return (correct, predicted, expected) entities by the hash of the document's name."""
    of_document: dict[str, list[int]] = defaultdict(list)
    for number, sentence in enumerate(sentences):
        of_document[f"{digest64(b'', 'document', sentence.document_id):016x}"].append(number)
    found = {}
    for document, numbers in sorted(of_document.items()):
        own = score([sentences[i].tags for i in numbers], [predictions[i] for i in numbers]).micro
        found[document] = (own.correct, own.predicted, own.expected)
    return found


def _label(context: StepContext, entities: Input) -> type[Dp] | type[Operator]:
    """Return the label of what is measured on the labels: all that was charged is known by now."""
    return Operator if operator_only(context.releases) or not fact(entities, "public") else Dp


def _freely(spec: FinetuneSpec, context: StepContext, model: Input, entities: Input) -> _Tuned:
    """Fine-tune without noise; of private labels that is the operator's use, and is listed."""
    if not entities.facts["public"]:
        reason = "fine-tuning on private labels without privacy"
        record_operator_use(context, private_units(entities), reason=reason)
        if len(label_set(sentences_of(spec, entities, "train"))) == 1:
            raise BadInput("the training part has no entity", where="entities_train")
    tokenizer, label = wordpiece.load(model.folder), _label(context, entities)

    def progress(now: Progress) -> None:
        # In epochs: how many updates there are, or what share is one, says how many sentences.
        epochs = spec.epochs * now.update // now.updates
        if now.at_point:
            context.measure("finetuning_loss", label(now.loss), epochs)
        context.progress(epochs, spec.epochs)

    trained = finetune(
        model.folder,
        sentences_of(spec, entities, "train"),
        tokenizer,
        epochs=spec.epochs,
        batch_size=spec.batches.batch_size,
        config=spec.training,
        max_length=spec.sequence_length,
        seed=spec.seed,
        checkpoints=context.checkpoints("checkpoints"),
        device=spec.device,
        progress=progress,
    )
    return _Tuned(trained, _tagged(trained, spec, entities, tokenizer))


def _privately(spec: FinetuneSpec, context: StepContext, model: Input, entities: Input) -> _Tuned:
    """Fine-tune by DP-SGD: reserve, train, settle."""
    plan, units = training_plan(spec), private_units(entities)
    content = manifest(
        kind="finetune",
        entities=entities.facts["digest"],
        initial=sha256_of(model.folder / "model.safetensors"),
        vocabulary=sha256_of(model.folder / "vocab.txt"),
        plan=plan.to_json(),
        training_config=spec.training.identity(),
        types=",".join(spec.entity_types),
        folds=spec.folds,
        fold=spec.fold,
        max_length=spec.sequence_length,
        seed=spec.seed,
        device=spec.device,
    )
    charged = charge(context, units, planned_release(spec), content=content)
    # Only now may the labels be read.
    context.refuse_altered(entities)
    train = sentences_of(spec, entities, "train")
    tokenizer = wordpiece.load(model.folder)

    trained = finetune_privately(
        model.folder,
        train,
        tokenizer,
        labels=tags_of_types(spec.entity_types),
        units=units_of_sentences(train, plan.unit),
        updates=PrivateUpdates(plan, charged.seed, content),
        config=spec.training,
        init_seed=spec.seed,
        max_length=spec.sequence_length,
        checkpoints=context.checkpoints(f"checkpoints-{charged.entry.id}"),
        device=spec.device,
        progress=Spending(context, plan, spec.updates).tell,
    )
    release = charged.settle(weights_released(trained.parameters))
    return _Tuned(trained, _tagged(trained, spec, entities, tokenizer), release)


def _tagged(
    model: Bert, spec: FinetuneSpec, entities: Input, tokenizer: Tokenizer
) -> list[tuple[str, ...]]:
    test = sentences_of(spec, entities, "test")
    return tag(model, test, tokenizer, max_length=spec.sequence_length, device=spec.device)


def units_of_sentences(sentences: list[Sentence], unit: PrivacyUnit) -> list[str]:
    """Return each sentence's unit: its patient, its document, or itself.

    Raises:
        BadInput: the unit is the patient, and a sentence names none.
    """
    match unit:
        case PrivacyUnit.PATIENT:
            if not all(sentence.patient_id for sentence in sentences):
                raise unlisted_patients()
            return [sentence.patient_id for sentence in sentences]
        case PrivacyUnit.DOCUMENT:
            return [sentence.document_id for sentence in sentences]
        case PrivacyUnit.EXAMPLE:
            return [str(number) for number in range(len(sentences))]
