"""Tagged sentences as a store of rows by privacy unit, so that the one trainer reads them.

Sentences of one document (or patient) are rows of one unit, in whatever order they come. The
shape of a row is public: it depends on `max_length` alone, never on the longest sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dp_core.bert.heads import tag_row_losses
from dp_core.corpus.counter_random import U64
from dp_core.corpus.masking import MaskedRows
from dp_core.corpus.token_store import TokenStore
from dp_core.training.objective import Objective
from dp_core.training.rows import Indices
from dp_core.training.tagging import TaggingRow
from dp_core.training.unit_rows import store_by_unit


def tagging_units(
    rows: Sequence[TaggingRow], units: Sequence[str], *, max_length: int, vocabulary: int, pad: int
) -> tuple[TokenStore, Objective]:
    """Return the rows by unit, and what they teach.

    Args:
        rows: of `tagging.rows_of`.
        units: id of the unit of each sentence that the rows were cut from.
        max_length: S, at least 3 and that of the rows.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        A store in memory, and an objective that knows the tags of its rows.
    """
    store, order = store_by_unit(
        [row.ids for row in rows],
        [units[row.sentence] for row in rows],
        max_length=max_length,
        vocabulary=vocabulary,
        pad=pad,
    )
    answers = _Answers([rows[i] for i in order], max_length)
    return store, Objective("tagging", answers.examples, tag_row_losses)


class _Answers:
    """The tags of rows in the store's order."""

    def __init__(self, rows: Sequence[TaggingRow], max_length: int) -> None:
        self._rows, self._length = rows, max_length

    def examples(self, store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
        """Ask each word for its tag, at its first piece; nothing is masked, nothing is random.

        Returns:
            K = S − 2 answers of each row: no row has more words than places between its markers.
        """
        shape = (len(rows), self._length - 2)
        positions, labels = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights = np.zeros(shape, np.float32)
        for i, number in enumerate(rows):
            row = self._rows[number]
            positions[i, : len(row.firsts)] = row.firsts
            labels[i, : len(row.labels)] = row.labels
            weights[i, : len(row.labels)] = 1
        return MaskedRows(store.tokens[rows], positions, labels, weights)
