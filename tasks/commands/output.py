"""The output of commands: tables for people, pure JSON for programs, and new folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dp_core.errors import BadInput
from tasks.runtime.deployment import refused

if TYPE_CHECKING:
    from rich.text import Text

_PARTIAL = ".partial"
_NO_VALUE = "–"
_NARROW, _TALL = 30, 6  # characters and lines of a cell that is hard to read
_WORD = re.compile(r"[^\W\d_]{2}")  # not the e of 1e-05


as_json = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=lambda context, _, chosen: context.meta.update(json=chosen),
    help="Pure JSON on stdout, for programs.",
)


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


def write_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a table on stdout; columns without any name have no heads.

    Lines break between words. If the longest words of the columns do not fit into a line, or a long
    text has little room, the rows are written one after the other, as lists of names and values.
    Numbers are aligned right.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import measure_renderables
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(title, style="bold", markup=False)  # a table's own title is cut to its width
    texts = [[Text(_cell(value)) for value in row] for row in rows]
    by_column = [[Text(head), *cells] for head, *cells in zip(columns, *texts, strict=True)]
    sizes = [measure_renderables(console, console.options, cells) for cells in by_column]
    spare = console.width - 2 * (len(columns) - 1) - sum(size.minimum for size in sizes)
    wanted = max(1, spare, sum(size.span for size in sizes))
    widths = [size.minimum + size.span * spare // wanted for size in sizes]
    longest = [max(cell.cell_len for cell in cells) for cells in by_column]
    if spare < 0 or any(
        width < _NARROW and cells > _TALL * width
        for width, cells in zip(widths, longest, strict=True)
    ):
        _write_rows(columns, texts, console.width)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.show_header = any(columns)
    for (head, *cells), width in zip(by_column, widths, strict=True):
        text = any(_WORD.search(cell.plain) for cell in cells)
        table.add_column(head, justify="left" if text else "right", width=width)
    for row in texts:
        table.add_row(*row)
    console.print(table, "")


def write_records(
    title: str, columns: Mapping[str, Callable[[Any], object]], records: Iterable[Any]
) -> None:
    """Write a table of records; each column has the function of a record that gives its cells."""
    rows = [[of(record) for of in columns.values()] for record in records]
    write_table(title, list(columns), rows)


def _write_rows(columns: Sequence[str], rows: Sequence[Sequence[Text]], width: int) -> None:
    """Write each row as its first cell and a list of the others that have a value."""
    for first, *others in rows:
        click.echo(f"  {first.plain}")
        for head, text in zip(columns[1:], others, strict=True):
            if text.plain != _NO_VALUE:
                write_prose(f"{head}: {text.plain}" if head else text.plain, width, indent=4)
    click.echo()


def write_prose(text: str, width: int = 0, *, indent: int = 0) -> None:
    """Write a paragraph on stdout; on a terminal (or for a width), lines break between words."""
    if width or sys.stdout.isatty():
        fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
        begin, width = " " * indent, width or shutil.get_terminal_size().columns
        text = fill(text, width, initial_indent=begin, subsequent_indent=begin)
    click.echo(text)


def write_pairs(title: str, pairs: Mapping[str, object]) -> None:
    """Write names and values, one pair per line."""
    write_table(title, ["", ""], list(pairs.items()))


def _cell(value: object) -> str:
    if value is None:
        return _NO_VALUE
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
