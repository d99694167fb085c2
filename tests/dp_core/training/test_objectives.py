"""The training loop with a causal objective learns with and without privacy."""

from __future__ import annotations

import numpy as np

from dp_core.models.config import Gpt2Config
from dp_core.models.parameters import fresh
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import OrdinaryUpdates
from dp_core.training.objectives import perplexity

GPT2 = Gpt2Config(vocab_size=40, hidden=16, layers=1, heads=2, intermediate=32, max_positions=12)


def test_causal_model_learns_the_next_token(train, store, config_of):
    """An odd word follows its even word; an even word is uniform among 17."""
    model = train(OrdinaryUpdates(250, 24, seed=1), model=GPT2, config=config_of(micro_rows=24))
    before = perplexity(fresh(GPT2, 1), store, seed=0)
    assert perplexity(model, store, seed=0) < 1.3 * np.sqrt(17) < before / 4


def test_private_updates_of_a_causal_model_do_not_depend_on_number_of_devices(
    train, plan_of, tmp_path
):
    models = [
        train(plan_of(), model=GPT2, checkpoints=LocalFolder(tmp_path / str(i)), device=device)
        for i, device in enumerate(("cpu", "mock-tpu:2"))
    ]
    for name, value in models[0].parameters.items():
        np.testing.assert_allclose(value, models[1].parameters[name], atol=2e-3)
        assert (value != fresh(GPT2, 1).parameters[name]).mean() > 0.9, name
