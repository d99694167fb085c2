"""What is trained, and how."""

from __future__ import annotations

from typing import Literal

from tasks.protocol.fields import MODEL, TRAINING, setting
from tasks.protocol.specs import Frozen


class TrainingSettings(Frozen):
    """The model, and its three trainings: public, private, fine-tuning."""

    vocabulary_size: int = setting(
        4000, MODEL, "Vocabulary size", "At most this many word pieces.", ge=100, le=200_000
    )
    layers: int = setting(2, MODEL, "Layers", "How many Transformer blocks.", ge=1, le=48)
    hidden: int = setting(
        128,
        MODEL,
        "Hidden size",
        "Width of the model, a multiple of 64.",
        ge=64,
        le=4096,
        multiple_of=64,
    )
    model_kind: Literal["bert", "distilbert", "gpt2"] = setting(
        "bert",
        MODEL,
        "Kind of model",
        "distilbert: the same without token types. gpt2: a causal model, measured by perplexity "
        "and exposure; it is not fine-tuned for entities.",
    )
    public_model: str = setting(
        "",
        MODEL,
        "Public model to start from",
        "Folder (local or gs://) of a BERT or DistilBERT (with gpt2, of a GPT-2) in Hugging "
        "Face's layout, instead of a fresh model of the size above; its vocabulary is exchanged "
        "for the released one. Its training data must be public, and the operator must have "
        "declared the folder so (confide ledger declare-public).",
    )
    sequence_length: int = setting(32, MODEL, "Sequence length", "Tokens per row.", ge=16, le=512)
    batch_size: int = setting(
        256,
        TRAINING,
        "Batch size",
        "Expected units per DP update.",
        ge=1,
        le=1 << 24,
    )
    epochs: float = setting(
        12.0,
        TRAINING,
        "Epochs",
        "Passes over the declared units in DP pre-training.",
        gt=0,
        le=10_000,
    )
    learning_rate: float = setting(
        2e-3,
        TRAINING,
        "DP learning rate",
        "Peak learning rate of DP pre-training, of AdamW.",
        gt=0,
        le=10,
    )
    nonprivate: bool = setting(
        True,
        TRAINING,
        "Compare with non-private training",
        "Also pre-train on the same rows without privacy. The result stays with the operator.",
    )
    nonprivate_batch_size: int = setting(
        64,
        TRAINING,
        "Non-private batch size",
        "Units per update without privacy; the epochs are those of the DP training, so that as "
        "many rows are read.",
        ge=1,
        le=1 << 24,
    )
    nonprivate_learning_rate: float = setting(
        3e-3,
        TRAINING,
        "Non-private learning rate",
        "Peak learning rate of the training without privacy, of AdamW.",
        gt=0,
        le=10,
    )
    public_steps: int = setting(
        900,
        TRAINING,
        "Public pre-training: updates",
        "Updates on public text.",
        ge=1,
        le=100_000_000,
    )
    public_batch_size: int = setting(
        64,
        TRAINING,
        "Public pre-training: batch size",
        "Rows per update of public pre-training.",
        ge=1,
        le=1 << 20,
    )
    public_learning_rate: float = setting(
        3e-3,
        TRAINING,
        "Public learning rate",
        "Peak learning rate of public pre-training, of AdamW.",
        gt=0,
        le=10,
    )
