"""Measure how well a model remembers the canaries: in contexts of their own, with public coins."""

from __future__ import annotations

import json
from dataclasses import asdict

from dp_core.audit.canaries import candidates
from dp_core.audit.exposure import EMBEDDED, measure, summarise
from dp_core.audit.ranking import ranker
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Operator
from dp_core.models.hugging_face import load_model
from dp_core.vocabulary import subwords
from tasks.evidence.audits import PROBES, SUBJECT
from tasks.protocol import ExposureSpec
from tasks.releases.provenance import (
    PRETRAINED,
    canaries_at,
    fact,
    model_at,
    operator_only,
    rows_at,
)
from tasks.report.results import EXPOSURE_FILE
from tasks.runtime.context import Artifact, StepContext, StepOutput
from tasks.steps.canaries import read_canaries

CONTEXTS_PER_CANARY = 8


def run(spec: ExposureSpec, context: StepContext) -> StepOutput:
    """Rank the canaries' secrets; a released model's reading is `dp`: no private row is shown."""
    model_input = model_at(context, spec.model_uri, field="model_uri", steps=PRETRAINED)
    planted = canaries_at(context, spec.canaries_uri, model_input)
    store = rows_at(
        context, spec.private_store_uri, "private", model_input, field="private_store_uri"
    )
    if fact(store, "canaries_digest") != fact(planted, "digest"):
        raise BadInput("these canaries are not those planted in it", where="private_store_uri")
    canaries = read_canaries(planted.folder)
    tokenizer = subwords.load(model_input.folder)
    model = load_model(model_input.folder)
    pool = candidates(tokenizer)
    rows = measure(
        ranker(model, pool),
        [c for c in canaries if not c.is_reference],
        [c for c in canaries if c.is_reference],
        special=SpecialIds.of(tokenizer),
        candidates=pool,
        declared_units=fact(store, "declared_units"),
        sequence_length=model.config.max_positions,
        repeats=CONTEXTS_PER_CANARY,
        seed=spec.seed,
    )
    summary = summarise(rows, EMBEDDED)
    label = Operator if operator_only(context.releases) else Dp
    context.measure_cost(context.releases)
    context.measure("exposure", label(summary.mean))
    context.measure("exposure_largest", label(summary.largest))
    for row in rows:
        name = f"exposure/{row.context}/{row.pattern} at {row.canary_rate:g}"
        context.measure(name, label(row.exposure))
    (context.out / EXPOSURE_FILE).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return StepOutput(
        outputs={"exposure": EXPOSURE_FILE},
        facts={
            SUBJECT: fact(model_input, "weights_digest"),
            PROBES: fact(planted, "digest"),
        },
        artifacts=[Artifact(EXPOSURE_FILE, Label(label.label))],
    )
