"""Tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from dp_core.privacy.labels import Label
from dp_core.report.cells import Cell
from dp_core.report.tables import Table

_MARKS = {Label.DP: "ᵈ", Label.PUBLIC: "", Label.OPERATOR: "°"}
_STYLES = {Label.DP: "green", Label.PUBLIC: "", Label.OPERATOR: "yellow"}
LEGEND = "ᵈ dp: protected by the guarantee  ° operator: not protected  unmarked: public"


def rich_table(table: Table) -> RichTable:
    """Return the table for a wide terminal: the label is a mark and a colour, never colour alone.

    Text that does not fit is folded, not cut.
    """
    shown = _frame(table)
    for header in table.headers:
        shown.add_column(
            f"{header.name}\n{header.unit}" if header.unit else header.name,
            justify="right" if header.numeric else "left",
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*(_text(cell) for cell in row))
    return shown


def side_by_side(table: Table) -> RichTable:
    """Return the table turned over, a column for each row: few models fit 80 columns so."""
    shown = _frame(table)
    shown.add_column(table.headers[0].name, overflow="fold")
    for row in table.rows:
        shown.add_column(row[0].text, justify="right", no_wrap=True)
    for place, header in enumerate(table.headers[1:], start=1):
        name = f"{header.name}, {header.unit}" if header.unit else header.name
        shown.add_row(name, *(_text(row[place]) for row in table.rows))
    return shown


def _frame(table: Table) -> RichTable:
    return RichTable(
        title=table.caption,
        title_justify="left",
        caption="\n".join((LEGEND, *table.notes)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )


def _text(cell: Cell) -> Text:
    if cell.label is None:
        return Text(cell.text)
    style = "bold red" if cell.alarm else _STYLES[cell.label]
    return Text(cell.text + _MARKS[cell.label], style="dim" if cell.withheld else style)
