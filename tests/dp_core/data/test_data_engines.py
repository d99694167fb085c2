"""In this process and in a pool of processes: the same results, the same errors."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_processes import wait_for
from engine_conformance import EngineConformance, Squared, corpora, expected

from dp_core.data import engines
from dp_core.data.engines import DataEngine, InProcess, ProcessPool, data_engine
from dp_core.data.spark import Spark
from dp_core.errors import BadInput

CHECKOUT = Path(__file__).resolve().parents[3]
__all__ = ["corpora", "expected"]


class TestInProcess(EngineConformance):
    kills_no_more_than_itself = False

    @pytest.fixture
    def engine(self) -> DataEngine:
        return InProcess()


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    started = ProcessPool(2, patience=0)
    yield started
    started.close()


class TestProcessPool(EngineConformance):
    @pytest.fixture
    def engine(self, pool: ProcessPool) -> DataEngine:
        return pool


def test_few_results_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shards without end, one more than there are processes is worked on ahead."""
    submitted = []

    class Here:
        """A pool that works at once."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def submit(self, function: object, shard: int) -> object:
            submitted.append(shard)
            done: engines.Future[int] = engines.Future()
            done.set_result(shard)
            return done

    monkeypatch.setattr(engines, "ProcessPoolExecutor", Here)
    values = ProcessPool(2, patience=0).map(Squared(), range(1000))
    for number in range(5):
        assert next(values) == number
        assert len(submitted) <= number + 4
    values.close()  # type: ignore[attr-defined]


def test_what_takes_a_moment_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(engines, "ProcessPoolExecutor", refuse)
    assert list(ProcessPool(2, patience=60).map(Squared(), range(100)))[-1] == 99 * 99
    assert list(ProcessPool(1, patience=0).map(Squared(), range(4))) == [0, 1, 4, 9]
    assert list(ProcessPool(2, patience=0).map(Squared(), range(1))) == [0]
    with pytest.raises(AssertionError, match="a pool was started"):
        list(ProcessPool(2, patience=0).map(Squared(), range(4)))


def test_what_nobody_asks_for_any_more_is_not_begun(pool: ProcessPool) -> None:
    values = pool.map(Squared(), range(10_000))
    assert next(values) == 0
    values.close()  # type: ignore[attr-defined]
    assert list(pool.map(Squared(), range(5))) == [0, 1, 4, 9, 16]


def test_engines_by_name() -> None:
    assert isinstance(data_engine("in-process"), InProcess)
    assert isinstance(data_engine("pool"), ProcessPool)
    with pytest.raises(BadInput, match="unknown data engine 'threads'"):
        data_engine("threads")
    assert isinstance(data_engine("spark://host:7077", {"secret": "s"}), Spark)
    with pytest.raises(BadInput, match="without a secret"):
        data_engine("spark://host:7077")


def test_errors_keep_what_where_and_fix_on_their_way() -> None:
    """By `copy`, which asks for the same as a pickle does."""
    for error in (BadInput("what", where="where", fix="fix"), BadInput("what")):
        back = copy.copy(error)
        assert type(back) is BadInput and str(back) == str(error)
        assert (back.what, back.where, back.fix) == (error.what, error.where, error.fix)


def test_workers_do_not_outlive_the_process_that_started_them() -> None:
    program = """
import multiprocessing, threading, time
from dp_core.data.engines import ProcessPool
if __name__ == "__main__":
    pool = ProcessPool(2, patience=0)
    list(pool.map(abs, range(9)))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    list(pool.map(time.sleep, [600] * 4))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    ) as parent:
        assert parent.stdout is not None
        workers = [Path(f"/proc/{pid}") for pid in parent.stdout.readline().split()]
        assert len(workers) == 2 and all(worker.exists() for worker in workers)
        parent.kill()
        wait_for(lambda: not any(worker.exists() for worker in workers))
