"""Run membership attacks on a model, with its training units and the held-out units."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dp_core.audit.canaries import carries
from dp_core.audit.membership_sample import MembershipData, Sample, draw_sample
from dp_core.data.corpus import documents_of
from dp_core.data.hashing import digest64, seed_key
from dp_core.data.privacy_units import units_of
from dp_core.data.readers.labelled_texts import Diagnoses
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import AnyModel, language_model
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import PrivacyUnit, compose
from dp_core.privacy.statement import by_budget, event_of, totals
from dp_core.vocabulary import tokenizer_files
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import run_audits, store_findings
from tasks.protocol.measurements import MembershipSpec
from tasks.releases.declarations import open_for_operator
from tasks.releases.provenance import (
    PRETRAINED,
    corpus_at,
    fact,
    model_at,
    models_by_updates,
    output_of,
    rows_at,
)
from tasks.results import PROBES, SUBJECT, Input
from tasks.steps.canaries_step import read_canaries
from tasks.steps.token_store_step import TRAIN
from tasks.steps.training_files import held_out


def run(spec: MembershipSpec, context: StepContext) -> StepOutput:
    """Attack the model at every level; results from private rows have the label `operator`."""
    attacked = model_at(context, spec.model_uri, field="model_uri", steps=PRETRAINED)
    references = [
        model_at(context, uri, field="reference_uris", steps=PRETRAINED, vocabulary=attacked)
        for uri in spec.reference_uris
    ]
    store = rows_at(context, spec.private_store_uri, "private", attacked, field="private_store_uri")
    opened = [open_for_operator(source, context) for source in spec.sources]
    diagnoses = Diagnoses(opened[0].path, where="membership_codes") if opened else None
    train, others = TokenStore.open(store.folder / TRAIN), held_out(store)
    data = MembershipData(
        models={n: _reader(folder) for n, folder in models_by_updates(attacked).items()},
        references=[_reader(reference.folder) for reference in references],
        sample=_sample(spec, context, attacked, store, train, others, diagnoses)
        if others is not None
        else None,
        masks=spec.config.membership_masks,
        coins=digest64(seed_key(spec.seed), "membership masks"),
        claim=claimed(attacked, store),
    )
    facts = {SUBJECT: fact(attacked, "weights_digest"), PROBES: fact(store, "canaries_digest")}
    return store_findings(context, run_audits(spec.step, data), facts=facts)


def _reader(folder: Path) -> Callable[[], AnyModel]:
    return lambda: language_model(load_model(folder))


def claimed(attacked: Input, store: Input) -> PrivacyProfile | None:
    """Return the bound on any attack from the model's guarantee for one unit of the rows.

    Returns None if there is no claim for that unit: no total, another unit, or ε = ∞.
    """
    groups, dataset = by_budget(attacked.result.releases), fact(store, "dataset")
    releases = [r for group in groups if dataset in {r.dataset for r in group} for r in group]
    if not releases:
        return PrivacyProfile.of_claim(0.0, 0.0)  # no private text went into the model
    (total,) = totals(releases)
    if total.epsilon is None or total.unit != fact(store, "unit") or not np.isfinite(total.epsilon):
        return None
    event = compose(*(event_of(r).stating(PrivacyUnit(r.unit)) for r in releases))
    profile = PrivacyProfile.of_event(event)
    return PrivacyProfile((*profile.pairs, (total.epsilon, total.delta)))


def _sample(
    spec: MembershipSpec,
    context: StepContext,
    attacked: Input,
    store: Input,
    train: TokenStore,
    others: TokenStore,
    diagnoses: Diagnoses | None,
) -> Sample:
    corpus = corpus_at(context, spec.corpus_uri, "private")
    planted = output_of(context, spec.canaries_uri, "canaries", attacked)
    for name, value, other in (
        ("canaries_digest", fact(store, "canaries_digest"), fact(planted, "digest")),
        ("dataset", fact(store, "dataset"), fact(corpus, "dataset")),
        ("unit", fact(store, "unit"), spec.units.unit),
        ("words_per_unit", fact(store, "example"), spec.units.example),
    ):
        if value != other:
            raise BadInput(f"its {name} is not that of the other inputs", where="private_store_uri")
    canaries, unit = read_canaries(planted.folder), PrivacyUnit(spec.units.unit)
    codes = None
    if diagnoses is not None:
        codes = diagnoses.of_patient if unit is PrivacyUnit.PATIENT else diagnoses.of_admission
    return draw_sample(
        units_of(documents_of(context.shards(corpus)), unit, spec.units.words_per_unit),
        unit=unit,
        train=train,
        held_out=others,
        tokenizer=tokenizer_files.load(attacked.folder),
        max_examples_per_unit=fact(store, "max_examples_per_unit"),
        carries=lambda unit_id: any(carries(c, unit_id, spec.seed) for c in canaries),
        most=spec.config.membership_units,
        key=seed_key(spec.seed),
        codes=codes,
    )
