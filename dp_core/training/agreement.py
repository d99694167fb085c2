"""Whether plan, recipe, seed, model and rows belong together: asked before anything is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_core.bert.parameters import ModelConfig
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.privacy.plan import BatchPhase, TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.recipe import Recipe

Flags = NDArray[np.bool_]


def check_plan(plan: TrainingPlan | None, recipe: Recipe, seed: PrivacySeed | None) -> None:
    """Refuse a recipe that is not what the plan accounts for.

    Raises:
        BadInput: it says which two numbers differ, or that plan or seed is missing.
    """
    if plan is None:
        if seed is not None:
            raise BadInput("a privacy seed without a plan", where="pretraining")
        return
    if seed is None:
        raise BadInput("a plan without a privacy seed", where="pretraining")
    if plan.adaptive is not None and recipe.clipping != "flat":
        raise BadInput(
            "automatic clipping has no clip norm to learn",
            where="clipping",
            fix="Use flat, or a plan without adaptive clipping.",
        )
    _same("updates", plan.steps, recipe.updates)
    _same("examples_per_step", plan.examples_per_step, recipe.examples_per_step)
    planned, asked = (_merged(phases) for phases in (plan.schedule, recipe.phases()))
    if planned != asked:
        _same("batch_size", _shown(planned), _shown(asked))


def check_words(recipe: Recipe, store: TokenStore, continuation: Flags | None) -> None:
    """Refuse whole-word masking without knowing which pieces go on with a word.

    Raises:
        BadInput: the flags are missing, or are not one for each piece.
    """
    if not recipe.whole_words:
        return
    if continuation is None or continuation.shape != (store.vocabulary_size,):
        raise BadInput(
            "masking whole words needs the vocabulary's continuation pieces",
            where="whole_words",
            fix="Give one flag for each piece of the store's vocabulary.",
        )


def check_model(config: ModelConfig, store: TokenStore) -> None:
    """Refuse a model that cannot read the rows.

    Raises:
        BadInput: too small a vocabulary, or too few positions.
    """
    if store.vocabulary_size > config.vocab_size:
        raise BadInput(
            f"the store's vocabulary of {store.vocabulary_size} is larger than the model's of "
            f"{config.vocab_size}",
            where="model",
            fix="Load the model with the store's vocabulary.",
        )
    if store.sequence_length > config.max_positions:
        raise BadInput(
            f"rows of {store.sequence_length} tokens, positions for {config.max_positions}",
            where="model",
        )


def _same(name: str, planned: object, asked: object) -> None:
    if planned != asked:
        raise BadInput(
            f"the plan has {planned}, the recipe {asked}",
            where=name,
            fix="What is accounted must be what is done.",
        )


def _merged(phases: Sequence[BatchPhase]) -> list[tuple[int, float]]:
    """Return (updates, batch) with neighbouring phases of one batch size joined."""
    joined: list[tuple[int, float]] = []
    for phase in phases:
        if joined and joined[-1][1] == phase.expected_batch:
            joined[-1] = (joined[-1][0] + phase.steps, joined[-1][1])
        else:
            joined.append((phase.steps, float(phase.expected_batch)))
    return joined


def _shown(phases: list[tuple[int, float]]) -> str:
    return ", ".join(f"{batch:g} units for {steps} updates" for steps, batch in phases)
