"""A settled training whose output was lost: the same weights may be handed out again, no others."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from sqlalchemy import create_engine, text

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger, State
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.seed_store import SeedStore
from tasks.releases.charge import Charge, charge
from tasks.releases.manifest import counts_released, weights_released
from tasks.releases.plans import PlannedRelease
from tasks.releases.provenance import PrivateUnits
from tasks.runtime.context import StepContext
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

UNIT = PrivacyUnit.PATIENT
WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.float32)}
ROUNDED = WEIGHTS | {"b": np.nextafter(WEIGHTS["b"], np.float32(1))}


@pytest.fixture
def bench(deployment: Deployment) -> StepContext:
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    bench = SimpleNamespace(
        deployment=deployment,
        store=Store(deployment.store, deployment.cache),
        spec_hash="a" * 64,
        made_up=False,
        context=SimpleNamespace(run_key="run", task="pretrain"),
        seeds=SeedStore(deployment.seeds),
        releases=[],
        descends_from=lambda *releases: None,
    )
    return cast(StepContext, bench)


def charged(bench: StepContext) -> Charge:
    event = PoissonGaussian.single(0.01, 2.0, 100, unit=UNIT)
    units = PrivateUnits("notes", UNIT, 100, 1, patients=True, origin="token_store")
    return charge(bench, units, PlannedRelease("notes", UNIT, 100, event, 1e-6), content=b"m")


def forget_what_came_out(bench: StepContext) -> None:
    """Make the entry one that an older version settled."""
    with create_engine(bench.deployment.ledger).begin() as db:
        db.execute(text("UPDATE entries SET released_hash = ''"))


def test_the_same_weights_again_are_the_same_release(bench: StepContext) -> None:
    first = charged(bench)
    first.settle(weights_released(WEIGHTS))
    again = charged(bench)
    assert again.entry.id == first.entry.id
    again.settle(weights_released(dict(reversed(WEIGHTS.items()))))


def test_weights_that_differ_in_one_bit_are_refused(bench: StepContext) -> None:
    charged(bench).settle(weights_released(WEIGHTS))
    with pytest.raises(BadInput, match="was released before") as refused:
        charged(bench).settle(weights_released(ROUNDED))
    assert "a new charge" in str(refused.value)


def test_of_two_that_worked_at_once_the_first_to_settle_is_accepted(bench: StepContext) -> None:
    """Two machines, one spec, one seed, and neither had settled when the other began."""
    one, two = charged(bench), charged(bench)
    assert one.entry.id == two.entry.id
    one.settle(weights_released(WEIGHTS))
    with pytest.raises(BadInput, match="came out otherwise"):
        two.settle(weights_released(ROUNDED))
    two.settle(weights_released(WEIGHTS))
    assert len(one.ledger.history("notes")) == 1


def test_without_a_record_nothing_is_handed_out_again(bench: StepContext) -> None:
    first = charged(bench)
    first.settle(weights_released(WEIGHTS))
    forget_what_came_out(bench)
    with pytest.raises(BadInput, match="nothing tells any more what came out"):
        charged(bench)  # before anything is trained in vain
    with pytest.raises(BadInput, match="nothing tells any more what came out"):
        first.settle(weights_released(WEIGHTS))


def test_the_record_outlives_the_outputs(bench: StepContext) -> None:
    """Outputs are what gets lost: the record of a release may not be one of them."""
    charged(bench).settle(weights_released(WEIGHTS))
    shutil.rmtree(bench.deployment.store, ignore_errors=True)
    charged(bench).settle(weights_released(WEIGHTS))
    with pytest.raises(BadInput, match="came out otherwise"):
        charged(bench).settle(weights_released(ROUNDED))


def test_before_it_is_settled_nothing_was_released(bench: StepContext) -> None:
    """A run that was killed before its release may come out otherwise on another machine."""
    assert charged(bench).entry.state is State.RESERVED
    assert charged(bench).entry.released_hash == ""
    charged(bench).settle(weights_released(ROUNDED))


def test_the_record_gives_nothing_away(bench: StepContext) -> None:
    first = charged(bench)
    content = weights_released(WEIGHTS)
    first.settle(content)
    record = first.ledger.entry(first.entry.id).released_hash
    assert record == first.seed.derive("released", content).hex()  # nobody can confirm a guess
    assert content.hex() not in record


def test_who_holds_no_seed_cannot_confirm_a_guess(bench: StepContext) -> None:
    """The same content under another seed has another record, and another mark in the ledger."""
    content = weights_released(WEIGHTS)
    records, marks = set(), set()
    for number in "ab":
        bench.spec_hash = number * 64
        entry = charged(bench)
        entry.settle(content)
        records.add(entry.ledger.entry(entry.entry.id).released_hash)
        marks.add(entry.ledger.entry(entry.entry.id).manifest_hash)
    assert len(records) == len(marks) == 2
    assert content.hex() not in records


def test_a_histogram_is_the_same_in_every_word_and_count(bench: StepContext) -> None:
    counts = {"pain": 41, "arm": 17}
    charged(bench).settle(counts_released(counts))
    charged(bench).settle(counts_released(dict(reversed(counts.items()))))
    for other in (counts | {"arm": 18}, {"pain": 41}, {"pain": 41, "arms": 17}):
        with pytest.raises(BadInput, match="came out otherwise"):
            charged(bench).settle(counts_released(other))
