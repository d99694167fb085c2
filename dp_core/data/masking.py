"""BERT's masking (Devlin et al. 2019): 15% of the tokens; 80% [MASK], 10% random, 10% kept.

Every choice is a function of the row's own key and of the position in the row. It never depends on
the row's place in a batch or on any other row (privacy.md, "Independence of rows").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dp_core.data.hashing import U64, bits
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput

MASKED_SHARE = 0.15
_KEEP, _RANDOM = 0.1, 0.1  # shares of the chosen positions
_BLOCK = 4096  # rows per block, so that intermediate arrays fit into the cache
_POSITION = np.uint64(0xFFFF)
_WHICH, _HOW, _WHAT = 0, 1, 2  # streams of the counter-based generator

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Rows ready for a masked language model.

    Attributes:
        input_ids: int32 `[M, S]`, with the chosen positions replaced.
        positions: int32 `[M, K]`, chosen positions; 0 where the weight is 0.
        labels: int32 `[M, K]`, the original ids at these positions; 0 where the weight is 0.
        weights: float32 `[M, K]`, 1 for a prediction and 0 for padding. The sum of a row's weights
            is its number of predictions: divide a row's loss by it, never by the batch's number.
    """

    input_ids: Ints
    positions: Ints
    labels: Ints
    weights: npt.NDArray[np.float32]


def mask_rows(
    tokens: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    row_keys: U64,
    special: SpecialIds,
    vocabulary_size: int,
    max_predictions: int,
    continuation: npt.NDArray[np.bool_] | None = None,
) -> MaskedRows:
    """Mask every row with the row's own key.

    Args:
        tokens: ids `[M, S]`.
        lengths: `[M]`; positions at and after a row's length are padding.
        row_keys: uint64 `[M]`; the same key and row give the same mask.
        special: ids that are never masked and never replace another id: [PAD], [CLS], [SEP],
            [MASK], and [UNK], whose prediction teaches nothing.
        vocabulary_size: random replacements are uniform over the other ids of the vocabulary.
        max_predictions: K; a row has round(15% of its maskable tokens) predictions, 1 to K.
        continuation: bool `[V]`, true for tokens that continue a word (`##…`); whole words are
            then masked together. None: every token is masked separately.
    """
    tokens = np.asarray(tokens)
    rows, length = tokens.shape
    if not 1 <= max_predictions <= length:
        raise BadInput(
            f"{max_predictions} is not in 1..{length}", where="max_predictions", fix="Set K ≤ S."
        )
    ordinary = np.setdiff1d(np.arange(vocabulary_size, dtype=np.int32), special.as_tuple())
    out = MaskedRows(
        tokens.astype(np.int32),
        np.zeros((rows, max_predictions), np.int32),
        np.zeros((rows, max_predictions), np.int32),
        np.zeros((rows, max_predictions), np.float32),
    )
    for start in range(0, rows, _BLOCK):
        part = slice(start, start + _BLOCK)
        _mask_block(
            MaskedRows(*(array[part] for array in vars(out).values())),
            np.asarray(lengths[part]),
            row_keys[part],
            special,
            ordinary,
            continuation,
        )
    return out


def _mask_block(
    out: MaskedRows,
    lengths: npt.NDArray[np.integer[Any]],
    keys: U64,
    special: SpecialIds,
    ordinary: Ints,
    continuation: npt.NDArray[np.bool_] | None,
) -> None:
    """Fill the views in `out`, whose `input_ids` holds the unmasked rows."""
    ids, k = out.input_ids, out.positions.shape[1]
    maskable = np.arange(ids.shape[1])[None, :] < lengths[:, None]
    for token in special.as_tuple():
        maskable &= ids != token
    n = maskable.sum(1)
    wanted = np.minimum(np.maximum(np.rint(n * MASKED_SHARE), 1), np.minimum(n, k)).astype(np.int64)

    scores = bits(keys, _WHICH, ids.shape[1])
    if continuation is not None:
        scores = _score_of_word(scores, continuation[ids])
    positions, taken = _lowest(scores, maskable, wanted, k, whole=continuation is not None)

    labels = np.take_along_axis(ids, positions, 1)
    how = (bits(keys, _HOW, k) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    what = ordinary[(bits(keys, _WHAT, k) >> np.uint64(32)).astype(np.int64) % len(ordinary)]
    new = np.where(
        how < _KEEP, labels, np.where(how < _KEEP + _RANDOM, what, np.int32(special.mask))
    )

    row, column = np.nonzero(taken)
    out.positions[:] = np.where(taken, positions, 0)
    out.labels[:] = np.where(taken, labels, 0)
    out.weights[:] = taken
    ids[row, positions[row, column]] = new[row, column]


def _score_of_word(scores: U64, continues: npt.NDArray[np.bool_]) -> U64:
    """Return scores in which every token has the score of its word's first token."""
    columns = np.arange(scores.shape[1])
    starts = np.maximum.accumulate(np.where(continues, 0, columns[None, :]), axis=1)
    return np.take_along_axis(scores, starts, 1)


def _lowest(
    scores: U64,
    maskable: npt.NDArray[np.bool_],
    wanted: npt.NDArray[np.int64],
    k: int,
    *,
    whole: bool,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return `[M, K]` positions by rising score, and which of them are taken.

    With `whole`, a word that exceeds the quota is left out, unless no other word is chosen.
    """
    length = scores.shape[1]
    # The low bits hold the position: a single sort gives the positions, and resolves ties by them.
    tagged = (scores & ~_POSITION) | np.arange(length, dtype=np.uint64)[None, :]
    tagged[~maskable] |= ~_POSITION
    more = min(k + 1, length)
    if more < length:
        tagged = np.partition(tagged, more - 1, axis=1)[:, :more]
    tagged = np.sort(tagged, axis=1)
    positions = (tagged[:, :k] & _POSITION).astype(np.int64)
    taken = np.arange(k)[None, :] < wanted[:, None]
    if whole:
        word = tagged & ~_POSITION
        following = np.take_along_axis(word, np.minimum(wanted, more - 1)[:, None], 1)
        cut = taken & (word[:, :k] == following)
        taken &= ~cut | (cut.sum(1) == wanted)[:, None]
    return positions, taken
