"""Data engines: where a function of one shard runs.

Every data step is a function of one shard, and a small merge of what it returns. In this process,
in a pool of processes over the cores, or on Spark (`dp_core.data.spark`), the results are the same,
in the order of the shards, so that an engine can never change what a step makes.

What runs on a worker is told everything by its arguments, and knows no privacy seed: noise is added
once, by the step, after the merge.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar

from dp_core.errors import ConfideError

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

    Args:
        processes: how many.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in their order."""
        if len(shards) < 2 or self._processes < 2:
            yield from map(function, shards)
            return
        # Not forked: threads of this process may hold locks that nobody would release there.
        context = multiprocessing.get_context("spawn")
        waiting = iter(shards)
        with ProcessPoolExecutor(min(self._processes, len(shards)), context) as pool:
            ahead: deque[Future[R]] = deque()
            for shard in itertools.islice(waiting, self._processes + 1):
                ahead.append(pool.submit(function, shard))
            try:
                while ahead:
                    result = ahead.popleft().result()
                    for shard in itertools.islice(waiting, 1):
                        ahead.append(pool.submit(function, shard))
                    yield result
            except BrokenProcessPool:
                raise ConfideError(
                    "a worker process ended before its shard was done",
                    where="data engine",
                    fix="It may have lacked memory: set CONFIDE_DATA_ENGINE=in-process, or use more"
                    " shards.",
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)
