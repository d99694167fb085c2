"""Release a noised word histogram, and learn WordPiece from it alone. Charged."""

from __future__ import annotations

from dataclasses import asdict

from dp_core.data.privacy_units import iter_units
from dp_core.labels import Dp, Label, Operator, Public
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary import wordpiece
from dp_core.vocabulary.dp_histogram import release, set_counts
from tasks.protocol import VocabularySpec
from tasks.releases.charge import charge
from tasks.releases.manifest import counts_released, manifest
from tasks.releases.plans import histogram_plan, planned_release
from tasks.releases.provenance import corpus_at, private_units
from tasks.runtime.context import Artifact, StepContext, StepOutput
from tasks.storage import sha256_of


def run(spec: VocabularySpec, context: StepContext) -> StepOutput:
    """Reserve, count, add noise, cut at the threshold, settle; then post-process."""
    config = spec.config
    corpus = corpus_at(context, spec.corpus_uri, "private")
    units = private_units(corpus)
    plan, planned = histogram_plan(spec), planned_release(spec)
    content = manifest(kind="vocabulary", corpus=corpus.facts["digest"], plan=asdict(plan))
    charged = charge(context, units, planned, content=content)
    # Only now may the text be read.
    context.refuse_altered(corpus)
    counts = set_counts(
        iter_units(corpus.folder, PrivacyUnit(config.unit), config.words_per_unit),
        config.words_per_unit,
        charged.seed.derive("contribution bounding"),
        declared_units=config.declared_units,
    )
    noised = release(counts, plan, charged.seed, content)
    record = charged.settle(counts_released(noised))
    tokenizer = wordpiece.learn(noised, config.vocabulary_size)
    wordpiece.save(tokenizer, context.out)
    context.measure("distinct_words", Operator(len(counts)))
    context.measure("vocabulary_size", Dp(tokenizer.get_vocab_size()))
    context.measure("words_released", Dp(len(noised)))
    context.measure("vocabulary_epsilon", Public(record.epsilon))
    context.measure("vocabulary_delta", Public(record.delta))
    return StepOutput(
        outputs={"vocabulary": ""},
        facts={
            "dataset": units.dataset,
            "unit": config.unit,
            "declared_units": config.declared_units,
            "vocabulary_size": tokenizer.get_vocab_size(),
            "words_released": len(noised),
            "sigma": plan.sigma,
            "threshold": plan.threshold,
            "words_per_unit": config.words_per_unit,
            "digest": sha256_of(context.out / "vocab.txt"),
        },
        artifacts=[Artifact("vocab.txt", Label.DP)],
    )
