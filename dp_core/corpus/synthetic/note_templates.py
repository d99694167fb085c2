"""What the made-up notes say (`tables/notes.txt`): note types, their sections, their sentences."""

from __future__ import annotations

from dataclasses import dataclass

from dp_core.corpus.synthetic.tables import Block, read_table

_NOTE = "note: "


@dataclass(frozen=True)
class Section:
    """A part of a note: headings to choose from, sentences to draw, and how many of them."""

    headings: tuple[str, ...]
    sentences: tuple[str, ...]
    fewest: int
    most: int


@dataclass(frozen=True)
class NoteType:
    """A kind of note: how often, its titles (one may be empty), and its sections in order."""

    weight: int
    titles: tuple[str, ...]
    sections: tuple[Section, ...]


def _section(block: Block) -> Section:
    fewest, most = block.fields["count"]
    return Section(block.fields["headings"], block.templates, int(fewest), int(most))


_BLOCKS = read_table("notes")
_SECTIONS = {b.title: _section(b) for b in _BLOCKS if not b.title.startswith(_NOTE)}

NOTE_TYPES: tuple[NoteType, ...] = tuple(
    NoteType(
        int(block.fields["weight"][0]),
        block.fields["titles"],
        tuple(_SECTIONS[name] for name in block.fields["sections"]),
    )
    for block in _BLOCKS
    if block.title.startswith(_NOTE)
)
