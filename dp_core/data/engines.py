"""Data engines: where a function of one shard runs.

Every data step is a function of one shard, and a small merge of what it returns. In this process,
in a pool of processes over the cores, or on Spark (`dp_core.data.spark`), the results are the same,
in the order of the shards, so that an engine can never change what a step makes.

What runs on a worker is told everything by its arguments, and knows no privacy seed: noise is added
once, by the step, after the merge.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from dp_core.errors import BadInput, ConfideError

CLUSTERS = ("spark://", "local-cluster[", "local[", "k8s://", "yarn")  # masters of Spark
ENGINES = "in-process, pool, or spark://… (any master that Spark knows)"
_PATIENCE = 2.0  # seconds of work before processes are started, which takes about as long
T = TypeVar("T")
R = TypeVar("R")


class DataEngine(Protocol):
    """Runs a function over shards."""

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in their order.

        Few results are held at a time, whatever their number.

        Args:
            function: of one shard; a module's own function or an instance of a module's own class,
                so that another process can be told which it is. It depends on its argument alone.
            shards: what each call is given.

        Raises:
            BadInput: as the function raised it; of several, that of the first shard.
            ConfideError: a worker was lost, and the shard could not be done again.
        """


class InProcess:
    """One shard after the other, in this process."""

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in their order."""
        return map(function, shards)


class ProcessPool:
    """Processes of this machine, one for each core.

    The first shards are worked on in this process, for a moment: a small corpus is done before
    any other process has started.

    Args:
        processes: how many.
        patience: seconds that are worked here before processes are started.
    """

    def __init__(self, processes: int, patience: float = _PATIENCE) -> None:
        self._processes, self._patience = processes, patience
        self._pool: ProcessPoolExecutor | None = None  # started once, for all that follows

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in their order."""
        begun = time.monotonic()
        done = 0
        while done < len(shards) and (
            self._processes < 2
            or len(shards) - done < 2
            or (self._pool is None and time.monotonic() - begun < self._patience)
        ):
            yield function(shards[done])
            done += 1
        if done < len(shards):
            yield from self._by_processes(function, shards[done:])

    def _by_processes(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        if self._pool is None:
            # Not forked: threads of this process may hold locks that nobody would release there.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, initializer=_begin_worker)
        waiting = iter(shards)
        ahead: deque[Future[R]] = deque()
        try:
            # One more than there are processes: none waits while this one takes a result.
            for shard in itertools.islice(waiting, self._processes + 1):
                ahead.append(self._pool.submit(function, shard))
            while ahead:
                result = ahead.popleft().result()
                for shard in itertools.islice(waiting, 1):
                    ahead.append(self._pool.submit(function, shard))
                yield result
        except BrokenProcessPool:
            self._pool = None
            raise ConfideError(
                "a worker process ended before its shard was done",
                where="data engine",
                fix="It may have lacked memory: set CONFIDE_DATA_ENGINE=in-process, or use more"
                " shards.",
            ) from None
        finally:
            for left in ahead:
                left.cancel()

    def close(self) -> None:
        """End the processes, when they have done what they are at."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _begin_worker() -> None:
    """Keep to one core, for each has a worker; and end when the parent does, however it ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # with the private text that it holds


def data_engine(name: str, spark: Mapping[str, Any] | None = None) -> DataEngine:
    """Return the engine of a name, as CONFIDE_DATA_ENGINE has it.

    Args:
        name: `in-process`; `pool`, all cores that this process may use; or a Spark master.
        spark: what else a Spark engine is told (`dp_core.data.spark.Spark`).

    Raises:
        BadInput: no such engine, or a cluster that may not be used.
    """
    if name == "in-process":
        return InProcess()
    if name == "pool":
        return ProcessPool(len(os.sched_getaffinity(0)))
    if not name.startswith(CLUSTERS):
        raise BadInput(
            f"unknown data engine {name!r}", where="CONFIDE_DATA_ENGINE", fix=f"Use {ENGINES}."
        )
    # By name: no release depends on the version of what only moves its shards.
    engine: DataEngine = importlib.import_module("dp_core.data.spark").Spark(name, **(spark or {}))
    return engine
