"""Check the public model, text and labels of a run, then register its releases in the ledger.

These are the last checks before any charge. The steps that read the files have refused wrong
headers, formats and encodings; this step checks units and labels. Its answers depend on private
text without noise, and are for the operator alone (docs/privacy.md, "Answers before anything is
charged").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dp_core.data.corpus import Document, documents_of
from dp_core.data.hashing import given_id
from dp_core.data.labelled_text import LabelledItem, unit_ids
from dp_core.data.privacy_units import refuse_more_than_declared, units_of
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import FinetuneSpec, PretrainSpec, ReserveSpec
from tasks.releases.charge import register_plans
from tasks.releases.provenance import corpus_at, output_of, private_units
from tasks.results import Input
from tasks.steps.entities_step import read_items, refuse_unlearnable


def run(spec: ReserveSpec, context: StepContext) -> StepOutput:
    """Register all releases of the run, or none if they do not fit the budget (exit code 3).

    Raises:
        BadInput: a model cannot start from its checkpoint.
        BudgetExceeded: the run does not fit.
        PrivateTextRefusal: corpus or private labels have more units than declared, or texts without
            a name of their unit; or private labels cannot be learned.
    """
    _refuse_checkpoints(spec, context)
    _refuse_units(spec, context, corpus_at(context, spec.corpus_uri, "private"))
    if spec.entities_uri:
        entities = output_of(context, spec.entities_uri, "entities")
        tuned = (charged for charged in spec.charged if isinstance(charged, FinetuneSpec))
        if (tuning := next(tuned, None)) is not None:  # all have the labels of the job's settings
            _refuse_labelled_units(tuning, entities)
        if spec.learned is not None:
            refuse_unlearnable(spec.learned, entities)
    entries = register_plans(context, spec.charged)
    return StepOutput(outputs={}, facts={"releases": len(entries)})


def _refuse_checkpoints(spec: ReserveSpec, context: StepContext) -> None:
    """Refuse a public model, or a checkpoint of a sweep, that a model of the run cannot start from.

    Only the public model is trained on private text.
    """
    start = {"public_model": spec.checkpoint_uri} if spec.checkpoint_uri else {}
    for where, uri in (start | spec.compared).items():
        facts = output_of(context, uri, "checkpoint").facts
        spec.shape.refuse_other(**facts["shape"], where=where)
        if spec.row_tokens > (positions := facts["positions"]):
            raise BadInput(
                f"rows of {spec.row_tokens} tokens are longer than the model ({where}), which has "
                f"{positions} positions",
                where="sequence_length",
                fix=f"Set it to {positions} or less.",
            )
        if where in start:
            _refuse_start(spec, facts)


def _refuse_start(spec: ReserveSpec, facts: Mapping[str, Any]) -> None:
    """Refuse a public model that the trainings on private text cannot start from."""
    if not (facts["head"] or spec.public_updates):
        raise BadInput(
            "the folder holds no head that predicts masked tokens, and private text would train a "
            "random one",
            where="public_model",
            fix="Set public_steps, so that public text trains the head first.",
        )
    fresh = any(isinstance(s, PretrainSpec) and not s.init_uri for s in spec.charged)
    if fresh and not (spec.shape.layers and spec.shape.hidden):
        raise BadInput(
            "a fresh model does not take its shape from public_model",
            where="private_start",
            fix="Set layers and hidden.",
        )


def _refuse_units(spec: ReserveSpec, context: StepContext, corpus: Input) -> None:
    """Refuse a corpus with more units than declared, without stating their number."""
    unit = PrivacyUnit(spec.units.unit)
    private_units(corpus).refuse_nameless(unit)
    context.refuse_altered(corpus)
    units = units_of(documents_of(context.shards(corpus)), unit, spec.units.words_per_unit)

    def texts() -> Iterator[Document]:
        for number, each in enumerate(units, 1):
            refuse_more_than_declared(number, spec.units.declared_units)
            yield from each.documents

    _refuse_partly_named(unit, texts(), "unit")


def _refuse_labelled_units(spec: FinetuneSpec, entities: Input) -> None:
    """Refuse private labels of more units than declared, or texts without a name of their unit."""
    unit = PrivacyUnit(spec.private_plan.unit)
    private_units(entities).refuse_nameless(unit)
    items = list(read_items(entities.folder, "train", spec.head))
    _refuse_partly_named(unit, items, "entities_unit")
    declared = spec.private_plan.declared_units
    refuse_more_than_declared(len(set(unit_ids(items, unit))), declared, "entities_declared_units")


def _refuse_partly_named(
    unit: PrivacyUnit, texts: Iterable[Document | LabelledItem], where: str
) -> None:
    """Refuse to protect documents of which a part of the text may lack an id.

    A text without an id is a document by itself, and documents of two patients differ even with one
    id. So one document would be several units if only some of its texts had both ids.

    Args:
        unit: the protected unit.
        texts: all texts; all of them are read.
        where: the setting of the unit.

    Raises:
        PrivateTextRefusal: the unit is the document, and texts with and without an id are mixed.
    """
    given = {(bool(given_id(text.document_id)), bool(text.patient_id)) for text in texts}
    if unit is PrivacyUnit.DOCUMENT and len(given) > 1 and any(document for document, _ in given):
        what = "some texts have the id of a document or patient, and others lack it"
        fix = "Give all texts the same ids (in a folder of texts: a subfolder for each patient)."
        raise PrivateTextRefusal(what, where=where, fix=fix)
