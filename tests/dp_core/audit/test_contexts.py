"""Rows that show canaries to a model, without a word of private text."""

from dataclasses import dataclass

import numpy as np
import pytest

from dp_core.audit.exposure import alone, embedded


@dataclass(frozen=True)
class Specials:
    pad: int = 0
    cls: int = 2
    sep: int = 3
    mask: int = 4


@dataclass(frozen=True)
class Planted:
    pattern: str
    pieces: tuple[int, ...]
    secret_index: int
    rate: float = 0.1


HSH = Planted("HSH", (11, 12, 13), 1)
HS = Planted("HS", (21, 22), 1)


def test_alone_is_the_canary_between_cls_and_sep_with_its_secret_masked() -> None:
    shown = alone([HSH, HS], Specials(), 8)
    assert shown.input_ids.tolist() == [[2, 11, 4, 13, 3, 0, 0, 0], [2, 21, 4, 3, 0, 0, 0, 0]]
    assert shown.lengths.tolist() == [5, 4]
    assert shown.positions.tolist() == [2, 2]
    assert shown.secrets.tolist() == [12, 22]
    assert {a.dtype for a in (shown.input_ids, shown.positions, shown.secrets)} == {np.dtype("i4")}


def test_embedded_rows_are_full_and_hold_the_whole_canary_at_random_places() -> None:
    filler, repeats = range(100, 200), 64
    shown = embedded([HSH, HS], Specials(), 12, filler=filler, repeats=repeats, seed=3)
    assert shown.lengths.tolist() == [12] * 2 * repeats
    for row, canary in enumerate([HSH] * repeats + [HS] * repeats):
        ids, place = shown.input_ids[row], int(shown.positions[row])
        assert (ids[0], ids[-1]) == (2, 3)
        assert ids[place] == 4
        assert shown.secrets[row] == canary.pieces[canary.secret_index]
        start = place - canary.secret_index
        hints = [p for i, p in enumerate(canary.pieces) if i != canary.secret_index]
        around = np.delete(ids[1:-1], np.arange(start - 1, start - 1 + len(canary.pieces)))
        found = np.delete(ids[start : start + len(canary.pieces)], canary.secret_index)
        assert found.tolist() == hints
        assert set(around.tolist()) <= set(filler)
    assert len(set(shown.positions[:repeats].tolist())) == 8  # every place of HSH in ten pieces


def test_a_canarys_contexts_do_not_depend_on_the_others_but_do_on_the_seed() -> None:
    both = embedded([HSH, HS], Specials(), 12, filler=range(100, 200), repeats=4, seed=3)
    own = embedded([HS], Specials(), 12, filler=range(100, 200), repeats=4, seed=3)
    other = embedded([HS], Specials(), 12, filler=range(100, 200), repeats=4, seed=4)
    np.testing.assert_array_equal(both.input_ids[4:], own.input_ids)
    assert (own.input_ids != other.input_ids).any()


def test_a_canary_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="canary of 3 pieces"):
        alone([HSH], Specials(), 4)
    with pytest.raises(ValueError, match="canary of 3 pieces"):
        embedded([HSH], Specials(), 4, filler=range(100, 200), repeats=1, seed=0)
