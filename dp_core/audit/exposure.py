"""Exposure: how far a model favours the secrets of canaries planted in its training data.

exposure = log2|V| − log2(mean rank of the secret), Hoory et al. 2021, section 5.2, for every group
of canaries with one pattern and one rate; and Carlini et al. 2019's rank among references that
were never planted. Contexts in which canaries appear alone or among random tokens use no private
row, so these readings have the label of the model. Contexts in the rows of the training, as in the
papers, use private rows, so these readings are for the operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.audit.canaries import Canary
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
# (input_ids [B, S], lengths [B], positions [B], secrets [B]) -> rank [B] of each secret among the
# candidates, 1 for the model's first choice
Ranker = Callable[[Ints, Ints, Ints, Ints], Floats]

ALONE, EMBEDDED, IN_ROWS = "alone", "embedded", "in rows"
_ROWS_AT_ONCE = 256
_COUNTED_AT_ONCE = 1 << 14
_UNIFORM_SPREAD = 1 / math.sqrt(3)  # standard deviation over mean of the uniform law on [0, V]
_LATTICE_POINTS = 1 << 21  # exact up to n·V of two million; above that, ranks are binned
_RESOLUTION = 1e-12  # floating-point error of the convolution stays below it
_CELLS, _CELLS_IN_ALL = 1 << 16, 1 << 22  # sizes of the lattice on which rank exposures are added
_EXACT_CANARIES = 8  # up to this number, each possible mean rank exposure has its exact probability


@dataclass(frozen=True)
class MaskedContexts:
    """Rows with a masked secret each, ready for the model; rows of one canary are adjacent."""

    input_ids: Ints  # [B, S]
    lengths: Ints  # [B] number of tokens of each row without padding
    positions: Ints  # [B] position of the masked secret
    secrets: Ints  # [B] the masked token


def alone(canaries: Sequence[Canary], special: SpecialIds, sequence_length: int) -> MaskedContexts:
    """Return one row for each canary: `[CLS] H H S H H [SEP]`, padded to S = sequence_length."""
    return _masked([(c, [], []) for c in canaries], special, sequence_length)


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
        coins = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([seed, *canary.tokens]))
        )
        room = max(0, sequence_length - 2 - len(canary.tokens))
        for _ in range(repeats):
            around = pool[coins.integers(0, pool.size, room)].tolist()
            cut = int(coins.integers(0, room + 1))
            framed.append((canary, around[:cut], around[cut:]))
    return _masked(framed, special, sequence_length)


def _masked(
    framed: Sequence[tuple[Canary, list[int], list[int]]],
    special: SpecialIds,
    sequence_length: int,
) -> MaskedContexts:
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
    found: dict[str, list[NDArray[np.int64]]] = {canary.id: [] for canary in canaries}
    for start in range(0, store.n_rows, _COUNTED_AT_ONCE):
        tokens = store.tokens[start : start + _COUNTED_AT_ONCE]  # padding is no canary's token
        for canary in canaries:
            places = max(0, tokens.shape[1] - len(canary.tokens) + 1)
            held = np.ones((len(tokens), places), np.bool_)
            for offset, token in enumerate(canary.tokens):
                held &= tokens[:, offset : offset + places] == token
            found[canary.id].append(np.argwhere(held) + np.array([start, 0]))
    both = {name: np.concatenate(parts).astype(np.int32) for name, parts in found.items()}
    return {name: (pairs[:, 0], pairs[:, 1]) for name, pairs in both.items()}


def counted_occurrences(store: TokenStore, canaries: Sequence[Canary]) -> dict[str, int]:
    """Return the number of units that hold each canary, by its id; as private as the rows.

    Canaries that found no room are not counted; occurrences in the original text are.
    """
    return {
        name: len(np.unique(np.searchsorted(store.unit_rows, rows, side="right")))
        for name, (rows, _) in places_of(store, canaries).items()
    }


def in_rows(
    store: TokenStore,
    canaries: Sequence[Canary],
    references: Sequence[Canary],
    special: SpecialIds,
    *,
    repeats: int,
    seed: int,
) -> tuple[MaskedContexts, list[Canary], list[Canary]]:
    """Return contexts for canaries in the rows of the training, and for references in their place.

    Each canary appears in `repeats` of its occurrences, chosen by public coins, with repetitions if
    there are fewer. A reference replaces the tokens of planted canaries of its pattern in their
    rows, so the surrounding row was part of the training and only the reference was not.

    Args:
        store: the rows of the training.
        canaries: the planted canaries.
        references: canaries that were never planted.
        special: ids of the special tokens.
        repeats: R rows for each canary, adjacent.
        seed: a public seed.

    Returns:
        The contexts, the planted canaries that occur in the store, and the references whose pattern
        occurs there.
    """
    places = {name: pair for name, pair in places_of(store, canaries).items() if len(pair[0])}
    planted = [canary for canary in canaries if canary.id in places]
    by_pattern: dict[str, list[tuple[Ints, Ints]]] = {}
    for canary in planted:
        by_pattern.setdefault(canary.pattern, []).append(places[canary.id])
    others = [reference for reference in references if reference.pattern in by_pattern]
    for reference in others:
        rows, starts = zip(*by_pattern[reference.pattern], strict=True)
        places[reference.id] = np.concatenate(rows), np.concatenate(starts)
    shown = [*planted, *others]
    ids = np.empty((len(shown) * repeats, store.tokens.shape[1]), np.int32)
    lengths, positions = (np.empty(len(ids), np.int32) for _ in range(2))
    for number, canary in enumerate(shown):
        held, first = places[canary.id]
        coins = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([seed, *canary.tokens]))
        )
        chosen = np.resize(coins.permutation(len(held))[:repeats], repeats)
        for context, place in enumerate(chosen.tolist(), number * repeats):
            row, start = int(held[place]), int(first[place])
            ids[context], lengths[context] = store.tokens[row], store.lengths[row]
            ids[context, start : start + len(canary.tokens)] = canary.tokens
            positions[context] = start + canary.secret_index
    ids[np.arange(len(ids)), positions] = special.mask
    secrets = np.repeat([canary.secret for canary in shown], repeats).astype(np.int32)
    return MaskedContexts(ids, lengths, positions, secrets), planted, others


@dataclass(frozen=True)
class NullExposure:
    """Exposure, in bits, of a model without memory: expectation and central 95% band."""

    expected: float
    low: float
    high: float


@lru_cache(maxsize=32)
def _mean_rank_law(candidates: int, canaries: int) -> tuple[NDArray[np.float64], ...]:
    """Return (mean ranks [K] ascending, their cumulative probabilities [K])."""
    cells = min(candidates, max(64, _LATTICE_POINTS // canaries))
    size = canaries * (cells - 1) + 1
    one = np.fft.rfft(np.full(cells, 1 / cells), size)
    law = np.maximum(np.fft.irfft(one**canaries, size), 0.0)  # law of the sum: n-fold convolution
    # Cell k of `cells` represents ranks near (k + 1/2)·V/cells + 1/2, exactly if cells = V.
    sums = np.arange(law.size) / canaries
    ranks = (sums + 0.5) * (candidates / cells) + 0.5
    return ranks, np.minimum(np.cumsum(law), 1.0)


def null_exposure(candidates: int, canaries: int, groups: int = 1) -> NullExposure:
    """Return the null distribution of the largest exposure of `groups` independent groups.

    Args:
        candidates: V, the number of tokens among which a secret is drawn and ranked.
        canaries: n, the number of canaries whose ranks are averaged in each group.
        groups: number of groups from which the reader picks the largest exposure.

    Raises:
        ValueError: an argument is below 1.
    """
    if min(candidates, canaries, groups) < 1:
        raise ValueError(f"need at least one of each: {candidates=}, {canaries=}, {groups=}")
    ranks, below = _mean_rank_law(candidates, canaries)
    # The largest exposure belongs to the smallest mean rank: P(min ≤ r) = 1 − (1 − P(r))^groups.
    smallest = 1.0 - (1.0 - below) ** groups
    bits = math.log2(candidates) - np.log2(ranks)
    weights = np.diff(smallest, prepend=0.0)
    quantile = np.searchsorted(smallest, [0.025, 0.975])
    high, low = bits[np.minimum(quantile, bits.size - 1)]
    return NullExposure(expected=float(weights @ bits), low=float(low), high=float(high))


def null_p_value(mean_rank: float, candidates: int, canaries: int) -> float:
    """Return P(mean rank of n uniform secrets ≤ `mean_rank`), or 1e-12 where it is smaller."""
    ranks, below = _mean_rank_law(candidates, canaries)
    index = int(np.searchsorted(ranks, mean_rank + 1e-9, side="right")) - 1
    return max(float(below[index]), _RESOLUTION) if index >= 0 else _RESOLUTION


def null_rank_exposure(references: int) -> float:
    """Return the expected rank exposure of an unremembered canary among `references` others.

    By exchangeability the canary's rank among R = references + 1 is uniform, so this is the mean of
    log2 R − log2 k over k = 1 … R (Carlini et al. 2019, definition 4): about log2 e = 1.44 bits.
    """
    size = references + 1
    return math.log2(size) - float(np.log2(np.arange(1, size + 1)).mean())


@lru_cache(maxsize=32)
def _rank_exposure_law(references: int, canaries: int) -> tuple[NDArray[np.float64], ...]:
    """Return (mean rank exposures [K] descending, probabilities [K] of at least this exposure).

    n canaries compared with the same references are not independent. Without memory all n + R
    scores are exchangeable, so every way to spread the canaries over the R + 1 gaps between the
    references is equally likely (Wilcoxon 1945). The sum of log2(1 + references ahead) has the
    generating function ∏ₖ 1/(1 − z·x^log2(1 + k)), of which the coefficient of zⁿ is computed on a
    lattice. A value between two lattice points is divided between them, which keeps means exact.
    """
    steps = np.log2(np.arange(1, references + 2))  # (R + 1,) bits that a canary in gap k lacks
    cells = min(_CELLS, max(64, _CELLS_IN_ALL // canaries))
    cell = canaries * float(steps[-1]) / (cells - canaries - 2) if references else 1.0
    law = np.zeros((canaries + 1, cells))
    law[0, 0] = 1.0
    for step in steps / cell:
        whole, part = int(step), float(step - int(step))
        for count in range(1, canaries + 1):
            before = law[count - 1]
            law[count, whole:] += (1 - part) * before[: cells - whole]
            law[count, whole + 1 :] += part * before[: cells - whole - 1]
    of_sum = law[canaries] / law[canaries].sum()
    bits = steps[-1] - np.arange(cells) * cell / canaries
    return bits, np.minimum(np.cumsum(of_sum), 1.0)


def null_mean_rank_exposure(references: int, canaries: int) -> NullExposure:
    """Return the null distribution of the mean rank exposure of n canaries with one reference set.

    The result is exact where no two of the n + R ranks are equal, except for the lattice, which
    spreads the law by 0.0003 bits for n up to 64, and by 0.03 for n = 1,000. A tie counts half.

    Raises:
        ValueError: an argument is below 1.
    """
    if min(references, canaries) < 1:
        raise ValueError(f"need at least one of each: {references=}, {canaries=}")
    bits, above = _rank_exposure_law(references, canaries)
    high, low = bits[np.minimum(np.searchsorted(above, [0.025, 0.975]), bits.size - 1)]
    return NullExposure(float(np.diff(above, prepend=0.0) @ bits), float(low), float(high))


def null_rank_p_value(rank_exposure: float, references: int, canaries: int) -> float:
    """Return P(mean rank exposure of n unremembered canaries ≥ `rank_exposure`).

    Values that the lattice cannot distinguish from the measured value count as well: dividing
    values between two points moves a sum by up to n cells. With many canaries the effect is
    negligible.
    """
    bits, above = _rank_exposure_law(references, canaries)
    moved = canaries * float(bits[0] - bits[1]) if canaries <= _EXACT_CANARIES else 0.0
    index = int(np.searchsorted(-bits, moved - rank_exposure + 1e-9, side="right")) - 1
    return max(float(above[index]), _RESOLUTION) if index >= 0 else _RESOLUTION


@dataclass(frozen=True)
class ExposureRow:
    """One group of canaries in one kind of context. Exposures are in bits."""

    pattern: str
    canary_rate: float  # probability that a unit carries one of them
    context: str  # alone | embedded | in rows
    expected_occurrences: float  # canary_rate × declared units: public, unlike the number realised
    canaries: int
    contexts_per_canary: int
    candidates: int  # |V|: number of tokens from which secrets are drawn and ranked
    exposure: float
    low: float  # 95% confidence interval over canaries
    high: float
    null_expected: float  # exposure without memory, for a group of this size
    null_low: float
    null_high: float
    p_value: float  # P(a mean rank this small | nothing remembered)
    rank_exposure: float  # mean over canaries, against references
    rank_exposure_null: float
    rank_exposure_ceiling: float  # log2(references + 1): first place for every canary
    references: int

    @property
    def remembers(self) -> bool:
        """Whether the whole interval exceeds the null band of a model without memory."""
        return self.low > self.null_high

    @property
    def rank_null(self) -> NullExposure:
        """The null distribution of the group's rank exposure."""
        return null_mean_rank_exposure(self.references, self.canaries)

    @property
    def rank_p_value(self) -> float:
        """P(a rank exposure this large | nothing remembered)."""
        return null_rank_p_value(self.rank_exposure, self.references, self.canaries)


@dataclass(frozen=True)
class ExposureSummary:
    """All groups of one model in one kind of context, for the closing table. In bits."""

    mean: float  # by the mean rank over all canaries
    mean_null_high: float  # upper end of the null's 95% band for the mean
    largest: float
    largest_null_high: float  # upper end of the null's 95% band for the largest of the groups
    largest_group: str
    remembers: bool  # whether some group's whole interval exceeds the null band

    @property
    def above_chance(self) -> bool:
        """Whether mean or largest exposure exceeds the value of 97.5% of models without memory."""
        return self.mean > self.mean_null_high or self.largest > self.largest_null_high


def measure(
    rank: Ranker,
    canaries: Sequence[Canary],
    references: Sequence[Canary],
    *,
    special: SpecialIds,
    candidates: Sequence[int],
    declared_units: int,
    sequence_length: int,
    repeats: int,
    seed: int,
) -> list[ExposureRow]:
    """Return the exposure of every group of canaries, alone and embedded.

    Args:
        rank: ranks masked secrets among `candidates`, and no other tokens.
        canaries: the planted canaries, grouped here by pattern and canary rate.
        references: canaries that were never planted, compared within their pattern.
        special: ids of the special tokens.
        candidates: ids of all the tokens from which secrets are drawn uniformly. A rank among the
            whole vocabulary would also measure how likely the model finds these tokens in general,
            and the null would not hold.
        declared_units: public bound on the units, for the expected number of occurrences.
        sequence_length: S, at most the model's positions.
        repeats: embedded contexts for each canary.
        seed: a public seed.

    Raises:
        ValueError: no canaries, a secret that is no candidate, a canary too long for S, or ranks
            outside 1 … |candidates|.
    """
    if not canaries:
        raise ValueError("no canaries to measure")
    sequences = [*canaries, *references]
    _refuse_strangers(sequences, candidates)
    contexts = {
        ALONE: alone(sequences, special, sequence_length),
        EMBEDDED: embedded(
            sequences, special, sequence_length, filler=candidates, repeats=repeats, seed=seed
        ),
    }
    rows = []
    for context, masked in contexts.items():
        ranks = secret_ranks(rank, masked, len(candidates)).reshape(len(sequences), -1)
        rows += rows_from_ranks(
            canaries,
            ranks[: len(canaries)],
            references,
            ranks[len(canaries) :],
            context=context,
            candidates=len(candidates),
            declared_units=declared_units,
        )
    return rows


def measure_in_rows(
    rank: Ranker,
    store: TokenStore,
    canaries: Sequence[Canary],
    references: Sequence[Canary],
    *,
    special: SpecialIds,
    candidates: Sequence[int],
    declared_units: int,
    repeats: int,
    seed: int,
) -> list[ExposureRow]:
    """Return the exposure of every group of canaries in the rows of the training: private.

    The result is empty if no canary occurs in the store.

    Args: as for `measure`, and
        store: the rows of the training, no longer than the model's positions.

    Raises:
        ValueError: as `measure`.
    """
    _refuse_strangers([*canaries, *references], candidates)
    shown, planted, others = in_rows(
        store, canaries, references, special, repeats=repeats, seed=seed
    )
    if not planted:
        return []
    ranks = secret_ranks(rank, shown, len(candidates)).reshape(-1, repeats)
    return rows_from_ranks(
        planted,
        ranks[: len(planted)],
        others,
        ranks[len(planted) :],
        context=IN_ROWS,
        candidates=len(candidates),
        declared_units=declared_units,
    )


def _refuse_strangers(canaries: Sequence[Canary], candidates: Sequence[int]) -> None:
    if not {c.secret for c in canaries} <= set(candidates):
        raise ValueError("a canary's secret is not among the candidates that it is ranked with")


def rows_from_ranks(
    canaries: Sequence[Canary],
    ranks: Floats,
    references: Sequence[Canary],
    reference_ranks: Floats,
    *,
    context: str,
    candidates: int,
    declared_units: int,
) -> list[ExposureRow]:
    """Return a row for each pattern (short ones first) and rate; ranks are [canaries, contexts].

    A canary counts once: its ranks are averaged over its contexts before anything else, since
    contexts of one canary share its secret and are no independent evidence.
    """
    groups: dict[tuple[str, float], list[float]] = {}
    for canary, rank in zip(canaries, ranks.mean(axis=1), strict=True):
        groups.setdefault((canary.pattern, canary.canary_rate), []).append(float(rank))
    baselines: dict[str, list[float]] = {}
    for reference, rank in zip(references, reference_ranks.mean(axis=1), strict=True):
        baselines.setdefault(reference.pattern, []).append(float(rank))
    rows = []
    for pattern, rate in sorted(groups, key=lambda group: (len(group[0]), group)):
        group = np.array(groups[pattern, rate])
        baseline = np.array(baselines.get(pattern, []))
        exposure, low, high = interval(group, candidates)
        null = null_exposure(candidates, group.size)
        rows.append(
            ExposureRow(
                pattern=pattern,
                canary_rate=rate,
                context=context,
                expected_occurrences=rate * declared_units,
                canaries=group.size,
                contexts_per_canary=ranks.shape[1],
                candidates=candidates,
                exposure=exposure,
                low=low,
                high=high,
                null_expected=null.expected,
                null_low=null.low,
                null_high=null.high,
                p_value=null_p_value(float(group.mean()), candidates, group.size),
                rank_exposure=float(_rank_exposures(group, baseline).mean()),
                rank_exposure_null=null_rank_exposure(baseline.size),
                rank_exposure_ceiling=math.log2(baseline.size + 1),
                references=baseline.size,
            )
        )
    return rows


def interval(ranks: Floats, candidates: int) -> tuple[float, float, float]:
    """Return exposure and its 95% confidence interval over canaries, in bits, within [0, log2|V|].

    Student's t for the mean rank on the log scale (delta method). The ranks' coefficient of
    variation is bounded below by 1/√3, the value of ranks without memory: four canaries with equal
    ranks do not prove a smaller spread, but would give the plain t interval and the bootstrap a
    width of zero. Simulated coverage: 0.98 or more without memory at any n ≥ 2 (percentile
    bootstrap: 0.81 at n = 4); 0.86 to 0.99 at n = 4 for log-normal ranks with a spread of 2 bits or
    less. The interval is too narrow for rare failures (nine canaries in ten at rank 1, the tenth
    forgotten: 0.33 at n = 4, 0.85 at n = 24), and then errs by calling exposure high. The interval
    of a single canary is [0, log2|V|].

    Args:
        ranks: [n] mean rank of each canary.
        candidates: |V|.
    """
    ceiling = math.log2(candidates)
    mean = float(ranks.mean())
    point = ceiling - math.log2(mean)
    if ranks.size < 2:
        return point, 0.0, ceiling
    spread = max(float(ranks.std(ddof=1)) / mean, _UNIFORM_SPREAD)
    half = float(stats.t.ppf(0.975, ranks.size - 1)) * spread / math.sqrt(ranks.size) / math.log(2)
    return point, max(0.0, point - half), min(ceiling, point + half)


def summarise(rows: Sequence[ExposureRow], context: str = EMBEDDED) -> ExposureSummary:
    """Return the summary of one model's groups in one context.

    The context must be chosen beforehand: the larger of two contexts would need a wider null.

    Raises:
        ValueError: no row has this context.
    """
    shown = [row for row in rows if row.context == context]
    if not shown:
        raise ValueError(f"no exposure was measured in the context {context!r}")
    candidates = shown[0].candidates
    total = sum(row.canaries for row in shown)
    # Convert bits back to mean ranks, so that the average is over canaries and not over groups.
    mean_rank = sum(row.canaries * candidates * 2.0**-row.exposure for row in shown) / total
    largest = max(shown, key=lambda row: row.exposure)
    smallest_group = min(row.canaries for row in shown)  # its null is the widest
    return ExposureSummary(
        mean=math.log2(candidates) - math.log2(mean_rank),
        mean_null_high=null_exposure(candidates, total).high,
        largest=largest.exposure,
        largest_null_high=null_exposure(candidates, smallest_group, len(shown)).high,
        largest_group=f"{largest.pattern} at p = {largest.canary_rate:g}",
        remembers=any(row.remembers for row in shown),
    )


def secret_ranks(rank: Ranker, shown: MaskedContexts, candidates: int) -> Floats:
    """Return the rank of every secret [B], computed in batches of one shape."""
    size = shown.secrets.size
    padded = np.resize(np.arange(size), -(-size // _ROWS_AT_ONCE) * _ROWS_AT_ONCE)
    answers = [
        np.asarray(
            rank(
                shown.input_ids[part],
                shown.lengths[part],
                shown.positions[part],
                shown.secrets[part],
            ),
            np.float64,
        )
        for part in padded.reshape(-1, _ROWS_AT_ONCE)
    ]
    ranks: Floats = np.concatenate(answers)[:size]
    if not ((ranks >= 1) & (ranks <= candidates)).all():  # also refuses NaN
        raise ValueError(f"the model's ranks are not within 1 … {candidates}")
    return ranks


def _rank_exposures(ranks: Floats, baseline: Floats) -> Floats:
    """Return log2 R − log2(rank among R) for each canary, R counting itself (Carlini et al. 2019).

    A tie counts half: equal ranks show no memory of either canary.
    """
    ahead = (baseline[None, :] < ranks[:, None]).sum(axis=1)
    tied = (baseline[None, :] == ranks[:, None]).sum(axis=1)
    among_references = 1 + ahead + tied / 2
    exposures: Floats = math.log2(baseline.size + 1) - np.log2(among_references)
    return exposures
