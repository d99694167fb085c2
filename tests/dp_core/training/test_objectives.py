"""The one trainer on every objective: they learn, with privacy and without."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dp_core.errors import BadInput
from dp_core.models.bert import mlm_logits
from dp_core.models.config import Gpt2Config
from dp_core.models.distil import student_of
from dp_core.models.hugging_face import save
from dp_core.models.parameters import Bert, fresh
from dp_core.nn.layers import Layers
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.evaluate import perplexity
from dp_core.training.loop import pretrain
from dp_core.training.objectives import distillation

GPT2 = Gpt2Config(vocab_size=40, hidden=16, layers=1, heads=2, intermediate=32, max_positions=12)
SEED = PrivacySeed.fixed(4)


@pytest.fixture()
def train(store, folder):
    settings = {
        "store": store,
        "plan": None,
        "seed": None,
        "manifest": b"m",
        "init_seed": 1,
        "checkpoints": LocalFolder(folder),
        "device": "cpu",
        "progress": lambda p: None,
    }
    return lambda **changes: pretrain(**(settings | changes))


def test_a_causal_model_learns_what_follows(train, store, training_config_of):
    """An odd word follows its even one, and an even word is anybody's guess among 17."""
    training_config = training_config_of(
        updates=250, batch_size=24, examples_per_step=1, micro_rows=24
    )
    model = train(model=GPT2, training_config=training_config)
    before = perplexity(fresh(GPT2, 1), store, seed=0)
    assert perplexity(model, store, seed=0) < 1.3 * np.sqrt(17) < before / 4


def test_a_causal_model_takes_the_same_private_steps_on_any_number_of_devices(
    train, plan_of, training_config_of, tmp_path
):
    models = [
        train(
            model=GPT2,
            plan=plan_of(),
            seed=SEED,
            training_config=training_config_of(),
            checkpoints=LocalFolder(tmp_path / str(i)),
            device=device,
        )
        for i, device in enumerate(("cpu", "mock-tpu:2"))
    ]
    for name, value in models[0].parameters.items():
        np.testing.assert_allclose(value, models[1].parameters[name], atol=2e-3)
        assert (value != fresh(GPT2, 1).parameters[name]).mean() > 0.9, name


@pytest.fixture(scope="module")
def teacher(config, store) -> Bert:
    """A model that says 7, whatever it reads."""
    model = fresh(config, 0)
    model.parameters["mlm/norm/gain"][:] = 0
    model.parameters["mlm/bias"][7] = 4.0
    return model


def test_a_student_comes_to_say_what_its_teacher_says(train, store, training_config_of, teacher):
    training_config = training_config_of(
        updates=40, batch_size=24, examples_per_step=1, micro_rows=24
    )
    student = train(
        model=student_of(fresh(teacher.config, 5)),
        training_config=training_config,
        objective=distillation(teacher, share=1.0),
    )
    assert student.config.distilled
    assert what_it_says(student, store) == {7}
    assert what_it_says(fresh(student.config, 5), store) != {7}


def what_it_says(model, store) -> set[int]:
    """First guesses at the second place of every row."""
    ids, lengths = tf.constant(store.tokens[:].astype(np.int32)), tf.constant(store.lengths)
    places = tf.ones((store.n_rows, 1), tf.int32)
    logits = mlm_logits(Layers(model.parameters), model.config, ids, lengths, places)
    return set(np.argmax(logits, 1).tolist())


def test_a_student_learns_privately(train, plan_of, training_config_of, teacher, tmp_path):
    objective = distillation(teacher, share=0.5)
    start = student_of(fresh(teacher.config, 5))
    save(start, tmp_path / "start")  # also from its folder
    settings = {
        "plan": plan_of(),
        "seed": SEED,
        "training_config": training_config_of(),
        "objective": objective,
    }
    model = train(model=tmp_path / "start", **settings)
    for name, value in model.parameters.items():
        assert (value != start.parameters[name]).mean() > 0.9, name


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"share": 1.5}, "not a share"), ({"temperature": 0.0}, "not positive")],
)
def test_a_distillation_that_makes_no_sense_is_refused(teacher, changes, words):
    with pytest.raises(BadInput, match=words):
        distillation(teacher, **changes)


def test_a_teacher_of_another_vocabulary_is_refused(train, training_config_of, teacher, config):
    with pytest.raises(BadInput, match="different vocabularies"):
        train(
            model=config.with_vocabulary(41),
            training_config=training_config_of(),
            objective=distillation(teacher),
        )
