"""Fine-tuning a model on labelled text, with or without privacy, for every kind of head.

A head (`tagging.TaggingHead`, `classification.ClassHead`) adds fresh parameters to the model,
cuts texts into rows, and defines the objective. Units, plan, clipping, noise and checkpoints work
as in every training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.config.training import TrainingConfig
from dp_core.data.hashing import digest64
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.models.hugging_face import load
from dp_core.models.parameters import Bert
from dp_core.training.checkpoints import CheckpointPlace
from dp_core.training.heads import padded
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates, Progress, train
from dp_core.training.objectives import Objective


class LabelledRow(Protocol):
    """A row of token ids that was cut from a labelled text."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the row's pieces, including markers."""

    @property
    def item(self) -> int:
        """Index of the text."""


Item = TypeVar("Item", contravariant=True)
AnyRow = TypeVar("AnyRow", bound=LabelledRow)


class Head(Protocol[Item, AnyRow]):
    """A head on an encoder, which is learned from labelled texts."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in order of id; public knowledge even if the texts are private."""

    def begin(self, start: Bert, seed: int) -> Bert:
        """Return the encoder with this head, fresh from a public seed."""

    def rows(self, items: Sequence[Item], tokenizer: Tokenizer, max_length: int) -> list[AnyRow]:
        """Return the rows of the texts; each row depends only on its text."""

    def objective(self, rows: Sequence[AnyRow], max_length: int) -> Objective:
        """Return the training objective for rows in the order of a store."""


_LEAST = 8  # pieces: the markers, and a few pieces of one or two texts


def check_row_length(max_length: int, most: int) -> None:
    """Refuse rows that are too short to be useful, or longer than the model reads.

    Raises:
        BadInput: `max_length` is not from 8 to `most`, the model's positions.
    """
    if not _LEAST <= max_length <= most:
        raise BadInput(
            f"{max_length} is not from {_LEAST} to the model's {most}", where="max_length"
        )


def store_by_unit(
    rows: Sequence[Sequence[int]],
    units: Sequence[str],
    *,
    max_length: int,
    vocabulary: int,
    pad: int,
) -> tuple[TokenStore, NDArray[np.int64]]:
    """Return a store of the rows by unit, and the order of the rows in it.

    Args:
        rows: piece ids of each row, at most `max_length`.
        units: id of each row's unit.
        max_length: S.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        The store, and (rows,) the index in `rows` of each row of the store. Rows of one unit keep
        their order.
    """
    ids = sorted(set(units))
    place = {unit: i for i, unit in enumerate(ids)}
    unit_of = np.array([place[unit] for unit in units], np.int64)
    order = np.argsort(unit_of, kind="stable")
    tokens = np.full((len(rows), max_length), pad, np.int32)
    for i, number in enumerate(order):
        tokens[i, : len(rows[number])] = rows[number]
    counts = np.bincount(unit_of, minlength=len(ids))
    store = TokenStore(
        tokens=tokens,
        lengths=np.array([len(rows[number]) for number in order], np.int32),
        unit_rows=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        unit_keys=np.array([digest64(b"", "unit", unit) for unit in ids], np.uint64),
        sequence_length=max_length,
        vocabulary_size=vocabulary,
        digest="",
    )
    return store, order


def labelled_units(
    head: Head[Any, AnyRow],
    rows: Sequence[AnyRow],
    units: Sequence[str],
    *,
    max_length: int,
    vocabulary: int,
    pad: int,
) -> tuple[TokenStore, Objective]:
    """Return a store of labelled rows by unit, and their training objective.

    Args:
        head: the head that made the rows.
        rows: rows of labelled texts.
        units: unit id of each text that the rows were cut from.
        max_length: S, at least 3 and the length of the longest row.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        A store in memory, and an objective that knows the labels of its rows.
    """
    store, order = store_by_unit(
        [row.ids for row in rows],
        [units[row.item] for row in rows],
        max_length=max_length,
        vocabulary=vocabulary,
        pad=pad,
    )
    return store, head.objective([rows[i] for i in order], max_length)


def finetune(
    model: Path | Bert,
    items: Sequence[Item],
    tokenizer: Tokenizer,
    *,
    head: Head[Item, AnyRow],
    epochs: int,
    batch_size: int,
    config: TrainingConfig,
    max_length: int,
    seed: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a head and the encoder without privacy, in shuffled epochs over the rows.

    Args:
        model: the pre-trained model, or its folder; its heads are dropped.
        items: the labelled texts.
        tokenizer: tokenizer with the model's vocabulary.
        head: the head to learn.
        epochs: passes over the rows. The curve has a point at the end of each.
        batch_size: number of rows.
        config: optimizer, checkpoints and time limit.
        max_length: largest number of tokens of a row. The longest hundredth of the rows is cut
            further.
        seed: public; determines the head's initial values and the order of rows.
        checkpoints: place of the checkpoints.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`.

    Returns:
        The encoder with its head; `tagging.tag` or `classification.classes_of` uses it.

    Raises:
        BadInput: there are no rows, or the vocabulary is not the model's.
        Unfinished: as in `loop.train`.
    """
    start = load(model) if isinstance(model, Path) else model
    rows = head.rows(items, tokenizer, min(max_length, start.config.max_positions))
    if not rows:
        raise PrivateTextRefusal("there are no texts to train on", where="fine-tuning")
    # Rows of a batch share one length: cutting the few longest avoids padding all others.
    usual = padded(int(np.percentile([len(row.ids) for row in rows], 99)))
    length = min(usual, max_length, start.config.max_positions)
    rows = head.rows(items, tokenizer, length)
    store, objective = labelled_units(
        head,
        rows,
        [str(i) for i in range(len(items))],
        max_length=length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=SpecialIds.of(tokenizer).pad,
    )
    batches = -(-len(rows) // batch_size)
    return train(
        head.begin(start, seed),
        objective,
        store=store,
        updates=OrdinaryUpdates(epochs * batches, batch_size, seed),
        config=config,
        seed=seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
        points=range(batches, epochs * batches + 1, batches),
    )


def finetune_privately(
    model: Path | Bert,
    items: Sequence[Item],
    tokenizer: Tokenizer,
    *,
    head: Head[Item, AnyRow],
    units: Sequence[str],
    updates: PrivateUpdates,
    config: TrainingConfig,
    init_seed: int,
    max_length: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a head and the encoder on private texts with private labels.

    Formal guarantee: the guarantee of `PrivateUpdates` for the plan's unit. `plan.event()` bounds
    the privacy loss of the texts, of their labels and of the set of texts. The starting model must
    be public, or private under a separate budget, which then adds to this one.

    Values without noise must come from outside the data: the list of labels and the row length. A
    label outside the list teaches nothing (a tag outside it counts as `O`).

    Args:
        model: the pre-trained model, or its folder; its heads are dropped.
        items: private texts with private labels.
        tokenizer: tokenizer with the model's vocabulary.
        head: the head to learn; its labels must be PUBLIC, see `tags_of_types`.
        units: id of each text's privacy unit: its document, its patient, or the text.
        updates: the plan over these units, with the seed of its reservation.
        config: optimizer, checkpoints and time limit.
        init_seed: public; determines the head's initial values.
        max_length: number of tokens of a row. Public.
        checkpoints: place of the checkpoints; private.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`; receives `operator` numbers.

    Returns:
        The encoder with its head; `tagging.tag` or `classification.classes_of` uses it.

    Raises:
        BadInput: plan, model and texts do not fit together.
        Unfinished: as in `loop.train`.
    """
    start = load(model) if isinstance(model, Path) else model
    if len(units) != len(items):
        raise BadInput("the numbers of units and texts differ", where="fine-tuning")
    check_row_length(max_length, start.config.max_positions)
    store, objective = labelled_units(
        head,
        head.rows(items, tokenizer, max_length),
        units,
        max_length=max_length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=SpecialIds.of(tokenizer).pad,
    )
    return train(
        head.begin(start, init_seed),
        objective,
        store=store,
        updates=updates,
        config=config,
        seed=init_seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
    )
