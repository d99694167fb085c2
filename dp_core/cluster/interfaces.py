"""The two abilities of a cluster: mapping a function over shards, and hosts of a training.

Functions and their arguments travel to other processes. No privacy seed is among them: noise is
drawn once, by the step, after the merge of counts or the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

WHERE = "cluster"
HostFunction = Callable[[Any, Any], Any]  # (shared by all hosts, of this host) -> the host's value


class ShardMap(Protocol):
    """Maps a function over shards."""

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in their order.

        Few results are held at a time, whatever their number.

        Args:
            function: of one shard; a function of a module or an instance of a module's class, so
                that another process can import it. It depends on its argument alone.
            shards: the arguments.

        Raises:
            BadInput: as the function raised it; of several, the error of the first shard.
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

        A function depends on its arguments alone: a host that was lost computes them again.

        Args:
            shared: first argument of all, sent to each machine once.
            arguments: second argument of each host.

        Raises:
            ConfideError: as a host raised it, or a host was lost too often.
        """
