"""Made-up clinical notes: thousands of them in seconds, the same for the same seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from dp_core.corpus.document import Document
from dp_core.corpus.keyed_hash import generator, seed_key
from dp_core.corpus.synthetic.grammar import Piece, expand, pick
from dp_core.corpus.synthetic.narrator import Narrator
from dp_core.corpus.synthetic.note_templates import NOTE_TYPES, Section
from dp_core.corpus.synthetic.patient import Patient, draw_patient
from dp_core.corpus.synthetic.style import Style, draw_style, typed

_WORDS = range(60, 151)  # a note ends with the section that would pass its own length
_TYPE_BOUNDS = tuple(itertools.accumulate(t.weight for t in NOTE_TYPES))
_NOTES_PER_PATIENT = (1, 1, 1, 2, 2, 2, 3, 3, 4, 6)


@dataclass(frozen=True)
class Line:
    """A line of a note: a heading (no pieces labelled) or a sentence."""

    pieces: list[Piece]
    heading: bool

    @property
    def text(self) -> str:
        """The line as it stands in the note."""
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True)
class Note:
    """A made-up note with its entity labels."""

    document_id: str
    patient_id: str
    admission_id: str
    lines: list[Line]

    @property
    def text(self) -> str:
        """The note as a clinician would save it."""
        out: list[str] = []
        for before, line in zip([None, *self.lines[:-1]], self.lines, strict=True):
            if before is not None:
                out.append("\n" if line.heading or before.heading else " ")
            out.append(line.text)
        return "".join(out)


def notes(patients: int, seed: int) -> Iterator[Document]:
    """Yield the notes of made-up patients.

    Args:
        patients: how many; each has one to six notes, most one to three, over one or two
            admissions.
        seed: public; the first patients of a larger corpus are those of a smaller one.
    """
    for note in labelled_notes(patients, seed, "private corpus"):
        yield Document(note.document_id, note.patient_id, note.text, note.admission_id)


def labelled_notes(patients: int, seed: int, stream: str) -> Iterator[Note]:
    """Yield notes with their entity labels; streams of one seed share no patient."""
    key = seed_key(seed)
    for index in range(patients):
        rng = generator(key, stream, str(index))
        patient = draw_patient(rng)
        patient_id = f"P{index:06d}"
        admission, count = 1, pick_count(rng)
        for number in range(1, count + 1):
            if number > 1 and rng.random() < 0.3:
                admission += 1
            yield Note(
                f"{patient_id}-{number}",
                patient_id,
                f"{patient_id}-A{admission}",
                _compose(patient, rng),
            )


def pick_count(rng: Random) -> int:
    """Return how many notes a patient has."""
    return _NOTES_PER_PATIENT[int(rng.random() * len(_NOTES_PER_PATIENT))]


def _compose(patient: Patient, rng: Random) -> list[Line]:
    """Return the lines of one note: sections in order, until its length is reached."""
    roll = rng.random() * _TYPE_BOUNDS[-1]
    kind = next(t for t, bound in zip(NOTE_TYPES, _TYPE_BOUNDS, strict=True) if roll < bound)
    narrator, style = Narrator(patient, rng), draw_style(rng)
    title = pick(rng, kind.titles)
    lines = [Line([(title, "")], heading=True)] if title else []
    longest, words = rng.choice(_WORDS), 0
    for section in kind.sections:
        written = _write(section, narrator, style, rng)
        length = sum(line.text.count(" ") + 1 for line in written)
        if words >= _WORDS.start and words + length > longest:
            break
        lines, words = lines + written, words + length
    return lines


def _write(section: Section, narrator: Narrator, style: Style, rng: Random) -> list[Line]:
    most = min(section.most, len(section.sentences))
    count = rng.randint(min(section.fewest, most), most)
    # Sorted: the first sentence of a section introduces it, as in real notes.
    chosen = sorted(rng.sample(range(len(section.sentences)), count))
    lines = [Line([(pick(rng, section.headings), "")], heading=True)]
    for index in chosen:
        pieces = expand(section.sentences[index], rng, narrator)
        lines.append(Line(typed(pieces, style, rng), heading=False))
    return lines
