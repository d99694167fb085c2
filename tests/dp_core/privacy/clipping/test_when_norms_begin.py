"""Control dependencies delay norms until the backward pass is some records further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dp_core.privacy.clipping.book_keeping import clipped_grad_sum


def test_norms_wait_for_the_backward_pass_in_late_layers_but_not_in_early_ones(
    problem_of: Callable[..., Any],
) -> None:
    problem = problem_of(0, units=2, rows=1, length=5, predictions=2, layers=4, words=11)

    @tf.function(autograph=False)
    def sums() -> tf.Tensor:
        return clipped_grad_sum(problem.losses, problem.parameters, problem.units, 1.0).norms

    operations = sums.get_concrete_function().graph.get_operations()
    # TensorFlow also makes the results wait until all variables are read.
    waits = [
        (op, before)
        for op in operations
        for before in op.control_inputs
        if before.type not in ("ReadVariableOp", "NoOp")
    ]
    records = 1 + 1 + 6 * 4 + 3  # embeddings and their norm, blocks, head
    assert len({before.name for _, before in waits}) == records - 14
    # No operation of the backward pass waits.
    assert not [op.name for op, _ in waits if op.name.startswith("gradient_tape/")]
