"""Tables and their labelled cells, as plain data for page, terminal and JSON; tables of a job."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from dp_core.audit.membership import Share
from dp_core.labels import Label, Labelled
from dp_core.privacy.ledger import Entry
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import epsilons
from tasks.report.model import ACCURACY, WORDS, Fact, ModelRow, Value, Withheld, measure_of

WITHHELD_MARK = "▒▒"
NOT_MEASURED = "–"
NO_ENTITIES = "no entities"  # in place of F1, if the test part has none
NO_TOTAL = "no total"
WHY_NO_TOTAL = "different neighbours or units"
LEDGER_LINES = 30  # latest entries in a report; each needs an accounting
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, its value, and the label that decides who may see it."""

    text: str
    value: float | str | None = None  # None: withheld or not measured
    label: Label | None = None  # None: a name, not a value
    withheld: bool = False
    alarm: bool = False  # unlikely to be due to chance
    detail: str = ""  # small print below the text, for example an interval


def name(text: str, detail: str = "") -> Cell:
    """Return the cell of a name, which has no label because it is not a measurement."""
    return Cell(text, value=text, detail=detail)


def withheld() -> Cell:
    """Return the cell that replaces an operator value."""
    return Cell(WITHHELD_MARK, label=Label.OPERATOR, withheld=True)


def number(value: float, label: Label, digits: int = 3) -> Cell:
    """Return the cell of a number, rounded to `digits` significant digits."""
    return Cell(significant(value, digits), value=value, label=label)


def total(epsilon: float | None) -> Cell:
    """Return the cell of a total ε; None means that the guarantees cannot be added up."""
    if epsilon is None:
        return Cell(NO_TOTAL, detail=WHY_NO_TOTAL)
    return number(epsilon, Label.PUBLIC)


def measured(value: Value, *, percent: bool = False) -> Cell:
    """Return the cell of a measured number; the header of a percentage shows the % sign."""
    if value is None:
        return Cell(NOT_MEASURED)
    if isinstance(value, Withheld):
        return withheld()
    if math.isnan(value.value):
        return Cell(NO_ENTITIES, label=value.label)
    if percent:
        return Cell(f"{100 * value.value:.1f}", value=value.value, label=value.label)
    return number(value.value, value.label)


def percentage(value: Value) -> Cell:
    """Return the cell of a share within 0 … 1, shown as a percentage."""
    return measured(value, percent=True)


def bits(value: float, label: Label, *, alarm: bool = False, detail: str = "") -> Cell:
    """Return the cell of an exposure."""
    return Cell(f"{value:.1f}", value=value, label=label, alarm=alarm, detail=detail)


def significant(value: float, digits: int = 3) -> str:
    """Return a number as text for readers: ∞, 0.0123, 1.1·10⁻⁶, 12 300."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -3:
        return power_of_ten(value, digits)
    if value == int(value) and exponent >= digits - 1:
        return f"{int(value):,}".replace(",", "\u202f")  # narrow no-break space
    rounded = f"{value:.{max(0, digits - 1 - exponent)}f}"
    return rounded.rstrip("0").rstrip(".") if "." in rounded else rounded


def power_of_ten(value: float, digits: int = 2) -> str:
    """Return a small number as mantissa and power of ten: 10⁻⁶ for 1e-06."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return power if short == "1" else f"{short}·{power}"


@dataclass(frozen=True)
class Header:
    """The name and unit of a column; columns of numbers are aligned right."""

    name: str
    unit: str = ""
    numeric: bool = True

    @property
    def title(self) -> str:
        """Name and unit in one line."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True)
class Table:
    """A table with headers, rows of labelled cells, and notes below."""

    key: str
    caption: str
    headers: tuple[Header, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    lead: str = ""  # first line on a terminal; a page has its own headline

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headers) for row in self.rows):
            raise ValueError(f"table {self.key}: a row and the headers differ in length")

    @classmethod
    def of(
        cls,
        key: str,
        rows: Iterable[tuple[Cell, ...]],
        more: Iterable[Header] = (),
        notes: Iterable[str] = (),
        **values: object,
    ) -> Table:
        """Return the table whose caption and first headers are in `words.toml`.

        Args:
            key: of the table in `words.toml`.
            rows: the rows.
            more: the headers after the first ones.
            notes: the notes.
            values: values in the caption.
        """
        words = WORDS["tables"][key]
        headers = (*(Header(**header) for header in words["headers"]), *more)
        return cls(key, words["caption"].format(**values), headers, tuple(rows), tuple(notes))

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values, with infinity as the string `inf`."""
        content = json.dumps(asdict(self), ensure_ascii=False)
        record: dict[str, Any] = json.loads(content, parse_constant=lambda _: "inf")
        return record


CELL: TypeAdapter[Cell] = TypeAdapter(Cell)  # reads a cell of `to_json`
TABLE: TypeAdapter[Table] = TypeAdapter(Table)  # reads the output of `to_json`


def interval_cell(interval: tuple[Value, Value] | None) -> Cell:
    """Return the cell of an interval of shares, in percent."""
    ends = [end for end in interval or () if isinstance(end, Labelled)]
    if len(ends) < 2:
        return withheld() if interval else Cell(NOT_MEASURED)
    return span_cell([end.value for end in ends], ends[0].label)


def span_cell(ends: Sequence[float], label: Label, *, percent: bool = True) -> Cell:
    """Return the cell of an interval from its two ends."""
    text = " – ".join(f"{100 * end:.1f}" if percent else significant(end) for end in ends)
    return Cell(text, value=text, label=label)


def share_cell(
    share: Share, ceiling: float | None, *, alarm: bool = False, label: Label = Label.OPERATOR
) -> Cell:
    """Return the cell of a share with its interval, and the maximum under the guarantee."""
    interval = f"{100 * share.low:.1f} – {100 * share.high:.1f}"
    return Cell(
        f"{100 * share.value:.1f}",
        value=share.value,
        label=label,
        alarm=alarm,
        detail=interval if ceiling is None else f"{interval}, ≤ {100 * ceiling:.1f}",
    )


def probability_in_words(value: float) -> str:
    """Return a probability with two decimals, or with one significant digit if below 0.01."""
    return f"{value:.2f}" if value >= 0.01 else significant(value, 1)


MARKS = {Label.DP: "ᵈ", Label.PUBLIC: "", Label.OPERATOR: "°"}
_STYLES = {Label.DP: "green", Label.PUBLIC: "", Label.OPERATOR: "yellow"}
LEGEND = "ᵈ dp: protected by ε  ° operator: not protected, ▒▒ in operator_report  unmarked: public"


MOST_SIDE_BY_SIDE = 4  # rows
MODEL_NAME_WIDTH = 11  # characters, so that four models fit into 80 columns


def rich_table(table: Table) -> RichTable:
    """Return the table for a terminal; a few rows are shown side by side, to fit 80 columns.

    A label is shown by a mark and a colour, so that it is visible without colour.
    """
    shown = RichTable(
        title=f"{table.lead}\n\n{table.caption}" if table.lead else table.caption,
        title_justify="left",
        caption="\n".join((LEGEND, *table.notes)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    if len(table.rows) <= MOST_SIDE_BY_SIDE:
        shown.add_column(table.headers[0].name, overflow="fold")
        for row in table.rows:
            name = textwrap.fill(row[0].text, MODEL_NAME_WIDTH, break_on_hyphens=False)
            shown.add_column(name, justify="right", no_wrap=True)
        for column, header in enumerate(table.headers[1:], start=1):
            shown.add_row(header.title, *(_text(row[column]) for row in table.rows))
        return shown
    for header in table.headers:
        shown.add_column(
            f"{header.name}\n{header.unit}" if header.unit else header.name,
            justify="right" if header.numeric else "left",
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*(_text(cell) for cell in row))
    return shown


def _text(cell: Cell) -> Text:
    if cell.label is None:
        return Text(cell.text)
    style = "bold red" if cell.alarm else _STYLES[cell.label]
    return Text(cell.text + MARKS[cell.label], style="dim" if cell.withheld else style)


MOST_COLUMNS = 12  # models in a table with one column for each


def entity_table(models: Sequence[ModelRow], labels: Sequence[Fact] = ()) -> Table:
    """Return counts and F1 by entity type or class, then the overall score with its interval.

    The counts by part have the form of Hoory et al. 2021, Table 1. The table has no rows if nothing
    was measured.

    Args:
        models: the models, one per column; more than `MOST_COLUMNS` are left out.
        labels: the number of labels of each type, with the part as the note.
    """
    measure = measure_of(models)
    models = models if len(models) <= MOST_COLUMNS else ()
    parts = list(dict.fromkeys(fact.note for fact in labels))
    counts = {(fact.name, fact.note): _fact_cell(fact) for fact in labels}
    types = sorted({kind for m in models for kind in m.f1_by_type} | {kind for kind, _ in counts})
    rows = [
        (
            name(kind),
            *(counts.get((kind, part), Cell(NOT_MEASURED)) for part in parts),
            *(percentage(model.f1_by_type.get(kind)) for model in models),
        )
        for kind in types
    ]
    unknown = [Cell(NOT_MEASURED)] * len(parts)
    for title, field, cell in (
        (measure.over_all, "score", percentage),
        ("95% interval", "interval", interval_cell),
    ):
        values = [getattr(model, field) for model in models]
        if any(value is not None for value in values):
            rows.append((name(title), *unknown, *map(cell, values)))
    headers = (
        Header(measure.label, numeric=False),
        *(Header("Labels", part) for part in parts),
        *(Header(model.name, "%" if measure is ACCURACY else "F1, %") for model in models),
    )
    return Table.of("entities", rows, headers, by_label=measure.by_label)


def ledger_table(entries: Sequence[Entry], dataset: str, unit: PrivacyUnit) -> Table:
    """Return the latest releases of the data set, one per row, with ε by the current accounting."""

    def row(entry: Entry) -> tuple[Cell, ...]:
        event, label = entry.event, Label.PUBLIC
        by_pld, by_rdp = epsilons(event, entry.delta)
        claimed = number(by_pld, label)
        if event.claimed_by_rdp:
            claimed = replace(claimed, detail="by RDP: no PLD is known")
        return (
            name(entry.id, entry.seed_hash and f"seed {entry.seed_hash[:12]}"),
            name(event.title, event.describe()),
            claimed,
            Cell(NOT_MEASURED) if by_rdp is None else number(by_rdp, label),
            number(entry.delta, label, 2),
            name(entry.state.value),
        )

    latest = [entry for entry in entries if entry.accounted][-LEDGER_LINES:]
    return Table.of("ledger", map(row, latest), dataset=dataset, unit=unit)


def facts_table(key: str, facts: Sequence[Fact]) -> Table:
    """Return the facts, one per row."""
    return Table.of(key, ((name(fact.name, fact.note), _fact_cell(fact)) for fact in facts))


def _fact_cell(fact: Fact) -> Cell:
    if isinstance(fact.value, str):
        return Cell(fact.value, value=fact.value, label=fact.label)
    return number(fact.value, fact.label, 4)
