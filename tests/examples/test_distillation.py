from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from small_models import random_model

from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStoreWriter
from dp_core.errors import BadInput
from dp_core.models.bert import mlm_logits, mlm_row_losses
from dp_core.models.config import BertConfig
from dp_core.models.parameters import Bert, fresh, parameter_shapes
from dp_core.nn import Layers
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import loop
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates
from examples.distillation import distillation, distilled_row_losses, divergence, student_of

CONFIG = BertConfig(vocab_size=20, hidden=8, layers=12, heads=2, intermediate=12, max_positions=8)
IDS, LENGTHS = np.array([[2, 7, 8, 3], [2, 9, 3, 0]], np.int32), np.array([4, 3], np.int32)
PLACES = np.array([[1, 2], [1, 0]], np.int32)
LABELS, WEIGHTS = np.array([[7, 8], [9, 0]], np.int32), np.array([[1, 1], [1, 0]], np.float32)
ROWS = (IDS, LENGTHS, PLACES, LABELS, WEIGHTS)


@pytest.fixture(scope="module")
def teacher() -> Bert:
    return random_model(CONFIG)


def test_student_has_every_second_layer_and_no_token_types(teacher):
    student = student_of(teacher)
    assert (student.config.layers, student.config.distilled) == (6, True)
    assert {n: a.shape for n, a in student.parameters.items()} == parameter_shapes(student.config)
    for i in range(6):
        np.testing.assert_array_equal(
            student.parameters[f"layer_{i}/qkv/kernel"],
            teacher.parameters[f"layer_{2 * i}/qkv/kernel"],
        )


def test_student_of_all_layers_computes_the_logits_of_its_teacher(teacher):
    student = student_of(teacher, layers=12)
    ids, lengths, places = (tf.constant(a) for a in (IDS, LENGTHS, PLACES))
    teacher_logits, student_logits = (
        mlm_logits(Layers(m.parameters), m.config, ids, lengths, places) for m in (teacher, student)
    )
    np.testing.assert_allclose(student_logits, teacher_logits, atol=1e-4)


def test_unsuitable_number_of_layers_and_teacher_without_mlm_head_are_refused(teacher):
    for layers in (0, 13):
        with pytest.raises(BadInput, match="layers of a teacher's 12"):
            student_of(teacher, layers)
    encoder = {n: a for n, a in teacher.parameters.items() if not n.startswith("mlm/")}
    with pytest.raises(BadInput, match="without its MLM head"):
        student_of(Bert(CONFIG, encoder))


def test_divergence_equals_kullback_leibler_divergence():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 3, 5))
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in logits)
    expected = (p * np.log(p / q)).sum(1)
    np.testing.assert_allclose(divergence(*tf.constant(logits, tf.float32)), expected, rtol=1e-4)
    same = tf.constant(logits[0], tf.float32)
    np.testing.assert_allclose(divergence(same, same), 0, atol=1e-6)


def test_loss_mixes_loss_of_the_text_and_loss_against_the_teacher(teacher):
    student = student_of(teacher)
    layers, rows = Layers(student.parameters), tuple(tf.constant(a) for a in ROWS)
    hard = mlm_row_losses(layers, student.config, *rows).numpy()
    np.testing.assert_allclose(
        distilled_row_losses(teacher, 0.0, 2.0)(layers, student.config, *rows), hard, rtol=1e-5
    )
    teacher_logits, student_logits = (
        mlm_logits(Layers(m.parameters), m.config, *rows[:3]).numpy().reshape(2, 2, -1) / 2.0
        for m in (teacher, student)
    )
    soft = 4 * divergence(
        teacher_logits.reshape(4, -1), student_logits.reshape(4, -1)
    ).numpy().reshape(2, 2)
    soft = (soft * WEIGHTS).sum(1) / WEIGHTS.sum(1)
    np.testing.assert_allclose(
        distilled_row_losses(teacher, 0.25, 2.0)(layers, student.config, *rows),
        0.75 * hard + 0.25 * soft,
        rtol=1e-4,
    )


# --- training


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    writer = TokenStoreWriter(tmp_path_factory.mktemp("store"), 8, 20)
    for unit in range(24):
        writer.add_unit(f"unit {unit}", [[2, *rng.integers(6, 20, 5).tolist(), 3]])
    return writer.finish()


@pytest.fixture
def train(store, tmp_path):
    config, checkpoints = TrainingConfig(learning_rate=0.01), LocalFolder(tmp_path / "checkpoints")
    return partial(loop.train, store=store, config=config, seed=1, checkpoints=checkpoints)


@pytest.fixture(scope="module")
def stubborn() -> Bert:
    """A teacher that predicts token 7 for every input."""
    model = fresh(replace(CONFIG, layers=1), 0)
    model.parameters["mlm/norm/gain"][:] = 0
    model.parameters["mlm/bias"][7] = 4.0
    return model


def predictions_of(model, store) -> set[int]:
    """Return the most likely tokens at the second position of all rows."""
    ids, lengths = tf.constant(store.tokens[:].astype(np.int32)), tf.constant(store.lengths)
    positions = tf.ones((store.n_rows, 1), tf.int32)
    logits = mlm_logits(Layers(model.parameters), model.config, ids, lengths, positions)
    return set(np.argmax(logits, 1).tolist())


def test_student_learns_the_predictions_of_its_teacher(train, store, stubborn):
    start = student_of(fresh(stubborn.config, 5))
    updates = OrdinaryUpdates(60, 24, seed=1)
    student = train(start, distillation(stubborn, share=1.0), updates=updates)
    assert student.config.distilled
    assert predictions_of(student, store) == {7}
    assert predictions_of(start, store) != {7}


def test_private_training_changes_every_parameter_of_the_student(train, stubborn):
    start = student_of(fresh(stubborn.config, 5))
    plan = ExecutionPlan.poisson(
        unit="document", declared_units=30, expected_batch=9, steps=4, noise_multiplier=0.7,
        clip_norm=0.5, delta=1e-4,
    )  # fmt: skip
    updates = PrivateUpdates(plan, PrivacySeed.fixed(4), b"m")
    model = train(start, distillation(stubborn, share=0.5), updates=updates)
    for name, value in model.parameters.items():
        assert (value != start.parameters[name]).mean() > 0.9, name


def test_invalid_share_temperature_and_vocabulary_are_refused(train, stubborn):
    with pytest.raises(BadInput, match="not a share"):
        distillation(stubborn, share=1.5)
    with pytest.raises(BadInput, match="not positive"):
        distillation(stubborn, temperature=0.0)
    other = fresh(replace(stubborn.config, vocab_size=21), 1)
    with pytest.raises(BadInput, match="different vocabularies"):
        train(other, distillation(stubborn), updates=OrdinaryUpdates(1, 4, seed=1))
