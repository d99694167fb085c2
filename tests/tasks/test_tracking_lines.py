"""Times: the public experiment must not learn from them how large private data are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.outbox import Identity
from tasks.tracking_lines import OPERATOR, PUBLIC, shown_time

PRIVATE = Identity("run", "run", "dp_pretraining", "", "pretrain", "a" * 64, made_up=False)
NOON = 1_795_260_000_123


@pytest.mark.parametrize("later", [1, 3_000, 3_600_000])
def test_of_private_data_the_public_experiment_learns_the_day(later: int) -> None:
    began, ended = (shown_time(t, PRIVATE, PUBLIC) for t in (NOON, NOON + later))
    assert began == ended  # a step's duration is not there to be read
    assert began % 86_400_000 == 0
    assert 0 <= NOON - began < 86_400_000


def test_the_operator_and_made_up_data_have_real_times() -> None:
    assert shown_time(NOON, PRIVATE, OPERATOR) == NOON
    assert shown_time(NOON, replace(PRIVATE, made_up=True), PUBLIC) == NOON
