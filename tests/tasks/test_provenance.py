import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from child_processes import free_port
from release_examples import hold, record
from spec_examples import PLAN, Spec, spec_of
from step_outputs import POSITIONS, publish, rows_in, vocabulary_in

from dp_core.config.data import CanaryConfig
from dp_core.config.privacy import SelectionConfig
from dp_core.data.labelled_text import Sentence
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import save
from dp_core.models.parameters import fresh
from dp_core.privacy import mechanisms
from dp_core.privacy.ledger import Ledger
from tasks.execution import contract
from tasks.protocol.measurements import ExposureSpec
from tasks.protocol.specs import (
    CanariesSpec,
    FinetuneSpec,
    PretrainSpec,
    RunContext,
    SelectSpec,
    StepSpec,
    TokenStoreSpec,
    VocabularySpec,
)
from tasks.releases.declarations import declare_public
from tasks.runtime.deployment import Deployment
from tasks.steps.entities_step import write_items
from tasks.storage.store import RESULT, Store

CONTEXT = RunContext(run_key="by-hand", run_name="by hand", task="attack")
OTHER = "other-hospital"
EXAMPLES = json.loads(Path(__file__).with_name("provenance_examples.json").read_text())

P = mechanisms.PrivacyUnit.PATIENT
HISTOGRAM = mechanisms.ThresholdedHistogram(16, 60.0, 380, unit=P)
WORDS = record("words", HISTOGRAM)
WORDS_ELSEWHERE = record("elsewhere", HISTOGRAM, OTHER)
TRAINED = record("trained", mechanisms.PoissonGaussian.single(0.1, 4.0, 3, unit=P))
USED = record("used", mechanisms.Unaccounted("training without privacy", unit=P))
HELD = (WORDS, WORDS_ELSEWHERE, TRAINED, USED)  # settled before the tests begin


@dataclass
class Published:
    deployment: Deployment
    uris: dict[str, str]

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(self.deployment.ledger)

    def charged(self) -> list[str]:
        made_before = {release.ledger_id for release in HELD}
        entries = [e.id for name in ("notes", OTHER, "labels") for e in self.ledger.history(name)]
        return [entry_id for entry_id in entries if entry_id not in made_before]

    def copy(self, name: str) -> Path:
        store = Store(self.deployment.store, self.deployment.cache)
        return store.local_copy(self.uris[name])


@pytest.fixture
def published(untracked: Deployment) -> Published:
    return publish_all(untracked)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """The deployment that all refused specs share, because they leave it unchanged."""
    home = str(tmp_path_factory.mktemp("attacked"))
    untracked = {"CONFIDE_HOME": home, "CONFIDE_TRACKING": f"http://127.0.0.1:{free_port()}"}
    deployment = Deployment.from_environment(untracked)
    deployment.prepare()
    return publish_all(deployment)


def publish_all(untracked: Deployment) -> Published:
    store = Store(untracked.store, untracked.cache)
    ledger = Ledger.open(untracked.ledger)
    for name in ("notes", OTHER, "labels"):
        ledger.register_dataset(name, P, 500.0, 1e-3)
    hold(untracked, HELD)
    outputs = untracked.home / "made"
    wordpiece_folder, rows, model = outputs / "words", outputs / "rows", outputs / "model"
    size = vocabulary_in(wordpiece_folder, model)
    config = BertConfig.of_size(vocab_size=size, hidden=64, layers=1, max_positions=POSITIONS)
    save(fresh(config, 3), model)
    keyed = rows_in(untracked, rows, size, "train", "held_out")
    labels = outputs / "labels"
    labels.mkdir()
    for part in ("train", "test"):
        write_items([Sentence(("pain",), ("B-problem",), "d")] * 4, labels / f"{part}.jsonl")
    (outputs / "canaries").mkdir()
    (outputs / "canaries" / "canaries.json").write_text("[]")

    measured = {"words": {"vocabulary_size": size}, "private": {"digest": keyed}}
    charged = {release.ledger_id: release for release in HELD}
    uris = {"unused": ""}  # no input at all
    for name, (step, folder, kind, changes, releases) in EXAMPLES["outputs"].items():
        uri = f"{untracked.store}/{step}/{hashlib.sha256(name.encode()).hexdigest()}"
        facts = EXAMPLES["facts"][kind] | measured.get(kind, {}) | changes
        held = [charged[name] for name in releases]
        uris[name] = publish(store, uri, outputs / folder, releases=held, **facts)
    return Published(untracked, uris)


def spec_from(published: Published, kind: type[Spec], fields: dict[str, Any]) -> Spec:
    """Return a spec whose inputs are named published outputs, and whose plan changes `PLAN`."""
    named = {n: published.uris.get(v, v) if n.endswith("_uri") else v for n, v in fields.items()}
    if changes := named.get("plan"):
        named["plan"] = PLAN.model_copy(update=changes)
    if (model := named.get("public_model")) in published.uris:
        named["public_model"] = str(published.copy(model))
    return spec_of(kind, **named)


def pretraining(published: Published, **changes: Any) -> PretrainSpec:
    fields = {
        "mode": "dp", "store_uri": "private", "public_store_uri": "public",
        "private_store_uri": "private", "vocabulary_uri": "words", "init_uri": "public model",
        **changes,
    }  # fmt: skip
    return spec_from(published, PretrainSpec, fields)


def selection(published: Published, *candidates: dict[str, Any]) -> SelectSpec:
    specs = tuple(pretraining(published, **candidate) for candidate in candidates or ({},))
    return SelectSpec(
        made_up=False, candidates=specs,
        selection=SelectionConfig(selection_mean=2.0),
    )  # fmt: skip


def finetuning(published: Published, **changes: Any) -> FinetuneSpec:
    fields = {"model_uri": "model", "entities_uri": "labels", "plan": {"dataset": "labels"}}
    return spec_from(published, FinetuneSpec, fields | {"entity_types": ("problem",)} | changes)


def exposing(published: Published, **changes: str) -> ExposureSpec:
    fields = {"model_uri": "model", "canaries_uri": "canaries", "private_store_uri": "private"}
    return spec_from(published, ExposureSpec, fields | changes)


def wording(published: Published, **changes: Any) -> VocabularySpec:
    fields = {"corpus_uri": "corpus"} | changes
    if source := fields.pop("vocabulary_source", ""):
        fields["config"] = {"vocabulary_source": source, "declared_units": 40}
    return spec_from(published, VocabularySpec, fields)


def cutting(published: Published, **changes: Any) -> TokenStoreSpec:
    fields = {"corpus_uri": "corpus", "vocabulary_uri": "words", "canaries_uri": "canaries"}
    return spec_from(published, TokenStoreSpec, fields | changes)


SPECS: dict[str, Callable[..., StepSpec]] = {
    "pretraining": pretraining, "selection": selection, "finetuning": finetuning,
    "exposing": exposing, "wording": wording, "cutting": cutting,
}  # fmt: skip
ATTACKS = {name: each for group in EXAMPLES["attacks"].values() for name, each in group.items()}


@pytest.mark.parametrize("name", ATTACKS)
def test_invalid_spec_is_refused_before_a_charge(attacked, name):
    kind, given, reason = ATTACKS[name]
    candidates, fields = (given, {}) if kind == "selection" else ((), given)
    with pytest.raises(BadInput) as refused:
        spec = SPECS[kind](attacked, *candidates, **fields)
        contract.run_step(spec, attacked.deployment, CONTEXT)
    assert reason in str(refused.value) and "\n" not in str(refused.value)
    assert attacked.charged() == []


@pytest.mark.cases
def test_candidates_of_a_selection_differ_only_in_their_training_and_have_no_time_box(
    published, candidate, reason
):
    selection(published, {}, {"updates": 7})
    with pytest.raises(ValueError, match=reason):
        selection(published, {}, candidate)
    with pytest.raises(ValueError, match="of a public model"):
        selection(published, {"init_uri": ""})


@pytest.mark.parametrize("name", ["operator model", "model"])
def test_weights_trained_on_private_text_cannot_be_declared_public(published, tmp_path, name):
    """A copy without statement and result looks like a model of a third party."""
    ours = published.copy(name)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in ("config.json", "vocab.txt"):
        shutil.copyfile(ours / file, copy / file)
    declare_public(str(copy), published.deployment, known_private=False)
    shutil.copyfile(ours / "model.safetensors", copy / "weights.safetensors")
    for path in (copy, copy / "weights.safetensors"):
        with pytest.raises(BadInput, match=r"its weights are those of .* made of private text"):
            declare_public(str(path), published.deployment, known_private=True)


def test_cost_of_a_model_includes_all_its_inputs(published):
    spec = pretraining(published, vocabulary_uri="words elsewhere", init_uri="model")
    result = contract.run_step(spec, published.deployment, CONTEXT)
    (training,) = published.charged()
    assert {r.ledger_id for r in result.releases} == {"words", "elsewhere", "trained", training}
    metrics = {m.name: m for m in result.metrics}
    costs = [f"{n}{of}" for n in ("epsilon", "delta") for of in ("", "/notes", f"/{OTHER}")]
    assert set(costs) | {"epsilon_training"} == {
        n for n in metrics if n.startswith(("eps", "delta"))
    }
    assert {metrics[name].step for name in costs} == {len(result.releases)}
    trained = next(r.epsilon for r in result.releases if r.ledger_id == training)
    assert metrics["epsilon/notes"].value > trained
    assert metrics["delta/notes"].value == pytest.approx(2e-6 + 1e-5)
    assert metrics["mlm_accuracy_public"].label == "dp"


def test_descendants_of_a_nonprivate_training_remain_nonprivate(published):
    spec = pretraining(published, mode="nonprivate", plan=None)
    first = contract.run_step(spec, published.deployment, CONTEXT)
    assert [r.epsilon for r in first.releases][-1] == math.inf
    (cost,) = (m for m in first.metrics if m.name == "epsilon")
    assert (cost.value, cost.label) == (sys.float_info.max, "operator")
    assert {m.label for m in first.metrics if "accuracy" in m.name} == {"operator"}
    tuned = finetuning(published, model_uri="model", plan=None).model_copy(
        update={"model_uri": spec.output, "entity_types": ()}
    )
    after = contract.run_step(tuned, published.deployment, CONTEXT)
    # the uses of the notes and of the labels
    assert sum(math.isinf(r.epsilon) for r in after.releases) == 2
    before = published.charged()
    again = pretraining(published).model_copy(update={"init_uri": spec.output})
    with pytest.raises(BadInput, match="without privacy"):
        contract.run_step(again, published.deployment, CONTEXT)
    assert published.charged() == before


def test_releases_of_inputs_are_recorded_by_the_contract(published):
    spec = CanariesSpec(
        made_up=False, seed=1,
        vocabulary_uri=published.uris["words elsewhere"],
        config=CanaryConfig(canary_patterns="S", canary_rates="0.1", canaries_per_group=1),
    )  # fmt: skip
    context = CONTEXT.model_copy(update={"task": "canaries"})
    assert contract.run_step(spec, published.deployment, context).releases == [WORDS_ELSEWHERE]


def test_result_of_an_earlier_version_is_refused_as_input(published):
    store = Store(published.deployment.store, published.deployment.cache)
    uri = f"{published.uris['public model']}/{RESULT}"
    content = store.read(uri)
    store.write(uri, content.replace(b'"version":3', b'"version":2'))
    with pytest.raises(BadInput, match="not a result of this version"):
        contract.run_step(pretraining(published), published.deployment, CONTEXT)
    assert published.charged() == []
