"""Read sentences with entity labels: a training and a test part."""

from __future__ import annotations

import json
from pathlib import Path

from dp_core.corpus.readers import Quarantine
from dp_core.corpus.synthetic.labelled import labelled_sentences
from dp_core.errors import BadInput
from dp_core.ner.readers.read import read_sentences
from dp_core.ner.sentence import Sentence, label_set
from dp_core.privacy.labels import Operator, Public
from tasks.charging import ledger_for
from tasks.specs import EntitiesSpec, StepResult
from tasks.steps.set_aside import listed
from tasks.storage import keyed_digest, stage_source
from tasks.workbench import Answer, Workbench

PARTS = ("train", "test")


def run(spec: EntitiesSpec, bench: Workbench) -> Answer:
    """Write both parts as JSON lines; counts of private labels are for the operator."""
    if not spec.public:
        ledger_for(bench, spec.dataset)  # what reads the labels will have to be written down there
    digests = _source_digests(spec, bench)
    if spec.format == "synthetic":
        parts = dict(zip(PARTS, labelled_sentences(seed=spec.seed), strict=True))
    else:
        parts = {part: _read(spec, bench, part) for part in PARTS}
    count = Public if spec.public else Operator
    for part, sentences in parts.items():
        write_sentences(sentences, bench.out / f"{part}.jsonl")
        bench.measure(f"{part}_sentences", count(len(sentences)))
    labels = label_set(parts["train"])
    if len(labels) == 1:
        raise BadInput("the training part has no entity", where="entities_train")
    return Answer(
        outputs={part: f"{part}.jsonl" for part in PARTS},
        facts={
            "public": spec.public,
            "dataset": spec.dataset,
            "unit": spec.unit,
            "source_digests": digests,
            "digest": bench.content_digest(bench.out),
        },
    )


def refuse_if_changed(spec: EntitiesSpec, result: StepResult, bench: Workbench) -> None:
    """Refuse to answer with what was read from files that have changed since.

    Raises:
        BadInput: they have.
    """
    if _source_digests(spec, bench) != result.facts["source_digests"]:
        raise BadInput(
            f"the files have changed since data_version {spec.data_version!r} was read",
            where="entities_train, entities_test",
            fix="Give the new files a new data_version.",
        )


def write_sentences(sentences: list[Sentence], file: Path) -> None:
    """Write sentences as JSON lines."""
    with file.open("w", encoding="utf-8") as stream:
        for s in sentences:
            stream.write(json.dumps([s.document_id, s.tokens, s.tags]) + "\n")


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
    if not (isinstance(row, list) and len(row) == 3 and isinstance(row[0], str)):
        raise TypeError("not a sentence")
    document, tokens, tags = row
    for words in (tokens, tags):
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise TypeError("not words")
    return Sentence(tuple(tokens), tuple(tags), document)


def _staged(spec: EntitiesSpec, bench: Workbench, part: str) -> Path:
    uri = spec.train_path if part == "train" else spec.test_path
    return stage_source(uri, bench.durable / "source" / part, field=f"entities_{part}")


def _read(spec: EntitiesSpec, bench: Workbench, part: str) -> list[Sentence]:
    quarantine = Quarantine()
    with listed(quarantine, bench, f"{part}_quarantine.json"):
        sentences = list(read_sentences(spec.format, _staged(spec, bench, part), quarantine))
    bench.measure(f"{part}_sentences_quarantined", Operator(quarantine.rejected))
    return sentences


def _source_digests(spec: EntitiesSpec, bench: Workbench) -> list[str]:
    if spec.format == "synthetic":
        return []
    key = bench.content_key()
    return [keyed_digest(_staged(spec, bench, part), key) for part in PARTS]
