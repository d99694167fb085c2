"""Hosts of a training as threads of this process: the same code, links and messages."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from dp_core.data.token_store import TokenStore
from dp_core.training.hosts import Helper, Hosts, help_train
from dp_core.training.links import Link, connect

_OPEN: list[Link] = []


def close_links() -> None:
    """Close every link that was made here."""
    while _OPEN:
        _OPEN.pop().close()


def linked(
    ours: bytes | None = None, theirs: bytes | None = None, **changes: Any
) -> tuple[Link, Link]:
    """Return the two ends of a link; they may know different secrets."""
    secret = secrets.token_bytes(32)
    ends = socket.socketpair()
    told: list[dict[str, Any]] = [{"host": 0}, {"host": 1}]

    def one(number: int) -> Link:
        return connect(
            ends[number],
            (ours, theirs)[number] or secret,
            called=number == 0,
            tell=told[number],
            expect=told[1 - number],
            patience=10.0,
            **changes,
        )

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(one, number) for number in range(2)]
        for future in futures:
            if future.exception() is None:
                _OPEN.append(future.result())
        return futures[0].result(), futures[1].result()


class Cast:
    """The helpers of a training, each a thread; what they raised is in `raised`, by host."""

    def __init__(
        self,
        count: int,
        stores: Callable[[int], TokenStore],
        work: Callable[..., None] = help_train,
    ) -> None:
        pairs = [linked() for _ in range(count - 1)]
        self.raised: dict[int, BaseException] = {}
        self.helpers: list[Helper] = []
        self.hosts = Hosts(count, pairs[0][0], {"place": "here"})
        self._threads = []
        for number in range(1, count):
            behind = pairs[number][0] if number < count - 1 else None
            helper = Helper(number, count, pairs[number - 1][1], behind)
            self.helpers.append(helper)
            thread = threading.Thread(target=self._run, args=(work, helper, stores), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, work: Any, helper: Helper, stores: Callable[[int], TokenStore]) -> None:
        def open_rows(rows: Mapping[str, Any]) -> TokenStore:
            assert rows == {"place": "here"}
            return stores(helper.number)

        try:
            work(helper, open_rows)
        except BaseException as error:  # noqa: BLE001 - the tests look at it
            self.raised[helper.number] = error

    def join(self) -> None:
        """Wait until all have ended."""
        for thread in self._threads:
            thread.join(120)  # TensorFlow may be compiling
            assert not thread.is_alive()


@contextmanager
def on_hosts(count: int, store: TokenStore) -> Iterator[Hosts | None]:
    """Give the hosts of a training to its chief: None for one host."""
    if count == 1:
        yield None
        return
    cast = Cast(count, lambda number: store)
    try:
        yield cast.hosts
    finally:
        cast.hosts.end()
        cast.join()
        close_links()
    assert cast.raised == {}, cast.raised
