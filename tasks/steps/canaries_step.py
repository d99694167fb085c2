"""Draw canaries from the released vocabulary, with public coins."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from dp_core.audit.canaries import Canary, draw
from dp_core.labels import Label, Public
from tasks.context import StepContext, StepOutput, read_checked
from tasks.protocol.specs import CanariesSpec
from tasks.releases.provenance import output_of, vocabulary_digest
from tasks.storage.store import sha256_of

FILE = "canaries.json"
_CANARIES = TypeAdapter(list[Canary])


def run(spec: CanariesSpec, context: StepContext) -> StepOutput:
    """Write the canaries and the references that are never planted."""
    vocabulary = output_of(context, spec.vocabulary_uri, "vocabulary")
    config = spec.config
    canaries = draw(vocabulary.folder, config, spec.seed)
    (context.out / FILE).write_text(json.dumps([asdict(c) for c in canaries], indent=1))
    context.measure("canaries", Public(sum(not c.is_reference for c in canaries)))
    return StepOutput(
        outputs={"canaries": FILE},
        facts={
            "seed": spec.seed,
            "rates": list(config.rates),
            "patterns": list(config.patterns),
            "vocabulary_digest": vocabulary_digest(vocabulary),
            "digest": sha256_of(context.out / FILE),
        },
        artifacts={FILE: Label.DP},
    )


def read_canaries(folder: Path) -> list[Canary]:
    """Return the canaries that this step wrote.

    Raises:
        BadInput: the file has changed since it was written.
    """
    parse = partial(_CANARIES.validate_json, strict=True)
    return read_checked(folder / FILE, parse, "canaries", "canaries")
