"""Hosts of a training in this process; as in Ray, they receive everything by pickles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dp_core.cluster.shard_map import HostFunction, packed, unpacked
from dp_core.data.token_store import TokenStore

STORES: dict[str, TokenStore] = {}


class OpenStore:
    """Opens one of `STORES` by name, because stores of the tests are not pickled."""

    def __init__(self, name: str = "store") -> None:
        self.name = name

    def __call__(self) -> TokenStore:
        return STORES[self.name]


class HostsHere:
    """Computes hosts sequentially and keeps everything that was sent to them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[bytes] = []
        self._functions: list[HostFunction] = []
        self.broken: dict[int, int] = {}  # host -> number of calls that are lost half-way

    def start(self, made: Sequence[Callable[[], HostFunction]]) -> None:
        self._made = [self._travels(function) for function in made]
        self._functions = [function() for function in self._made]

    def call(self, shared: Any, arguments: Sequence[Any]) -> Iterator[Any]:
        for number, argument in enumerate(arguments):
            received = self._travels((shared, argument))
            while self.broken.get(number, 0):  # the call is repeated on a host that has begun it
                self.broken[number] -= 1
                half = np.array(received[1])
                half[len(half) // 2 :] = 0
                function: Any = self._functions[number]
                step, clip_norm, weights = received[0]
                function.sums.set_weights(weights)
                if function.sums.clipper is not None:
                    function.sums.clipper.clip_norm = clip_norm
                for batch in function.made(step, np.flatnonzero(half)):
                    function.sums.add(batch)
            yield self._functions[number](*received)

    def _travels(self, value: Any) -> Any:
        content = packed(value)
        self.sent.append(content)
        return unpacked(content)
