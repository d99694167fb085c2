"""Extraction: whether a causal model continues a prefix with the suffix from its training data.

* *Discoverable* (Carlini et al. 2023, arXiv:2202.07646, definition 3.1): the prefix is the
  beginning of a row of the training, which is extracted if the model continues it as the row does.
  The control are held-out rows, because a good model guesses many suffixes that it never saw.
* *Targeted*, after Carlini et al. 2019 (arXiv:1802.08232): the prefix is the hints of a canary
  before its secret, and the suffix is the secret. The control are canaries that were never planted.

No text is generated. Greedy decoding yields the suffix if and only if every token of the suffix is
the model's first choice after the true tokens before it. The probability p_z that top-k sampling
yields the suffix is the product of the tokens' probabilities. So one forward pass of a row gives
the result for greedy decoding and for any number of samples: with n samples a suffix is
(n, p)-discoverable if 1 − (1 − p_z)ⁿ ≥ p (Hayes et al. 2025, arXiv:2410.19482, definition 3). A
secret is one token, for which beam search of width k and top-k have the same k candidates.

Shapes: n rows, T tokens of a row, the last L of them its suffix.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.audit.canaries import Canary
from dp_core.audit.exposure import CanaryData
from dp_core.audit.membership import CONFIDENCE, Share, clopper_pearson
from dp_core.audit.protocol import Audit, Finding, Level, NullDistribution
from dp_core.config.audit_settings import ExtractionConfig, ExtractionProtocol
from dp_core.data.hashing import digest64, fold, seed_key
from dp_core.data.token_store import TokenStore
from dp_core.labels import Label
from dp_core.privacy.accounting.tradeoff import PrivacyProfile

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Ids = NDArray[np.int32]

GREEDY, TOP_K, SAMPLING = "greedy", "top-k", "sampling"
LEAST_CHANCE = 0.5  # p: a suffix counts as sampled if n tries yield it with this probability
ALARM_RATE = (1 - CONFIDENCE) / 2  # probability of an alarm by chance
ALL = "all"


def draw_prompts(
    store: TokenStore, config: ExtractionConfig, planted: Sequence[Canary], key: bytes
) -> Ids:
    """Return the beginnings of at most `config.extraction_rows` rows, one of a unit: (n, T).

    Each is the prefix shown to the model, followed by the expected suffix.

    Units are independent of each other, but rows of one unit are not, so each unit contributes at
    most one row. Rows that are too short are skipped. Rows with a canary are skipped, too, because
    only rows of the training hold canaries.

    Args:
        store: rows of the form `[CLS] tokens [SEP]`.
        config: lengths of prefix and suffix; [CLS] precedes the prefix.
        planted: the canaries in the training data.
        key: public coins that choose the units and the row of each.
    """
    width = 1 + config.extraction_prefix + config.extraction_suffix
    canaries = {canary.tokens for canary in planted}
    coins = fold(store.unit_keys, digest64(key, "extraction"))
    chosen: list[int] = []
    for unit in np.argsort(coins, kind="stable").tolist():
        if len(chosen) == config.extraction_rows:
            break
        rows = [
            row
            for row in store.rows_of(unit)
            if store.lengths[row] > width  # [SEP] is no text
            and not _holds(store.tokens[row, : store.lengths[row]].tolist(), canaries)
        ]
        if rows:
            chosen.append(rows[int(coins[unit]) % len(rows)])
    return np.asarray(store.tokens[np.array(chosen, np.int64), :width], np.int32)


def _holds(row: list[int], canaries: set[tuple[int, ...]]) -> bool:
    """Return whether a row contains a canary."""
    return any(
        tuple(row[start : start + size]) in canaries
        for size in {len(canary) for canary in canaries}
        for start in range(len(row) - size + 1)
    )


@dataclass(frozen=True)
class Odds:
    """A model's predictions of each suffix.

    Attributes:
        first: (n,) whether all tokens are the model's first choice.
        within: (n,) whether all tokens are among the k likeliest.
        chance: (n,) p_z, the probability that top-k sampling at temperature 1 yields the suffix.
    """

    first: Flags
    within: Flags
    chance: Floats

    def extracted(self, tries: int) -> dict[str, Flags]:
        """Return, for each decoding, which suffixes are extracted: (n,) each."""
        with np.errstate(divide="ignore"):  # a probability of 1
            sampled = -np.expm1(tries * np.log1p(-self.chance))
        return {GREEDY: self.first, SAMPLING: sampled >= LEAST_CHANCE}


# (prompts (n, T), L, k, ids of the tokens that may be drawn, or None for all) -> odds of suffixes
OddsOf = Callable[[Ids, int, int, Sequence[int] | None], Odds]


@dataclass(frozen=True)
class ExtractionRow:
    """Numbers of suffixes extracted by one decoding, for the tested suffixes and the control."""

    decoding: str  # greedy | top-k | sampling
    group: str  # all | the canary rate
    tried: int
    found: int
    control_tried: int
    control_found: int
    ceiling: float | None = None  # the largest share that the claim allows; None without a claim

    @cached_property
    def share(self) -> Share:
        """The share of tested suffixes that are extracted."""
        return clopper_pearson(self.found / self.tried, self.tried)

    @cached_property
    def control_share(self) -> Share:
        """The share of the control that is extracted."""
        return clopper_pearson(self.control_found / self.control_tried, self.control_tried)

    @cached_property
    def p_value(self) -> float:
        """Probability of at least this number, if the control is extracted as easily.

        Fisher's exact test (1934), one-sided.
        """
        return float(self._null.sf(self.found - 1))

    @cached_property
    def null_band(self) -> tuple[float, float]:
        """Central 95% of the share in that case."""
        low, high = (float(self._null.ppf(rate)) for rate in (ALARM_RATE, 1 - ALARM_RATE))
        return low / self.tried, high / self.tried

    @property
    def _null(self) -> Any:
        """The law of the number of extracted suffixes, given the number of both sides together."""
        both = self.tried + self.control_tried, self.found + self.control_found
        return stats.hypergeom(*both, self.tried)

    @property
    def above_chance(self) -> bool:
        """Whether the number is so large that the control explains it only once in forty times."""
        return self.p_value <= ALARM_RATE


def compare(decoding: str, group: str, hits: Flags, control: Flags) -> ExtractionRow:
    """Compare the extracted suffixes of both sides: (n,) and (m,), neither empty."""
    return ExtractionRow(
        decoding, group, len(hits), int(hits.sum()), len(control), int(control.sum())
    )


def discoverable(
    odds_of: OddsOf,
    sides: tuple[TokenStore, TokenStore],
    config: ExtractionConfig,
    planted: Sequence[Canary],
    key: bytes,
    claim: PrivacyProfile | None,
) -> tuple[ExtractionRow, ...]:
    """Return how many rows of the training and how many held-out rows are extracted.

    The result is empty if a side has no rows. Each extraction is a guess that the row is a member.
    For rows of different units, the expected share is at most the claim's TPR at an FPR of the
    control's share. The ceiling is taken at the upper end of the control's interval.

    Args:
        odds_of: predictions of the model.
        sides: rows of the training, and held-out rows.
        config: number of rows, lengths of prefix and suffix, k, and the number of samples.
        planted: the canaries in the training data.
        key: public coins that choose the rows.
        claim: privacy profile of the rows' unit; None without a claim.
    """
    prompts = [draw_prompts(side, config, planted, key) for side in sides]
    if not all(map(len, prompts)):
        return ()
    hits, control = (
        odds_of(side, config.extraction_suffix, config.extraction_top_k, None).extracted(
            config.extraction_tries
        )
        for side in prompts
    )
    rows = [compare(decoding, ALL, hits[decoding], control[decoding]) for decoding in hits]
    if claim is None or not claim.pairs:
        return tuple(rows)
    return tuple(
        replace(row, ceiling=claim.true_positive_rate(row.control_share.high)) for row in rows
    )


def targeted(
    odds_of: OddsOf,
    canaries: Sequence[Canary],
    *,
    begin: int,
    candidates: Sequence[int],
    config: ExtractionProtocol,
) -> tuple[ExtractionRow, ...]:
    """Return how many canaries' secrets are guessed from the hints before them.

    The first rows are for all canaries, the others for the canaries of each rate. The control is
    always all references. The attacker knows the tokens from which a secret is drawn, and draws no
    other tokens. Canaries that begin with their secret have no hint and are left out.

    Args:
        odds_of: predictions of the model.
        canaries: planted canaries, and references.
        begin: id of [CLS], with which every row begins.
        candidates: ids of the tokens from which secrets are drawn.
        config: k, and the number of samples.
    """
    tried = [canary for canary in canaries if canary.secret_index]
    planted = np.array([not canary.is_reference for canary in tried], np.bool_)
    if planted.all() or not planted.any():
        return ()
    rates = np.array([canary.canary_rate for canary in tried])
    hits: dict[str, Flags] = {}
    for hints in {canary.secret_index for canary in tried}:
        places = [place for place, canary in enumerate(tried) if canary.secret_index == hints]
        shown = np.array([[begin, *tried[place].tokens[: hints + 1]] for place in places], np.int32)
        odds = odds_of(shown, 1, config.extraction_top_k, candidates)
        guessed = odds.extracted(config.extraction_tries) | {TOP_K: odds.within}
        for decoding, flags in guessed.items():
            hits.setdefault(decoding, np.zeros(len(tried), np.bool_))[places] = flags
    groups = {ALL: planted} | {f"p = {rate:g}": rates == rate for rate in np.unique(rates[planted])}
    return tuple(
        compare(decoding, group, hits[decoding][chosen], hits[decoding][~planted])
        for group, chosen in groups.items()
        for decoding in (TOP_K, GREEDY, SAMPLING)
    )


# --- as findings


@dataclass(frozen=True)
class Sought:
    """The wording of an extraction audit: the suffixes to extract, and their control.

    Attributes:
        headline: the decoding that decides the verdict.
        level: level of the record.
        what: name of the suffixes, in the plural.
        control: name of the control, in the plural.
        ceiling_of: description of a row's ceiling.
    """

    headline: str
    level: Level
    what: str
    control: str
    ceiling_of: str = ""


FROM_ROWS = Sought(
    GREEDY,
    "example",
    "rows that trained",
    "rows held out",
    "the claim's TPR, over its whole profile, where FPR is what comes out of rows held out",
)
FROM_CANARIES = Sought(TOP_K, "canary", "secrets of planted canaries", "secrets never planted")
_WHEN = {True: "fixed before the training", False: "chosen after it", None: "chosen by who audits"}
_DECODINGS = {
    GREEDY: "greedy decoding",
    TOP_K: "naming the k likeliest tokens",
    SAMPLING: "top-k sampling",
}


def extraction_finding(
    audit: Audit,
    rows: Sequence[ExtractionRow],
    config: ExtractionProtocol,
    sought: Sought,
    fixed: bool | None,
    label: Label,
) -> Finding:
    """Return the result of one protocol as a finding; without rows, of an audit not run.

    Args:
        audit: the audit.
        rows: result of `discoverable` or `targeted`.
        config: prefix, suffix, k and tries.
        sought: the wording of the audit.
        fixed: whether the protocol was fixed before the training; None if the auditor chose it.
        label: audience of the finding.
    """
    of_all = {row.decoding: row for row in rows if row.group == ALL}
    if not of_all:  # the existence of prompts is as private as the result
        why = f"There was nothing to try: no {sought.what}, or no {sought.control}, that the"
        return audit.not_run(f"{why} protocol fits.", label)
    row, alarm = of_all[sought.headline], of_all[sought.headline].above_chance
    low, high = row.null_band
    others = [
        f"{other.found} by {_DECODINGS[decoding]} ({other.control_found} of the control)"
        for decoding, other in of_all.items()
        if decoding != sought.headline
    ]
    shown = (
        f"prefixes of {config.extraction_prefix} tokens, suffixes of {config.extraction_suffix}"
        if sought.headline == GREEDY
        else "the hints before the secret"
    )
    figures = {
        f"{audit.key}/{decoding}{side}": share.value
        for decoding, result in of_all.items()
        for side, share in (("", result.share), ("_control", result.control_share))
    }
    return audit.finding(
        level=sought.level,
        value=row.share.value,
        interval=(row.share.low, row.share.high),
        confidence=CONFIDENCE,
        ceiling=row.ceiling,
        ceiling_of=sought.ceiling_of if row.ceiling is not None else "",
        power=f"{shown}; k = {config.extraction_top_k}; sampling counts where"
        f" {config.extraction_tries} tries give it with a chance of {LEAST_CHANCE:g} or more;"
        f" {_WHEN[fixed]}; {row.tried} {sought.what} against {row.control_tried} {sought.control}:"
        f" a share above {high:.3f} is beyond chance",
        null_control=NullDistribution(
            of=f"{sought.control}, come out as easily as {sought.what}",
            low=low,
            high=high,
            alarm_rate=ALARM_RATE,
            p_value=min(1.0, row.p_value),
        ),
        verdict="inconclusive" if alarm else "consistent",
        finding=f"{row.found} of {row.tried} {sought.what} came out by"
        f" {_DECODINGS[sought.headline]}, and {row.control_found} of {row.control_tried}"
        f" {sought.control}: {'more than' if alarm else 'no more than'} chance explains. Also"
        f" {', '.join(others)}.",
        label=label,
        rows=tuple(map(_figures, rows)),
        metrics=figures,
        details={
            "rows": [asdict(row) for row in rows],
            "settings": config.model_dump(),
            "fixed_before_training": fixed,
        },
    )


def _figures(row: ExtractionRow) -> dict[str, float | str]:
    """Return a row's names and numbers, without intervals."""
    names = ("decoding", "group", "tried", "found", "control_tried", "control_found", "p_value")
    return {name: getattr(row, name) for name in names}


def _from_rows(data: CanaryData) -> list[Finding]:
    """Return the extraction of training rows, if the settings request it: for the operator."""
    if data.odds_of is None or not data.extraction.extraction_rows:
        return []
    rows: tuple[ExtractionRow, ...] = ()
    if data.held_out is not None:
        sides, key = (data.train, data.held_out), seed_key(data.seed)
        rows = discoverable(data.odds_of, sides, data.extraction, data.planted, key, data.claim)
    fixed, label = data.fixed_before_training, Label.OPERATOR
    return [extraction_finding(DISCOVERABLE, rows, data.extraction, FROM_ROWS, fixed, label)]


def _from_canaries(data: CanaryData) -> list[Finding]:
    """Return the extraction of the canaries' secrets from a causal model."""
    if data.odds_of is None:
        return []
    rows = targeted(
        data.odds_of,
        data.canaries,
        begin=data.special.cls,
        candidates=data.candidates,
        config=data.extraction,
    )
    fixed, label = data.fixed_before_training, data.label
    return [extraction_finding(TARGETED, rows, data.extraction, FROM_CANARIES, fixed, label)]


DISCOVERABLE = Audit.registered("extraction_discoverable", _from_rows)
TARGETED = Audit.registered("extraction_targeted", _from_canaries)
