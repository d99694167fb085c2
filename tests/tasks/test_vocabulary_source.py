import itertools
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file
from step_outputs import output_folder

from dp_core.data.tokens import BERT, SPECIAL_TOKENS
from dp_core.errors import BadInput
from dp_core.models.config import BertConfig, Gpt2Config
from dp_core.models.hugging_face import WEIGHTS, load_model, load_with_vocabulary, save
from dp_core.models.parameters import fresh
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import MechanismEvent
from dp_core.privacy.statement import privacy_statement
from dp_core.vocabulary import subwords, tokenizer_files
from tasks.execution import contract
from tasks.protocol.job import budget_of_run, job_steps, point_steps
from tasks.protocol.least_privilege import Need
from tasks.protocol.messages import StepResult
from tasks.protocol.settings import MADE_UP, JobSettings
from tasks.protocol.specs import RunContext, VocabularySpec
from tasks.protocol.step_classes import spec_from_json
from tasks.protocol.sweep import SweepSettings
from tasks.releases.charge import planned_release
from tasks.releases.declarations import declare_public
from tasks.runtime.deployment import Deployment
from tasks.steps import vocabulary_step

SMALL: dict[str, Any] = {
    "declared_units": 80, "words_per_unit": 64, "vocabulary_epsilon": 50.0, "vocabulary_size": 400,
    "layers": 1, "hidden": 64, "sequence_length": 16, "batch_size": 20, "epochs": 0.3,
    "public_steps": 2, "public_batch_size": 8, "synthetic_patients": 60, "device": "cpu",
    "max_examples_per_unit": 2, "nonprivate": False, "canary_patterns": "HS",
    "canary_rates": "0.2", "canaries_per_group": 1, "finetune_epochs": 1,
    "finetune_batch_size": 512,
}  # fmt: skip


class Job:
    """A job in a deployment, of which a test runs some tasks."""

    def __init__(self, deployment: Deployment, **settings: Any) -> None:
        self.deployment = deployment
        self.settings = JobSettings.model_validate(SMALL | settings)
        self.steps = job_steps(self.settings)

    def run(self, *tasks: str) -> StepResult:
        for task in tasks:
            context = RunContext(run_key="sources", run_name="sources", task=task)
            result = contract.run_step(self.steps[task], self.deployment, context)
        return result

    def folder(self, task: str) -> Path:
        return output_folder(self.deployment, self.steps[task].output)

    def tokens(self) -> list[str]:
        ids = tokenizer_files.stored_ids(self.folder("vocabulary"))[0]
        return sorted(ids, key=ids.__getitem__)

    @property
    def charges(self) -> list[MechanismEvent]:
        ledger = Ledger.open(self.deployment.ledger)
        return [e.event for e in ledger.history(MADE_UP)] if MADE_UP in ledger.datasets() else []


def values(result: StepResult) -> dict[str, tuple[float, str]]:
    return {m.name: (m.value, m.label) for m in result.metrics}


@pytest.fixture
def bert(untracked: Deployment, tmp_path: Path) -> Path:
    """A public model with another order of tokens, declared public."""
    folder = tmp_path / "bert"
    tokens = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "patient"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,:;()%/-"
    tokens += [*letters, *("##" + c for c in letters)]
    config = BertConfig.of_size(vocab_size=len(tokens), hidden=64, layers=1, max_positions=16)
    save(fresh(config, 3), folder)
    (folder / "vocab.txt").write_text("".join(f"{t}\n" for t in tokens))
    declare_public(str(folder), untracked, known_private=False)
    return folder


# --- public tokens need no private text


@pytest.mark.cases
def test_public_sources_cost_nothing_and_need_no_private_corpus(source):
    job = JobSettings.model_validate(SMALL | {"vocabulary_source": source, "public_model": "/x"})
    spec = job_steps(job)["vocabulary"]
    charged = [c.step for c in budget_of_run(job).charged]
    if source in ("public", "checkpoint"):
        assert not spec.corpus_uri and spec.needs == {Need.CLUSTER}
        assert charged == ["pretrain"]
    else:
        assert spec.corpus_uri and spec.sources == ()
        assert spec.needs == {Need.CHARGING, Need.CLUSTER}
        assert charged == (["vocabulary"] * (source != "nonprivate")) + ["pretrain"]


def test_public_vocabulary_needs_no_ledger_seed_or_private_text(untracked):
    job = Job(untracked, vocabulary_source="public")
    result = job.run("public_corpus", "vocabulary")  # without a private corpus
    assert job.charges == []
    assert not untracked.seeds.exists() or not list(untracked.seeds.iterdir())
    assert result.releases == []
    assert values(result)["epsilon"] == (0, "public")
    assert values(result)["delta"] == (0, "public")
    assert "words_released" not in values(result)
    statement = privacy_statement(result.releases, made_up=False)
    assert "No private text was used to make it." in statement.words


@pytest.mark.cases
def test_vocabulary_spec_must_name_exactly_the_inputs_of_its_source(source, given, reason):
    body = {
        "made_up": False, "dataset": "notes", "seed": 1, "step": "vocabulary",
        "config": {"vocabulary_source": source}, **given,
    }  # fmt: skip
    with pytest.raises(ValidationError, match=reason):
        spec_from_json(json.dumps(body))


# --- private words are released only if public text lacks them


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_released_words_become_tokens(untracked, monkeypatch, kind):
    """Released words take precedence over merges of public words."""
    given: list[tuple[dict[str, int], list[str]]] = []
    learned = subwords.learn

    def learn(counts: Any, size: int, whole: Any, words: Any) -> Any:
        given.append((dict(counts), list(whole)))
        return learned(counts, size, whole, words)

    monkeypatch.setattr(vocabulary_step, "learn", learn)
    job = Job(untracked, model_kind=kind)
    result = job.run("private_corpus", "public_corpus", "vocabulary")
    (public, nothing), (joined, whole) = given
    assert nothing == [] and set(whole) == set(joined) and len(whole) == len(joined)
    released = [word for word in whole if joined[word] != public.get(word)]
    first = [word for word in released if len(word) > 1][:20]
    assert len(first) == 20 and set(first) <= set(job.tokens()) and len(job.tokens()) <= 400
    (event,) = job.charges
    assert event == planned_release(job.steps["vocabulary"]).event  # type: ignore[arg-type]
    assert values(result)["epsilon"][0] == pytest.approx(50, rel=0.01)
    words = BERT if kind == "bert" else tokenizer_files.GPT2
    known = subwords.whole_words(Counter(public), learned(Counter(public), 400, (), words))
    assert result.facts["words_known"] == len(known) and known.isdisjoint(released)
    if kind == "bert":
        assert len(known) > 50 and len(released) == result.facts["words_released"] > 0
    files = {"bert": {"vocab.txt"}, "gpt2": {"vocab.json", "merges.txt"}}[kind]
    written = {file.name for file in job.folder("vocabulary").iterdir()}
    assert written & {"vocab.txt", "vocab.json", "merges.txt"} == files


def test_changed_public_words_are_charged_as_a_new_release(untracked):
    """The same private corpus counted without other public words needs another noise seed."""
    job = Job(untracked)
    job.run("private_corpus", "public_corpus", "vocabulary")
    assert len(job.charges) == 1
    (job.folder("vocabulary") / "result.json").unlink()
    again = job.run("vocabulary")  # the repeated step finds the release and is not charged
    assert len(job.charges) == 1
    before = (job.folder("vocabulary") / "vocab.txt").read_text()
    # The spec is unchanged, but its public corpus is written again from other documents.
    other = Job(untracked, synthetic_patients=75)
    other.run("public_corpus")
    (job.folder("vocabulary") / "result.json").unlink()
    for file in job.folder("public_corpus").iterdir():
        file.unlink()
    for file in other.folder("public_corpus").iterdir():
        (job.folder("public_corpus") / file.name).write_bytes(file.read_bytes())
    job.run("vocabulary")
    assert len(job.charges) == 2, again.facts
    assert (job.folder("vocabulary") / "vocab.txt").read_text() != before


def test_altered_public_corpus_is_refused(untracked):
    job = Job(untracked, vocabulary_source="public")
    job.run("public_corpus")
    result = json.loads((job.folder("public_corpus") / "result.json").read_text())
    result["facts"]["digest"] = "0" * 64
    (job.folder("public_corpus") / "result.json").write_text(json.dumps(result))
    with pytest.raises(BadInput, match="not those that the step wrote"):
        job.run("vocabulary")


# --- tokens of a checkpoint


def test_checkpoint_keeps_its_tokens_and_embeddings(untracked, bert):
    job = Job(untracked, vocabulary_source="checkpoint+private", public_model=str(bert))
    result = job.run(
        "private_corpus", "public_corpus", "checkpoint", "vocabulary", "canaries",
        "private_store", "public_store",
    )  # fmt: skip
    tokens = job.tokens()
    theirs = (bert / "vocab.txt").read_text().split("\n")[:-1]
    kept = [t for t in tokens if t in theirs]
    assert tokens[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [t for t in theirs if t in kept[5:]] == kept[5:] and set(kept) == set(theirs)
    new = tokens[len(theirs) :]
    assert new and not set(new) & set(theirs)
    assert [e.title for e in job.charges] == ["word selection"]
    assert result.releases

    table = "embeddings/word"
    ours = load_with_vocabulary(bert, tokens, seed=1).parameters[table]
    old = load_model(bert).parameters[table]
    for token in (*kept, new[0]):
        pieces = tokenizer_files.of_checkpoint(bert).encode(token, add_special_tokens=False)
        positions = [theirs.index(t) for t in ([token] if token in theirs else pieces.tokens)]
        np.testing.assert_allclose(ours[tokens.index(token)], old[positions].mean(0), rtol=1e-6)


def test_checkpoint_baseline_is_evaluated_unchanged(untracked, bert):
    """The operator's scores on private rows do not make the model private."""
    changes = {"sweep_points": "noise_multiplier=1", "sweep_checkpoints": str(bert)}
    sweep = SweepSettings.model_validate(SMALL | changes)
    (point,) = (point for point in sweep.points() if point.baseline)
    job = Job(untracked)
    job.steps = dict(point_steps(sweep, point))
    result = job.run(
        "private_corpus", "public_corpus", "checkpoint", "vocabulary", "canaries",
        "private_store", "public_store", "pretraining", "exposure",
    )  # fmt: skip
    assert job.charges == [] and result.releases == []
    assert values(result)["epsilon"] == values(result)["delta"] == (0, "public")
    assert values(result)["exposure"][1] == "dp"
    ours, theirs = load_model(job.folder("pretraining")), load_model(bert)
    given = (bert / "vocab.txt").read_text().split()
    positions = [given.index(token) for token in job.tokens()]
    assert ours.parameters.keys() == theirs.parameters.keys()
    for name, weights in theirs.parameters.items():
        ordered = weights[positions] if weights.shape[0] == len(given) else weights
        np.testing.assert_array_equal(ours.parameters[name], ordered)
    job.steps = job_steps(SweepSettings.model_validate(SMALL | changes | {"layers": 2}))
    job.run(*itertools.takewhile(lambda task: task != "reserve", job.steps))
    with pytest.raises(BadInput, match=r"sweep_checkpoints: .*: layers is 1 in the folder, but 2"):
        job.run("reserve")
    assert job.charges == []


def test_changed_segmentation_is_charged_as_a_new_release(untracked, bert):
    """The same tokens with another normalization count other words, which need other noise."""
    job = Job(untracked, vocabulary_source="checkpoint+private", public_model=str(bert))
    job.run("private_corpus", "public_corpus", "checkpoint", "vocabulary")
    uncased, digest = job.tokens(), (job.folder("checkpoint") / "result.json").read_text()
    assert len(job.charges) == 1
    (bert / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    for task in ("checkpoint", "vocabulary"):
        (job.folder(task) / "result.json").unlink()
    with pytest.raises(BadInput, match="declare-public"):
        job.run("checkpoint")
    declare_public(str(bert), untracked, known_private=False)
    job.run("checkpoint", "vocabulary")
    assert (job.folder("checkpoint") / "result.json").read_text() != digest
    assert len(job.charges) == 2
    new = set(job.tokens()) - set(uncased)
    assert any(not word.islower() for word in new if word.isalpha())


@pytest.mark.cases
def test_unsuitable_checkpoint_is_refused_before_anything_is_charged(
    untracked, bert, changes, reason
):
    """The folder holds an encoder alone, and the settings state no shape."""
    stored = load_file(bert / WEIGHTS)
    save_file({n: a for n, a in stored.items() if n.startswith("bert.")}, bert / WEIGHTS)
    declare_public(str(bert), untracked, known_private=False)
    shape = {"layers": 0, "hidden": 0, "public_model": str(bert)}
    job = Job(untracked, **shape | changes)
    job.run(*itertools.takewhile(lambda task: task != "reserve", job.steps))
    with pytest.raises(BadInput, match=reason) if reason else nullcontext():
        job.run("reserve")
    assert bool(job.charges) == (not reason)  # plans of the releases


@pytest.mark.cases
def test_folder_that_is_no_model_is_refused_before_the_releases_are_registered(
    untracked, bert, file, content, reason
):
    times = 999 if file == "vocab.txt" else 1
    (bert / file).write_text(content * times) if content else (bert / file).unlink()
    declare_public(str(bert), untracked, known_private=False)
    job = Job(untracked, public_model=str(bert))
    with pytest.raises(BadInput, match=reason):
        job.run("checkpoint")
    assert list(job.steps).index("checkpoint") < list(job.steps).index("reserve")


def test_changed_public_model_needs_a_new_data_version_in_every_step_that_reads_it(untracked, bert):
    job = Job(untracked, vocabulary_source="checkpoint", public_model=str(bert))
    readers = ("checkpoint", "Public text only / pretraining")
    front = ("private_corpus", "public_corpus", "entities", "checkpoint", "reserve", "vocabulary")
    job.run("budget", *front, "canaries", "private_store", "public_store", readers[1])
    (bert / "vocab.txt").write_text((bert / "vocab.txt").read_text().replace("patient", "doctor"))
    declare_public(str(bert), untracked, known_private=False)
    for task in readers:
        with pytest.raises(BadInput, match="files have changed since"):
            job.run(task)
    again = Job(untracked, vocabulary_source="checkpoint", public_model=str(bert), data_version="2")
    for task in (*readers, "vocabulary"):
        assert again.steps[task].output != job.steps[task].output
    again.run("checkpoint", "public_corpus", "vocabulary")
    assert "doctor" in again.tokens()


# --- exact counts, for the operator


def test_all_results_after_exact_counts_are_for_the_operator(untracked):
    """Even a charged DP training yields a model without finite ε."""
    job = Job(untracked, vocabulary_source="nonprivate", model_kind="gpt2")
    spec = job.steps["vocabulary"]
    done = {task: job.run(task) for task in job.steps}
    first = done["vocabulary"]
    assert [r.epsilon for r in first.releases] == [float("inf")]
    plain = subwords.vocabulary_digest(tokenizer_files.load(job.folder("vocabulary")))
    assert first.facts["words_released"] == 0
    assert first.facts["digest"] != plain  # a keyed digest does not confirm guessed words
    first_tasks = ("budget", "private_corpus", "public_corpus", "reserve")
    after = [t for t in done if t not in first_tasks]
    assert {
        "canaries",
        "public_store",
        "Public text only / pretraining",
        "With DP / pretraining",
    } < set(after)
    for task in after:
        result = done[task]
        assert {m.label for m in result.metrics} == {"operator"}, task
        assert set(result.facts["artifacts"].values()) <= {"operator"}, task
        assert result.facts["model"] == "", task
        statement = privacy_statement(
            result.releases, made_up=False
        )  # also for the inputs of the report
        assert "Not private" in statement.words, task
    assert len(done["With DP / pretraining"].releases) == 2
    assert isinstance(spec, VocabularySpec) and spec.needs == {Need.CHARGING, Need.CLUSTER}
    assert sorted(e.is_unaccounted for e in job.charges) == [False, True]


def test_gpt2_checkpoint_keeps_its_merges(untracked, tmp_path):
    """The folder is as OpenAI publishes it: one special token, and text with case."""
    words = {"Fever": 9, " is": 8, " common": 7, " Pain": 6}
    learned = subwords.learn(words, 290, (), tokenizer_files.GPT2)
    tokenizer_files.save(learned, tmp_path / "ours")
    ours = tokenizer_files.stored_ids(tmp_path / "ours")[0]
    theirs = [t for t in sorted(ours, key=ours.__getitem__) if t not in SPECIAL_TOKENS]
    theirs.append("<|endoftext|>")
    folder = tmp_path / "gpt2"
    config = Gpt2Config.of_size(
        vocab_size=len(theirs), hidden=64, layers=1, max_positions=16,
        begin=len(theirs) - 1, end=len(theirs) - 1,
    )  # fmt: skip
    save(model := fresh(config, 1), folder)
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(theirs)}))
    (folder / "merges.txt").write_bytes((tmp_path / "ours" / "merges.txt").read_bytes())
    declare_public(str(folder), untracked, known_private=False)
    job = Job(
        untracked, model_kind="gpt2", vocabulary_source="checkpoint", public_model=str(folder)
    )
    result = job.run("checkpoint", "public_corpus", "vocabulary")
    assert job.charges == [] and result.releases == []
    assert result.facts["vocabulary_size"] == len(theirs) + 5
    assert job.tokens() == [*SPECIAL_TOKENS, *theirs]
    text = "Fever is common"
    assert (
        tokenizer_files.load(job.folder("vocabulary")).encode(text, add_special_tokens=False).tokens
        == learned.encode(text, add_special_tokens=False).tokens
    )
    start = load_with_vocabulary(folder, job.tokens(), 1).parameters["embeddings/word"]
    np.testing.assert_array_equal(start[5:], model.parameters["embeddings/word"])
    # The begin and end tokens are both initialised from the single special token.
    np.testing.assert_array_equal(start[2], start[3])
    np.testing.assert_array_equal(start[2], model.parameters["embeddings/word"][-1])
    more = Job(untracked, vocabulary_source="checkpoint+private", public_model=str(folder))
    with pytest.raises(BadInput, match="private words cannot be added to byte-level tokens"):
        more.run("private_corpus", "checkpoint", "vocabulary")
    assert job.charges == []
