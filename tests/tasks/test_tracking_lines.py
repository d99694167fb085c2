"""Times: the public experiment must not learn from them how large private data are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.tracking.mlflow import OPERATOR, PUBLIC, shown_key, shown_name, shown_time
from tasks.tracking.outbox import Identity

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


def test_neither_name_nor_key_of_a_run_tells_when_it_began() -> None:
    run = replace(PRIVATE, run_key="dp_bert/manual__2026-11-22T13:07:59.385211+00:00",
                  run_name="dp_bert 2026-11-22 13:07:59")  # fmt: skip
    later = replace(run, run_key="dp_bert/manual__2026-11-22T15:00:00+00:00")
    assert shown_name(run, PUBLIC).startswith("dp_bert 2026-11-22 · ")
    for shown in (shown_name(run, PUBLIC), shown_key(run, PUBLIC)):
        assert ":" not in shown
    assert shown_name(run, PUBLIC) != shown_name(later, PUBLIC)  # still told apart
    assert shown_key(run, PUBLIC) != shown_key(later, PUBLIC)
    # Who guesses the moment cannot confirm it: what is shown hangs on a secret of the deployment.
    salted, other = (replace(run, salt=salt * 32) for salt in ("ab", "cd"))
    for shown in (shown_key, lambda i, _: i.key("parent"), lambda i, _: i.key("step")):
        assert len({shown(i, PUBLIC) for i in (run, salted, other)}) == 3
    assert (shown_name(run, OPERATOR), shown_key(run, OPERATOR)) == (run.run_name, run.run_key)
    made_up = replace(run, made_up=True)
    assert shown_name(made_up, PUBLIC) == run.run_name
