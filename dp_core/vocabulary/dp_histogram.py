"""The differentially private word histogram (Hoory et al. 2021, section 3.2; privacy.md).

h'(x) = number of units that contain word x, each word once per unit and at most N distinct words
per unit; discrete Gaussian noise on every x present; what stays below the threshold is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from dp_core.data.privacy_units import Unit, bounded_sample
from dp_core.data.tokens import split_words
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.discrete_gaussian import discrete_gaussian

if TYPE_CHECKING:
    from dp_core.privacy.seed_store import PrivacySeed
    from dp_core.vocabulary.calibration import HistogramPlan


class SetCounts(Counter[str]):
    """Un-noised counts, which remember the bound they were made under. Private.

    Attributes:
        words_per_unit: no unit moved more than this many counts, and none by more than 1.
        declared_units: there were no more units than this, if that was checked.
    """

    words_per_unit: int = 0
    declared_units: int | None = None


def set_counts(
    units: Iterable[Unit],
    words_per_unit: int,
    key: bytes,
    *,
    declared_units: int | None = None,
    exclude: Collection[str] = frozenset(),
    split: Callable[[str], Iterable[str]] = split_words,
) -> SetCounts:
    """Count the units that hold each word; contribution is bounded before anything is counted.

    Words of `exclude` are nobody's: they are taken out of a unit before its words are bounded, so
    that all N of them may be others. **This leaves the sensitivity as it is**: for a list that is
    fixed before the private text is read, a unit's contribution is still a function of that unit
    alone (its words without the list's, bounded), and still N counts at most, each by 1. Adding or
    removing a unit changes nothing else. A list that depends on the private text would break both,
    so it is made of public text, and the release's manifest holds its digest.

    Args:
        units: every unit once.
        words_per_unit: N, the most distinct words of a unit that count; where a unit has more,
            N of them are drawn uniformly, by the unit's own coins.
        key: public coins for that draw.
        declared_units: the public upper bound on the number of units.
        exclude: words that are public, in the form that `split` gives; a function of public text.
        split: from a text to its words: BERT's, or GPT-2's (`byte_level.split_words`).

    Raises:
        BadInput: more units than declared. (How many there are is private, and not said.)
    """
    if words_per_unit < 1:
        raise BadInput(f"{words_per_unit} is below 1", where="words_per_unit", fix="Use 1 or more.")
    counts = SetCounts()
    counts.words_per_unit, counts.declared_units = words_per_unit, declared_units
    excluded = frozenset(exclude)
    for number, unit in enumerate(units, 1):
        if declared_units is not None and number > declared_units:
            raise BadInput(
                f"the corpus holds more units than the declared bound of {declared_units}",
                where="declared_units",
                fix="Declare a higher bound, from public knowledge.",
            )
        distinct = {word for text in unit.texts for word in split(text)}
        distinct.difference_update(excluded)
        if len(distinct) > words_per_unit:
            # Sorted: the order of a set differs between processes.
            counts.update(bounded_sample(sorted(distinct), words_per_unit, unit.unit_id, key))
        else:
            counts.update(distinct)
    return counts


def release(
    counts: SetCounts, plan: HistogramPlan, seed: PrivacySeed, context: bytes
) -> dict[str, int]:
    """Return the noised counts that reach the threshold, sorted by word.

    Only this result is released; its privacy is `plan`'s. The same seed and context give the
    same noise, so that a retry of the same release reveals nothing more.

    Args:
        counts: from `set_counts`.
        plan: σ, threshold and the bound N they were calibrated for.
        seed: the privacy seed of this reservation.
        context: what the noise is bound to (a digest of data and plan).

    Raises:
        PlanError: the counts were bounded more loosely than the plan assumes, or by another
            declared number of units.
    """
    if not 1 <= counts.words_per_unit <= plan.words_per_unit:
        raise PlanError(
            f"the counts allow {counts.words_per_unit} words per unit, the plan assumes "
            f"{plan.words_per_unit}",
            where="words_per_unit",
            fix="Count and calibrate with the same bound.",
        )
    if plan.declared_units is not None and counts.declared_units != plan.declared_units:
        raise PlanError(
            f"the units were not checked against the plan's bound of {plan.declared_units}",
            where="declared_units",
            fix="Count with the same bound.",
        )
    words = sorted(counts)
    noise = discrete_gaussian(plan.sigma, len(words), seed, context)
    noised = np.fromiter((counts[w] for w in words), np.int64, len(words)) + noise
    kept = np.flatnonzero(noised >= plan.threshold)
    return {words[i]: int(noised[i]) for i in kept}
