"""Make the vocabulary from public words, released private words, or a checkpoint's own tokens.

Public text has no privacy cost: its words are counted and learned from as they are. The mechanism
is charged only for private words that public text would not make whole tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from dp_core.config.release import EXACT_WORDS
from dp_core.data.hashing import seed_key
from dp_core.data.tokens import SPECIAL_TOKENS, Segmentation, split_words
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Operator, Public
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary import tokenizer_files
from dp_core.vocabulary.item_sets import BoundedSets
from dp_core.vocabulary.subwords import (
    UnitWords,
    in_turns,
    learn,
    segmentation,
    vocabulary_digest,
    whole_words,
    word_counts,
)
from tasks.context import StepContext, StepOutput, read_checked
from tasks.protocol.specs import VocabularySpec
from tasks.releases.charge import charge, planned_release, record_operator_use, vocabulary_plan
from tasks.releases.manifest import counts_released, manifest, words_digest
from tasks.releases.provenance import corpus_at, output_of, private_units

WORDS = "words.json"  # all counted words, which post-processing may use
RELEASED = "released.json"  # only the private words, with their noised counts
_COUNTS = TypeAdapter(dict[str, int])


@dataclass
class _Words:
    """The words and tokens that a vocabulary is made of.

    Attributes:
        split: the segmentation of texts into words, which counts and tokenizer share.
        counts: counts of public words.
        known: public words that are whole tokens without any private word, so that no budget is
            spent on them.
        kept: the tokenizer of a checkpoint; None if tokens are learned.
        released: private words and their noised (or, without privacy, exact) counts.
        facts: parameters of the release.
    """

    split: Segmentation
    counts: Counter[str] = field(default_factory=Counter)
    known: frozenset[str] = frozenset()
    kept: Tokenizer | None = None
    released: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def joined(self) -> Counter[str]:
        """The counts from which tokens are learned."""
        return self.counts + Counter(self.released)


def run(spec: VocabularySpec, context: StepContext) -> StepOutput:
    """Count public words; release private words if the source includes them; learn the tokens."""
    config, split = spec.config, segmentation(spec.subwords, spec.config)
    words = _Words(split, known=frozenset(split.placeholders))
    if config.keeps_a_checkpoint:
        _read_checkpoint(spec, context, words)
    if config.reads_public_text:
        _read_public(spec, context, words)
    if config.releases_private_words:
        _release_private(spec, context, words)
    elif config.reads_private_text:
        _count_private_exactly(spec, context, words)
    tokenizer = _tokenizer(spec, words)
    digest = vocabulary_digest(tokenizer)
    tokenizer_files.save(tokenizer, context.out)
    tokens = words.known if words.kept else ()  # words of a checkpoint, which are not counted here
    kept = {t: 0 for t in tokens if not (t.startswith("##") or t in SPECIAL_TOKENS)}
    for file, counts in ((WORDS, kept | words.joined), (RELEASED, words.released)):
        content = json.dumps(_in_bert_words(tokenizer, counts), indent=0)
        (context.out / file).write_text(content + "\n")
    context.measure_cost(context.releases)  # 0 if no private text was opened
    context.measure("vocabulary_size", Dp(tokenizer.get_vocab_size()))
    return StepOutput(
        outputs={"vocabulary": ""},
        facts={
            "dataset": spec.dataset,
            "unit": config.unit,
            "example": config.example,
            "declared_units": config.declared_units,
            "source": config.vocabulary_source,
            "subwords": spec.subwords,
            "vocabulary_size": tokenizer.get_vocab_size(),
            "words_known": len(words.known),
            # Facts are published, and the number of exact private words must not be.
            "words_released": 0 if context.for_operator_alone else len(words.released),
            **words.facts,
            # Inputs with the same vocabulary are matched by its digest, which is keyed if private.
            "digest": context.keyed(digest) if context.for_operator_alone else digest,
        },
        artifacts={tokenizer_files.tokens_file(tokenizer): Label.DP},
    )


def _read_checkpoint(spec: VocabularySpec, context: StepContext, words: _Words) -> None:
    """Read the tokens of a public model."""
    checkpoint = output_of(context, spec.checkpoint_uri, "checkpoint")
    tokenizer = tokenizer_files.load(checkpoint.folder)
    if vocabulary_digest(tokenizer) != checkpoint.facts["digest"]:
        raise BadInput("the tokens are not those that the step wrote", where=spec.checkpoint_uri)
    if spec.config.releases_private_words:
        if not tokenizer_files.takes_words(tokenizer):
            raise BadInput(
                "private words cannot be added to byte-level tokens, which would need merges, nor"
                " to tokens of which some are normalized or have other options",
                where="vocabulary_source",
                fix="Set vocabulary_source to checkpoint.",
            )
        words.split = Segmentation.of(tokenizer)
    words.kept = tokenizer
    words.known = frozenset(tokenizer.get_vocab())


def _read_public(spec: VocabularySpec, context: StepContext, words: _Words) -> None:
    """Count the documents that hold each public word; find the words that are whole tokens.

    Held-out documents, on which models are measured, are left out.
    """
    corpus = corpus_at(context, spec.public_corpus_uri, "public", field="public_corpus_uri")
    context.refuse_altered(corpus)
    documents = UnitWords(PrivacyUnit.DOCUMENT, 1, words.split, spec.holdout, seed_key(spec.seed))
    words.counts = word_counts(context.cluster, context.shards(corpus), documents)
    context.measure("words_public", Public(len(words.counts)))
    if spec.config.releases_private_words:
        public = learn(words.counts, spec.config.vocabulary_size, (), words.split)
        words.known |= whole_words(words.counts, public)


def _release_private(spec: VocabularySpec, context: StepContext, words: _Words) -> None:
    """Reserve, count, add noise, apply the threshold, settle; known words are excluded."""
    config = spec.config
    corpus = corpus_at(context, spec.corpus_uri, "private")
    units = private_units(corpus)
    plan, planned = vocabulary_plan(spec), planned_release(spec)
    event = plan.event()
    content = manifest(
        kind="vocabulary",
        corpus=corpus.facts["digest"],
        plan={"class": type(plan).__name__, "event": event.to_json(), "epsilon": plan.epsilon},
        # Excluding other words changes the counts, which must never get the same noise.
        excluded=words_digest(words.known),
        words=words.split.to_json(),
    )
    charged = charge(context, units, planned, content=content)
    # Only now may the text be read.
    context.refuse_altered(corpus)
    of_shard = BoundedSets(
        UnitWords(PrivacyUnit(config.unit), config.words_per_unit, words.split),
        plan.items_per_unit,
        charged.seed.derive("contribution bounding"),
        config.declared_units,
        words.known,
    )
    with context.gathered_sets() as gathered:
        gathered.extend(context.cluster.map(of_shard, context.shards(corpus)))
        words.released = plan.release(gathered, charged.seed, content)
        distinct = gathered.distinct
    charged.settle(counts_released(words.released))
    words.facts = {"mechanism": event.describe(), "words_per_unit": plan.items_per_unit}
    context.measure("distinct_words", Operator(distinct))
    context.measure("words_released", Dp(len(words.released)))


def _count_private_exactly(spec: VocabularySpec, context: StepContext, words: _Words) -> None:
    """Count private words without noise or bound, as a comparison for the operator alone."""
    unit = PrivacyUnit(spec.config.unit)
    corpus = corpus_at(context, spec.corpus_uri, "private")
    units = dataclasses.replace(private_units(corpus), unit=unit)
    units.refuse_nameless(unit)
    record_operator_use(context, units, reason=EXACT_WORDS)
    context.refuse_altered(corpus)
    every = UnitWords(unit, spec.config.words_per_unit, words.split)
    counts = word_counts(context.cluster, context.shards(corpus), every)
    words.released = dict(counts)
    context.measure("distinct_words", Operator(len(counts)))


def _tokenizer(spec: VocabularySpec, words: _Words) -> Tokenizer:
    """Return the tokenizer: a checkpoint's with the released words added, or a learned one.

    With both public and released private words, the most frequent words of both become whole
    tokens, taken in turns; merges are learned from the other words. Counts of public documents and
    of private units that hold a word are added without scaling, because both count the texts that
    contain it. All of this is post-processing: only released private words are known here, with
    noised counts.
    """
    if words.kept is not None:
        ordered = sorted(words.released, key=lambda word: (-words.released[word], word))
        return tokenizer_files.with_words(words.kept, ordered) if ordered else words.kept
    both = spec.config.reads_public_text and spec.config.releases_private_words
    whole = in_turns(words.counts, words.released) if both else []
    return learn(words.joined, spec.config.vocabulary_size, whole, words.split)


def _in_bert_words(tokenizer: Tokenizer, counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts by the words of phrases; a word that several tokens share gets the largest."""
    out: dict[str, int] = {}
    for token, count in counts.items():
        for word in split_words(tokenizer_files.spelt(tokenizer, token)):
            out[word] = max(out.get(word, 0), count)
    return dict(sorted(out.items()))


def known_words(folder: Path) -> frozenset[str]:
    """Return the words of a vocabulary, both public and released, as BERT splits them.

    Raises:
        BadInput: the vocabulary has no counted words.
    """
    words = read_checked(folder / WORDS, _COUNTS.validate_json, "counted words", "vocabulary")
    return frozenset(words)


def released_words(folder: Path) -> dict[str, int]:
    """Return the private words that were released for a vocabulary, with their noised counts.

    Raises:
        BadInput: the file cannot be read.
    """
    return read_checked(folder / RELEASED, _COUNTS.validate_json, "released words", "vocabulary")
