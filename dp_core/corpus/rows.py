"""From a unit's texts to its rows of token ids: `[CLS] pieces [SEP]`, no row mixing units.

BERT's `dupe_factor` (copies of a row) and next-sentence pairs (a row of two units) are left out
on purpose: either would let a unit reach the model through more rows than its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

from dp_core.corpus.contribution import bounded_sample
from dp_core.corpus.privacy_units import Unit
from dp_core.errors import BadInput
from dp_core.vocab.special_ids import SpecialIds

_UNITS_PER_CALL = 256  # enough to keep the tokenizer's threads busy


def rows_of_units(
    units: Iterable[Unit],
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    max_examples_per_unit: int,
    key: bytes,
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield (unit id, rows) for every unit, at most `max_examples_per_unit` rows each.

    Args:
        units: the privacy units.
        tokenizer: from `dp_core.vocab.wordpiece.load`.
        sequence_length: S, the most ids a row may have, [CLS] and [SEP] included.
        max_examples_per_unit: rows kept, drawn for each unit independently of all others.
        key: public coins for that draw.
    """
    if sequence_length < 3:
        raise BadInput("no room between [CLS] and [SEP]", where="sequence_length", fix="Use 3+.")
    special = SpecialIds.of(tokenizer)
    source = iter(units)
    while batch := list(itertools.islice(source, _UNITS_PER_CALL)):
        texts = [text for unit in batch for text in unit.texts]
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for unit in batch:
            rows = [
                [special.cls, *pieces, special.sep]
                for encoding in itertools.islice(encoded, len(unit.texts))
                for pieces in _even_parts(encoding.ids, sequence_length - 2)
            ]
            yield unit.unit_id, bounded_sample(rows, max_examples_per_unit, unit.unit_id, key)


def _even_parts(ids: list[int], room: int) -> list[list[int]]:
    """Cut ids into as few parts of at most `room` as possible, of nearly equal length."""
    n = -(-len(ids) // room)
    cuts = [len(ids) * i // n for i in range(n + 1)] if n else []
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]
