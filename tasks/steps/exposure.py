"""Measure how well a model remembers the canaries: in contexts of their own, with public coins."""

from __future__ import annotations

import json

from dp_core.audit.canaries import candidates
from dp_core.audit.exposure import EMBEDDED, measure, summarise
from dp_core.bert.weights import load_model
from dp_core.privacy.labels import Dp, Label, Operator
from dp_core.training.secret_ranks import ranker
from dp_core.vocab import wordpiece
from dp_core.vocab.special_ids import SpecialIds
from tasks.reporting import EXPOSURE_FILE
from tasks.specs import ExposureSpec
from tasks.steps.canaries import read_canaries
from tasks.workbench import Answer, Artifact, Workbench

CONTEXTS_PER_CANARY = 8


def run(spec: ExposureSpec, bench: Workbench) -> Answer:
    """Rank the canaries' secrets; a released model's reading is `dp`: no private row is shown."""
    model_input = bench.input(spec.model_uri)
    store = bench.input(spec.private_store_uri)
    canaries = read_canaries(bench.input(spec.canaries_uri).folder)
    tokenizer = wordpiece.load(model_input.folder)
    model = load_model(model_input.folder)
    pool = candidates(tokenizer)
    rows = measure(
        ranker(model, pool),
        [c for c in canaries if not c.is_reference],
        [c for c in canaries if c.is_reference],
        special=SpecialIds.of(tokenizer),
        candidates=pool,
        declared_units=store.facts["declared_units"],
        sequence_length=model.config.max_positions,
        repeats=CONTEXTS_PER_CANARY,
        seed=spec.seed,
    )
    found = summarise(rows, EMBEDDED)
    label = Operator if model_input.facts["operator_only"] else Dp
    bench.measure("exposure_mean", label(found.mean))
    bench.measure("exposure_largest", label(found.largest))
    for row in rows:
        name = f"exposure/{row.context}/{row.pattern} at {row.rate:g}"
        bench.measure(name, label(row.exposure))
    (bench.out / EXPOSURE_FILE).write_text(json.dumps([row.to_json() for row in rows], indent=1))
    return Answer(
        outputs={"exposure": EXPOSURE_FILE},
        releases=model_input.result.releases,
        facts={"operator_only": model_input.facts["operator_only"]},
        artifacts=[Artifact(EXPOSURE_FILE, Label(label.label))],
    )
