"""Where a canary is shown to the model under audit: contexts that hold no private text.

Everything here is a function of public coins and of the released vocabulary, so whatever a
differentially private model answers in these contexts is post-processing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class CanaryLike(Protocol):
    """What the audit needs to know of a canary or of a reference that was never planted."""

    @property
    def pattern(self) -> str:
        """String of H (hint) with one S (secret)."""
        ...

    @property
    def rate(self) -> float:
        """Probability that a unit carries it; 0 for a reference."""
        ...

    @property
    def pieces(self) -> tuple[int, ...]:
        """Ids of its word pieces, the secret's among them."""
        ...

    @property
    def secret_index(self) -> int:
        """Place of the secret in `pieces`."""
        ...


class SpecialPieces(Protocol):
    """Ids of the special pieces that a context is made of."""

    @property
    def cls(self) -> int:
        """`[CLS]`."""
        ...

    @property
    def sep(self) -> int:
        """`[SEP]`."""
        ...

    @property
    def mask(self) -> int:
        """`[MASK]`."""
        ...

    @property
    def pad(self) -> int:
        """`[PAD]`."""
        ...


@dataclass(frozen=True)
class MaskedContexts:
    """Rows ready for the model, the secret masked in each; rows of one canary are adjacent."""

    input_ids: NDArray[np.int32]  # [B, S]
    lengths: NDArray[np.int32]  # [B] pieces of each row that are not padding
    positions: NDArray[np.int32]  # [B] where the secret is masked
    secrets: NDArray[np.int32]  # [B] the piece that is hidden there


def alone(
    canaries: Sequence[CanaryLike], special: SpecialPieces, sequence_length: int
) -> MaskedContexts:
    """Return one row for each canary: `[CLS] H H S H H [SEP]`, padded to S = sequence_length."""
    return _rows(
        [(c, [], []) for c in canaries],
        special,
        sequence_length,
    )


def embedded(
    canaries: Sequence[CanaryLike],
    special: SpecialPieces,
    sequence_length: int,
    *,
    filler: Sequence[int],
    repeats: int,
    seed: int,
) -> MaskedContexts:
    """Return `repeats` full rows for each canary, at random places among random pieces.

    Args:
        canaries: planted ones or references; each gets its own stream, independent of its place
            in the sequence, so that adding a canary changes no other's contexts.
        special: ids of the special pieces.
        sequence_length: S; every row is full.
        filler: ids that the surrounding pieces are drawn from, uniformly.
        repeats: R rows for each canary, adjacent.
        seed: public.
    """
    pool = np.asarray(filler, np.int64)
    framed = []
    for canary in canaries:
        coins = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([seed, *canary.pieces]))
        )
        room = sequence_length - 2 - len(canary.pieces)
        if room < 0:
            raise ValueError(f"a canary of {len(canary.pieces)} pieces needs longer rows")
        for _ in range(repeats):
            around = pool[coins.integers(0, pool.size, room)].tolist()
            place = int(coins.integers(0, room + 1))
            framed.append((canary, around[:place], around[place:]))
    return _rows(framed, special, sequence_length)


def _rows(
    framed: Sequence[tuple[CanaryLike, list[int], list[int]]],
    special: SpecialPieces,
    sequence_length: int,
) -> MaskedContexts:
    size = len(framed)
    ids = np.full((size, sequence_length), special.pad, np.int32)
    lengths, positions, secrets = (np.zeros(size, np.int32) for _ in range(3))
    for row, (canary, before, after) in enumerate(framed):
        pieces = [special.cls, *before, *canary.pieces, *after, special.sep]
        if len(pieces) > sequence_length:
            raise ValueError(f"a canary of {len(canary.pieces)} pieces needs longer rows")
        ids[row, : len(pieces)] = pieces
        lengths[row] = len(pieces)
        positions[row] = 1 + len(before) + canary.secret_index
        secrets[row] = canary.pieces[canary.secret_index]
        ids[row, positions[row]] = special.mask
    return MaskedContexts(ids, lengths, positions, secrets)
