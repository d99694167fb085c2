"""Language-model pre-training: with differential privacy, or without, by one trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dp_core.bert.parameters import AnyModel, Model, ModelConfig, fresh, language_model
from dp_core.bert.weights import load_model
from dp_core.corpus.token_store import TokenStore
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.agreement import check_words
from dp_core.training.batch_source import BatchSource
from dp_core.training.checkpoint_places import CheckpointPlace
from dp_core.training.fit import fit
from dp_core.training.objective import Objective, objective_for
from dp_core.training.progress import Probe, Progress
from dp_core.training.recipe import Recipe


def pretrain(
    *,
    model: Path | ModelConfig | AnyModel,
    store: TokenStore,
    plan: TrainingPlan | None,
    recipe: Recipe,
    seed: PrivacySeed | None,
    manifest: bytes,
    init_seed: int,
    checkpoints: CheckpointPlace,
    device: str,
    progress: Callable[[Progress], None],
    continuation: NDArray[np.bool_] | None = None,
    objective: Objective | None = None,
    batches: BatchSource | None = None,
    probe: Probe | None = None,
) -> AnyModel:
    """Train a model on the rows of a token store, going on from a checkpoint if there is one.

    Formal guarantee, with a plan: the weights after every update are those of DP-SGD with the
    plan's sampling, clip norm and noise, so their privacy is that of `plan.event()`; in real
    arithmetic, and as long as `seed` stays secret and is used for nothing else.

    On one machine the same arguments give the same weights, bit for bit, however often the run
    was stopped. On another kind of processor, or with other threads, sums may round otherwise:
    who runs a released training again must compare (the noise is the same).

    Args:
        model: folder of initial weights, a model, or the shape of a fresh one.
        store: the rows, by unit.
        plan: sampling, clip and noise; None trains ordinarily, in shuffled epochs over the rows
            and `recipe.batch_size · recipe.examples_per_step` rows an update.
        recipe: the rest.
        seed: secret of the reservation; given exactly if there is a plan.
        manifest: keyed digests of everything the noise is drawn for.
        init_seed: public; initial weights, and order and masks without a plan.
        checkpoints: where they are kept. Of private training, treat them as private: moments are
            functions of the released weights, but the run may not be finished.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: called at the points of the curve, and about once a second; a run that goes on
            may tell the point it goes on from once more.
        continuation: (V,) true for pieces that go on with a word; needed by `recipe.whole_words`.
        objective: what rows teach; by the architecture if None: masked pieces, or the next.
        batches: what `batch_plan.BatchPlan` reads, drawn beforehand; None draws them here.
        probe: looks at the weights at some updates.

    Raises:
        BadInput: plan, recipe, model and store do not fit together, or the checkpoints belong to
            another run.
        Unfinished: `recipe.stop_after_seconds` passed; run again, it goes on.
        ConfideError: the weights stopped being finite, or a checkpoint could not be written.
    """
    check_words(recipe, store, continuation)
    initial = _initial(model, init_seed)
    if objective is None:
        objective = objective_for(initial.config, continuation if recipe.whole_words else None)
    return fit(
        initial,
        objective,
        store=store,
        plan=plan,
        recipe=recipe,
        seed=seed,
        manifest=manifest,
        order_seed=init_seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
        batches=batches,
        probe=probe,
    )


def _initial(model: Path | ModelConfig | AnyModel, init_seed: int) -> AnyModel:
    if isinstance(model, Path):
        return language_model(load_model(model))
    return model if isinstance(model, Model) else fresh(model, init_seed)
