"""Models of one training after several of its updates, kept during training and released together.

The kept models have no privacy cost in addition to the training's one charge. DP-SGD is accounted
for as the adaptive composition of its updates, each of which releases its noised sum (Abadi et al.
2016, arXiv:1607.00133, section 3.2); with correlated noise, as one release of the whole sequence of
sums (Denisov et al. 2022, arXiv:2202.08312). The weights after update t are a function of the sums
up to t, so the models after several updates are a function of all sums: post-processing (Dwork and
Roth 2014, proposition 2.1). An accounting that hides all iterates but the last would not allow
this; no accountant of this platform does so.

The spec fixes how often and when models are kept, before the first update. The kept models are
stored with the checkpoints until the training is settled, which binds its noise to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dp_core.errors import ConfideError
from dp_core.models.parameters import Arrays
from dp_core.training.checkpoints import (
    Checkpoint,
    CheckpointPlace,
    Checkpoints,
    arrays_digest,
)
from dp_core.training.loop import EvaluationHook


class KeptModels:
    """Weights after given numbers of updates, which a resumed run finds again.

    Args:
        updates: numbers of updates done, all below the last.
        place: folder that belongs to this training only.
        run: digest of the training's identity; models of another training are refused.
    """

    def __init__(self, updates: Sequence[int], place: CheckpointPlace, run: str) -> None:
        self._updates, self._where = tuple(updates), place.where
        self._own: dict[int, str] = {}  # digests of the models that this process has kept
        self._kept = Checkpoints(place, run, keep=max(1, len(self._updates)))

    def hook(self, beside: EvaluationHook | None) -> EvaluationHook | None:
        """Return a hook that keeps the models during training, and calls the given hook as well."""
        if not self._updates:
            return beside
        measured = frozenset() if beside is None else beside.at

        def keep(done: int, weights: Arrays) -> None:
            if done in self._updates:
                self._kept.save(Checkpoint(done, weights))
                self._own[done] = arrays_digest(weights)
            if beside is not None and done in measured:
                beside.evaluate(done, weights)

        return EvaluationHook(measured | set(self._updates), keep)

    def weights(self) -> dict[int, Arrays]:
        """Return the weights by number of updates, once the training has ended.

        Raises:
            ConfideError: a model is missing or damaged, or differs from the model kept by this
                process.
        """
        found = {update: self._kept.at(update) for update in self._updates}
        if lost := [str(update) for update, one in found.items() if one is None]:
            raise ConfideError(
                f"the model after {', '.join(lost)} updates is not there, or damaged",
                where=self._where,
                fix="Delete the checkpoints of this training and run it again: it makes the same "
                "models, and is not charged again.",
            )
        arrays = {update: one.arrays for update, one in found.items() if one is not None}
        if any(arrays_digest(arrays[update]) != own for update, own in self._own.items()):
            # Both have the same noise but may differ in rounding, so they may not both be released.
            raise ConfideError(
                "another process has trained the same at the same time, and kept other models",
                where=self._where,
                fix="See that one of them runs alone, then run it again.",
            )
        return arrays
