"""Releases: reserved once, with one seed, bound to what the noise is drawn for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dp_core.errors import BadInput, BudgetExceeded, PlanError
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.seed_store import SeedStore
from tasks.protocol import ReleaseRecord
from tasks.protocol.data_settings import MADE_UP
from tasks.protocol.least_privilege import WITHHELD
from tasks.releases.charge import Charge, charge, record_operator_use
from tasks.releases.ledger import refuse_unregistered
from tasks.releases.manifest import manifest
from tasks.releases.plans import PlannedRelease
from tasks.releases.provenance import PrivateUnits, operator_only
from tasks.runtime.context import StepContext
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

UNIT = PrivacyUnit.PATIENT
NOTES = PrivateUnits("notes", UNIT, 100, 1, patients=True, origin="token_store")


def _bench(deployment: Deployment, spec_hash: str = "a" * 64, made_up: bool = False) -> StepContext:
    releases: list[ReleaseRecord] = []
    bench = SimpleNamespace(
        deployment=deployment,
        store=Store(deployment.store, deployment.cache),
        spec_hash=spec_hash,
        made_up=made_up,
        context=SimpleNamespace(run_key="run", task="pretrain"),
        seeds=SeedStore(deployment.seeds),
        releases=releases,
        descends_from=releases.append,
    )
    return cast(StepContext, bench)


def _charge(bench: StepContext, content: bytes = b"m", **more: Any) -> Charge:
    event = PoissonGaussian.single(0.01, 2.0, 100, unit=UNIT)
    planned = PlannedRelease("notes", UNIT, 100, event, 1e-6)
    return charge(bench, NOTES, replace(planned, **more), content=content)


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
    first.settle(b"released")
    again.settle(b"released")
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
    with pytest.raises(BadInput, match="confide ledger register notes --public"):
        _charge(_bench(deployment, made_up=True))  # a run registers nothing
    assert Ledger.open(deployment.ledger).datasets() == {}
    Ledger.open(deployment.ledger).register_made_up("notes")
    _charge(_bench(deployment, made_up=True))
    with pytest.raises(BadInput, match="made up"):  # the same name, now called private
        _charge(_bench(deployment))


def test_a_private_data_set_cannot_be_called_made_up(registered: Deployment) -> None:
    with pytest.raises(BadInput, match="registered as private, but this run calls it public"):
        _charge(_bench(registered, made_up=True))
    assert Ledger.open(registered.ledger).history("notes") == []
    assert not registered.seeds.exists()


def test_training_without_privacy_is_listed_for_the_operator(registered: Deployment) -> None:
    bench = _bench(registered)
    record = record_operator_use(bench, NOTES)
    assert bench.releases == [record] and record.epsilon == math.inf
    assert operator_only(bench.releases)
    standing = Ledger.open(registered.ledger).remaining("notes")
    assert (standing.operator_releases, standing.charged_entries) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [{"dataset": "letters"}, {"unit": PrivacyUnit.DOCUMENT}, {"declared_units": 50}],
)
def test_only_what_is_read_is_charged(registered: Deployment, other: dict[str, Any]) -> None:
    ledger = Ledger.open(registered.ledger)
    ledger.register_dataset("letters", UNIT, 2.0, 1e-5)
    with pytest.raises(BadInput, match=next(iter(other))):
        _charge(_bench(registered), **other)
    assert ledger.history("notes") == ledger.history("letters") == []


def test_nothing_that_descends_from_the_operators_is_released(registered: Deployment) -> None:
    bench = _bench(registered)
    record_operator_use(bench, NOTES)
    before = Ledger.open(registered.ledger).history("notes")
    with pytest.raises(BadInput, match="without privacy"):
        _charge(bench)
    assert Ledger.open(registered.ledger).history("notes") == before


def test_delta_of_what_the_inputs_cost_counts(registered: Deployment) -> None:
    record = _charge(_bench(registered, "b" * 64)).settle(b"released")
    before = Ledger.open(registered.ledger).history("notes")
    bench = _bench(registered)
    bench.releases.append(record.model_copy(update={"delta": 1 / 100 - 5e-7}))
    with pytest.raises(PlanError, match="in total"):
        _charge(bench)  # 1e-6 more, of 100 units
    assert Ledger.open(registered.ledger).history("notes") == before


def test_a_release_travels_with_what_is_made_of_it(registered: Deployment) -> None:
    bench = _bench(registered)
    record = _charge(bench).settle(b"released")
    assert bench.releases == [record] and not operator_only(bench.releases)


def test_a_settled_release_says_what_it_cost(registered: Deployment) -> None:
    record = _charge(_bench(registered)).settle(b"released")
    assert record.dataset == "notes"
    assert 0 < record.epsilon < record.epsilon_rdp < 2  # type: ignore[operator]
    assert PoissonGaussian.from_json(record.event).unit is UNIT


def test_the_code_is_part_of_what_noise_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    before = manifest(kind="vocabulary")
    assert json.loads(before)["code"]
    monkeypatch.setattr("tasks.releases.manifest.code_digest", lambda kind: "other")
    assert manifest(kind="vocabulary") != before
    assert manifest(kind="vocabulary", a=1) != manifest(kind="vocabulary", a=2)


def test_who_only_reads_the_ledger_writes_nothing_into_it(deployment: Deployment) -> None:
    """Not even the data sets that are made up: a step that reads files has no right to."""
    ledger = refuse_unregistered(_bench(deployment, made_up=True), MADE_UP)
    assert ledger.datasets() == {}
    with pytest.raises(BadInput, match="no privacy budget yet"):
        refuse_unregistered(_bench(deployment), "ward")


def test_a_step_from_which_the_seeds_are_withheld_has_none(deployment: Deployment) -> None:
    assert deployment.holds_seeds
    told = {"CONFIDE_HOME": str(deployment.home), "CONFIDE_SEEDS": WITHHELD}
    without = Deployment.from_environment(told)
    assert not without.holds_seeds
    with pytest.raises(NotADirectoryError):
        SeedStore(without.seeds).create("a")
    told = {"CONFIDE_HOME": str(deployment.home), "CONFIDE_LEDGER": f"sqlite:///{WITHHELD}"}
    with pytest.raises(BadInput, match="/dev/null"):  # and no new ledger, which knows nothing
        Ledger.open(Deployment.from_environment(told).ledger)
