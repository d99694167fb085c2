"""Language-model pre-training: on public text, with DP (charged), or without privacy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.labels import Dp, Operator
from dp_core.models.config import Gpt2Config
from dp_core.models.hugging_face import load_model, load_with_vocabulary, read_pieces, save
from dp_core.models.parameters import AnyModel, Arrays, Model, ModelConfig, fresh, language_model
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.evaluate import mlm_accuracy, perplexity
from dp_core.training.loop import CURVE_POINTS, Probe, Progress, curve_points, pretrain
from dp_core.vocabulary.wordpiece import continuation_pieces, load
from tasks.protocol import PretrainSpec
from tasks.releases.charge import Charge, charge, record_operator_use
from tasks.releases.declarations import open_source
from tasks.releases.manifest import manifest, weights_released
from tasks.releases.plans import planned_release, training_config_of, training_plan
from tasks.releases.provenance import (
    PRETRAINED,
    model_at,
    operator_only,
    private_units,
    refuse_operator_ancestors,
    rows_at,
    vocabulary_at,
    vocabulary_digest,
)
from tasks.releases.statements import refuse_own_model, write_statement
from tasks.runtime.context import Input, StepContext, StepOutput
from tasks.steps.model_kinds import config_of, kind_of, refuse_other_architecture
from tasks.steps.spending import Spending, measure_totals
from tasks.steps.token_store import HELD_OUT, TRAIN, keyed_store_digest
from tasks.storage import sha256_of

MEASURED_ROWS = 1024
PROBES, PROBED_ROWS = 5, 256  # looks at the score on the way, and their cost
_CURVES = {"mlm_accuracy": "mlm_public", "perplexity": "perplexity_curve"}
_UNDER_WAY = "_under_way"


def run(spec: PretrainSpec, bench: StepContext) -> StepOutput:
    """Train, measure, and write the model in Hugging Face's layout with its privacy statement."""
    _refuse_contradictions(spec)
    vocabulary = vocabulary_at(bench, spec.vocabulary_uri)
    role: Literal["public", "private"] = "public" if spec.mode == "public" else "private"
    source = rows_at(bench, spec.store_uri, role, vocabulary, field="store_uri")
    initial = None
    if spec.init_uri:
        initial = model_at(
            bench, spec.init_uri, field="init_uri", steps=PRETRAINED, vocabulary=vocabulary
        )
    measured = _Measured.opened(spec, bench, vocabulary)
    units = private_units(source) if role == "private" else None
    plan, content, charged = None, b"", None
    if units is None:
        refuse_operator_ancestors(bench)
    elif spec.mode == "nonprivate":
        record_operator_use(bench, units)
    else:
        plan = training_plan(spec, units.rows_kept)
        content = _manifest(spec, bench, source, vocabulary, initial, plan)
        charged = charge(bench, units, planned_release(spec), content=content)
    # Only now may the rows be read.
    store = TokenStore.open(source.folder / TRAIN)
    if keyed_store_digest(store, bench) != source.facts["digest"]:
        raise BadInput("the rows are not those that the step wrote", where=spec.store_uri)
    model = _train(spec, bench, store, vocabulary, initial, measured, plan, content, charged)
    record = charged.settle(weights_released(model.parameters)) if charged else None
    _publish_curve(bench)
    save(model, bench.out, vocabulary.folder)
    kept = operator_only(bench.releases)
    _measure(spec, bench, model, measured)
    write_statement(bench.out, bench.releases, made_up=bench.made_up)
    measure_totals(bench)
    return StepOutput(
        outputs={"model": ""},
        facts={
            "mode": spec.mode,
            "public_documents": source.facts["role"] == "public",
            "parameters": model.size,
            "shape": {
                "kind": kind_of(model.config),
                "layers": model.config.layers,
                "hidden": model.config.hidden,
            },
            "plan": None if plan is None else plan.to_json(),
            "epsilon_training": record.epsilon
            if record
            else (None if spec.mode == "nonprivate" else 0.0),
            "vocabulary_digest": vocabulary_digest(vocabulary),
            "weights_digest": "" if kept else sha256_of(bench.out / "model.safetensors"),
        },
        model=f"confide-{units.dataset}" if units and charged else "",
    )


@dataclass(frozen=True)
class _Measured:
    """The stores whose held-out rows measure the model."""

    public: Input
    private: Input

    @classmethod
    def opened(cls, spec: PretrainSpec, bench: StepContext, vocabulary: Input) -> Self:
        """Open both: what is measured on public text may be shown, and on private text not."""
        public, private = "public_store_uri", "private_store_uri"
        return cls(
            rows_at(bench, spec.public_store_uri, "public", vocabulary, field=public),
            rows_at(bench, spec.private_store_uri, "private", vocabulary, field=private),
        )


def _refuse_contradictions(spec: PretrainSpec) -> None:
    """Refuse a spec that contradicts itself, before anything is read or charged."""
    if (spec.plan is None) == (spec.mode == "dp"):
        raise BadInput("a privacy plan belongs to mode dp, and to no other", where="pretrain spec")
    if spec.public_model and spec.mode != "public":
        raise BadInput("it begins the public pre-training, and no other", where="public_model")
    if spec.public_model and spec.init_uri:
        raise BadInput("a training has one beginning", where="init_uri, public_model")


def _manifest(
    spec: PretrainSpec,
    bench: StepContext,
    source: Input,
    vocabulary: Input,
    initial: Input | None,
    plan: ExecutionPlan,
) -> bytes:
    return manifest(
        kind="pretrain",
        store=source.facts["digest"],
        vocabulary=vocabulary.facts["digest"],
        initial=sha256_of(initial.folder / "model.safetensors")
        if initial
        else f"fresh {spec.shape.model_dump_json()}",
        plan=plan.to_json(),
        training_config=training_config_of(spec).identity(),
        seed=spec.seed,
        device=spec.device,
        dtype=spec.precision,
    )


def _train(
    spec: PretrainSpec,
    bench: StepContext,
    store: TokenStore,
    vocabulary: Input,
    initial: Input | None,
    measured: _Measured,
    plan: ExecutionPlan | None,
    content: bytes,
    charged: Charge | None,
) -> AnyModel:
    start = _start(spec, bench, store, vocabulary, initial)
    seed: PrivacySeed | None = charged.seed if charged else None
    folder = f"checkpoints-{charged.entry.id}" if charged else "checkpoints"
    return pretrain(
        model=start,
        store=store,
        plan=plan,
        training_config=training_config_of(spec),
        seed=seed,
        manifest=content,
        init_seed=spec.seed,
        checkpoints=bench.checkpoints(folder),
        device=spec.device,
        progress=_Curve(spec, bench, plan),
        probe=_public_curve(spec, bench, measured.public, start.config) if plan else None,
        continuation=continuation_pieces(load(vocabulary.folder)) if spec.whole_words else None,
    )


def _start(
    spec: PretrainSpec,
    bench: StepContext,
    store: TokenStore,
    vocabulary: Input,
    initial: Input | None,
) -> AnyModel:
    """Return the model before the first update: an earlier step's, a public one, or a fresh one."""
    if initial:
        return language_model(load_model(initial.folder))
    if spec.public_model:
        (source,) = spec.sources
        folder = open_source(source, bench).path
        refuse_own_model(folder, "public_model")
        pieces = list(read_pieces(vocabulary.folder))
        found = load_with_vocabulary(folder, pieces, spec.seed)
        refuse_other_architecture(found.config, spec.shape)
        return language_model(found)
    size: int = vocabulary.facts["vocabulary_size"]
    return fresh(config_of(spec.shape, size, store.sequence_length), spec.seed)


def _public_curve(
    spec: PretrainSpec, bench: StepContext, public: Input, config: ModelConfig
) -> Probe | None:
    """Return the probe of a private training: its score on public text, on the way.

    A look is as private as the weights that it looks at, provided that they are on the way to
    those that are released. Before the release it is the operator's: a training that is made
    again with the same noise may round otherwise, and is refused only at its end.
    """
    folder = public.folder / HELD_OUT
    if not (folder / "store.json").exists():
        return None
    store = TokenStore.open(folder)

    def look(done: int, weights: Arrays) -> None:
        score, value = _score(Model(config, weights), store, spec.seed, PROBED_ROWS)
        if math.isfinite(value):
            bench.measure(_CURVES[score] + _UNDER_WAY, Operator(value), done)

    points = curve_points(spec.updates)
    return Probe(frozenset(points[:: -(CURVE_POINTS // PROBES)]), look)


def _publish_curve(bench: StepContext) -> None:
    """Show anyone the scores on the way: the weights that they led to are released."""
    for look in bench.measured():
        if look.name.endswith(_UNDER_WAY):
            bench.measure(look.name.removesuffix(_UNDER_WAY), Dp(look.value), look.step)


class _Curve:
    """Turns the trainer's reports into metrics: ε beside the loss, at bounded cost."""

    def __init__(self, spec: PretrainSpec, bench: StepContext, plan: ExecutionPlan | None) -> None:
        self._spec, self._bench, self._plan = spec, bench, plan
        self._spending = Spending(bench, plan, spec.updates)

    def __call__(self, now: Progress) -> None:
        note = self._spending.tell(now)
        if now.at_point:
            self._measure(now)
        self._bench.progress(now.update, now.updates, note)

    def _measure(self, now: Progress) -> None:
        # On public text, even the vocabulary behind the loss is a release: dp, not public.
        seen = Dp if self._spec.mode == "public" else Operator
        numbers = {"loss": now.loss, "batch": now.batch}
        if self._plan is not None:
            numbers["clipped"] = now.clipped
        for name, value in numbers.items():
            if math.isfinite(value):
                self._bench.measure(name, seen(value), now.update)


def _score(model: AnyModel, store: TokenStore, seed: int, rows: int) -> tuple[str, float]:
    """Return the name and value of what tells how well a model knows text like a store's."""
    if isinstance(model.config, Gpt2Config):
        return "perplexity", perplexity(model, store, seed=seed, max_rows=rows)
    return "mlm_accuracy", mlm_accuracy(model, store, seed=seed, max_rows=rows)


def _measure(spec: PretrainSpec, bench: StepContext, model: AnyModel, measured: _Measured) -> None:
    """Measure on rows that no model trained on: public ones, and private ones for the operator."""
    public = Operator if operator_only(bench.releases) else Dp
    for name, held_out, label in (
        ("public", measured.public, public),
        ("private", measured.private, Operator),
    ):
        folder: Path = held_out.folder / HELD_OUT
        if not (folder / "store.json").exists():
            continue  # so small a corpus has no held-out unit
        store = TokenStore.open(folder)
        score, value = _score(model, store, spec.seed, MEASURED_ROWS)
        if math.isfinite(value):
            bench.measure(f"{score}_{name}", label(value))
