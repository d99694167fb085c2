"""The output of commands: tables for people, pure JSON for programs, and new folders."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from dp_core.errors import BadInput
from tasks.runtime.deployment import refused

_PARTIAL = ".partial"
Command = TypeVar("Command", bound=Callable[..., Any])


def _choose(context: click.Context, option: click.Parameter, chosen: bool) -> None:
    context.meta["json"] = chosen


as_json = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_choose,
    help="Pure JSON on stdout, for programs.",
)


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options to a command, in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def is_json() -> bool:
    """Return whether the running command was called with --json."""
    return bool(click.get_current_context().meta["json"])


def write_json(content: Any) -> None:
    """Write JSON, and nothing else, on stdout; infinity is the string "inf"."""
    click.echo(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))


def write_answer(answer: Any, show: Callable[[], object]) -> None:
    """Write a command's answer: as pure JSON with --json, otherwise by `show` for people."""
    if is_json():
        write_json(answer)
    else:
        show()


def write_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    whole: Collection[str] = (),
    prose: Collection[str] = (),
) -> None:
    """Write a table on stdout; columns without any name have no heads.

    Args:
        whole: columns without line breaks; text in other columns is wrapped and never cut.
        prose: left-aligned columns, in addition to the first one.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=any(columns))
    for number, head in enumerate(columns):
        left = number == 0 or head in prose
        table.add_column(
            head, justify="left" if left else "right", no_wrap=head in whole, overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(_cell(value)) for value in row))
    console = Console(highlight=False)
    console.print(title, style="bold", markup=False)  # a table's own title is cut to its width
    console.print(table)


def write_pairs(title: str, pairs: Mapping[str, object]) -> None:
    """Write names and values, one pair per line."""
    write_table(title, ["", ""], list(pairs.items()))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(content: Any) -> Any:
    if isinstance(content, float) and content in (float("inf"), float("-inf")):
        return str(content)
    if isinstance(content, Mapping):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager of a temporary folder whose content moves to `folder` on success.

    The temporary folder is next to `folder`, or inside it if it exists, because its parent may not
    be writable. The remains of a killed process are removed.

    Raises:
        BadInput: the folder is not empty, or cannot be made or written.
    """
    there = os.path.lexists(folder)
    partial = folder / _PARTIAL if there else folder.with_name(f".{folder.name}{_PARTIAL}")
    try:
        if there and (not folder.is_dir() or {f.name for f in folder.iterdir()} - {_PARTIAL}):
            raise BadInput(
                "it is there, and not empty", where=str(folder), fix="Name a new folder."
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        what = f"cannot be {'written' if there else 'made'}"
        raise refused(error, what, where=str(folder)) from None
    try:
        yield partial
        if not there:
            partial.rename(folder)
        for entry in sorted(partial.iterdir()) if there else ():
            entry.rename(folder / entry.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
