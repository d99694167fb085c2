"""A sentence with entity labels, as every reader yields it: tokens and IOB2 tags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dp_core.corpus.document import normalised_id


@dataclass(frozen=True, slots=True)
class Sentence:
    """Tokens and their tags, one each.

    Args:
        tokens: the words.
        tags: `O`, `B-type` or `I-type`; strict IOB2: an entity starts with `B-`.
        document_id: where it comes from, normalised (`normalised_id`), whoever makes the sentence;
            empty where the source does not say.
        patient_id: whose text it is; empty where nobody has said.
    """

    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    document_id: str = ""
    patient_id: str = ""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.tags):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.tags)} tags")
        object.__setattr__(self, "document_id", normalised_id(self.document_id))


def label_set(sentences: Iterable[Sentence]) -> tuple[str, ...]:
    """Return every tag that the entity types of the sentences can need, `O` first, then sorted."""
    return tags_of_types({tag[2:] for s in sentences for tag in s.tags if tag != "O"})


def tags_of_types(types: Iterable[str]) -> tuple[str, ...]:
    """Return every tag that these entity types can need, `O` first, then sorted by type."""
    return ("O", *(f"{p}-{t}" for t in sorted(set(types)) for p in "BI"))
