"""Release phrases that many units share, one round per phrase length; the release is charged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from dp_core.audit.canaries import Canary, texts_with_canaries
from dp_core.labels import Dp, Label, Public
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary import tokenizer_files
from dp_core.vocabulary.item_sets import BoundedSets, GatheredSets
from dp_core.vocabulary.ngram_release import release_phrases
from tasks.context import StepContext, StepOutput, read_checked
from tasks.protocol.specs import PhrasesSpec
from tasks.releases.charge import charge, phrase_plan, planned_release
from tasks.releases.manifest import counts_released, manifest, words_digest
from tasks.releases.provenance import (
    corpus_at,
    fact,
    output_of,
    private_units,
    refuse_another_unit,
    vocabulary_digest,
)
from tasks.steps.canaries_step import read_canaries
from tasks.steps.vocabulary_step import known_words
from tasks.storage.store import sha256_of

FILE = "phrases.json"
_PHRASES = TypeAdapter(dict[int, dict[str, int]])


def run(spec: PhrasesSpec, context: StepContext) -> StepOutput:
    """Reserve the release; count, add noise and apply the threshold in every round; settle."""
    corpus = corpus_at(context, spec.corpus_uri, "private")
    vocabulary = output_of(context, spec.vocabulary_uri, "vocabulary")
    refuse_another_unit(corpus.facts["dataset"], spec.config, vocabulary, protects="phrases")
    planted = (
        output_of(context, spec.canaries_uri, "canaries", vocabulary) if spec.canaries_uri else None
    )
    canaries = read_canaries(planted.folder) if planted else []
    units = private_units(corpus)
    plan, planned = phrase_plan(spec), planned_release(spec)
    words = known_words(vocabulary.folder)
    content = manifest(
        kind="phrases",
        corpus=corpus.facts["digest"],
        vocabulary=vocabulary_digest(vocabulary),
        words=words_digest(words),
        canaries=fact(planted, "digest") if planted else "",
        seed=spec.seed,
        holdout=spec.holdout,
        plan={"lengths": list(plan.lengths), "event": plan.event().to_json()},
    )
    charged = charge(context, units, planned, content=content)
    # The text may be read only after the charge.
    context.refuse_altered(corpus)
    read = partial(
        texts_with_canaries,
        PrivacyUnit(spec.config.unit),
        spec.config.words_per_unit,
        spec.holdout,
        spec.seed,
        _spelled(canaries, vocabulary.folder),
    )
    engine, shards = context.cluster, context.shards(corpus)
    with context.gathered_sets() as gathered:

        def gather(sets: BoundedSets) -> GatheredSets:
            gathered.clear()  # remove the sets of the previous round
            gathered.extend(engine.map(sets, shards))
            return gathered

        phrases = release_phrases(gather, read, plan, words, charged.seed, content)
    record = charged.settle(
        counts_released({p: count for counts in phrases.values() for p, count in counts.items()})
    )
    (context.out / FILE).write_text(json.dumps(phrases, ensure_ascii=True, indent=1) + "\n")
    for length, released in phrases.items():
        context.measure(f"phrases_released/{length}_words", Dp(len(released)))
    context.measure("phrases_epsilon", Public(record.epsilon))
    context.measure("phrases_delta", Public(record.delta))
    context.measure_cost(context.releases)
    return StepOutput(
        outputs={"phrases": FILE},
        facts={
            "dataset": units.dataset,
            "unit": spec.config.unit,
            "declared_units": spec.config.declared_units,
            "released": {str(length): len(counts) for length, counts in phrases.items()},
            "mechanism": plan.each_round.event().describe(),
            "phrases_per_unit": plan.each_round.items_per_unit,
            "epsilon": record.epsilon,
            "digest": sha256_of(context.out / FILE),
        },
        artifacts={FILE: Label.DP},
    )


def read_phrases(folder: Path) -> dict[int, dict[str, int]]:
    """Return the released phrases and noised counts that this step wrote, by length.

    Raises:
        BadInput: the file has changed since it was written.
    """
    return read_checked(folder / FILE, _PHRASES.validate_json, "phrases", "phrases")


def _spelled(canaries: Sequence[Canary], vocabulary: Path) -> list[tuple[Canary, str]]:
    """Return the canaries as text, to be planted in the units that carry them.

    Canaries are planted in the private rows, not in the corpus. Without this text, the audit of a
    model that learned from phrases would miss leakage through the phrases.
    """
    tokenizer = tokenizer_files.load(vocabulary)
    return [
        (canary, " ".join(tokenizer_files.spelt(tokenizer, token) for token in canary.tokens))
        for canary in canaries
        if not canary.is_reference
    ]
