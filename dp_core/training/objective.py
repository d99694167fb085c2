"""What rows teach a model: which predictions a row asks for, and what its answers cost.

The trainer, the clipping engine and the samplers know neither; a new objective is a new pair of
functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dp_core.bert.causal import causal_row_losses
from dp_core.bert.distil import distilled_row_losses
from dp_core.bert.gpt2_config import Gpt2Config
from dp_core.bert.heads import mlm_row_losses
from dp_core.bert.parameters import Bert, ModelConfig
from dp_core.corpus.counter_random import U64
from dp_core.corpus.masking import MaskedRows
from dp_core.corpus.token_store import TokenStore
from dp_core.training.rows import Examples, Indices, masked_examples
from dp_core.training.unit_losses import RowLosses
from dp_core.vocab.special_ids import SpecialIds

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Objective:
    """A training objective over the rows of a token store.

    Attributes:
        name: for logs, and for telling runs apart.
        examples: (store, row numbers (M,), row keys (M,)) -> inputs and predictions, in NumPy. Each
            row's is a function of that row and its key alone.
        row_losses: (layers, config, ids, lengths, positions, labels, weights) -> (M,), in
            TensorFlow; reads parameters through the layers, and divides by nothing of the batch.
    """

    name: str
    examples: Examples
    row_losses: RowLosses


def objective_for(config: ModelConfig, continuation: Flags | None = None) -> Objective:
    """Return what a model of this architecture is trained on: masked or next pieces.

    `continuation` is as in `masked_lm`; a causal model does without.
    """
    return causal_lm() if isinstance(config, Gpt2Config) else masked_lm(continuation)


def masked_lm(continuation: Flags | None = None) -> Objective:
    """BERT's: 15% of the pieces, by what stands on both sides (Devlin et al. 2019).

    Args:
        continuation: (V,) true for pieces that go on with a word, to mask whole words; see
            `wordpiece.continuation_pieces`. None masks pieces one by one.
    """
    examples = partial(masked_examples, continuation=continuation)
    return Objective("masked-lm", examples, mlm_row_losses)


def causal_lm() -> Objective:
    """GPT-2's: every ordinary piece, by what stands before it (Radford et al. 2019)."""
    return Objective("causal-lm", causal_examples, causal_row_losses)


def distillation(
    teacher: Bert,
    *,
    share: float = 0.5,
    temperature: float = 2.0,
    continuation: Flags | None = None,
) -> Objective:
    """DistilBERT's: masked pieces, and the teacher's own guesses of them (Sanh et al. 2019).

    Each row's loss is a function of the row and of the teacher, so clipping covers it. The teacher
    is read as a constant: it must be public, or released under a budget of its own.

    Args:
        teacher: with its MLM head, of the student's vocabulary.
        share: of the teacher's guesses in the loss; the rest is the text's.
        temperature: T ≥ 1, at which the guesses of both are compared.
        continuation: as in `masked_lm`.

    Raises:
        BadInput: a share outside 0 to 1, or a temperature that is not positive.
    """
    examples = partial(masked_examples, continuation=continuation)
    row_losses = distilled_row_losses(teacher, share, temperature)
    return Objective(f"distillation-{share}-{temperature}", examples, row_losses)


def causal_examples(store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
    """Ask each place for the piece after it.

    The markers of rows and unknown pieces are read but not predicted, as under a mask: the first
    stand at places that the row's length gives away, the second would reward not knowing.

    Args:
        store: the rows.
        rows: (M,) row numbers.
        keys: (M,) unused: nothing here is random.

    Returns:
        K = S − 1 predictions of each row, those beyond its length of weight 0.
    """
    ids = store.tokens[rows].astype(np.int32)  # (M, S)
    labels = ids[:, 1:]
    asked = np.arange(1, ids.shape[1])[None, :] < store.lengths[rows][:, None]
    asked &= ~np.isin(labels, SpecialIds().as_tuple())
    positions = np.broadcast_to(np.arange(labels.shape[1], dtype=np.int32), labels.shape)
    return MaskedRows(ids, positions, np.where(asked, labels, 0), asked.astype(np.float32))
