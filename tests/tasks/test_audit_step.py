import json
from typing import Any

import numpy as np
import pytest
from step_bench import DECLARED, PLAN, Bench, Chain, as_input, with_facts
from step_outputs import findings_at

from dp_core.audit.canaries import coin_seed, throw_coins
from dp_core.audit.one_run import LOWER_BOUND, Guesses
from dp_core.audit.protocol import verdict_of
from dp_core.data.hashing import digest64, seed_key
from dp_core.data.token_store import TokenStore, joined
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.ledger import State
from dp_core.privacy.seed_store import PrivacySeed, SeedStore
from tasks.context import StepOutput
from tasks.protocol.measurements import AuditSpec
from tasks.protocol.specs import PretrainSpec
from tasks.releases.charge import planned_release, training_plan
from tasks.releases.provenance import private_units
from tasks.results import Input
from tasks.steps import audit_step as audit
from tasks.steps import pretrain_step as pretrain
from tasks.steps import token_store_step as token_store
from tasks.steps import training_files
from tasks.steps.training_files import audit_canaries_of

CANARIES = 12
AUDITED = PLAN.model_copy(update={"audit_canaries": CANARIES})
Trained = tuple[Input, Bench, list[TokenStore]]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    made = Chain(tmp_path_factory.mktemp("audited"))
    cut = made.cut().model_copy(update={"audit_canaries": CANARIES})
    made.inputs["audited rows"] = made.answer("audited rows", token_store.run, cut)
    once = {"plan": None, "mode": "public", "store_uri": "public rows"}
    made.inputs["start"] = made.answer("start", pretrain.run, made.training(**once))
    return made


def training(chain: Chain, **changes: Any) -> PretrainSpec:
    rows = {"store_uri": "audited rows", "private_store_uri": "audited rows"}
    return chain.training(**(rows | {"init_uri": "start", "plan": AUDITED} | changes))


@pytest.fixture(scope="module")
def trained(chain: Chain) -> Trained:
    context, given = chain.context("audited"), list[TokenStore]()
    real = training_files.joined

    def noting(*arguments: Any) -> TokenStore:
        given.append(real(*arguments))
        return given[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_files, "joined", noting)
        model = as_input(pretrain.run(training(chain), context), context, "pretrain")
    return model, context, given


def auditing(chain: Chain, model: Input, name: str, **inputs: Input) -> tuple[StepOutput, Bench]:
    context = chain.context(name)
    context.inputs = chain.inputs | {"model": model} | inputs
    spec = AuditSpec(
        made_up=False, model_uri="model", start_uri="start",
        private_store_uri="audited rows", device="cpu", seed=1,
    )  # fmt: skip
    return audit.run(spec, context), context


def coins_of(chain: Chain, model: Input) -> np.ndarray:
    entry = chain.ledger.entry(model.facts["audit"]["entry"])
    seed = SeedStore(chain.home.seeds).get(entry.seed_key)
    return throw_coins(coin_seed(seed), CANARIES)


# --- rows


def stores(chain: Chain) -> tuple[TokenStore, TokenStore]:
    folder = chain.inputs["audited rows"].folder
    return TokenStore.open(folder / token_store.TRAIN), TokenStore.open(folder / token_store.AUDIT)


def test_audit_canaries_are_additional_units_with_distinct_keys(chain, tmp_path):
    (train, canaries), plain = stores(chain), chain.inputs["rows"]
    assert train.digest == TokenStore.open(plain.folder / token_store.TRAIN).digest
    assert canaries.n_units == canaries.n_rows == CANARIES
    # Private units may have any id, including the number of a canary.
    private = {digest64(seed_key(1), "unit", str(number)) for number in range(CANARIES)}
    assert not set(canaries.unit_keys.tolist()) & {*train.unit_keys.tolist(), *private}
    assert not (plain.folder / token_store.AUDIT).exists()
    whole = joined(tmp_path, train, canaries, [3, 5])
    assert whole.n_units == train.n_units + 2
    assert (whole.tokens[: train.n_rows] == train.tokens).all()
    assert (whole.tokens[train.n_rows :] == canaries.tokens[[3, 5]]).all()
    assert (whole.unit_keys[-2:] == canaries.unit_keys[[3, 5]]).all()
    assert [len(whole.rows_of(u)) for u in range(whole.n_units)][-2:] == [1, 1]
    assert whole.content_digest() == whole.digest


# --- declared units


def test_included_and_excluded_canaries_are_declared(chain):
    """The canaries count in the plan's units, the sampling rate, the bound on δ and the charge."""
    spec = training(chain)
    plan, planned = training_plan(spec, 1), planned_release(spec)
    assert plan.declared_units == planned.declared_units == DECLARED + CANARIES
    assert plan.sampling_rate(0) == spec.batches.batch_size / (DECLARED + CANARIES)
    assert private_units(chain.inputs["audited rows"]).declared_units == DECLARED + CANARIES
    near = {"delta": 1 / (DECLARED + 1)}  # below 1/n, and not below 1/(n + m)
    planned_release(training(chain, plan=PLAN.model_copy(update=near)))
    with pytest.raises(BadInput, match=f"1/{DECLARED + CANARIES}"):
        planned_release(training(chain, plan=AUDITED.model_copy(update=near)))


@pytest.mark.parametrize(
    "changes",
    [
        {"audit_canaries": 0},
        {"audit_canaries": CANARIES - 1},
        {"audit_canaries": 0, "declared_units": DECLARED + CANARIES},
        {"audit_canaries": CANARIES + 1, "declared_units": DECLARED - 1},
    ],
)
def test_plan_with_another_number_of_canaries_is_refused_before_a_charge(chain, changes):
    before = len(chain.ledger.history("notes"))
    context = chain.context(f"other plan {sorted(changes.items())}")
    with pytest.raises(BadInput):
        pretrain.run(training(chain, plan=PLAN.model_copy(update=changes)), context)
    assert len(chain.ledger.history("notes")) == before


# --- coins


def test_training_reads_private_units_and_included_canaries(chain, trained):
    """The number of included canaries is not published."""
    model, context, (given,) = trained
    (train, canaries), coins = stores(chain), coins_of(chain, model)
    assert 0 < coins.sum() < CANARIES
    assert given.unit_keys.tolist() == [*train.unit_keys, *canaries.unit_keys[coins]]
    labels = context.labels()
    assert {labels[name].pop() for name in ("loss", "batch", "clipped")} == {Label.OPERATOR}
    assert set(model.facts["audit"]) == {"entry", "coins"}
    assert "seed" not in json.dumps(model.facts)


def test_coins_are_bound_to_the_charge(chain, trained):
    """A repeated training has the same charge and coins; another charge has other coins."""
    model, _, _ = trained
    before = len(chain.ledger.history("notes"))
    again = chain.context("audited")  # the same spec hash, as after a lost output
    once_more = as_input(pretrain.run(training(chain), again), again, "pretrain")
    assert once_more.facts["audit"] == model.facts["audit"]
    assert len(chain.ledger.history("notes")) == before
    other = chain.context("audited again")
    training_config = training(chain).training.model_copy(update={"learning_rate": 2e-3})
    spec = training(chain, training=training_config)
    another = as_input(pretrain.run(spec, other), other, "pretrain")
    assert another.facts["audit"]["coins"] != model.facts["audit"]["coins"]
    assert len(chain.ledger.history("notes")) == before + 1
    assert chain.ledger.entry(another.facts["audit"]["entry"]).state is State.SETTLED


# --- the audit


def test_audit_results_are_dp_and_readable_as_evidence(chain, trained):
    model, _, _ = trained
    answer, context = auditing(chain, model, "an audit")
    assert context.labels() == {
        "audit/epsilon_lower_bound": {Label.DP}, "audit/right_guesses": {Label.DP},
        "audit/p_value": {Label.DP}, "audit/null_alarms": {Label.DP},
        "audit/power": {Label.PUBLIC}, "audit/guesses": {Label.PUBLIC},
        "audit/claimed_epsilon": {Label.PUBLIC},
    }  # fmt: skip
    assert set(answer.artifacts.values()) == {Label.DP}
    assert answer.facts["audited_weights"] == model.facts["weights_digest"]
    (record,) = findings_at(context.out, LOWER_BOUND.key)
    assert (record.key, record.label) == (LOWER_BOUND.key, Label.DP)
    assert record.verdict == answer.facts["verdict"] != "contradicted"
    claimed = {m.name: m.value for m in context.numbers}["audit/claimed_epsilon"]
    assert claimed == pytest.approx(model.result.releases[-1].epsilon)  # the ε of the training only


def test_audit_step_writes_an_invalid_record_when_null_controls_alarm(chain, trained, monkeypatch):
    model, _, _ = trained
    all_in = np.ones(CANARIES, np.bool_)
    monkeypatch.setattr("dp_core.audit.one_run.throw_coins", lambda *_: all_in)
    monkeypatch.setattr("dp_core.audit.one_run.planned_guesses", lambda *_: Guesses(CANARIES, 0))
    answer, context = auditing(chain, model, "an invalid audit")
    (record,) = findings_at(context.out, LOWER_BOUND.key)
    assert record.verdict == answer.facts["verdict"] == "invalid"
    assert verdict_of("ε = 4", [record]).word == "invalid"


def test_coins_that_the_ledger_did_not_bind_are_refused(chain, trained, monkeypatch):
    model, _, _ = trained
    audit_facts = model.facts["audit"]
    for number, wrong in enumerate(
        (
            audit_facts | {"coins": coin_seed(PrivacySeed.fixed("chosen")).salted_hash()},
            audit_facts | {"entry": chain.inputs["vocabulary"].result.releases[0].ledger_id},
        )
    ):
        with pytest.raises(BadInput, match="the coins are not those"):
            auditing(chain, with_facts(model, audit=wrong), f"chosen {number}")
    with pytest.raises(BadInput, match="none of the model's"):
        auditing(chain, with_facts(model, audit=audit_facts | {"entry": "e" * 32}), "no entry")
    # An exchanged seed is detected, even with a model that states the matching coins.
    chosen = PrivacySeed.draw()
    real = SeedStore.get

    def exchange(store: SeedStore, key: str) -> PrivacySeed:
        return chosen if store._directory == chain.home.seeds else real(store, key)

    monkeypatch.setattr(SeedStore, "get", exchange)
    exchanged = audit_facts | {"coins": coin_seed(chosen).salted_hash()}
    with pytest.raises(BadInput, match="the coins are not those"):
        auditing(chain, with_facts(model, audit=exchanged), "exchanged")


def test_audit_without_its_canaries_is_refused(chain, trained):
    rows, context = chain.inputs["audited rows"], chain.context("altered canaries")
    with pytest.raises(BadInput, match="held no audit canaries"):
        auditing(chain, chain.inputs["start"], "public")
    with pytest.raises(BadInput, match="the rows have no audit canaries"):
        auditing(chain, trained[0], "other rows", **{"audited rows": chain.inputs["rows"]})
    with pytest.raises(BadInput, match="compares a model with its beginning"):
        pretrain.run(training(chain, init_uri=""), chain.context("from nothing"))
    assert audit_canaries_of(rows, context).n_units == CANARIES
    for wrong in ({"audit_digest": "0" * 64}, {"audit_canaries": CANARIES + 1}):
        with pytest.raises(BadInput, match="not those that the step wrote"):
            audit_canaries_of(with_facts(rows, **wrong), context)


def test_noise_seed_depends_on_the_canaries(chain):
    spec, rows = training(chain), chain.inputs["audited rows"]
    words = chain.inputs["vocabulary"]
    plan: ExecutionPlan = training_plan(spec, 1)
    manifests = {
        pretrain._manifest(
            spec, training_files.TrainingInputs(words, source, rows, rows, None), plan
        )
        for source in (rows, with_facts(rows, audit_digest="1" * 64))
    }
    assert len(manifests) == 2
