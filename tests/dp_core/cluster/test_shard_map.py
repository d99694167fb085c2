import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from child_processes import wait_for
from cluster_functions import Echo, broken, nothing, panic, refused, unpicklable
from map_conformance import MapConformance, Squared, corpora, expected

from dp_core.cluster import shard_map
from dp_core.cluster.ray_cluster import RayCluster, open_cluster
from dp_core.cluster.shard_map import (
    HostProcess,
    Outcome,
    ProcessPool,
    ShardMap,
    Version,
    code_digest,
    map_shard,
    packed,
    unpacked,
)
from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.seed_store import PrivacySeed

CHECKOUT = Path(__file__).resolve().parents[3]
__all__ = ["corpora", "expected"]


class TestInProcess(MapConformance):
    kills_no_more_than_itself = False

    @pytest.fixture
    def place(self) -> ShardMap:
        return ProcessPool(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    started = ProcessPool(2, patience=0)
    yield started
    started.close()


class TestProcessPool(MapConformance):
    @pytest.fixture
    def place(self, pool: ProcessPool) -> ShardMap:
        return pool


def test_map_holds_few_results_in_memory(monkeypatch):
    """Of infinitely many shards, one more than the number of processes is computed ahead."""
    submitted = []

    class Here:
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


def test_short_work_starts_no_process(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(shard_map, "ProcessPoolExecutor", refuse)
    assert list(ProcessPool(2, patience=60).map(Squared(), range(100)))[-1] == 99 * 99
    assert list(ProcessPool(1, patience=0).map(Squared(), range(4))) == [0, 1, 4, 9]
    assert list(ProcessPool(2, patience=0).map(Squared(), range(1))) == [0]
    with pytest.raises(AssertionError, match="a pool was started"):
        list(ProcessPool(2, patience=0).map(Squared(), range(4)))


def test_abandoned_map_starts_no_more_shards(pool):
    values = pool.map(Squared(), range(10_000))
    assert next(values) == 0
    values.close()  # type: ignore[attr-defined]
    assert list(pool.map(Squared(), range(5))) == [0, 1, 4, 9, 16]


def test_setting_selects_where_shards_are_computed():
    here, pool = open_cluster("in-process"), open_cluster("pool")
    assert isinstance(here, ProcessPool) and here._processes == 1
    assert isinstance(pool, ProcessPool) and pool._processes == len(os.sched_getaffinity(0))
    assert isinstance(open_cluster("local:2"), RayCluster)
    with pytest.raises(BadInput, match="'threads' is not a place"):
        open_cluster("threads")


def test_pickled_errors_keep_what_where_and_fix():
    """Checked by `copy`, which uses the pickle protocol."""
    for error in (BadInput("what", where="where", fix="fix"), BadInput("what")):
        back = copy.copy(error)
        assert type(back) is BadInput and str(back) == str(error)
        assert (back.what, back.where, back.fix) == (error.what, error.where, error.fix)


def test_workers_end_with_the_process_that_started_them():
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
        workers = [Path(f"/proc/{pid}") for pid in parent.stdout.readline().split()]
        assert len(workers) == 2 and all(worker.exists() for worker in workers)
        parent.kill()
        wait_for(lambda: not any(worker.exists() for worker in workers))


PLANTED = "Zebulon Quist"
HERE = Version.of(("dp_core",))


def outcome(function: Any, shard: Any, version: Version = HERE) -> Outcome:
    answered: Outcome = unpacked(map_shard(version, packed(function), packed(shard)))
    return answered


def test_value_of_a_shard_may_be_none():
    assert outcome(nothing, 3).result() is None


def test_confide_error_of_a_worker_is_raised_unchanged():
    with pytest.raises(BadInput) as caught:
        outcome(refused, 3).result()
    error = caught.value
    assert (error.what, error.where, error.fix) == ("an odd shard", "shard 3", "Use even ones.")


PLACE = r"a worker failed: .*cluster_functions.py:\d+"


@pytest.mark.parametrize(
    ("function", "message"), [(broken, PLACE), (panic, PLACE), (unpicklable, "a worker failed")]
)
def test_other_errors_of_a_worker_lose_their_message(function, message):
    answered = map_shard(HERE, packed(function), packed(PLANTED))
    assert b"Zebulon" not in answered
    with pytest.raises(ConfideError, match=message) as caught:
        unpacked(answered).result()
    assert not isinstance(caught.value, BadInput)


def test_worker_with_other_code_unpickles_nothing():
    other = Version(("dp_core",), "another digest")
    answered = unpacked(map_shard(other, b"not a pickle", b"not a pickle"))
    with pytest.raises(BadInput, match="other code or libraries than this step"):
        answered.result()
    host = HostProcess(other, b"not a pickle")
    with pytest.raises(BadInput, match="other code or libraries than this step"):
        host.call(1, 2).result()


def test_code_digest_depends_on_every_byte(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "a_package_of_ours"
    package.mkdir()
    (package / "__init__.py").write_text("")
    versions = []
    for content in ("x = 1", "x = 2", "x = 1"):
        (package / "inner.py").write_text(content)
        code_digest.cache_clear()
        versions.append(code_digest(("a_package_of_ours",)))
    assert versions[0] == versions[2] != versions[1]
    assert code_digest(("a_package_of_ours", "dp_core")) != versions[0]
    code_digest.cache_clear()


def test_seed_cannot_be_pickled():
    with pytest.raises(TypeError):
        packed(PrivacySeed.fixed(1))
    with pytest.raises(TypeError):
        packed(Echo(PrivacySeed.fixed(1)))  # type: ignore[arg-type]


CALLS: list[int] = []


def counted() -> Any:
    CALLS.append(1)
    return lambda shared, argument: shared + argument


def test_host_makes_its_function_once():
    host = HostProcess(HERE, packed(counted))
    assert [host.call(shared, 3).result() for shared in (1, 2)] == [4, 5]
    assert len(CALLS) == 1
