import numpy as np
import numpy.typing as npt
import pytest

from dp_core.data.masking import MaskedRows, mask_rows
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput

SPECIAL = SpecialIds()
V, S, K = 500, 32, 8


def batch(rows: int, seed: int = 0) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, S + 1, rows).astype(np.int32)
    tokens = rng.integers(5, V, (rows, S)).astype(np.uint16)
    tokens[rng.random((rows, S)) < 0.02] = SPECIAL.unk
    tokens[:, 0] = SPECIAL.cls
    tokens[np.arange(rows), lengths - 1] = SPECIAL.sep
    tokens[np.arange(S)[None] >= lengths[:, None]] = SPECIAL.pad
    return tokens, lengths


def keys(rows: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(1).integers(0, 2**63, rows).astype(np.uint64)


def test_rows_can_be_rebuilt_and_no_special_token_is_touched():
    tokens, lengths = batch(3000)
    m = mask_rows(tokens, lengths, keys(3000), SPECIAL, V, K)
    rows, columns = np.nonzero(m.weights)
    rebuilt = m.input_ids.copy()
    rebuilt[rows, m.positions[rows, columns]] = m.labels[rows, columns]
    assert np.array_equal(rebuilt, tokens)
    assert m.labels[rows, columns].min() >= 5
    assert not m.positions[m.weights == 0].any()
    assert not m.labels[m.weights == 0].any()
    changed = m.input_ids != tokens
    assert changed.sum() <= m.weights.sum()
    replaced = m.input_ids[changed]
    assert np.isin(replaced, [0, 1, 2, 3]).sum() == 0
    # No position occurs twice in a row.
    assert len(set(zip(rows, m.positions[rows, columns], strict=True))) == len(rows)


def test_number_of_predictions_is_the_rows_own():
    tokens, lengths = batch(500)
    m = mask_rows(tokens, lengths, keys(500), SPECIAL, V, 3)
    maskable = (tokens >= 5).sum(1)
    expected = np.minimum(np.clip(np.rint(0.15 * maskable), 1, 3), maskable)
    assert np.array_equal(m.weights.sum(1), expected)
    nothing = mask_rows(np.array([[2, 3, 0]]), np.array([2]), keys(1), SPECIAL, V, 1)
    assert nothing.weights.sum() == 0


def test_a_rows_mask_does_not_depend_on_its_place_in_the_batch():
    tokens, lengths = batch(5000)
    k = keys(5000)
    whole = mask_rows(tokens, lengths, k, SPECIAL, V, K)
    order = np.random.default_rng(2).permutation(5000)[:100]
    part = mask_rows(tokens[order], lengths[order], k[order], SPECIAL, V, K)
    for a, b in zip(vars(whole).values(), vars(part).values(), strict=True):
        assert np.array_equal(a[order], b)


@pytest.mark.statistical
def test_eighty_ten_ten():
    tokens, lengths = batch(20_000)
    m = mask_rows(tokens, lengths, keys(20_000), SPECIAL, V, K)
    rows, columns = np.nonzero(m.weights)
    now, was = m.input_ids[rows, m.positions[rows, columns]], m.labels[rows, columns]
    n = len(rows)
    for share, hits in ((0.8, now == SPECIAL.mask), (0.1 + 0.1 / (V - 5), now == was)):
        assert abs(hits.sum() - n * share) < 6 * np.sqrt(n * share * (1 - share))
    random = now[(now != SPECIAL.mask) & (now != was)]
    assert len(np.unique(random)) > 0.95 * (V - 5)  # any ordinary token


@pytest.mark.statistical
def test_every_position_is_as_likely():
    rows = 20_000
    tokens = np.full((rows, 22), 7)
    tokens[:, 0], tokens[:, -1] = SPECIAL.cls, SPECIAL.sep
    m = mask_rows(tokens, np.full(rows, 22), keys(rows), SPECIAL, V, K)
    counts = np.bincount(m.positions[m.weights > 0], minlength=22)
    assert counts[0] == counts[21] == 0
    assert np.abs(counts[1:21] - 3 * rows / 20).max() < 6 * np.sqrt(rows * 0.15 * 0.85)


def words_masked(m: MaskedRows, row: int, starts: npt.NDArray[np.int64]) -> dict[int, int]:
    chosen = m.positions[row][m.weights[row] > 0]
    return {int(s): int((starts[chosen] == s).sum()) for s in np.unique(starts[chosen])}


def test_whole_words_are_masked_together():
    rng = np.random.default_rng(3)
    continuation = np.zeros(V, bool)
    continuation[250:] = True
    tokens, lengths = batch(800)
    tokens[:, 1] = rng.integers(250, V, 800)  # some rows begin inside a word
    m = mask_rows(tokens, lengths, keys(800), SPECIAL, V, K, continuation)
    partial = 0
    for row in range(800):
        c = continuation[tokens[row]] & (np.arange(S) < lengths[row])
        starts = np.maximum.accumulate(np.where(c, 0, np.arange(S)))
        maskable = (tokens[row] >= 5) & (np.arange(S) < lengths[row])
        for start, masked in words_masked(m, row, starts).items():
            size = int((maskable & (starts == start)).sum())
            if masked != size:  # the quota is smaller than the only chosen word
                partial += 1
                assert m.weights[row].sum() == masked
    assert m.weights.sum(1).min() >= 1 or (lengths < 4).any()
    assert partial < 400
    assert (
        m.weights.sum() > 0.6 * mask_rows(tokens, lengths, keys(800), SPECIAL, V, K).weights.sum()
    )


def test_more_predictions_than_places_are_refused():
    with pytest.raises(BadInput, match="max_predictions"):
        mask_rows(*batch(2), keys(2), SPECIAL, V, S + 1)
