"""Hosts of a training in this process; as in Ray, they receive everything by pickles."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dp_core.cluster.shard_map import HostFunction, packed, unpacked
from dp_core.data.token_store import TokenStore

STORES: dict[str, TokenStore] = {}


class OpenStore:
    """Opens one of `STORES` by name, because stores of the tests are not pickled."""

    def __init__(self, name: str = "store") -> None:
        self.name = name

    def __call__(self) -> TokenStore:
        return STORES[self.name]


class Interrupted(Exception):
    """A call on a host was lost; it is repeated on the same host."""


class HostsHere:
    """Computes hosts sequentially and keeps everything that was sent to them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[bytes] = []
        self._functions: list[HostFunction] = []

    def start(self, made: Sequence[Callable[[], HostFunction]]) -> None:
        self._functions = [self._travels(function)() for function in made]

    def call(self, shared: Any, arguments: Sequence[Any]) -> Iterator[Any]:
        for function, argument in zip(self._functions, arguments, strict=True):
            yield self._repeated(function, *self._travels((shared, argument)))

    def _repeated(self, function: HostFunction, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Interrupted:
            return self._repeated(function, *arguments)

    def _travels(self, value: Any) -> Any:
        content = packed(value)
        self.sent.append(content)
        return unpacked(content)
