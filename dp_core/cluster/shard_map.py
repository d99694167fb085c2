"""Interfaces of a cluster, and the map over shards in this process or in a pool of processes.

A cluster maps a function over the shards of a corpus, and provides the hosts of a training. Every
data step is a function of one shard, followed by a small merge. The values are the same, and in the
order of the shards, in this process, in a pool and on Ray (`ray_cluster`), so the place cannot
change the output of a step.

Functions and their arguments travel to other processes. No privacy seed is among them: noise is
drawn once, by the step, after the merge of counts or the sum of gradients.

*Calls in other processes.* Arguments are pickled by Python's pickle module, which refuses privacy
seeds. A worker unpickles them only if it has the caller's code. Errors are returned as values.
Confide's errors are returned unchanged; of any other error only its kind and its place in our code,
because its message may quote text, which the cluster's logs would keep.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dp_core.errors import BadInput, ConfideError, kind_and_place

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


class ProcessPool:
    """Computes shards in processes of this machine, one for each core.

    This process computes the first shards, so that a small corpus is finished before other
    processes have started.

    Args:
        processes: number of processes; with 1, this process computes all shards.
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


# Results may depend on these packages, in addition to our own code and Python.
_SHAPING = ("numpy", "pyarrow", "tokenizers", "tensorflow-cpu", "tensorflow-tpu", "tensorflow")


@dataclass(frozen=True)
class Outcome:
    """The end of a call: a value, or an error that quotes no text.

    Attributes:
        value: return value of the function.
        error: an error of Confide, or the kind and place of another error; None for a value.
    """

    value: Any = None
    error: ConfideError | None = None

    @classmethod
    def of_fault(cls, error: BaseException) -> Outcome:
        """Return the kind and place of an error, whose message may quote text."""
        fault = f"a worker failed: {kind_and_place(error)}"
        return cls(error=ConfideError(fault, where=WHERE))

    def result(self) -> Any:
        """Return the value.

        Raises:
            ConfideError: the call ended with an error.
        """
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class Version:
    """The code that a call needs.

    Attributes:
        packages: packages whose sources count.
        digest: digest of their sources at the caller.
    """

    packages: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, packages: tuple[str, ...]) -> Version:
        """Return the version of this process."""
        return cls(packages, code_digest(packages))

    def check(self) -> None:
        """Raise `BadInput` if this process has other code."""
        if code_digest(self.packages) != self.digest:
            raise BadInput(
                "a worker has other code or libraries than this step",
                where=f"worker {socket.gethostname()}",
                fix="Start the cluster from the same image or checkout.",
            )


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """Return the outcome of a call; it never raises."""
    try:
        return Outcome(call())
    except ConfideError as error:
        return Outcome(error=error)
    except BaseException as error:  # noqa: BLE001 - a library's panic may quote text, too
        return Outcome.of_fault(error)


def packed(value: Any) -> bytes:
    """Return a value as bytes for another process of this deployment."""
    return bytes(ForkingPickler.dumps(value))


def unpacked(content: bytes) -> Any:
    """Return the value of `packed` bytes. Members of a cluster trust each other with this."""
    return ForkingPickler.loads(content)


def map_shard(version: Version, function: bytes, shard: bytes) -> bytes:
    """Return the packed outcome of a packed function at a packed shard."""

    def call() -> Any:
        version.check()
        return unpacked(function)(unpacked(shard))

    outcome = outcome_of(call)
    try:
        return packed(outcome)
    except Exception as error:  # noqa: BLE001 - its message may quote the value
        return packed(Outcome.of_fault(error))


class HostProcess:
    """One host of a training, in a process that may be started again at any time.

    Args:
        version: version of the caller's code.
        made: packed function without arguments, which returns the host's function of two arguments.
    """

    def __init__(self, version: Version, made: bytes) -> None:
        self._version, self._made = version, made
        self._function: Callable[[Any, Any], Any] | None = None

    def call(self, shared: Any, argument: Any) -> Outcome:
        """Return the outcome of the host's function; the first call makes the function."""

        def call() -> Any:
            if self._function is None:
                self._version.check()
                self._function = unpacked(self._made)()
            return self._function(shared, argument)

        return outcome_of(call)


@functools.cache
def code_digest(packages: tuple[str, ...]) -> str:
    """Return a digest of the packages' sources and of the libraries that shape results.

    A missing package has no sources, so its absence changes the digest.
    """
    digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
    for name in _SHAPING:
        with suppress(metadata.PackageNotFoundError):
            digest.update(f"{name}=={metadata.version(name)}\n".encode())
    for package in packages:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in sorted(Path(folder).rglob("*.py")):
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{package}/{file.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()
