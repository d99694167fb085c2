"""Makes a ledger that holds entries of every kind, with what they cost by the code of that day.

    python tests/dp_core/privacy/ledger/golden/make_every_kind.py

writes `every_kind_vN.sql` and `every_kind_vN.json`, N being the schema's version. Run it once for
each version, when the version is new, and never again: what it wrote is what later code must read.
"""

from __future__ import annotations

import json
import math
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from dp_core.privacy.ledger import Entry, Ledger, Reservation
from dp_core.privacy.ledger.migrations import CURRENT
from dp_core.privacy.ledger.models import canonical
from dp_core.privacy.ledger.privacy_filter import charge
from dp_core.privacy.mechanisms import (
    Composed,
    ConvertedRelation,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
    RandomCountSelection,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    Unaccounted,
)
from dp_core.privacy.seed_store import PrivacySeed

HERE = Path(__file__).parent
PATIENT, DOCUMENT, EXAMPLE = PrivacyUnit.PATIENT, PrivacyUnit.DOCUMENT, PrivacyUnit.EXAMPLE
TRAINING = PoissonGaussian(((0.01, 1.5, 200), (0.02, 2.0, 100)))
HISTOGRAM = ThresholdedHistogram(words_per_unit=64, sigma=80.0, threshold=600)
TRUNCATED = TruncatedPoissonGaussian(declared_units=1000, cap=30, phases=((0.01, 4.0, 20),))
CHOSEN = {"candidates": (Gaussian(8.0), Gaussian(12.0)), "delta": 1e-7}
GEOMETRIC = RandomCountSelection(count="truncated-negative-binomial", eta=1.0, gamma=0.5, **CHOSEN)
POISSON = RandomCountSelection(count="poisson", mean=3.0, **CHOSEN)
PLANNED, RESERVED, SETTLED = "planned", "reserved", "settled"


class Maker:
    """Brings entries into the state that is wanted, as a step does."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.made = ledger, 0

    def entry(self, dataset: str, event: MechanismEvent, state: str, **more: Any) -> Reservation:
        self.made += 1
        unit = self.ledger.datasets()[dataset].unit or PATIENT
        accounted = not isinstance(event, Unaccounted)
        defaults = {"delta": 1e-7 if accounted else 0.0, "spec_hash": f"spec-{self.made}"}
        wanted = Reservation(dataset, unit, event, **(defaults | more))
        if state != PLANNED:
            self.bring(wanted, state)
        return wanted

    def bring(self, wanted: Reservation, state: str, known: bool = False) -> None:
        entry = self.ledger.reserve(wanted)
        if not entry.accounted:
            if state == SETTLED:
                self.ledger.settle(entry.id)
            return
        if state == SETTLED or wanted.spec_hash == "twice":
            seed = PrivacySeed.fixed(self.made) if known else PrivacySeed.draw()
            self.ledger.bind(entry.id, seed, wanted.spec_hash.encode())
        if state == SETTLED:
            self.ledger.settle(entry.id, seed.derive("released", b"what came out"))


def make(url: str) -> Ledger:
    """Fill an empty database."""
    ledger = Ledger.open(url)
    ledger.register_dataset("notes", PATIENT, 8.0, 1e-5)
    ledger.register_dataset("letters", PATIENT, 8.0, 1e-5, shares_budget_with="notes")
    ledger.register_dataset("ward", DOCUMENT, 6.0, 1e-5, order=math.inf)
    zero, replace = NeighboringRelation.ZERO_OUT, NeighboringRelation.REPLACE
    ledger.register_dataset("epochs", EXAMPLE, 12.0, 1e-5, relation=zero)
    ledger.register_dataset("slots", PATIENT, 20.0, 1e-4, relation=replace, order=2.0)
    ledger.register_made_up("synthetic-notes")
    maker = Maker(ledger)

    # A finite order. A run of four steps: done, done, killed on the way, not begun.
    run = {"plan_key": "dp_bert/run-1 · notes", "run": "dp_bert/run-1"}
    steps = [HISTOGRAM, TRAINING, Gaussian(9.0, count=2), Gaussian(10.0)]
    plan = [maker.entry("notes", event, PLANNED, **run) for event in steps]
    ledger.register_plan(plan)
    for wanted, state in zip(plan, (SETTLED, SETTLED, RESERVED), strict=False):
        maker.bring(wanted, state)
    gone = {"plan_key": "dp_sweep/run-2 · notes", "run": "dp_sweep/run-2"}
    ledger.register_plan([maker.entry("notes", POISSON, PLANNED, **gone)])
    ledger.withdraw_plan("notes", gone["plan_key"])
    again = maker.entry("notes", POISSON, PLANNED, plan_key="dp_sweep/run-3", run="dp_sweep/run-3")
    ledger.register_plan([again])  # withdrawn and asked for again
    ledger.withdraw_plan("notes", "dp_sweep/run-3")
    maker.bring(again, SETTLED)
    maker.entry("notes", GEOMETRIC, SETTLED)
    maker.entry("notes", TRUNCATED, RESERVED)
    parts = Composed((Gaussian(20.0, unit=PATIENT), HISTOGRAM.stating(PATIENT)), unit=PATIENT)
    maker.entry("notes", parts, SETTLED)
    for attempt in range(2):  # the first one's seed was lost
        maker.entry("notes", Gaussian(30.0), RESERVED, spec_hash="twice", attempt=attempt)
    maker.entry("notes", Unaccounted("non-private training"), SETTLED)
    maker.entry("notes", Unaccounted("fine-tuning without privacy"), RESERVED)
    maker.entry("letters", Gaussian(15.0), SETTLED)

    # Order infinity: a plan counts as one, single releases add up.
    plan = [
        maker.entry("ward", event, PLANNED, plan_key="whole", run="whole")
        for event in (HISTOGRAM, TRAINING, Gaussian(8.0))
    ]
    ledger.register_plan(plan)
    maker.bring(plan[0], SETTLED)
    maker.bring(plan[1], RESERVED)
    maker.entry("ward", Gaussian(12.0), SETTLED)
    maker.entry("ward", GEOMETRIC, SETTLED)
    ledger.register_plan([maker.entry("ward", TRAINING, PLANNED, plan_key="given back")])
    ledger.withdraw_plan("ward", "given back")

    # Other neighbours.
    maker.entry("epochs", ShuffledGaussian(6.0, participations=3), SETTLED)
    maker.entry("epochs", ConvertedRelation(HISTOGRAM, zero), SETTLED)
    maker.entry("epochs", ConvertedRelation(TRAINING, zero), RESERVED)
    maker.entry("slots", FixedSizeGaussian(slots=1000, phases=((10.0, 4.0, 50),)), SETTLED)
    maker.entry("slots", ConvertedRelation(HISTOGRAM, replace, delta=1e-8), SETTLED)
    maker.entry("slots", ConvertedRelation(GEOMETRIC, replace, delta=1e-8), RESERVED)

    # Made-up notes: a seed that anyone knows, and nothing is limited.
    known = maker.entry("synthetic-notes", TRAINING, PLANNED)
    maker.bring(known, SETTLED, known=True)
    maker.entry("synthetic-notes", ShuffledGaussian(1.0, participations=1), SETTLED)
    maker.entry("synthetic-notes", Unaccounted("non-private training"), SETTLED)
    return ledger


def told(ledger: Ledger) -> dict[str, Any]:
    """Return what the ledger says of each data set: how its budget stands, and each entry."""
    return {
        name: {
            "stands": ledger.remaining(name).to_json(),
            "entries": [_entry(entry, budget.order) for entry in ledger.history(name)],
        }
        for name, budget in ledger.datasets().items()
    }


def _entry(entry: Entry, order: float) -> dict[str, Any]:
    cost = charge(((canonical(entry.event), entry.delta),), order) if entry.accounted else None
    alone = None if cost is None else {"rho": cost.rho, "delta": cost.delta}
    return {**entry.to_json(), "charge_alone": alone}


def main() -> None:
    """Write both files."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ledger.db"
        found = told(make(f"sqlite:///{file}"))
        with sqlite3.connect(file) as db:
            # The dump writes infinity as a name that SQLite cannot read.
            lines = [line.replace(",Inf,", ",9e999,") for line in db.iterdump()]
        (HERE / f"every_kind_v{CURRENT}.sql").write_text("\n".join(lines) + "\n")
    text = json.dumps(found, indent=1, sort_keys=True)
    (HERE / f"every_kind_v{CURRENT}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
