"""Read labelled text: a training and a test part, or a single part to divide into folds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from dp_core.config.training import Head
from dp_core.data.labelled_text import LabelledItem, LabelledText, Sentence, all_entities, fold_of
from dp_core.data.readers import registry
from dp_core.data.readers.labelled_texts import read_patients, with_patients
from dp_core.data.readers.quarantine import Quarantine
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.labels import Operator, Public
from tasks.context import StepContext, StepOutput, read_checked
from tasks.demo_data.entities import labelled_pairs, labelled_sentences, labelled_texts
from tasks.protocol.specs import EntitiesSpec, FinetuneSpec
from tasks.releases.declarations import open_source
from tasks.releases.deployment_ledger import refuse_unregistered
from tasks.results import Input
from tasks.runtime.log import log
from tasks.steps.corpus_step import listed

PARTS = ("train", "test")
_CHECK = "Check the format, the names of labels, and the list of items that were set aside."
_ITEMS: dict[type[LabelledItem], TypeAdapter[Any]] = {
    Sentence: TypeAdapter(Sentence),
    LabelledText: TypeAdapter(LabelledText),
}


@dataclass(frozen=True)
class _Kind:
    """The made-up parts and the labels of one kind of labelled text.

    Attributes:
        noun: name of the items in metrics.
        made_up: seed -> the training and the test part.
        labels: items -> their entity types or classes.
        least: number of labels that a training part needs.
    """

    noun: str
    made_up: Callable[[int], tuple[list[Any], list[Any]]]
    labels: Callable[[Sequence[Any]], set[str]]
    least: int


def run(spec: EntitiesSpec, context: StepContext) -> StepOutput:
    """Write the parts as JSON lines; counts of private labels are for the operator."""
    if not spec.public:
        refuse_unregistered(context, spec.dataset)  # its uses are recorded in the ledger
    opened, kind = [open_source(source, context) for source in spec.sources], _KINDS[spec.head]
    names = PARTS[:1] if spec.folded else PARTS
    if spec.format == "synthetic":
        parts = dict(zip(names, kind.made_up(spec.seed), strict=False))
    else:
        parts = {
            part: _read(kind, spec, context, part, source.path)
            for part, source in zip(names, opened[: len(names)], strict=True)
        }
    if spec.patients_path:
        patients = read_patients(opened[-1].path)
        parts["train"] = with_patients(parts["train"], patients)
    count = Public if spec.public else Operator
    for part, items in parts.items():
        write_items(items, context.out / f"{part}.jsonl")
        context.measure(f"{part}_{kind.noun}", count(len(items)))
    # The step `reserve` checks private labels, if they are learned without privacy.
    if spec.public and len(kind.labels(parts["train"])) < kind.least:
        raise BadInput(_lack(kind), where="entities_train", fix=_CHECK)
    return StepOutput(
        outputs={part: f"{part}.jsonl" for part in parts},
        facts={
            "head": spec.head,
            "public": spec.public,
            "dataset": spec.dataset,
            "unit": spec.entities_unit,
            "all_name_a_patient": all(item.patient_id for item in parts["train"]),
            "digest": context.content_digest(context.out),
        },
    )


def refuse_unlearnable(spec: FinetuneSpec, entities: Input) -> None:
    """Refuse labels that a fine-tuning without privacy cannot learn, in any of its folds.

    Raises:
        PrivateTextRefusal: a training part holds no declared entity, or fewer than two declared
            classes.
    """
    kind = _KINDS[spec.head]
    items: list[LabelledItem] = read_items(entities.folder, "train", spec.head)
    for fold in range(spec.folds or 1):
        train = [i for i in items if not spec.folds or fold_of(i, spec.folds) != fold]
        labels = kind.labels(train)
        if len(labels.intersection(spec.label_names or labels)) < kind.least:
            raise PrivateTextRefusal(_lack(kind), where="entities_train", fix=_CHECK)


def _lack(kind: _Kind) -> str:
    lacking = "no entity" if kind.least == 1 else "fewer than two classes"
    return f"the training part has {lacking} to learn"


def _read(
    kind: _Kind, spec: EntitiesSpec, context: StepContext, part: str, path: Path
) -> list[Any]:
    readers: Mapping[str, registry.Reader[Any]] = (
        registry.sentence_readers(public=spec.public, scheme=spec.scheme)
        if spec.head == "entities"
        else registry.labelled_text_readers(pairs=spec.head == "pairs")
    )
    quarantine = Quarantine()
    with listed(quarantine, context, f"{part}_quarantine.json"):
        items = list(registry.read_source(readers, spec.format, path, quarantine))
    if quarantine.schemes and spec.public:  # of private tags, only the list of the reader says it
        log(f"{part}: the tags are {' or '.join(quarantine.schemes)}")
    label = Public if spec.public else Operator
    context.measure_omissions(f"{part}_{kind.noun}", quarantine, label)
    return items


def write_items(items: Iterable[Sentence | LabelledText], file: Path) -> None:
    """Write sentences, or texts with a class, as JSON lines."""
    with file.open("wb") as stream:
        for item in items:
            stream.write(_ITEMS[type(item)].dump_json(item) + b"\n")


def read_items(folder: Path, part: str, head: Head) -> list[Any]:
    """Return the sentences, or the texts with a class, of a part that this step wrote.

    Raises:
        BadInput: the file has changed since it was written.
    """
    noun, kind = ("sentences", Sentence) if head == "entities" else ("texts", LabelledText)

    def parse(content: bytes) -> list[Any]:
        items = [_ITEMS[kind].validate_json(line, strict=True) for line in content.splitlines()]
        for item in items if kind is Sentence else ():
            if not all(0 <= begin < end <= len(item.tokens) for _, begin, end in item.overlapped):
                raise ValueError("an entity is not within the sentence")
        return items

    return read_checked(folder / f"{part}.jsonl", parse, noun, "entities")


def _types(sentences: Sequence[Sentence]) -> set[str]:
    return {kind for s in sentences for kind, _, _ in all_entities(s)}


def _classes(texts: Sequence[LabelledText]) -> set[str]:
    return {text.label for text in texts}


_KINDS: dict[Head, _Kind] = {
    "entities": _Kind("sentences", lambda seed: labelled_sentences(seed=seed), _types, 1),
    "classes": _Kind("texts", labelled_texts, _classes, 2),
    "pairs": _Kind("pairs", labelled_pairs, _classes, 2),
}
