"""Prepare the next items while the current one is being worked on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_WAIT = 0.1


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def prefetch(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield the items in order, made up to `depth` ahead by a thread of their own.

    An error while making an item is raised here; leaving the loop early ends the thread.
    """
    end = object()
    ready: queue.Queue[object] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: object) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_WAIT)
                return
            except queue.Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(item)
                if stop.is_set():
                    return
            put(end)
        except BaseException as error:  # noqa: BLE001 - handed over and raised by the reader
            put(_Failure(error))

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not end:
            if isinstance(item, _Failure):
                raise item.error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
