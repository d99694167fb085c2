"""A job's progress on a terminal: a bar for each step that runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from tasks.execution.step_process import Watcher
from tasks.protocol.messages import StepProgress


class ProgressBars:
    """Progress bars of steps by name; nothing is drawn if the console is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._bars: dict[str, TaskID] = {}
        self._rich = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def show(self, name: str, now: StepProgress) -> None:
        """Show the progress of a step."""
        if name not in self._bars:
            self._bars[name] = self._rich.add_task(name, total=None, note="")
        self._rich.update(
            self._bars[name], completed=now.done, total=now.total or None, note=now.note
        )

    def remove(self, name: str) -> None:
        """Remove the bar of a step."""
        if name in self._bars:
            self._rich.remove_task(self._bars.pop(name))


@contextmanager
def one_after_the_other(steps: int) -> Iterator[Watcher]:
    """Yield a watcher of steps that run one at a time: a line and a bar for each."""
    console = Console(stderr=True, highlight=False)
    begun: list[str] = []
    with ProgressBars(console) as bars:

        def watch(name: str, now: StepProgress) -> None:
            if name not in begun:
                for earlier in begun[-1:]:
                    bars.remove(earlier)
                begun.append(name)
                console.print(f"[{len(begun)}/{steps}] {name}", markup=False, soft_wrap=True)
            bars.show(name, now)

        yield watch
