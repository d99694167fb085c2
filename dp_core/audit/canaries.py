"""Canaries (Carlini et al. 2019; Hoory et al. 2021, section 5.2): drawn, and planted by unit.

A canary is a run of random tokens: hints `H` and one secret `S`. Tokens come from the *released*
vocabulary and all coins are public, so the model's own guarantee covers its predictions on canaries
in contexts without private text. A unit carries a canary with the canary rate, by a coin of (seed,
canary, unit) alone. So planting in one unit does not depend on any other unit, and the carrier
remains an ordinary unit that is bounded, sampled and clipped like all others.

Audits of a job's training use canaries that are whole units, and secret coins that decide the
included canaries before the training. The coins must be fixed before the training and must not be
drawn again for the same charge. They are derived one-way from the seed of the release, under a
separate purpose. The ledger commits to that seed by its salted hash before the training begins, and
so to the coins. A training that resumes after a kill has the same coins; a new charge has new
coins. Neither the release's seed nor its noise can be computed from the seed of the coins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.data.corpus import Shard, read_shard
from dp_core.data.hashing import coin, generator, seed_key
from dp_core.data.privacy_units import Unit, UnitTexts, in_blocks, is_held_out, units_of
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary import tokenizer_files

if TYPE_CHECKING:  # the manifest of a release lists the modules that its code executes
    from dp_core.config.data import CanaryConfig

REFERENCES_PER_PATTERN = 32
UNIT_TOKENS = 2  # tokens of a canary that is a whole unit


@dataclass(frozen=True)
class Canary:
    """One canary.

    Args:
        id: its name, for example `HSH-0.02-1`.
        pattern: a string of H (hint) with one S (secret).
        canary_rate: probability that a unit carries it; 0 for a reference, which is never planted.
        tokens: ids of the vocabulary, one for each letter of the pattern, all different.
    """

    id: str
    pattern: str
    canary_rate: float
    tokens: tuple[int, ...]

    @property
    def secret_index(self) -> int:
        """Index of the secret among the tokens."""
        return self.pattern.index("S")

    @property
    def secret(self) -> int:
        """The id of the secret token."""
        return self.tokens[self.secret_index]

    @property
    def is_reference(self) -> bool:
        """Whether the canary is never planted."""
        return self.canary_rate == 0


def candidates(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of all tokens that a canary may hold: every token except special ones.

    So |V| in the paper's exposure is the number of possible secrets.
    """
    special = set(SpecialIds.of(tokenizer).as_tuple())
    return sorted(set(tokenizer.get_vocab().values()) - special)


def draw(vocabulary: Path | str, config: CanaryConfig, seed: int) -> list[Canary]:
    """Return canaries for every pattern and rate, and references of every pattern.

    Args:
        vocabulary: folder of the released vocabulary.
        config: patterns, rates, and the number of canaries for each pattern and rate.
        seed: public coins.

    Raises:
        BadInput: a vocabulary with too few tokens.
    """
    pool = candidates(tokenizer_files.load(vocabulary))
    longest = max(map(len, config.patterns))
    if len(pool) < 2 * longest:
        raise BadInput(
            f"the vocabulary has too few pieces for canaries of {longest} pieces",
            where="vocabulary",
            fix="Raise the vocabulary's ε, or its size.",
        )
    rng = generator(seed_key(seed), "canaries")
    canaries = []
    for pattern in config.patterns:
        for rate in (*config.rates, 0.0):
            for number in range(config.canaries_per_group if rate else REFERENCES_PER_PATTERN):
                name = f"{pattern}-{rate:g}-{number}" if rate else f"{pattern}-reference-{number}"
                tokens = tuple(rng.sample(pool, len(pattern)))
                canaries.append(Canary(name, pattern, rate, tokens))
    return canaries


def carries(canary: Canary, unit_id: str, seed: int) -> bool:
    """Return whether a unit carries a canary; true for a share `canary_rate` of all units."""
    if canary.is_reference:
        return False
    return coin(seed_key(seed), "canary", canary.id, unit_id) < canary.canary_rate


def plant(
    unit_id: str,
    rows: Sequence[Sequence[int]],
    canaries: Sequence[Canary],
    seed: int,
    sequence_length: int,
) -> list[list[int]]:
    """Return a unit's rows with its canaries planted, each at a random position of a random row.

    A canary that fits into no row is left out silently. An error or a message would reveal whether
    a unit is in the data, since canaries can be chosen so that they do not fit into that unit.

    Args:
        unit_id: id of the unit.
        rows: `[CLS] tokens [SEP]`, already bounded to the unit's largest contribution.
        canaries: all canaries; the unit's own coins choose among them.
        seed: public coins, the same as for `draw`.
        sequence_length: S; a row that would grow beyond it loses its last tokens. No canary
            is cut, nor placed inside another.
    """
    carried = [c for c in canaries if carries(c, unit_id, seed)]
    if not carried or not rows:
        return [list(row) for row in rows]
    rng = generator(seed_key(seed), "canary places", unit_id)
    room = sequence_length - 2
    free = [room] * len(rows)
    planted: list[list[Canary]] = [[] for _ in rows]
    for canary in carried:
        fitting = [i for i, left in enumerate(free) if left >= len(canary.tokens)]
        if not fitting:
            continue
        row = rng.choice(fitting)
        planted[row].append(canary)
        free[row] -= len(canary.tokens)
    return [
        _insert(row, chosen, left, rng)
        for row, chosen, left in zip(rows, planted, free, strict=True)
    ]


def texts_with_canaries(
    unit: PrivacyUnit,
    words_per_unit: int,
    holdout: float,
    seed: int,
    canaries: Sequence[tuple[Canary, str]],
    shard: Shard,
) -> Iterator[UnitTexts]:
    """Yield a shard's units in blocks, with their canaries.

    Each planted canary is an additional text of its unit. Held-out units have no texts, but count
    as units.

    Args:
        unit: the protected unit.
        words_per_unit: N, for the unit `example`.
        holdout: share of held-out units.
        seed: public coins.
        canaries: each canary with the text of its tokens.
        shard: the shard.
    """

    def carrying() -> Iterator[Unit]:
        for each in units_of(read_shard(shard), unit, words_per_unit):
            texts: list[str] = []
            if not is_held_out(each.unit_id, holdout, seed_key(seed)):
                more = (text for c, text in canaries if carries(c, each.unit_id, seed))
                texts = [*each.texts, *more]
            yield Unit(each.unit_id, texts)

    return in_blocks(carrying())


def _insert(row: Sequence[int], canaries: list[Canary], room: int, rng: Random) -> list[int]:
    """Return a row whose original tokens are cut to `room`, with canaries at random positions."""
    body = list(row[1:-1][:room])
    drawn = sorted(((rng.randint(0, len(body)), c) for c in canaries), key=lambda p: -p[0])
    for position, canary in drawn:  # from the end, so that earlier positions do not shift
        body[position:position] = canary.tokens
    return [row[0], *body, row[-1]]


def unit_canary_rows(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """Return the rows of canaries that are whole units, `[CLS] tokens [SEP]`, all different.

    Tokens are dealt from shuffled decks of the vocabulary, each token equally often, so that
    canaries share as few tokens as possible.

    Args:
        tokenizer: tokenizer of the released vocabulary.
        count: m, the number of canaries.
        seed: public coins.

    Raises:
        BadInput: the vocabulary is too small for this number of canaries.
    """
    pool, special = candidates(tokenizer), SpecialIds.of(tokenizer)
    if count > math.perm(len(pool), UNIT_TOKENS) // 4:
        raise BadInput(
            f"the vocabulary of {len(pool)} tokens is too small for {count} canaries",
            where="audit_canaries",
            fix="Use fewer canaries, or a larger vocabulary.",
        )
    rng = generator(seed_key(seed), "audit canaries")
    rows: dict[tuple[int, ...], None] = {}
    deck: list[int] = []
    while len(rows) < count:
        if len(deck) < UNIT_TOKENS:
            deck = rng.sample(pool, len(pool))
        rows[tuple(deck.pop() for _ in range(UNIT_TOKENS))] = None
    return [[special.cls, *tokens, special.sep] for tokens in rows]


Coins = NDArray[np.bool_]


def coin_seed(release: PrivacySeed) -> PrivacySeed:
    """Return the seed of the coins of one release; its salted hash may be published.

    A verifier who later receives the seed can throw the coins again and check the seed's hash.

    Args:
        release: the seed to which the ledger bound the release.
    """
    secret, salt = release.derive("audit coin seed"), release.derive("audit coin salt")
    return PrivacySeed(secret, salt[:16], known=release.known)


def throw_coins(seed: PrivacySeed, canaries: int, stream: int = 0) -> Coins:
    """Return whether each canary is included, by fair, independent coins: (canaries,).

    Args:
        seed: secret seed of the audit, used only for these coins and for null controls.
        canaries: m, the number of canaries.
        stream: 0 for the coins of the training; other streams for null controls.
    """
    key = np.frombuffer(seed.derive("audit coins", stream)[:16], dtype="<u8")
    words = np.random.Philox(key=key).random_raw(canaries)
    return np.asarray(words >> np.uint64(63), np.bool_)


# --- contexts in which a model sees canaries

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
_COUNTED_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class MaskedContexts:
    """Rows with a masked secret each, ready for the model; rows of one canary are adjacent."""

    input_ids: Ints  # [B, S]
    lengths: Ints  # [B] number of tokens of each row without padding
    positions: Ints  # [B] position of the masked secret
    secrets: Ints  # [B] the masked token


# rank [B] of each secret among the candidates, 1 for the model's first choice
Ranker = Callable[[MaskedContexts], Floats]


def alone(canaries: Sequence[Canary], special: SpecialIds, sequence_length: int) -> MaskedContexts:
    """Return one row for each canary: `[CLS] H H S H H [SEP]`, padded to S = sequence_length."""
    return masked([(c, [], []) for c in canaries], special, sequence_length)


def embedded(
    canaries: Sequence[Canary],
    special: SpecialIds,
    sequence_length: int,
    *,
    filler: Sequence[int],
    repeats: int,
    seed: int,
) -> MaskedContexts:
    """Return `repeats` full rows for each canary, at random positions among random tokens.

    Args:
        canaries: planted canaries or references. Each has a separate random stream, so that adding
            a canary changes no other canary's contexts.
        special: ids of the special tokens.
        sequence_length: S; every row is full.
        filler: ids from which the surrounding tokens are drawn uniformly.
        repeats: R rows for each canary, adjacent.
        seed: a public seed.
    """
    pool = np.asarray(filler, np.int64)
    framed = []
    for canary in canaries:
        coins = context_coins(seed, canary)
        room = max(0, sequence_length - 2 - len(canary.tokens))
        for _ in range(repeats):
            around = pool[coins.integers(0, pool.size, room)].tolist()
            cut = int(coins.integers(0, room + 1))
            framed.append((canary, around[:cut], around[cut:]))
    return masked(framed, special, sequence_length)


def masked(
    framed: Sequence[tuple[Canary, list[int], list[int]]], special: SpecialIds, sequence_length: int
) -> MaskedContexts:
    """Return one row for each canary between the tokens before and after it, secret masked."""
    size = len(framed)
    ids = np.full((size, sequence_length), special.pad, np.int32)
    lengths, positions, secrets = (np.zeros(size, np.int32) for _ in range(3))
    for row, (canary, before, after) in enumerate(framed):
        tokens = [special.cls, *before, *canary.tokens, *after, special.sep]
        if len(tokens) > sequence_length:
            raise ValueError(f"a canary of {len(canary.tokens)} tokens needs longer rows")
        ids[row, : len(tokens)] = tokens
        lengths[row] = len(tokens)
        positions[row] = 1 + len(before) + canary.secret_index
        secrets[row] = canary.secret
        ids[row, positions[row]] = special.mask
    return MaskedContexts(ids, lengths, positions, secrets)


def places_of(store: TokenStore, canaries: Sequence[Canary]) -> dict[str, tuple[Ints, Ints]]:
    """Return each canary's occurrences by its id: row numbers, and first token's position.

    Occurrences in the original text count, too. The result is as private as the rows.
    """
    rows_and_places: dict[str, list[NDArray[np.int64]]] = {canary.id: [] for canary in canaries}
    for start in range(0, store.n_rows, _COUNTED_AT_ONCE):
        tokens = store.tokens[start : start + _COUNTED_AT_ONCE]  # padding is no canary's token
        for canary in canaries:
            places = max(0, tokens.shape[1] - len(canary.tokens) + 1)
            held = np.ones((len(tokens), places), np.bool_)
            for offset, token in enumerate(canary.tokens):
                held &= tokens[:, offset : offset + places] == token
            rows_and_places[canary.id].append(np.argwhere(held) + np.array([start, 0]))
    both = {name: np.concatenate(parts).astype(np.int32) for name, parts in rows_and_places.items()}
    return {name: (pairs[:, 0], pairs[:, 1]) for name, pairs in both.items()}


def counted_occurrences(store: TokenStore, canaries: Sequence[Canary]) -> dict[str, int]:
    """Return the number of units that hold each canary, by its id; as private as the rows.

    Canaries that found no room are not counted; occurrences in the original text are.
    """
    return {
        name: len(np.unique(np.searchsorted(store.unit_rows, rows, side="right")))
        for name, (rows, _) in places_of(store, canaries).items()
    }


def context_coins(seed: int, canary: Canary) -> np.random.Generator:
    """Return public coins for the contexts of a canary, independent of other canaries."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *canary.tokens])))
