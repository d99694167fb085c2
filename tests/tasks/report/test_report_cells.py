"""How values read."""

import math

import pytest

from dp_core.labels import Dp, Label, Operator
from tasks.report import tables as cells
from tasks.report.model import Withheld


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.inf, "∞"),
        (0.0, "0"),
        (1.0, "1"),
        (6.2749, "6.27"),
        (0.5178, "0.518"),
        (0.064, "0.064"),
        (12.345, "12.3"),
        (1e-6, "10⁻⁶"),
        (1.1e-6, "1.1·10⁻⁶"),
        (1.18e-4, "1.18·10⁻⁴"),
        (4000, "4\u202f000"),
        (83_000_000, "83\u202f000\u202f000"),
        (256, "256"),
        (100.0, "100"),
        (-0.25, "-0.25"),
    ],
)
def test_numbers_read_as_people_write_them(value: float, text: str) -> None:
    assert cells.significant(value) == text


def test_a_share_becomes_a_percentage_and_keeps_its_label() -> None:
    cell = cells.percentage(Dp(0.3321))
    assert (cell.text, cell.value, cell.label, cell.withheld) == ("33.2", 0.3321, Label.DP, False)
    assert cells.percentage(Operator(0.5)).label is Label.OPERATOR


def test_what_is_withheld_and_what_was_not_measured_look_different() -> None:
    hidden, unknown = cells.percentage(Withheld()), cells.percentage(None)
    assert hidden.withheld
    assert hidden.value is None
    assert hidden.label is Label.OPERATOR
    assert unknown.label is None
    assert hidden.text != unknown.text
