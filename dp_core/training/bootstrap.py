"""Confidence intervals of scores and of differences, by documents and seeds.

Quantities without counts by document, such as perplexity, have an interval over seeds only.

Documents are resampled within their fold. To each resampled mean over n seeds, the standard error
over seeds times a draw of Student's t with n − 1 degrees of freedom is added (for a difference:
Behrens 1929, Fisher 1935), because resampling two or three seeds covers the mean far too rarely.
The deviation over seeds contains some variation by documents, so intervals are rather too wide.
They do not include variation by a shared pre-training or by the choice of the corpus.

Accuracy is the micro F1 of classes, because each text has one predicted and one expected class. If
patients are known, they replace documents, and all texts of a patient are drawn together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 2000
LEAST_DOCUMENTS = 10  # with fewer, resampling is not informative
Counts = Mapping[str, Sequence[float]]  # by document: correct, predicted and expected labels
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Replicate:
    """Test results of one fine-tuned model.

    Attributes:
        seed: name of the random draw; replicates of other folds share it.
        fold: test fold; 0 without folds.
        counts: counts of each test document.
        start: name of the model that was fine-tuned. If there are several, seeds of the same model
            are correlated, and are drawn together.
    """

    seed: str
    fold: int
    counts: Counts
    start: str = ""


@dataclass(frozen=True)
class MeanF1:
    """Mean of micro F1 over seeds and folds, from 0 to 1, or of another quantity over seeds.

    Attributes:
        mean: mean over all replicates.
        replicates: number of replicates.
        seeds: number of seeds, or of started models if there are several.
        folds: number of folds.
        seed_deviation: standard deviation over seeds of the mean over folds; None for one seed.
        fold_deviation: standard deviation over folds of the mean over seeds; None for one fold.
        interval: 95%, by documents and seeds; None if there are too few documents.
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
    """Difference of two mean F1 on the same documents, the second minus the first.

    Attributes:
        value: from −1 to 1.
        interval: 95%.
        p_value: two-sided, for the hypothesis of no difference.
    """

    value: float
    interval: tuple[float, float]
    p_value: float


def mean_f1(replicates: Sequence[Replicate]) -> MeanF1:
    """Return the mean over replicates with its deviations and its interval.

    Args:
        replicates: one for each pair of a seed and a fold.

    Raises:
        ValueError: there are none, or a seed lacks a fold.
    """
    table = _Table.of(replicates)
    scores = table.scores(np.ones((1, len(table.documents))))[0]  # (seeds, folds)
    interval = None
    if len(table.documents) >= LEAST_DOCUMENTS:
        generator = np.random.default_rng(0)
        interval = _interval(table.resampled(table.drawn_documents(generator), generator), 0.0)
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
        values: values of independent trainings, in any unit.

    Returns:
        The mean, with Student's t interval if there are two or more values.

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
    """Return the difference of two mean F1 by the paired bootstrap, or None if it is undefined.

    The same documents are drawn for both models, but seeds are independent. After Koehn 2004 and
    Berg-Kirkpatrick et al. 2012.

    Args:
        first: replicates of one model.
        second: replicates of another model, tested on the same documents in the same folds.
    """
    try:
        before, after = _Table.of(first), _Table.of(second)
    except ValueError:
        return None
    if before.documents != after.documents or len(before.documents) < LEAST_DOCUMENTS:
        return None
    whole = np.ones((1, len(before.documents)))
    value = float(after.scores(whole).mean() - before.scores(whole).mean())
    generator = np.random.default_rng(0)
    weights = before.drawn_documents(generator)
    differences = after.resampled(weights, generator) - before.resampled(weights, generator)
    tail = min((differences <= 0).sum(), (differences >= 0).sum())
    return Difference(
        value, _interval(differences, -1.0), float(min(1.0, 2 * (tail + 1) / (RESAMPLES + 1)))
    )


@dataclass(frozen=True)
class _Table:
    """Counts by seed, fold and document.

    Attributes:
        documents: (D,) name and fold of each document.
        membership: (G, S) share of each seed in a group that is drawn together; rows sum to 1.
        correct: (S, F, D) right entities.
        both: (S, F, D) predicted and expected entities.
    """

    documents: tuple[tuple[str, int], ...]
    membership: Floats
    correct: Floats
    both: Floats

    @classmethod
    def of(cls, replicates: Sequence[Replicate]) -> _Table:
        """Raise ValueError unless there is one replicate for each pair of a seed and a fold."""
        seeds = sorted({replicate.seed for replicate in replicates})
        folds = sorted({replicate.fold for replicate in replicates})
        pairs = {(replicate.seed, replicate.fold) for replicate in replicates}
        if not replicates or not len(pairs) == len(replicates) == len(seeds) * len(folds):
            raise ValueError("not one replicate for each seed and fold")
        documents = sorted({(name, r.fold) for r in replicates for name in r.counts})
        place = {document: i for i, document in enumerate(documents)}
        correct = np.zeros((len(seeds), len(folds), len(documents)))
        both = np.zeros_like(correct)
        for replicate in replicates:
            row = seeds.index(replicate.seed), folds.index(replicate.fold)
            for name, (right, predicted, expected) in replicate.counts.items():
                where = (*row, place[name, replicate.fold])
                correct[where], both[where] = right, predicted + expected
        starts = {replicate.seed: replicate.start for replicate in replicates}
        several = len(set(starts.values())) > 1
        group_of = [starts[seed] if several else seed for seed in seeds]
        groups = sorted(set(group_of))
        member = np.array([[name == group for name in group_of] for group in groups], np.float64)
        return cls(tuple(documents), member / member.sum(1, keepdims=True), correct, both)

    def drawn_documents(self, generator: np.random.Generator) -> Floats:
        """Return how often each document is drawn, fold by fold: (resamples, D)."""
        weights = np.zeros((RESAMPLES, len(self.documents)))
        of_fold = np.array([fold for _, fold in self.documents])
        for fold in np.unique(of_fold):
            inside = np.flatnonzero(of_fold == fold)
            weights[:, inside] = generator.multinomial(
                len(inside), np.full(len(inside), 1 / len(inside)), RESAMPLES
            )
        return weights

    def scores(self, weights: Floats) -> Floats:
        """Return (resamples, S, F) micro F1 under (resamples, D) weights of the documents."""
        right = np.einsum("rd,sfd->rsf", weights, self.correct)
        both = np.einsum("rd,sfd->rsf", weights, self.both)
        scores: Floats = np.divide(2 * right, both, out=np.zeros_like(right), where=both > 0)
        return scores

    def resampled(self, weights: Floats, generator: np.random.Generator) -> Floats:
        """Return means over folds and seeds with the error of the seeds drawn: (resamples,)."""
        every = np.vstack([np.ones(len(self.documents)), weights])
        of_all, *drawn = self.scores(every).mean(2) @ self.membership.T  # (groups,) each
        means: Floats = np.mean(drawn, axis=1)
        if deviation := _deviation(of_all):
            error = deviation / math.sqrt(len(of_all))
            means += error * generator.standard_t(len(of_all) - 1, len(means))
        return means


def _deviation(values: Floats) -> float | None:
    return float(values.std(ddof=1)) if len(values) > 1 else None


def _interval(values: Floats, least: float) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975]).clip(least, 1.0)
    return float(low), float(high)
