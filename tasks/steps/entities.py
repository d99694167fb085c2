"""Read sentences with entity labels: a training and a test part, or one to make folds of."""

from __future__ import annotations

import json
from pathlib import Path

from dp_core.data.ner import Sentence, label_set
from dp_core.data.readers.patients import read_patients, with_patients
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import read_sentences
from dp_core.errors import BadInput
from dp_core.labels import Operator, Public
from tasks.demo_data.entities import labelled_sentences
from tasks.protocol import EntitiesSpec, StepResult
from tasks.releases import declarations
from tasks.releases.declarations import open_source
from tasks.releases.ledger import refuse_unregistered
from tasks.runtime.context import StepContext, StepOutput
from tasks.steps.corpus import listed

PARTS = ("train", "test")


def run(spec: EntitiesSpec, context: StepContext) -> StepOutput:
    """Write the parts as JSON lines; counts of private labels are for the operator."""
    if not spec.public:
        refuse_unregistered(context, spec.dataset)  # what reads them will be written down there
    opened = [open_source(source, context) for source in spec.sources]
    names = PARTS[:1] if spec.folded else PARTS
    if spec.format == "synthetic":
        parts = dict(zip(names, labelled_sentences(seed=spec.seed), strict=False))
    else:
        parts = {
            part: _read(spec, context, part, source.path)
            for part, source in zip(names, opened[: len(names)], strict=True)
        }
    if spec.patients_path:
        patients = read_patients(opened[-1].path)
        parts["train"] = with_patients(parts["train"], patients)
    count = Public if spec.public else Operator
    for part, sentences in parts.items():
        write_sentences(sentences, context.out / f"{part}.jsonl")
        context.measure(f"{part}_sentences", count(len(sentences)))
    # Of private labels, whether one unit's entity is the only one is not for this step to tell.
    if spec.public and len(label_set(parts["train"])) == 1:
        raise BadInput("the training part has no entity", where="entities_train")
    return StepOutput(
        outputs={part: f"{part}.jsonl" for part in parts},
        facts={
            "public": spec.public,
            "dataset": spec.dataset,
            "unit": spec.entities_unit,
            "all_name_a_patient": bool(spec.patients_path),
            "source_digests": [source.digest for source in opened],
            "digest": context.content_digest(context.out),
        },
    )


def write_sentences(sentences: list[Sentence], file: Path) -> None:
    """Write sentences as JSON lines."""
    with file.open("w", encoding="utf-8") as stream:
        for s in sentences:
            stream.write(json.dumps([s.document_id, s.tokens, s.tags, s.patient_id]) + "\n")


def read_part(folder: Path, part: str) -> list[Sentence]:
    """Return the sentences of a part that this step wrote.

    Raises:
        BadInput: the file is not as it was written.
    """
    file = folder / f"{part}.jsonl"
    try:
        with file.open(encoding="utf-8") as stream:
            return [_sentence(json.loads(line)) for line in stream]
    except (OSError, ValueError, TypeError):
        # `from None`: the cause may quote the line, which is private
        raise BadInput(
            "the sentences are damaged", where=str(file), fix="Run the entities step again."
        ) from None


def _sentence(row: object) -> Sentence:
    if not (isinstance(row, list) and len(row) == 4):
        raise TypeError("not a sentence")
    document, tokens, tags, patient = row
    if not (isinstance(document, str) and isinstance(patient, str)):
        raise TypeError("not ids")
    for words in (tokens, tags):
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise TypeError("not words")
    return Sentence(tuple(tokens), tuple(tags), document, patient)


def refuse_if_changed(spec: EntitiesSpec, result: StepResult, context: StepContext) -> None:
    """Refuse to answer with what was read from files that have changed since.

    Raises:
        BadInput: they have, or are no longer what the spec calls them.
    """
    declarations.refuse_if_changed(spec, result.facts["source_digests"], context, spec.data_version)


def _read(spec: EntitiesSpec, context: StepContext, part: str, path: Path) -> list[Sentence]:
    quarantine = Quarantine()
    with listed(quarantine, context, f"{part}_quarantine.json"):
        sentences = list(read_sentences(spec.format, path, quarantine))
    context.measure(f"{part}_sentences_quarantined", Operator(quarantine.rejected))
    return sentences
