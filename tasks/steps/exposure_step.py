"""Measure how well a model remembers the canaries, in separate contexts with public coins.

The operator also gets the exposure in the training rows, which are private text. For a causal model
the step also measures extraction: the canaries' secrets in separate contexts and, if the settings
request it, training rows compared with held-out rows. It can also write sample texts.
"""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from dp_core.audit.canaries import candidates
from dp_core.audit.exposure import CanaryData
from dp_core.audit.observations import ranker, suffix_odds
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.causal import continuations
from dp_core.models.config import CausalConfig
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import AnyModel
from dp_core.privacy.statement import operator_only
from dp_core.vocabulary import tokenizer_files
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import run_audits, store_findings
from tasks.protocol.measurements import ExposureSpec
from tasks.releases.provenance import PRETRAINED, fact, model_at, output_of, rows_at
from tasks.report.job_results import SAMPLES_FILE
from tasks.results import PROBES, SUBJECT
from tasks.steps.canaries_step import read_canaries
from tasks.steps.membership_step import claimed
from tasks.steps.token_store_step import TRAIN
from tasks.steps.training_files import held_out


def run(spec: ExposureSpec, context: StepContext) -> StepOutput:
    """Rank the canaries' secrets; a released model's exposure is `dp`: it shows no private row."""
    model_input = model_at(
        context, spec.model_uri, field="model_uri", steps=PRETRAINED, updates=spec.model_updates
    )
    planted = output_of(context, spec.canaries_uri, "canaries", model_input)
    store = rows_at(
        context, spec.private_store_uri, "private", model_input, field="private_store_uri"
    )
    if fact(store, "canaries_digest") != fact(planted, "digest"):
        raise BadInput("these canaries are not those planted in it", where="private_store_uri")
    tokenizer, model = tokenizer_files.load(model_input.folder), load_model(model_input.folder)
    pool, causal = candidates(tokenizer), isinstance(model.config, CausalConfig)
    train = TokenStore.open(store.folder / TRAIN)
    rows_attacked = causal and spec.extraction.extraction_rows > 0
    label = Label.OPERATOR if operator_only(context.releases) else Label.DP
    context.measure_cost(context.releases)
    data = CanaryData(
        rank=ranker(model, pool),
        odds_of=suffix_odds(model) if causal else None,
        canaries=read_canaries(planted.folder),
        special=SpecialIds.of(tokenizer),
        candidates=pool,
        sequence_length=train.sequence_length,
        train=train,
        held_out=held_out(store),
        declared_units=fact(store, "declared_units"),
        extraction=spec.extraction,
        fixed_before_training=model_input.facts.get("extraction") == spec.extraction.model_dump(),
        claim=claimed(model_input, store) if rows_attacked else None,
        label=label,
        seed=spec.seed,
    )
    samples = causal and spec.samples.sample_texts > 0
    if samples:
        _write_samples(spec, context, model, tokenizer)
    return store_findings(
        context,
        run_audits(spec.step, data),
        facts={
            SUBJECT: fact(model_input, "weights_digest"),
            PROBES: fact(planted, "digest"),
            "model_updates": spec.model_updates,
        },
        artifacts={SAMPLES_FILE: label} if samples else {},
    )


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
    content = json.dumps({"prompt": prompt, "texts": texts}, ensure_ascii=False, indent=1)
    (context.out / SAMPLES_FILE).write_text(content, encoding="utf-8")
