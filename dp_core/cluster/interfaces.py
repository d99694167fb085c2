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
HostFunction = Callable[[Any, Any], Any]  # (argument of all hosts, of this host) -> host's value


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
