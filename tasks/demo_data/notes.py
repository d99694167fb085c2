"""Synthetic clinical notes; equal seeds give equal notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

from dp_core.data.corpus import Document
from dp_core.data.hashing import generator, seed_key
from tasks.demo_data.synthetic_patients import CONDITIONS, LABS, Condition, Medication, Patient
from tasks.demo_data.templates import (
    ABBREVIATIONS,
    TEMPLATES,
    WORDS,
    Block,
    Span,
    expand,
    phrase,
    pick,
    pick_common,
    read_table,
)

PROBLEM, TEST, TREATMENT = "problem", "test", "treatment"

# A note type has a weight, titles (one may be empty) and ordered sections. A section has headings,
# sentences to draw from, and the fewest and most sentences of a note.
NOTE_TYPES = [block for block in read_table("notes") if block.title.startswith("note: ")]
SECTIONS = {block.title: block for block in read_table("notes") if "headings" in block.fields}

_TYPE_WEIGHTS = [int(kind.fields["weight"][0]) for kind in NOTE_TYPES]
_LENGTHS = range(60, 151)  # words; a note ends before the section that would exceed its length
_NOTES_PER_PATIENT = (1, 1, 1, 2, 2, 2, 3, 3, 4, 6)
_LABS = tuple(LABS)
_LONGEST_FIRST = sorted(map(re.escape, ABBREVIATIONS), key=len, reverse=True)
_ABBREVIATE = re.compile(rf"\b({'|'.join(_LONGEST_FIRST)})\b(?![-/'])")
_LONG_WORD = re.compile(r"[a-z]{6,}")
_SLIPS_PER_CHARACTER = 0.0012


@dataclass(frozen=True)
class NoteLine:
    """A line of a note: a heading (without labels) or a sentence."""

    spans: list[Span]
    heading: bool

    @property
    def text(self) -> str:
        """The text of the line in the note."""
        return "".join(text for text, _ in self.spans)


class Note(NamedTuple):
    """A synthetic note with its entity labels."""

    document: Document
    lines: list[NoteLine]


def notes(patients: int, seed: int) -> Iterator[Document]:
    """Return an iterator over the notes of synthetic patients.

    Args:
        patients: number of patients; each has one to six notes, most have one to three, from one
            or more admissions.
        seed: public seed; a larger corpus begins with the patients of a smaller corpus.
    """
    return (note.document for note in labelled_notes(patients, seed, "private corpus"))


def labelled_notes(patients: int, seed: int, stream: str) -> Iterator[Note]:
    """Yield notes with entity labels; different streams of one seed share no patient."""
    key = seed_key(seed)
    for index in range(patients):
        rng = generator(key, stream, str(index))
        patient = Patient(rng)
        patient_id, admission = f"P{index:06d}", 1
        count = _NOTES_PER_PATIENT[int(rng.random() * len(_NOTES_PER_PATIENT))]
        for number in range(1, count + 1):
            if number > 1 and rng.random() < 0.3:
                admission += 1
            lines = _compose(patient, rng)
            note_id, admission_id = f"{patient_id}-{number}", f"{patient_id}-A{admission}"
            yield Note(Document(note_id, patient_id, _text(lines), admission_id), lines)


def _text(lines: list[NoteLine]) -> str:
    """Return the text of a whole note, with headings on separate lines."""
    text = lines[0].text
    for before, line in pairwise(lines):
        text += ("\n" if line.heading or before.heading else " ") + line.text
    return text


def _compose(patient: Patient, rng: Random) -> list[NoteLine]:
    """Return the lines of one note: sections in order, up to a drawn length."""
    (kind,) = rng.choices(NOTE_TYPES, _TYPE_WEIGHTS)
    narrator, style = Narrator(patient, rng), Style(rng)
    title = pick(rng, kind.fields["titles"])
    lines = [NoteLine([(title, "")], heading=True)] if title else []
    longest, words = rng.choice(_LENGTHS), 0
    for name in kind.fields["sections"]:
        section = _section(SECTIONS[name], narrator, style, rng)
        length = sum(line.text.count(" ") + 1 for line in section)
        if words >= _LENGTHS.start and words + length > longest:
            break
        lines, words = lines + section, words + length
    return lines


def _section(section: Block, narrator: Narrator, style: Style, rng: Random) -> list[NoteLine]:
    fewest, most = (min(int(n), len(section.templates)) for n in section.fields["count"])
    # Sorted, because the first sentence of a section introduces it, as in real notes.
    chosen = sorted(rng.sample(range(len(section.templates)), rng.randint(fewest, most)))
    lines = [NoteLine([(pick(rng, section.fields["headings"]), "")], heading=True)]
    for index in chosen:
        sentence = expand(section.templates[index], rng, narrator.fill)
        lines.append(NoteLine(style.typed(sentence, rng), heading=False))
    return lines


class Narrator:
    """Fills the slots of the sentences of one note.

    Args:
        patient: the subject of the note.
        rng: random generator of this note.
    """

    def __init__(self, patient: Patient, rng: Random) -> None:
        self.patient, self.rng = patient, rng
        month, day = rng.randint(1, 12), rng.randint(1, 28)
        self._traits = {
            **patient.traits,
            "month": str(month),
            "mm": f"{month:02d}",
            "day": str(day),
            "dd": f"{day:02d}",
            "year": str(rng.randint(2101, 2190)),
        }

    def fill(self, name: str) -> list[Span]:
        """Return the spans of a slot: a trait, a result of `_slot_…`, a template, or a word."""
        if name in self._traits:
            return expand(self._traits[name], self.rng, self.fill)
        if method := getattr(self, f"_slot_{name}", None):
            spans: list[Span] = method()
            return spans
        text = self._text(name) if name in TEMPLATES else pick(self.rng, WORDS[name])
        return [(text, "")]

    def _text(self, template: str) -> str:
        return phrase(TEMPLATES[template], self.rng, self.fill)

    # --- times

    def _slot_time(self) -> list[Span]:
        hour, minute = self.rng.randint(0, 23), self.rng.choice(("00", "15", "30", "45"))
        return [(f"{hour:02d}{minute}", "")]

    def _slot_span(self) -> list[Span]:
        unit = pick(self.rng, ("day", "day", "week", "month", "hour", "year"))
        number = self.rng.choice((1, 2, 2, 3, 3, 4, 5, 7, 10))
        return [(f"{number} {unit}{'s' if number > 1 else ''}", "")]

    # --- problems

    def _slot_reason(self) -> list[Span]:
        """The main disease, which is the reason for admission."""
        return self._qualified(self.patient.condition_names[0])

    def _slot_problem(self) -> list[Span]:
        """One of the patient's diseases, by one of its names."""
        i = self.rng.randrange(len(self.patient.conditions))
        if self.rng.random() < 0.7:
            return self._qualified(self.patient.condition_names[i])
        return self._qualified(pick_common(self.rng, self.patient.conditions[i]["names"]))

    def _qualified(self, name: str, share: float = 0.25, words: str = "severity") -> list[Span]:
        if self.rng.random() < share:
            name = f"{pick_common(self.rng, WORDS[words])} {name}"
        return [(name, PROBLEM)]

    def _slot_history(self) -> list[Span]:
        """A list of up to three of the patient's other diseases."""
        names = self.patient.condition_names
        return _listed([[(name, PROBLEM)] for name in names[1:4] or names[:1]])

    def _slot_symptom(self) -> list[Span]:
        symptom = pick_common(self.rng, self.patient.symptoms)
        return self._qualified(symptom, 0.35, "symptom quality")

    def _slot_symptoms(self) -> list[Span]:
        n = min(len(self.patient.symptoms), self.rng.randint(2, 3))
        return _listed([[(s, PROBLEM)] for s in self.rng.sample(self.patient.symptoms, n)])

    def _slot_denied(self) -> list[Span]:
        """Symptoms of arbitrary diseases, which the patient denies."""
        drawn = (pick_common(self.rng, CONDITIONS) for _ in range(self.rng.randint(1, 4)))
        texts = [phrase(pick_common(self.rng, c["symptoms"]), self.rng) for c in drawn]
        return _listed([[(text, PROBLEM)] for text in dict.fromkeys(texts)], "or")

    def _slot_finding(self) -> list[Span]:
        if self.rng.random() < 0.3:
            return self._slot_lesion()
        return [(pick_common(self.rng, self.patient.findings), PROBLEM)]

    def _slot_nofinding(self) -> list[Span]:
        condition = pick_common(self.rng, CONDITIONS)
        return [(phrase(pick_common(self.rng, condition["findings"]), self.rng), PROBLEM)]

    def _slot_lesion(self) -> list[Span]:
        noun = self._text("a lesion")
        return [(f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}", PROBLEM)]

    def _slot_complication(self) -> list[Span]:
        return [(pick_common(self.rng, WORDS["complicated by"]), PROBLEM)]

    # --- tests

    def _slot_test(self) -> list[Span]:
        return self._modified(pick_common(self.rng, self._condition()["tests"]))

    def _slot_imaging(self) -> list[Span]:
        return self._modified(self._text("image of a part"))

    def _modified(self, test: str) -> list[Span]:
        return [(self._text("test modifier") + test, TEST)]

    def _slot_lab(self) -> list[Span]:
        """The name of a laboratory value and its number: `potassium 3.1`."""
        name, value, _ = self._lab()
        return [(name, TEST), (pick(self.rng, (" ", " ", " of ", " was ")) + value, "")]

    def _slot_trend(self) -> list[Span]:
        """A present and an earlier laboratory value: `creatinine 2.1, up from 1.4`."""
        name, value, _ = self._lab()
        number = value.split()[0]
        before = float(number) * self.rng.choice((0.5, 0.7, 0.85, 1.2, 1.6, 2.0))
        way = "up" if float(number) > before else "down"
        decimals = len(number.partition(".")[2])
        return [(name, TEST), (f" {value}, {way} from {before:.{decimals}f}", "")]

    def _slot_labs(self) -> list[Span]:
        values = [self._lab() for _ in range(3)]
        return _listed([[(name, TEST), (f" {value}", "")] for name, value, _ in values], "")

    def _slot_labword(self) -> list[Span]:
        """A laboratory value in words; an abnormal value is labelled as a problem."""
        name, _, direction = self._lab()
        if direction:
            words = ("elevated", "rising", "high") if direction > 0 else ("low", "decreased")
            return [(f"{pick(self.rng, words)} {name}", PROBLEM)]
        return [(pick(self.rng, ("normal ", "stable ", "pending ")), ""), (name, TEST)]

    def _slot_vitals(self) -> list[Span]:
        p, rng = self.patient, self.rng
        pulse, upper = p.heart_rate + rng.randint(-8, 8), p.systolic + rng.randint(-10, 10)
        names = WORDS["long vital signs" if rng.random() < 0.4 else "vital signs"]
        values = (
            f"{rng.gauss(98.4, 0.7):.1f}",
            f"{upper}/{round(upper * 0.58)}",
            str(pulse),
            str(rng.randint(12, 24)),
            f"{rng.randint(90, 100)}% on {pick(rng, ('room air', '2L nc', '4L', 'ra'))}",
        )
        pairs = list(zip(names, values, strict=True))
        spans = [s for name, value in pairs for s in ((name, TEST), (f" {value}, ", ""))]
        return [*spans[:-1], (f" {values[-1]}", "")]

    def _lab(self) -> tuple[str, str, int]:
        """Return a laboratory value's name, its text, and -1, 0 or 1 for low, normal or high."""
        abnormal = self.patient.abnormal_labs
        if abnormal and self.rng.random() < 0.6:
            key = pick(self.rng, abnormal)
        else:
            key = pick_common(self.rng, _LABS)
        names, least, most, unit, decimals, in_disease = LABS[key]
        low, high, coin = float(least), float(most), self.rng.random()
        if key not in abnormal:
            direction, value = 0, low + coin * (high - low)
        elif in_disease == "high":
            direction, value = 1, high + coin * 3 * (high - low)
        else:
            direction, value = -1, low * (1 - 0.6 * coin)
        text = f"{value:.{decimals}f} {unit}".rstrip()
        return pick_common(self.rng, names.split(", ")), text, direction

    # --- treatments

    def _slot_drug(self) -> list[Span]:
        return [(self.rng.choice(self.patient.medications).drug.name, TREATMENT)]

    def _slot_dosed(self) -> list[Span]:
        return self._dosed(self.rng.choice(self.patient.medications))

    def _dosed(self, medication: Medication) -> list[Span]:
        """A drug with dose, route and frequency; only the drug's name is labelled."""
        drug, rng = medication.drug, self.rng
        form = pick(rng, WORDS.get(f"forms {drug.route}", ("",)))
        form = f"{form} " if form and rng.random() < 0.3 else ""
        as_needed = medication.frequency.endswith("as needed")
        reason = f" {rng.choice(WORDS['reasons as needed'])}" if as_needed else ""
        tail = f" {medication.strength} {form}{drug.route} {medication.frequency}{reason}"
        return [(drug.name, TREATMENT), (tail, "")]

    def _slot_medlist(self) -> list[Span]:
        """A numbered list of the patient's medications."""
        medications = self.patient.medications
        chosen = self.rng.sample(medications, min(len(medications), self.rng.randint(3, 6)))
        spans: list[Span] = []
        for number, medication in enumerate(chosen, 1):
            spans += [(f"{number}. ", ""), *self._dosed(medication), ("\n", "")]
        return spans[:-1]

    def _slot_procedure(self) -> list[Span]:
        return [
            (phrase(pick_common(self.rng, self._condition()["procedures"]), self.rng), TREATMENT)
        ]

    def _slot_treatment(self) -> list[Span]:
        return self._slot_drug() if self.rng.random() < 0.5 else self._slot_procedure()

    def _slot_allergy(self) -> list[Span]:
        if self.patient.allergy is None:
            return [(pick(self.rng, ("no known drug allergies", "nkda")), "")]
        drug, reaction = self.patient.allergy
        joint = pick(self.rng, (" causes ", " - ", ", reaction: "))
        return [(drug, TREATMENT), (joint, ""), (reaction, PROBLEM)]

    def _condition(self) -> Condition:
        # Most of a note is about the reason for admission.
        if self.rng.random() < 0.55:
            return self.patient.conditions[0]
        return self.rng.choice(self.patient.conditions)


def _listed(items: list[list[Span]], last: str = "and") -> list[Span]:
    """Return the items with commas between them, and `last` before the last item."""
    spans = items[0]
    for number, item in enumerate(items[1:], 2):
        spans = [*spans, (f" {last} " if last and number == len(items) else ", ", ""), *item]
    return spans


class Style:
    """One clinician's habits of typing: abbreviations, capitals, full stops."""

    def __init__(self, rng: Random) -> None:
        self._abbreviates = rng.random() < 0.35
        self._capitals = rng.random() < 0.8
        self._full_stops = rng.random() < 0.9

    def typed(self, spans: list[Span], rng: Random) -> list[Span]:
        """Return a typed sentence; entities keep their extent, but may be misspelt."""
        out: list[Span] = []
        for text, label in spans:
            if not label and self._abbreviates:
                text = _ABBREVIATE.sub(lambda m: ABBREVIATIONS[m[1]], text)
            if rng.random() < _SLIPS_PER_CHARACTER * len(text):
                text = _misspelt(text, rng)
            if text:
                out.append((text, label))
        if self._capitals and out:
            text, label = out[0]
            out[0] = (text[0].upper() + text[1:], label)
        if self._full_stops and out and out[-1][0][-1] not in ".:":
            out.append((".", ""))
        return out


def _misspelt(text: str, rng: Random) -> str:
    """Misspell one of the long words: two letters swapped, one dropped, or one doubled."""
    words = list(_LONG_WORD.finditer(text))
    if not words:
        return text
    word = rng.choice(words)
    i = word.start() + 1 + rng.randrange(len(word[0]) - 2)
    swapped, doubled = text[i + 1] + text[i] + text[i + 2 :], text[i] * 2 + text[i + 1 :]
    return text[:i] + (swapped, doubled, text[i + 1 :])[rng.randrange(3)]
