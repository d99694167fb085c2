"""Read a corpus and keep it in one normal form."""

from __future__ import annotations

from collections.abc import Iterator

from dp_core.corpus.document import Document
from dp_core.corpus.normal_form import write_corpus
from dp_core.corpus.readers import JsonlFields, Quarantine, read_corpus
from dp_core.corpus.synthetic.notes import notes
from dp_core.corpus.synthetic.public import public_text
from dp_core.errors import BadInput
from dp_core.privacy.labels import Operator, Public
from tasks.specs import CorpusSpec, StepResult
from tasks.steps.set_aside import listed
from tasks.storage import keyed_digest, stage_source
from tasks.workbench import Answer, Workbench

PUBLIC_PER_PATIENT = 2  # made-up public documents for each made-up patient


def run(spec: CorpusSpec, bench: Workbench) -> Answer:
    """Write the corpus in normal form; counts of private text are for the operator."""
    source = _source_digest(spec, bench)
    quarantine = Quarantine()
    taken, all_name_a_patient = 0, True

    def counted() -> Iterator[Document]:
        nonlocal taken, all_name_a_patient
        for document in _documents(spec, bench, quarantine):
            taken += 1
            all_name_a_patient = all_name_a_patient and bool(document.patient_id)
            if spec.role == "public" and taken % 1000 == 0:  # the size of private data is private
                bench.progress(taken, 0)
            yield document

    with listed(quarantine, bench, "quarantine.json"):
        write_corpus(counted(), bench.out)
    count = Operator if spec.role == "private" else Public
    bench.measure("documents", count(taken))
    bench.measure("documents_quarantined", count(quarantine.rejected))
    return Answer(
        outputs={"corpus": ""},
        facts={
            "role": spec.role,
            "dataset": spec.dataset,
            "all_name_a_patient": all_name_a_patient,
            "source_digest": source,
            "digest": bench.content_digest(bench.out),
        },
    )


def refuse_if_changed(spec: CorpusSpec, result: StepResult, bench: Workbench) -> None:
    """Refuse to answer with what was read from files that have changed since.

    Raises:
        BadInput: they have.
    """
    if _source_digest(spec, bench) != result.facts["source_digest"]:
        raise BadInput(
            f"the files have changed since data_version {spec.data_version!r} was read",
            where=f"{spec.role}_path",
            fix="Give the new files a new data_version.",
        )


def _source_digest(spec: CorpusSpec, bench: Workbench) -> str:
    if spec.format == "synthetic":
        return ""
    path = stage_source(spec.path, bench.durable / "source", field=f"{spec.role}_path")
    return keyed_digest(path, bench.content_key())


def _documents(spec: CorpusSpec, bench: Workbench, quarantine: Quarantine) -> Iterator[Document]:
    if spec.format != "synthetic":
        path = stage_source(spec.path, bench.durable / "source", field=f"{spec.role}_path")
        return read_corpus(spec.format, path, quarantine, fields=JsonlFields(*spec.fields))
    if spec.role == "private":
        return notes(spec.synthetic_patients, spec.seed)
    return public_text(PUBLIC_PER_PATIENT * spec.synthetic_patients, spec.seed)
