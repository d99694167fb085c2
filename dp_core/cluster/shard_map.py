"""Interfaces of a cluster, and the map over shards in this process or in a pool of processes.

A cluster maps a function over the shards of a corpus, and provides the hosts of a training. Every
data step is a function of one shard, followed by a small merge. The values are the same, and in the
order of the shards, in this process, in a pool and on Ray (`ray_cluster`), so the place cannot
change the output of a step.

Functions and their arguments travel to other processes. No privacy seed is among them: noise is
drawn once, by the step, after the merge of counts or the sum of gradients.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from dp_core.errors import ConfideError

T = TypeVar("T")
R = TypeVar("R")

WHERE = "cluster"
HostFunction = Callable[[Any, Any], Any]  # (argument of all hosts, of this host) -> host's value
_PATIENCE = 2.0  # seconds of work before processes are started, about as long as their start takes


class ShardMap(Protocol):
    """Maps a function over shards."""

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in the order of the shards.

        Only a few results are held at a time.

        Args:
            function: function of one shard. It is a function of a module, or an instance of a
                module's class, so that another process can import it. Its value depends only on
                its argument.
            shards: the arguments.

        Raises:
            BadInput: the function raised it; of several errors, the error of the first shard.
            ConfideError: a worker was lost, and the shard could not be computed again.
        """


class Hosts(Protocol):
    """Hosts of a training: long-lived processes that each apply a function to each update."""

    @property
    def count(self) -> int:
        """Number of hosts."""

    def start(self, made: Sequence[Callable[[], HostFunction]]) -> None:
        """Give each host the function that makes its function."""

    def call(self, shared: Any, arguments: Sequence[Any]) -> Iterator[Any]:
        """Yield the value of every host's function, in the order of hosts.

        A function depends only on its arguments, so a lost host can compute them again.

        Args:
            shared: first argument of every host, sent to each machine once.
            arguments: second argument of each host.

        Raises:
            ConfideError: a host raised it, or a host was lost too often.
        """


class InProcess:
    """Computes one shard after the other in this process."""

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in the order of the shards."""
        return map(function, shards)


class ProcessPool:
    """Computes shards in processes of this machine, one for each core.

    This process computes the first shards, so that a small corpus is finished before other
    processes have started.

    Args:
        processes: number of processes.
        patience: seconds before processes are started.
    """

    def __init__(self, processes: int, patience: float = _PATIENCE) -> None:
        self._processes, self._patience = processes, patience
        self._pool: ProcessPoolExecutor | None = None  # started once, for all later maps

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in the order of the shards."""
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
            # Not forked: a lock that another thread holds would never be released in the child.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._processes, context, initializer=_begin_worker)
        waiting = iter(shards)
        ahead: deque[Future[R]] = deque()
        try:
            # One more shard than processes, so no process waits while this one takes a result.
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
                where=WHERE,
                fix="It may have lacked memory: set CONFIDE_CLUSTER=in-process, or use more"
                " shards.",
            ) from None
        finally:
            for left in ahead:
                left.cancel()

    def close(self) -> None:
        """End the processes after their current shard."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _begin_worker() -> None:
    """Use one core, because each core has a worker, and end when the parent process ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # without cleanup: the process holds private text
