"""Cut a corpus into rows of token ids, unit by unit, and plant canaries if there are any.

Audit canaries are no part of the corpus: all of them are written to a separate store next to the
rows, and only a DP training adds some of them to its units (`tasks/steps/training_files.py`).
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from itertools import chain
from statistics import fmean

from tokenizers import Tokenizer

from dp_core.audit.canaries import Canary, counted_occurrences, plant, unit_canary_rows
from dp_core.data.hashing import seed_key
from dp_core.data.privacy_units import refuse_more_than_declared
from dp_core.data.token_store import ShardRows, TokenStore, TokenStoreWriter
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Operator, Public
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary import subwords, tokenizer_files
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import TokenStoreSpec
from tasks.releases.provenance import (
    Role,
    corpus_at,
    fact,
    output_of,
    refuse_another_unit,
    released_text_at,
    vocabulary_digest,
)
from tasks.report.job_results import OCCURRENCES, OCCURRENCES_FILE
from tasks.results import Input
from tasks.steps.canaries_step import read_canaries

TRAIN, HELD_OUT, AUDIT = "train", "held_out", "audit"
FITTED_UNITS = 500  # largest number of held-out units on which the vocabulary's fit is measured
_COUNTS: dict[Role, type[Dp | Public | Operator]] = {
    "private": Operator,
    "released": Dp,
    "public": Public,
}


def run(spec: TokenStoreSpec, context: StepContext) -> StepOutput:
    """Write a store of training units and a store of held-out units, which carry no canary."""
    if spec.role == "private":
        corpus = corpus_at(context, spec.corpus_uri, "private")
    else:
        corpus = released_text_at(context, spec.corpus_uri)
    role = fact(corpus, "role")
    vocabulary = output_of(context, spec.vocabulary_uri, "vocabulary")
    if spec.role == "private" and spec.units:
        refuse_another_unit(corpus.facts["dataset"], spec.units, vocabulary, protects="rows")
    planted = (
        output_of(context, spec.canaries_uri, "canaries", vocabulary) if spec.canaries_uri else None
    )
    tokenizer = tokenizer_files.load(vocabulary.folder)
    canaries = _canaries(spec, planted)
    writers = {
        part: TokenStoreWriter(
            context.out / part, spec.rows.sequence_length, tokenizer.get_vocab_size()
        )
        for part in (TRAIN, HELD_OUT)
    }
    of_shard = ShardRows(
        _unit(spec),
        spec.units.words_per_unit if spec.units else 1,  # documents are not cut
        tokenizer.to_str(),
        spec.rows.sequence_length,
        spec.rows.max_examples_per_unit,
        seed_key(spec.seed),
        spec.holdout,
        partial(
            plant, canaries=canaries, seed=spec.seed, sequence_length=spec.rows.sequence_length
        ),
        FITTED_UNITS,
    )
    units = 0
    read: list[list[str]] = []  # texts of the first held-out units
    for cut in context.cluster.map(of_shard, context.shards(corpus)):
        units += cut.units
        if spec.units:
            refuse_more_than_declared(units, spec.units.declared_units)
        writers[TRAIN].add_packed(cut.train)
        writers[HELD_OUT].add_packed(cut.held_out)
        read += cut.texts[: FITTED_UNITS - len(read)]
        if spec.role == "public":  # the size of private data is private
            context.progress(units, 0)
    train = writers[TRAIN].finish()
    tokens = {"tokens": train}
    with suppress(BadInput):  # a small corpus may have no held-out unit
        tokens["held_out_tokens"] = writers[HELD_OUT].finish()
    audited = _write_audit_canaries(spec, context, tokenizer) if spec.audit_canaries else None
    count = _COUNTS[role]
    context.measure("units", count(train.n_units))
    context.measure("rows", count(train.n_rows))
    for name, store in tokens.items():
        context.measure(name, count(int(store.lengths.sum())))
    if fit := subwords.fit(tokenizer, list(chain.from_iterable(read))):
        label = Operator if role == "private" else Dp  # the vocabulary may be a release
        context.measure("coverage", label(fit.coverage))
        context.measure("fertility", label(fit.fertility))
        context.measure("unknown_words", label(fit.unknown))
    if canaries:
        _count_canaries(canaries, context, train)
    return StepOutput(
        outputs={
            **{TRAIN: TRAIN, HELD_OUT: HELD_OUT},
            **({OCCURRENCES: OCCURRENCES_FILE} if canaries else {}),
        },
        facts={
            "role": role,
            "dataset": corpus.facts["dataset"],
            "unit": _unit(spec).value,
            "example": spec.units.example if spec.units else "",
            "declared_units": spec.units.declared_units if spec.units else 0,
            "max_examples_per_unit": spec.rows.max_examples_per_unit,
            "canaries_seed": spec.seed if canaries else None,
            "canaries_digest": fact(planted, "digest") if planted else "",
            "audit_canaries": spec.audit_canaries,
            "audit_digest": keyed_store_digest(audited, context) if audited else "",
            "vocabulary_digest": vocabulary_digest(vocabulary),
            "digest": keyed_store_digest(train, context),
        },
        artifacts={OCCURRENCES_FILE: Label.OPERATOR} if canaries else {},
    )


def _count_canaries(canaries: list[Canary], context: StepContext, train: TokenStore) -> None:
    """Count the units with each canary, for the operator; others know only the expected counts."""
    planted = [canary for canary in canaries if not canary.is_reference]
    counted = counted_occurrences(train, planted)
    groups: dict[str, list[int]] = {}
    for canary in planted:
        group = f"{canary.pattern} at {canary.canary_rate:g}"
        groups.setdefault(group, []).append(counted[canary.id])
    means = {group: fmean(held) for group, held in groups.items()}
    for group, value in means.items():
        context.measure(f"occurrences/{group}", Operator(value))
    text = {"canaries": counted, "means": means}
    (context.out / OCCURRENCES_FILE).write_text(json.dumps(text, indent=1))


def _write_audit_canaries(
    spec: TokenStoreSpec, context: StepContext, tokenizer: Tokenizer
) -> TokenStore:
    """Write every audit canary, whether trained on or not, as a unit of one row.

    A unit's key is a hash of its id under a key. Canaries are hashed under another key, so that no
    canary has the key of a private unit.
    """
    writer = TokenStoreWriter(
        context.out / AUDIT,
        spec.rows.sequence_length,
        tokenizer.get_vocab_size(),
        key=b"audit canaries " + seed_key(spec.seed),
    )
    for number, row in enumerate(unit_canary_rows(tokenizer, spec.audit_canaries, spec.seed)):
        writer.add_unit(str(number), [row])
    return writer.finish()


def keyed_store_digest(store: TokenStore, context: StepContext) -> str:
    """Return the keyed digest of a store's current content, in hex."""
    return context.keyed(store.content_digest())


def _canaries(spec: TokenStoreSpec, planted: Input | None) -> list[Canary]:
    """Return the canaries to plant; refuse a canary longer than a row before any text is read."""
    canaries = read_canaries(planted.folder) if planted else []
    longest = max((len(canary.tokens) for canary in canaries), default=0)
    if longest > (length := spec.rows.sequence_length) - 2:
        raise BadInput(
            f"a pattern of {longest} tokens is longer than a row of {length} holds",
            where="canary_patterns",
            fix="Shorten it, or raise sequence_length.",
        )
    return canaries


def _unit(spec: TokenStoreSpec) -> PrivacyUnit:
    return PrivacyUnit(spec.units.unit) if spec.units else PrivacyUnit.DOCUMENT
