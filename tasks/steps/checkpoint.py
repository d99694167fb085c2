"""Bring the tokens of a public model into the store, for a vocabulary that keeps them.

Reading what somebody else wrote and charging never meet in one step, so that the vocabulary, which
may be charged, gets these tokens from here.
"""

from __future__ import annotations

import json
from pathlib import Path

from dp_core.errors import BadInput
from dp_core.labels import Public
from dp_core.models.hugging_face import read_vocabulary
from dp_core.vocabulary import byte_level, wordpiece
from dp_core.vocabulary.subwords import vocabulary_digest
from tasks.protocol import CheckpointSpec
from tasks.releases.declarations import open_source
from tasks.releases.statements import refuse_own_model
from tasks.runtime.context import StepContext, StepOutput


def run(spec: CheckpointSpec, context: StepContext) -> StepOutput:
    """Read the folder's tokens and write them as the vocabulary step takes them."""
    (source,) = spec.sources
    opened = open_source(source, context)
    refuse_own_model(opened.path, source.field)
    ids = read_vocabulary(opened.path)
    tokens = sorted(ids, key=ids.__getitem__)
    if byte_level.is_byte_level(tokens):
        tokenizer = byte_level.of_folder(opened.path, tokens)
        byte_level.save(tokenizer, context.out)
    else:
        _refuse_case(opened.path, source.field)
        tokenizer = wordpiece.of_tokens(tokens)
        wordpiece.save(tokenizer, context.out)
    context.measure("vocabulary_size", Public(tokenizer.get_vocab_size()))
    return StepOutput(
        outputs={"vocabulary": ""},
        facts={"source_digest": opened.digest, "digest": vocabulary_digest(tokenizer)},
    )


def _refuse_case(folder: Path, field: str) -> None:
    """Refuse tokens with capital letters: texts are read in lower case, and would never meet them.

    Raises:
        BadInput: the folder says that its tokens have case.
    """
    try:
        about = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        cased = about.get("do_lower_case", True) is False
    except (OSError, ValueError, AttributeError, RecursionError):
        return  # it does not say
    if cased:
        raise BadInput(
            "its tokens tell capital letters from small ones, and texts are read in lower case",
            where=field,
            fix="Give an uncased model, or let vocabulary_source exchange its tokens.",
        )
