"""Fine-tuning a model on labelled text, private or not, whatever head stands on it.

A head (`tagging.TaggingHead`, `classification.ClassHead`) says what is fresh in the model, how
texts become rows, and what rows ask. Units, plan, clipping, noise and checkpoints are those of
every training.
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
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates, Progress, train
from dp_core.training.objectives import Objective
from dp_core.training.tagging import padded


class LabelledRow(Protocol):
    """A row of token ids that was cut from a labelled text."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Its pieces, markers among them."""

    @property
    def item(self) -> int:
        """Index of the text."""


Item = TypeVar("Item", contravariant=True)
AnyRow = TypeVar("AnyRow", bound=LabelledRow)


class Head(Protocol[Item, AnyRow]):
    """What stands on an encoder and is learned from labelled texts."""

    @property
    def labels(self) -> tuple[str, ...]:
        """What it tells apart, in order of id; public where the texts are private."""

    def begin(self, start: Bert, seed: int) -> Bert:
        """Return the encoder with this head, fresh from a public seed."""

    def rows(self, items: Sequence[Item], tokenizer: Tokenizer, max_length: int) -> list[AnyRow]:
        """Return the rows of texts, each a function of its own text alone."""

    def objective(self, rows: Sequence[AnyRow], max_length: int) -> Objective:
        """Return what rows, in the order in which a store has them, teach."""


_LEAST = 8  # pieces: the markers, and some of a text or of two


def check_row_length(max_length: int, most: int) -> None:
    """Refuse rows that hold next to nothing, or more than the model reads.

    Raises:
        BadInput: not from 8 to `most`, the model's positions.
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
    """Return the rows by unit, and which row stands where.

    Args:
        rows: piece ids of each row, at most `max_length`.
        units: id of each row's unit.
        max_length: S.
        vocabulary: number of pieces.
        pad: id of [PAD].

    Returns:
        The store, and (rows,) the number in `rows` of each of its rows. Rows of one unit keep
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
    """Return the rows by unit, and what they teach.

    Args:
        head: that made the rows.
        rows: of labelled texts.
        units: id of the unit of each text that the rows were cut from.
        max_length: S, at least 3 and that of the rows.
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
    """Train a head, and the encoder, without privacy, in shuffled epochs over the rows.

    Args:
        model: the pre-trained model, or its folder; its heads are left behind.
        items: the labelled texts.
        tokenizer: of the model's vocabulary.
        head: what is learned.
        epochs: passes over the rows. The points of the curve are their ends.
        batch_size: rows.
        config: optimizer, and how the run is kept.
        max_length: tokens of a row, at most; the longest hundredth is cut, as what is longer.
        seed: public; the head's initial values, and the order.
        checkpoints: where they are kept.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`.

    Returns:
        The encoder with its head; `tagging.tag` or `classification.classes_of` uses it.

    Raises:
        BadInput: nothing to train on, or a vocabulary that is not the model's.
        Unfinished: as in `loop.train`.
    """
    start = load(model) if isinstance(model, Path) else model
    rows = head.rows(items, tokenizer, min(max_length, start.config.max_positions))
    if not rows:
        raise PrivateTextRefusal("there are no texts to train on", where="fine-tuning")
    # Rows of a batch have one length: the few longest are cut, or all would be mostly padding.
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
    """Train a head, and the encoder, on private texts with private labels.

    Formal guarantee: that of `PrivateUpdates`, for the plan's unit: the model is as private
    towards the texts, their labels and which of them there are as `plan.event()` says. The
    starting model must be public, or private under a budget of its own, which then adds up with
    this one.

    What depends on the data in no noised way must come from outside: the labels there may be, and
    the length of a row. Another label teaches nothing (another tag counts as `O`).

    Args:
        model: the pre-trained model, or its folder; its heads are left behind.
        items: private texts with private labels.
        tokenizer: of the model's vocabulary.
        head: what is learned; its labels PUBLIC, see `ner.tags_of_types`.
        units: id of each text's privacy unit: its document's, its patient's, or its own.
        updates: the plan over these units, with the seed of its reservation.
        config: optimizer, and how the run is kept.
        init_seed: public; the head's initial values.
        max_length: tokens of a row. Public.
        checkpoints: where they are kept; private.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `loop.train`; `operator` numbers.

    Returns:
        The encoder with its head; `tagging.tag` or `classification.classes_of` uses it.

    Raises:
        BadInput: plan, model and texts do not fit together.
        Unfinished: as in `loop.train`.
    """
    start = load(model) if isinstance(model, Path) else model
    if len(units) != len(items):
        raise BadInput("not one unit for each text", where="fine-tuning")
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
