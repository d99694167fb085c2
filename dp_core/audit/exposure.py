"""Exposure: how far a model favours the secrets of canaries planted in its training data.

exposure = log2|V| − log2(mean rank of the secret), Hoory et al. 2021, section 5.2, for every group
of canaries with one pattern and one rate; and Carlini et al. 2019's rank among references that
were never planted. Contexts in which canaries appear alone or among random tokens use no private
row, so these readings have the label of the model. Contexts in the rows of the training, as in the
papers, use private rows, so these readings are for the operator.

Without memory the rank of a uniformly drawn secret is uniform, and the ranks of canaries and
references are exchangeable. This gives the null distributions of exposure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.audit.canaries import (
    Canary,
    Floats,
    MaskedContexts,
    Ranker,
    alone,
    context_coins,
    embedded,
    masked,
    places_of,
)
from dp_core.audit.protocol import Audit, Finding, NullDistribution
from dp_core.config.audit_settings import ExtractionConfig
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.labels import Label
from dp_core.privacy.accounting.tradeoff import PrivacyProfile

if TYPE_CHECKING:
    from dp_core.audit.extraction import OddsOf

ALONE, EMBEDDED, IN_ROWS = "alone", "embedded", "in rows"
CONTEXTS_PER_CANARY = 8
ALARM_RATE = 0.025  # probability that the exposure of a model without memory is above chance
CLEAR_RATE = 0.005  # probability that a model without memory is said to remember canaries
_UNIFORM_SPREAD = 1 / math.sqrt(3)  # standard deviation over mean of the uniform law on [0, V]


def in_rows(
    data: CanaryData, repeats: int = CONTEXTS_PER_CANARY
) -> tuple[MaskedContexts, list[Canary]]:
    """Return contexts for the planted canaries in the rows of the training.

    Each canary appears in `repeats` of its occurrences, chosen by public coins, with repetitions if
    there are fewer. There are no references: they were in no row, and the mean rank of a canary
    over few rows is not exchangeable with the mean of a reference over many rows.

    Returns:
        The contexts, those of one canary adjacent; and the canaries that occur in the rows.
    """
    store, places = data.train, places_of(data.train, data.planted)
    planted = [canary for canary in data.planted if len(places[canary.id][0])]
    framed = []
    for canary in planted:
        rows_of, starts_of = places[canary.id]
        coins = context_coins(data.seed, canary)
        chosen = np.resize(coins.permutation(len(rows_of))[:repeats], repeats)
        for number, start in zip(rows_of[chosen].tolist(), starts_of[chosen].tolist(), strict=True):
            row = store.tokens[number, : store.lengths[number]].tolist()
            framed.append((canary, row[1:start], row[start + len(canary.tokens) : -1]))
    return masked(framed, data.special, store.tokens.shape[1]), planted


@dataclass(frozen=True)
class ExposureRow:
    """One group of canaries in one kind of context. Exposures are in bits."""

    pattern: str
    canary_rate: float  # probability that a unit carries one of them
    context: str  # alone | embedded | in rows
    expected_occurrences: float  # canary_rate × declared units: public, unlike the number realised
    groups: int  # in this context
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
        """Whether chance gives any of the groups such an exposure in a share `CLEAR_RATE` only."""
        return self.p_value * self.groups <= CLEAR_RATE


@dataclass(frozen=True)
class ExposureSummary:
    """All groups of one model in one kind of context, for the closing table. In bits."""

    mean: float  # by the mean rank over all canaries
    mean_null_high: float  # above it with a probability of `ALARM_RATE` / 2 at most without memory
    largest: ExposureRow  # the group with the smallest p-value
    largest_null_high: float  # the same for the largest exposure
    largest_p_value: float  # most that P(a group has so small a p-value | nothing remembered) is

    @property
    def remembers(self) -> bool:
        """Whether the largest exposure is clearly above chance; `CLEAR_RATE` without memory."""
        return self.largest_p_value <= CLEAR_RATE

    @property
    def above_chance(self) -> bool:
        """Whether mean or largest exposure is above chance; `ALARM_RATE` without memory."""
        return self.mean > self.mean_null_high or self.largest.exposure > self.largest_null_high


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

    The result is empty if no canary occurs in the rows. It has no rank exposure.

    Raises:
        ValueError: ranks outside 1 … |candidates|.
    """
    shown, planted = in_rows(data)
    return _ranked(data, IN_ROWS, shown, planted, []) if planted else []


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
                groups=len(groups),
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


def summarise(
    rows: Sequence[ExposureRow], context: str = EMBEDDED, models: int = 1
) -> ExposureSummary:
    """Return the summary of one model's groups in one context.

    Args:
        rows: groups of the model.
        context: must be chosen beforehand, because the larger of two would need a wider null.
        models: number of models whose summaries are searched for memory. The rates then hold for
            all of them together. They are divided by the number of models and groups, which are
            not independent.

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
    largest, tests = min(shown, key=lambda row: (row.p_value, -row.exposure)), len(shown) * models
    of_largest = null_exposure(candidates, largest.canaries)
    return ExposureSummary(
        mean=math.log2(candidates) - math.log2(mean_rank),
        mean_null_high=null_exposure(candidates, total).exceeded_by(ALARM_RATE / 2 / models),
        largest=largest,
        largest_null_high=of_largest.exceeded_by(ALARM_RATE / 2 / tests),
        largest_p_value=min(1.0, tests * largest.p_value),
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


# --- laws of ranks without memory

_LATTICE_POINTS = 1 << 21  # exact up to n·V of two million; above that, ranks are binned
_RESOLUTION = 1e-12  # floating-point error of the convolution stays below it
_CELLS, _CELLS_IN_ALL = 1 << 16, 1 << 22  # sizes of the lattice on which rank exposures are added
_EXACT_CANARIES = 8  # up to this number, each possible mean rank exposure has its exact probability


@dataclass(frozen=True, eq=False)
class NullExposure:
    """The law of an exposure, in bits, of a model without memory.

    Attributes:
        bits: [K] the possible exposures, descending.
        at_least: [K] the probability of at least this exposure.
        tolerance: values that are smaller by at most this count as equal.
    """

    bits: NDArray[np.float64]
    at_least: NDArray[np.float64]
    tolerance: float = 1e-9

    @cached_property
    def expected(self) -> float:
        """The expectation."""
        return float(np.diff(self.at_least, prepend=0.0) @ self.bits)

    @cached_property
    def low(self) -> float:
        """The lower end of the central 95% band."""
        return self.exceeded_by(0.975)

    @cached_property
    def high(self) -> float:
        """The upper end of the central 95% band."""
        return self.exceeded_by(0.025)

    def exceeded_by(self, share: float) -> float:
        """Return the exposure that a model without memory exceeds with at most this probability."""
        place = int(np.searchsorted(self.at_least, share))
        return float(self.bits[min(place, self.bits.size - 1)])

    def p_value(self, exposure: float) -> float:
        """Return the probability of at least this exposure, or 1e-12 where it is smaller."""
        smaller = int(np.searchsorted(self.bits[::-1], exposure - self.tolerance, side="left"))
        if smaller == self.bits.size:
            return _RESOLUTION
        return max(float(self.at_least[self.bits.size - smaller - 1]), _RESOLUTION)


@lru_cache(maxsize=32)
def null_exposure(candidates: int, canaries: int) -> NullExposure:
    """Return the law of a group's exposure without memory.

    Args:
        candidates: V, the number of tokens among which a secret is drawn and ranked.
        canaries: n, the number of canaries whose ranks are averaged.

    Raises:
        ValueError: an argument is below 1.
    """
    if min(candidates, canaries) < 1:
        raise ValueError(f"need at least one of each: {candidates=}, {canaries=}")
    cells = min(candidates, max(64, _LATTICE_POINTS // canaries))
    size = canaries * (cells - 1) + 1
    flat = np.fft.rfft(np.full(cells, 1 / cells), size)
    law = np.maximum(np.fft.irfft(flat**canaries, size), 0.0)  # law of the sum: n-fold convolution
    # Cell k of `cells` represents ranks near (k + 1/2)·V/cells + 1/2, exactly if cells = V.
    sums = np.arange(law.size) / canaries
    ranks = (sums + 0.5) * (candidates / cells) + 0.5
    bits = math.log2(candidates) - np.log2(ranks)
    return NullExposure(bits, np.minimum(np.cumsum(law), 1.0))


@lru_cache(maxsize=32)
def null_rank_exposure(references: int, canaries: int) -> NullExposure:
    """Return the law of the mean rank exposure of n canaries with one set of R references.

    n canaries compared with the same references are not independent. Without memory all n + R
    scores are exchangeable, so every way to spread the canaries over the R + 1 gaps between the
    references is equally likely (Wilcoxon 1945). The sum of log2(1 + references ahead) has the
    generating function ∏ₖ 1/(1 − z·x^log2(1 + k)), of which the coefficient of zⁿ is computed on a
    lattice. A value between two lattice points is divided between them, which keeps means exact.

    The result is exact where no two of the n + R ranks are equal, except for the lattice, which
    spreads the law by 0.0003 bits for n up to 64, and by 0.03 for n = 1,000. A tie counts half.
    Values that the lattice cannot distinguish count as equal: dividing values between two points
    moves a sum by up to n cells. With many canaries the effect is negligible.

    Raises:
        ValueError: fewer than one canary, or a negative number of references.
    """
    if references < 0 or canaries < 1:
        raise ValueError(f"need canaries and references: {references=}, {canaries=}")
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
    moved = cell if canaries <= _EXACT_CANARIES else 0.0
    return NullExposure(bits, np.minimum(np.cumsum(of_sum), 1.0), moved + 1e-9)


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
    largest = summary.largest
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
        f" {max(row.expected_occurrences for row in shown):,.0f} times in the text; a group that"
        f" chance explains in {100 * CLEAR_RATE:g}% of models counts as remembered",
        null_control=NullDistribution(
            of=f"the largest of {len(shown)} groups if the rank of every secret is uniform",
            low=0.0,
            high=summary.largest_null_high,
            alarm_rate=ALARM_RATE,
            p_value=summary.largest_p_value,
        ),
        verdict="consistent" if not summary.above_chance else "inconclusive",
        finding=f"{result}: at most {largest.exposure:.2f} bits"
        f" ({largest.pattern} at p = {largest.canary_rate:g}),"
        f" {summary.mean:.2f} on average. Without memory they are below"
        f" {summary.largest_null_high:.2f} and {summary.mean_null_high:.2f} in 97.5% of cases.",
        label=label,
        rows=tuple(map(asdict, rows)),
        metrics={
            audit.key: summary.mean,
            f"{audit.key}_largest": largest.exposure,
            **{
                f"exposure/{row.context}/{row.pattern} at {row.canary_rate:g}": row.exposure
                for row in rows
            },
        },
    )


EXPOSURE: Audit = Audit.registered(
    "exposure",
    # No private row is shown, so the finding has the label of the model.
    lambda data: [exposure_finding(EXPOSURE, measure(data), EMBEDDED, data.label)],
)
EXPOSURE_IN_ROWS: Audit = Audit.registered(
    "exposure_in_rows",
    lambda data: [
        exposure_finding(EXPOSURE_IN_ROWS, measure_in_rows(data), IN_ROWS, Label.OPERATOR)
    ],
)
