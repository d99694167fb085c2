import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
from step_bench import LENGTH, WORDS, Bench, Chain, as_input, with_facts
from step_outputs import findings_at

from dp_core.audit.canaries import Canary
from dp_core.audit.membership import Attack, Scored
from dp_core.audit.membership_sample import MEMBERSHIP, membership_findings
from dp_core.audit.protocol import RELEASED
from dp_core.config.audit_settings import MembershipConfig
from dp_core.config.data import RowsConfig
from dp_core.config.privacy import UnitConfig
from dp_core.config.release import ReleaseRecord
from dp_core.config.training import BatchConfig, TrainingConfig
from dp_core.data.corpus import Document, write_corpus
from dp_core.data.hashing import seed_key
from dp_core.data.privacy_units import is_held_out
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit, compose
from tasks.context import StepOutput
from tasks.protocol.measurements import MembershipSpec
from tasks.releases.declarations import refuse_if_changed
from tasks.results import PROBES, SUBJECT, Input
from tasks.steps import canaries_step as canaries
from tasks.steps import membership_step as membership
from tasks.steps import pretrain_step as pretrain
from tasks.steps import token_store_step as token_store

PATIENTS, HELD_OUT, SEED = 260, 0.4, 1
Attacked = tuple[StepOutput, Bench]


@pytest.fixture(scope="module", autouse=True)
def profiles_are_computed_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivacyProfile, "of_event", staticmethod(cache(PrivacyProfile.of_event)))
        yield


def notes(*, apart: bool) -> Iterator[Document]:
    """Yield two notes per patient, each of a separate admission, with random words.

    With `apart`, held-out patients and members have disjoint words, so a model of the members
    distinguishes them as a model that memorised its rows would.
    """
    rng = np.random.default_rng(0)
    for number in range(PATIENTS):
        patient, words = f"patient-{number}", WORDS
        if apart:
            half = len(WORDS) // 2
            out = is_held_out(patient, HELD_OUT, seed_key(SEED))
            words = WORDS[half:] if out else WORDS[:half]
        for note in range(2):
            text = " ".join(rng.choice(words, LENGTH - 4))
            yield Document(f"d{note}", patient, text, f"a{note}")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    made = Chain(tmp_path_factory.mktemp("membership"))
    planted = made.context("few canaries")
    drawn = [Canary("HS-1-0", "HS", 0.1, made.pieces("arm", "fever"))]
    (planted.out / canaries.FILE).write_text(json.dumps([vars(c) for c in drawn]))
    known = {"vocabulary_digest": made.inputs["vocabulary"].facts["digest"], "digest": "few"}
    made.inputs["canaries"] = as_input(StepOutput({}, facts=known), planted, "canaries")
    for prefix, apart in (("", False), ("apart ", True)):
        corpus = made.context(f"{prefix}many notes")
        write_corpus(notes(apart=apart), corpus.out)
        facts = {"dataset": "notes", "role": "private", "all_name_a_patient": True}
        facts["digest"] = corpus.content_digest(corpus.out)
        made.inputs[f"{prefix}corpus"] = as_input(StepOutput({}, facts=facts), corpus, "corpus")
        cut = made.cut().model_copy(
            update={
                "corpus_uri": f"{prefix}corpus",
                "units": UnitConfig(declared_units=PATIENTS),
                "rows": RowsConfig(sequence_length=LENGTH, max_examples_per_unit=4),
                "holdout": HELD_OUT,
            }
        )
        made.inputs[f"{prefix}rows"] = made.answer(f"{prefix}many rows", token_store.run, cut)
    return made


def attacking(chain: Chain, **changes: Any) -> MembershipSpec:
    spec = MembershipSpec(
        made_up=False,
        model_uri="model",
        reference_uris=("public model",),
        corpus_uri="corpus",
        canaries_uri="canaries",
        private_store_uri="rows",
        units=UnitConfig(declared_units=PATIENTS),
        config=MembershipConfig(membership_units=60, membership_masks=3),
        device="cpu",
        seed=SEED,
    )
    return spec.model_copy(update=changes)


@pytest.fixture(scope="module")
def models(chain: Chain) -> dict[str, Input]:
    """A model of public text, and a model of members with distinct words."""
    once = {"plan": None, "public_store_uri": "public rows", "private_store_uri": "rows"}
    public = chain.training(mode="public", store_uri="public rows", updates=2, **once)
    chain.inputs["public model"] = chain.answer("public model", pretrain.run, public)
    memorising = chain.training(
        mode="nonprivate",
        store_uri="apart rows",
        updates=40,
        kept_updates=(4,),
        training=TrainingConfig(learning_rate=0.004),
        batches=BatchConfig(batch_size=32, examples_per_step=4),
        **once,
    )
    return {
        "public": chain.inputs["public model"],
        "memorising": chain.answer("memorising", pretrain.run, memorising),
    }


def attacked(
    chain: Chain, model: Input, name: str, inputs: dict[str, Input] | None = None, **changes: Any
) -> Attacked:
    context = chain.context(name, model=model, **(inputs or {}))
    return membership.run(attacking(chain, **changes), context), context


@pytest.fixture(scope="module")
def attacked_members(chain: Chain, models: dict[str, Input]) -> Attacked:
    apart = {"corpus_uri": "apart corpus", "private_store_uri": "apart rows"}
    return attacked(chain, models["memorising"], "caught", **apart)


def rows_at(context: Bench) -> list[dict[str, Any]]:
    """Return the results of all attacks at all levels on the last model."""
    findings = findings_at(context.out, MEMBERSHIP.key)
    return [row for each in findings if each.subject == RELEASED for row in each.details["rows"]]


def figures(context: Bench) -> dict[str, float]:
    return {number.name: number.value for number in context.numbers}


def test_attacks_detect_members_of_a_memorising_model_at_every_level(attacked_members):
    metrics = figures(attacked_members[1])
    for level in ("sample", "document", "admission", "patient"):
        for attack in ("loss", "reference", "gradients"):
            assert metrics[f"membership/{level}/{attack}/auc"] > 0.8, (level, attack)
    assert metrics["membership/patient/loss/pl"] > 0.3
    rows = rows_at(attacked_members[1])
    by_patient = next(row for row in rows if (row["level"], row["attack"]) == ("patient", "loss"))
    assert by_patient["members"] == by_patient["others"] == 60  # the bound of the settings


def test_model_of_an_earlier_epoch_is_attacked_with_the_same_rows(attacked_members):
    findings = findings_at(attacked_members[1].out, MEMBERSHIP.key)
    by_updates = {n: [each for each in findings if each.updates == n] for n in (4, 40)}
    assert sum(map(len, by_updates.values())) == len(findings)
    assert {each.subject for each in by_updates[4]} == {"the model after 4 updates"}
    rows = {
        n: {(r["level"], r["attack"]): r for finding in each for r in finding.details["rows"]}
        for n, each in by_updates.items()
    }
    counts = [{key: row["members"] for key, row in rows[n].items()} for n in (4, 40)]
    assert counts[0] == counts[1]
    earlier, last = (by_updates[n][0].details["losses"] for n in (4, 40))
    gaps = [losses["others"] - losses["members"] for losses in (earlier, last)]
    assert earlier["members"] > last["members"] + 0.1
    assert gaps[1] > gaps[0] + 0.1 and gaps[1] > 0.2
    numbers = [n for n in attacked_members[1].numbers if n.name == "membership/patient/loss/pl"]
    leaks = {n: rows[n]["patient", "loss"]["leakage"]["value"] for n in (4, 40)}
    assert {n.step: n.value for n in numbers} == leaks


def test_table_of_codes_defines_rare_patients(chain, models, tmp_path, capfd):
    """A fifth of the patients also has a rare code, and another fifth has no code."""
    table = tmp_path / "codes.csv"
    lines = ["SUBJECT_ID,HADM_ID,ICD9_CODE"]
    for number in range(PATIENTS):
        common = [f"patient-{number},a0,zyx4019"] if number % 5 else []
        lines += common + ([f"patient-{number},a1,zyxRARE"] if number % 5 == 1 else [])
    table.write_text("\n".join(lines))
    config = MembershipConfig(membership_units=60, membership_codes=str(table))
    spec = attacking(chain, config=config, reference_uris=())
    assert [source.field for source in spec.sources] == ["membership_codes"]
    answer, context = attacked(chain, models["public"], "codes", config=config, reference_uris=())
    written = (context.out / "findings_operator.json").read_text()
    rare, common = findings_at(context.out, MEMBERSHIP.key)[0].details["rarity"]
    counted = [bucket["members"] + bucket["others"] for bucket in (rare, common)]
    known = sum(counted)
    assert 10 <= counted[0] < counted[1] and known < 120
    share = counted[0] / known  # every patient with a known code has the common code
    assert rare["log_probability"] == pytest.approx(math.log(share))
    assert common["log_probability"] == pytest.approx(math.log(1 - share))
    outputs = written + json.dumps(answer.facts) + "".join(capfd.readouterr())
    assert "zyx" not in outputs and "patient-" not in outputs
    result = as_input(answer, context, "membership").result
    refuse_if_changed(spec, result, context)
    table.write_text(table.read_text() + "\npatient-1,a1,zyx1")
    with pytest.raises(BadInput, match="have changed since"):
        refuse_if_changed(spec, result, context)


def test_attacks_on_a_public_model_find_no_members(chain, models):
    _, context = attacked(chain, models["public"], "null", reference_uris=())
    rows = rows_at(context)
    assert {row["attack"] for row in rows} == {"loss", "min-k", "attention", "gradients"}
    for row in rows:  # 16 intervals of 95%, of which none may be far off
        assert row["leakage"]["low"] <= 0.02 and row["leakage"]["high"] >= -0.02, row
        assert not row["above"]


def test_only_ceilings_are_public(attacked_members):
    answer, context = attacked_members
    for name, labels in context.labels().items():
        public = name.startswith("membership_ceiling/")
        assert labels == {Label.PUBLIC if public else Label.OPERATOR}
    assert list(answer.artifacts.values()) == [Label.OPERATOR]
    assert answer.facts.keys() == {SUBJECT, PROBES}  # digests of the model and of its canaries
    written = (context.out / "findings_operator.json").read_text()
    assert "patient-" not in written
    for finding in findings_at(context.out, MEMBERSHIP.key):
        figures = json.dumps([finding.rows, finding.metrics, finding.details])
        assert not any(word in figures for word in WORDS if len(word) > 2)


def test_only_a_finite_claim_on_the_data_set_has_a_ceiling(chain, models, attacked_members):
    assert not any(name.startswith("membership_ceiling") for name in figures(attacked_members[1]))
    ceiling = membership.claimed(models["public"], chain.inputs["rows"])
    assert ceiling is not None
    (release,) = models["public"].result.releases  # the release of the vocabulary
    assert (release.epsilon, release.delta) == pytest.approx(ceiling.pairs[-1])
    stated = PrivacyProfile.of_claim(release.epsilon, release.delta)
    assert ceiling.true_positive_rate(0.01) <= stated.true_positive_rate(0.01)
    other = with_facts(chain.inputs["rows"], unit="document")
    assert membership.claimed(models["public"], other) is None
    elsewhere = with_facts(chain.inputs["rows"], dataset="elsewhere")
    free = membership.claimed(models["public"], elsewhere)
    assert free is not None and free.leakage == 0 and free.true_positive_rate(0.3) == 0.3


def test_ceiling_composes_all_releases(chain, models):
    (release,) = models["public"].result.releases
    twice = [release, release.model_copy(update={"ledger_id": "again"})]
    result = models["public"].result.model_copy(update={"releases": twice})
    ceiling = membership.claimed(Input(result, models["public"].folder), chain.inputs["rows"])
    event = compose(*(MechanismEvent.from_json(cast(ReleaseRecord, r).event) for r in twice))
    assert ceiling is not None
    expected = (epsilon_pld(event, 2 * release.delta), 2 * release.delta)
    assert ceiling.pairs[-1] == pytest.approx(expected)
    assert math.isfinite(expected[0]) and expected[0] > release.epsilon
    assert ceiling.pairs[:-1] == PrivacyProfile.of_event(event).pairs


def test_rows_of_another_corpus_or_other_canaries_are_refused(chain, models):
    for changes in ({"dataset": "elsewhere"}, {"canaries_digest": "other"}, {"unit": "document"}):
        wrong = {"rows": with_facts(chain.inputs["rows"], **changes)}
        with pytest.raises(BadInput, match=f"its {next(iter(changes))} is not that"):
            attacked(chain, models["public"], f"wrong {changes}", wrong)


def test_too_few_held_out_units_yield_no_rows(chain, models):
    few = MembershipConfig(membership_units=2)
    _, context = attacked(chain, models["public"], "few", config=few)
    (finding,) = findings_at(context.out, MEMBERSHIP.key)
    assert (finding.verdict, finding.label) == ("not run", Label.OPERATOR)


def test_ceiling_of_a_group_uses_group_privacy():
    n = 60
    scored = Scored(np.arange(n, dtype=np.float64), np.arange(n) % 2 == 0, np.arange(n))

    class Grouped:
        unit, groups = PrivacyUnit.DOCUMENT, dict.fromkeys(("sample", "document", "patient"))

        def scored(self, level: str, attack: Attack) -> tuple[Scored, int]:
            return scored, 3

    profile = PrivacyProfile.of_claim(0.5, 1e-6)
    attack = Attack("loss", scored.scores, 0.0, np.ones(n, np.bool_))
    for claim, highest in ((profile, profile.leakage), (None, None)):
        findings = membership_findings(MEMBERSHIP, cast(Any, Grouped()), [attack], claim)
        ceilings = [finding.ceiling for finding in findings]
        assert ceilings == [highest, highest, claim and claim.for_group(3).leakage]
    assert profile.for_group(3).leakage > profile.leakage
