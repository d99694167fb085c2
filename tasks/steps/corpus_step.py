"""Read a corpus and write it in one normal form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dp_core.data.corpus import MARK, Document, remake_shards, shards_of_mark, write_corpus
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers, read_source
from dp_core.errors import BadInput
from dp_core.labels import Operator, Public
from tasks.context import StepContext, StepOutput
from tasks.demo_data.notes import notes
from tasks.demo_data.public_text import public_text
from tasks.protocol.specs import CorpusSpec
from tasks.releases.declarations import Opened, open_source
from tasks.releases.deployment_ledger import ledger_for
from tasks.runtime.log import log

PUBLIC_PER_PATIENT = 2  # made-up public documents for each made-up patient


def run(spec: CorpusSpec, context: StepContext) -> StepOutput:
    """Write the corpus in normal form; counts of private text are for the operator."""
    if spec.role == "private":
        # The dataset is registered from the spec before any file is read.
        ledger_for(context, spec.dataset)
    opened = [open_source(source, context) for source in spec.sources]
    quarantine = Quarantine()
    taken, all_name_a_patient = 0, True

    def counted() -> Iterator[Document]:
        nonlocal taken, all_name_a_patient
        for document in _documents(spec, opened, quarantine):
            taken += 1
            all_name_a_patient = all_name_a_patient and bool(document.patient_id)
            if spec.role == "public" and taken % 1000 == 0:  # the size of private data is private
                context.progress(taken, 0)
            yield document

    with listed(quarantine, context, "quarantine.json"):
        write_corpus(counted(), context.out, spec.corpus_shards)
    count = Operator if spec.role == "private" else Public
    context.measure("documents", count(taken))
    context.measure_omissions("documents", quarantine, count)
    return StepOutput(
        outputs={"corpus": ""},
        facts={
            "role": spec.role,
            "dataset": spec.dataset,
            "all_name_a_patient": all_name_a_patient,
            "digest": context.content_digest(context.out),
        },
    )


def restore(spec: CorpusSpec, context: StepContext) -> None:
    """Recreate missing or damaged shards from the unchanged source, and put them in place.

    Raises:
        BadInput: files other than shards are damaged.
    """
    damaged = context.store.damaged(spec.output)
    if not damaged:
        return
    mark = context.store.read(f"{spec.output}/{MARK}") or b""
    shards = {shard.name for shard in shards_of_mark(mark, spec.output)}
    if not shards.issuperset(damaged):
        raise BadInput(
            "more than shards is missing or damaged",
            where=spec.output,
            fix="Delete the folder and run the corpus step again.",
        )
    context.out.mkdir(parents=True, exist_ok=True)
    (context.out / MARK).write_bytes(mark)
    opened = [open_source(source, context) for source in spec.sources]
    remake_shards(_documents(spec, opened, Quarantine()), context.out, damaged)
    for name in damaged:
        context.store.put(context.out / name, f"{spec.output}/{name}")
        log(f"{context.run.task}: {name} was damaged, and is made again")


def _documents(
    spec: CorpusSpec, opened: list[Opened], quarantine: Quarantine
) -> Iterator[Document]:
    if spec.format != "synthetic":
        readers = corpus_readers(spec.columns, public=spec.role == "public")
        return read_source(readers, spec.format, opened[0].path, quarantine)
    if spec.role == "private":
        return notes(spec.synthetic_patients, spec.seed)
    return public_text(PUBLIC_PER_PATIENT * spec.synthetic_patients, spec.seed)


@contextmanager
def listed(quarantine: Quarantine, context: StepContext, file: str) -> Iterator[None]:
    """Context manager that writes the list of rejected items even if the step fails.

    The list is written next to the output or, for a refused source, to the work folder. Its label
    is `operator`: it gives the places of items as file names, and a folder may be named after its
    patient, so no log line contains such a place.

    Raises:
        BadInput: the reader's error, with the path of the list added.
    """
    try:
        yield
    except BadInput as error:
        path, fix = context.durable / file, error.fix
        if quarantine.rejected:
            with suppress(OSError):  # a full disk must not hide the reader's error
                _list(quarantine, path)
                fix = f"{error.fix} Which ones: {path}".strip()
        raise type(error)(error.what, where=error.where, fix=fix) from None  # private cause
    _list(quarantine, context.out / file)


def _list(quarantine: Quarantine, path: Path) -> None:
    path.write_text(json.dumps(quarantine.summary(), indent=1))
