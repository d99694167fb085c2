"""Rows: every piece of a unit's text once, bounded, and nothing of another unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.data.privacy_units import Unit
from dp_core.data.token_store import rows_of_units
from dp_core.errors import BadInput
from dp_core.vocabulary import wordpiece

TOKENIZER = wordpiece.learn(
    dict.fromkeys(
        ["the", "patient", "has", "pain", "in", "left", "knee", ".", "[", "]", "mask"], 500
    ),
    200,
)


def rows(units: list[Unit], length: int = 8, limit: int = 100) -> dict[str, list[list[int]]]:
    return dict(
        rows_of_units(
            units, TOKENIZER, sequence_length=length, max_examples_per_unit=limit, key=b"k"
        )
    )


@given(
    st.lists(
        st.lists(st.sampled_from(["the", "patient", "has", "pain", "."]), max_size=30), max_size=4
    ),
    st.integers(3, 12),
)
def test_rows_hold_the_text_once_and_fit(texts: list[list[str]], length: int) -> None:
    made = rows([Unit("u", [" ".join(t) for t in texts])], length)["u"]
    assert all(r[0] == 2 and r[-1] == 3 and 3 <= len(r) <= length for r in made)
    pieces = [i for r in made for i in r[1:-1]]
    whole = [TOKENIZER.encode(" ".join(t), add_special_tokens=False).ids for t in texts]
    assert pieces == [i for ids in whole for i in ids]
    room = length - 2
    assert len(made) == sum(-(-len(ids) // room) for ids in whole)  # as few rows as possible


def test_a_units_rows_do_not_depend_on_other_units() -> None:
    text = "the patient has pain in the left knee . " * 8
    units = [Unit(str(i), [text, text[: 10 * i]]) for i in range(300)]
    together, alone = rows(units, limit=3), rows([units[277]], limit=3)
    assert together["277"] == alone["277"]
    assert {len(r) for r in together.values()} == {3}


def test_special_tokens_in_a_note_are_text() -> None:
    made = rows([Unit("u", ["[MASK] pain [SEP]"])], 20)["u"]
    assert not {0, 2, 3, 4} & set(made[0][1:-1])


def test_empty_text_has_no_row() -> None:
    assert rows([Unit("u", ["", "  "])]) == {"u": []}


def test_a_row_needs_room() -> None:
    with pytest.raises(BadInput, match="no room"):
        rows([Unit("u", ["pain"])], 2)
