"""The outputs of trainings: ε spent so far, scores, totals, the model's folder and kept models.

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
from collections.abc import Mapping, Sequence
from typing import Any

from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore
from dp_core.errors import ConfideError
from dp_core.labels import Dp, Operator, Public
from dp_core.models.adapters import (
    adapters_of,
    merged,
    save_adapter,
    trained_names,
)
from dp_core.models.config import CausalConfig
from dp_core.models.hugging_face import ADAPTER_FOLDER, save
from dp_core.models.parameters import AnyModel, Arrays
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.training.checkpoints import Checkpoint, CheckpointPlace, Checkpoints, arrays_digest
from dp_core.training.loop import EvaluationHook, Progress, curve_points
from dp_core.training.objectives import mlm_accuracy, perplexity
from tasks.context import StepContext
from tasks.releases.charge import plan_until
from tasks.releases.provenance import operator_only, vocabulary_digest
from tasks.results import Input, kept_folder, write_statement
from tasks.storage import sha256_of

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
    folders = {kept_folder(done): one for done, one in (earlier or {}).items()}
    for name, one in {"": model, **folders}.items():
        folder = context.out / name
        save(merged(one), folder, vocabulary.folder)
        if adapters_of(one.parameters):
            save_adapter(one, folder / ADAPTER_FOLDER)
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
        "shape": {
            "kind": model.config.kind,
            "layers": model.config.layers,
            "hidden": model.config.hidden,
        },
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

    def hook(self, beside: EvaluationHook | None) -> EvaluationHook | None:
        """Return a hook that keeps the models during training, and calls the given hook as well."""
        if not self._updates:
            return beside
        measured = frozenset() if beside is None else beside.at

        def keep(done: int, weights: Arrays) -> None:
            if done in self._updates:
                self._kept.save(Checkpoint(done, weights))
                self._own[done] = arrays_digest(weights)
            if beside is not None and done in measured:
                beside.evaluate(done, weights)

        return EvaluationHook(measured | set(self._updates), keep)

    def weights(self) -> dict[int, Arrays]:
        """Return the weights by number of updates, once the training has ended.

        Raises:
            ConfideError: a model is missing or damaged, or differs from the model kept by this
                process.
        """
        found = {update: self._kept.at(update) for update in self._updates}
        if lost := [str(update) for update, one in found.items() if one is None]:
            raise ConfideError(
                f"the model after {', '.join(lost)} updates is not there, or damaged",
                where=self._where,
                fix="Delete the checkpoints of this training and run it again: it makes the same "
                "models, and is not charged again.",
            )
        arrays = {update: one.arrays for update, one in found.items() if one is not None}
        if any(arrays_digest(arrays[update]) != own for update, own in self._own.items()):
            # Both have the same noise but may differ in rounding, so they may not both be released.
            raise ConfideError(
                "another process has trained the same at the same time, and kept other models",
                where=self._where,
                fix="See that one of them runs alone, then run it again.",
            )
        return arrays
