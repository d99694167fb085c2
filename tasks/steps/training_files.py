"""The files that a language-model training reads and writes, and a fresh model's config.

This code shapes releases, so it is part of the code in the manifest of a charged training.

Kept models are models of one training after several of its updates, which are released together.
The kept models have no privacy cost in addition to the training's one charge. DP-SGD is accounted
for as the adaptive composition of its updates, each of which releases its noised sum (Abadi et al.
2016, arXiv:1607.00133, section 3.2); with correlated noise, as one release of the whole sequence of
sums (Denisov et al. 2022, arXiv:2202.08312). The weights after update t are a function of the sums
up to t, so the models after several updates are a function of all sums: post-processing (Dwork and
Roth 2014, proposition 2.1). An accounting that hides all iterates but the last would not allow
this; no accountant of this platform does so.

The spec fixes how often and when models are kept, before the first update. The kept models are
stored with the checkpoints until the training is settled, which binds its noise to all of them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from dp_core.audit.canaries import throw_coins
from dp_core.cluster.ray_cluster import RayCluster
from dp_core.config.training import ArchitectureConfig, TrainingConfig
from dp_core.data.token_store import TokenStore, divided, joined
from dp_core.errors import BadInput, ConfideError
from dp_core.labels import Dp, Operator, Public
from dp_core.models.adapters import adapters_of, merged, save_adapter, trained_names
from dp_core.models.architectures import ARCHITECTURES
from dp_core.models.config import CausalConfig, FeedForwardConfig
from dp_core.models.hugging_face import ADAPTER_FOLDER, save
from dp_core.models.parameters import AnyModel, Arrays, ModelConfig, shape_facts
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.privacy.statement import operator_only
from dp_core.training.checkpoints import CheckpointPlace, Checkpoints, arrays_digest
from dp_core.training.devices import strategy_for
from dp_core.training.gradient_sources import GradientHosts
from dp_core.training.loop import EvaluationHook, Progress, curve_points
from dp_core.training.objectives import mlm_accuracy, perplexity
from tasks.context import StepContext
from tasks.protocol.specs import PretrainSpec
from tasks.releases.charge import plan_until
from tasks.releases.provenance import (
    PRETRAINED,
    Role,
    fact,
    model_at,
    output_of,
    rows_at,
    vocabulary_digest,
)
from tasks.results import Input, kept_folder, write_statement
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log
from tasks.steps.token_store_step import AUDIT, HELD_OUT, TRAIN, keyed_store_digest
from tasks.storage.backends import is_remote, local_path
from tasks.storage.store import sha256_of

# The role of the training rows, by mode.
_ROLES: dict[str, Role] = {
    "public": "public",
    "released": "released",
    "dp": "private",
    "nonprivate": "private",
}


@dataclass(frozen=True)
class TrainingInputs:
    """The outputs of earlier steps that a training reads, all with the same vocabulary.

    Attributes:
        vocabulary: the vocabulary of all inputs.
        rows: the token store whose units train.
        public: the token store whose held-out rows may be shown to anyone.
        private: the token store whose held-out rows are measured for the operator.
        initial: the model before the first update, if an earlier step made it.
    """

    vocabulary: Input
    rows: Input
    public: Input
    private: Input
    initial: Input | None

    @classmethod
    def open(cls, spec: PretrainSpec, context: StepContext) -> Self:
        """Open the inputs that the spec names, and check their roles, vocabularies and the device.

        Raises:
            BadInput: an input does not have the role or vocabulary that the spec states, or this
                machine, which trains, lacks the device.
        """
        if not context.deployment.hosts:
            strategy_for(spec.device)
        vocabulary = output_of(context, spec.vocabulary_uri, "vocabulary")

        def rows(field: str, role: Role) -> Input:
            return rows_at(context, getattr(spec, field), role, vocabulary, field=field)

        return cls(
            vocabulary,
            rows("store_uri", _ROLES[spec.mode]),
            rows("public_store_uri", "public"),
            rows("private_store_uri", "private"),
            model_at(
                context, spec.init_uri, field="init_uri", steps=PRETRAINED, vocabulary=vocabulary
            )
            if spec.init_uri
            else None,
        )

    def train_store(self, spec: PretrainSpec, context: StepContext) -> TokenStore:
        """Return the training rows, unaltered since they were written: the noise is bound to them.

        Raises:
            BadInput: the rows were altered.
        """
        store = TokenStore.open(self.rows.folder / TRAIN)
        if keyed_store_digest(store, context) != self.rows.facts["digest"]:
            raise BadInput("the rows are not those that the step wrote", where=spec.store_uri)
        return store

    def with_audit_canaries(
        self, store: TokenStore, coins: PrivacySeed, context: StepContext
    ) -> tuple[TokenStore, list[int]]:
        """Return the training rows followed by the audit canaries that the release's coins choose.

        The copy is stored with the step's unfinished work, and removed together with it.

        Args:
            store: store of the private units.
            coins: seed of the coins, which choose the canaries.
            context: context of the training.

        Returns:
            The store, and the numbers of the chosen canaries.

        Raises:
            BadInput: the canaries were altered.
        """
        canaries = audit_canaries_of(self.rows, context)
        chosen = [int(i) for i in np.flatnonzero(throw_coins(coins, canaries.n_units))]
        return joined(context.durable / "rows", store, canaries, chosen), chosen


def audit_canaries_of(rows: Input, context: StepContext) -> TokenStore:
    """Return all audit canaries of a private store, unaltered since their step wrote them.

    Raises:
        BadInput: there are none, or they were altered.
    """
    if not (count := fact(rows, "audit_canaries")):
        raise BadInput(
            "the rows have no audit canaries",
            where="private_store_uri",
            fix="Set audit_canaries before the training.",
        )
    store = TokenStore.open(rows.folder / AUDIT)
    known = keyed_store_digest(store, context) == fact(rows, "audit_digest")
    if not known or store.n_units != count:
        raise BadInput("the audit canaries are not those that the step wrote", where="store_uri")
    return store


def held_out(source: Input) -> TokenStore | None:
    """Return the held-out rows of a store; None if the corpus was too small for any."""
    folder = source.folder / HELD_OUT
    return TokenStore.open(folder) if (folder / "store.json").exists() else None


def private_parts(source: Input, share: float) -> dict[str, TokenStore]:
    """Return the held-out private rows by part, without parts that are empty.

    Args:
        source: the token store of the private corpus.
        share: share of the units that are the part `development`; all others are `private`.
    """
    store = held_out(source)
    if store is None or not share:
        return {} if store is None else {"private": store}
    development, test = divided(store, share)
    parts = {"private": test, "development": development}
    return {name: part for name, part in parts.items() if part.n_units}


def config_of(shape: ArchitectureConfig, vocabulary_size: int, length: int) -> ModelConfig:
    """Return the config of a fresh model that reads rows of `length` tokens."""
    layout, hidden = ARCHITECTURES[shape.model_kind], shape.hidden or 128
    if issubclass(layout.config, FeedForwardConfig):
        return FeedForwardConfig(
            vocab_size=vocabulary_size,
            hidden=hidden,
            window=shape.window,
            units=tuple(int(units) for units in shape.dense_units.split(",")),
            max_positions=length,
        )
    return layout.config.of_size(
        vocab_size=vocabulary_size,
        hidden=hidden,
        layers=shape.layers or 2,
        max_positions=length,
        **layout.fixed,
    )


@contextmanager
def training_hosts(
    spec: PretrainSpec, context: StepContext, canaries: Sequence[int] = ()
) -> Iterator[GradientHosts | None]:
    """Yield the training's hosts on the cluster, or None if it trains in the step's process.

    Args:
        spec: spec of the training.
        context: context of the step.
        canaries: numbers of the audit canaries that are trained on.

    Raises:
        ConfideError: the cluster does not answer, or lacks the requested device.
    """
    count = context.deployment.hosts
    cluster = context.cluster if count else None
    if not isinstance(cluster, RayCluster):
        yield None
        return
    hosts = cluster.hosts(count, spec.device)
    log(f"{context.run.task}: training on {count} host{'s' if count > 1 else ''} of the cluster")
    try:
        yield GradientHosts(hosts, StoredRows(spec.store_uri, tuple(canaries)))
    finally:
        hosts.end()


@dataclass(frozen=True)
class StoredRows:
    """The training rows, opened on a host of the training.

    The store's address comes from the environment of the host's machine. For a local store, the
    host reads where each row begins; the rows of its share are compared with the step's rows by
    digest.

    Attributes:
        uri: output folder of the token store whose units train.
        canaries: numbers of the audit canaries that are trained on.
    """

    uri: str
    canaries: tuple[int, ...] = ()

    def __call__(self) -> TokenStore:
        """Open the store.

        Raises:
            BadInput: the address is not below the deployment's store, or no store exists there.
        """
        store = Deployment.from_environment().open_store()
        location = store.location(self.uri)  # refuses an address outside the deployment's store
        folder = store.local_copy(self.uri) if is_remote(store.root) else local_path(location)
        train = TokenStore.open(folder / TRAIN)
        if not self.canaries:
            return train
        # Joined rows stay mapped after their files are removed, so a killed host leaves no files.
        with tempfile.TemporaryDirectory(prefix="confide-rows-") as scratch:
            more = TokenStore.open(folder / AUDIT)
            return joined(Path(scratch) / "rows", train, more, self.canaries)


MEASURED_ROWS = 1024


class TrainingCurve:
    """Measures a training at the points of its curve: losses, and the ε that it has spent so far.

    The metric `epsilon_training` covers this training only. The metric `epsilon`, recorded once
    when the model is released (`write_model`), is the model's cost including all earlier releases.

    Args:
        context: context of the step.
        plan: the plan that is charged; None trains without privacy.
        updates: number of updates.
        losses: label of losses and batch sizes; None measures no losses.
    """

    def __init__(
        self,
        context: StepContext,
        plan: ExecutionPlan | None,
        updates: int,
        losses: type[Dp] | type[Operator] | None = None,
    ) -> None:
        self._context, self._plan, self._losses = context, plan, losses
        self._left, self._spent = curve_points(updates), 0.0

    def __call__(self, now: Progress) -> None:
        """Measure the points that were passed, and report progress with the ε spent."""
        if now.at_point and self._losses:
            numbers = {"loss": now.loss, "batch": now.batch}
            if self._plan:
                numbers["clipped"] = now.clipped
            for name, value in numbers.items():
                if math.isfinite(value):
                    self._context.measure(name, self._losses(value), now.update)
        if self._plan is None:
            self._context.progress(now.update, now.updates)
            return
        passed = [point for point in self._left if point <= now.update]
        self._left = self._left[len(passed) :]
        for point in passed:
            self._spent = epsilon_pld(plan_until(self._plan, point).event(), self._plan.delta)
            self._context.measure("epsilon_training", Public(self._spent), point)
        self._context.progress(now.update, now.updates, f"ε {self._spent:.3g}")


def score(
    model: AnyModel, store: TokenStore, seed: int, rows: int = MEASURED_ROWS
) -> tuple[str, float]:
    """Return the name and value of the metric for how well a model predicts a store's text."""
    if isinstance(model.config, CausalConfig):
        return "perplexity", perplexity(model, store, seed=seed, max_rows=rows)
    return "mlm_accuracy", mlm_accuracy(model, store, seed=seed, max_rows=rows)


def write_model(
    context: StepContext,
    model: AnyModel,
    vocabulary: Input,
    earlier: Mapping[int, AnyModel] | None = None,
    released_after: Sequence[int] = (),
) -> None:
    """Write a model in Hugging Face's layout with its privacy statement, and measure its cost.

    Adapters are merged into the model, and also written separately in PEFT's layout.

    Args:
        context: context of the step.
        model: the model after all updates.
        vocabulary: an output whose folder holds the model's vocabulary.
        earlier: models of the same training that are kept, by number of updates done.
        released_after: as in `statements.write_statement`.
    """
    folders = {kept_folder(done): kept_model for done, kept_model in (earlier or {}).items()}
    for name, kept_model in {"": model, **folders}.items():
        folder = context.out / name
        save(merged(kept_model), folder, vocabulary.folder)
        if adapters_of(kept_model.parameters):
            save_adapter(kept_model, folder / ADAPTER_FOLDER)
        write_statement(
            folder, context.releases, made_up=context.made_up, released_after=released_after
        )
    context.measure_cost(context.releases)


def model_facts(
    context: StepContext,
    model: AnyModel,
    vocabulary: Input,
    plan: ExecutionPlan | None,
    epsilon: float | None,
    training: TrainingConfig,
) -> dict[str, Any]:
    """Return the facts of a pre-trained model; an `epsilon` of None means no guarantee."""
    kept = operator_only(context.releases)
    return {
        "parameters": merged(model).size,
        "trained": {
            "which": training.trained_parameters,
            "parameters": sum(
                model.parameters[name].size for name in trained_names(model, training)
            ),
        },
        "shape": shape_facts(model.config),
        "plan": None if plan is None else plan.to_json(),
        "epsilon_training": epsilon,
        "vocabulary_digest": vocabulary_digest(vocabulary),
        "weights_digest": "" if kept else sha256_of(context.out / "model.safetensors"),
    }


class KeptModels:
    """Weights after given numbers of updates, which a resumed run finds again.

    Args:
        updates: numbers of updates done, all below the last.
        place: folder that belongs to this training only.
        run: digest of the training's identity; models of another training are refused.
    """

    def __init__(self, updates: Sequence[int], place: CheckpointPlace, run: str) -> None:
        self._updates, self._where = tuple(updates), place.where
        self._own: dict[int, str] = {}  # digests of the models that this process has kept
        self._kept = Checkpoints(place, run, keep=max(1, len(self._updates)))

    def hook(self, evaluation: EvaluationHook) -> EvaluationHook:
        """Return a hook that keeps the models during training, and calls the given hook as well."""

        def keep(done: int, weights: Arrays) -> None:
            if done in self._updates:
                self._kept.save(done, weights)
                self._own[done] = arrays_digest(weights)
            if done in evaluation.at:
                evaluation.evaluate(done, weights)

        return EvaluationHook(evaluation.at | set(self._updates), keep)

    def weights(self) -> dict[int, Arrays]:
        """Return the weights by number of updates, once the training has ended.

        Raises:
            ConfideError: a model is missing or damaged, or differs from the model kept by this
                process.
        """
        kept = {update: self._kept.at(update) for update in self._updates}
        arrays = {update: weights for update, weights in kept.items() if weights is not None}
        if lost := [str(update) for update in kept if update not in arrays]:
            raise ConfideError(
                f"the model after {', '.join(lost)} updates is not there, or damaged",
                where=self._where,
                fix="Delete the checkpoints of this training and run it again: it makes the same "
                "models, and is not charged again.",
            )
        if any(arrays_digest(arrays[update]) != digest for update, digest in self._own.items()):
            # Both have the same noise but may differ in rounding, so they may not both be released.
            raise ConfideError(
                "another process has trained the same at the same time, and kept other models",
                where=self._where,
                fix="See that one of them runs alone, then run it again.",
            )
        return arrays
