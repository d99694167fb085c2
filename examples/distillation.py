"""Distillation in the platform's training loop: a student model and an objective with a teacher.

DistilBERT by Sanh et al. 2019 (arXiv:1910.01108). `train(start, distillation(teacher))` trains
the student, with differential privacy or without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.models.bert import mlm_logits
from dp_core.models.config import BertConfig
from dp_core.models.parameters import MLM_BIAS, POSITION, TYPE, Bert, Model
from dp_core.nn import Layers, Tensor, cross_entropy, shape_of
from dp_core.training.batches import masked_examples
from dp_core.training.objectives import Objective


def student_of(teacher: Bert, layers: int | None = None) -> Bert:
    """Return a DistilBERT that starts with every other layer of its teacher.

    The embedding of token type 0, which every token of a single text has, is added to the position
    table. A student with as many layers as its teacher computes exactly the same function.
    No data is used, so the student has the privacy guarantee of its teacher, or none if the teacher
    has none.

    Args:
        teacher: a BERT or a DistilBERT, with its MLM head.
        layers: number of layers of the student; by default half the teacher's, rounded up. They are
            copied from the teacher at even distances: for 6 of 12, layers 0, 2, 4, 6, 8 and 10.

    Raises:
        BadInput: more layers than the teacher has, fewer than one, or a teacher without MLM head.
    """
    config = teacher.config
    if not isinstance(config, BertConfig):
        raise BadInput(f"a teacher of kind {config.kind}", where="student")
    wanted = -(-config.layers // 2) if layers is None else layers
    if not 1 <= wanted <= config.layers:
        raise BadInput(f"{wanted} layers of a teacher's {config.layers}", where="student")
    if MLM_BIAS not in teacher.parameters:
        raise BadInput("a teacher without its MLM head", where="student")
    kept = {f"layer_{i * config.layers // wanted}": f"layer_{i}" for i in range(wanted)}
    parameters = {}
    for name, value in teacher.parameters.items():
        first, slash, rest = name.partition("/")
        if first in kept:
            parameters[kept[first] + slash + rest] = value
        elif not first.startswith("layer_") and name != TYPE:
            parameters[name] = value
    if TYPE in teacher.parameters:
        parameters[POSITION] = parameters[POSITION] + teacher.parameters[TYPE][0]
    return Model(replace(config, layers=wanted, type_vocab=0), parameters)


def distilled_row_losses(teacher: Bert, share: float, temperature: float) -> Callable[..., Tensor]:
    """Return the row losses of a student: `mlm_row_losses` with the teacher's predictions added.

    The loss of a prediction is (1 − share) · cross-entropy + share · T² · KL(teacher ‖ student),
    where KL compares both models at temperature T (Hinton et al. 2015, arXiv:1503.02531). The loss
    of a row is the mean over its predictions.

    Args:
        teacher: a model with MLM head and the student's vocabulary; a constant of the loss.
        share: weight of the teacher's predictions.
        temperature: T.

    Raises:
        BadInput: a share outside 0 to 1, or a temperature that is not positive.
    """
    if not 0 <= share <= 1:
        raise BadInput(f"{share} is not a share", where="distillation.share")
    if not temperature > 0:
        raise BadInput(f"{temperature} is not positive", where="distillation.temperature")
    constants = {name: tf.constant(value) for name, value in teacher.parameters.items()}

    def row_losses(
        layers: Layers,
        config: BertConfig,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        labels: Tensor,
        weights: Tensor,
    ) -> Tensor:
        if config.vocab_size != teacher.config.vocab_size:
            raise BadInput("teacher and student have different vocabularies", where="distillation")
        m, k = shape_of(labels)
        guesses = mlm_logits(layers, config, ids, lengths, positions)  # (M·K, V)
        told = mlm_logits(Layers(constants), teacher.config, ids, lengths, positions)
        soft = divergence(told / temperature, guesses / temperature) * temperature**2
        hard = cross_entropy(guesses, tf.reshape(labels, (m * k,)))
        losses = tf.reshape((1 - share) * hard + share * soft, (m, k))
        own = tf.maximum(tf.reduce_sum(weights, axis=1), 1.0)  # (M,)
        return tf.reduce_sum(losses * weights, axis=1) / own

    return row_losses


def divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p ‖ q) of two softmax distributions, in nats: (N, V), (N, V) -> (N,)."""
    p, q = tf.nn.log_softmax(p_logits), tf.nn.log_softmax(q_logits)
    return tf.reduce_sum(tf.exp(p) * (p - q), axis=1)


def distillation(
    teacher: Bert,
    *,
    share: float = 0.5,
    temperature: float = 2.0,
    continuation: NDArray[np.bool_] | None = None,
) -> Objective:
    """Return DistilBERT's objective: masked pieces and the teacher's predictions of them.

    Each row's loss is a function of the row and of the teacher, so clipping covers it. The teacher
    is a constant of the loss: it must be public, or released under a separate budget.
    Source: Sanh et al. 2019.

    Args:
        teacher: a model with MLM head and the student's vocabulary.
        share: weight of the teacher's predictions in the loss; the masked pieces have the rest.
        temperature: T, usually at least 1, at which the predictions of both models are compared.
        continuation: as in `objective_for`.

    Raises:
        BadInput: a share outside 0 to 1, or a temperature that is not positive.
    """
    examples = partial(masked_examples, continuation=continuation)
    row_losses = distilled_row_losses(teacher, share, temperature)
    return Objective(f"distillation-{share}-{temperature}", examples, row_losses)
