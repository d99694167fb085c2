"""A public model for another vocabulary: matching pieces keep what it knows about them.

Private text is not looked at: old and new vocabulary decide everything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import decoders

from dp_core.bert.parameters import MLM_BIAS, WORD, AnyModel, Model, initial_values
from dp_core.bert.weights import VOCABULARY, load_model
from dp_core.errors import BadInput

_BYTE_LEVEL, _WHOLE = "vocab.json", "tokenizer.json"
_CONTINUES = "##"
_END_OF_TEXT = "<|endoftext|>"  # GPT-2's only marker: it stands before a text and after it


def load_with_vocabulary(folder: Path, pieces: Sequence[str], seed: int) -> AnyModel:
    """Read a model for another vocabulary.

    Pieces that the folder's own vocabulary has keep their embedding and output bias. The others
    are drawn around the mean of the old table with its deviation, and get the mean bias: then the
    logits of pieces the model has never seen are ordinary ones, and do not outbid all others
    (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").

    Args:
        folder: the model, with `vocab.txt`, or `tokenizer.json`, or GPT-2's `vocab.json`.
        pieces: the new vocabulary, in order of id; WordPiece's.
        seed: public.

    Raises:
        BadInput: as `load_model`, or a folder without its vocabulary.
    """
    model = load_model(folder)
    old = read_pieces(folder)
    table = model.parameters[WORD]
    if max(old.values(), default=0) >= len(table):
        raise BadInput("a vocabulary larger than the model's table", where=str(folder))
    pairs = np.array(
        [(new, old[piece]) for new, piece in enumerate(pieces) if piece in old], np.int64
    ).reshape(-1, 2)
    draws = initial_values({WORD: (len(pieces), table.shape[1])}, 1.0, seed)[WORD]
    changed = {WORD: table.mean(0) + table.std(0) * draws}
    changed[WORD][pairs[:, 0]] = table[pairs[:, 1]]
    if MLM_BIAS in model.parameters:
        changed[MLM_BIAS] = _moved(model.parameters[MLM_BIAS], pairs, len(pieces))
    config = model.config.with_vocabulary(len(pieces))
    return Model(config, model.parameters | changed, model.labels)


def _moved(bias: NDArray[np.float32], pairs: NDArray[np.int64], size: int) -> NDArray[np.float32]:
    out = np.full(size, bias.mean(), np.float32)
    out[pairs[:, 0]] = bias[pairs[:, 1]]
    return out


def read_pieces(folder: Path) -> dict[str, int]:
    """Return the ids of a model folder's pieces, GPT-2's under their WordPiece names.

    Raises:
        BadInput: no vocabulary there that can be read.
    """
    try:
        if (folder / VOCABULARY).is_file():
            lines = (folder / VOCABULARY).read_text(encoding="utf-8").split("\n")
            return {piece.rstrip("\r"): i for i, piece in enumerate(lines) if piece}
        if (folder / _BYTE_LEVEL).is_file():
            return _as_word_pieces(json.loads((folder / _BYTE_LEVEL).read_text(encoding="utf-8")))
        about = json.loads((folder / _WHOLE).read_text(encoding="utf-8"))["model"]
        vocabulary: dict[str, int] = about["vocab"]
        return _as_word_pieces(vocabulary) if about["type"] == "BPE" else vocabulary
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"no readable {VOCABULARY}, {_BYTE_LEVEL} or {_WHOLE}", where=str(folder)
        ) from error


def _as_word_pieces(byte_level: dict[str, int]) -> dict[str, int]:
    """Rename byte-level pieces: those with a space before them begin a word, the others go on."""
    decoder = decoders.ByteLevel()
    out = {}
    for piece, i in byte_level.items():
        text = decoder.decode([piece])
        out[text[1:] if text.startswith(" ") else _CONTINUES + text] = i
    if _END_OF_TEXT in byte_level:
        out |= dict.fromkeys(("[CLS]", "[SEP]"), byte_level[_END_OF_TEXT])
    return out
