"""How sure a score is, and a difference of two: a bootstrap over documents and seeds.

What has no counts by document, as a perplexity, has an interval over seeds alone (Student's t).

Documents and seeds are resampled independently of each other: the pigeonhole bootstrap of Owen 2007
(Annals of Applied Statistics 1:386), which errs on the side of wide intervals. Documents are
resampled within their fold. What seeds and documents do not vary is not in the interval: the
pre-training that they share, and which documents there are.

Accuracy is the micro F1 of classes: of each text one class is predicted, and one expected. Where
patients are known they stand in the place of documents, all of whose texts are drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 2000
LEAST_DOCUMENTS = 10  # with fewer, resampling says next to nothing
Counts = Mapping[str, Sequence[float]]  # by document: correct, predicted and expected labels
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Replicate:
    """What one fine-tuned model makes of its test documents.

    Attributes:
        seed: names what was drawn anew for it; replicates of other folds share it.
        fold: that it was tested on; 0 where there are none.
        counts: of each test document.
        start: names the model that it was fine-tuned from. Where there are several, seeds of the
            same one vary together, and are drawn together.
    """

    seed: str
    fold: int
    counts: Counts
    start: str = ""


@dataclass(frozen=True)
class MeanF1:
    """Mean of micro F1 over seeds and folds, within 0 … 1; None: one alone does not say.

    Or, by `mean_over_seeds`, of another quantity in its own unit.

    Attributes:
        mean: over all replicates.
        replicates: how many.
        seeds: how many are drawn: of the models that were started from, if there are several.
        folds: how many.
        seed_deviation: standard deviation over seeds of their mean over folds.
        fold_deviation: standard deviation over folds of their mean over seeds.
        interval: 95%, by documents and seeds; None where documents are too few.
    """

    mean: float
    replicates: int
    seeds: int
    folds: int
    seed_deviation: float | None
    fold_deviation: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Difference:
    """A difference of two mean F1, the second less the first, on the same documents.

    Attributes:
        value: within −1 … 1.
        interval: 95%.
        p_value: two-sided, of no difference.
    """

    value: float
    interval: tuple[float, float]
    p_value: float


def mean_f1(replicates: Sequence[Replicate]) -> MeanF1:
    """Return the mean over replicates, how it spreads, and its interval.

    Args:
        replicates: one for each pair of a seed and a fold.

    Raises:
        ValueError: there are none, or a seed lacks a fold.
    """
    table = _Table.of(replicates)
    scores = table.scores(np.ones((1, len(table.documents))))[0]  # (seeds, folds)
    interval = None
    if len(table.documents) >= LEAST_DOCUMENTS:
        drawn = np.random.default_rng(0)
        interval = _interval(table.resampled(table.drawn_documents(drawn), drawn))
    of_seeds = table.membership @ scores.mean(1)
    return MeanF1(
        float(scores.mean()),
        scores.size,
        len(of_seeds),
        scores.shape[1],
        _deviation(of_seeds),
        _deviation(scores.mean(0)),
        interval,
    )


def mean_over_seeds(values: Sequence[float]) -> MeanF1:
    """Return the mean of a quantity that was measured once for each seed.

    Args:
        values: in any unit; of trainings that are independent of each other.

    Returns:
        With Student's t interval of the mean, of two values or more.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no value of any seed")
    every = np.array(values, np.float64)
    mean, deviation = float(every.mean()), _deviation(every)
    interval = None
    if deviation is not None:
        reach = float(stats.t.ppf(0.975, len(every) - 1)) * deviation / math.sqrt(len(every))
        interval = mean - reach, mean + reach
    return MeanF1(mean, len(every), len(every), 1, deviation, None, interval)


def f1_difference(first: Sequence[Replicate], second: Sequence[Replicate]) -> Difference | None:
    """Return the difference of two mean F1 by the paired bootstrap; None where none can be had.

    The same documents are drawn for both, the seeds of each by themselves. After Koehn 2004 and
    Berg-Kirkpatrick et al. 2012.

    Args:
        first: replicates of one model.
        second: replicates of another, tested on the same documents in the same folds.
    """
    try:
        one, two = _Table.of(first), _Table.of(second)
    except ValueError:
        return None
    if one.documents != two.documents or len(one.documents) < LEAST_DOCUMENTS:
        return None
    whole = np.ones((1, len(one.documents)))
    value = float(two.scores(whole).mean() - one.scores(whole).mean())
    drawn = np.random.default_rng(0)
    weights = one.drawn_documents(drawn)
    differences = two.resampled(weights, drawn) - one.resampled(weights, drawn)
    tail = min((differences <= 0).sum(), (differences >= 0).sum())
    return Difference(
        value, _interval(differences), float(min(1.0, 2 * (tail + 1) / (RESAMPLES + 1)))
    )


@dataclass(frozen=True)
class _Table:
    """Counts by seed, fold and document.

    Attributes:
        documents: (D,) each one's name and fold.
        membership: (G, S) share of each seed in what is drawn together; rows add up to 1.
        correct: (S, F, D) right entities.
        both: (S, F, D) predicted and expected entities.
    """

    documents: tuple[tuple[str, int], ...]
    membership: Floats
    correct: Floats
    both: Floats

    @classmethod
    def of(cls, replicates: Sequence[Replicate]) -> _Table:
        """Raises ValueError: there is nothing, or not each seed with each fold, once."""
        seeds = sorted({one.seed for one in replicates})
        folds = sorted({one.fold for one in replicates})
        pairs = {(one.seed, one.fold) for one in replicates}
        if not replicates or not len(pairs) == len(replicates) == len(seeds) * len(folds):
            raise ValueError("not one replicate for each seed and fold")
        documents = sorted({(name, one.fold) for one in replicates for name in one.counts})
        place = {document: i for i, document in enumerate(documents)}
        correct = np.zeros((len(seeds), len(folds), len(documents)))
        both = np.zeros_like(correct)
        for one in replicates:
            row = seeds.index(one.seed), folds.index(one.fold)
            for name, (right, predicted, expected) in one.counts.items():
                where = (*row, place[name, one.fold])
                correct[where], both[where] = right, predicted + expected
        starts = {one.seed: one.start for one in replicates}
        several = len(set(starts.values())) > 1
        drawn = [starts[seed] if several else seed for seed in seeds]
        member = np.array([[own == one for own in drawn] for one in sorted(set(drawn))], np.float64)
        return cls(tuple(documents), member / member.sum(1, keepdims=True), correct, both)

    def drawn_documents(self, drawn: np.random.Generator) -> Floats:
        """Return (resamples, D) how often each document is drawn, fold by fold."""
        weights = np.zeros((RESAMPLES, len(self.documents)))
        of_fold = np.array([fold for _, fold in self.documents])
        for fold in np.unique(of_fold):
            own = np.flatnonzero(of_fold == fold)
            weights[:, own] = drawn.multinomial(
                len(own), np.full(len(own), 1 / len(own)), RESAMPLES
            )
        return weights

    def scores(self, weights: Floats) -> Floats:
        """Return (resamples, S, F) micro F1 under (resamples, D) weights of the documents."""
        right = np.einsum("rd,sfd->rsf", weights, self.correct)
        both = np.einsum("rd,sfd->rsf", weights, self.both)
        found: Floats = np.divide(2 * right, both, out=np.zeros_like(right), where=both > 0)
        return found

    def resampled(self, weights: Floats, drawn: np.random.Generator) -> Floats:
        """Return (resamples,) means over folds and over seeds that are drawn anew."""
        groups = len(self.membership)
        share = drawn.multinomial(groups, np.full(groups, 1 / groups), len(weights)) / groups
        means: Floats = (self.scores(weights).mean(2) * (share @ self.membership)).sum(1)
        return means


def _deviation(values: Floats) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _interval(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
