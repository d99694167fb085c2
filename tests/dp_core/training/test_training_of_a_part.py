from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from noised_updates import Recorder, assert_gaussian, flat
from small_models import logits_of

from dp_core.config.training import AdapterConfig
from dp_core.errors import BadInput
from dp_core.models.adapters import (
    merged,
    prepared,
    trained_names,
)
from dp_core.models.config import BertConfig, Gpt2Config, LlamaConfig
from dp_core.models.hugging_face import load_model, save
from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import Clipper
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.devices import strategy_for
from dp_core.training.loop import OrdinaryUpdates
from dp_core.training.trainer import AdamW, Trainer

LORA = AdapterConfig(trained_parameters="lora", lora_rank=8)
SEED = PrivacySeed.fixed(0)


def trainer_of(config: Any, adapters: AdapterConfig, *, device="cpu", clip=0.5, optimizer=None):
    start = prepared(fresh(config, 0), adapters, 0)
    return start, Trainer(
        strategy_for(device),
        config,
        start.parameters,
        optimizer or AdamW(0.9, 0.999, 0.01),
        Clipper(clip),
        trained=trained_names(start, adapters),
    )


@pytest.mark.statistical
@pytest.mark.parametrize("kind", ["lora", "biases-and-norms"])
@pytest.mark.parametrize("device", ["mock-tpu:2"])
def test_noise_is_only_on_trained_parameters_with_the_variance_of_the_plan(config, device, kind):
    clip, sigma, divisor = 0.5, 1.7, 9.0
    adapters = LORA.model_copy(update={"trained_parameters": kind})
    start, trainer = trainer_of(
        config, adapters, device=device, clip=clip, optimizer=Recorder(0, 0, 0)
    )
    samples = []
    for t in range(1 if kind == "lora" else 6):
        noise = UpdateNoise(SEED, b"m", t, sigma, clip)
        trainer.apply_update(step=t, learning_rate=0.1, divisor=divisor, noise=noise)
        after = trainer.weights()
        samples.append(flat({n: after[n] for n in trainer.names}))
    frozen = start.parameters.keys() - set(trainer.names)
    for name in frozen:
        np.testing.assert_array_equal(after[name], start.parameters[name], err_msg=name)
    sample, right = np.concatenate(samples), sigma * clip / divisor
    assert len(sample) > 1000
    assert len(np.unique(sample)) > 0.9 * len(sample)
    assert_gaussian(sample, right)


SIZES = {
    "vocab_size": 40, "hidden": 16, "layers": 1, "heads": 2, "intermediate": 32,
    "max_positions": 12,
}  # fmt: skip


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((kind, BertConfig) for kind in ("lora", "biases-and-norms", "top-layer")),
        *(("lora", shape) for shape in (Gpt2Config, LlamaConfig)),
    ],
)
def test_frozen_parameters_stay_the_same_bits(train, plan_of, config_of, kind, shape, private):
    settings = config_of(trained_parameters=kind, lora_rank=2)
    fresh_model = fresh(shape(**SIZES), 1)
    start = prepared(fresh_model, settings, 1)
    updates = plan_of(steps=2) if private else OrdinaryUpdates(2, 8, seed=1)
    model = train(updates, config=settings, model=fresh_model)
    names = trained_names(start, settings)
    assert model.parameters.keys() == start.parameters.keys()
    for name, before in start.parameters.items():
        same = np.array_equal(model.parameters[name], before)
        assert same == (name not in names), name


def test_checkpoint_with_other_frozen_parameters_belongs_to_another_run(
    train, plan_of, config_of, config
):
    """A checkpoint holds only the adapters, which need their frozen weights."""
    settings = config_of(trained_parameters="lora", lora_rank=2)
    train(plan_of(), config=settings, model=fresh(config, 1))
    with pytest.raises(BadInput, match="another run"):
        train(plan_of(), config=settings, model=fresh(config, 2))


def test_trained_adapter_is_saved_and_read_back(train, plan_of, config_of, config, tmp_path):
    """Opacus issue 820: training looked normal, but the saved adapter was not the trained one.

    Every adapter has learned, the base is unchanged, and the reloaded model, as an adapter or
    merged, computes the same as the trained model.
    """
    base = fresh(config, 1)
    settings = config_of(trained_parameters="lora", lora_rank=2, learning_rate=0.05)
    model = train(plan_of(), config=settings, model=base)
    learned = [n for n in model.parameters if n.endswith(("lora_a", "lora_b"))]
    assert len(learned) == 2 * 4
    begun = prepared(base, settings, 1).parameters
    assert not [n for n in learned if np.array_equal(model.parameters[n], begun[n])]

    ids = np.array([[2, 7, 8, 9, 3]])
    logits = logits_of(model, ids)
    assert np.abs(logits - logits_of(base, ids)).max() > 0.01
    save(merged(model), tmp_path)
    np.testing.assert_allclose(logits_of(load_model(tmp_path), ids), logits, atol=1e-5)


def test_model_without_trained_parameters_is_refused(config):
    start = fresh(config, 0)
    with pytest.raises(BadInput, match="none of the model's parameters"):
        Trainer(strategy_for("cpu"), config, start.parameters, AdamW(0.9, 0.9, 0), None, trained=())
