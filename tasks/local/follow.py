"""Follow a DAG run as a person would: what is done, what runs, how far it is, for how long."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dp_core.errors import ConfideError
from tasks.local.airflow_api import AirflowApi, AirflowAway

FINISHED = {"success", "failed", "skipped", "upstream_failed", "removed"}
_EVERY = 1.0  # seconds between looks
_PATIENCE = 60.0  # seconds without an answer before giving up


class Follower:
    """Shows one run until it ends: bars on a terminal, a line for each finished task elsewhere.

    Args:
        progress_folder: where the run's steps write their progress (`CONFIDE_PROGRESS`).
        check: called at every look; raises where following has become pointless.
    """

    def __init__(
        self,
        api: AirflowApi,
        dag: str,
        run_id: str,
        progress_folder: Path,
        check: Callable[[], None],
        console: Console,
    ) -> None:
        self._api, self._dag, self._run_id = api, dag, run_id
        self._folder, self._check, self._console = progress_folder, check, console
        self._started = time.monotonic()
        self._said: set[str] = set()
        self._bars: dict[str, TaskID] = {}

    def until_end(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the run's final state and its task instances."""
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        with bars:
            whole = bars.add_task(f"[bold]{self._dag}", total=None, note="")
            while True:
                state, tasks = self._look()
                done = sum(task["state"] in FINISHED for task in tasks)
                bars.update(whole, completed=done, total=len(tasks) or None)
                for task in tasks:
                    self._show(bars, task)
                if state in {"success", "failed"}:
                    return state, tasks
                time.sleep(_EVERY)

    def _look(self) -> tuple[str, list[dict[str, Any]]]:
        deadline = time.monotonic() + _PATIENCE
        while True:
            self._check()
            try:
                state = self._api.run_state(self._dag, self._run_id)
                return state, self._api.task_instances(self._dag, self._run_id)
            except AirflowAway:
                if time.monotonic() > deadline:
                    raise ConfideError("Airflow does not answer any more") from None
                time.sleep(_EVERY)

    def _show(self, bars: Progress, task: dict[str, Any]) -> None:
        name = _name(task)
        if task["state"] in FINISHED:
            if name in self._bars:
                bars.remove_task(self._bars.pop(name))
            if name not in self._said and task["state"] != "upstream_failed":
                self._said.add(name)
                self._say(task, name)
        elif task["state"] == "running":
            if name not in self._bars:
                self._bars[name] = bars.add_task(f"  {name}", total=None, note="")
            bars.update(self._bars[name], **self._progress(task))

    def _say(self, task: dict[str, Any], name: str) -> None:
        now = time.strftime("%M:%S", time.gmtime(time.monotonic() - self._started))
        mark = {"success": "[green]✓", "skipped": "[dim]–"}
        words = "" if task["state"] == "success" else f" {task['state']}"
        took = f"{task['duration']:6.1f} s" if task.get("duration") else " " * 8
        self._console.print(
            f"{now}  {mark.get(task['state'], '[red]✗')}[/] {name:<28}{took}{words}",
            highlight=False,
        )

    def _progress(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return how far a running step says it is."""
        index = "" if task["map_index"] < 0 else f".{task['map_index']}"
        file = self._folder / f"{task['task_id'].rpartition('.')[2]}{index}.jsonl"
        try:
            last = json.loads(file.read_text().splitlines()[-1])
            return {"completed": last["done"], "total": last["total"], "note": last["note"]}
        except (OSError, IndexError, ValueError, KeyError):
            return {}


def progress_folder(home: Path, dag: str, run_id: str) -> Path:
    """Return where the process launcher has a run's steps write their progress."""
    return home / "progress" / re.sub(r"[^\w.+-]", "_", f"{dag}/{run_id}")


def first_failure(tasks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the task instance that failed first."""
    failed = [task for task in tasks if task["state"] == "failed"]
    return min(failed, key=lambda task: task["end_date"] or _now(), default=None)


def _name(task: dict[str, Any]) -> str:
    own = str(task["task_id"]).rpartition(".")[2]
    if task["map_index"] < 0:
        return own
    return f"{own} ({task.get('rendered_map_index') or task['map_index']})"


def _now() -> str:
    return datetime.now(UTC).isoformat()
