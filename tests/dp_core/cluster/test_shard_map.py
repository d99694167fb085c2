"""Shards in this process and in a pool of processes have equal results and errors."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_processes import wait_for
from map_conformance import MapConformance, Squared, corpora, expected

from dp_core.cluster import shard_map
from dp_core.cluster.ray_cluster import RayCluster, open_cluster
from dp_core.cluster.shard_map import InProcess, ProcessPool, ShardMap
from dp_core.errors import BadInput

CHECKOUT = Path(__file__).resolve().parents[3]
__all__ = ["corpora", "expected"]


class TestInProcess(MapConformance):
    kills_no_more_than_itself = False

    @pytest.fixture
    def place(self) -> ShardMap:
        return InProcess()


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    started = ProcessPool(2, patience=0)
    yield started
    started.close()


class TestProcessPool(MapConformance):
    @pytest.fixture
    def place(self, pool: ProcessPool) -> ShardMap:
        return pool


def test_map_holds_few_results_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of infinitely many shards, one more than the number of processes is computed ahead."""
    submitted = []

    class Here:
        """A pool that computes immediately."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def submit(self, function: object, shard: int) -> object:
            submitted.append(shard)
            done: shard_map.Future[int] = shard_map.Future()
            done.set_result(shard)
            return done

    monkeypatch.setattr(shard_map, "ProcessPoolExecutor", Here)
    values = ProcessPool(2, patience=0).map(Squared(), range(1000))
    for number in range(5):
        assert next(values) == number
        assert len(submitted) <= number + 4
    values.close()  # type: ignore[attr-defined]


def test_short_work_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(shard_map, "ProcessPoolExecutor", refuse)
    assert list(ProcessPool(2, patience=60).map(Squared(), range(100)))[-1] == 99 * 99
    assert list(ProcessPool(1, patience=0).map(Squared(), range(4))) == [0, 1, 4, 9]
    assert list(ProcessPool(2, patience=0).map(Squared(), range(1))) == [0]
    with pytest.raises(AssertionError, match="a pool was started"):
        list(ProcessPool(2, patience=0).map(Squared(), range(4)))


def test_abandoned_map_starts_no_more_shards(pool: ProcessPool) -> None:
    values = pool.map(Squared(), range(10_000))
    assert next(values) == 0
    values.close()  # type: ignore[attr-defined]
    assert list(pool.map(Squared(), range(5))) == [0, 1, 4, 9, 16]


def test_setting_selects_where_shards_are_computed() -> None:
    assert isinstance(open_cluster("in-process"), InProcess)
    assert isinstance(open_cluster("pool"), ProcessPool)
    assert isinstance(open_cluster("local:2"), RayCluster)
    with pytest.raises(BadInput, match="'threads' is not a place"):
        open_cluster("threads")


def test_pickled_errors_keep_what_where_and_fix() -> None:
    """Checked by `copy`, which uses the pickle protocol."""
    for error in (BadInput("what", where="where", fix="fix"), BadInput("what")):
        back = copy.copy(error)
        assert type(back) is BadInput and str(back) == str(error)
        assert (back.what, back.where, back.fix) == (error.what, error.where, error.fix)


def test_workers_end_with_the_process_that_started_them() -> None:
    program = """
import multiprocessing, threading, time
from dp_core.cluster.shard_map import ProcessPool
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
