#!/usr/bin/env python3
"""Check an evidence pack without the software that made it: `pip install dp-accounting`, then

    python check_evidence.py [FOLDER] [--model FOLDER_OF_THE_MODEL]

The script does not trust any figure or sentence of the pack. It derives the neighbouring relation,
ε and the ceilings on attacks from the recorded mechanisms alone, and checks that δ is below 1/n. ε
is derived with Google's `dp_accounting`, by the theorem that each reduction names. The script then
generates all pages from the data and compares them byte for byte. `RECORDED` lists the fields that
cannot be derived.

Exit codes: 0 everything holds; 1 there is a fault; 2 the folder contains no evidence pack of this
version, or it cannot be checked here; 4 there is no fault, but a part could not be derived.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import scipy

    if __name__ == "__main__":
        import dp_accounting  # noqa: F401
except ImportError:
    if __name__ != "__main__":
        raise
    sys.stderr.write("check_evidence: dp_accounting is missing: pip install dp-accounting\n")
    sys.exit(2)

HOLDS, FAULTY, NO_PACK, NOT_DERIVED = 0, 1, 2, 4
TOLERANCE = 0.005  # relative difference by which a claim may be below the derived number
EVIDENCE, LEDGER, STATEMENT = "evidence.json", "ledger.json", "privacy_statement.json"
PAGE, CARD, WORDS, SCRIPT = "evidence.html", "README.md", "PRIVACY.md", "check_evidence.py"
FILES = {LEDGER, STATEMENT, PAGE, CARD, WORDS, SCRIPT}  # of a pack, besides evidence.json
FALSE_POSITIVE_RATES = (0.001, 0.01)
NOT_STATED = "not stated by the operator"
OPERATOR_WORDS = (
    "model_name", "license", "language", "contact", "intended_use", "out_of_scope_use",
    "data_collection", "data_people", "legal_basis", "known_biases", "access_to_private_data",
)  # fmt: skip
_OTHERS = "releases of other models: every field, and that all of them are listed"
RECORDED = {  # fields that the data of a pack cannot confirm, by file
    EVIDENCE: (
        "edition", "created", "model", "made_by", "versions", "operator_words", "measures",
        "audits", "derived_by", "trained_by.sampling", "trained_by.clip_norm",
        "trained_by.clipping", "trained_by.examples_per_step", "trained_by.max_examples_per_unit",
    ),
    STATEMENT: (
        "declared_units", "assumptions", "made_up", "others[].declared_units",
        "others[].assumptions", "released_after_updates", "the unit, if all files state it",
    ),
    LEDGER: (
        "extracts[].budget_epsilon", "extracts[].budget_delta", "extracts[].share_spent",
        "extracts[].left_out", "extracts[].entries[].plan",
        "extracts[].entries[].seed_hash", "extracts[].entries[].released_hash",
        "extracts[].entries[].reserved", "extracts[].entries[].settled", _OTHERS,
    ),
}  # fmt: skip
_CLAIM_OF_CARD = "differential_privacy"  # field of a card's metadata
_MOST_BYTES = 1 << 26
_LONGEST_PLACE = 400  # characters of a field's path; nested mechanisms have long paths
_SETTLED = 1e-3  # relative difference at which two grids agree
_FINEST = 1e-6
PROVEN = "PLD, in which the parts without one enter as the (ε, δ) proven for them"
_ROUNDING = 1e-5  # absolute error of ε and ceilings on the grid
_ADD_REMOVE, _ZERO_OUT, _REPLACE = "add-or-remove-one", "zero-out-one", "replace-one"


class NotAPackError(Exception):
    """The folder contains no evidence pack of this version, or it cannot be read."""


class NotDerivedError(Exception):
    """dp_accounting cannot express a mechanism, and no theorem here reduces it."""


# --- the shape of the data: strict JSON, exact fields, numbers in range

_REAL: Callable[[Any], bool] = lambda v: type(v) in (int, float) and math.isfinite(v)  # noqa: E731
_TEXT: Callable[[Any], bool] = lambda v: isinstance(v, str) and v.isprintable()  # noqa: E731
_FLAG: Callable[[Any], bool] = lambda v: isinstance(v, bool)  # noqa: E731


def _whole(low: int, high: int = 10**15) -> Callable[[Any], bool]:
    return lambda v: type(v) is int and low <= v <= high


def _within(low: float, high: float) -> Callable[[Any], bool]:
    """Return a test for numbers above `low` and at most `high`."""
    return lambda v: _REAL(v) and low < v <= high


@dataclass(frozen=True)
class _Optional:
    shape: Any


@dataclass(frozen=True)
class _Mapping:
    shape: Any


_SHA256, _DAY, _NAME = r"[0-9a-f]{64}", r"\d{4}-\d\d-\d\d", r"\S(.*\S)?"
_UNIT, _RELATION = {"example", "document", "patient"}, {_ADD_REMOVE, _ZERO_OUT, _REPLACE}
EXAMPLE = r"[1-9][0-9]{0,5} words|one labelled (sentence|text|pair)"  # the unit is an example of it
_EPSILON, _DELTA, _SIGMA = (lambda v: _REAL(v) and 0 <= v <= 1e6), _within(0, 1), _within(0, 1e12)
_EVENT = object()  # a mechanism, with the fields in `MECHANISMS`
_STEPS = _whole(1, 10**7)
_DERIVED = {
    "dataset": _NAME, "epsilon": _Optional(_EPSILON), "releases": [_Optional(_EPSILON)],
    "tpr_ceilings": [{"fpr": _DELTA, "tpr": _DELTA}],
}  # fmt: skip
_CLAIM = {  # the statement on the data sets of one budget
    "version": _whole(1, 1), "dataset": _NAME, "unit": _UNIT, "neighbours": _RELATION,
    "epsilon": _Optional(_EPSILON), "delta": _DELTA, "declared_units": _Optional(_whole(1)),
    "accounting": _NAME, "private": _FLAG, "seed_known": lambda v: v is False, "made_up": _FLAG,
    "one_plan": _FLAG, "assumptions": [_TEXT], "ledger_ids": [_NAME],
    "releases": [{
        "ledger_id": _NAME, "unit": _UNIT, "mechanism": _NAME, "event": _EVENT, "delta": _DELTA,
        "epsilon": _EPSILON, "epsilon_rdp": _Optional(_EPSILON),
    }],
}  # fmt: skip
_AUDIT = {
    "key": r"[a-z][a-z0-9_]*", "name": _NAME, "subject": _NAME,
    "level": _Optional({"canary", "example", "document", "patient", "group"}),
    "measured": _NAME, "value": _Optional(_REAL), "interval": _Optional((_REAL, _REAL)),
    "confidence": _Optional(_DELTA), "ceiling": _Optional(_REAL), "ceiling_of": _TEXT,
    "power": _TEXT, "bounds_claim": _FLAG, "finding": _NAME,
    "verdict": {"consistent", "contradicted", "inconclusive", "invalid", "not run"},
    "null_control": _Optional({
        "of": _NAME, "low": _REAL, "high": _REAL, "alarm_rate": _DELTA,
        "p_value": _Optional(_REAL),
    }),
    "label": {"dp", "public", "operator"},
    "rows": [_Mapping(lambda v: _REAL(v) or _TEXT(v))],
}  # fmt: skip
SHAPES: dict[str, Any] = {
    EVIDENCE: {
        "version": _whole(3, 3), "edition": {"publishable", "operator"}, "created": _DAY,
        "derived": [_DERIVED], "derived_by": _NAME, "audits": [_AUDIT], "files": _Mapping(_SHA256),
        "model": {
            "step": _NAME, "kind": _Optional(_TEXT), "layers": _Optional(_whole(0)),
            "hidden": _Optional(_whole(0)), "parameters": _Optional(_whole(0)),
            "head": _Optional(_TEXT), "files": _Mapping(_SHA256),
        },
        "trained_by": _Optional({
            "ledger_id": _NAME, "sampling": _NAME, "declared_units": _whole(1),
            "phases": [{"steps": _STEPS, "expected_batch": _within(0, 1e15)}],
            "noise_multiplier": _SIGMA, "clip_norm": _SIGMA, "clipping": _NAME,
            "examples_per_step": _whole(1), "max_examples_per_unit": _whole(1),
            "noise_bands": _whole(1),
        }),
        "measures": [{"name": _NAME, "value": _REAL, "label": {"dp", "public", "operator"}}],
        "operator_words": dict.fromkeys(OPERATOR_WORDS, _NAME),
        "versions": _Mapping(_NAME), "made_by": {"spec_hash": _TEXT, "output": _NAME},
    },
    STATEMENT: _CLAIM | {"others": [_CLAIM], "released_after_updates": [_whole(1)]},
    LEDGER: {
        "version": _whole(3, 3),
        "extracts": [{
            "dataset": _NAME, "budget_unit": _Optional(_UNIT),
            "budget_neighbours": _Optional(_RELATION), "budget_epsilon": _Optional(_EPSILON),
            "budget_delta": _Optional(_DELTA), "share_spent": _Optional(_EPSILON),
            "left_out": _NAME, "entries": [{
                "number": _whole(1), "id": _NAME, "in_this_model": _FLAG, "event": _EVENT,
                "unit": _UNIT, "neighbours": _RELATION, "accounted": _FLAG,
                "delta": lambda v: _REAL(v) and 0 <= v < 1,
                "state": {"planned", "reserved", "settled", "withdrawn"},
                "plan": _whole(0), "known_seed": _FLAG, "seed_hash": _TEXT, "released_hash": _TEXT,
                "reserved": _TEXT, "settled": _TEXT,
            }],
        }],
    },
}  # fmt: skip


def read_json(text: bytes) -> Any:
    """Return the JSON value; keys must be unique and numbers finite.

    Raises:
        ValueError: `text` is not such a value.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key occurs twice")
        return dict(pairs)

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{number} is not finite")
        return float(number)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def misshapen(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Yield a line for each field that is missing, unknown, out of range or of a wrong type."""
    if isinstance(shape, _Optional):
        if value is not None:
            yield from misshapen(value, shape.shape, where)
    elif shape is _EVENT:
        kind = value.get("kind") if isinstance(value, dict) else None
        mechanism = MECHANISMS.get(kind) if isinstance(kind, str) else None
        if len(where) > _LONGEST_PLACE:
            yield f"{where[:80]} … is nested too deeply"
        elif mechanism is None:
            yield f"{where} is not a mechanism that this script knows"
        else:
            known = {"kind": {kind}, "version": _whole(1, 1), "unit": _Optional(_UNIT)}
            if "example" in value:
                known["example"] = EXAMPLE
            yield from misshapen(value, known | mechanism.fields, where)
    elif isinstance(shape, dict | _Mapping) and isinstance(value, dict):
        fields = shape if isinstance(shape, dict) else dict.fromkeys(value, shape.shape)
        yield from (f"{where}.{name} is missing" for name in fields if name not in value)
        yield from (f"{where}.{name} is unknown" for name in value if name not in fields)
        for name in fields.keys() & value.keys():
            if name.isprintable():
                yield from misshapen(value[name], fields[name], f"{where}.{name}")
            else:
                yield f"{where} has a name with unprintable characters"
    elif isinstance(shape, list) and isinstance(value, list):
        for number, item in enumerate(value):
            yield from misshapen(item, shape[0], f"{where}[{number}]")
    elif isinstance(shape, tuple) and isinstance(value, list) and len(shape) == len(value):
        for number, (item, part) in enumerate(zip(value, shape, strict=True)):
            yield from misshapen(item, part, f"{where}[{number}]")
    elif isinstance(shape, str):
        if not (_TEXT(value) and re.fullmatch(shape, value, re.ASCII)):
            yield f"{where} is not text of the expected form"
    elif isinstance(shape, set):
        if not (isinstance(value, str) and value in shape):
            yield f"{where} is not one of: {', '.join(sorted(shape))}"
    elif not callable(shape) or not shape(value):
        yield f"{where} has a wrong type, or is out of range"


# --- mechanisms: neighbouring relation, description, and reduction to dp_accounting

Event = Mapping[str, Any]
Part = Callable[[float], Any]  # grid spacing -> privacy loss distribution (PLD) of dp_accounting


@dataclass(frozen=True)
class Reduction:
    """A mechanism as a composition of privacy loss distributions.

    Attributes:
        parts: the distributions.
        lines: pairs of a reduced mechanism and the theorem of its reduction.
        by_renyi: δ -> ε by Rényi DP, for a single mechanism without a PLD; None otherwise.
    """

    parts: tuple[Part, ...]
    lines: tuple[tuple[str, str], ...]
    by_renyi: Callable[[float], float] | None = None


@dataclass(frozen=True)
class Mechanism:
    """One kind of mechanism, version 1.

    Attributes:
        title: short name of the release.
        relation: neighbouring relation of its ε; None if it has the relation of its parts.
        fields: the shape of its parameters.
        words: returns the description of the mechanism in the privacy statement.
        reduce: returns its reduction.
    """

    title: str
    relation: str | None
    fields: dict[str, Any]
    words: Callable[[Event], str]
    reduce: Callable[[Event], Reduction]


def mechanism_of(event: Event) -> Mechanism:
    """Return the kind of a recorded mechanism.

    Raises:
        NotDerivedError: this script does not know it.
    """
    known = MECHANISMS.get(event["kind"])
    if known is None or event["version"] != 1:
        raise NotDerivedError(f"no reduction is known for the mechanism {event['kind']!r}")
    return known


def parts_of(event: Event) -> list[Event]:
    """Return the parts of a mechanism."""
    values = [v for value in event.values() for v in (value if type(value) is list else [value])]
    return [part for part in values if isinstance(part, dict)]


def relation_of(event: Event) -> str:
    """Return the neighbouring relation under which the ε of a mechanism holds.

    Raises:
        NotDerivedError: a part is unknown.
        ValueError: its parts have different relations.
    """
    known = mechanism_of(event)
    relations = {relation_of(part) for part in parts_of(event)}
    if known.relation is not None:
        return known.relation
    if len(relations) != 1:
        raise ValueError("its parts have different neighbouring relations")
    return relations.pop()


def title_of(event: Event) -> str:
    """Return the short name of a release."""
    return str(event["reason"]) if event["kind"] == "unaccounted" else mechanism_of(event).title


def words_of(event: Event) -> str:
    """Return the description of a mechanism in one clause."""
    return mechanism_of(event).words(event)


def reduce(event: Event) -> Reduction:
    """Return the reduction of a recorded mechanism.

    Raises:
        NotDerivedError: there is none.
    """
    return mechanism_of(event).reduce(event)


def _composed(events: Sequence[Event]) -> Reduction:
    reductions = [reduce(event) for event in events]
    return Reduction(
        tuple(part for reduction in reductions for part in reduction.parts),
        tuple(dict.fromkeys(line for reduction in reductions for line in reduction.lines)),
        reductions[0].by_renyi if len(reductions) == 1 else None,
    )


def _dp_accounting() -> Any:
    """Return the package, whose import takes a second: Confide's commands often do without it."""
    import dp_accounting

    return dp_accounting


def _gaussian(sigma: float) -> Part:
    if sigma < 0.05:
        raise NotDerivedError(f"the guarantee of σ = {sigma:.3g} is too weak for a grid")
    return lambda spacing: _dp_accounting().pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=spacing
    )


def _sampled(rate: float, sigma: float, times: int) -> Part:
    if rate == 1:
        return _gaussian(sigma / math.sqrt(times))
    _gaussian(sigma)
    pld = _dp_accounting().pld.privacy_loss_distribution
    return lambda spacing: pld.from_gaussian_mechanism(
        sigma, value_discretization_interval=spacing, sampling_prob=rate
    ).self_compose(times)


def _epsilon_delta(epsilon: float, delta: float) -> Part:
    """Return the dominating pair of all (ε, δ)-DP mechanisms."""
    parameters = _dp_accounting().pld.common.DifferentialPrivacyParameters(epsilon, delta)
    return lambda spacing: _dp_accounting().pld.privacy_loss_distribution.from_privacy_parameters(
        parameters, value_discretization_interval=spacing
    )


def _reduce_poisson(event: Event) -> Reduction:
    cycle = event.get("cycle", 1)
    phases = [(q, s, math.ceil(n / cycle)) for q, s, n in event["phases"]]
    theorem = (
        "(1 − q)N(0, σ²) + qN(1, σ²) and N(0, σ²) are a dominating pair (Zhu, Dong and Wang 2022,"
        " Theorem 11)"
    )
    if "cycle" in event:
        theorem = (
            f"noise of at most {cycle} bands, on batches from {cycle} parts in turn, is equivalent"
            f" to ⌈n/{cycle}⌉ Poisson-subsampled Gaussians (Choquette-Choo et al. 2023, Theorem 4)"
        )
    return Reduction(
        tuple(_sampled(*phase) for phase in phases),
        tuple(
            (f"{n} × PoissonSampled(q = {q:.6g}, Gaussian(σ = {s:.6g}))", theorem)
            for q, s, n in phases
        ),
    )


def _reduce_truncated(event: Event) -> Reduction:

    units, cap = event["declared_units"], event["cap"]

    def part(rate: float, sigma: float, times: int) -> tuple[Part, tuple[str, str]]:
        cuts = list(_cuts(units, cap, rate))
        _gaussian(sigma / 2)

        def profile(eps: Any) -> tuple[Any, Any]:
            plain = _sampled_profile(eps, rate, 1 / sigma)
            worst = list(plain)
            for cut, replacing in cuts:
                replaced = _sampled_profile(eps, replacing, 2 / sigma)
                for side in (0, 1):
                    mixed = (1 - cut) * plain[side] + cut * replaced[side]
                    worst[side] = np.maximum(worst[side], mixed)
            return worst[0], worst[1]

        cut = cuts[0][0] if cuts else 0.0
        return _from_profile(profile, 2 / sigma, times), (
            f"{times} × mixture of PoissonSampled(q = {rate:.6g}, Gaussian(σ)) with"
            f" σ = {sigma:.6g}, and, with probability at most {cut:.3g}, σ/2 at the rate of one of"
            f" {cap} places; the worst case of 1 to {units} units",
            "a truncated batch changes by at most twice the clip norm, any other batch by at most"
            " the clip norm (decomposition of arXiv:2508.15089; truncation is independent of the"
            " unit)",
        )

    parts, lines = zip(*(part(*phase) for phase in event["phases"]), strict=True)
    return Reduction(parts, lines)


def _cuts(units: int, cap: int, rate: float) -> Iterator[tuple[float, float]]:
    """Yield bounds on (probability of a cut, rate), for ranges of the number of other units."""

    most, top, width = rate * cap / (cap + 1), units - 1, 1
    while top >= cap and (cut := float(scipy.stats.binom.sf(cap - 1, top, rate))) > 0:
        bottom = max(cap, top - width + 1)
        least = float(scipy.stats.binom.sf(cap - 1, bottom, rate))
        taken = float(scipy.stats.binom.sf(cap, bottom + 1, rate)) * cap / (bottom + 1)
        yield cut, min(most, taken / least) if least else most
        top, width = bottom - 1, units - bottom


def _sampled_profile(eps: Any, rate: float, mu: float) -> tuple[Any, Any]:
    """Return both directions of the profile of the Poisson-subsampled Gaussian mechanism."""

    if rate == 1:
        return (_gaussian_delta(eps, mu),) * 2
    with_unit = rate * _gaussian_delta(np.log1p(np.expm1(eps) / rate), mu)
    rest = -np.expm1(np.minimum(eps + math.log1p(-rate), 0.0))  # 1 − e^ε(1 − q), or 0
    safe = np.where(rest > 0, rest, 1.0)
    without = safe * _gaussian_delta(eps + math.log(rate) - np.log(safe), mu)
    return with_unit, np.where(rest > 0, without, 0.0)


def _reduce_fixed_size(event: Event) -> Reduction:

    def part(batch: int, sigma: float, times: int) -> Part:
        rate, mu = batch / event["slots"], 2 / sigma
        _gaussian(sigma)

        def profile(eps: Any) -> tuple[Any, Any]:
            both = rate * _gaussian_delta(np.log1p(np.expm1(eps) / rate), mu)
            return both, both

        return _from_profile(profile, mu, times)

    theorem = (
        "sampling without replacement, replace-one (Balle, Barthe and Gaboardi 2018, Theorems 2"
        " and 11)"
    )
    lines = [
        f"{n} × the profile q·G(ln(1 + (e^ε − 1)/q)), q = {batch / event['slots']:.6g}, of a"
        f" Gaussian G with μ = {2 / s:.6g}"
        for batch, s, n in event["phases"]
    ]
    parts = tuple(part(*phase) for phase in event["phases"])
    return Reduction(parts, tuple((line, theorem) for line in lines))


def _reduce_gaussian(event: Event) -> Reduction:
    times = event["count"]
    sigma = event["noise_multiplier"] / math.sqrt(times)
    theorem = (
        "k Gaussian mechanisms compose to one with σ/√k (Dong, Roth and Su 2022, Corollary 3.3)"
    )
    line = (f"Gaussian(σ = {sigma:.6g}) for {times} Gaussian mechanism(s)", theorem)
    return Reduction((_gaussian(sigma),), (line,))


def _reduce_histogram(event: Event) -> Reduction:
    """Discrete Gaussian noise on the words that are present, cut at a threshold.

    A unit has N words; ℓ of them occur in no other unit. Each of these passes the threshold with
    probability τ and reveals the unit. If none passes, m = N − ℓ counts differ by 1.
    """

    words, sigma = event["words_per_unit"], event["sigma"]
    _gaussian(sigma / math.sqrt(words))
    tau = float(_tail(np.array([event["threshold"] - 1.0]), sigma)[0])
    lone_words = {0, words} | {1 << i for i in range(words.bit_length()) if 1 << i < words}

    def part(spacing: float) -> Any:
        of_count = _dp_accounting().pld.privacy_loss_distribution.from_discrete_gaussian_mechanism(
            sigma, value_discretization_interval=spacing, use_connect_dots=True
        )
        shared = {m: of_count.self_compose(m) for m in {words - lone for lone in lone_words} - {0}}

        def moved(eps: Any, m: int) -> Any:
            least = np.maximum(0.0, -np.expm1(np.minimum(eps, 0.0)))
            if m == 0:
                return least
            return np.maximum(least, shared[m].get_delta_for_epsilon(eps))

        def profile(eps: Any) -> tuple[Any, Any]:
            with_unit, without = np.zeros_like(eps), np.zeros_like(eps)
            for lone in sorted(lone_words):
                stay = lone * math.log1p(-tau)
                passes = -math.expm1(stay)
                hidden = moved(eps - stay, words - lone)
                with_unit = np.maximum(with_unit, passes + (1 - passes) * hidden)
                without = np.maximum(without, moved(eps + stay, words - lone))
            return with_unit, without

        return _from_profile(profile, math.sqrt(words) / sigma, 1)(spacing)

    line = (
        f"DiscreteGaussian(σ = {sigma:.6g}) on each of up to {words} counts, and words of a single"
        f" unit, each of which passes with probability τ = {tau:.3g}; the worst number of such"
        " words at each ε",
        "if no such word passes, only the other counts differ",
    )
    return Reduction((part,), (line,))


_LATTICE = math.sqrt(256.0**2 * 1024.0**2 + 1280.0**2)  # S: deviation of the noise of weights


def _sigma_of_weights(event: Event) -> float:
    """Return the noise of all rounds, relative to the l2 norm of a unit over all rounds."""
    norm = math.sqrt(math.fsum(float(scale) ** 2 for scale in event["scales"]))
    return math.sqrt(_LATTICE**2 - 16) / norm


def _reduce_noised_weights(event: Event) -> Reduction:
    """Noised weights on a lattice, in rounds; items above a threshold are released."""

    items, scales = event["items_per_unit"], event["scales"]
    sigma, coin = _sigma_of_weights(event), 0.0
    for first, last, threshold in event["checks"]:
        given = sum(math.ceil(event["largest"] * scale) + 1 for scale in scales[first : last + 1])
        passes = float(_tail(threshold - given, math.sqrt(last - first + 1) * _LATTICE))
        coin -= math.expm1(items * math.log1p(-min(passes, 1 - 1e-16)))
    coin = min(1.0, coin)
    line = (
        f"Gaussian(σ = {sigma:.6g}) for {len(scales)} round(s), and an added δ = {coin:.3g} for an"
        " item of a single unit that passes",
        "adaptively composed Gaussians equal one with μ² = Σ(norm/S)² (Dong, Roth and Su 2022,"
        " Corollary 3.3); a discrete Gaussian of deviation S counts as a continuous one of"
        " √(S² − 16); an item of a single unit passes only by its own noise (Confide,"
        " docs/proofs.md, “Items that one unit brings”)",
    )
    return Reduction((_gaussian(sigma), _epsilon_delta(0.0, coin)), (line,))


def _reduce_phrase_rounds(event: Event) -> Reduction:
    whole = _composed(event["rounds"])
    theorem = "adaptive composition of dominating pairs (Zhu, Dong and Wang 2022, Theorem 10)"
    line = ("rounds, composed as if each were fixed in advance", theorem)
    return Reduction(whole.parts, (*whole.lines, line))


def _reduce_selection(event: Event) -> Reduction:
    """The best of a secret random number of trainings, by Rényi DP."""
    dpa = _dp_accounting()
    # Hides warnings about orders whose series diverge.
    logging.getLogger("absl").setLevel(logging.ERROR)
    orders = [1 + i / 20 for i in range(1, 200)] + list(range(11, 129)) + [160, 192, 256, 512, 1024]
    candidates = [_dp_event(candidate) for candidate in event["candidates"]]
    curves = [np.asarray(dpa.rdp.RdpAccountant(orders).compose(c).rdp) for c in candidates]
    worst = next((i for i, c in enumerate(curves) if all(np.all(c >= d) for d in curves)), None)
    if worst is None:
        raise NotDerivedError("no candidate of the selection costs most at every Rényi order")
    shape, gamma, mean = event["eta"], event["gamma"], event["mean"]
    if event["count"] == "poisson":
        shape = math.inf
    elif shape == 0:
        mean = (1 / gamma - 1) / math.log(1 / gamma)
    else:
        mean = shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))
    best = dpa.dp_event.RepeatAndSelectDpEvent(candidates[worst], mean, shape)

    def by_renyi(delta: float) -> float:
        return float(dpa.rdp.RdpAccountant(orders).compose(best).get_epsilon(delta))

    line = (
        f"RepeatAndSelect(mean = {mean:.6g}, shape = {shape:g}) of the costliest of"
        f" {len(candidates)} candidates, by Rényi DP",
        "Papernot and Steinke 2022, Theorems 2 and 6; a randomly drawn candidate costs at most as"
        " much as the worst candidate at each order (van Erven and Harremoës 2014, Theorem 13)",
    )
    pair = _epsilon_delta(by_renyi(event["delta"]), event["delta"])
    return Reduction((pair,), (line,), by_renyi)


def _dp_event(event: Event) -> Any:
    """Return a training as an event for dp_accounting's Rényi accountant."""
    dpa = _dp_accounting()
    match event["kind"]:
        case "composed":
            return dpa.ComposedDpEvent([_dp_event(part) for part in event["events"]])
        case "gaussian":
            return dpa.GaussianDpEvent(event["noise_multiplier"] / math.sqrt(event["count"]))
        case "poisson_gaussian" | "cyclic_poisson_gaussian":
            phases = [
                (dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(s)), n)
                for q, s, n in event["phases"]
            ]
            cycle = event.get("cycle", 1)
            return dpa.ComposedDpEvent(
                [dpa.SelfComposedDpEvent(update, math.ceil(n / cycle)) for update, n in phases]
            )
    raise NotDerivedError(f"a selection among trainings of the kind {event['kind']!r}")


def _reduce_unaccounted(event: Event) -> Reduction:
    raise NotDerivedError("it has no guarantee")


def _tail(k: Any, sigma: float) -> Any:
    """Return Pr[Z ≥ k] of a discrete Gaussian at whole numbers k."""

    if sigma > 2e4:  # the midpoint rule is exact to 1/σ²
        return scipy.special.ndtr((0.5 - k) / sigma)
    reach = math.ceil(16 * sigma) + 2
    weights = np.exp(-(np.arange(-reach, reach + 1, dtype=float) ** 2) / (2 * sigma**2))
    tails = np.append(np.cumsum(weights[::-1])[::-1] / weights.sum(), 0.0)
    return tails[np.clip(k + reach, 0, len(weights)).astype(int)]


def _gaussian_delta(eps: Any, mu: float) -> Any:
    """Return the profile of the Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""

    upper = scipy.special.log_ndtr(mu / 2 - eps / mu)
    lower = eps + scipy.special.log_ndtr(-mu / 2 - eps / mu)
    return np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0))


def _from_profile(profile: Callable[[Any], tuple[Any, Any]], mu: float, times: int) -> Part:
    """Return the PLD of a privacy profile, by the library's "connect the dots" method.

    Args:
        profile: ε ≥ 0 -> (δ for data with the unit against data without it, and the reverse δ).
        mu: parameter of a Gaussian mechanism whose losses cover the same range.
        times: number of compositions.
    """

    def part(spacing: float) -> Any:
        size = math.ceil((mu * mu / 2 + 12 * mu) / spacing) + 1
        eps = np.arange(size + 1) * spacing
        removed, added = (np.maximum.accumulate(d[::-1])[::-1] for d in profile(eps))

        def direction(forth: Any, back: Any) -> Any:
            below = 1 - np.exp(-eps[:0:-1]) * (1 - back[:0:-1])  # at −ε
            deltas = np.clip(np.concatenate([below, forth]), 0.0, 1.0)
            deltas = np.maximum.accumulate(deltas[::-1])[::-1]
            return _dp_accounting().pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
                spacing, -size, size, deltas
            )

        whole = _dp_accounting().pld.privacy_loss_distribution.PrivacyLossDistribution(
            direction(removed, added), direction(added, removed)
        )
        return whole.self_compose(times) if times > 1 else whole

    return part


def _phased(batches: str, sampled: str = "sampling rate") -> Callable[[Event], str]:
    return lambda e: (
        f"DP-SGD on {batches.format(**e)}: "
        + "; then ".join(
            f"{n} updates, {sampled} {rate:.4g}, effective noise multiplier σ = {s:g}"
            for rate, s, n in e["phases"]
        )
    )


def _words_of_weights(event: Event) -> str:
    rounds = len(event["scales"])
    return (
        f"noised weights (elimination), at most {event['items_per_unit']} items per unit: a unit's"
        " items share a weight of norm 1 evenly, round by round, without what passed and what fell"
        f" behind; {rounds} round{'s' * (rounds > 1)} of Gaussian noise, in all σ ="
        f" {_sigma_of_weights(event):.4g} times a unit's norm, noised weights below"
        f" {event['checks'][-1][2] / event['scales'][0]:.4g} dropped"
    )


def _words_of_rounds(event: Event) -> str:
    return "phrases in rounds: " + "; then ".join(
        f"of {length} words, {words_of(part)}"
        for length, part in zip(event["lengths"], event["rounds"], strict=True)
    )


def _words_of_selection(event: Event) -> str:
    law = f"truncated negative binomial, η = {event['eta']:g}, γ = {event['gamma']:.4g}"
    if event["count"] == "poisson":
        law = f"Poisson, mean {event['mean']:g}"
    return (
        f"the best of a secret random number of trainings ({law}), each of one of"
        f" {len(event['candidates'])} candidates drawn at random, the costliest of them"
        f" {words_of(max(event['candidates'], key=_cost))}; ε by Rényi, no PLD is known"
    )


def _cost(candidate: Event) -> float:
    """Return the Rényi divergence of a training at order 8; infinity if it is unknown."""
    try:
        return float(_dp_accounting().rdp.RdpAccountant([8]).compose(_dp_event(candidate)).rdp[0])
    except NotDerivedError:
        return math.inf


_RATE = _within(0, 1)
_PHASES = {"phases": [(_RATE, _SIGMA, _STEPS)]}
MECHANISMS: dict[str, Mechanism] = {
    "poisson_gaussian": Mechanism(
        "DP training", _ADD_REMOVE, _PHASES, _phased("Poisson samples"), _reduce_poisson
    ),
    "cyclic_poisson_gaussian": Mechanism(
        "DP training",
        _ADD_REMOVE,
        {"cycle": _STEPS, **_PHASES},
        _phased("Poisson samples from {cycle} parts in turn, noise correlated over updates"),
        _reduce_poisson,
    ),
    "truncated_poisson_gaussian": Mechanism(
        "DP training",
        _ADD_REMOVE,
        {"declared_units": _whole(1), "cap": _whole(1), **_PHASES},
        _phased("Poisson samples cut to {cap} units"),
        _reduce_truncated,
    ),
    "fixed_size_gaussian": Mechanism(
        "DP training",
        _REPLACE,
        {"slots": _whole(1), "phases": [(_within(0, 1e15), _SIGMA, _STEPS)]},
        _phased("batches of a fixed size", "batch"),
        _reduce_fixed_size,
    ),
    "gaussian": Mechanism(
        "Gaussian mechanism",
        _ADD_REMOVE,
        {"noise_multiplier": _SIGMA, "count": _STEPS},
        lambda e: f"the Gaussian mechanism, {e['count']} times, σ = {e['noise_multiplier']:g}",
        _reduce_gaussian,
    ),
    "shuffled_gaussian": Mechanism(
        "DP training",
        _ZERO_OUT,
        {"noise_multiplier": _SIGMA, "count": _STEPS},
        lambda e: (
            f"DP-SGD on shuffled epochs, unamplified: {e['count']} epochs,"
            f" σ = {e['noise_multiplier']:g}"
        ),
        _reduce_gaussian,
    ),
    "thresholded_histogram": Mechanism(
        "word histogram",
        _ADD_REMOVE,
        {"words_per_unit": _whole(1, 10**6), "sigma": _SIGMA, "threshold": _whole(1)},
        lambda e: (
            f"counts of words, at most {e['words_per_unit']} distinct words per unit, discrete"
            f" Gaussian noise of σ = {e['sigma']:g} on each, noised counts below {e['threshold']}"
            " dropped"
        ),
        _reduce_histogram,
    ),
    "noised_weights": Mechanism(
        "word selection",
        _ADD_REMOVE,
        {
            "items_per_unit": _whole(1, 10**6),
            "scales": [_whole(1)],
            "checks": [(_whole(0), _whole(0), _whole(1))],
            "largest": _RATE,
        },
        _words_of_weights,
        _reduce_noised_weights,
    ),
    "phrase_rounds": Mechanism(
        "phrases",
        None,
        {"rounds": [_EVENT], "lengths": [_whole(2)]},
        _words_of_rounds,
        _reduce_phrase_rounds,
    ),
    "composed": Mechanism(
        "several releases",
        None,
        {"events": [_EVENT]},
        lambda e: "; and ".join(words_of(part) for part in e["events"]),
        lambda e: _composed(e["events"]),
    ),
    "random_count_selection": Mechanism(
        "the best of several DP pre-trainings",
        None,
        {
            "candidates": [_EVENT],
            "count": {"poisson", "truncated-negative-binomial"},
            "delta": _DELTA,
            "eta": lambda v: _REAL(v) and -1 < v < 1e6,
            "gamma": lambda v: _REAL(v) and 0 <= v < 1,
            "mean": lambda v: _REAL(v) and 0 <= v < 1e9,
        },
        _words_of_selection,
        _reduce_selection,
    ),
    "unaccounted": Mechanism(
        "",
        _ADD_REMOVE,
        {"reason": _TEXT},
        lambda e: f"no private mechanism ({e['reason']})",
        _reduce_unaccounted,
    ),
}


# --- ε and ceilings, derived


def _settled_pld(reduction: Reduction, delta: float) -> tuple[Any, float]:
    """Return the composed PLD on a sufficiently fine grid, and its ε at δ."""
    spacing, before = 4e-3, math.inf
    while True:
        first, *rest = (part(spacing) for part in reduction.parts)
        for other in rest:
            first = first.compose(other)
        epsilon = float(first.get_epsilon_for_delta(delta))
        if math.isinf(epsilon) or abs(before - epsilon) <= _SETTLED * epsilon:
            return first, epsilon
        before, spacing = epsilon, min(spacing / 4, max(epsilon, 4 * _FINEST) / 250)
        if spacing < _FINEST:
            return first, epsilon


def _epsilon_of(reduction: Reduction, delta: float) -> float:
    if reduction.by_renyi is not None:
        return reduction.by_renyi(delta)
    return _settled_pld(reduction, delta)[1]


@dataclass(frozen=True)
class Derived:
    """The figures that dp_accounting derives for one claim.

    Attributes:
        epsilon: ε at the claim's δ; None if it could not be derived.
        lines: pairs of a reduced mechanism and the theorem of its reduction.
        ceilings: false positive rate -> largest true positive rate.
        why_not: reason why ε was not derived; empty if it was.
    """

    epsilon: float | None
    lines: tuple[tuple[str, str], ...] = ()
    ceilings: Mapping[float, float] = field(default_factory=dict)
    why_not: str = ""


def derive(events: Sequence[Event], delta: float, rates: Sequence[float] = ()) -> Derived:
    """Return ε of the composed mechanisms, and the ceilings on attacks at these rates."""
    try:
        whole = _composed(events)
        pld, epsilon = _settled_pld(whole, delta) if rates else (None, math.nan)
        if not rates or whole.by_renyi is not None:
            epsilon = _epsilon_of(whole, delta)
        ceilings = {rate: _ceiling(pld, rate) for rate in rates}
    except NotDerivedError as error:
        return Derived(None, why_not=str(error))
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as e:
        return Derived(None, why_not=f"a mechanism cannot be read ({type(e).__name__})")
    return Derived(epsilon, whole.lines, ceilings)


def _ceiling(pld: Any, fpr: float) -> float:
    """Return the least over ε of min(e^ε·FPR + δ, 1 − e^{−ε}(1 − δ − FPR)).

    Kairouz, Oh and Viswanath 2015, Theorem 2.1; Dong, Roth and Su 2022, Proposition 2.12.
    """

    best, low, high = 1.0, 0.0, 40.0
    for _ in range(4):  # refines the grid around the best ε
        eps = np.linspace(low, high, 400)
        deltas = np.asarray(pld.get_delta_for_epsilon(eps))
        bound = np.minimum(np.exp(eps) * fpr + deltas, 1 - np.exp(-eps) * (1 - deltas - fpr))
        middle, step = float(eps[int(np.argmin(bound))]), (high - low) / 399
        best = min(best, float(np.min(bound)))
        low, high = max(0.0, middle - 4 * step), middle + 4 * step
    return best


def understates(claimed: float, derived: float) -> bool:
    """Return whether a claimed bound is below the derived number by more than the tolerance."""
    return not claimed >= derived * (1 - TOLERANCE) - _ROUNDING


# --- the pages, generated from the data

Block = tuple[str, Any]  # h1, h2, h3, p, quote, pre: text; table: (headers, rows); list: lines


def neighbours_in_words(relation: str, unit: str) -> str:
    """Return the difference of neighbouring data sets in words."""
    return {
        _ADD_REMOVE: f"one {unit} is added or removed",
        _ZERO_OUT: f"one {unit}'s contribution is replaced by nothing",
        _REPLACE: f"one {unit} is replaced by any other",
    }[relation]


def promise(claim: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs on the guarantee for one data set, in Markdown."""
    unit, epsilon, delta = claim["unit"], claim["epsilon"], claim["delta"]
    if example := claim["releases"][0]["event"].get("example"):
        unit = f"{unit} of {example}"
    if epsilon == "inf":
        return [
            f"**Not private.** The text of the data set “{claim['dataset']}” went into it with no"
            " guarantee (ε = ∞). It must stay with the operator of the data: not exported, not"
            " published, not promoted."
        ]
    if epsilon is None:
        return [
            "**No total is claimed.** Its releases protect different things, or by different"
            " notions of neighbouring data, and such guarantees do not add up. Each is below."
        ]
    if not delta * (claim["declared_units"] or 0) < 1:
        return [
            f"**No claim is made.** δ = {delta:.3g} in total is not below"
            f" 1/{claim['declared_units']}, one in the declared number of units: publishing one"
            f" {unit} whole would count as private."
        ]
    if claim["seed_known"]:
        return [
            f"With a secret seed the same steps would have been ({epsilon:.4g}, {delta:.3g})-"
            f"differentially private for one {unit}."
        ]
    odds = math.exp(min(epsilon, 700.0))
    times = f"{odds:.3g}" if odds < 100 else f"{odds:,.0f}" if odds < 1e7 else "astronomically many"
    weak = " With an ε above 10 the formal promise is weak, and it is all that is promised."
    return [
        f"It is **({epsilon:.4g}, {delta:.3g})-differentially private** for one **{unit}** of the"
        f" data set “{claim['dataset']}”: ε = {epsilon:.4g}, δ = {delta:.3g}, where"
        f" {neighbours_in_words(claim['neighbours'], unit)}.",
        f"In plain words: any conclusion about one {unit} that an observer of this model may reach,"
        f" with any other knowledge and any effort, has a probability of at most {times} times its"
        f" probability if that {unit} were not in the data, plus at most {delta:.3g}.",
        f"This does not mean that nothing about a {unit} can be inferred: the model learns the"
        f" content that many people's texts share, as intended. The guarantee protects one {unit},"
        " not several together: for k of them it is kε and δ(e^kε − 1)/(e^ε − 1). It concerns this"
        " model alone: an observer of several models made from the same text learns more, and the"
        " data set's budget bounds it." + (weak if epsilon > 10 else ""),
    ]


def statement_words(statement: Mapping[str, Any]) -> str:
    """Return the content of PRIVACY.md, the privacy statement in words."""
    texts = [_words_of_claim(claim) for claim in claims_of(statement)]
    after = statement.get("released_after_updates")
    if after and all(claim["epsilon"] != "inf" for claim in claims_of(statement)):
        *earlier, last = after
        texts.append(
            f"Of its pre-training {len(after)} models are released: after"
            f" {', '.join(map(str, earlier))} and {last} updates. The guarantee above covers all of"
            " them together, and none is charged by itself: it is of the noised sums of all"
            " updates, and each of these models is computed from those up to its own update.\n"
        )
    return "\n".join(texts)


def _words_of_claim(claim: Mapping[str, Any]) -> str:
    paragraphs = ["# Privacy of this model"]
    if claim["made_up"]:
        paragraphs.append(
            "**The private text is made up or public.** Nobody's privacy is at stake; the figures"
            " below show what would be claimed."
        )
    if not claim["releases"]:
        return "\n\n".join([*paragraphs, "No private text was used to make it."]) + "\n"
    if claim["seed_known"]:
        paragraphs.append(
            "**Not private: known seed.** The random numbers can be repeated by anyone who knows"
            " the seed, and the noise subtracted. No claim is made."
        )
    paragraphs += promise(claim)
    releases = []
    for release in claim["releases"]:
        epsilon = "∞" if release["epsilon"] == "inf" else f"{release['epsilon']:.4g}"
        releases.append(
            f"{release['mechanism']} (by itself ε = {epsilon} at δ = {release['delta']:.3g};"
            f" ledger entry {release['ledger_id']})"
        )
    for title, items in (
        ("Releases and their mechanisms", releases),
        ("Assumptions", claim["assumptions"]),
    ):
        if items:
            paragraphs.append("\n".join([f"{title}:", "", *(f"- {item}" for item in items)]))
    return "\n\n".join(paragraphs) + "\n"


def claims_of(statement: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the claims of a statement, one per budget."""
    return [statement, *statement.get("others", ())]


def verdict(evidence: Mapping[str, Any], statement: Mapping[str, Any]) -> tuple[str, str]:
    """Return the headline and an explanation from the derivation and the audits."""
    audits = evidence["audits"]
    if against := [audit["finding"] for audit in audits if audit["verdict"] == "contradicted"]:
        return "An audit contradicts the claim", " ".join(against)
    if invalid := [audit["finding"] for audit in audits if audit["verdict"] == "invalid"]:
        return "An audit of the claim is invalid", " ".join(invalid)
    run = {audit["key"] for audit in audits if audit["verdict"] != "not run"}
    of_audits = (
        f"{len(run)} of {len({audit['key'] for audit in audits})} audits were run, and none"
        " contradicts the claim."
    )
    figures = [
        (claimed["epsilon"], epsilon)
        for claim, derived in zip(claims_of(statement), evidence["derived"], strict=True)
        for claimed, epsilon in zip(
            (claim, *claim["releases"]), (derived["epsilon"], *derived["releases"]), strict=True
        )
        if claimed["epsilon"] is not None
    ]
    known = [(claimed, derived) for claimed, derived in figures if derived is not None]
    if len(known) < len(figures):
        missing = f"{len(figures) - len(known)} of {len(figures)} figures are not derived."
        headline = "Another library could not derive a part of the claim"
        return headline, f"{missing} {of_audits}"
    above = max((claimed / derived - 1 for claimed, derived in known if derived), default=0.0)
    return (
        "Another library derives no larger ε",
        f"{evidence['derived_by']}, which is independent of Confide, derives every ε below. The"
        f" claims exceed its figures by at most {100 * max(above, 1e-4):.2g}%. {of_audits}",
    )


_NIST = (  # Guidelines for Evaluating Differential Privacy Guarantees (2025), point by point
    ("Privacy parameters, unit, neighbours", "listed above for each claim"),
    ("Variant", "(ε, δ), from composed privacy loss distributions in both directions"),
    ("Size of the data", "private; the declared number of units is a public bound"),
    ("Composition", "all releases under a budget are composed, at the sum of their δ"),
    ("Privacy budget", "see the ledger of each data set above"),
    ("Mechanisms and sampling", "listed above for each release"),
    ("Correctness", "checked by derivation with another library (check_evidence.py) and by audits"),
    ("Floating point", "noise is sampled exactly from random bits; gradient sums are float32"),
    (
        "Random numbers",
        "each release has a secret seed; its noise is drawn from SHAKE-256, or in training from"
        " AES-256, and its batches from Philox, each under a key derived by HMAC-SHA256",
    ),
    ("Utility", "measured by the model's step, see above"),
    ("Bias", "noise and clipping reduce utility most for rare words and small groups"),
    (
        "Trust model",
        "central: the operator is trusted with the text, recipients of the model are not",
    ),
    ("Side channels", "publishable outputs contain days, but no times of day and no sizes"),
    ("Security, access and collection of the data", "stated by the operator, see above"),
)


def document(
    evidence: Mapping[str, Any], ledger: Mapping[str, Any], statement: Mapping[str, Any]
) -> list[Block]:
    """Return the blocks of evidence.html and README.md, which show all fields of the data."""
    headline, detail = verdict(evidence, statement)
    edition = {
        "operator": "**Operator edition: do not publish.** It contains values without protection.",
        "publishable": "**Publishable edition.** The guarantee protects every figure that depends"
        " on private text.",
    }[evidence["edition"]]
    blocks: list[Block] = [
        ("h1", f"Evidence of privacy: {subject(evidence)}"),
        ("p", f"**{headline}.** {detail}"),
        ("quote", edition),
    ]
    if statement["made_up"]:
        blocks.append(("quote", "**Made-up or public data.** The claims are only examples."))
    for claim, derived in zip(claims_of(statement), evidence["derived"], strict=True):
        events = [release["event"] for release in claim["releases"]]
        blocks.append(("h2", f"The claim for the data set “{claim['dataset']}”"))
        blocks += [("p", text) for text in promise(claim)]
        hidden = ("others", "releases", "ledger_ids", "released_after_updates")
        shown = {name: value for name, value in claim.items() if name not in hidden}
        blocks += _blocks_of("claim", shown | {"derived_epsilon": derived["epsilon"]})
        releases = [
            {name: value for name, value in release.items() if name != "mechanism"}
            | {"derived_epsilon": epsilon}
            for release, epsilon in zip(claim["releases"], derived["releases"], strict=True)
        ]
        for name, rows in (("releases", releases), ("tpr_ceilings", derived["tpr_ceilings"])):
            blocks += [("h3", f"{_spaced(name)} of the claim"), *_blocks_of(name, rows)]
        if lines := _composed_lines(events):
            blocks.append(("h3", "How dp-accounting derives it"))
            blocks.append(("list", [f"{part}: {theorem}" for part, theorem in lines]))
    for extract in ledger["extracts"]:
        blocks.append(("h2", f"All charges to “{extract['dataset']}”"))
        blocks += _blocks_of("ledger extract", extract)
    for key in (
        "audits", "measures", "operator_words", "trained_by", "model", "made_by", "versions",
    ):  # fmt: skip
        blocks.append(("h2", _spaced(key).capitalize()))
        blocks += _blocks_of(key, _shown_audits(evidence) if key == "audits" else evidence[key])
    fields = [f"{file}: {', '.join(names)}" for file, names in RECORDED.items()]
    return [
        *blocks,
        ("h2", "NIST SP 800-226, point by point"),
        ("table", (("Point", "Answer"), _NIST)),
        ("h2", "How to check this evidence"),
        ("pre", "pip install dp-accounting\npython check_evidence.py --model FOLDER_OF_THE_MODEL"),
        (
            "p",
            "The script derives every ε, δ, neighbouring relation and ceiling from the recorded"
            " mechanisms, and generates this page again. It cannot confirm the following fields:",
        ),
        ("list", fields),
        ("p", f"Made by Confide on {evidence['created']}."),
    ]


def _shown_audits(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the audits as they are shown: a lower bound on ε has no upper end."""
    return [
        {**audit, **({"interval": f"≥ {_cell(low)}"} if audit["bounds_claim"] else {})}
        for audit in evidence["audits"]
        for low in (audit["interval"] or [None])[:1]
    ]


def _blocks_of(name: str, value: Any) -> list[Block]:
    """Return data as tables, with one row per field of a mapping or per item of a list."""
    if isinstance(value, list) and len(value) and isinstance(value[0], dict):
        if len(value[0]) > 9:  # too wide for one table
            return [
                block
                for item in value
                for block in [("h3", str(item.get("name", name))), *_blocks_of(name, item)]
            ]
        heads = list(value[0])
        rows = [[_cell(item.get(head)) for head in heads] for item in value]
        return [("table", ([_spaced(head) for head in heads], rows))]
    if not isinstance(value, dict):
        return [("p", _cell(value))]
    nested = {k: v for k, v in value.items() if isinstance(v, list) and v and type(v[0]) is dict}
    rows = [[_spaced(key), _cell(part)] for key, part in value.items() if key not in nested]
    blocks: list[Block] = [("table", (("field", "value"), rows))]
    for key, part in nested.items():
        blocks += [("h3", f"{_spaced(key)} of the {_spaced(name)}"), *_blocks_of(key, part)]
    return blocks


def _spaced(key: str) -> str:
    return key.replace("_", " ")


def _cell(value: Any) -> str:
    """Return a value as text: a mechanism in one clause, a number with five digits."""
    if isinstance(value, dict):
        if value.get("kind") in MECHANISMS:
            return f"{title_of(value)}: {words_of(value)}"
        return "; ".join(f"{_spaced(key)} {_cell(part)}" for key, part in value.items())
    if isinstance(value, list):
        return "; ".join(map(_cell, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    return "–" if value is None or value == "" else str(value)


def _composed_lines(events: Sequence[Event]) -> tuple[tuple[str, str], ...]:
    try:
        return _composed(events).lines
    except NotDerivedError:
        return ()


_KINDS = {"bert": "BERT", "gpt2": "GPT-2", "llama": "Llama"}


def subject(evidence: Mapping[str, Any]) -> str:
    """Return a short description of the model."""
    model, name = evidence["model"], evidence["operator_words"]["model_name"]
    kind = _KINDS.get(model["kind"], model["kind"] or "model")
    if model["layers"] and model["hidden"]:
        kind += f", {model['layers']} layers × {model['hidden']}"
    return kind if name == NOT_STATED else f"{name} ({kind})"


def card_metadata(evidence: Mapping[str, Any], statement: Mapping[str, Any]) -> str:
    """Return the metadata of a model card in Hugging Face's format, as YAML in flow style."""
    model, stated = evidence["model"], evidence["operator_words"]
    pipeline = "text-generation" if model["kind"] in ("gpt2", "llama") else "fill-mask"
    if model["step"] == "finetune":
        tags = (model["head"] or "entities") == "entities"
        pipeline = "token-classification" if tags else "text-classification"
    fields = ("dataset", "epsilon", "delta", "unit", "neighbours", "declared_units")
    claims = [claim for claim in claims_of(statement) if claim["releases"]]
    metadata = {key: stated[key] for key in ("language", "license") if stated[key] != NOT_STATED}
    metadata |= {
        "library_name": "transformers",
        "pipeline_tag": pipeline,
        "tags": ["differential-privacy", "confide", *([model["kind"]] if model["kind"] else [])],
        "datasets": [claim["dataset"] for claim in claims],
        _CLAIM_OF_CARD: [{key: c[key] for key in fields} for c in claims],
    }
    return "".join(f"{key}: {_yaml(value)}\n" for key, value in metadata.items())


def _yaml(value: Any) -> str:
    """Return YAML in flow style, which is JSON except for 2e-06: YAML reads this as text."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e") if re.fullmatch(r"\d+e[+-]?\d+", text) else text


def markdown(blocks: Sequence[Block]) -> str:
    """Return blocks as Markdown."""

    def cell(text: Any) -> str:
        return re.sub(r"([\\|<\[`])", r"\\\1", str(text))

    lines = []
    for kind, content in blocks:
        match kind:
            case "table":
                heads, rows = content
                bars = [list(map(cell, heads)), ["---"] * len(heads), *(map(cell, r) for r in rows)]
                text = "\n".join(f"| {' | '.join(bar)} |" for bar in bars)
            case "list":
                text = "\n".join(f"- {cell(item)}" for item in content)
            case "pre":
                text = "\n".join(f"    {line}" for line in content.splitlines())
            case _:
                text = {"h1": "# ", "h2": "## ", "h3": "### ", "quote": "> ", "p": ""}[kind] + cell(
                    content
                )
        lines.append(text)
    return "\n\n".join(lines) + "\n"


_STYLE = """
body { margin: 0; background: #f6f7f9; color: #1f2933; font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; border-top: 6px solid #0b6b53; padding-top: 1rem; }
h2 { font-size: 1.25rem; margin: 2rem 0 .5rem; }
p, li { max-width: 62rem; overflow-wrap: anywhere; }
blockquote { background: #e8eef6; border: 1px solid #c3d3e8; border-radius: 10px; margin: 1rem 0;
  padding: .7rem 1.1rem; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #dfe4ea; border-radius: 10px;
  margin: .8rem 0; padding: .4rem .8rem; }
table { border-collapse: collapse; width: 100%; font-size: .93rem; }
th, td { border-bottom: 1px solid #dfe4ea; padding: .45rem .55rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; min-width: 6.5rem; }
pre { background: #1f2933; border-radius: 8px; color: #f0f4f8; padding: .9rem 1rem; }
"""


def html_page(blocks: Sequence[Block]) -> str:
    """Return blocks as a self-contained HTML page."""

    def text(words: Any) -> str:
        return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(str(words)))

    def row(tag: str, cells: Sequence[Any]) -> str:
        return f"<tr>{''.join(f'<{tag}>{text(cell)}</{tag}>' for cell in cells)}</tr>\n"

    body = ""
    for kind, content in blocks:
        match kind:
            case "table":
                heads, rows = content
                inside = row("th", heads) + "".join(row("td", cells) for cells in rows)
                body += f'<div class="scroll"><table>\n{inside}</table></div>\n'
            case "list":
                body += f"<ul>\n{''.join(f'<li>{text(i)}</li>{chr(10)}' for i in content)}</ul>\n"
            case _:
                tag = "blockquote" if kind == "quote" else kind
                body += f"<{tag}>{text(content)}</{tag}>\n"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(blocks[0][1])}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def pages(
    evidence: Mapping[str, Any], ledger: Mapping[str, Any], statement: Mapping[str, Any]
) -> dict[str, str]:
    """Return the generated pages of the pack by name."""
    blocks = document(evidence, ledger, statement)
    return {
        PAGE: html_page(blocks),
        CARD: f"---\n{card_metadata(evidence, statement)}---\n\n{markdown(blocks)}",
        WORDS: statement_words(statement),
    }


# --- the check


@dataclass
class Findings:
    """The result of a check.

    Attributes:
        faults: one line per fault.
        not_derived: one line per part that could not be derived.
        compared: one line per comparison.
    """

    faults: list[str] = field(default_factory=list)
    not_derived: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code."""
        if self.faults:
            return FAULTY
        return NOT_DERIVED if self.not_derived else HOLDS


def check(folder: Path, model: Path | None = None) -> Findings:
    """Check a pack, and optionally whether it belongs to a model.

    Args:
        folder: folder of the pack.
        model: folder of the exported model; None to skip the comparison.

    Raises:
        NotAPackError: the folder contains no evidence of this version.
    """
    evidence = _read(folder / EVIDENCE)
    if not isinstance(evidence, dict) or evidence.get("version") != 3:
        raise NotAPackError(f"{EVIDENCE} has a version that this script does not know")
    faults = list(misshapen(evidence, SHAPES[EVIDENCE], "evidence"))
    findings = Findings(faults or list(_file_faults(folder, evidence)))
    if findings.faults:
        return findings
    if _bytes_of(folder / SCRIPT) != _bytes_of(Path(__file__)):
        raise NotAPackError(f"the pack has another {SCRIPT}: use the script of its version")
    ledger, statement = _read(folder / LEDGER), _read(folder / STATEMENT)
    if isinstance(statement, dict):
        statement = {"others": [], "released_after_updates": []} | statement
    findings.faults += misshapen(ledger, SHAPES[LEDGER], "ledger")
    findings.faults += misshapen(statement, SHAPES[STATEMENT], "statement")
    if not findings.faults:
        findings.faults += _audit_faults(evidence, statement)
        findings.faults += _relation_faults(ledger)
    if not findings.faults:
        findings.faults += _agreement_faults(evidence, ledger, statement)
    if not findings.faults:
        written = pages(evidence, ledger, statement)
        findings.faults += (
            f"{name} differs from the page generated from the data"
            for name, text in written.items()
            if _bytes_of(folder / name) != text.encode()
        )
        if model is not None:
            findings.faults += _model_faults(model, evidence)
            findings.faults += _card_faults(model / CARD, card_metadata(evidence, statement))
            findings.compared.append(f"the model's {CARD}: only the claim in its metadata")
        _derive_all(evidence, statement, findings)
    return findings


def _bytes_of(file: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        NotAPackError: it is not a regular file, or it is too large.
    """
    if file.is_symlink() or not file.is_file() or file.stat().st_size > _MOST_BYTES:
        raise NotAPackError(f"{file}: not a file of a pack")
    return file.read_bytes()


def _read(file: Path) -> Any:
    try:
        return read_json(_bytes_of(file))
    except OSError:
        raise NotAPackError(f"{file}: cannot be read") from None
    except ValueError as error:
        raise NotAPackError(f"{file}: not JSON: {error}") from None


def _file_faults(folder: Path, evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each file that is missing, unknown or changed."""
    named = evidence["files"]
    for name in sorted(FILES ^ named.keys()):
        yield f"{EVIDENCE} {'names' if name in named else 'does not name'} {name}"
    held = {entry.name: entry for entry in folder.iterdir()}
    for name in sorted(FILES - held.keys()):
        yield f"{name} is missing"
    for name in sorted(held.keys() - FILES - {EVIDENCE}):
        yield f"{name} does not belong to a pack"
    for name in sorted(FILES & held.keys() & named.keys()):
        if held[name].is_symlink() or not held[name].is_file():
            yield f"{name} is not a regular file"
        elif _digest_of(held[name]) != named[name]:
            yield f"{name} is not the file that {EVIDENCE} names"


def _digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _model_faults(model: Path, evidence: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each file of the model's folder that is missing, unknown or changed."""
    named: Mapping[str, str] = evidence["model"]["files"]
    for name in (STATEMENT, WORDS):
        if named.get(name) != evidence["files"][name]:
            yield f"the model and the pack have different files {name}"
    held = {}
    for entry in sorted(model.rglob("*")):
        name = entry.relative_to(model).as_posix()
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            yield f"the model's {name} is not a regular file"
        elif entry.is_file() and name != CARD:
            held[name] = _digest_of(entry)
    adapter = {n.removeprefix("adapter/"): d for n, d in named.items() if n.startswith("adapter/")}
    merged = {n: d for n, d in named.items() if not n.startswith("adapter/")}
    weights = ("config.json", "model.safetensors")
    alone = {n: d for n, d in merged.items() if n not in weights} | adapter
    forms = (merged, named, alone) if adapter else (merged,)  # as `confide export` writes them
    form = min(forms, key=lambda form: len(form.items() ^ held.items()))
    if not any(name.endswith(".safetensors") for name in form):
        yield "this evidence names no weights"
    for name in sorted(form.keys() | held.keys()):
        if name not in held:
            yield f"the model's folder lacks {name}"
        elif name not in form:
            yield f"the model's folder contains {name}, which this evidence does not name"
        elif form[name] != held[name]:
            yield f"the model's {name} differs from the file named by this evidence"


def _card_faults(card: Path, metadata: str) -> Iterator[str]:
    """Yield a line if the card's metadata lack the claim; its other words are the operator's.

    Each line must be a key and JSON, because YAML has ways to hide one claim and to repeat a key.
    """
    if not card.is_file():
        return
    (claim,) = (line for line in metadata.splitlines() if line.startswith(_CLAIM_OF_CARD))
    begin, *lines = _bytes_of(card).decode(errors="replace").split("\n")
    head = lines[: lines.index("---")] if begin == "---" and "---" in lines else []
    if claim not in head:
        yield f"the metadata of the model's {CARD} state another claim than {WORDS}"
    keys = {line.partition(":")[0] for line in head}
    if not all(map(_is_metadata, head)) or len(keys) < len(head):
        yield f"the metadata of the model's {CARD} are not lines of one key and its value in JSON"


def _is_metadata(line: str) -> bool:
    """Return whether a line is a key and its value in JSON, which YAML reads in the same way."""
    key, _, value = line.partition(": ")
    try:
        read_json(value.encode())
    except ValueError:
        return False
    return line.isprintable() and re.fullmatch("[a-z_]+", key) is not None


def _audit_faults(evidence: Mapping[str, Any], statement: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each audit that contradicts the claim or has inconsistent figures."""
    totals = [claim["epsilon"] for claim in claims_of(statement)]
    weakest = math.inf if None in totals else max(totals)
    if not evidence["audits"]:
        yield "no audit is listed, not even as not run"
    for audit in evidence["audits"]:
        where = f"the audit “{audit['name']}”"
        run = audit["verdict"] != "not run"
        parts = ("level", "value", "interval", "confidence", "null_control")
        if any((audit[part] is not None) != run for part in parts) or bool(audit["power"]) != run:
            yield f"{where} must have figures if and only if it was run"
            continue
        low, high = audit["interval"] or (0.0, 0.0)
        if low > high:
            yield f"{where}: its interval is empty"
        ceiling = math.inf if audit["ceiling"] is None else audit["ceiling"]
        above = audit["bounds_claim"] and low > min(ceiling, weakest)
        if audit["verdict"] == "invalid":
            yield f"{where} is invalid: {audit['finding']}"
        elif above or audit["verdict"] == "contradicted":
            yield f"{where} contradicts the claim: {audit['finding']}"


def _relation_faults(ledger: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each relation or unit that does not follow from the mechanism."""
    for entry in (entry for extract in ledger["extracts"] for entry in extract["entries"]):
        where, event = f"release {entry['id']}", entry["event"]
        try:
            _read_event(event)
            if entry["neighbours"] != relation_of(event):
                yield f"{where}: its mechanism has the relation {relation_of(event)}"
        except ValueError as error:
            yield f"{where}: {error}"
        units = {(part["unit"], part.get("example")) for part in _within_event(event)}
        if len(units) > 1 or event["unit"] != entry["unit"]:
            yield f"{where}: its mechanism does not protect the unit {entry['unit']}"
        guaranteed = all(part["kind"] != "unaccounted" for part in _within_event(event))
        if entry["accounted"] != guaranteed:
            yield f"{where}: accounted is {entry['accounted']}"


def _read_event(event: Event) -> tuple[str, str]:
    """Return the relation and the description of a mechanism.

    Raises:
        ValueError: its parameters do not fit together.
    """
    try:
        return relation_of(event), words_of(event)
    except (ArithmeticError, LookupError, NotDerivedError) as error:
        raise ValueError(f"its mechanism cannot be read: {error}") from None


def _within_event(event: Event) -> Iterator[Event]:
    yield event
    for part in parts_of(event):
        yield from _within_event(part)


def _agreement_faults(
    evidence: Mapping[str, Any], ledger: Mapping[str, Any], statement: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each field in which evidence, statement and ledger extract differ."""
    claims = claims_of(statement)
    names = [claim["dataset"] for claim in claims]
    for file, parts in ((LEDGER, ledger["extracts"]), (EVIDENCE, evidence["derived"])):
        listed = [part["dataset"] for part in parts]
        if listed != names or len(set(names)) < len(names):
            yield f"{file} and the claims have different data sets: {', '.join(listed)}"
            return
    charged = [entry["id"] for extract in ledger["extracts"] for entry in extract["entries"]]
    if len(set(charged)) < len(charged):
        yield f"{LEDGER}: an entry occurs twice, or releases under one budget have two claims"
    ids = [[release["ledger_id"] for release in claim["releases"]] for claim in claims]
    totals = [claim["epsilon"] is not None for claim in claims]
    for number, claim in enumerate(claims):  # the first part is also about all of them
        of_all = number == 0
        expected = {
            "ledger_ids": [i for part in ids for i in part] if of_all else ids[number],
            "private": all(totals) if of_all else totals[number],
            "made_up": statement["made_up"],
        }
        for name, value in expected.items():
            if claim[name] != value:
                yield f"{STATEMENT}: {name} is {claim[name]}, not {value}"
    for claim, extract, derived in zip(
        claims, ledger["extracts"], evidence["derived"], strict=True
    ):
        yield from _ledger_faults(claim, extract, evidence)
        yield from _claim_faults(claim, derived)
    yield from _training_faults(evidence, statement)


def _claim_faults(claim: Mapping[str, Any], derived: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each part of a claim that does not follow from its releases."""
    where, releases = f"data set {claim['dataset']}", claim["releases"]
    if not releases:
        yield f"{where}: the claim has no releases"
        return
    try:
        readings = [_read_event(release["event"]) for release in releases]
    except ValueError as error:
        yield f"{where}: {error}"
        return
    alike = [
        (release["unit"], relation, release["event"].get("example"))
        for release, (relation, _) in zip(releases, readings, strict=True)
    ]
    if (claim["unit"], claim["neighbours"]) != alike[0][:2]:
        yield f"{where}: unit or neighbours differ from its releases"
    if (claim["epsilon"] is None) != (len(set(alike)) > 1):
        yield f"{where}: there must be a total if and only if all releases protect alike"
    if not math.isclose(
        math.fsum(release["delta"] for release in releases), claim["delta"], rel_tol=1e-12
    ):
        yield f"{where}: δ is not the sum of its releases' δ"
    units = claim["declared_units"]
    if units is not None and not claim["delta"] * units < 1:
        yield f"{where}: δ = {claim['delta']:.3g} is not below 1/n for n = {units} units"
    events = [event for release in releases for event in _within_event(release["event"])]
    if units is not None and any(event.get("declared_units", 0) > units for event in events):
        yield f"{where}: a mechanism declares more units than the claim"
    proven = any(e["kind"] == "random_count_selection" or e.get("to") == _REPLACE for e in events)
    if claim["accounting"] != (PROVEN if proven else "PLD"):
        yield f"{where}: its accounting is not “{PROVEN if proven else 'PLD'}”"
    for release, (_, words) in zip(releases, readings, strict=True):
        if release["mechanism"] != words:
            yield f"release {release['ledger_id']}: its mechanism is “{words}”"
        renyi = release["epsilon_rdp"]
        if renyi is not None and renyi < release["epsilon"] * 0.99:
            yield f"release {release['ledger_id']}: epsilon_rdp is {renyi!r}, below ε by PLD"
    if len(derived["releases"]) != len(releases):
        yield f"{where}: {EVIDENCE} derives ε of {len(derived['releases'])} releases"
    rates = [ceiling["fpr"] for ceiling in derived["tpr_ceilings"]]
    if rates != ([] if derived["epsilon"] is None else list(FALSE_POSITIVE_RATES)):
        yield f"{where}: its ceilings on attacks are not at {FALSE_POSITIVE_RATES}"


def _ledger_faults(
    claim: Mapping[str, Any], extract: Mapping[str, Any], evidence: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each release of a claim that its ledger extract does not confirm."""
    name, releases = claim["dataset"], claim["releases"]
    entries = {entry["id"]: entry for entry in extract["entries"]}
    numbers = [entry["number"] for entry in extract["entries"]]
    if len(entries) != len(numbers) or numbers != list(range(1, len(numbers) + 1)):
        yield f"data set {name}: the entries of its ledger extract are not numbered in order"
    for budget, of_claim in (("budget_unit", "unit"), ("budget_neighbours", "neighbours")):
        if extract[budget] not in (None, claim[of_claim]):
            yield f"data set {name}: the budget protects the {of_claim} {extract[budget]}"
    # A publishable pack has no day after the charge of a private selection.
    kinds = ((entry["number"], entry["event"]["kind"]) for entry in extract["entries"])
    secret = (number for number, kind in kinds if kind == "random_count_selection")
    dated = math.inf if evidence["edition"] == "operator" else next(secret, math.inf)
    for entry in extract["entries"]:
        for day in (entry["reserved"], entry["settled"]):
            form = _DAY + ("(T.*)?" if evidence["edition"] == "operator" else "")
            if day and not re.fullmatch(form, day, re.ASCII):
                yield f"entry {entry['id']}: {day!r} is not a day"
    for release in releases:
        where = f"release {release['ledger_id']}"
        entry = entries.get(release["ledger_id"])
        if entry is None:
            yield f"{where}: the ledger extract does not contain it"
            continue
        for key in ("event", "unit", "delta"):
            if entry[key] != release[key]:
                yield f"{where}: the ledger has another {key}"
        if entry["state"] != "settled" or not entry["accounted"] or not entry["released_hash"]:
            yield f"{where}: the ledger has not settled it"
        if entry["known_seed"]:
            yield f"{where}: its seed is known"
        late = entry["settled"][:10] > evidence["created"]
        if entry["number"] < dated and (late or not entry["reserved"] <= entry["settled"]):
            yield f"{where}: its days are not in order"
    marked = {entry["id"] for entry in extract["entries"] if entry["in_this_model"]}
    if len({release["ledger_id"] for release in releases}) != len(releases):
        yield f"data set {name}: one release is listed twice"
    if marked != {release["ledger_id"] for release in releases}:
        yield f"data set {name}: the ledger extract marks other releases as this model's"
    plans = {entries[i]["plan"] for i in marked if i in entries}
    planned = len(releases) == 1 or (len(plans) == 1 and plans != {0})
    if claim["one_plan"] != planned:
        yield f"data set {name}: its releases {'were' if planned else 'were not'} one plan"


def _training_faults(evidence: Mapping[str, Any], statement: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each difference between the plan of the training and its release."""
    plan = evidence["trained_by"]
    if plan is None:
        return
    by_id = {
        r["ledger_id"]: (r, claim) for claim in claims_of(statement) for r in claim["releases"]
    }
    if plan["ledger_id"] not in by_id:
        yield "the model's own training is not among the releases"
        return
    release, claim = by_id[plan["ledger_id"]]
    event = release["event"]
    if "phases" not in event:
        return  # a private selection: the plan belongs to the selected candidate
    if plan["declared_units"] > (claim["declared_units"] or 0):
        yield "the training's plan declares more units than the claim"
    cycle = event.get("cycle", 1)
    if plan["noise_bands"] > cycle:
        yield "the noise of the training has more bands than its sampler has parts"
    planned = [
        (cycle * p["expected_batch"] / plan["declared_units"], plan["noise_multiplier"], p["steps"])
        for p in plan["phases"]
    ]
    if len(planned) != len(event["phases"]) or not all(
        math.isclose(a, b, rel_tol=1e-9)
        for phases in zip(planned, event["phases"], strict=False)
        for a, b in zip(*phases, strict=True)
    ):
        yield "rate, noise or length of the training's plan differ from its release"


def derive_claim(claim: Mapping[str, Any]) -> tuple[Derived, list[Derived]]:
    """Return the derivation of a claim's total and ceilings, and of each of its releases."""
    each = [derive([release["event"]], release["delta"]) for release in claim["releases"]]
    if claim["epsilon"] is None:
        return Derived(None, why_not="no total is claimed"), each
    events = [release["event"] for release in claim["releases"]]
    return derive(events, claim["delta"], FALSE_POSITIVE_RATES), each


def recorded(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return the derivation of a claim's figures as it is recorded in a pack."""
    whole, each = derive_claim(claim)
    return {
        "dataset": claim["dataset"],
        "epsilon": whole.epsilon,
        "releases": [derived.epsilon for derived in each],
        "tpr_ceilings": [{"fpr": rate, "tpr": tpr} for rate, tpr in whole.ceilings.items()],
    }


def _derive_all(
    evidence: Mapping[str, Any], statement: Mapping[str, Any], findings: Findings
) -> None:
    """Derive all ε and ceilings, and compare them with the claims and the recorded derivation."""
    for claim, record in zip(claims_of(statement), evidence["derived"], strict=True):
        dataset, (whole, each) = claim["dataset"], derive_claim(claim)
        for release, derived, epsilon in zip(
            claim["releases"], each, record["releases"], strict=True
        ):
            name = f"{title_of(release['event'])} ({release['ledger_id'][:8]})"
            _compare(name, release["epsilon"], derived, epsilon, findings)
        if claim["declared_units"] is None:
            findings.not_derived.append(f"{dataset}: no number of units bounds δ")
        if claim["epsilon"] is None:
            findings.compared.append(f"{dataset}: no total is claimed")
            if record["epsilon"] is not None:
                findings.faults.append(f"{dataset}: a total is derived, but none is claimed")
            continue
        name = f"{dataset}, one {claim['unit']}, δ = {claim['delta']:.3g}"
        _compare(name, claim["epsilon"], whole, record["epsilon"], findings)
        for ceiling in record["tpr_ceilings"]:
            line = f"largest TPR at FPR {ceiling['fpr']:.3g}: {ceiling['tpr']:.4g}"
            derived_tpr = whole.ceilings.get(ceiling["fpr"], math.nan)
            findings.compared.append(f"  {line}, derived {derived_tpr:.4g}")
            if not _equal(ceiling["tpr"], derived_tpr):
                findings.faults.append(
                    f"{dataset}: {line}, but dp_accounting derives {derived_tpr:.4g}"
                )


def _compare(
    name: str, epsilon: float, derived: Derived, record: float | None, findings: Findings
) -> None:
    if derived.epsilon is None:
        findings.not_derived.append(f"{name}: ε = {epsilon:.4g}: {derived.why_not}")
    elif understates(epsilon, derived.epsilon):
        findings.faults.append(
            f"{name}: ε = {epsilon:.6g} is claimed, but dp_accounting derives {derived.epsilon:.6g}"
        )
    else:
        line = f"{name}: ε = {epsilon:.5g} is claimed, {derived.epsilon:.5g} is derived"
        findings.compared.append(line)
    if not _equal(record, derived.epsilon):
        findings.faults.append(f"{name}: the pack records another derived ε: {record}")


def _equal(recorded: float | None, derived: float | None) -> bool:
    if recorded is None or derived is None:
        return recorded is derived
    return math.isclose(recorded, derived, rel_tol=TOLERANCE, abs_tol=_ROUNDING)


# --- the command line


def main(words: Sequence[str] | None = None) -> int:
    """Check the pack named on the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Check an evidence pack without the software that made it.",
        epilog="Exit codes: 0 all holds, 1 a fault, 2 no pack, 4 a part was not derived.",
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--model", type=Path, help="folder of the exported model, for comparison")
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")
    options = parser.parse_args(words)
    try:
        findings = check(options.folder, options.model)
    except NotAPackError as error:
        sys.stderr.write(f"check_evidence: {error}\n")
        return NO_PACK
    sys.stdout.write(as_json(findings) if options.json else as_text(findings))
    return findings.code


_VERDICTS = {
    HOLDS: "HOLDS: every file, page and number follows from the recorded mechanisms.",
    FAULTY: "DOES NOT HOLD.",
    NOT_DERIVED: "NOT DERIVED in part. The rest has no fault.",
}


def as_text(findings: Findings) -> str:
    """Return the findings as text."""
    lines = [
        *findings.compared,
        *(f"NOT DERIVED: {line}" for line in findings.not_derived),
        *(f"FAULT: {line}" for line in findings.faults),
        *(f"recorded only, in {file}: {', '.join(fields)}" for file, fields in RECORDED.items()),
        _VERDICTS[findings.code],
    ]
    return "\n".join(lines) + "\n"


def as_json(findings: Findings) -> str:
    """Return the findings as JSON."""
    body = {"code": findings.code, **vars(findings), "recorded": RECORDED}
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
