"""Who, where and when: the slots of a note that hold no entity."""

from __future__ import annotations

from random import Random

from dp_core.corpus.synthetic.grammar import Piece, pick
from dp_core.corpus.synthetic.lexicon import WORDS
from dp_core.corpus.synthetic.patient import Patient, surname


class Scene:
    """One patient on one day.

    Args:
        patient: whose state fills the slots.
        rng: the note's own coins.
    """

    def __init__(self, patient: Patient, rng: Random) -> None:
        self.patient, self.rng = patient, rng
        self._month, self._day = rng.randint(1, 12), rng.randint(1, 28)
        self._year = rng.randint(2101, 2190)

    def fill(self, name: str) -> list[Piece]:
        """Return the pieces for a slot: the method `_slot_name` makes them."""
        made = getattr(self, f"_slot_{name}")()
        return [(made, "")] if isinstance(made, str) else made

    def _slot_pt(self) -> str:
        p = self.patient
        title = "Ms." if p.female else "Mr."
        return pick(self.rng, ("the patient", "patient", self._slot_he(), f"{title} {p.surname}"))

    def _slot_fullname(self) -> str:
        return f"{self.patient.first_name} {self.patient.surname}"

    def _slot_he(self) -> str:
        return "she" if self.patient.female else "he"

    def _slot_his(self) -> str:
        return "her" if self.patient.female else "his"

    def _slot_sex(self) -> str:
        return pick(self.rng, ("female", "woman") if self.patient.female else ("male", "man"))

    def _slot_age(self) -> str:
        return str(self.patient.age)

    def _slot_doctor(self) -> str:
        return f"Dr. {self.patient.physician if self.rng.random() < 0.6 else surname(self.rng)}"

    def _slot_relative(self) -> str:
        return self.patient.relative

    def _slot_work(self) -> str:
        return self.patient.occupation

    def _slot_facility(self) -> str:
        return (
            self.patient.facility
            if self.rng.random() < 0.7
            else pick(self.rng, WORDS["facilities"])
        )

    def _slot_ward(self) -> str:
        return pick(self.rng, WORDS["wards"])

    def _slot_specialty(self) -> str:
        return pick(self.rng, WORDS["specialties"])

    def _slot_date(self) -> str:
        form = self.rng.random()
        if form < 0.5:
            return f"{self._month}/{self.rng.randint(1, 28)}"
        if form < 0.8:
            return f"{self._month:02d}/{self._day:02d}/{self._year}"
        return f"{self._year}-{self._month}-{self._day}"

    def _slot_time(self) -> str:
        return f"{self.rng.randint(0, 23):02d}{self.rng.choice(('00', '15', '30', '45'))}"

    def _slot_span(self) -> str:
        unit = pick(self.rng, ("day", "day", "week", "month", "hour", "year"))
        number = self.rng.choice((1, 2, 2, 3, 3, 4, 5, 7, 10))
        return f"{number} {unit}{'s' if number > 1 else ''}"

    def _slot_small(self) -> str:
        return str(self.rng.randint(2, 9))

    def _slot_size(self) -> str:
        return f"{self.rng.randint(1, 4)}.{self.rng.randint(1, 9)} cm"

    def _slot_phone(self) -> str:
        return f"{self.rng.randint(200, 999)}-{self.rng.randint(1000, 9999)}"
