"""How commands show what they found: a table for people, or pure JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Pure JSON on stdout, for programs.")


def write_json(content: Any) -> None:
    """Write JSON, and nothing else, on stdout; infinity is the string "inf"."""
    click.echo(json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False))


def write_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    Console().print(table)


def write_pairs(title: str, pairs: Mapping[str, object]) -> None:
    """Write names and values, one a line."""
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
