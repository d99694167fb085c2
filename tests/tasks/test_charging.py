import json
import math
import shutil

import numpy as np
import pytest
from release_examples import NOTES, UNIT, bench_of, charged
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from dp_core.errors import BadInput, BudgetExceeded, PlanError
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.seed_store import SeedStore
from dp_core.privacy.statement import operator_only
from tasks.protocol.least_privilege import WITHHELD
from tasks.protocol.settings import MADE_UP
from tasks.releases.charge import Charge, record_operator_use
from tasks.releases.deployment_ledger import refuse_unregistered
from tasks.releases.manifest import counts_released, manifest, weights_released
from tasks.results import STATEMENT_DATA, STATEMENT_WORDS, write_statement
from tasks.runtime.deployment import Deployment


def _draw(release: Charge) -> bytes:
    return release.seed.derive("noise")


def test_retry_reuses_the_entry_and_the_noise(registered):
    first, again = charged(bench_of(registered)), charged(bench_of(registered))
    assert first.entry.id == again.entry.id
    assert _draw(first) == _draw(again)
    first.settle(b"released")
    again.settle(b"released")
    assert charged(bench_of(registered)).entry.id == first.entry.id
    assert len(Ledger.open(registered.ledger).history("notes")) == 1


def test_changed_inputs_are_charged_as_a_new_release_with_a_new_seed(registered):
    first, other = charged(bench_of(registered), b"one"), charged(bench_of(registered), b"two")
    assert first.entry.id != other.entry.id
    assert _draw(first) != _draw(other)
    assert len(Ledger.open(registered.ledger).history("notes")) == 2
    assert charged(bench_of(registered), b"one").entry.id == first.entry.id


def test_lost_seed_is_charged_as_new_release_and_a_shared_file_is_not(registered, capsys):
    first = charged(bench_of(registered))
    file = registered.seeds / f"{first.entry.seed_key}.json"
    file.chmod(0o640)
    with pytest.raises(BadInput, match="chmod 600"):
        charged(bench_of(registered))
    assert len(Ledger.open(registered.ledger).history("notes")) == 1
    file.unlink()
    again = charged(bench_of(registered))
    assert f"the seed {file.stem} of an earlier attempt is lost" in "".join(capsys.readouterr())
    assert again.entry.id != first.entry.id
    assert _draw(again) != _draw(first)


def test_seed_is_created_only_after_the_budget_admits_the_release(registered):
    event = PoissonGaussian.single(0.5, 0.5, 1000, unit=UNIT)
    with pytest.raises(BudgetExceeded):
        charged(bench_of(registered), event=event)
    assert not registered.seeds.exists()
    assert Ledger.open(registered.ledger).history("notes") == []


def test_unregistered_data_set_is_refused(deployment):
    with pytest.raises(BadInput, match="confide ledger register"):
        charged(bench_of(deployment))
    with pytest.raises(BadInput, match="confide ledger register notes --public"):
        charged(bench_of(deployment, made_up=True))  # a run registers no data set
    assert Ledger.open(deployment.ledger).datasets() == {}
    Ledger.open(deployment.ledger).register_made_up("notes")
    charged(bench_of(deployment, made_up=True))
    with pytest.raises(BadInput, match="made up"):  # the same name, now described as private
        charged(bench_of(deployment))


DOCUMENT = PrivacyUnit.DOCUMENT
OF_DOCUMENTS = {"unit": DOCUMENT, "event": PoissonGaussian.single(0.01, 2.0, 100, unit=DOCUMENT)}


@pytest.mark.parametrize("other", [{"dataset": "letters"}, OF_DOCUMENTS, {"declared_units": 50}])
def test_charge_must_match_the_data_that_is_read(registered, other):
    ledger = Ledger.open(registered.ledger)
    ledger.register_dataset("letters", UNIT, 2.0, 1e-5)
    with pytest.raises(BadInput, match=f"^{next(iter(other))} of the token_store step's output"):
        charged(bench_of(registered), **other)
    assert ledger.history("notes") == ledger.history("letters") == []


def test_descendant_of_a_nonprivate_training_cannot_be_released(registered):
    context = bench_of(registered)
    assert record_operator_use(context, NOTES).epsilon == math.inf
    before = Ledger.open(registered.ledger).history("notes")
    with pytest.raises(BadInput, match="without privacy"):
        charged(context)
    assert Ledger.open(registered.ledger).history("notes") == before


@pytest.mark.parametrize(("epsilon", "kept"), [(500.0, False), (501.0, True), (1e6, True)])
def test_releases_of_a_budget_above_500_stay_with_the_operator(deployment, tmp_path, epsilon, kept):
    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset("notes", UNIT, epsilon, 1e-5)
    noise = PoissonGaussian.single(0.05, 0.05, 500, unit=UNIT) if epsilon == 1e6 else None
    record = charged(bench_of(deployment), **({"event": noise} if noise else {})).settle(b"weights")
    assert (record.of_study, operator_only([record])) == (kept, kept)
    write_statement(tmp_path, [record], made_up=False)
    assert json.loads((tmp_path / STATEMENT_DATA).read_text())["private"] is not kept
    assert ("must not be exported" in (tmp_path / STATEMENT_WORDS).read_text()) is kept
    later = bench_of(deployment, "b" * 64)
    later.releases.append(record)
    charged(later)  # a study may continue from its own models
    for other in ({"of_study": not kept}, {"budget": "letters"}):
        later.releases[0] = record.model_copy(update=other)
        with pytest.raises(BadInput, match="the ledger holds another release"):
            charged(later)


def test_delta_of_the_inputs_counts_towards_the_limit(registered):
    record = charged(bench_of(registered, "b" * 64)).settle(b"released")
    before = Ledger.open(registered.ledger).history("notes")
    context = bench_of(registered)
    context.releases.append(record.model_copy(update={"delta": 1 / 100 - 5e-7}))
    with pytest.raises(PlanError, match="in total"):
        charged(context)  # 1e-6 more, of 100 units
    assert Ledger.open(registered.ledger).history("notes") == before


def test_settled_release_is_recorded_in_the_context_with_its_cost(registered):
    context = bench_of(registered)
    record = charged(context).settle(b"released")
    assert context.releases == [record] and not operator_only(context.releases)
    assert record.dataset == "notes"
    assert 0 < record.epsilon < record.epsilon_rdp < 2  # type: ignore[operator]
    assert PoissonGaussian.from_json(record.event).unit is UNIT


def test_manifest_of_the_noise_contains_the_code_digest(monkeypatch):
    before = manifest(kind="vocabulary")
    assert json.loads(before)["code"]
    monkeypatch.setattr("tasks.releases.manifest.code_digest", lambda kind: "other")
    assert manifest(kind="vocabulary") != before
    assert manifest(kind="vocabulary", a=1) != manifest(kind="vocabulary", a=2)


def test_reading_the_ledger_writes_no_entry(deployment):
    ledger = refuse_unregistered(bench_of(deployment, made_up=True), MADE_UP)
    assert ledger.datasets() == {}
    with pytest.raises(BadInput, match="no privacy budget yet"):
        refuse_unregistered(bench_of(deployment), "ward")


def test_step_without_access_to_seeds_can_create_none(deployment):
    assert deployment.holds_seeds
    environment = {"CONFIDE_HOME": str(deployment.home), "CONFIDE_SEEDS": WITHHELD}
    without = Deployment.from_environment(environment)
    assert not without.holds_seeds
    with pytest.raises(NotADirectoryError):
        SeedStore(without.seeds).create("a")
    environment = {"CONFIDE_HOME": str(deployment.home), "CONFIDE_LEDGER": f"sqlite:///{WITHHELD}"}
    with pytest.raises(BadInput, match="/dev/null"):  # a new, empty ledger is not created either
        Ledger.open(Deployment.from_environment(environment).ledger)


# --- a settled release with a lost output: only the identical output may be released again


WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2, np.float32)}
ROUNDED = WEIGHTS | {"b": np.nextafter(WEIGHTS["b"], np.float32(1))}


def test_weights_that_differ_in_one_bit_are_refused(registered):
    first = charged(bench_of(registered))
    first.settle(weights_released(WEIGHTS))
    shutil.rmtree(registered.store, ignore_errors=True)
    again = charged(bench_of(registered))
    assert again.entry.id == first.entry.id
    again.settle(weights_released(dict(reversed(WEIGHTS.items()))))
    with pytest.raises(BadInput, match=r"was released before, and its output differs.*new charge"):
        charged(bench_of(registered)).settle(weights_released(ROUNDED))


def test_settled_release_without_a_digest_is_not_released_again(registered):
    first = charged(bench_of(registered))
    first.settle(weights_released(WEIGHTS))
    with create_engine(registered.ledger, poolclass=NullPool).begin() as db:
        db.execute(text("UPDATE entries SET released_hash = ''"))
    with pytest.raises(BadInput, match="the digest of its output is lost"):
        charged(bench_of(registered))  # the refusal precedes the training
    with pytest.raises(BadInput, match="the digest of its output is lost"):
        first.settle(weights_released(WEIGHTS))


def test_released_digest_depends_on_the_seed(registered):
    content = weights_released(WEIGHTS)
    records, marks = set(), set()
    for number in "ab":
        entry = charged(bench_of(registered, number * 64))
        entry.settle(content)
        records.add(entry.ledger.entry(entry.entry.id).released_hash)
        marks.add(entry.ledger.entry(entry.entry.id).manifest_hash)
    assert len(records) == len(marks) == 2
    assert content.hex() not in records


def test_histogram_that_differs_in_a_word_or_count_is_refused(registered):
    counts = {"pain": 41, "arm": 17}
    charged(bench_of(registered)).settle(counts_released(counts))
    charged(bench_of(registered)).settle(counts_released(dict(reversed(counts.items()))))
    for other in (counts | {"arm": 18}, {"pain": 41}, {"pain": 41, "arms": 17}):
        with pytest.raises(BadInput, match="its output differs"):
            charged(bench_of(registered)).settle(counts_released(other))
