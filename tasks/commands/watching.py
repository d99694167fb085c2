"""A job's progress on a terminal: one bar a step, with the time that is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft

from tasks.runtime.runner import Watcher


@contextmanager
def bars(steps: int) -> Iterator[Watcher]:
    """Yield a watcher that draws on stderr, or says a line a step where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(steps)
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(), TimeLeft(), console=console,
    ) as progress:  # fmt: skip
        tasks: dict[str, TaskID] = {}

        def watch(name: str, done: int, total: int, note: str) -> None:
            if name not in tasks:
                for earlier in tasks.values():
                    progress.update(earlier, total=1, completed=1)
                tasks[name] = progress.add_task(name, total=None, note="")
            progress.update(tasks[name], total=total or None, completed=done, note=note)

        yield watch
        for task in tasks.values():
            progress.stop_task(task)


def _lines(steps: int) -> Watcher:
    seen: list[str] = []

    def watch(name: str, done: int, total: int, note: str) -> None:
        if name not in seen:
            seen.append(name)
            print(f"[{len(seen)}/{steps}] {name}", file=sys.stderr, flush=True)

    return watch
