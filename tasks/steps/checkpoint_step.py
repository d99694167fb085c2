"""Describe a public model, and copy its tokenizer into the store for a vocabulary that keeps it.

A step that reads external files never charges a ledger. The steps `reserve` and `vocabulary` may
charge one, so they read the model's shape and tokens from the output of this step.
"""

from __future__ import annotations

from dp_core.labels import Public
from dp_core.models.hugging_face import checkpoint_facts
from dp_core.vocabulary import tokenizer_files
from dp_core.vocabulary.subwords import vocabulary_digest
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import CheckpointSpec
from tasks.releases.declarations import open_source
from tasks.results import refuse_own_model


def run(spec: CheckpointSpec, context: StepContext) -> StepOutput:
    """Read the folder's tokenizer and write it in the format that the vocabulary step reads."""
    (source,) = spec.sources
    opened = open_source(source, context)
    refuse_own_model(opened.path, source.field)
    facts = checkpoint_facts(opened.path)
    if not spec.keeps_tokens:
        return StepOutput(outputs={}, facts=facts)
    tokenizer = tokenizer_files.of_checkpoint(opened.path)
    tokenizer_files.save(tokenizer, context.out)
    context.measure("vocabulary_size", Public(tokenizer.get_vocab_size()))
    return StepOutput(
        outputs={"vocabulary": ""}, facts={**facts, "digest": vocabulary_digest(tokenizer)}
    )
