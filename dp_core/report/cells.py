"""How single values are written: one place, so that page, terminal and JSON agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dp_core.privacy.labels import Label
from dp_core.report.model import ModelRow, Value, Withheld

WITHHELD_MARK = "▒▒"
NOT_MEASURED = "–"
NO_TOTAL = "no total"
WHY_NO_TOTAL = "unlike neighbours or units"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Cell:
    """One cell: how it reads, what it is, who may see it."""

    text: str
    value: float | str | None = None  # None: withheld or not measured
    label: Label | None = None  # None: a name, not a value
    withheld: bool = False
    alarm: bool = False  # beyond what chance explains
    detail: str = ""  # small print beneath, for example an interval


def name(text: str, detail: str = "") -> Cell:
    """Return the cell of a name: no label, since it measures nothing."""
    return Cell(text, value=text, detail=detail)


def withheld() -> Cell:
    """Return the discreet mark in place of an operator value."""
    return Cell(WITHHELD_MARK, label=Label.OPERATOR, withheld=True)


def number(value: float, label: Label, digits: int = 3) -> Cell:
    """Return a number in `digits` significant digits."""
    return Cell(significant(value, digits), value=value, label=label)


def total(epsilon: float | None) -> Cell:
    """Return a total ε, or that there is none: guarantees of unlike kinds do not add up."""
    if epsilon is None:
        return Cell(NO_TOTAL, detail=WHY_NO_TOTAL)
    return number(epsilon, Label.PUBLIC)


def measured(value: Value) -> Cell:
    """Return a measured number as it is, in three significant digits."""
    if value is None:
        return Cell(NOT_MEASURED)
    if isinstance(value, Withheld):
        return withheld()
    return number(value.value, value.label)


def knowledge(model: ModelRow, *, causal: bool) -> tuple[Cell, Cell]:
    """Return what a model knows of public and of private text, as its architecture tells."""
    if causal:
        return measured(model.perplexity_public), measured(model.perplexity_private)
    return percentage(model.mlm_public), percentage(model.mlm_private)


def percentage(value: Value) -> Cell:
    """Return a share within 0 … 1 as a percentage without the sign: the header has it."""
    if value is None:
        return Cell(NOT_MEASURED)
    if isinstance(value, Withheld):
        return withheld()
    return Cell(f"{100 * value.value:.1f}", value=value.value, label=value.label)


def bits(value: float, label: Label, *, alarm: bool = False, detail: str = "") -> Cell:
    """Return an exposure."""
    return Cell(f"{value:.1f}", value=value, label=label, alarm=alarm, detail=detail)


def significant(value: float, digits: int = 3) -> str:
    """Return a number as people write it: ∞, 0.0123, 1.1·10⁻⁶, 12 300."""
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
    """Return a small number as mantissa and power: 1e-06 reads 10⁻⁶."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    short = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return power if short == "1" else f"{short}·{power}"
