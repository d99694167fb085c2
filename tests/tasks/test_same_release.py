"""A settled training whose output was lost: the same weights may be handed out again, no others."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from dp_core.errors import BadInput
from dp_core.privacy.events import PoissonGaussian
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.seeds import SeedStore
from dp_core.privacy.units import PrivacyUnit
from tasks.charging import Charge, charge
from tasks.deployment import Deployment
from tasks.same_release import (
    confirm_same_release,
    counts_released,
    refuse_unrecorded,
    weights_released,
)
from tasks.storage import Store
from tasks.workbench import Workbench

UNIT = PrivacyUnit.PATIENT
WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.float32)}
ROUNDED = WEIGHTS | {"b": np.nextafter(WEIGHTS["b"], np.float32(1))}


@pytest.fixture
def bench(deployment: Deployment) -> Workbench:
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    bench = SimpleNamespace(
        deployment=deployment,
        store=Store(deployment.store, deployment.cache),
        spec_hash="a" * 64,
        made_up=False,
        context=SimpleNamespace(run_key="run"),
        seeds=SeedStore(deployment.seeds),
    )
    return cast(Workbench, bench)


def charged(bench: Workbench) -> Charge:
    event = PoissonGaussian.single(0.01, 2.0, 100, unit=UNIT)
    return charge(bench, dataset="notes", unit=UNIT, event=event, delta=1e-6, content=b"m")


def test_the_same_weights_again_are_the_same_release(bench: Workbench) -> None:
    first = charged(bench)
    confirm_same_release(bench, first, weights_released(WEIGHTS))
    first.settle()
    again = charged(bench)
    assert again.entry.id == first.entry.id
    confirm_same_release(bench, again, weights_released(dict(reversed(WEIGHTS.items()))))


def test_weights_that_differ_in_one_bit_are_refused(bench: Workbench) -> None:
    first = charged(bench)
    confirm_same_release(bench, first, weights_released(WEIGHTS))
    first.settle()
    with pytest.raises(BadInput, match="was released before") as refused:
        confirm_same_release(bench, charged(bench), weights_released(ROUNDED))
    assert "a new charge" in str(refused.value)


def test_without_a_record_nothing_is_handed_out_again(bench: Workbench) -> None:
    first = charged(bench)
    first.settle()
    with pytest.raises(BadInput, match="nothing tells any more what came out"):
        confirm_same_release(bench, charged(bench), weights_released(WEIGHTS))


def test_the_record_outlives_the_outputs(bench: Workbench) -> None:
    """Outputs are what gets lost: the record of a release may not be one of them."""
    first = charged(bench)
    confirm_same_release(bench, first, weights_released(WEIGHTS))
    first.settle()
    shutil.rmtree(bench.deployment.store, ignore_errors=True)
    confirm_same_release(bench, charged(bench), weights_released(WEIGHTS))
    with pytest.raises(BadInput, match="came out otherwise"):
        confirm_same_release(bench, charged(bench), weights_released(ROUNDED))


def test_before_it_is_settled_nothing_was_released(bench: Workbench) -> None:
    """A run that was killed before its release may come out otherwise on another machine."""
    confirm_same_release(bench, charged(bench), weights_released(WEIGHTS))
    confirm_same_release(bench, charged(bench), weights_released(ROUNDED))
    charged(bench).settle()
    confirm_same_release(bench, charged(bench), weights_released(ROUNDED))


def test_the_record_gives_nothing_away(bench: Workbench) -> None:
    first = charged(bench)
    confirm_same_release(bench, first, weights_released(WEIGHTS))
    record = bench.seeds.digest_left(first.entry.seed_key)
    assert record is not None
    assert len(record) == 32  # a digest under the seed, which nobody can confirm a guess by


def test_a_histogram_is_the_same_in_every_word_and_count(bench: Workbench) -> None:
    counts = {"pain": 41, "arm": 17}
    first = charged(bench)
    confirm_same_release(bench, first, counts_released(counts))
    first.settle()
    confirm_same_release(bench, charged(bench), counts_released(dict(reversed(counts.items()))))
    for other in (counts | {"arm": 18}, {"pain": 41}, {"pain": 41, "arms": 17}):
        with pytest.raises(BadInput, match="came out otherwise"):
            confirm_same_release(bench, charged(bench), counts_released(other))


def test_what_could_not_be_handed_out_is_not_made_again(bench: Workbench) -> None:
    first = charged(bench)
    refuse_unrecorded(bench, first)  # nothing was released yet
    first.settle()
    with pytest.raises(BadInput, match="nothing tells any more what came out"):
        refuse_unrecorded(bench, charged(bench))
