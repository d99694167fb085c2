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
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.audit.canaries import Canary
from dp_core.audit.null_exposure import null_exposure, null_rank_exposure
from dp_core.audit.protocol import Audit, Finding, NullDistribution
from dp_core.config.audit_settings import ExtractionConfig
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.labels import Label
from dp_core.privacy.accounting.tradeoff import PrivacyProfile

if TYPE_CHECKING:
    from dp_core.audit.extraction import OddsOf

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

ALONE, EMBEDDED, IN_ROWS = "alone", "embedded", "in rows"
CONTEXTS_PER_CANARY = 8
_COUNTED_AT_ONCE = 1 << 14
_UNIFORM_SPREAD = 1 / math.sqrt(3)  # standard deviation over mean of the uniform law on [0, V]


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
        coins = _coins(seed, canary)
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
    data: CanaryData, repeats: int = CONTEXTS_PER_CANARY
) -> tuple[MaskedContexts, list[Canary], list[Canary]]:
    """Return contexts for canaries in the rows of the training, and for references in their place.

    Each canary appears in `repeats` of its occurrences, chosen by public coins, with repetitions if
    there are fewer. A reference replaces the tokens of planted canaries of its pattern in their
    rows, so the surrounding row was part of the training and only the reference was not.

    Returns:
        The contexts, those of one canary adjacent; the planted canaries that occur in the rows; and
        the references whose pattern occurs there.
    """
    store, found = data.train, places_of(data.train, data.planted)
    places = {name: pair for name, pair in found.items() if len(pair[0])}
    planted = [canary for canary in data.planted if canary.id in places]
    by_pattern: dict[str, list[tuple[Ints, Ints]]] = {}
    for canary in planted:
        by_pattern.setdefault(canary.pattern, []).append(places[canary.id])
    others = [reference for reference in data.references if reference.pattern in by_pattern]
    for reference in others:
        rows, starts = zip(*by_pattern[reference.pattern], strict=True)
        places[reference.id] = np.concatenate(rows), np.concatenate(starts)
    framed = []
    for canary in (*planted, *others):
        rows_of, starts_of = places[canary.id]
        chosen = np.resize(_coins(data.seed, canary).permutation(len(rows_of))[:repeats], repeats)
        for number, start in zip(rows_of[chosen].tolist(), starts_of[chosen].tolist(), strict=True):
            row = store.tokens[number, : store.lengths[number]].tolist()
            framed.append((canary, row[1:start], row[start + len(canary.tokens) : -1]))
    return _masked(framed, data.special, store.tokens.shape[1]), planted, others


def _coins(seed: int, canary: Canary) -> np.random.Generator:
    """Return public coins for the contexts of a canary, independent of other canaries."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *canary.tokens])))


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
    rank_exposure_null: float  # expectation without memory
    rank_exposure_null_low: float
    rank_exposure_null_high: float
    rank_exposure_p_value: float  # P(a rank exposure this large | nothing remembered)
    rank_exposure_ceiling: float  # log2(references + 1): first place for every canary
    references: int

    @property
    def remembers(self) -> bool:
        """Whether the whole interval exceeds the null band of a model without memory."""
        return self.low > self.null_high


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


def measure(data: CanaryData) -> list[ExposureRow]:
    """Return the exposure of every group of canaries, alone and embedded.

    Secrets are ranked among the candidates alone. A rank among the whole vocabulary would also
    measure how likely the model finds these tokens in general, and the null would not hold.

    Raises:
        ValueError: no canaries, a canary too long for a row, or ranks outside 1 … |candidates|.
    """
    if not data.planted:
        raise ValueError("no canaries to measure")
    sequences = [*data.planted, *data.references]
    contexts = {
        ALONE: alone(sequences, data.special, data.sequence_length),
        EMBEDDED: embedded(
            sequences,
            data.special,
            data.sequence_length,
            filler=data.candidates,
            repeats=CONTEXTS_PER_CANARY,
            seed=data.seed,
        ),
    }
    return [
        row
        for context, shown in contexts.items()
        for row in _ranked(data, context, shown, data.planted, data.references)
    ]


def measure_in_rows(data: CanaryData) -> list[ExposureRow]:
    """Return the exposure of every group of canaries in the rows of the training: private.

    The result is empty if no canary occurs in the rows.

    Raises:
        ValueError: ranks outside 1 … |candidates|.
    """
    shown, planted, others = in_rows(data)
    return _ranked(data, IN_ROWS, shown, planted, others) if planted else []


def _ranked(
    data: CanaryData,
    context: str,
    shown: MaskedContexts,
    planted: Sequence[Canary],
    references: Sequence[Canary],
) -> list[ExposureRow]:
    """Return the exposure of canaries that are shown in contexts, together with references."""
    ranks = secret_ranks(data.rank, shown, len(data.candidates))
    ranks = ranks.reshape(len(planted) + len(references), -1)
    return rows_from_ranks(
        planted,
        ranks[: len(planted)],
        references,
        ranks[len(planted) :],
        context=context,
        candidates=len(data.candidates),
        declared_units=data.declared_units,
    )


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
        rank_exposure = _mean_rank_exposure(group, baseline)
        rank_null = null_rank_exposure(baseline.size, group.size)
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
                p_value=null.p_value(exposure),
                rank_exposure=rank_exposure,
                rank_exposure_null=rank_null.expected,
                rank_exposure_null_low=rank_null.low,
                rank_exposure_null_high=rank_null.high,
                rank_exposure_p_value=rank_null.p_value(rank_exposure),
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
        largest_null_high=null_exposure(candidates, smallest_group).largest_of(len(shown)).high,
        largest_group=f"{largest.pattern} at p = {largest.canary_rate:g}",
        remembers=any(row.remembers for row in shown),
    )


def secret_ranks(rank: Ranker, shown: MaskedContexts, candidates: int) -> Floats:
    """Return the rank of every secret [B], and refuse ranks outside 1 … |candidates|."""
    ranks = rank(shown)
    if not ((ranks >= 1) & (ranks <= candidates)).all():  # also refuses NaN
        raise ValueError(f"the model's ranks are not within 1 … {candidates}")
    return ranks


def _mean_rank_exposure(ranks: Floats, baseline: Floats) -> float:
    """Return the mean of log2 R − log2(rank among R), R counting itself (Carlini et al. 2019).

    A tie counts half: equal ranks show no memory of either canary.
    """
    ahead = (baseline[None, :] < ranks[:, None]).sum(axis=1)
    tied = (baseline[None, :] == ranks[:, None]).sum(axis=1)
    among_references = 1 + ahead + tied / 2
    return math.log2(baseline.size + 1) - float(np.log2(among_references).mean())


# --- as findings


@dataclass(frozen=True)
class CanaryData:
    """A model, and the canaries that were planted in the rows of its training.

    Attributes:
        rank: ranks of secrets by the model, among `candidates`.
        canaries: planted canaries, and references that were never planted.
        special: ids of the special tokens.
        candidates: ids of the tokens from which secrets were drawn.
        sequence_length: largest number of tokens of a row.
        train: rows of the training.
        declared_units: public bound on the units, for the expected number of occurrences.
        label: label of results that are computed from the model and public coins alone.
        seed: a public seed.
        odds_of: a causal model's odds of suffixes; None for a masked model.
        held_out: rows of held-out units, if any were held out.
        extraction: the protocol of extraction attacks.
        fixed_before_training: whether this protocol was fixed before the training.
        claim: privacy profile of the rows' unit; None without a claim.

    Raises:
        ValueError: a secret is no candidate.
    """

    rank: Ranker
    canaries: Sequence[Canary]
    special: SpecialIds
    candidates: Sequence[int]
    sequence_length: int
    train: TokenStore
    declared_units: int
    label: Label
    seed: int
    odds_of: OddsOf | None = None
    held_out: TokenStore | None = None
    extraction: ExtractionConfig = field(default_factory=ExtractionConfig)
    fixed_before_training: bool = False
    claim: PrivacyProfile | None = None

    def __post_init__(self) -> None:
        if not {canary.secret for canary in self.canaries} <= set(self.candidates):
            raise ValueError("a canary's secret is not among the candidates that it is ranked with")

    @property
    def planted(self) -> list[Canary]:
        """Canaries that units of the training may carry."""
        return [canary for canary in self.canaries if not canary.is_reference]

    @property
    def references(self) -> list[Canary]:
        """Canaries that were never planted."""
        return [canary for canary in self.canaries if canary.is_reference]


def exposure_finding(
    audit: Audit, rows: Sequence[ExposureRow], context: str, label: Label
) -> Finding:
    """Return the finding of the group with the largest exposure in a context, if there is any."""
    shown = [row for row in rows if row.context == context]
    if not shown:
        return audit.not_run("The training rows contain no canary.", label)
    summary = summarise(rows, context)
    largest = max(shown, key=lambda row: row.exposure)
    count = sum(row.canaries for row in shown)
    if summary.remembers:
        result = "The model remembers canaries"
    elif summary.above_chance:
        result = "Exposure is above chance, but no single group is clearly remembered"
    else:
        result = "No exposure is above chance"
    return audit.finding(
        level="canary",
        value=largest.exposure,
        interval=(largest.low, largest.high),
        confidence=0.95,
        ceiling=math.log2(largest.candidates),
        ceiling_of=f"log2 of {largest.candidates} candidates, if every secret is ranked first."
        " The claim does not bound the exposure of canaries that many units contain",
        power=f"{count} canaries in {len(shown)} groups, expected up to"
        f" {max(row.expected_occurrences for row in shown):,.0f} times in the text; a group"
        f" whose interval lies above {largest.null_high:.2f} bits counts as remembered",
        null_control=NullDistribution(
            of=f"the largest of {len(shown)} groups if the rank of every secret is uniform",
            low=0.0,
            high=summary.largest_null_high,
            alarm_rate=0.025,
            p_value=1 - (1 - largest.p_value) ** len(shown),
        ),
        verdict="consistent" if not summary.above_chance else "inconclusive",
        finding=f"{result}: at most {largest.exposure:.2f} bits ({summary.largest_group}),"
        f" {summary.mean:.2f} on average. Without memory they are below"
        f" {summary.largest_null_high:.2f} and {summary.mean_null_high:.2f} in 97.5% of cases.",
        label=label,
        rows=tuple(map(asdict, rows)),
        metrics={
            audit.key: summary.mean,
            f"{audit.key}_largest": summary.largest,
            **{
                f"exposure/{row.context}/{row.pattern} at {row.canary_rate:g}": row.exposure
                for row in rows
            },
        },
    )


EXPOSURE: Audit = Audit(
    "exposure",
    "Canary exposure",
    "log2 of the number of candidates minus log2 of the mean rank of a canary's masked secret, in"
    " bits, for the group with the largest value, among random tokens from a public seed (Carlini"
    " et al. 2019; Hoory et al. 2021, 5.2)",
    "exposure",
    # No private row is shown, so the finding has the label of the model.
    lambda data: [exposure_finding(EXPOSURE, measure(data), EMBEDDED, data.label)],
)
EXPOSURE_IN_ROWS: Audit = Audit(
    "exposure_in_rows",
    "Canary exposure in training rows",
    "canary exposure, measured as in the papers on the private training rows that contain the"
    " canaries, for the group with the largest value",
    "exposure",
    lambda data: [
        exposure_finding(EXPOSURE_IN_ROWS, measure_in_rows(data), IN_ROWS, Label.OPERATOR)
    ],
)
