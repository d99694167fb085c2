"""Language-model pre-training: on public text, with DP (charged), or without privacy."""

from __future__ import annotations

import math
from pathlib import Path

from dp_core.bert.gpt2_config import Gpt2Config
from dp_core.bert.new_vocabulary import load_with_vocabulary, read_pieces
from dp_core.bert.parameters import AnyModel, Arrays, Model, ModelConfig, fresh, language_model
from dp_core.bert.weights import load_model, save
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.labels import Dp, Operator, Public
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.privacy.units import PrivacyUnit
from dp_core.training.evaluate import mlm_accuracy, perplexity
from dp_core.training.pretrain import pretrain
from dp_core.training.progress import CURVE_POINTS, Probe, Progress, curve_points
from dp_core.vocab.wordpiece import continuation_pieces, load
from tasks.charging import Charge, charge, manifest, record_operator_use
from tasks.plans import plan_until, recipe_of, training_plan
from tasks.same_release import confirm_same_release, refuse_unrecorded, weights_released
from tasks.specs import PretrainSpec, ReleaseRecord
from tasks.statements import write_operator_notice, write_statement
from tasks.steps.model_kinds import config_of, kind_of, refuse_other_architecture
from tasks.steps.token_store import HELD_OUT, TRAIN, keyed_store_digest
from tasks.storage import sha256_of, stage_source
from tasks.workbench import Answer, Input, Workbench, merged

MEASURED_ROWS = 1024
PROBES, PROBED_ROWS = 5, 256  # looks at the score on the way, and their cost
_CURVES = {"mlm_accuracy": "mlm_public", "perplexity": "perplexity_curve"}
_UNDER_WAY = "_under_way"


def run(spec: PretrainSpec, bench: Workbench) -> Answer:
    """Train, measure, and write the model in Hugging Face's layout with its privacy statement."""
    source = bench.input(spec.store_uri)
    vocabulary = bench.input(spec.vocabulary_uri)
    if spec.mode != "public" and source.facts["role"] != "private":
        raise BadInput("the store is public", where=f"pretrain, mode {spec.mode}")
    if spec.mode == "public" and source.facts["role"] != "public":
        raise BadInput("the store is private", where="pretrain, mode public")
    initial = bench.input(spec.init_uri) if spec.init_uri else None
    plan = _plan(spec, source)
    content, charged = b"", None
    if plan is not None:
        content = _manifest(spec, bench, source, vocabulary, initial, plan)
        charged = _charge(spec, bench, plan, content)
        refuse_unrecorded(bench, charged)
    elif spec.mode == "nonprivate":
        unit = PrivacyUnit(source.facts["unit"])
        record_operator_use(bench, dataset=source.facts["dataset"], unit=unit)
    # Only now may the rows be read.
    store = TokenStore.open(source.folder / TRAIN)
    if keyed_store_digest(store, bench) != source.facts["digest"]:
        raise BadInput("the rows are not those that the step wrote", where=spec.store_uri)
    model = _train(spec, bench, store, vocabulary, initial, plan, content, charged)
    if charged:
        confirm_same_release(bench, charged, weights_released(model.parameters))
    record = charged.settle() if charged else None
    _publish_curve(bench)
    releases = _releases(source, vocabulary, initial, record)
    save(model, bench.out, vocabulary.folder)
    _measure(spec, bench, model)
    if spec.mode == "nonprivate":
        write_operator_notice(bench.out)
    else:
        write_statement(bench.out, releases, made_up=bench.made_up)
    return Answer(
        outputs={"model": ""},
        releases=releases,
        facts={
            "mode": spec.mode,
            "operator_only": spec.mode == "nonprivate",
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
            "known_seed": bool(charged and charged.seed.known),
            "weights_digest": ""
            if spec.mode == "nonprivate"
            else sha256_of(bench.out / "model.safetensors"),
        },
        model=f"confide-{spec.plan.dataset}" if spec.plan else "",
    )


def _plan(spec: PretrainSpec, source: Input) -> TrainingPlan | None:
    if (spec.plan is None) == (spec.mode == "dp"):
        raise BadInput("a privacy plan belongs to mode dp, and to no other", where="pretrain spec")
    if spec.plan is None:
        return None
    for field in ("dataset", "unit", "declared_units"):
        if getattr(spec.plan, field) != source.facts[field]:
            raise BadInput("the store was made for another", where=f"pretrain spec, {field}")
    return training_plan(spec, source.facts["max_examples_per_unit"])


def _manifest(
    spec: PretrainSpec,
    bench: Workbench,
    source: Input,
    vocabulary: Input,
    initial: Input | None,
    plan: TrainingPlan,
) -> bytes:
    return manifest(
        kind="pretrain",
        store=source.facts["digest"],
        vocabulary=vocabulary.facts["digest"],
        initial=sha256_of(initial.folder / "model.safetensors")
        if initial
        else f"fresh {spec.shape.model_dump_json()}",
        plan=plan.to_json(),
        recipe=recipe_of(spec).identity(),
        seed=spec.seed,
        device=spec.device,
        dtype=spec.precision,
    )


def _charge(spec: PretrainSpec, bench: Workbench, plan: TrainingPlan, content: bytes) -> Charge:
    assert spec.plan is not None  # noqa: S101 - narrows the type
    return charge(
        bench,
        dataset=spec.plan.dataset,
        unit=plan.unit,
        event=plan.event(),
        delta=plan.delta,
        content=content,
    )


def _train(
    spec: PretrainSpec,
    bench: Workbench,
    store: TokenStore,
    vocabulary: Input,
    initial: Input | None,
    plan: TrainingPlan | None,
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
        recipe=recipe_of(spec),
        seed=seed,
        manifest=content,
        init_seed=spec.seed,
        checkpoints=bench.checkpoints(folder),
        device=spec.device,
        progress=_Curve(spec, bench, plan),
        probe=_public_curve(spec, bench, start.config) if plan else None,
        continuation=continuation_pieces(load(vocabulary.folder)) if spec.whole_words else None,
    )


def _start(
    spec: PretrainSpec,
    bench: Workbench,
    store: TokenStore,
    vocabulary: Input,
    initial: Input | None,
) -> AnyModel:
    """Return the model before the first update: an earlier step's, a public one, or a fresh one."""
    if initial:
        return language_model(load_model(initial.folder))
    if spec.public_model:
        if spec.mode != "public":
            raise BadInput("it begins the public pre-training, and no other", where="public_model")
        folder = stage_source(spec.public_model, bench.durable / "source", field="public_model")
        pieces = list(read_pieces(vocabulary.folder))
        found = load_with_vocabulary(folder, pieces, spec.seed)
        refuse_other_architecture(found.config, spec.shape)
        return language_model(found)
    size: int = vocabulary.facts["vocabulary_size"]
    return fresh(config_of(spec.shape, size, store.sequence_length), spec.seed)


def _public_curve(spec: PretrainSpec, bench: Workbench, config: ModelConfig) -> Probe | None:
    """Return the probe of a private training: its score on public text, on the way.

    A look is as private as the weights that it looks at, provided that they are on the way to
    those that are released. Before the release it is the operator's: a training that is made
    again with the same noise may round otherwise, and is refused only at its end.
    """
    folder = bench.input(spec.public_store_uri).folder / HELD_OUT
    if not (folder / "store.json").exists():
        return None
    store = TokenStore.open(folder)

    def look(done: int, weights: Arrays) -> None:
        score, value = _score(Model(config, weights), store, spec.seed, PROBED_ROWS)
        if math.isfinite(value):
            bench.measure(_CURVES[score] + _UNDER_WAY, Operator(value), done)

    points = curve_points(spec.updates)
    return Probe(frozenset(points[:: -(CURVE_POINTS // PROBES)]), look)


def _publish_curve(bench: Workbench) -> None:
    """Show anyone the scores on the way: the weights that they led to are released."""
    for look in bench.measured():
        if look.name.endswith(_UNDER_WAY):
            bench.measure(look.name.removesuffix(_UNDER_WAY), Dp(look.value), look.step)


class _Curve:
    """Turns the trainer's reports into metrics: ε beside the loss, at bounded cost."""

    def __init__(self, spec: PretrainSpec, bench: Workbench, plan: TrainingPlan | None) -> None:
        self._spec, self._bench, self._plan = spec, bench, plan
        self._left, self._spent = curve_points(spec.updates), 0.0

    def __call__(self, now: Progress) -> None:
        passed = [point for point in self._left if point <= now.update]
        self._left = self._left[len(passed) :]
        if self._plan is not None:
            for point in passed:
                event = plan_until(self._plan, point).event()
                self._spent = epsilon_pld(event, self._plan.delta)
                self._bench.measure("epsilon", Public(self._spent), point)
        if now.at_point:
            self._measure(now)
        note = f"ε {self._spent:.3g}" if self._plan is not None else ""
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


def _releases(
    source: Input, vocabulary: Input, initial: Input | None, own: ReleaseRecord | None
) -> list[ReleaseRecord]:
    inherited = [*source.result.releases, *vocabulary.result.releases]
    inherited += initial.result.releases if initial else []
    return merged([*inherited, *([own] if own else [])])


def _score(model: AnyModel, store: TokenStore, seed: int, rows: int) -> tuple[str, float]:
    """Return the name and value of what tells how well a model knows text like a store's."""
    if isinstance(model.config, Gpt2Config):
        return "perplexity", perplexity(model, store, seed=seed, max_rows=rows)
    return "mlm_accuracy", mlm_accuracy(model, store, seed=seed, max_rows=rows)


def _measure(spec: PretrainSpec, bench: Workbench, model: AnyModel) -> None:
    """Measure on rows that no model trained on: public ones, and private ones for the operator."""
    public = Operator if spec.mode == "nonprivate" else Dp
    for name, uri, label in (
        ("public", spec.public_store_uri, public),
        ("private", spec.private_store_uri, Operator),
    ):
        folder: Path = bench.input(uri).folder / HELD_OUT
        if not (folder / "store.json").exists():
            continue  # so small a corpus has no held-out unit
        store = TokenStore.open(folder)
        score, value = _score(model, store, spec.seed, MEASURED_ROWS)
        if math.isfinite(value):
            bench.measure(f"{score}_{name}", label(value))
