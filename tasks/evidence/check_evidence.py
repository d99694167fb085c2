#!/usr/bin/env python3
"""Check an evidence pack without the software that made it: `pip install dp-accounting`, then

    python check_evidence.py [FOLDER] [--model FOLDER_OF_THE_MODEL]

It reads evidence.json; compares every file's digest with the one named there; holds statement,
releases and ledger extract against each other; reduces every private mechanism to what Google's
`dp_accounting` knows, by the theorem named beside it, and derives ε and the ceilings on attacks
again. Nothing of the software that trained the model is imported.

Exit codes: 0 everything holds; 1 something does not; 2 this is no evidence pack, or it cannot be
checked here; 4 nothing is wrong, but a part could not be derived again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOLDS, FAULTY, NO_PACK, NOT_DERIVED = 0, 1, 2, 4
TOLERANCE = 0.005  # by which a derived number may differ from the one that is claimed
EVIDENCE, SCHEMA = "evidence.json", "evidence.schema.json"
STATEMENT, LEDGER = "privacy_statement.json", "ledger.json"
WEIGHTS = (".safetensors",)
_SETTLED = 1e-3  # two grids that agree so well are fine enough
_FINEST = 1e-6


class NotAPackError(Exception):
    """The folder holds no evidence, or this machine cannot read it."""


class NotDerivedError(Exception):
    """A mechanism that dp_accounting cannot express, and no theorem here reduces to what it can."""


# --- from a mechanism to privacy loss distributions of dp_accounting


@dataclass
class Reduction:
    """A mechanism as a composition of privacy loss distributions (PLD).

    Attributes:
        parts: each makes a PLD on a grid of the spacing that it is given.
        lines: what stands for what, and by which theorem.
        settled: (δ) -> ε where the mechanism, alone, is claimed by Rényi DP; None otherwise.
    """

    parts: list[Callable[[float], Any]] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    settled: Callable[[float], float] | None = None

    def add(self, other: Reduction) -> None:
        """Compose with another."""
        self.parts += other.parts
        self.lines += [line for line in other.lines if line not in self.lines]


_SUBSAMPLED = (
    "the Poisson-subsampled Gaussian is dominated by (1 − q)N(0, σ²) + qN(1, σ²) against N(0, σ²)"
    " (Zhu, Dong and Wang 2022, Theorem 11)"
)


def reduce(event: Mapping[str, Any]) -> Reduction:
    """Return the reduction of a mechanism, as the statement and the ledger record it.

    Raises:
        NotDerivedError: there is none.
    """
    kind = event.get("kind")
    found = _REDUCTIONS.get((str(kind), event.get("version")))
    if found is None:
        raise NotDerivedError(f"no reduction is known for the mechanism {kind!r}")
    return found(event)


def _composed(event: Mapping[str, Any]) -> Reduction:
    return _all_of(event["events"])


def _phrase_rounds(event: Mapping[str, Any]) -> Reduction:
    whole = _all_of(event["rounds"])
    whole.lines.append(
        (
            "rounds: composed, each as if it had been fixed beforehand",
            "adaptive composition of dominating pairs (Zhu, Dong and Wang 2022, Theorem 10)",
        )
    )
    return whole


def _all_of(events: Sequence[Mapping[str, Any]]) -> Reduction:
    whole = Reduction()
    for event in events:
        whole.add(reduce(event))
    return whole


def _poisson(event: Mapping[str, Any]) -> Reduction:
    return _phases([(q, s, n) for q, s, n in event["phases"]], _SUBSAMPLED)


def _cyclic(event: Mapping[str, Any]) -> Reduction:
    cycle = event["cycle"]
    return _phases(
        [(q, s, math.ceil(n / cycle)) for q, s, n in event["phases"]],
        f"noise of at most {cycle} bands on batches from {cycle} parts in turn is ⌈n/{cycle}⌉"
        " Poisson-subsampled Gaussians (Choquette-Choo et al. 2023, Theorem 4)",
    )


def _phases(phases: Sequence[tuple[float, float, int]], theorem: str) -> Reduction:
    whole = Reduction()
    for rate, sigma, times in phases:
        whole.parts.append(_subsampled(rate, sigma, int(times)))
        said = f"{int(times)} × PoissonSampled(q = {rate:.6g}, Gaussian(σ = {sigma:.6g}))"
        whole.lines.append((said, theorem))
    return whole


def _subsampled(rate: float, sigma: float, times: int) -> Callable[[float], Any]:
    def part(spacing: float) -> Any:
        if rate == 1:
            return _gaussian_pld(sigma / math.sqrt(times), spacing)
        one = _library().from_gaussian_mechanism(
            sigma, value_discretization_interval=spacing, sampling_prob=rate
        )
        return one.self_compose(times) if times > 1 else one

    return part


def _truncated(event: Mapping[str, Any]) -> Reduction:
    units, cap = event["declared_units"], event["cap"]
    whole = Reduction()
    for rate, sigma, times in event["phases"]:
        cuts = list(_cuts(units, cap, rate))

        def profile(
            eps: Any, q: float = rate, mu: float = 1 / sigma, cuts: Any = cuts
        ) -> tuple[Any, ...]:
            plain = _subsampled_delta(eps, q, mu)
            worst = list(plain)
            for cut, replacing in cuts:
                replaced = _subsampled_delta(eps, replacing, 2 * mu)
                for side in (0, 1):
                    mixed = (1 - cut) * plain[side] + cut * replaced[side]
                    worst[side] = _numpy().maximum(worst[side], mixed)
            return tuple(worst)

        whole.parts.append(_of_profile(profile, _reach_of(2 / sigma), int(times)))
        said = f"{int(times)} × mixture of PoissonSampled(q = {rate:.6g}, Gaussian(σ))"
        cut = cuts[0][0] if cuts else 0.0
        whole.lines.append(
            (
                f"{said} with σ = {sigma:.6g}, and, with probability {cut:.3g} or less, σ/2 at the"
                f" rate of a place among {cap}; the worst for 1 to {units} units",
                "a batch that is cut moves by at most twice the clip norm, one that is not by once"
                " (the decomposition of arXiv:2508.15089, whether a batch is cut being independent"
                " of the unit)",
            )
        )
    return whole


def _cuts(units: int, cap: int, rate: float) -> Iterator[tuple[float, float]]:
    """Yield for ranges of the number of other units the largest probability of a cut and rate."""
    from scipy.stats import binom

    most, top, width = rate * cap / (cap + 1), units - 1, 1
    while top >= cap and (cut := float(binom.sf(cap - 1, top, rate))) > 0:
        bottom = max(cap, top - width + 1)
        least = float(binom.sf(cap - 1, bottom, rate))
        taken = float(binom.sf(cap, bottom + 1, rate)) * cap / (bottom + 1)
        yield cut, min(most, taken / least) if least else most
        top, width = bottom - 1, units - bottom


def _subsampled_delta(eps: Any, rate: float, mu: float) -> tuple[Any, Any]:
    """Return both directions of the profile of the Poisson-subsampled Gaussian mechanism."""
    numpy = _numpy()
    if rate == 1:
        return (_gaussian_delta(eps, mu),) * 2
    with_unit = rate * _gaussian_delta(numpy.log1p(numpy.expm1(eps) / rate), mu)
    rest = -numpy.expm1(numpy.minimum(eps + math.log1p(-rate), 0.0))  # 1 − e^ε(1 − q), or 0
    safe = numpy.where(rest > 0, rest, 1.0)
    without = safe * _gaussian_delta(eps + math.log(rate) - numpy.log(safe), mu)
    return with_unit, numpy.where(rest > 0, without, 0.0)


def _fixed_size(event: Mapping[str, Any]) -> Reduction:
    whole = Reduction()
    slots = event["slots"]
    for batch, sigma, times in event["phases"]:
        rate, mu = batch / slots, 2 / sigma

        def profile(eps: Any, q: float = rate, m: float = mu) -> tuple[Any, Any]:
            numpy = _numpy()
            inner = numpy.log1p(numpy.expm1(eps) / q)
            both = q * _gaussian_delta(inner, m)
            return both, both

        reach = _reach_of(mu)
        whole.parts.append(_of_profile(profile, reach, int(times)))
        whole.lines.append(
            (
                f"{int(times)} × the profile q·G(ln(1 + (e^ε − 1)/q)), q = {rate:.6g}, G that of a"
                f" Gaussian with μ = {mu:.6g}",
                "sampling without replacement, replace-one (Balle, Barthe and Gaboardi 2018,"
                " Theorems 2 and 11)",
            )
        )
    return whole


def _gaussian(event: Mapping[str, Any]) -> Reduction:
    times = event["count"] if event["kind"] == "gaussian" else event["participations"]
    sigma = event["noise_multiplier"] / math.sqrt(times)
    return Reduction(
        [lambda spacing: _gaussian_pld(sigma, spacing)],
        [
            (
                f"Gaussian(σ = {sigma:.6g}) for {times} of them",
                "k Gaussian mechanisms are one of σ/√k (Dong, Roth and Su 2022, Corollary 3.3)",
            )
        ],
    )


def _histogram(event: Mapping[str, Any]) -> Reduction:
    """Discrete Gaussian noise on the words that are there, cut at a threshold.

    A unit has N words, of which ℓ are its own alone. One of these passes with probability τ by
    itself, and gives the unit away; given that none does, m = N − ℓ counts moved by 1 are left.
    """
    if (event["mechanism"], event["noise"]) != ("set-counts", "discrete-gaussian"):
        raise NotDerivedError(f"histogram {event['mechanism']!r} with noise {event['noise']!r}")
    numpy = _numpy()
    words, sigma, threshold = event["words_per_unit"], event["sigma"], event["threshold"]
    tau = float(_tail(numpy.array([threshold - 1.0]), sigma)[0])
    every = {*range(min(words, 8) + 1), words}
    every |= {round(words ** (i / 48)) for i in range(49)}  # the worst ℓ is 0, N, or in between

    def profile(eps: Any) -> tuple[Any, Any]:
        with_unit, without = numpy.zeros_like(eps), numpy.zeros_like(eps)
        for lone in sorted(every):
            stay = lone * math.log1p(-tau)
            passes = -math.expm1(stay)
            hidden = _moved_counts(eps - stay, words - lone, sigma)
            with_unit = numpy.maximum(with_unit, passes + (1 - passes) * hidden)
            without = numpy.maximum(without, _moved_counts(eps + stay, words - lone, sigma))
        return with_unit, without

    mu = math.sqrt(words) / sigma
    return Reduction(
        [_of_profile(profile, _reach_of(mu), 1)],
        [
            (
                f"Gaussian(σ = {sigma:.6g}/√{words}) on words that others hold, and a word of one"
                f" unit alone that passes with probability τ = {tau:.3g}; the worst number of such"
                " words at each ε",
                "m discrete Gaussians of variance σ² add up to one of mσ² but for a factor within"
                " 1e-13 (Kairouz, Liu and Steinke 2021, Theorem 11); given that no lone word"
                " passes, they are all that differs",
            )
        ],
    )


def _moved_counts(eps: Any, moved: int, sigma: float) -> Any:
    """Return δ(ε) of `moved` counts with discrete Gaussian noise, each moved by 1."""
    numpy = _numpy()
    none = numpy.maximum(0.0, -numpy.expm1(numpy.minimum(eps, 0.0)))
    if moved == 0:
        return none
    spread = math.sqrt(moved) * sigma
    beyond = numpy.floor(eps * sigma**2 + moved / 2) + 1
    found = _tail(beyond - moved, spread) - numpy.exp(numpy.minimum(eps, 700.0)) * _tail(
        beyond, spread
    )
    return numpy.clip(found, none, 1.0)


def _tail(k: Any, sigma: float) -> Any:
    """Return Pr[Z ≥ k] of a discrete Gaussian, k whole numbers."""
    numpy = _numpy()
    if sigma > 2e4:  # the midpoint rule is exact to 1/σ²
        from scipy.special import ndtr

        return ndtr((0.5 - k) / sigma)
    reach = math.ceil(16 * sigma) + 2
    support = numpy.arange(-reach, reach + 1, dtype=float)
    weights = numpy.exp(-(support**2) / (2 * sigma**2))
    tails = numpy.append(numpy.cumsum(weights[::-1])[::-1] / weights.sum(), 0.0)
    return tails[numpy.clip(k + reach, 0, len(support)).astype(int)]


_LATTICE = (1024.0, 256.0, 1280.0)  # of the drawn noise: coarse deviation, factor, fine deviation


def _noised_weights(event: Mapping[str, Any]) -> Reduction:
    """Noised weights on a lattice, in rounds, released where they reach a threshold."""
    numpy = _numpy()
    items, scales, rule = event["items_per_unit"], event["scales"], event["rule"]
    square = _LATTICE[0] ** 2
    for _ in range(event["levels"]):
        square = _LATTICE[1] ** 2 * square + _LATTICE[2] ** 2
    stretch = math.sqrt(1 + 1 / max(4, items)) if rule in ("mad", "mad2r") else 1.0
    norms = [scale * stretch + event["rounding"] for scale in scales]
    sigma = math.sqrt((square - 16) / math.fsum(norm**2 for norm in norms))
    t = numpy.arange(1, items + 1, dtype=float)
    weight = numpy.full(items, event["largest"], dtype=float)
    if rule != "elimination":
        weight = numpy.minimum(weight, 1 / numpy.sqrt(t))
    coin = 0.0
    for first, last, threshold in event["checks"]:
        given = sum(numpy.ceil(weight * scale) + 1 for scale in scales[first : last + 1])
        passes = _tail(numpy.floor(threshold - given), math.sqrt((last - first + 1) * square))
        coin += float(numpy.max(-numpy.expm1(t * numpy.log1p(-numpy.minimum(passes, 1 - 1e-16)))))
    coin = min(1.0, coin)

    return Reduction(
        [lambda spacing: _gaussian_pld(sigma, spacing), _pair(0.0, coin)],
        [
            (
                f"Gaussian(σ = {sigma:.6g}) for {len(scales)} round(s), and an added"
                f" δ = {coin:.3g}: that an item of one unit alone passes",
                "adaptively composed Gaussians are one, μ² = Σ(norm/S)² (Dong, Roth and Su 2022,"
                " Corollary 3.3), a discrete one of deviation S as a continuous one of √(S² − 16);"
                " a new item passes only by its own noise (Confide, docs/proofs.md, “Items that"
                " one unit brings”)",
            )
        ],
    )


def _converted(event: Mapping[str, Any]) -> Reduction:
    inner = reduce(event["event"])
    if event["to"] == "zero-out-one":
        inner.lines.append(
            (
                "the same under zero-out",
                "a unit that contributes nothing leaves the release as if it were not there",
            )
        )
        return inner
    if event["to"] != "replace-one":
        raise NotDerivedError(f"no theorem converts to {event['to']!r}")
    # (2ε, (1 + e^ε)δ) holds at every δ; at a slightly smaller one it stays within the claimed δ
    # where the two libraries differ in the last digits of ε.
    delta = event["delta"] / (1 + 1e-3)
    epsilon = _epsilon(inner, delta)
    doubled, added = 2 * epsilon, (1 + math.exp(epsilon)) * delta
    return Reduction(
        [_pair(doubled, added)],
        [
            *inner.lines,
            (
                f"(2ε, (1 + e^ε)δ) = ({doubled:.6g}, {added:.3g}) for replace-one",
                "group privacy for two steps (Vadhan 2017, Lemma 2.2)",
            ),
        ],
    )


def _selection(event: Mapping[str, Any]) -> Reduction:
    """Return the best of a secret random number of trainings, by Rényi DP."""
    import logging

    from dp_accounting import dp_event, rdp

    logging.getLogger("absl").setLevel(logging.ERROR)  # an order whose series diverges is left out
    numpy = _numpy()
    orders = [1 + i / 20 for i in range(1, 200)] + list(range(11, 129)) + [160, 192, 256, 512, 1024]
    candidates = [_dp_event(one) for one in event["candidates"]]
    curves = [
        numpy.asarray(rdp.RdpAccountant(orders).compose(one).rdp, dtype=float) for one in candidates
    ]
    worst = next((i for i, c in enumerate(curves) if all(numpy.all(c >= d) for d in curves)), None)
    if worst is None:
        raise NotDerivedError("no candidate of the selection is the costliest at every Rényi order")
    if event["count"] == "poisson":
        mean, shape = event["mean"], math.inf
    else:
        shape, gamma = event["eta"], event["gamma"]
        mean = (
            (1 / gamma - 1) / math.log(1 / gamma)
            if shape == 0
            else shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))
        )
    best = dp_event.RepeatAndSelectDpEvent(candidates[worst], mean, shape)

    def by_renyi(delta: float) -> float:
        return float(rdp.RdpAccountant(orders).compose(best).get_epsilon(delta))

    return Reduction(
        [_pair(by_renyi(event["delta"]), event["delta"])],
        [
            (
                f"RepeatAndSelect(mean = {mean:.6g}, shape = {shape:g}) of the costliest of"
                f" {len(candidates)} candidates, by Rényi DP",
                "Papernot and Steinke 2022, Theorems 2 and 6; a candidate drawn at random costs at"
                " most the worst at each order (van Erven and Harremoës 2014, Theorem 13)",
            )
        ],
        by_renyi,
    )


def _dp_event(event: Mapping[str, Any]) -> Any:
    """Return a training as an event of dp_accounting's Rényi accountant."""
    import dp_accounting as dpa

    match event["kind"]:
        case "composed":
            return dpa.ComposedDpEvent([_dp_event(one) for one in event["events"]])
        case "gaussian":
            sigma = event["noise_multiplier"] / math.sqrt(event["count"])
            return dpa.GaussianDpEvent(sigma)
        case "poisson_gaussian" | "cyclic_poisson_gaussian" as kind:
            cycle = event["cycle"] if kind.startswith("cyclic") else 1
            return dpa.ComposedDpEvent(
                [
                    dpa.SelfComposedDpEvent(
                        dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(s)), math.ceil(n / cycle)
                    )
                    for q, s, n in event["phases"]
                ]
            )
    raise NotDerivedError(f"a selection among trainings of the kind {event['kind']!r}")


_REDUCTIONS: dict[tuple[str, Any], Callable[[Mapping[str, Any]], Reduction]] = {
    ("composed", 1): _composed,
    ("phrase_rounds", 1): _phrase_rounds,
    ("poisson_gaussian", 1): _poisson,
    ("cyclic_poisson_gaussian", 1): _cyclic,
    ("truncated_poisson_gaussian", 1): _truncated,
    ("fixed_size_gaussian", 1): _fixed_size,
    ("gaussian", 1): _gaussian,
    ("shuffled_gaussian", 1): _gaussian,
    ("thresholded_histogram", 1): _histogram,
    ("noised_weights", 1): _noised_weights,
    ("restated", 1): _converted,
    ("random_count_selection", 1): _selection,
}


# --- privacy loss distributions


def _library() -> Any:
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution


def _numpy() -> Any:
    import numpy

    return numpy


def _gaussian_pld(sigma: float, spacing: float) -> Any:
    return _library().from_gaussian_mechanism(sigma, value_discretization_interval=spacing)


def _gaussian_delta(eps: Any, mu: float) -> Any:
    """Return the profile of the Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    from scipy.special import log_ndtr

    numpy = _numpy()
    upper, lower = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
    return numpy.exp(upper) * -numpy.expm1(numpy.minimum(lower - upper, 0.0))


def _reach_of(mu: float) -> float:
    return mu * mu / 2 + 12 * mu


def _pair(epsilon: float, delta: float) -> Callable[[float], Any]:
    """Return the dominating pair of all (ε, δ)-DP mechanisms."""

    def part(spacing: float) -> Any:
        from dp_accounting.pld import common

        known = common.DifferentialPrivacyParameters(epsilon, delta)
        return _library().from_privacy_parameters(known, value_discretization_interval=spacing)

    return part


def _of_profile(
    profile: Callable[[Any], tuple[Any, Any]], reach: float, times: int
) -> Callable[[float], Any]:
    """Return the PLD of a privacy profile, by the library's own "connect the dots".

    Args:
        profile: ε ≥ 0 -> (δ with the unit against without it, δ the other way round).
        reach: ε beyond which only δ that no ε repairs is left.
        times: how often it is composed with itself.
    """

    def part(spacing: float) -> Any:
        from dp_accounting.pld import pld_pmf

        numpy = _numpy()
        size = math.ceil(reach / spacing) + 1
        eps = numpy.arange(size + 1) * spacing
        one, other = (numpy.maximum.accumulate(d[::-1])[::-1] for d in profile(eps))

        def direction(forth: Any, back: Any) -> Any:
            below = 1 - numpy.exp(-eps[:0:-1]) * (1 - back[:0:-1])  # at −ε
            deltas = numpy.clip(numpy.concatenate([below, forth]), 0.0, 1.0)
            deltas = numpy.maximum.accumulate(deltas[::-1])[::-1]
            return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
                spacing, -size, size, deltas
            )

        whole = _library().PrivacyLossDistribution(direction(one, other), direction(other, one))
        return whole.self_compose(times) if times > 1 else whole

    return part


def _composed_pld(reduction: Reduction, spacing: float) -> Any:
    first, *rest = (part(spacing) for part in reduction.parts)
    for other in rest:
        first = first.compose(other)
    return first


def _settled_pld(reduction: Reduction, delta: float) -> tuple[Any, float]:
    """Return the composed PLD on a grid fine enough, and its ε at δ."""
    spacing, before = 4e-3, math.inf
    while True:
        whole = _composed_pld(reduction, spacing)
        epsilon = float(whole.get_epsilon_for_delta(delta))
        if math.isinf(epsilon) or abs(before - epsilon) <= _SETTLED * epsilon:
            return whole, epsilon
        before, spacing = epsilon, min(spacing / 4, max(epsilon, 4 * _FINEST) / 250)
        if spacing < _FINEST:
            return whole, epsilon


def _epsilon(reduction: Reduction, delta: float) -> float:
    if reduction.settled is not None:
        return reduction.settled(delta)
    return _settled_pld(reduction, delta)[1]


@dataclass(frozen=True)
class Derived:
    """What another library makes of one claim.

    Attributes:
        epsilon: at the claim's δ; None where it could not be derived.
        lines: (what stands for a mechanism in dp_accounting, by which theorem).
        ceilings: FPR -> the largest TPR.
        why_not: why it could not be derived; empty where it was.
    """

    epsilon: float | None
    lines: tuple[tuple[str, str], ...] = ()
    ceilings: Mapping[float, float] = field(default_factory=dict)
    why_not: str = ""


def derive(
    events: Sequence[Mapping[str, Any]], delta: float, rates: Sequence[float] = ()
) -> Derived:
    """Return ε of these mechanisms together, and the ceilings on attacks at these FPR."""
    try:
        whole = _all_of(events)
        alone = reduce(events[0]).settled if len(events) == 1 else None
        pld, epsilon = _settled_pld(whole, delta)
        if alone is not None:
            epsilon = alone(delta)
        ceilings = {rate: _ceiling(pld, rate) for rate in rates}
    except NotDerivedError as error:
        return Derived(None, why_not=str(error))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return Derived(None, why_not=f"a mechanism cannot be read ({type(error).__name__})")
    return Derived(epsilon, tuple(whole.lines), ceilings)


def _ceiling(pld: Any, fpr: float) -> float:
    """Return the least over ε of min(e^ε·FPR + δ, 1 − e^{−ε}(1 − δ − FPR)).

    Kairouz, Oh and Viswanath 2015, Theorem 2.1; Dong, Roth and Su 2022, Proposition 2.12.
    """
    numpy = _numpy()
    best, low, high = 1.0, 0.0, 40.0
    for _ in range(4):  # ever finer around the best ε
        eps = numpy.linspace(low, high, 400)
        deltas = numpy.asarray(pld.get_delta_for_epsilon(eps))
        bound = numpy.minimum(
            numpy.exp(eps) * fpr + deltas, 1 - numpy.exp(-eps) * (1 - deltas - fpr)
        )
        at, step = float(eps[int(numpy.argmin(bound))]), (high - low) / 399
        best = min(best, float(numpy.min(bound)))
        low, high = max(0.0, at - 4 * step), at + 4 * step
    return best


def differs(claimed: float, derived: float) -> bool:
    """Return whether two numbers differ by more than is allowed."""
    return not abs(claimed - derived) <= TOLERANCE * max(abs(claimed), 1e-12)


# --- the pack: files, and whether they say the same


@dataclass
class Findings:
    """What the check found.

    Attributes:
        faults: what does not hold, a line for each.
        not_derived: what could not be derived again, and why.
        lines: what was compared, for people.
    """

    faults: list[str] = field(default_factory=list)
    not_derived: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code."""
        if self.faults:
            return FAULTY
        return NOT_DERIVED if self.not_derived else HOLDS


def check(folder: Path, model: Path | None = None) -> Findings:
    """Check a pack, and whether it is of this model.

    Args:
        folder: of the pack.
        model: folder of the model's files, as they were handed on; None: not compared.

    Raises:
        NotAPackError: there is no evidence in the folder, or dp_accounting is not installed.
    """
    evidence = _read(folder / EVIDENCE)
    found = Findings()
    if evidence.get("version") != 1:
        raise NotAPackError(f"{EVIDENCE} is of a version that this script does not know")
    found.faults += files_differ(folder, evidence)
    found.faults += model_differs(model, evidence) if model is not None else []
    schema = folder / SCHEMA
    if schema.is_file():
        found.faults += [f"{EVIDENCE}: {fault}" for fault in invalid(evidence, _read(schema))]
    else:
        found.faults.append(f"{SCHEMA} is missing")
    if found.faults:  # what follows reads fields that may be missing or false
        return found
    others = [_read(folder / name) for name in (STATEMENT, LEDGER)]
    try:
        found.faults += says_another(evidence, *others)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found.faults.append(f"statement or ledger cannot be read ({type(error).__name__})")
    if not found.faults:
        _derive_again(evidence, found)
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise NotAPackError(f"{file}: cannot be read") from None
    except ValueError:
        raise NotAPackError(f"{file}: not JSON") from None
    if not isinstance(content, dict):
        raise NotAPackError(f"{file}: not an object")
    return content


def files_differ(folder: Path, evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each file that is not the one that evidence.json names."""
    named = evidence.get("files")
    if not isinstance(named, dict) or not {STATEMENT, LEDGER, SCHEMA} <= set(named):
        yield f"{EVIDENCE} does not name the files of the pack"
        return
    for name, digest in named.items():
        if name != Path(name).name:
            yield f"{name}: not a file of the pack"
        elif not (folder / name).is_file():
            yield f"{name} is missing"
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            yield f"{name} is not the file that {EVIDENCE} names"
    for extra in sorted(f.name for f in folder.iterdir() if f.name not in {*named, EVIDENCE}):
        yield f"{extra}: {EVIDENCE} does not name it"


def model_differs(model: Path, evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each of the model's files that is not the one that the evidence is of."""
    named: Mapping[str, str] = evidence.get("model", {}).get("files", {})
    held = {f.relative_to(model).as_posix(): f for f in sorted(model.rglob("*")) if f.is_file()}
    weights = [name for name in held if name.endswith(WEIGHTS)]
    if not weights:
        yield "the model's folder holds no weights"
    digests = set(named.values())
    for name, file in held.items():
        digest = _digest_of(file)
        if name in weights and digest not in digests:
            yield f"the model's {name} is not what this evidence is of: it is another model's"
        elif name in named and digest != named[name]:
            yield f"the model's {name} is not the one that this evidence names"


def _digest_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def says_another(
    evidence: Mapping[str, Any], statement: Mapping[str, Any], ledger: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for whatever evidence, statement and ledger extract do not say alike."""
    statements = {part["dataset"]: part for part in (statement, *statement.get("others", ()))}
    extracts = {part["dataset"]: part for part in ledger["extracts"]}
    claims = {claim["dataset"]: claim for claim in evidence["claims"]}
    if len(claims) != len(evidence["claims"]):
        yield "two claims are of one data set: nothing adds them up"
    for name in {*statements, *extracts} - set(claims):
        yield f"the data set {name} has a statement or a ledger extract, and no claim"
    for name, claim in claims.items():
        if name not in statements or name not in extracts:
            yield f"the data set {name} lacks its statement or its ledger extract"
            continue
        yield from _statement_differs(claim, statements[name])
        yield from _ledger_differs(claim, extracts[name])
    yield from _training_differs(evidence)
    for audit in evidence["audits"]:
        above = (
            audit["bounds_claim"]
            and audit["interval"] is not None
            and audit["ceiling"] is not None
            and audit["interval"][0] > audit["ceiling"]
        )
        if above or audit["verdict"] == "contradicted":
            yield f"the audit “{audit['name']}” contradicts the claim: {audit['finding']}"


def _statement_differs(claim: Mapping[str, Any], statement: Mapping[str, Any]) -> Iterator[str]:
    where = f"data set {claim['dataset']}"
    for ours, theirs in (
        ("unit", "unit"),
        ("neighbours", "neighbours"),
        ("declared_units", "declared_units"),
        ("epsilon", "epsilon"),
        ("delta", "delta"),
        ("one_plan", "one_plan"),
    ):
        if claim[ours] != statement[theirs]:
            yield f"{where}: the statement's {theirs} is {statement[theirs]}, not {claim[ours]}"
    fields = ("ledger_id", "unit", "event", "delta")
    told, held = (
        [{name: release[name] for name in fields} for release in part["releases"]]
        for part in (claim, statement)
    )
    if told != held:
        yield f"{where}: the statement lists other releases"
    if statement["seed_known"]:
        yield f"{where}: its noise came from a known seed, and protects nobody"
    if claim["epsilon"] is not None and not statement["private"]:
        yield f"{where}: the statement makes no claim"


def _ledger_differs(claim: Mapping[str, Any], extract: Mapping[str, Any]) -> Iterator[str]:
    name, releases = claim["dataset"], claim["releases"]
    entries = {entry["id"]: entry for entry in extract["entries"]}
    total = math.fsum(release["delta"] for release in releases)
    if not math.isclose(total, claim["delta"], rel_tol=1e-12):
        yield f"data set {name}: δ is not the sum of its releases' δ"
    if extract["budget_unit"] not in (None, claim["unit"]):
        yield f"data set {name}: the budget protects the unit {extract['budget_unit']}"
    for release in releases:
        where = f"release {release['ledger_id']}"
        entry = entries.get(release["ledger_id"])
        if entry is None:
            yield f"{where}: the ledger extract does not hold it"
            continue
        for key in ("event", "unit", "neighbours", "delta"):
            if entry[key] != release[key]:
                yield f"{where}: the ledger has another {key}"
        if set(_units_in(release["event"])) - {None} != {release["unit"]}:
            yield f"{where}: its mechanism protects another unit"
        if claim["epsilon"] is not None and release["unit"] != claim["unit"]:
            yield f"{where}: it protects the unit {release['unit']}, the claim {claim['unit']}"
        if entry["state"] != "settled" or not entry["accounted"] or not entry["released_hash"]:
            yield f"{where}: the ledger has not settled it"
        if entry["known_seed"]:
            yield f"{where}: its seed is known"
    marked = {entry["id"] for entry in extract["entries"] if entry["in_this_model"]}
    if marked != {release["ledger_id"] for release in releases}:
        yield f"data set {name}: the ledger extract marks other releases as this model's"
    plans = {entries[i]["plan"] for i in marked if i in entries}
    if claim["one_plan"] and len(marked) > 1 and (len(plans) > 1 or plans == {0}):
        yield f"data set {name}: its releases were not registered as one plan"


def _units_in(event: Any) -> Iterator[str | None]:
    if isinstance(event, dict):
        if "unit" in event:
            yield event["unit"]
        event = list(event.values())
    if isinstance(event, list):
        for part in event:
            yield from _units_in(part)


def _training_differs(evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line where the plan of the model's training is not that of its release."""
    plan = evidence["trained_by"]
    if plan is None:
        return
    every = [release for claim in evidence["claims"] for release in claim["releases"]]
    release = next((r for r in every if r["ledger_id"] == plan["ledger_id"]), None)
    if release is None:
        yield "the model's own training is not among the releases"
        return
    event = release["event"]
    while "phases" not in event and "event" in event:
        event = event["event"]
    if "phases" not in event:
        return  # of a selection: the plan is the chosen candidate's
    if plan["declared_units"] != _claim_of(evidence, release)["declared_units"]:
        yield "the training's plan and the claim declare another number of units"
    parts = event.get("cycle", 1)
    planned = [
        (parts * p["expected_batch"] / plan["declared_units"], plan["noise_multiplier"], p["steps"])
        for p in plan["phases"]
    ]
    if len(planned) != len(event["phases"]) or not all(
        math.isclose(a, b, rel_tol=1e-9)
        for phases in zip(planned, event["phases"], strict=False)
        for a, b in zip(*phases, strict=True)
    ):
        yield "rate, noise or length of the training's plan are not those of its release"


def _claim_of(evidence: Mapping[str, Any], release: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(claim for claim in evidence["claims"] if release in claim["releases"])


def _derive_again(evidence: Mapping[str, Any], found: Findings) -> None:
    """Derive every ε and every ceiling again, and note what differs."""
    try:
        import dp_accounting  # noqa: F401
    except ImportError:
        raise NotAPackError("dp_accounting is missing: pip install dp-accounting") from None
    for claim in evidence["claims"]:
        events = [release["event"] for release in claim["releases"]]
        for release in claim["releases"]:
            one = derive([release["event"]], release["delta"])
            _compare(f"{release['release']} ({release['ledger_id'][:8]})", release, one, found)
        if claim["epsilon"] is None:
            found.lines.append(f"{claim['dataset']}: no total is claimed")
            continue
        rates = [ceiling["fpr"] for ceiling in claim["tpr_ceilings"]]
        whole = derive(events, claim["delta"], rates)
        what = f"{claim['dataset']}, one {claim['unit']}, δ = {claim['delta']:.3g}"
        _compare(what, claim, whole, found)
        for ceiling in claim["tpr_ceilings"]:
            again = whole.ceilings.get(ceiling["fpr"])
            if again is None:
                continue
            said = f"most TPR at FPR {ceiling['fpr']:.3g}: {ceiling['tpr']:.4g}"
            found.lines.append(f"  {said}, derived again {again:.4g}")
            if differs(ceiling["tpr"], again):
                found.faults.append(f"{claim['dataset']}: {said}, but dp_accounting has {again}")


def _compare(what: str, claimed: Mapping[str, Any], again: Derived, found: Findings) -> None:
    epsilon = claimed["epsilon"]
    if again.epsilon is None:
        found.not_derived.append(f"{what}: ε = {epsilon:.4g}: {again.why_not}")
        return
    if differs(epsilon, again.epsilon):
        found.faults.append(
            f"{what}: ε = {epsilon:.6g} is claimed, and dp_accounting derives {again.epsilon:.6g}"
        )
        return
    share = again.epsilon / epsilon - 1 if epsilon else 0.0
    found.lines.append(f"{what}: ε = {epsilon:.4g}, derived again to {share:+.4%}")


# --- JSON Schema, as far as the pack's schema goes

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}


def invalid(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return what of a document the schema does not allow: a field that is missing, or false."""
    return list(_invalid(value, schema, schema, ""))


def _invalid(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> Iterator[str]:
    if "$ref" in schema:
        named = schema["$ref"].removeprefix("#/$defs/")
        yield from _invalid(value, root["$defs"][named], root, at)
        return
    if "anyOf" in schema:
        tries = [list(_invalid(value, one, root, at)) for one in schema["anyOf"]]
        if all(tries):
            yield min(tries, key=len)[0]
        return
    where = at or "the document"
    if "type" in schema and not _TYPES[schema["type"]](value):
        yield f"{where} is no {schema['type']}"
        return
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        yield f"{where} has a value that it cannot have"
    if isinstance(value, dict):
        yield from _invalid_object(value, schema, root, at)
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0) or len(value) > schema.get("maxItems", math.inf):
            yield f"{where} has the wrong length"
        fixed = schema.get("prefixItems", [])
        for number, item in enumerate(value):
            one = fixed[number] if number < len(fixed) else schema.get("items", {})
            yield from _invalid(item, one, root, f"{at}[{number}]")
    elif isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{where} is empty"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where} has another form"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        above = value > schema.get("exclusiveMinimum", -math.inf)
        below = value < schema.get("exclusiveMaximum", math.inf)
        if not (low <= value <= high and above and below):
            yield f"{where} is out of range"


def _invalid_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> Iterator[str]:
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{at}.{name} is missing".lstrip(".")
    if len(value) < schema.get("minProperties", 0):
        yield f"{at or 'the document'} is empty"
    for name, part in value.items():
        inside = f"{at}.{name}".lstrip(".")
        if name in known:
            yield from _invalid(part, known[name], root, inside)
        elif rest is False:
            yield f"{inside} is unknown"
        elif isinstance(rest, dict):
            yield from _invalid(part, rest, root, inside)


# --- the command line


def main(words: Sequence[str] | None = None) -> int:
    """Check what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        description="Check an evidence pack without the software that made it.",
        epilog="Exit codes: 0 all holds, 1 something does not, 2 no pack, 4 not all re-derived.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--model", type=Path, help="folder of the model's files, to be compared")
    parser.add_argument("--json", action="store_true", help="say it as JSON")
    options = parser.parse_args(words)
    try:
        found = check(options.folder, options.model)
    except NotAPackError as error:
        sys.stderr.write(f"check_evidence: {error}\n")
        return NO_PACK
    sys.stdout.write(as_json(found) if options.json else as_text(found))
    return found.code


_VERDICTS = {
    HOLDS: "HOLDS: every file is the one that is named, and every number was derived again.",
    FAULTY: "DOES NOT HOLD.",
    NOT_DERIVED: "NOT RE-DERIVED in part. Nothing that could be derived again differs.",
}


def as_text(found: Findings) -> str:
    """Return what was found, for people."""
    lines = [
        *found.lines,
        *(f"NOT RE-DERIVED: {line}" for line in found.not_derived),
        *(f"FAULT: {line}" for line in found.faults),
        _VERDICTS[found.code],
    ]
    return "\n".join(lines) + "\n"


def as_json(found: Findings) -> str:
    """Return what was found, for programs."""
    body = {
        "code": found.code,
        "faults": found.faults,
        "not_derived": found.not_derived,
        "compared": found.lines,
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
