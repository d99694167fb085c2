"""Order, errors and threads of `prefetch`."""

from __future__ import annotations

import threading
import time

import pytest
from child_processes import wait_for

from dp_core.training.batches import prefetch


def test_prefetch_keeps_the_order():
    assert list(prefetch(range(50), 3)) == list(range(50))


def test_error_in_the_thread_is_raised_after_finished_items():
    def broken():
        yield 1
        raise ValueError("broken")

    made = []
    with pytest.raises(ValueError, match="broken"):
        for item in prefetch(broken(), 2):
            made.append(item)
    assert made == [1]


def test_leaving_prefetch_early_ends_its_thread():
    before = threading.active_count()
    stream = prefetch(iter(int, 1), 2)  # an infinite stream of zeros
    assert next(stream) == 0
    stream.close()
    wait_for(lambda: threading.active_count() == before, 5)


def test_prefetch_makes_at_most_depth_items_ahead():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    stream = prefetch(items(), 3)
    next(stream)
    time.sleep(0.3)
    assert len(made) <= 1 + 3 + 1  # read, waiting, and in progress
    stream.close()
