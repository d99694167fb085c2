"""Language-model pre-training: on public or released text, with DP (charged), or without."""

from __future__ import annotations

import math

import numpy as np

from dp_core.audit.canaries import coin_seed
from dp_core.config.training import BatchConfig
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.labels import Dp, Operator
from dp_core.models.config import CausalConfig
from dp_core.models.hugging_face import load_model, load_with_vocabulary
from dp_core.models.parameters import (
    AnyModel,
    Arrays,
    Model,
    ModelConfig,
    fresh,
    language_model,
    shape_facts,
)
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.statement import operator_only
from dp_core.training.checkpoints import run_digest
from dp_core.training.loop import (
    CURVE_POINTS,
    NO_EVALUATION,
    ClippedUpdates,
    EvaluationHook,
    OrdinaryUpdates,
    PrivateUpdates,
    UpdateRule,
    curve_points,
    train,
)
from dp_core.training.objectives import objective_for
from dp_core.vocabulary.tokenizer_files import continuation_tokens, load
from tasks.context import StepContext, StepOutput
from tasks.protocol.specs import PretrainSpec
from tasks.releases.charge import (
    Charge,
    charge,
    planned_release,
    record_operator_use,
    training_plan,
)
from tasks.releases.declarations import open_source
from tasks.releases.manifest import manifest, weights_released
from tasks.releases.provenance import private_units, refuse_operator_ancestors
from tasks.results import refuse_own_model
from tasks.steps.training_files import (
    KeptModels,
    TrainingCurve,
    TrainingInputs,
    config_of,
    held_out,
    model_facts,
    private_parts,
    score,
    training_hosts,
    write_model,
)
from tasks.storage.store import sha256_of

EVALUATIONS, EVALUATED_ROWS = 5, 256  # few and small, to bound their cost
EVALUATIONS_OF_PERPLEXITY = 10  # causal models are compared by their perplexity curves
_CURVES = {"mlm_accuracy": "mlm_public", "perplexity": "perplexity_curve"}
_PRIVATE_CURVE = "perplexity_private_curve"
_UNDER_WAY = "_under_way/"  # followed by the ledger entry, since another entry has other noise


def run(spec: PretrainSpec, context: StepContext) -> StepOutput:
    """Train, measure, and write the model in Hugging Face's layout with its privacy statement."""
    _refuse_contradictions(spec)
    inputs = TrainingInputs.open(spec, context)
    context.descends_from_choice(spec.after)
    units = None if spec.mode in ("public", "released") else private_units(inputs.rows)
    plan = spent = charged = coins = None
    if units is None:
        refuse_operator_ancestors(context)
    elif spec.mode == "nonprivate":
        clipping = "training with clipping, without privacy"
        record_operator_use(context, units, **({"reason": clipping} if spec.clipped else {}))
    else:
        _refuse_other_canaries(spec, inputs)
        plan = training_plan(spec, units.max_examples_per_unit)
        spent = training_plan(spec.charged_as, units.max_examples_per_unit)
        content = _manifest(spec, inputs, plan)
        charged = charge(context, units, planned_release(spec), content=content)
        coins = coin_seed(charged.seed) if spec.plan and spec.plan.audit_canaries else None
    # The rows may be read only after the charge.
    store = inputs.train_store(spec, context)
    updates: UpdateRule
    if plan and charged:
        updates = PrivateUpdates(plan, charged.seed, content)
    elif spec.clipped and units:
        batches, facts = spec.batches, inputs.rows.facts
        updates = ClippedUpdates(
            updates=spec.updates,
            batch_size=batches.batch_size,
            sampling_rate=min(1.0, batches.batch_size / facts["declared_units"]),
            unit_rows=min(batches.examples_per_step, facts["max_examples_per_unit"]),
            seed=spec.seed,
            **spec.clipped.model_dump(),
        )
    else:
        rows = spec.batches.batch_size * spec.batches.examples_per_step
        if spec.mode == "nonprivate":
            rows = rows_per_update(store, spec.batches, inputs.rows.facts["declared_units"])
        updates = OrdinaryUpdates(spec.updates, rows, spec.seed)
    canaries: list[int] = []
    if coins is not None:
        store, canaries = inputs.with_audit_canaries(store, coins, context)
    start = _start(spec, context, store, inputs)
    whole_words = spec.training.whole_words
    words = continuation_tokens(load(inputs.vocabulary.folder)) if whole_words else None
    name = f"-{charged.entry.id}" if charged else ""
    kept = KeptModels(
        spec.kept_updates,
        context.checkpoints(f"models{name}"),
        run_digest(spec.digest(), charged.entry.id if charged else ""),
    )
    with training_hosts(spec, context, canaries) as hosts:
        model = train(
            start,
            objective_for(start.config, words),
            store=store,
            updates=updates,
            config=spec.training,
            seed=spec.seed,
            checkpoints=context.checkpoints(f"checkpoints{name}"),
            device=spec.device,
            # Even on public text, the loss depends on a released vocabulary: dp, not public.
            progress=TrainingCurve(context, spent, spec.updates, Operator if units else Dp),
            hook=kept.hook(_curves(spec, context, inputs, start.config, charged)),
            hosts=hosts,
        )
    earlier = kept.weights()
    released = weights_released(model.parameters, *earlier.values())
    record = charged.settle(released) if charged else None
    if record:
        _publish_curve(context, record.ledger_id)
    _measure(spec, context, model, inputs)
    write_model(
        context,
        model,
        inputs.vocabulary,
        earlier={update: Model(model.config, weights) for update, weights in earlier.items()},
        released_after=(*earlier, spec.updates) if earlier else (),
    )
    without_charge = None if spec.mode == "nonprivate" else 0.0
    epsilon = record.epsilon if record else without_charge
    return StepOutput(
        outputs={"model": ""},
        facts={
            "mode": spec.mode,
            "updates": spec.updates,
            "kept_updates": spec.kept_updates,
            # An audit compares these with the ledger's entry before it throws the coins again.
            "audit": {"entry": record.ledger_id, "coins": coins.salted_hash()}
            if record and coins
            else None,
            "extraction": spec.extraction.model_dump(),  # fixed before the model exists
            "public_documents": inputs.rows.facts["role"] == "public",
            **model_facts(context, model, inputs.vocabulary, plan, epsilon, spec.training),
        },
        model=f"confide-{units.dataset}" if units and charged else "",
    )


def _refuse_contradictions(spec: PretrainSpec) -> None:
    """Refuse a spec that contradicts itself, before any file is read or any release charged."""
    if (spec.plan is None) == (spec.mode == "dp"):
        raise BadInput("a privacy plan belongs to mode dp, and to no other", where="pretrain spec")
    if spec.plan and spec.plan.audit_canaries and not spec.init_uri:
        raise BadInput("an audit compares a model with its beginning: name it", where="init_uri")
    if spec.public_model and spec.init_uri:
        raise BadInput("a training has one beginning", where="init_uri, public_model")


def rows_per_update(store: TokenStore, batches: BatchConfig, declared_units: int) -> int:
    """Return the number of private rows that an update without DP reads.

    It is the share of the rows that the batch size is of the declared units. The number of updates
    follows from the declared units, too. An epoch therefore reads as many rows as an epoch with DP,
    even if there are fewer units than declared.
    """
    rows_of_epoch = np.minimum(np.diff(store.unit_rows), batches.examples_per_step).sum()
    return max(1, round(float(rows_of_epoch) * batches.batch_size / declared_units))


def _refuse_other_canaries(spec: PretrainSpec, inputs: TrainingInputs) -> None:
    """Refuse a plan whose number of audit canaries differs from the number in the rows."""
    held = inputs.rows.facts.get("audit_canaries", 0)
    if spec.plan and spec.plan.audit_canaries != held:
        raise BadInput(
            f"the rows have {held} audit canaries, the plan declares {spec.plan.audit_canaries}",
            where="audit_canaries",
            fix="Give both the same number.",
        )


def _manifest(spec: PretrainSpec, inputs: TrainingInputs, plan: ExecutionPlan) -> bytes:
    return manifest(
        kind="pretrain",
        store=inputs.rows.facts["digest"],
        audit_canaries=inputs.rows.facts.get("audit_digest", ""),
        vocabulary=inputs.vocabulary.facts["digest"],
        initial=sha256_of(inputs.initial.folder / "model.safetensors")
        if inputs.initial
        else f"fresh {spec.shape.model_dump_json()}",
        plan=plan.to_json(),
        kept_updates=" ".join(str(update) for update in spec.kept_updates),
        config=spec.training.identity(),
        seed=spec.seed,
        device=spec.device,
        dtype=spec.training.precision,
    )


def _start(
    spec: PretrainSpec, context: StepContext, store: TokenStore, inputs: TrainingInputs
) -> AnyModel:
    """Return the initial model: an earlier step's, a public one, or a fresh one."""
    if inputs.initial:
        return language_model(load_model(inputs.initial.folder))
    if spec.public_model:
        (source,) = spec.sources
        folder = open_source(source, context).path
        refuse_own_model(folder, "public_model")
        ids = load(inputs.vocabulary.folder).get_vocab()
        pieces = sorted(ids, key=ids.__getitem__)
        public_model = load_with_vocabulary(folder, pieces, spec.seed)
        spec.shape.refuse_other(**shape_facts(public_model.config), where="public_model")
        return language_model(public_model)
    size: int = inputs.vocabulary.facts["vocabulary_size"]
    return fresh(config_of(spec.shape, size, store.sequence_length), spec.seed)


def _curves(
    spec: PretrainSpec,
    context: StepContext,
    inputs: TrainingInputs,
    config: ModelConfig,
    charged: Charge | None,
) -> EvaluationHook:
    """Return the evaluation of a training's weights during the training, on held-out rows.

    Scores on public text are for anyone: a score is as private as its weights, provided that these
    weights lead to the released ones. Before a private release such a score is the operator's,
    because a training that is repeated with the same noise may differ in rounding, and is then
    refused only at its end. Scores on private text are always the operator's. A masked model is
    evaluated only in private training, and only on public text.
    """
    causal = isinstance(config, CausalConfig)
    if not causal and spec.plan is None:
        return NO_EVALUATION
    public, parts = held_out(inputs.public), private_parts(inputs.private, spec.development_share)
    compared = "development" if spec.development_share else "private"
    private = parts.get(compared) if causal else None
    if public is None and private is None:
        return NO_EVALUATION
    free = spec.plan is None and not operator_only(context.releases)

    def evaluate(done: int, weights: Arrays) -> None:
        model = Model(config, weights)
        if public is not None:
            name, value = score(model, public, spec.seed, EVALUATED_ROWS)
            under_way = f"{_UNDER_WAY}{charged.entry.id}" if charged else ""
            if math.isfinite(value):
                label = Dp if free else Operator
                context.measure(_CURVES[name] + under_way, label(value), done)
        if private is not None:
            _, value = score(model, private, spec.seed, EVALUATED_ROWS)
            if math.isfinite(value):
                context.measure(_PRIVATE_CURVE, Operator(value), done)

    points = curve_points(spec.updates)
    every = CURVE_POINTS // (EVALUATIONS_OF_PERPLEXITY if causal else EVALUATIONS)
    return EvaluationHook(frozenset(points[::-every]), evaluate)


def _publish_curve(context: StepContext, ledger_id: str) -> None:
    """Publish the scores on public text after the weights that they led to have been released.

    Scores of an attempt with other noise stay unpublished: the cost of the model does not include
    that attempt's ledger entry.
    """
    under_way = f"{_UNDER_WAY}{ledger_id}"
    for look in context.measured():
        if look.name.endswith(under_way):
            context.measure(look.name.removesuffix(under_way), Dp(look.value), look.step)


def _measure(
    spec: PretrainSpec, context: StepContext, model: AnyModel, inputs: TrainingInputs
) -> None:
    """Measure the model on held-out public rows and, for the operator, on held-out private rows."""
    stores = private_parts(inputs.private, spec.development_share)
    if (public := held_out(inputs.public)) is not None:
        stores["public"] = public
    shown = Operator if operator_only(context.releases) else Dp
    for name, store in stores.items():
        measure, value = score(model, store, spec.seed)
        if math.isfinite(value):
            label = shown if name == "public" else Operator
            context.measure(f"{measure}_{name}", label(value))
