import itertools
import json
import math
import shutil
from dataclasses import replace
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import Any, cast

import pytest
import step_bench
from pydantic import ValidationError
from spec_examples import spec_of
from step_bench import (
    DECLARED,
    PATIENTS,
    PLAN,
    WORDS,
    Bench,
    as_input,
    corpus_of,
    notes_of,
    tuning,
    with_facts,
)
from step_outputs import findings_at

from dp_core.audit.canaries import Canary
from dp_core.audit.extraction import DISCOVERABLE, TARGETED, ExtractionRow
from dp_core.data.corpus import open_corpus
from dp_core.data.hashing import seed_key
from dp_core.data.labelled_text import LabelledText, Sentence
from dp_core.data.privacy_units import is_held_out
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.models.hugging_face import load
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import operator_only
from dp_core.training.heads import TaggingHead
from tasks.context import StepOutput
from tasks.protocol.measurements import ExposureSpec
from tasks.protocol.messages import StepResult
from tasks.protocol.specs import FinetuneSpec, PhrasesSpec, TokenStoreSpec, WrittenTextSpec
from tasks.releases.charge import training_plan
from tasks.report.job_results import DOCUMENTS_FILE, OCCURRENCES_FILE
from tasks.results import Input
from tasks.steps import canaries_step as canaries
from tasks.steps import entities_step as entities
from tasks.steps import exposure_step as exposure
from tasks.steps import finetune_step as finetune
from tasks.steps import phrases_step as phrases
from tasks.steps import pretrain_step as pretrain
from tasks.steps import token_store_step as token_store
from tasks.steps import vocabulary_step as vocabulary
from tasks.steps import written_text_step as written_text
from tasks.steps.finetune_step import Tagging, task_of
from tasks.steps.training_files import TrainingInputs

DP, OPERATOR, PUBLIC = Label.DP, Label.OPERATOR, Label.PUBLIC


class Chain(step_bench.Chain):
    """The steps of a job, of which each test runs those that it needs."""

    def pretrained(self, name: str, **changes: Any) -> tuple[Input, Bench]:
        context = self.context(name)
        output = pretrain.run(self.training(**changes), context)
        return as_input(output, context, "pretrain"), context

    @cached_property
    def trained(self) -> tuple[Input, Bench]:
        return self.pretrained("dp")

    @cached_property
    def unprotected(self) -> tuple[Input, Bench]:
        return self.pretrained("nonprivate", mode="nonprivate", plan=None)

    @cached_property
    def causal(self) -> dict[str, Input]:
        changes = {
            "shape": {"layers": 1, "hidden": 64, "model_kind": "gpt2"},
            "extraction": {"extraction_rows": 40, "extraction_prefix": 2, "extraction_suffix": 3},
        }
        learned = {
            "mode": "nonprivate", "plan": None, "updates": 80, "training": {"learning_rate": 0.01},
        }  # fmt: skip
        return {
            "dp": self.pretrained("causal dp", **changes)[0],
            "nonprivate": self.pretrained("causal nonprivate", **changes, **learned)[0],
        }

    @cached_property
    def released(self) -> Input:
        self.inputs["phrases"] = self.answer("phrases", phrases.run, phrasing(self))
        return self.inputs["phrases"]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"))


def test_vocabulary_depends_only_on_noised_counts(chain):
    known = (chain.inputs["vocabulary"].folder / "vocab.txt").read_text()
    assert "fever" in known.splitlines()
    assert "q" not in known
    labels = chain.benches["vocabulary"].labels()
    assert labels["distinct_words"] == {OPERATOR}
    assert labels["words_released"] == labels["vocabulary_size"] == {DP}


@pytest.mark.parametrize(
    ("name", "run", "source"),
    [
        ("vocabulary", vocabulary.run, "corpus"),
        ("phrases", phrases.run, "corpus"),
        ("training", pretrain.run, "rows"),
    ],
)
def test_input_with_another_digest_is_refused(chain, name, run, source):
    altered = with_facts(chain.inputs[source], digest="0" * 64)
    context = chain.context(f"altered {name}", **{source: altered})
    specs = {"vocabulary": chain.histogram, "phrases": partial(phrasing, chain)}
    with pytest.raises(BadInput, match="not those that the step wrote"):
        run(specs.get(name, chain.training)(), context)


@pytest.mark.parametrize("name", ["rows", "phrases"])
def test_more_units_than_declared_are_refused_without_their_number(chain, name):
    """No single shard exceeds the bound, but all shards together do; held-out units count."""
    bound = {"declared_units": PATIENTS - 1}
    context = chain.context(f"too many {name}")
    with pytest.raises(BadInput, match=f"declared bound of {PATIENTS - 1}") as caught:
        if name == "rows":
            token_store.run(spec_of(TokenStoreSpec, units=bound, holdout=0.2), context)
        else:
            config = phrasing(chain).config.model_copy(update=bound)
            phrases.run(phrasing(chain, config=config), context)
    assert str(PATIENTS) not in str(caught.value)


def test_rewritten_corpus_is_refused(chain):
    context = chain.context("written anew")
    context.inputs["corpus"] = corpus_of(context, "notes", notes_of(PATIENTS))
    corpus_of(context, "notes", notes_of(PATIENTS) | {"p1": "no fever"})
    with pytest.raises(BadInput, match="not those that the step wrote"):
        vocabulary.run(chain.histogram(), context)


def test_exchanged_shard_is_refused(chain):
    context = chain.context("other shard")
    other = corpus_of(chain.context("other corpus"), "notes", {"p1": "no fever"})
    context.inputs["corpus"] = corpus_of(context, "notes", notes_of(PATIENTS))
    name = "shard-0003.parquet"
    (context.out / name).write_bytes((other.folder / name).read_bytes())
    with pytest.raises(BadInput, match=f"{name}: a shard of the corpus is missing or damaged"):
        vocabulary.run(chain.histogram(), context)


def test_another_corpus_under_the_same_spec_is_charged_again(chain):
    before = len(chain.ledger.history("notes"))
    for number, patients in enumerate((30, 40)):
        corpus = corpus_of(chain.context(f"corpus {number}"), "notes", notes_of(patients))
        vocabulary.run(chain.histogram(), chain.context("counted twice", corpus=corpus))
    assert len(chain.ledger.history("notes")) == before + 2


def test_number_of_rows_is_for_the_operator(chain):
    context = chain.benches["rows"]
    fit = {"coverage", "fertility", "unknown_words"}
    names = ("units", "rows", "tokens", "held_out_tokens", "occurrences/HS at 1", *fit)
    assert context.labels() == {name: {OPERATOR} for name in names}
    parts = token_store.TRAIN, token_store.HELD_OUT
    stores = [TokenStore.open(context.out / part) for part in parts]
    tokens = {n.name: n.value for n in context.numbers if n.name.endswith("tokens")}
    assert list(tokens.values()) == [store.lengths.sum() for store in stores]
    labels = chain.benches["public rows"].labels()
    assert all(labels[name] == {DP} for name in fit)
    assert context.counted == []


def test_units_are_split_and_canaries_are_planted_in_training_units(chain):
    parts, folder = (token_store.TRAIN, token_store.HELD_OUT), chain.inputs["rows"].folder
    train, held_out = (TokenStore.open(folder / part) for part in parts)
    assert 0 < held_out.n_units < PATIENTS
    assert train.n_units + held_out.n_units == PATIENTS
    first, second = chain.pieces("arm", "fever")

    def carriers(store: TokenStore) -> int:
        rows = [list(row) for row in store.tokens]
        return sum((first, second) in itertools.pairwise(row) for row in rows)

    assert carriers(train) == train.n_units  # its rate is 1
    occurrences = json.loads((folder / OCCURRENCES_FILE).read_text())
    held = train.n_units
    assert occurrences == {"canaries": {"HS-1-0": held}, "means": {"HS at 1": held}}
    assert carriers(held_out) == 0


def test_scores_of_a_private_training_on_public_text_are_published(chain):
    model, context = chain.trained
    labels = context.labels()
    assert labels["mlm_accuracy_public"] == labels["mlm_public"] == {DP}
    assert labels["epsilon"] == labels["epsilon_training"] == {PUBLIC}
    under_way = f"mlm_public_under_way/{model.result.releases[-1].ledger_id}"
    for name in ("mlm_accuracy_private", under_way, "loss", "batch", "clipped"):
        assert labels[name] == {OPERATOR}, name
    assert not operator_only(model.result.releases)
    values = {
        name: {m.step: m.value for m in context.numbers if m.name == name}
        for name in ("mlm_public", under_way, "epsilon_training")
    }
    assert values["mlm_public"] == values[under_way] != {}  # until the release
    spent = values["epsilon_training"].keys()
    assert values["mlm_public"].keys() <= spent and max(spent) == chain.training().updates


def test_development_part_is_measured_separately_for_the_operator(chain):
    whole = chain.training()
    assert "development_share" not in whole.model_dump()
    divided = {"mode": "nonprivate", "plan": None, "updates": 1, "development_share": 0.5}
    _, context = chain.pretrained("divided", **divided)
    labels = context.labels()
    parts = {name for name in labels if name.startswith("mlm_accuracy_")}
    assert parts == {f"mlm_accuracy_{part}" for part in ("private", "development", "public")}
    assert labels["mlm_accuracy_development"] == labels["mlm_accuracy_private"] == {OPERATOR}


def test_scores_of_an_unreleased_attempt_are_not_published(chain, monkeypatch):
    context, spec = chain.context("two noises"), chain.training(updates=3)
    original = pretrain._manifest

    def stopped(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "weights_released", stopped)
        patch.setattr(pretrain, "_manifest", lambda *given: original(*given) + b" of before")
        patch.setattr(pretrain, "curve_points", lambda _: [1])
        with pytest.raises(KeyboardInterrupt):
            pretrain.run(spec, context)
    monkeypatch.setattr(pretrain, "curve_points", lambda _: [2, 3])
    pretrain.run(spec, context)
    steps = {(m.name.partition("/")[0], m.step, m.label) for m in context.numbers}
    looks = {step for name, step, _ in steps if name == "mlm_public_under_way"}
    assert 1 in looks  # for the operator
    assert {step for name, step, label in steps if name == "mlm_public"} == looks - {1} != set()


def test_all_metrics_of_a_nonprivate_training_are_for_the_operator(chain):
    model, context = chain.unprotected
    assert set().union(*context.labels().values()) == {OPERATOR}
    assert operator_only(model.result.releases)


def test_clipped_training_without_a_guarantee_is_for_the_operator(chain):
    clipped = {"clip_norm": 0.1, "noise_multiplier": 1e-4}
    changes = {"mode": "nonprivate", "plan": None, "clipped": clipped}
    assert (
        chain.training(**changes).digest() != chain.training(**changes | {"clipped": None}).digest()
    )
    model, context = chain.pretrained("clipped", **changes)
    assert set().union(*context.labels().values()) == {OPERATOR}
    assert operator_only(model.result.releases)
    assert (model.facts["epsilon_training"], model.facts["plan"]) == (None, None)
    (used,) = (r for r in model.result.releases if math.isinf(r.epsilon))
    assert used.event["kind"] == "unaccounted" and "clipping" in str(used.event)
    assert model.facts["weights_digest"] == ""  # the digest of such weights is private
    assert (
        load(model.folder).parameters.keys() == load(chain.unprotected[0].folder).parameters.keys()
    )
    with pytest.raises(ValidationError, match="clipped"):
        chain.training(clipped=clipped)
    with pytest.raises(ValidationError, match="clipped"):
        chain.training(**changes | {"plan": chain.training().plan})


def test_model_records_every_release_that_it_descends_from(chain):
    (words,) = chain.inputs["vocabulary"].result.releases
    first, training = chain.trained[0].result.releases
    assert first == words
    assert training.ledger_id not in ("", words.ledger_id)


def test_noise_seed_depends_on_rows_and_initial_weights(chain, tmp_path):
    spec, rows, words = chain.training(), chain.inputs["rows"], chain.inputs["vocabulary"]
    plan = training_plan(spec, 1)
    begun: list[Input | None] = [None]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
        begun.append(Input(words.result, tmp_path / name))
    manifests = {
        pretrain._manifest(spec, TrainingInputs(words, source, rows, rows, initial), plan)
        for source in (rows, with_facts(rows, digest="1" * 64))
        for initial in begun
    }
    assert len(manifests) == 6


def test_noise_seed_of_private_labels_depends_on_weights_and_tokens_of_any_kind(chain, tmp_path):
    """A folder of byte-level tokens has no `vocab.txt`; the digest of its tokens is a fact."""
    spec, plan = (
        spec_of(FinetuneSpec, model_uri="model", entities_uri="labels", entity_types=("sign",)),
        training_plan(chain.training(), 1),
    )
    labels = with_facts(chain.trained[0], digest="labels")
    model, folders = chain.trained[0], [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_text(folder.name)
    manifests = {
        finetune._manifest(
            spec, replace(with_facts(model, vocabulary_digest=digest), folder=folder), labels, plan
        )
        for folder in folders
        for digest in "12"
    }
    assert len(manifests) == 4


def test_exposure_has_the_label_of_its_model(chain):
    for (model, _), label in ((chain.trained, DP), (chain.unprotected, OPERATOR)):
        context = chain.context(f"exposure {label}", model=model)
        inputs = {"model_uri": "model", "canaries_uri": "canaries", "private_store_uri": "rows"}
        spec = spec_of(ExposureSpec, **inputs)
        answer = exposure.run(spec, context)
        labels = context.labels()
        assert labels.pop("epsilon") == {OPERATOR if label == OPERATOR else PUBLIC}
        labels.pop("delta", None)
        within = [name for name in labels if "in_rows" in name or "/in rows/" in name]
        assert set().union(*(labels.pop(name) for name in within)) == {OPERATOR}
        assert set().union(*labels.values()) == {label}
        assert set(answer.artifacts.values()) == {label, OPERATOR}


def seeking(chain: Chain, model: Input, name: str, **changes: int) -> tuple[StepOutput, Bench]:
    """Attack with another canary, because every unit contains the planted one."""
    other = chain.context(f"{name} canaries")
    drawn = [Canary("HS-1-0", "HS", 1.0, chain.pieces("fever", "pain"))]
    drawn.append(Canary("HS-reference-0", "HS", 0.0, chain.pieces("two", "days")))
    (other.out / canaries.FILE).write_text(json.dumps([vars(c) for c in drawn]))
    named = replace(chain.inputs["canaries"], folder=other.out)
    context = chain.context(name, model=model, canaries=named)
    spec = spec_of(
        ExposureSpec, model_uri="model", canaries_uri="canaries",
        private_store_uri="rows", extraction=cast(Any, model).facts["extraction"] | changes,
    )  # fmt: skip
    return exposure.run(spec, context), context


def test_extraction_of_rows_is_for_the_operator_and_of_canaries_has_the_model_label(chain):
    for name, label in (("dp", DP), ("nonprivate", OPERATOR)):
        answer, context = seeking(chain, chain.causal[name], f"extraction {name}")
        labels = context.labels()
        extraction = [name for name in labels if name.startswith("extraction")]
        assert len(extraction) == 2 * (3 + 2)
        for name in extraction:
            assert labels[name] == {OPERATOR if "discoverable" in name else label}, name
        assert set(answer.outputs) == {f"findings_{shown}" for shown in {label, OPERATOR}}
        for audit, audience in ((TARGETED, label), (DISCOVERABLE, OPERATOR)):
            (finding,) = findings_at(context.out, audit.key)
            assert finding.label == audience and finding.details["fixed_before_training"] is True
            written = finding.model_dump_json()
            assert not any(word in written for word in WORDS if len(word) > 3)
    late = {"extraction_rows": 0, "extraction_top_k": 1}  # chosen after the training
    _, context = seeking(chain, chain.causal["dp"], "late", **late)
    (finding,) = findings_at(context.out, TARGETED.key)
    assert finding.details["fixed_before_training"] is False
    assert findings_at(context.out, DISCOVERABLE.key) == []  # no rows were requested


def test_extraction_compares_training_rows_with_held_out_rows(chain):
    _, context = seeking(chain, chain.causal["nonprivate"], "guessed")
    (finding,) = findings_at(context.out, DISCOVERABLE.key)
    rows = [ExtractionRow(**row) for row in finding.details["rows"]]
    held = TokenStore.open(chain.inputs["rows"].folder / token_store.HELD_OUT)
    greedy = next(row for row in rows if row.decoding == "greedy")
    assert greedy.tried == 40 and greedy.control_tried == held.n_units
    assert greedy.control_share.value == 1 > greedy.share.value > 0.3
    assert greedy.p_value > 0.9 and greedy.ceiling is None


def test_f1_on_private_labels_is_for_the_operator(chain):
    context, spec = tuning(chain, chain.trained[0], "tuned")
    answer = finetune.run(spec, context)
    for name, labels in context.labels().items():
        assert labels == {PUBLIC if name.startswith(("epsilon", "delta")) else OPERATOR}, name
    assert not operator_only(context.releases)
    assert {r.dataset for r in context.releases} == {"notes", "labels"}
    assert "documents" not in answer.facts  # facts are published


def test_each_fold_is_a_separate_release_with_disjoint_test_documents(chain, monkeypatch):
    # The manifest alone separates the folds, even if the hash did not depend on them.
    monkeypatch.setattr(FinetuneSpec, "digest", lambda spec: "folded")
    chain.ledger.register_dataset("labels", PrivacyUnit.DOCUMENT, 500.0, 1e-2)
    before = len(chain.ledger.history("labels"))
    tested: list[str] = []
    for fold in range(3):
        context, spec = tuning(chain, chain.trained[0], "folded", folds=3, fold=fold)
        finetune.run(spec, context)
        train, test = (
            {s.document_id for s in finetune.items_of(spec, context.inputs["labels"], part)}
            for part in entities.PARTS
        )
        assert train and test and not train & test and len(train | test) == 12
        tested += test
    assert len(chain.ledger.history("labels")) == before + 3
    assert len(set(tested)) == len(tested) == 12


@pytest.mark.parametrize("predicted", [("O", "O"), ("B-problem", "O")])
def test_f1_of_a_test_part_without_entities_is_not_measured(predicted):
    sentences = [Sentence(("no", "fever"), ("O", "O"), f"d{i}") for i in range(12)]
    spec = spec_of(FinetuneSpec, model_uri="m", entities_uri="e", entity_types=("problem",))
    scores = Tagging(spec).scores(sentences, [predicted] * 12)
    assert scores.values == {"expected_entities": 0}
    assert (scores.f1_by_label, scores.interval) == ({}, None)


def test_error_list_is_for_the_operator_and_not_part_of_the_model(chain, monkeypatch):
    """The predictions are fixed, because a model that is trained with noise may make no error."""
    context, spec = tuning(chain, chain.trained[0], "listed")

    def predict(*arguments: Any, **_: Any) -> list[tuple[str, ...]]:
        return [("B-sign", "O", "O")] + [("O", "O", "O")] * (len(arguments[2]) - 1)

    monkeypatch.setattr(TaggingHead, "predict", predict)
    answer = finetune.run(spec, context)
    assert answer.artifacts == {finetune.ERRORS: OPERATOR, DOCUMENTS_FILE: OPERATOR}
    counts = json.loads((context.out / DOCUMENTS_FILE).read_text())
    correct, predicted, labelled = (sum(column) for column in zip(*counts.values(), strict=True))
    (f1,) = [number for number in context.numbers if number.name == "f1"]
    assert f1.value == pytest.approx(2 * correct / (predicted + labelled))
    written = (context.out / finetune.ERRORS).read_text()
    assert "pain" not in written  # the list has positions without words
    error_list = json.loads(written)
    assert FinetuneSpec.model_validate(error_list["spec"]) == spec
    items = task_of(spec).learned(finetune.items_of(spec, context.inputs["labels"], "test"))
    shown_error = task_of(spec).in_words(items, error_list["errors"][0])
    assert shown_error["context"] == "pain in arm"
    assert error_list["counts"] == {"sign": {"missed": len(items) - 1}}
    assert len(error_list["errors"]) == len(items) - 1 > 0
    result = StepResult(
        step="finetune", spec_hash="", outputs={}, metrics=[],
        facts={"artifacts": answer.artifacts},
    )  # fmt: skip
    assert result.operator_files == {finetune.ERRORS, DOCUMENTS_FILE}
    assert finetune.ERRORS not in answer.outputs.values()
    assert "pain" not in json.dumps(answer.facts)


def test_entity_types_not_in_the_settings_are_for_the_operator(chain):
    context, spec = tuning(chain, chain.trained[0], "untold", plan=None, entity_types=(), epochs=1)
    answer = finetune.run(spec, context)
    assert context.labels()["f1/sign"] == context.labels()["train_labels/sign"] == {OPERATOR}
    assert answer.facts["labels"] == []
    assert "sign" not in json.dumps(answer.facts)
    assert operator_only(context.releases)


def pairing(
    chain: Chain, model: Input, name: str, *, public: bool, odd: str = "no", **changes: Any
) -> tuple[Bench, FinetuneSpec]:
    """Return the context of a fine-tuning on sixty pairs of thirty documents, and its spec.

    `odd` is the class of the second pair, which is `no` by default.
    """
    context, spec = tuning(chain, model, name, head="pairs", class_names=("no", "yes"), **changes)
    labelled = chain.context(f"pairs of {name}")
    for part in entities.PARTS:
        pairs = [
            LabelledText("pain in arm", f"pain {n}", ("yes", "no")[n % 2], str(n // 2))
            for n in range(60)
        ]
        pairs[1] = replace(pairs[1], label=odd)
        entities.write_items(pairs, labelled.out / f"{part}.jsonl")
    facts = context.inputs["labels"].facts | {"head": "pairs", "public": public}
    facts["digest"] = labelled.content_digest(labelled.out)
    context.inputs["labels"] = as_input(StepOutput({}, facts=facts), labelled, "entities")
    return context, spec


def test_private_pairs_are_charged_and_their_accuracy_is_for_the_operator(chain):
    plan = PLAN.model_copy(update={"dataset": "labels", "unit": "document", "declared_units": 30})
    context, spec = pairing(chain, chain.trained[0], "pairs", public=False, odd="mumps", plan=plan)
    before = chain.ledger.history("labels")
    with pytest.raises(BadInput, match="no GPU"):
        finetune.run(spec.model_copy(update={"device": "gpu"}), context)
    assert chain.ledger.history("labels") == before
    answer = finetune.run(spec, context)
    labels = context.labels()
    for name in ("accuracy", "accuracy_low", "accuracy_high", "f1_macro", "f1/yes"):
        assert labels[name] == {OPERATOR}, name
    assert {r.dataset for r in context.releases} == {"notes", "labels"}
    assert not operator_only(context.releases)
    assert (answer.facts["head"], answer.facts["labels"]) == ("pairs", ["no", "yes"])
    assert "documents" not in answer.facts  # facts are published
    assert load(context.out).labels == ("no", "yes")
    assert "mumps" not in json.dumps(answer.facts) and "f1/mumps" not in labels


def test_interval_of_accuracy_is_resampled_by_document(chain):
    context, spec = pairing(chain, chain.trained[0], "open pairs", public=True, plan=None, epochs=1)
    answer = finetune.run(spec, context)
    counts = answer.facts["documents"]
    assert len(counts) == 30
    assert all(predicted == expected == 2 for _, predicted, expected in counts.values())
    values = {number.name: number for number in context.numbers}
    right = sum(correct for correct, _, _ in counts.values())
    assert values["accuracy"].value == right / 60
    assert values["accuracy"].label == DP
    counts_by_class = {n: values[f"test_labels/{n}"] for n in ("yes", "no")}
    assert [number.value for number in counts_by_class.values()] == [30, 30]
    assert {number.label for number in counts_by_class.values()} == {PUBLIC}
    assert values["accuracy_low"].value <= right / 60 <= values["accuracy_high"].value


def test_head_refuses_labels_of_another_kind(chain):
    context, spec = tuning(chain, chain.trained[0], "other", head="classes", class_names=("a", "b"))
    with pytest.raises(BadInput, match="labels are of entities, the head is for classes"):
        finetune.run(spec, context)


def phrasing(chain: Chain, **changes: Any) -> PhrasesSpec:
    config = {
        "declared_units": DECLARED, "phrases_epsilon": 30.0, "phrases_delta": 1e-5,
        "phrases_lengths": "2,3", "phrases_per_unit": 8,
    }  # fmt: skip
    inputs = {"corpus_uri": "corpus", "vocabulary_uri": "vocabulary", "canaries_uri": "canaries"}
    given = {"dataset": "notes", "holdout": 0.2, "seed": 1, "config": config, **inputs}
    return spec_of(PhrasesSpec, **(given | changes))


def test_shared_phrases_are_released_and_charged(chain):
    counts = phrases.read_phrases(chain.released.folder)
    assert {"pain in", "no fever"} <= set(counts[2]) and "pain in arm" in counts[3]
    assert not any("q" in phrase for by_phrase in counts.values() for phrase in by_phrase)
    # phrases also release the canary that every training unit contains
    assert "arm fever" in counts[2]
    context = chain.benches["phrases"]
    labels = context.labels()
    assert labels["phrases_released/2_words"] == labels["phrases_released/3_words"] == {DP}
    assert labels["phrases_epsilon"] == labels["phrases_delta"] == {PUBLIC}
    vocabulary_entry, phrases_entry = context.releases
    assert phrases_entry.dataset == "notes" and phrases_entry.epsilon <= 30.0
    assert phrases_entry.ledger_id != vocabulary_entry.ledger_id
    assert phrases_entry.ledger_id in {entry.id for entry in chain.ledger.history("notes")}


def test_held_out_units_contribute_no_phrases(chain):
    texts = {f"p{number}": "pain fever" for number in range(PATIENTS)}
    texts |= {patient: "two days" for patient in texts if is_held_out(patient, 0.5, seed_key(1))}
    corpus = corpus_of(chain.context("halves"), "notes", texts)
    context = chain.context("held out", corpus=corpus)
    phrases.run(phrasing(chain, holdout=0.5, canaries_uri=""), context)
    counts = phrases.read_phrases(context.out)
    assert "pain fever" in counts[2] and "two days" not in counts[2]


def writing(public: str = "", **config: Any) -> WrittenTextSpec:
    return spec_of(
        WrittenTextSpec,
        phrases_uri="phrases",
        vocabulary_uri="vocabulary",
        public_corpus_uri=public,
        config={"written_documents": 30, "written_words": 20, **config},
        seed=3,
    )


@pytest.mark.cases
def test_inputs_of_another_role_or_unit_are_refused_before_a_charge(chain, step, changes, message):
    if step == "written_text":
        spec: Any = writing(**changes)
    elif step == "pretrain":
        released = {} if "device" in changes else {"mode": "released", "plan": None}
        spec = chain.training(**released, **changes)
    elif "unit" in changes:
        spec = phrasing(chain, config=phrasing(chain).config.model_copy(update=changes))
    else:
        spec = phrasing(chain, **changes)
    context = chain.context(f"refused {changes}", phrases=chain.released)
    before = len(chain.ledger.history("notes"))
    with pytest.raises(BadInput, match=message):
        resolve_name(f"tasks.steps.{step}_step").run(spec, context)
    assert len(chain.ledger.history("notes")) == before and not list(context.out.iterdir())


def test_written_text_contains_released_words_and_inherits_their_cost(chain):
    released = chain.released
    spec = writing("public corpus", written_public_share=0.25)
    chain.inputs["written"] = chain.answer("written", written_text.run, spec)
    written = chain.inputs["written"]
    counts = phrases.read_phrases(released.folder)
    alone = vocabulary.released_words(chain.inputs["vocabulary"].folder)
    known = {
        word for by_phrase in counts.values() for phrase in by_phrase for word in phrase.split()
    }
    assert alone and alone.keys() <= known
    texts = {d.document_id: d.text for d in open_corpus(written.folder)}
    generated = [text for name, text in texts.items() if name.startswith("written-")]
    public = [text for name, text in texts.items() if name.startswith("public-")]
    assert len(generated) == 30 and {word for text in generated for word in text.split()} <= known
    assert set(public) == set(notes_of(PATIENTS).values())  # 200 words of 480, each once or not
    assert len(generated) + len(public) == len(texts)
    assert "qqqq" not in (written.folder / written_text.SAMPLE).read_text()
    rows = chain.cut().model_copy(
        update={"units": None, "corpus_uri": "written", "canaries_uri": "", "holdout": 0.0}
    )
    chain.inputs["written rows"] = chain.answer("written rows", token_store.run, rows)
    labels = chain.benches["written rows"].labels()
    assert labels == {"units": {DP}, "rows": {DP}, "tokens": {DP}}
    before = len(chain.ledger.history("notes"))
    context = chain.context("learned from phrases")
    training = chain.training(mode="released", plan=None, store_uri="written rows")
    model = as_input(pretrain.run(training, context), context, "pretrain")
    assert len(chain.ledger.history("notes")) == before
    paid = {release.ledger_id for release in released.result.releases}
    assert len(paid) == 2 and paid <= {release.ledger_id for release in model.result.releases}
    assert context.labels()["loss"] == {DP}
    statement = json.loads((context.out / "privacy_statement.json").read_text())
    assert paid <= set(statement["ledger_ids"]) and statement["private"]


def test_released_word_outside_every_phrase_is_written(chain, tmp_path):
    folder = tmp_path / "vocabulary"
    shutil.copytree(chain.inputs["vocabulary"].folder, folder)
    for file, word in ((vocabulary.WORDS, "unwritten"), (vocabulary.RELEASED, "elsewhere")):
        words = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(words | {word: 40}))
    more = replace(chain.inputs["vocabulary"], folder=folder)
    context = chain.context("a word by itself", phrases=chain.released, vocabulary=more)
    written_text.run(writing(), context)
    written = " ".join(d.text for d in open_corpus(context.out)).split()
    assert "elsewhere" in written and "unwritten" not in written


def test_damaged_phrases_are_refused_without_quoting_them(chain):
    folder = chain.context("damaged").out
    (folder / phrases.FILE).write_text('{"2": {"quoted words": "many"')
    with pytest.raises(BadInput, match="damaged") as caught:
        phrases.read_phrases(folder)
    assert "quoted" not in str(caught.value)
