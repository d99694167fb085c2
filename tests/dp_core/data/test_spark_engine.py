"""The Spark engine's own part, on a Spark that is none: order, errors, retries, patience.

`test_spark_executors.py` has the same claims, and more, on real executors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spark_functions import broken, refused, squared

from dp_core.data import spark
from dp_core.data.spark import Spark, WorkerFault, code_version
from dp_core.errors import BadInput, ConfideError

RETRIES = 4


class Job:
    """One job on one partition: done again where its worker is lost, as Spark does."""

    def __init__(self, cluster: Cluster, task: Callable[[Iterator[int]], Iterator[bytes]]) -> None:
        self.cluster, self.task = cluster, task

    def mapPartitions(self, task: Any) -> Job:  # noqa: N802 - Spark's name
        return Job(self.cluster, task)

    def collect(self) -> list[bytes]:
        for attempt in range(1, RETRIES + 1):
            try:
                answer = list(self.task(iter([0])))
            except Exception as error:
                if attempt == RETRIES:
                    # As Java words it, with the worker's traceback in the middle.
                    raise RuntimeError(
                        f"Job aborted: Traceback…\n{type(error).__name__}: {error}\n\tat org.apache"
                    ) from error
                continue
            if not self.cluster.loses():
                self.cluster.waits()
                return answer
        raise RuntimeError("Job aborted due to stage failure: ExecutorLostFailure")


class Kept:
    """A broadcast."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def destroy(self) -> None:
        del self.value


class Cluster:
    """What the engine uses of a SparkContext."""

    def __init__(self, cores: int = 3, lost: tuple[int, ...] = (), slow: float = 0.0) -> None:
        self.defaultParallelism = cores
        self.cancelled = 0
        self._lost, self._slow = set(lost), slow
        self._calls, self._running, self.most = 0, 0, 0
        self._lock = threading.Lock()

    def broadcast(self, value: bytes) -> Kept:
        return Kept(value)

    def parallelize(self, items: list[int], slices: int) -> Job:
        assert (len(items), slices) == (1, 1)
        return Job(self, lambda nothing: iter(()))

    def loses(self) -> bool:
        with self._lock:
            self._calls += 1
            return self._calls in self._lost

    def waits(self) -> None:
        """The first to come is the last to answer."""
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
            turn = self._running
        time.sleep(0.02 / turn + self._slow)
        with self._lock:
            self._running -= 1

    def cancelAllJobs(self) -> None:  # noqa: N802 - Spark's name
        self.cancelled += 1


def engine(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Spark:
    monkeypatch.setattr(
        Spark, "_started", lambda self: setattr(self, "_context", cluster) or cluster
    )
    return Spark("spark://somewhere:7077", secret="s", **options)


def test_values_come_in_the_order_of_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(cores=4)
    assert list(engine(cluster, monkeypatch).map(squared, range(40))) == [n * n for n in range(40)]
    assert 1 < cluster.most <= 5, "as many at a time as there are cores, and one more"
    assert cluster.cancelled == 0


def test_no_shards_need_no_cluster() -> None:
    assert list(Spark("spark://nobody.invalid:1", secret="s").map(squared, [])) == []


def test_a_shard_whose_worker_is_lost_is_done_again_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(lost=(2, 3, 7))
    assert list(engine(cluster, monkeypatch).map(squared, range(9))) == [n * n for n in range(9)]


def test_lost_too_often_is_a_fault_and_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(lost=tuple(range(99)))
    with pytest.raises(ConfideError, match="more often than it tries again") as caught:
        list(engine(cluster, monkeypatch).map(squared, range(9)))
    assert not isinstance(caught.value, BadInput)
    assert cluster.cancelled == 1


def test_of_our_errors_the_first_shard_s_comes_as_it_was_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = engine(Cluster(), monkeypatch).map(refused, [0, 2, 3, 5, 7])
    assert [next(found), next(found)] == [0, 2]
    with pytest.raises(BadInput) as caught:
        next(found)
    told = caught.value
    assert (told.what, told.where, told.fix) == ("an odd shard", "shard 3", "Use even ones.")
    assert type(told) is BadInput


def test_other_errors_tell_their_kind_and_not_what_they_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfideError) as caught:
        list(engine(Cluster(), monkeypatch).map(broken, ["Zebulon Quist"]))
    assert "ValueError at tests/dp_core/data/spark_functions.py:" in str(caught.value)
    seen: BaseException | None = caught.value
    while seen is not None:  # what `raise` shows of where it came from
        assert "Zebulon" not in str(seen)
        seen = None if seen.__suppress_context__ else seen.__context__


def test_what_spark_is_told_of_an_error_quotes_nothing() -> None:
    task = spark._Task(
        code_version(("dp_core",)),
        ("dp_core",),
        Kept(spark._packed(broken)),
        spark._packed("Zebulon Quist"),
    )
    with pytest.raises(WorkerFault) as caught:
        list(task(iter([0])))
    assert "Zebulon" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_panic_of_a_library_reaches_spark_without_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One in Rust is no `Exception`."""

    class PanicException(BaseException):
        pass

    def panic(_: object) -> None:
        raise PanicException("inside of `Zebulon Quist`")

    monkeypatch.setattr(spark._Task, "_outcome", panic)
    with pytest.raises(WorkerFault, match="PanicException") as caught:
        list(spark._Task("v", (), Kept(b""), b"")(iter([0])))
    assert "Zebulon" not in str(caught.value) and caught.value.__context__ is None


def test_a_worker_with_other_code_refuses_before_it_opens_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = spark._Task("another", ("dp_core",), Kept(b"not to be opened"), b"nor this")
    (answer,) = task(iter([0]))
    told = spark._unpacked(answer).error
    assert isinstance(told, BadInput)
    assert "not those of this step" in told.what


def test_code_is_told_apart_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "a_package_of_ours"
    package.mkdir()
    (package / "__init__.py").write_text("")
    versions = []
    for content in ("x = 1", "x = 2", "x = 1"):
        (package / "inner.py").write_text(content)
        code_version.cache_clear()
        versions.append(code_version(("a_package_of_ours",)))
    assert versions[0] == versions[2] != versions[1]
    assert code_version(("a_package_of_ours", "dp_core")) != versions[0]
    code_version.cache_clear()


def test_a_cluster_without_workers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engine(Cluster(slow=0.6), monkeypatch, patience=0.2)
    monkeypatch.setattr(spark, "_LOOK", 0.1)
    monkeypatch.setattr(Spark, "_workers", lambda self: 0)
    with pytest.raises(ConfideError, match="no worker of the Spark cluster has come"):
        list(asked.map(squared, [1, 2]))


def test_a_slow_cluster_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = engine(Cluster(slow=0.6), monkeypatch, patience=0.2)
    monkeypatch.setattr(spark, "_LOOK", 0.1)
    monkeypatch.setattr(Spark, "_workers", lambda self: 1)
    assert list(asked.map(squared, [1, 2])) == [1, 4]


def test_who_wants_no_more_ends_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    found = engine(cluster, monkeypatch).map(squared, range(100))
    assert next(found) == 0
    found.close()  # type: ignore[attr-defined]  # a generator
    assert cluster.cancelled == 1


@pytest.mark.parametrize(
    "master", ["spark://host", "local", "http://host:80", "local-cluster[2]", ""]
)
def test_what_is_no_cluster_is_refused(master: str) -> None:
    with pytest.raises(BadInput, match="is no Spark cluster"):
        Spark(master, secret="s")


def test_a_cluster_without_a_secret_is_refused() -> None:
    with pytest.raises(BadInput, match="CONFIDE_SPARK_SECRET"):
        Spark("spark://host:7077")


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="make setup-spark"):
        list(Spark("local[2]").map(squared, [1]))


def test_without_java_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(BadInput, match="openjdk-17-jre-headless"):
        list(Spark("local[2]").map(squared, [1]))


def test_a_cluster_that_does_not_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark, "_find", lambda home: Path("/nowhere"))
    with pytest.raises(ConfideError, match="nobody answers") as caught:
        list(Spark("spark://127.0.0.1:9", secret="s").map(squared, [1]))
    assert not isinstance(caught.value, BadInput)


def nothing(shard: int) -> int | None:
    return None if shard % 2 else shard


def test_a_function_may_have_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(engine(Cluster(), monkeypatch).map(nothing, range(5)))
    assert found == [0, None, 2, None, 4]


def test_a_worker_without_our_code_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(Job):
        def mapPartitions(self, task: Any) -> Job:  # noqa: N802 - Spark's name
            def missing(nothing: Iterator[int]) -> Iterator[bytes]:
                raise ModuleNotFoundError("No module named 'dp_core'")

            return Job(self.cluster, missing)

    cluster = Cluster()
    monkeypatch.setattr(cluster, "parallelize", lambda *_: Bare(cluster, lambda _: iter(())))
    with pytest.raises(BadInput, match="does not find Confide"):
        list(engine(cluster, monkeypatch).map(squared, [1, 2]))
