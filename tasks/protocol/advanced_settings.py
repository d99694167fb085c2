"""What most jobs leave as it is: field names, engine, optimizer."""

from __future__ import annotations

from typing import Literal

from tasks.protocol.fields import ADVANCED, THREE_FIELDS, setting
from tasks.protocol.specs import Frozen


class AdvancedSettings(Frozen):
    """The last section of the form."""

    jsonl_fields: str = setting(
        "text,document_id,patient_id",
        ADVANCED,
        "JSONL: fields",
        "Comma-separated names of the fields that hold text, document id and patient id.",
        pattern=THREE_FIELDS,
    )
    engine: Literal["book-keeping", "tensorflow-privacy", "naive"] = setting(
        "book-keeping",
        ADVANCED,
        "Clipping engine",
        "How clipped sums are computed; they are the same, speed and memory are not. Choose "
        "book-keeping, the fastest; tensorflow-privacy and naive (one unit at a time) are there to "
        "compare with.",
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "float32",
        ADVANCED,
        "Compute precision",
        "Format of matrix products; weights, norms, sums and noise stay float32.",
    )
    clipping: Literal["flat", "automatic", "adaptive"] = setting(
        "flat",
        ADVANCED,
        "Clipping",
        "flat: at the clip norm; automatic: every gradient is scaled to nearly the clip norm "
        "(AUTO-S), same ε; adaptive: the clip norm follows a quantile of the norms, from counts "
        "that share the noise, same ε.",
    )
    clip_quantile: float = setting(
        0.5,
        ADVANCED,
        "Adaptive clipping: quantile",
        "Share of units that should be within the clip norm.",
        gt=0,
        lt=1,
    )
    first_batch_size: int = setting(
        0,
        ADVANCED,
        "First batch size",
        "DP batches grow in four phases from this to the batch size, over 3/8 of the updates "
        "(Anil et al. 2021); 0: constant. Poisson sampling only.",
        ge=0,
        le=1 << 24,
    )
    weight_decay: float = setting(
        0.01,
        ADVANCED,
        "Weight decay",
        "AdamW's, in every pre-training; Anil et al. 2021 take 1.",
        ge=0,
        le=10,
    )
    decay_power: float = setting(
        1.0,
        ADVANCED,
        "Learning-rate decay",
        "The rate falls as (share of the updates left)^power; 0 keeps it.",
        ge=0,
        le=10,
    )
    whole_words: bool = setting(
        False, ADVANCED, "Mask whole words", "Mask all pieces of a word together."
    )

    keep_checkpoints: int = setting(
        2, ADVANCED, "Checkpoints kept", "How many of the newest a training keeps.", ge=1, le=100
    )
    time_box_minutes: float = setting(
        0.0,
        ADVANCED,
        "Time box",
        "Minutes after which a training's process ends with a checkpoint; it is started again at "
        "once and goes on, charged once. It bounds one process, not the job. 0: none.",
        ge=0,
        le=100_000,
    )
