"""Releases: reserved once, with one seed, bound to what the noise is drawn for."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import numpy as np
import pytest
from release_examples import NOTES, UNIT, bench_of, charged
from sqlalchemy import create_engine, text

from dp_core.errors import BadInput, BudgetExceeded, PlanError
from dp_core.privacy.ledger import Ledger, State
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.seed_store import SeedStore
from tasks.protocol.least_privilege import WITHHELD
from tasks.protocol.settings import MADE_UP
from tasks.releases.charge import Charge, record_operator_use
from tasks.releases.deployment_ledger import refuse_unregistered
from tasks.releases.manifest import counts_released, manifest, weights_released
from tasks.releases.provenance import operator_only
from tasks.runtime.deployment import Deployment


def _draw(release: Charge) -> bytes:
    return release.seed.derive("noise")


def test_a_retry_has_the_same_entry_and_the_same_noise(registered: Deployment) -> None:
    first, again = charged(bench_of(registered)), charged(bench_of(registered))
    assert first.entry.id == again.entry.id
    assert _draw(first) == _draw(again)
    first.settle(b"released")
    again.settle(b"released")
    assert charged(bench_of(registered)).entry.id == first.entry.id
    assert len(Ledger.open(registered.ledger).history("notes")) == 1


def test_other_inputs_are_a_new_release_with_a_new_seed(registered: Deployment) -> None:
    first, other = charged(bench_of(registered), b"one"), charged(bench_of(registered), b"two")
    assert first.entry.id != other.entry.id
    assert _draw(first) != _draw(other)
    assert len(Ledger.open(registered.ledger).history("notes")) == 2
    assert charged(bench_of(registered), b"one").entry.id == first.entry.id


def test_two_grid_points_share_no_seed(registered: Deployment) -> None:
    one, two = charged(bench_of(registered, "1" * 64)), charged(bench_of(registered, "2" * 64))
    assert _draw(one) != _draw(two)


def test_a_lost_seed_is_a_new_charge(registered: Deployment) -> None:
    first = charged(bench_of(registered))
    for file in registered.seeds.iterdir():
        file.unlink()
    again = charged(bench_of(registered))
    assert again.entry.id != first.entry.id
    assert _draw(again) != _draw(first)


def test_the_budget_is_asked_before_there_is_a_seed(registered: Deployment) -> None:
    event = PoissonGaussian.single(0.5, 0.5, 1000, unit=UNIT)
    with pytest.raises(BudgetExceeded):
        charged(bench_of(registered), event=event)
    assert not registered.seeds.exists()
    assert Ledger.open(registered.ledger).history("notes") == []


def test_a_private_data_set_needs_a_budget_of_its_own(deployment: Deployment) -> None:
    with pytest.raises(BadInput, match="confide ledger register"):
        charged(bench_of(deployment))
    with pytest.raises(BadInput, match="confide ledger register notes --public"):
        charged(bench_of(deployment, made_up=True))  # a run registers nothing
    assert Ledger.open(deployment.ledger).datasets() == {}
    Ledger.open(deployment.ledger).register_made_up("notes")
    charged(bench_of(deployment, made_up=True))
    with pytest.raises(BadInput, match="made up"):  # the same name, now called private
        charged(bench_of(deployment))


def test_a_private_data_set_cannot_be_called_made_up(registered: Deployment) -> None:
    with pytest.raises(BadInput, match="registered as private, but this run calls it public"):
        charged(bench_of(registered, made_up=True))
    assert Ledger.open(registered.ledger).history("notes") == []
    assert not registered.seeds.exists()


def test_training_without_privacy_is_listed_for_the_operator(registered: Deployment) -> None:
    context = bench_of(registered)
    record = record_operator_use(context, NOTES)
    assert context.releases == [record] and record.epsilon == math.inf
    assert operator_only(context.releases)
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
        charged(bench_of(registered), **other)
    assert ledger.history("notes") == ledger.history("letters") == []


def test_nothing_that_descends_from_the_operators_is_released(registered: Deployment) -> None:
    context = bench_of(registered)
    record_operator_use(context, NOTES)
    before = Ledger.open(registered.ledger).history("notes")
    with pytest.raises(BadInput, match="without privacy"):
        charged(context)
    assert Ledger.open(registered.ledger).history("notes") == before


def test_delta_of_what_the_inputs_cost_counts(registered: Deployment) -> None:
    record = charged(bench_of(registered, "b" * 64)).settle(b"released")
    before = Ledger.open(registered.ledger).history("notes")
    context = bench_of(registered)
    context.releases.append(record.model_copy(update={"delta": 1 / 100 - 5e-7}))
    with pytest.raises(PlanError, match="in total"):
        charged(context)  # 1e-6 more, of 100 units
    assert Ledger.open(registered.ledger).history("notes") == before


def test_a_release_travels_with_what_is_made_of_it(registered: Deployment) -> None:
    context = bench_of(registered)
    record = charged(context).settle(b"released")
    assert context.releases == [record] and not operator_only(context.releases)


def test_a_settled_release_says_what_it_cost(registered: Deployment) -> None:
    record = charged(bench_of(registered)).settle(b"released")
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
    ledger = refuse_unregistered(bench_of(deployment, made_up=True), MADE_UP)
    assert ledger.datasets() == {}
    with pytest.raises(BadInput, match="no privacy budget yet"):
        refuse_unregistered(bench_of(deployment), "ward")


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


# --- a settled release whose output was lost: the same may be handed out again, nothing else


WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.float32)}
ROUNDED = WEIGHTS | {"b": np.nextafter(WEIGHTS["b"], np.float32(1))}


def forget_what_came_out(deployment: Deployment) -> None:
    """Make the entry one that an older version settled."""
    with create_engine(deployment.ledger).begin() as db:
        db.execute(text("UPDATE entries SET released_hash = ''"))


def test_the_same_weights_again_are_the_same_release(registered: Deployment) -> None:
    first = charged(bench_of(registered))
    first.settle(weights_released(WEIGHTS))
    again = charged(bench_of(registered))
    assert again.entry.id == first.entry.id
    again.settle(weights_released(dict(reversed(WEIGHTS.items()))))


def test_weights_that_differ_in_one_bit_are_refused(registered: Deployment) -> None:
    charged(bench_of(registered)).settle(weights_released(WEIGHTS))
    with pytest.raises(BadInput, match="was released before") as refused:
        charged(bench_of(registered)).settle(weights_released(ROUNDED))
    assert "a new charge" in str(refused.value)


def test_without_a_record_nothing_is_handed_out_again(registered: Deployment) -> None:
    first = charged(bench_of(registered))
    first.settle(weights_released(WEIGHTS))
    forget_what_came_out(registered)
    with pytest.raises(BadInput, match="the digest of its output is lost"):
        charged(bench_of(registered))  # before anything is trained in vain
    with pytest.raises(BadInput, match="the digest of its output is lost"):
        first.settle(weights_released(WEIGHTS))


def test_the_record_outlives_the_outputs(registered: Deployment) -> None:
    """Outputs are what gets lost: the record of a release may not be one of them."""
    charged(bench_of(registered)).settle(weights_released(WEIGHTS))
    shutil.rmtree(registered.store, ignore_errors=True)
    charged(bench_of(registered)).settle(weights_released(WEIGHTS))
    with pytest.raises(BadInput, match="its output differs"):
        charged(bench_of(registered)).settle(weights_released(ROUNDED))


def test_before_it_is_settled_nothing_was_released(registered: Deployment) -> None:
    """A run that was killed before its release may come out otherwise on another machine."""
    assert charged(bench_of(registered)).entry.state is State.RESERVED
    assert charged(bench_of(registered)).entry.released_hash == ""
    charged(bench_of(registered)).settle(weights_released(ROUNDED))


def test_who_holds_no_seed_cannot_confirm_a_guess(registered: Deployment) -> None:
    """The same content under another seed has another record, and another mark in the ledger."""
    content = weights_released(WEIGHTS)
    records, marks = set(), set()
    for number in "ab":
        entry = charged(bench_of(registered, number * 64))
        entry.settle(content)
        records.add(entry.ledger.entry(entry.entry.id).released_hash)
        marks.add(entry.ledger.entry(entry.entry.id).manifest_hash)
    assert len(records) == len(marks) == 2
    assert content.hex() not in records


def test_a_histogram_is_the_same_in_every_word_and_count(registered: Deployment) -> None:
    counts = {"pain": 41, "arm": 17}
    charged(bench_of(registered)).settle(counts_released(counts))
    charged(bench_of(registered)).settle(counts_released(dict(reversed(counts.items()))))
    for other in (counts | {"arm": 18}, {"pain": 41}, {"pain": 41, "arms": 17}):
        with pytest.raises(BadInput, match="its output differs"):
            charged(bench_of(registered)).settle(counts_released(other))
