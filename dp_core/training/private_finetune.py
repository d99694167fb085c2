"""Fine-tuning for entity extraction on PRIVATE labels, by DP-SGD over their units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dp_core.bert.parameters import Bert
from dp_core.bert.weights import load
from dp_core.errors import BadInput
from dp_core.ner.sentence import Sentence
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.checkpoint_places import CheckpointPlace
from dp_core.training.finetune import with_classifier
from dp_core.training.fit import fit
from dp_core.training.progress import Progress
from dp_core.training.recipe import Recipe
from dp_core.training.tagging import rows_of
from dp_core.training.tagging_units import tagging_units
from dp_core.training.unit_rows import check_row_length
from dp_core.vocab.special_ids import SpecialIds


def finetune_privately(
    model: Path | Bert,
    train: Sequence[Sentence],
    tokenizer: Tokenizer,
    *,
    labels: Sequence[str],
    units: Sequence[str],
    plan: TrainingPlan,
    recipe: Recipe,
    seed: PrivacySeed,
    manifest: bytes,
    init_seed: int,
    max_length: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
) -> Bert:
    """Train a token classifier on private sentences and labels.

    Formal guarantee: as `pretrain`'s, for the plan's unit: the model is as private towards the
    sentences, their tags and which of them there are as `plan.event()` says. The starting model
    must be public, or private under a budget of its own, which then adds up with this one.

    What depends on the data in no noised way must be told from outside: the tags there may be,
    and the length of a row. Tags that are not told count as `O`.

    Args:
        model: the pre-trained model, or its folder; its MLM head is left behind.
        train: private sentences with private tags.
        tokenizer: of the model's vocabulary.
        labels: PUBLIC tags in order of id, `O` first; see `ner.sentence.tags_of_types`.
        units: id of each sentence's privacy unit: its document's, its patient's, or its own.
        plan: sampling, clip and noise, over these units.
        recipe: the rest; `updates`, batches and `examples_per_step` (rows of a unit) as the plan's.
        seed: secret of the reservation.
        manifest: keyed digests of everything the noise is drawn for.
        init_seed: public; the classifier's initial values.
        max_length: pieces of a row; longer sentences are cut between words. Public.
        checkpoints: where they are kept; private.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: as in `pretrain`; `operator` numbers.

    Returns:
        The encoder with its token classifier; tag with it by `finetune.tag`.

    Raises:
        BadInput: plan, recipe, model and sentences do not fit together.
        Unfinished: `recipe.stop_after_seconds` passed; run again, it goes on.
        ConfideError: the weights stopped being finite, or a checkpoint could not be written.
    """
    start = load(model) if isinstance(model, Path) else model
    if len(units) != len(train):
        raise BadInput("not one unit for each sentence", where="fine-tuning")
    if not labels or labels[0] != "O":
        raise BadInput("the first label is not O", where="labels")
    check_row_length(max_length, start.config.max_positions)
    special = SpecialIds.of(tokenizer)
    store, objective = tagging_units(
        rows_of(train, labels, tokenizer, max_length),
        units,
        max_length=max_length,
        vocabulary=tokenizer.get_vocab_size(),
        pad=special.pad,
    )
    return fit(
        with_classifier(start, tuple(labels), init_seed),
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
