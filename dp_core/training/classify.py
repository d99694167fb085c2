"""Fine-tuning for classes of texts and of pairs of texts: with differential privacy, or without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from tokenizers import Tokenizer

from dp_core.bert.heads import class_logits
from dp_core.bert.layers import Layers, Tensor
from dp_core.bert.parameters import CLASSIFIER, HEADS, POOLER, Bert, initial_values
from dp_core.bert.weights import load
from dp_core.errors import BadInput
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.checkpoint_places import CheckpointPlace
from dp_core.training.classifying import LabelledText, class_rows, class_units
from dp_core.training.devices import single_device
from dp_core.training.fit import fit
from dp_core.training.progress import Progress
from dp_core.training.recipe import Recipe
from dp_core.training.unit_rows import check_row_length
from dp_core.vocab.special_ids import SpecialIds


def finetune_classes(
    model: Path | Bert,
    train: Sequence[LabelledText],
    tokenizer: Tokenizer,
    *,
    labels: Sequence[str],
    units: Sequence[str] | None,
    plan: TrainingPlan | None,
    recipe: Recipe,
    seed: PrivacySeed | None,
    manifest: bytes,
    init_seed: int,
    max_length: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a classifier of whole rows: its pooler and output layer are fresh, all else goes on.

    Formal guarantee, with a plan: as `pretrain`'s, for the plan's unit: the model is as private
    towards the texts, their labels and which of them there are as `plan.event()` says. The
    starting model must be public, or private under a budget of its own, which then adds up.

    What depends on the data in no noised way comes from outside: the classes there may be, and
    the length of a row. A text of another class, or of none, teaches nothing.

    Args:
        model: the pre-trained model, or its folder; its heads are left behind.
        train: texts with their classes.
        tokenizer: of the model's vocabulary.
        labels: the classes in order of id, two or more; public where there is a plan.
        units: id of each text's privacy unit, with a plan; None without one.
        plan: sampling, clip and noise; None trains ordinarily, in shuffled epochs.
        recipe: the rest; with a plan, its `updates`, batches and `examples_per_step`.
        seed: secret of the reservation; given exactly if there is a plan.
        manifest: keyed digests of everything the noise is drawn for.
        init_seed: public; fresh layers, and the order without a plan.
        max_length: pieces of a row; longer texts are cut. Public.
        checkpoints: where they are kept; private as the data is.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `pretrain`; `operator` numbers.

    Returns:
        The encoder with its classifier; `classes_of` uses it, and `weights.save` writes what
        `transformers` reads as `…ForSequenceClassification`.

    Raises:
        BadInput: plan, recipe, model and texts do not fit together.
        Unfinished: `recipe.stop_after_seconds` passed; run again, it goes on.
        ConfideError: the weights stopped being finite, or a checkpoint could not be written.
    """
    start = load(model) if isinstance(model, Path) else model
    _check(start, train, labels, units, plan, max_length)
    store, objective = class_units(
        class_rows(train, labels, tokenizer, max_length),
        [str(i) for i in range(len(train))] if units is None else units,
        max_length=max_length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=SpecialIds.of(tokenizer).pad,
    )
    return fit(
        with_class_head(start, tuple(labels), init_seed),
        objective,
        store=store,
        plan=plan,
        recipe=recipe,
        seed=seed,
        manifest=manifest,
        order_seed=init_seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
    )


def _check(
    start: Bert,
    train: Sequence[LabelledText],
    labels: Sequence[str],
    units: Sequence[str] | None,
    plan: TrainingPlan | None,
    max_length: int,
) -> None:
    if (units is None) != (plan is None):
        raise BadInput("units belong to a plan, and a plan to units", where="fine-tuning")
    if units is not None and len(units) != len(train):
        raise BadInput("not one unit for each text", where="fine-tuning")
    if plan is None and not train:
        raise BadInput("there are no texts to train on", where="fine-tuning")
    if len(set(labels)) < max(2, len(labels)):
        raise BadInput("fewer than two classes, or one of them twice", where="labels")
    check_row_length(max_length, start.config.max_positions)


def with_class_head(start: Bert, labels: tuple[str, ...], seed: int) -> Bert:
    """Return the encoder with a fresh pooler and classifier; other heads are left behind.

    Args:
        start: the pre-trained model.
        labels: classes in order of id.
        seed: public.
    """
    config, d = start.config, start.config.hidden
    shapes = {
        f"{POOLER}/kernel": (d, d),
        f"{POOLER}/bias": (d,),
        f"{CLASSIFIER}/kernel": (d, len(labels)),
        f"{CLASSIFIER}/bias": (len(labels),),
    }
    encoder = {n: a for n, a in start.parameters.items() if not n.startswith(HEADS)}
    return Bert(config, encoder | initial_values(shapes, config.initializer_range, seed), labels)


def classes_of(
    model: Bert,
    texts: Sequence[LabelledText],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    batch_size: int = 32,
    device: str = "cpu",
) -> list[str]:
    """Return each text's likeliest class.

    Args:
        model: with its classifier and labels.
        texts: their own labels are not looked at.
        tokenizer: of the model's vocabulary.
        max_length: pieces of a row, as in training.
        batch_size: rows at once; memory and speed only.
        device: cpu, gpu, tpu or mock-tpu:N; one device of it is used.
    """
    rows = class_rows(texts, model.labels, tokenizer, max_length)
    ids = np.full((-(-len(rows) // batch_size) * batch_size, max_length), 0, np.int32)
    lengths, seconds = np.ones(len(ids), np.int32), np.zeros(len(ids), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        lengths[i], seconds[i] = len(row.ids), row.second
    with tf.device(single_device(device)):
        weights = {n: tf.constant(a) for n, a in model.parameters.items()}

        def best(*arrays: Tensor) -> Tensor:
            logits = class_logits(Layers(weights), model.config, *arrays)
            return tf.argmax(logits, axis=1, output_type=tf.int32)

        compiled = tf.function(best, autograph=False)
        guesses = [
            compiled(
                *(tf.constant(a[at : at + batch_size]) for a in (ids, lengths, seconds))
            ).numpy()
            for at in range(0, len(ids), batch_size)
        ]
    return [model.labels[int(n)] for part in guesses for n in part][: len(rows)]
