"""Masked-language-model pre-training: on public text, with DP (charged), or without privacy."""

from __future__ import annotations

import math
from pathlib import Path

from dp_core.bert.config import BertConfig
from dp_core.bert.parameters import Bert
from dp_core.bert.weights import save
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.labels import Dp, Operator, Public
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.privacy.units import PrivacyUnit
from dp_core.training.evaluate import mlm_accuracy
from dp_core.training.pretrain import pretrain
from dp_core.training.progress import Progress
from dp_core.vocab.wordpiece import continuation_pieces, load
from tasks.charging import Charge, charge, manifest, record_operator_use
from tasks.plans import plan_until, recipe_of, training_plan
from tasks.same_release import confirm_same_release
from tasks.specs import PretrainSpec, ReleaseRecord
from tasks.statements import write_operator_notice, write_statement
from tasks.steps.token_store import HELD_OUT, TRAIN, keyed_store_digest
from tasks.storage import sha256_of
from tasks.workbench import Answer, Input, Workbench, merged

CURVE_POINTS = 100  # each point of ε is an accounting of its own
MEASURED_ROWS = 1024


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
    elif spec.mode == "nonprivate":
        unit = PrivacyUnit(source.facts["unit"])
        record_operator_use(bench, dataset=source.facts["dataset"], unit=unit)
    # Only now may the rows be read.
    store = TokenStore.open(source.folder / TRAIN)
    if keyed_store_digest(store, bench) != source.facts["digest"]:
        raise BadInput("the rows are not those that the step wrote", where=spec.store_uri)
    model = _train(spec, bench, store, vocabulary, initial, plan, content, charged)
    if charged:
        confirm_same_release(bench, charged, model.parameters)
    record = charged.settle() if charged else None
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
            "shape": {"layers": model.config.layers, "hidden": model.config.hidden},
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
        initial=sha256_of(initial.folder / "model.safetensors") if initial else "fresh",
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
) -> Bert:
    fresh = BertConfig.of_size(
        vocab_size=vocabulary.facts["vocabulary_size"],
        hidden=spec.shape.hidden,
        layers=spec.shape.layers,
        max_positions=store.sequence_length,
    )
    seed: PrivacySeed | None = charged.seed if charged else None
    folder = f"checkpoints-{charged.entry.id}" if charged else "checkpoints"
    trained = pretrain(
        model=initial.folder if initial else fresh,
        store=store,
        plan=plan,
        recipe=recipe_of(spec),
        seed=seed,
        manifest=content,
        init_seed=spec.seed,
        checkpoints=bench.checkpoints(folder),
        device=spec.device,
        progress=_Curve(spec, bench, plan),
        continuation=continuation_pieces(load(vocabulary.folder)) if spec.whole_words else None,
    )
    assert isinstance(trained.config, BertConfig)  # noqa: S101 - what it began as
    return Bert(trained.config, trained.parameters)


class _Curve:
    """Turns the trainer's reports into metrics: ε beside the loss, at bounded cost."""

    def __init__(self, spec: PretrainSpec, bench: Workbench, plan: TrainingPlan | None) -> None:
        self._spec, self._bench, self._plan = spec, bench, plan
        self._next, self._spent = 0.0, 0.0

    def __call__(self, now: Progress) -> None:
        if now.update >= self._next or now.update == now.updates:
            self._next = now.update + now.updates / CURVE_POINTS
            if self._plan is not None:
                self._spent = epsilon_pld(
                    plan_until(self._plan, now.update).event(), self._plan.delta
                )
                self._bench.measure("epsilon", Public(self._spent), now.update)
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


def _measure(spec: PretrainSpec, bench: Workbench, model: Bert) -> None:
    """Measure on rows that no model trained on: public ones, and private ones for the operator."""
    public = Operator if spec.mode == "nonprivate" else Dp
    for name, uri, label in (
        ("mlm_accuracy_public", spec.public_store_uri, public),
        ("mlm_accuracy_private", spec.private_store_uri, Operator),
    ):
        folder: Path = bench.input(uri).folder / HELD_OUT
        if not (folder / "store.json").exists():
            continue  # so small a corpus has no held-out unit
        store = TokenStore.open(folder)
        value = mlm_accuracy(model, store, seed=spec.seed, max_rows=MEASURED_ROWS)
        bench.measure(name, label(value))
