"""Measure how well a model remembers the canaries, in separate contexts with public coins.

The operator also gets the exposure in the training rows, which are private text. For a causal model
the step also measures extraction: the canaries' secrets in separate contexts and, if the settings
request it, training rows compared with held-out rows. It can also write sample texts.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from tokenizers import Tokenizer

from dp_core.audit.canaries import Canary, candidates
from dp_core.audit.exposure import (
    EMBEDDED,
    IN_ROWS,
    ExposureRow,
    measure,
    measure_in_rows,
    summarise,
)
from dp_core.audit.extraction import (
    ALL,
    ExtractionRow,
    OddsOf,
    discoverable,
    draw_prompts,
    targeted,
)
from dp_core.audit.observations import ranker, suffix_odds
from dp_core.data.hashing import seed_key
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Operator
from dp_core.models.causal import continuations
from dp_core.models.config import CausalConfig
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import AnyModel
from dp_core.vocabulary import subwords
from tasks.context import StepArtifact, StepContext, StepOutput
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
from tasks.report.job_results import DISCOVERABLE, EXPOSURE, EXPOSURE_IN_ROWS, SAMPLES, TARGETED
from tasks.results import Input
from tasks.steps.canaries_step import read_canaries
from tasks.steps.membership_step import claimed
from tasks.steps.token_store_step import TRAIN
from tasks.steps.training_inputs import held_out

CONTEXTS_PER_CANARY = 8


def run(spec: ExposureSpec, context: StepContext) -> StepOutput:
    """Rank the canaries' secrets; a released model's exposure is `dp`: it shows no private row."""
    model_input = model_at(
        context,
        spec.model_uri,
        field="model_uri",
        steps=PRETRAINED,
        updates=spec.model_updates,
    )
    planted = canaries_at(context, spec.canaries_uri, model_input)
    store = rows_at(
        context, spec.private_store_uri, "private", model_input, field="private_store_uri"
    )
    if fact(store, "canaries_digest") != fact(planted, "digest"):
        raise BadInput("these canaries are not those planted in it", where="private_store_uri")
    canaries = read_canaries(planted.folder)
    tokenizer = subwords.load(model_input.folder)
    model = load_model(model_input.folder)
    train, pool = TokenStore.open(store.folder / TRAIN), candidates(tokenizer)
    rank, sides = (
        ranker(model, pool),
        (
            [c for c in canaries if not c.is_reference],
            [c for c in canaries if c.is_reference],
        ),
    )
    shared: dict[str, Any] = {
        "special": SpecialIds.of(tokenizer),
        "candidates": pool,
        "declared_units": fact(store, "declared_units"),
        "repeats": CONTEXTS_PER_CANARY,
        "seed": spec.seed,
    }
    rows = measure(rank, *sides, sequence_length=model.config.max_positions, **shared)
    label = Operator if operator_only(context.releases) else Dp
    context.measure_cost(context.releases)
    _tell(context, EXPOSURE, rows, EMBEDDED, label)
    within = measure_in_rows(rank, train, *sides, **shared)
    _tell(context, EXPOSURE_IN_ROWS, within, IN_ROWS, Operator)
    artifacts = {EXPOSURE: Label(label.label), EXPOSURE_IN_ROWS: Label.OPERATOR}
    if isinstance(model.config, CausalConfig):
        odds_of = suffix_odds(model)
        found = targeted(
            odds_of,
            canaries,
            begin=SpecialIds.of(tokenizer).cls,
            candidates=pool,
            config=spec.extraction,
        )
        artifacts[TARGETED] = _write(spec, context, TARGETED, model_input, found, label)
        if spec.extraction.extraction_rows:
            found = _discoverable(spec, odds_of, model_input, store, train, canaries)
            artifacts[DISCOVERABLE] = _write(
                spec, context, DISCOVERABLE, model_input, found, Operator
            )
        if spec.samples.sample_texts:
            _write_samples(spec, context, model, tokenizer)
            artifacts[SAMPLES] = Label(label.label)
    return StepOutput(
        outputs={key: f"{key}.json" for key in artifacts},
        facts={
            SUBJECT: fact(model_input, "weights_digest"),
            PROBES: fact(planted, "digest"),
            "model_updates": spec.model_updates,
        },
        artifacts=[StepArtifact(f"{key}.json", shown) for key, shown in artifacts.items()],
    )


def _tell(
    context: StepContext,
    key: str,
    rows: list[ExposureRow],
    headline: str,
    label: type[Dp | Operator],
) -> None:
    """Record the exposure of every group, and a summary over the groups of the headline kind."""
    if rows:  # the rows may hold no canary; the number is as private as the rows
        summary = summarise(rows, headline)
        context.measure(key, label(summary.mean))
        context.measure(f"{key}_largest", label(summary.largest))
    for row in rows:
        group = f"{row.pattern} at {row.canary_rate:g}"
        context.measure(f"exposure/{row.context}/{group}", label(row.exposure))
    (context.out / f"{key}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _discoverable(
    spec: ExposureSpec,
    odds_of: OddsOf,
    model: Input,
    store: Input,
    train: TokenStore,
    canaries: list[Canary],
) -> tuple[ExtractionRow, ...]:
    """Return the extraction from training and held-out rows, or nothing if none were held out."""
    if (others := held_out(store)) is None:
        return ()
    planted = [canary for canary in canaries if not canary.is_reference]
    members, control = (
        draw_prompts(side, spec.extraction, planted, seed_key(spec.seed))
        for side in (train, others)
    )
    return discoverable(odds_of, members, control, spec.extraction, claimed(model, store))


def _write_samples(
    spec: ExposureSpec, context: StepContext, model: AnyModel, tokenizer: Tokenizer
) -> None:
    """Write continuations of the prompt by a causal model; they are as private as the model."""
    prompt = spec.samples.sample_prompt
    drawn = continuations(
        model,
        tokenizer.encode(prompt, add_special_tokens=False).ids,
        texts=spec.samples.sample_texts,
        tokens=spec.samples.sample_tokens,
        seed=spec.seed,
    )
    texts = [tokenizer.decode(ids).strip() for ids in drawn]
    told = json.dumps({"prompt": prompt, "texts": texts}, ensure_ascii=False, indent=1)
    (context.out / f"{SAMPLES}.json").write_text(told, encoding="utf-8")


def _write(
    spec: ExposureSpec,
    context: StepContext,
    key: str,
    model: Input,
    rows: tuple[ExtractionRow, ...],
    label: type[Dp | Operator],
) -> Label:
    """Record and write the results of one extraction protocol; return their label."""
    for row in rows:
        if row.group == ALL:
            context.measure(f"{key}/{row.decoding}", label(row.share.value))
            context.measure(f"{key}/{row.decoding}_control", label(row.control_share.value))
    text = {
        "settings": spec.extraction.model_dump(),
        "fixed_before_training": model.facts.get("extraction") == spec.extraction.model_dump(),
        "rows": [asdict(row) for row in rows],
    }
    (context.out / f"{key}.json").write_text(json.dumps(text, indent=1))
    return Label(label.label)
