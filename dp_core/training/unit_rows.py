"""Rows of labelled text as a token store in memory, by privacy unit: what the one trainer reads.

The shape of a row is public: it depends on `max_length` alone, never on the longest text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dp_core.corpus.keyed_hash import digest64
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import BadInput

_LEAST = 8  # pieces: the markers, and some of a text or of two


def check_row_length(max_length: int, most: int) -> None:
    """Refuse rows that hold next to nothing, or more than the model reads.

    Raises:
        BadInput: not from 8 to `most`, the model's positions.
    """
    if not _LEAST <= max_length <= most:
        raise BadInput(
            f"{max_length} is not from {_LEAST} to the model's {most}", where="max_length"
        )


def store_by_unit(
    rows: Sequence[Sequence[int]],
    units: Sequence[str],
    *,
    max_length: int,
    vocabulary: int,
    pad: int,
) -> tuple[TokenStore, NDArray[np.int64]]:
    """Return the rows by unit, and which row stands where.

    Args:
        rows: piece ids of each row, at most `max_length`.
        units: id of each row's unit.
        max_length: S.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        The store, and (rows,) the number in `rows` of each of its rows. Rows of one unit keep
        their order.
    """
    ids = sorted(set(units))
    place = {unit: i for i, unit in enumerate(ids)}
    unit_of = np.array([place[unit] for unit in units], np.int64)
    order = np.argsort(unit_of, kind="stable")
    tokens = np.full((len(rows), max_length), pad, np.int32)
    for i, number in enumerate(order):
        tokens[i, : len(rows[number])] = rows[number]
    counts = np.bincount(unit_of, minlength=len(ids))
    store = TokenStore(
        tokens=tokens,
        lengths=np.array([len(rows[number]) for number in order], np.int32),
        unit_rows=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        unit_keys=np.array([digest64(b"", "unit", unit) for unit in ids], np.uint64),
        sequence_length=max_length,
        vocabulary_size=vocabulary,
        digest="",
    )
    return store, order
