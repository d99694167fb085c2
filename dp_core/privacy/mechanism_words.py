"""What each mechanism did, and what was assumed, in words."""

from __future__ import annotations

from dp_core.privacy.accounting import rdp_curve
from dp_core.privacy.events import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    RandomCountSelection,
    Relation,
    Restated,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    Unaccounted,
)

_RELATIONS = {
    Relation.ADD_REMOVE: "one {unit} is added or removed",
    Relation.ZERO_OUT: "one {unit}'s contribution is replaced by nothing",
    Relation.REPLACE: "one {unit} is replaced by any other",
}


_RESTATED = {
    Relation.ZERO_OUT: "a unit without words or rows leaves a release as if it were not there",
    Relation.REPLACE: "replacing a unit is removing one and adding another: 2ε, and (1 + e^ε)δ",
}
_SELECTION = (
    "how many trainings there were is secret, and no training but the best was shown to anyone",
    "trainings were compared by a score of the released model and public data alone",
)


def neighbours(event: MechanismEvent, unit: str) -> str:
    """Return in words by what neighbouring data sets differ."""
    return _RELATIONS[event.relation].format(unit=unit)


def describe(event: MechanismEvent) -> str:
    """Return the mechanism in one clause."""
    match event:
        case Composed(events=events):
            return "; and ".join(describe(part) for part in events)
        case Restated(event=inner):
            return describe(inner)
        case RandomCountSelection(candidates=candidates):
            return (
                f"the best of a secret random number of trainings ({_law(event)}), each of one "
                f"of {len(candidates)} candidates drawn at random, the costliest of them "
                f"{describe(max(candidates, key=_cost))}; ε by Rényi, no PLD is known"
            )
        case ThresholdedHistogram(words_per_unit=words, sigma=sigma, threshold=threshold):
            return (
                f"counts of words, at most {words} distinct words per unit, discrete Gaussian "
                f"noise of σ = {sigma:g} on each, noised counts below {threshold} dropped"
            )
        case PoissonGaussian(phases=phases):
            return "DP-SGD on Poisson samples: " + _phases(phases, "sampling rate")
        case TruncatedPoissonGaussian(phases=phases, cap=cap):
            said = _phases(phases, "sampling rate")
            return f"DP-SGD on Poisson samples cut to {cap} units: {said}"
        case FixedSizeGaussian(phases=phases):
            return "DP-SGD on batches of a fixed size: " + _phases(phases, "batch")
        case ShuffledGaussian(noise_multiplier=sigma, participations=times):
            return f"DP-SGD on shuffled epochs, unamplified: {times} epochs, σ = {sigma:g}"
        case Gaussian(noise_multiplier=sigma, count=count):
            return f"the Gaussian mechanism, {count} times, σ = {sigma:g}"
        case Unaccounted(reason=reason):
            return f"no private mechanism ({reason})"
        case _:
            return event.kind.replace("_", " ")


def assumptions(event: MechanismEvent) -> tuple[str, ...]:
    """Return what must have been true of the run for its ε to hold."""
    if isinstance(event, Composed):
        return tuple(dict.fromkeys(a for part in event.events for a in assumptions(part)))
    if isinstance(event, Unaccounted):
        return ()
    if isinstance(event, Restated):
        return (*assumptions(event.event), _RESTATED[event.to])
    if isinstance(event, RandomCountSelection):
        own = dict.fromkeys(a for c in event.candidates for a in assumptions(c))
        return (*own, *_SELECTION)
    if isinstance(event, ThresholdedHistogram):
        return (
            "each unit's words were bounded before anything was counted, independently of all "
            "other data",
        )
    training = (
        "every row of a unit was clipped together with the unit's other rows",
        "training noise and arithmetic are float32, the ε is that of real numbers",
    )
    match event:
        case PoissonGaussian():
            sampler = "each unit entered each batch by an independent secret coin"
        case TruncatedPoissonGaussian():
            sampler = "larger batches were cut at random, by unit, over all shards together"
        case FixedSizeGaussian():
            sampler = "each batch was a uniform secret subset of the declared slots"
        case _:
            sampler = "no unit took part more often than once an epoch"
    return (sampler, *training)


def _phases(phases: tuple[tuple[float, float, int], ...], what: str) -> str:
    return "; then ".join(
        f"{steps} updates, {what} {rate:.4g}, effective noise multiplier σ = {sigma:g}"
        for rate, sigma, steps in phases
    )


def _law(event: RandomCountSelection) -> str:
    if event.count == "poisson":
        return f"Poisson, mean {event.mean:g}"
    return f"truncated negative binomial, η = {event.eta:g}, γ = {event.gamma:.4g}"


def _cost(event: MechanismEvent) -> float:
    curve = rdp_curve(event, [8])
    return float("inf") if curve is None else float(curve[0])
