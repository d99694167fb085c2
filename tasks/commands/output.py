"""The output of commands: tables for people, or pure JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Pure JSON on stdout, for programs.")


def write_json(content: Any) -> None:
    """Write JSON, and nothing else, on stdout; infinity is the string "inf"."""
    click.echo(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))


def write_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    whole: Collection[str] = (),
    prose: Collection[str] = (),
) -> None:
    """Write a table on stdout; without columns, its rows have no heads.

    Args:
        whole: columns without line breaks; text in other columns is wrapped and never cut.
        prose: left-aligned columns, in addition to the first one.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=bool(columns))
    for number in range(len(columns) or max(map(len, rows), default=0)):
        head = columns[number] if columns else ""
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
    write_table(title, [], list(pairs.items()))


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
