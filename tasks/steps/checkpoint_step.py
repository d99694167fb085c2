"""Describe a public model, and copy its tokens into the store for a vocabulary that keeps them.

A step that reads external files never charges a ledger. The steps `reserve` and `vocabulary` may
charge one, so they read the model's shape and tokens from the output of this step.
"""

from __future__ import annotations

from dp_core.labels import Public
from dp_core.models.hugging_face import checkpoint_facts, read_vocabulary
from dp_core.vocabulary.subwords import KINDS, kind_of, vocabulary_digest
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import CheckpointSpec
from tasks.releases.declarations import open_source
from tasks.results import refuse_own_model


def run(spec: CheckpointSpec, context: StepContext) -> StepOutput:
    """Read the folder's tokens and write them in the format that the vocabulary step reads."""
    (source,) = spec.sources
    opened = open_source(source, context)
    refuse_own_model(opened.path, source.field)
    facts = {"source_digest": opened.digest, **checkpoint_facts(opened.path)}
    if not spec.keeps_tokens:
        return StepOutput(outputs={}, facts=facts)
    ids = read_vocabulary(opened.path)
    tokens = sorted(ids, key=ids.__getitem__)
    kind = KINDS[kind_of(tokens)]
    tokenizer = kind.of_folder(opened.path, tokens)
    kind.save(tokenizer, context.out)
    context.measure("vocabulary_size", Public(tokenizer.get_vocab_size()))
    return StepOutput(
        outputs={"vocabulary": ""},
        facts={**facts, "digest": vocabulary_digest(tokenizer)},
    )
