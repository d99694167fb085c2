"""Releases: reserved once, with one seed, bound to what the noise is drawn for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.events import PoissonGaussian
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.seeds import SeedStore
from dp_core.privacy.units import PrivacyUnit
from tasks.charging import Charge, charge, manifest, record_operator_use
from tasks.deployment import Deployment
from tasks.workbench import Workbench

UNIT = PrivacyUnit.PATIENT


def _bench(deployment: Deployment, spec_hash: str = "a" * 64, made_up: bool = False) -> Workbench:
    bench = SimpleNamespace(
        deployment=deployment,
        spec_hash=spec_hash,
        made_up=made_up,
        context=SimpleNamespace(run_key="run"),
        seeds=SeedStore(deployment.seeds),
    )
    return cast(Workbench, bench)


def _charge(bench: Workbench, content: bytes = b"m", **more: Any) -> Charge:
    event = PoissonGaussian.single(0.01, 2.0, 100, unit=UNIT)
    fields = {"dataset": "notes", "unit": UNIT, "event": event, "delta": 1e-6}
    return charge(bench, content=content, **(fields | more))


@pytest.fixture
def registered(deployment: Deployment) -> Deployment:
    Ledger.open(deployment.ledger).register_dataset("notes", UNIT, 2.0, 1e-5)
    return deployment


def _draw(charged: Charge) -> bytes:
    return charged.seed.derive("noise")


def test_a_retry_has_the_same_entry_and_the_same_noise(registered: Deployment) -> None:
    first, again = _charge(_bench(registered)), _charge(_bench(registered))
    assert first.entry.id == again.entry.id
    assert _draw(first) == _draw(again)
    first.settle()
    again.settle()
    assert _charge(_bench(registered)).entry.id == first.entry.id
    assert len(Ledger.open(registered.ledger).history("notes")) == 1


def test_other_inputs_are_a_new_release_with_a_new_seed(registered: Deployment) -> None:
    first, other = _charge(_bench(registered), b"one"), _charge(_bench(registered), b"two")
    assert first.entry.id != other.entry.id
    assert _draw(first) != _draw(other)
    assert len(Ledger.open(registered.ledger).history("notes")) == 2
    assert _charge(_bench(registered), b"one").entry.id == first.entry.id


def test_two_grid_points_share_no_seed(registered: Deployment) -> None:
    one, two = _charge(_bench(registered, "1" * 64)), _charge(_bench(registered, "2" * 64))
    assert _draw(one) != _draw(two)


def test_a_lost_seed_is_a_new_charge(registered: Deployment) -> None:
    first = _charge(_bench(registered))
    for file in registered.seeds.iterdir():
        file.unlink()
    again = _charge(_bench(registered))
    assert again.entry.id != first.entry.id
    assert _draw(again) != _draw(first)


def test_the_budget_is_asked_before_there_is_a_seed(registered: Deployment) -> None:
    event = PoissonGaussian.single(0.5, 0.5, 1000, unit=UNIT)
    with pytest.raises(BudgetExceeded):
        _charge(_bench(registered), event=event)
    assert not registered.seeds.exists()
    assert Ledger.open(registered.ledger).history("notes") == []


def test_a_private_data_set_needs_a_budget_of_its_own(deployment: Deployment) -> None:
    with pytest.raises(BadInput, match="confide ledger register"):
        _charge(_bench(deployment))
    _charge(_bench(deployment, made_up=True))
    with pytest.raises(BadInput, match="made up"):  # the same name, now called private
        _charge(_bench(deployment))


def test_training_without_privacy_is_listed_for_the_operator(registered: Deployment) -> None:
    record_operator_use(_bench(registered), dataset="notes", unit=UNIT)
    standing = Ledger.open(registered.ledger).remaining("notes")
    assert (standing.operator_releases, standing.charged_entries) == (1, 0)


def test_a_settled_release_says_what_it_cost(registered: Deployment) -> None:
    record = _charge(_bench(registered)).settle()
    assert record.dataset == "notes"
    assert 0 < record.epsilon < record.epsilon_rdp < 2  # type: ignore[operator]
    assert PoissonGaussian.from_json(record.event).unit is UNIT


def test_the_code_is_part_of_what_noise_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    before = manifest(kind="x")
    assert json.loads(before)["code"]
    monkeypatch.setattr("tasks.charging.code_digest", lambda: "other")
    assert manifest(kind="x") != before
    assert manifest(kind="x", a=1) != manifest(kind="x", a=2)
