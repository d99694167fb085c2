"""Made-up clinical notes: thousands of them in seconds, the same for the same seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from dp_core.data.documents import Document
from dp_core.data.hashing import generator, seed_key
from tasks.demo_data.language import (
    IMAGING,
    LABS,
    LESION,
    TEST_MODIFIERS,
    WORDS,
    Block,
    Piece,
    Style,
    draw_style,
    expand,
    phrase,
    pick,
    pick_common,
    read_table,
    typed,
)
from tasks.demo_data.patients import (
    CONDITIONS,
    Condition,
    Medication,
    Patient,
    Scene,
    draw_patient,
    frequency_and_reason,
)

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


PROBLEM, TEST, TREATMENT = "problem", "test", "treatment"
_LAB_NAMES = tuple(LABS)


class Narrator(Scene):
    """What one clinician writes of one patient on one day: the scene, and the entities."""

    # --- problems

    def _slot_reason(self) -> list[Piece]:
        """The disease that brings the patient in."""
        return [(self._qualified(self.patient.condition_names[0]), PROBLEM)]

    def _slot_problem(self) -> list[Piece]:
        """One of the patient's diseases, under one of its names."""
        return [(self._qualified(self._condition_name()), PROBLEM)]

    def _slot_history(self) -> list[Piece]:
        """Two or three of the patient's diseases as a list."""
        names = list(self.patient.condition_names[1:]) or [self.patient.condition_names[0]]
        return self._listed([(name, PROBLEM) for name in names[:3]])

    def _slot_symptom(self) -> list[Piece]:
        text = pick_common(self.rng, self.patient.symptoms)
        if self.rng.random() < 0.35:
            text = f"{pick_common(self.rng, WORDS['symptom quality'])} {text}"
        return [(text, PROBLEM)]

    def _slot_symptoms(self) -> list[Piece]:
        n = min(len(self.patient.symptoms), self.rng.randint(2, 3))
        return self._listed([(s, PROBLEM) for s in self.rng.sample(self.patient.symptoms, n)])

    def _slot_denied(self) -> list[Piece]:
        """Symptoms of diseases that the patient does not have."""
        found: dict[str, Piece] = {}
        for _ in range(self.rng.randint(1, 4)):
            condition = pick_common(self.rng, CONDITIONS)
            text = phrase(pick_common(self.rng, condition.symptoms), self.rng)
            found[text] = (text, PROBLEM)
        return self._listed(list(found.values()), "or")

    def _slot_finding(self) -> list[Piece]:
        if self.rng.random() < 0.3:
            return self._slot_lesion()
        return [(pick_common(self.rng, self.patient.findings), PROBLEM)]

    def _slot_nofinding(self) -> list[Piece]:
        condition = pick_common(self.rng, CONDITIONS)
        return [(phrase(pick_common(self.rng, condition.findings), self.rng), PROBLEM)]

    def _slot_lesion(self) -> list[Piece]:
        pieces = expand(LESION, self.rng, self)
        return [(self._article("".join(text for text, _ in pieces)), PROBLEM)]

    def _slot_complication(self) -> list[Piece]:
        return [(pick_common(self.rng, WORDS["complicated by"]), PROBLEM)]

    # --- tests

    def _slot_test(self) -> list[Piece]:
        condition = self._condition()
        name = pick_common(self.rng, condition.tests)
        return [(phrase(TEST_MODIFIERS, self.rng) + name, TEST)]

    def _slot_imaging(self) -> list[Piece]:
        text = phrase(IMAGING, self.rng)
        return [(phrase(TEST_MODIFIERS, self.rng) + text, TEST)]

    def _slot_lab(self) -> list[Piece]:
        """The name of a laboratory value and its number: `potassium 3.1`."""
        name, value, _ = self._lab()
        return [(name, TEST), (pick(self.rng, (" ", " ", " of ", " was ")) + value, "")]

    def _slot_trend(self) -> list[Piece]:
        """A laboratory value now and before: `creatinine 2.1, up from 1.4`."""
        name, value, _ = self._lab()
        decimals = len(value.partition(".")[2].split()[0]) if "." in value else 0
        before = float(value.split()[0]) * self.rng.choice((0.5, 0.7, 0.85, 1.2, 1.6, 2.0))
        way = "up" if float(value.split()[0]) > before else "down"
        return [(name, TEST), (f" {value}, {way} from {before:.{decimals}f}", "")]

    def _slot_labs(self) -> list[Piece]:
        return self._listed([piece for _ in range(3) for piece in self._pair()], "", step=2)

    def _slot_labword(self) -> list[Piece]:
        """A laboratory value in words: an abnormal one is itself a problem."""
        name, _, direction = self._lab()
        if direction:
            word = ("elevated", "rising", "high") if direction > 0 else ("low", "decreased")
            return [(f"{pick(self.rng, word)} {name}", PROBLEM)]
        return [(pick(self.rng, ("normal ", "stable ", "pending ")), ""), (name, TEST)]

    def _slot_vitals(self) -> list[Piece]:
        p, rng = self.patient, self.rng
        pulse, upper = p.heart_rate + rng.randint(-8, 8), p.systolic + rng.randint(-10, 10)
        long_form = rng.random() < 0.4
        names = (
            ("temperature", "blood pressure", "heart rate", "respiratory rate", "oxygen saturation")
            if long_form
            else ("T", "BP", "HR", "RR", "O2 sat")
        )
        values = (
            f"{rng.gauss(98.4, 0.7):.1f}",
            f"{upper}/{round(upper * 0.58)}",
            str(pulse),
            str(rng.randint(12, 24)),
            f"{rng.randint(90, 100)}% on {pick(rng, ('room air', '2L nc', '4L', 'ra'))}",
        )
        out: list[Piece] = []
        for name, value in zip(names, values, strict=True):
            out += [(name, TEST), (f" {value}, ", "")]
        return [*out[:-1], (out[-1][0].removesuffix(", "), "")]

    # --- treatments

    def _slot_drug(self) -> list[Piece]:
        return [(self._medication().drug.name, TREATMENT)]

    def _slot_dosed(self) -> list[Piece]:
        """A drug with its dose, route and frequency, of which the name alone is the entity."""
        return self._dosed(self._medication())

    def _slot_medlist(self) -> list[Piece]:
        """A numbered list of the patient's medications."""
        meds = self.patient.medications
        chosen = self.rng.sample(meds, min(len(meds), self.rng.randint(3, 6)))
        out: list[Piece] = []
        for number, medication in enumerate(chosen, 1):
            out += [(f"{number}. ", ""), *self._dosed(medication), ("\n", "")]
        return out[:-1]

    def _slot_procedure(self) -> list[Piece]:
        return [(phrase(pick_common(self.rng, self._condition().procedures), self.rng), TREATMENT)]

    def _slot_treatment(self) -> list[Piece]:
        return self._slot_drug() if self.rng.random() < 0.5 else self._slot_procedure()

    def _slot_allergy(self) -> list[Piece]:
        if self.patient.allergy is None:
            return [(pick(self.rng, ("no known drug allergies", "nkda")), "")]
        drug, reaction = self.patient.allergy
        joint = pick(self.rng, (" causes ", " - ", ", reaction: "))
        return [(drug, TREATMENT), (joint, ""), (reaction, PROBLEM)]

    # --- helpers

    def _condition(self) -> Condition:
        # The reason for admission is what most of the note is about.
        if self.rng.random() < 0.55:
            return self.patient.conditions[0]
        return self.rng.choice(self.patient.conditions)

    def _condition_name(self) -> str:
        i = self.rng.randrange(len(self.patient.conditions))
        if self.rng.random() < 0.7:
            return self.patient.condition_names[i]
        return pick_common(self.rng, self.patient.conditions[i].names)

    def _qualified(self, name: str) -> str:
        return (
            f"{pick_common(self.rng, WORDS['severity'])} {name}"
            if self.rng.random() < 0.25
            else name
        )

    def _medication(self) -> Medication:
        return self.rng.choice(self.patient.medications)

    def _dosed(self, medication: Medication) -> list[Piece]:
        drug, rng = medication.drug, self.rng
        form = pick(rng, drug.forms)
        if form and rng.random() < 0.3:
            tail = f" {medication.strength} {form} {drug.route} "
        else:
            tail = f" {medication.strength} {drug.route} "
        return [
            (drug.name, TREATMENT),
            (tail + frequency_and_reason(medication.frequency, rng), ""),
        ]

    def _lab(self) -> tuple[str, str, int]:
        """Return a laboratory value's name, its number as text, and -1, 0 or 1: low to high."""
        own = sorted(self.patient.abnormal_labs)
        key = (
            pick(self.rng, own)
            if own and self.rng.random() < 0.6
            else pick_common(self.rng, _LAB_NAMES)
        )
        lab, direction = LABS[key], 0
        if key in self.patient.abnormal_labs:
            direction = 1 if lab.rises else -1
            shift = self.rng.random()
            value = lab.high + shift * 3 * (lab.high - lab.low) if lab.rises else 0.0
            value = value or lab.low * (1 - 0.6 * shift)
        else:
            value = lab.low + self.rng.random() * (lab.high - lab.low)
        unit = f" {lab.unit}" if lab.unit else ""
        return pick_common(self.rng, lab.names), f"{value:.{lab.decimals}f}{unit}", direction

    def _pair(self) -> list[Piece]:
        name, value, _ = self._lab()
        return [(name, TEST), (f" {value}", "")]

    def _listed(self, items: list[Piece], word: str = "and", step: int = 1) -> list[Piece]:
        """Join pieces (each item being `step` of them) with commas and a last word."""
        out: list[Piece] = []
        count = len(items) // step
        for i in range(count):
            if i:
                last = i == count - 1 and word
                out.append((f" {word} " if last else ", ", ""))
            out += items[i * step : (i + 1) * step]
        return out

    def _article(self, noun: str) -> str:
        return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


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
