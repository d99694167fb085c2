"""Release a noised word histogram, and learn WordPiece from it alone. Charged."""

from __future__ import annotations

from dataclasses import asdict

from dp_core.corpus.privacy_units import iter_units
from dp_core.privacy.labels import Dp, Label, Operator, Public
from dp_core.privacy.units import PrivacyUnit
from dp_core.vocab import wordpiece
from dp_core.vocab.histogram import release, set_counts
from tasks.charging import charge
from tasks.plans import histogram_plan, planned_release
from tasks.provenance import corpus_at, private_units
from tasks.release_manifest import manifest
from tasks.same_release import counts_released
from tasks.specs import VocabularySpec
from tasks.storage import sha256_of
from tasks.workbench import Answer, Artifact, Workbench


def run(spec: VocabularySpec, bench: Workbench) -> Answer:
    """Reserve, count, add noise, cut at the threshold, settle; then post-process."""
    corpus = corpus_at(bench, spec.corpus_uri, "private")
    units = private_units(corpus)
    plan, planned = histogram_plan(spec), planned_release(spec)
    content = manifest(kind="vocabulary", corpus=corpus.facts["digest"], plan=asdict(plan))
    charged = charge(bench, units, planned, content=content)
    # Only now may the text be read.
    bench.refuse_altered(corpus)
    counts = set_counts(
        iter_units(corpus.folder, PrivacyUnit(spec.unit), spec.words_per_unit),
        spec.words_per_unit,
        charged.seed.derive("contribution bounding"),
        declared_units=spec.declared_units,
    )
    noised = release(counts, plan, charged.seed, content)
    record = charged.settle(counts_released(noised))
    tokenizer = wordpiece.learn(noised, spec.size)
    wordpiece.save(tokenizer, bench.out)
    bench.measure("distinct_words", Operator(len(counts)))
    bench.measure("vocabulary_size", Dp(tokenizer.get_vocab_size()))
    bench.measure("words_released", Dp(len(noised)))
    bench.measure("vocabulary_epsilon", Public(record.epsilon))
    bench.measure("vocabulary_delta", Public(record.delta))
    return Answer(
        outputs={"vocabulary": ""},
        facts={
            "dataset": units.dataset,
            "unit": spec.unit,
            "declared_units": spec.declared_units,
            "vocabulary_size": tokenizer.get_vocab_size(),
            "words_released": len(noised),
            "sigma": plan.sigma,
            "threshold": plan.threshold,
            "words_per_unit": spec.words_per_unit,
            "digest": sha256_of(bench.out / "vocab.txt"),
        },
        artifacts=[Artifact("vocab.txt", Label.DP)],
    )
