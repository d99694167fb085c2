"""Steps without a tracker: contexts with given inputs, and a chain of steps that uses them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import spec_examples
from listed_metrics import labels_of_metric
from spec_examples import spec_of

from dp_core.audit.canaries import Canary
from dp_core.config.release import ReleaseRecord
from dp_core.data.corpus import Document, write_corpus
from dp_core.data.labelled_text import Sentence
from dp_core.labels import Labelled
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.context import StepContext, StepOutput
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.specs import FinetuneSpec, PretrainSpec, TokenStoreSpec, VocabularySpec
from tasks.results import Input
from tasks.runtime.deployment import Deployment
from tasks.steps import canaries_step as canaries
from tasks.steps import entities_step as entities
from tasks.steps import token_store_step as token_store
from tasks.steps import vocabulary_step as vocabulary
from tasks.storage.store import Store

PATIENTS, DECLARED, LENGTH = 60, 100, 16
WORDS = ("pain", "in", "arm", "since", "two", "days", "no", "fever")
PLAN = spec_examples.PLAN.model_copy(update={"declared_units": DECLARED})


class Bench(StepContext):
    """A step context with given inputs that records releases, metrics and progress."""

    def __init__(self, home: Deployment, inputs: dict[str, Input], name: str) -> None:
        self.deployment, self.inputs, self.made_up = home, inputs, False
        self.run = cast(Any, SimpleNamespace(run_key="run", task="step"))
        self.releases: list[ReleaseRecord] = []
        self.source_digests: dict[str, str] = {}
        self.tracker = cast(Any, SimpleNamespace(tag=lambda *_: None))
        self.spec_hash, self.durable = name, home.home / "context" / name
        self.out.mkdir(parents=True, exist_ok=True)
        self.store = Store(home.store, home.cache)
        self.numbers: list[MetricRecord] = []
        self.counted: list[int] = []
        self.progress = cast(Any, lambda done, total, note="": self.counted.append(done))

    def input(self, uri: str) -> Input:
        given = self.inputs[uri]
        self.descends_from(*given.result.releases)
        return given

    def measure(self, name: str, value: Labelled, step: int = 0) -> None:
        number = MetricRecord(name=name, value=float(value.value), label=value.label, step=step)
        assert number.label in labels_of_metric(name), "list it in tasks/tracking/metrics.toml"
        self.numbers.append(number)

    def measured(self) -> list[MetricRecord]:
        return list(self.numbers)

    def labels(self) -> dict[str, set[str]]:
        labels: dict[str, set[str]] = {}
        for number in self.numbers:
            labels.setdefault(number.name, set()).add(number.label)
        return labels


def as_input(answer: StepOutput, context: Bench, step: str) -> Input:
    result = StepResult(
        step=step,
        spec_hash=context.spec_hash,
        outputs={},
        metrics=[],
        releases=context.releases,
        facts=json.loads(json.dumps(answer.facts))
        | {"source_digests": dict(context.source_digests)},
    )
    return Input(result, context.out)


def corpus_of(context: Bench, dataset: str, notes: dict[str, str], role: str = "private") -> Input:
    """Return a corpus: patient -> note."""
    write_corpus((Document("1", patient, text) for patient, text in notes.items()), context.out)
    facts = {"dataset": dataset, "role": role, "digest": context.content_digest(context.out)}
    return as_input(StepOutput({}, facts=facts | {"all_name_a_patient": True}), context, "corpus")


def notes_of(patients: int) -> dict[str, str]:
    """Return notes that share their words; one note also has a word with a unique letter."""
    notes = {f"p{number}": " ".join(WORDS) for number in range(patients)}
    return notes | {"p0": " ".join(WORDS) + " qqqq"}


class Chain:
    """The steps of a job up to a pre-training, in one deployment."""

    def __init__(self, home: Path) -> None:
        self.home = Deployment.from_environment({"CONFIDE_HOME": str(home)})
        self.home.prepare()
        self.ledger = Ledger.open(self.home.ledger)
        self.ledger.register_dataset("notes", PrivacyUnit.PATIENT, 500.0, 1e-2)
        self.inputs: dict[str, Input] = {}
        self.benches: dict[str, Bench] = {}
        self.inputs["corpus"] = corpus_of(self.context("corpus"), "notes", notes_of(PATIENTS))
        public = corpus_of(self.context("public corpus"), "wiki", notes_of(PATIENTS), "public")
        self.inputs["public corpus"] = public
        self.inputs["vocabulary"] = self.answer("vocabulary", vocabulary.run, self.histogram())
        planted = self.context("canaries")
        drawn = [Canary("HS-1-0", "HS", 1.0, self.pieces("arm", "fever"))]
        drawn.append(Canary("HS-reference-0", "HS", 0.0, self.pieces("two", "days")))
        (planted.out / canaries.FILE).write_text(json.dumps([vars(c) for c in drawn]))
        facts = {"vocabulary_digest": self.inputs["vocabulary"].facts["digest"], "digest": "c"}
        self.inputs["canaries"] = as_input(StepOutput({}, facts=facts), planted, "canaries")
        self.inputs["rows"] = self.answer("rows", token_store.run, self.cut())
        public_rows = {"units": None, "corpus_uri": "public corpus", "canaries_uri": ""}
        self.inputs["public rows"] = self.answer(
            "public rows", token_store.run, self.cut().model_copy(update=public_rows)
        )

    def context(self, name: str, **inputs: Input) -> Bench:
        return Bench(self.home, self.inputs | inputs, name)

    def answer(self, name: str, run: Any, spec: Any) -> Input:
        """Run a step and return its output; keep its context in `benches`."""
        context = self.benches[name] = self.context(name)
        return as_input(run(spec, context), context, spec.step)

    def pieces(self, *words: str) -> tuple[int, ...]:
        known = (self.inputs["vocabulary"].folder / "vocab.txt").read_text().splitlines()
        return tuple(known.index(word) for word in words)

    def histogram(self, **changes: Any) -> VocabularySpec:
        config = {
            "vocabulary_source": "private", "declared_units": DECLARED, "words_per_unit": 16,
            "vocabulary_epsilon": 20.0, "vocabulary_delta": 1e-5, "vocabulary_size": 100,
        }  # fmt: skip
        return spec_of(VocabularySpec, config=config, **changes)

    def cut(self) -> TokenStoreSpec:
        units = {"declared_units": DECLARED}
        return spec_of(TokenStoreSpec, units=units, holdout=0.2)

    def training(self, **changes: Any) -> PretrainSpec:
        inputs = {"store_uri": "rows", "public_store_uri": "public rows", "plan": PLAN,
                  "private_store_uri": "rows", "vocabulary_uri": "vocabulary"}  # fmt: skip
        return spec_of(PretrainSpec, **(inputs | changes))


def with_facts(source: Input, **facts: Any) -> Input:
    return replace(source, result=source.result.model_copy(update={"facts": source.facts | facts}))


def tuning(chain: Chain, model: Input, name: str, **changes: Any) -> tuple[Bench, FinetuneSpec]:
    """Return the context of a private fine-tuning on twelve documents, and its spec."""
    labelled, context = chain.context(f"labels of {name}"), chain.context(name, model=model)
    for part in entities.PARTS:
        sentences = [
            Sentence(("pain", "in", "arm"), ("B-sign", "O", "O"), str(n)) for n in range(12)
        ]
        entities.write_items(sentences, labelled.out / f"{part}.jsonl")
    facts = {
        "head": "entities", "public": False, "dataset": "labels", "unit": "document",
        "all_name_a_patient": False,
    }  # fmt: skip
    facts["digest"] = labelled.content_digest(labelled.out)
    context.inputs["labels"] = as_input(StepOutput({}, facts=facts), labelled, "entities")
    chain.ledger.register_dataset("labels", PrivacyUnit.DOCUMENT, 500.0, 1e-2)
    spec = spec_of(
        FinetuneSpec, model_uri="model", entities_uri="labels",
        **{
            "plan": PLAN.model_copy(update={"dataset": "labels", "unit": "document"}),
            "entity_types": ("sign",), "epochs": 0, "batches": {"batch_size": 4}, **changes,
        },
    )  # fmt: skip
    return context, spec
