"""Fine-tuning a model on labelled text, with or without privacy, for every kind of head.

A head (`heads`) adds fresh parameters to the model, cuts texts into rows, and defines the
objective. Units, plan, clipping, noise and checkpoints work as in every training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import RowPacker, TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.models.hugging_face import load
from dp_core.models.parameters import Bert
from dp_core.training.checkpoints import CheckpointPlace
from dp_core.training.heads import Head, LabelledRow, padded
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates, Progress, UpdateRule, train

_LEAST = 8  # pieces: the markers, and a few pieces of one or two texts


@dataclass(frozen=True)
class Epochs:
    """Fine-tuning without privacy, in shuffled epochs over the rows.

    Attributes:
        epochs: passes over the rows. The curve has a point at the end of each.
        batch_size: number of rows of an update.
    """

    epochs: int
    batch_size: int


def store_by_unit(
    rows: Sequence[LabelledRow], units: Sequence[str], *, max_length: int, vocabulary: int, pad: int
) -> tuple[TokenStore, list[LabelledRow]]:
    """Return a store of labelled rows by unit, in memory, and the rows in the order of the store.

    Args:
        rows: rows of labelled texts, of at most `max_length` pieces.
        units: unit id of each text that the rows were cut from.
        max_length: S.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        The store and its rows; rows of one unit keep their order.
    """
    ordered = sorted(rows, key=lambda row: units[row.item])
    packer = RowPacker(max_length, vocabulary, pad=pad)
    for unit, of_unit in itertools.groupby(ordered, key=lambda row: units[row.item]):
        packer.add_unit(unit, [row.ids for row in of_unit])
    packed = vars(packer.take())
    store = TokenStore(**packed, sequence_length=max_length, vocabulary_size=vocabulary, digest="")
    return store, ordered


def finetune(
    model: Path | Bert,
    items: Sequence[Any],
    tokenizer: Tokenizer,
    *,
    head: Head[Any, Any],
    updates: PrivateUpdates | Epochs,
    units: Sequence[str] | None = None,
    config: TrainingConfig,
    max_length: int,
    seed: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a head and the encoder on labelled texts, with `PrivateUpdates` or without privacy.

    Formal guarantee: the guarantee of `PrivateUpdates` for the plan's unit. `plan.event()` bounds
    the privacy loss of the texts, of their labels and of the set of texts. The starting model must
    be public, or private under a separate budget, which then adds to this one.

    Values without noise must come from outside the data: the list of labels and the row length. A
    label outside the list teaches nothing (a tag outside it counts as `O`).

    Args:
        model: the pre-trained model, or its folder; its heads are dropped.
        items: the labelled texts.
        tokenizer: tokenizer with the model's vocabulary.
        head: the head to learn. With privacy its labels must be PUBLIC, see `tags_of_types`.
        updates: the plan over the units, with the seed of its reservation; or epochs.
        units: id of each text's privacy unit: its document, its patient, or the text. Each text is
            one unit if None.
        config: optimizer, checkpoints and time limit.
        max_length: number of pieces of a row; with privacy it is public and exact. Without privacy
            it is a bound, and the longest hundredth of the rows is cut further.
        seed: public; determines the head's initial values, and without privacy the order of rows.
        checkpoints: place of the checkpoints; private if the texts are.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`; receives `operator` numbers.

    Returns:
        The encoder with its head; `head.predict` uses it.

    Raises:
        BadInput: plan, model and texts do not fit together, or there are no rows.
        Unfinished: as in `loop.train`.
    """
    start = load(model) if isinstance(model, Path) else model
    units = [str(i) for i in range(len(items))] if units is None else units
    if len(units) != len(items):
        raise BadInput("the numbers of units and texts differ", where="fine-tuning")
    most = start.config.max_positions
    rule: UpdateRule
    if isinstance(updates, PrivateUpdates):
        if not _LEAST <= max_length <= most:
            raise BadInput(
                f"{max_length} is not from {_LEAST} to the model's {most}", where="max_length"
            )
        length, rule, points = max_length, updates, None
        rows = head.rows(items, tokenizer, length)
    else:
        length = min(max_length, most)
        length = min(length, _usual_length(head.rows(items, tokenizer, length)))
        rows = head.rows(items, tokenizer, length)
        batches = -(-len(rows) // updates.batch_size)
        last = updates.epochs * batches
        rule = OrdinaryUpdates(last, updates.batch_size, seed)
        points = range(batches, last + 1, batches)
    store, ordered = store_by_unit(
        rows,
        units,
        max_length=length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=SpecialIds.of(tokenizer).pad,
    )
    return train(
        head.begin(start, seed),
        head.objective(ordered, length),
        store=store,
        updates=rule,
        config=config,
        seed=seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
        points=points,
    )


def _usual_length(rows: Sequence[LabelledRow]) -> int:
    """Return the length that 99% of the rows need, since rows of a batch share one length.

    Raises:
        PrivateTextRefusal: there are no rows.
    """
    if not rows:
        raise PrivateTextRefusal("there are no texts to train on", where="fine-tuning")
    return padded(int(np.percentile([len(row.ids) for row in rows], 99)))
