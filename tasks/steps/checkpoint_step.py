"""Copy the tokenizer of a public model into the store, for a vocabulary that keeps them.

A step that reads external files never charges a ledger. The vocabulary step may charge one, so it
reads these tokens from the output of this step.
"""

from __future__ import annotations

from dp_core.labels import Public
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
    tokenizer_files.stored_ids(opened.path)  # refuses tokens that the model's table lacks
    tokenizer = tokenizer_files.of_checkpoint(opened.path)
    tokenizer_files.save(tokenizer, context.out)
    context.measure("vocabulary_size", Public(tokenizer.get_vocab_size()))
    return StepOutput(
        outputs={"vocabulary": ""},
        facts={"source_digest": opened.digest, "digest": vocabulary_digest(tokenizer)},
    )
