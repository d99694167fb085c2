import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_line import Confide, set_options
from spec_examples import run, spec_of
from step_outputs import output_folder

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol import CHECKOUT
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import CorpusSpec, EntitiesSpec, StepSpec
from tasks.releases.declarations import open_for_operator, open_source
from tasks.releases.deployment_ledger import IDENTITY
from tasks.results import STATEMENT_DATA
from tasks.runtime.deployment import Deployment
from tasks.steps import corpus_step as corpus
from tasks.storage.backends import local_path
from tasks.storage.store import Store

PRIVATE = "Quorvath was seen in clinic for a cough."
TABLES = {"entities_train": "labels.tsv", "entities_test": "labels.tsv"}
LABELS = "The O\npatient O\nhad O\nfever B-problem\n\n".replace(" ", "\t")


@pytest.fixture(autouse=True)
def home(deployment, at_home, as_in_a_process, no_mlflow) -> Deployment:
    Ledger.open(deployment.ledger).register_dataset("ward", PrivacyUnit.PATIENT, 8.0, 1e-5)
    return deployment


@dataclass
class Ward:
    """The operator's files, and the deployment that must refuse them as public text."""

    home: Deployment
    files: Path  # private notes and labels, and a public text
    confide: Confide
    capsys: pytest.CaptureFixture[str]

    @property
    def ledger(self) -> Ledger:
        return Ledger.open(self.home.ledger)

    def declare(self, *paths: Path | str) -> None:
        code, _, err = self.confide("ledger", "declare-public", *paths)
        assert (code, err) == (0, "")

    def published(self) -> list[Path]:
        """Return the files of the store, and copies of sources that a refused step left."""
        identity = local_path(self.home.open_store().location(IDENTITY))
        store = [f for f in (self.home.home / "store").rglob("*") if f.is_file() and f != identity]
        return store + [f for f in self.home.work.rglob("source/**/*") if f.is_file()]

    def refused(self, spec: StepSpec, why: str) -> None:
        """Run a step that must end with exit code 2 and one line, without charge or output."""
        before = self.published()
        self.capsys.readouterr()
        assert run(spec) == 2
        lines = [line for line in self.capsys.readouterr().err.splitlines() if "confide: " in line]
        assert len(lines) == 1 and why in lines[0], lines
        assert self.published() == before
        assert [e for name in self.ledger.datasets() for e in self.ledger.history(name)] == []


@pytest.fixture
def ward(
    home: Deployment, tmp_path: Path, confide: Confide, capsys: pytest.CaptureFixture[str]
) -> Ward:
    folder = tmp_path / "data"
    (folder / "wiki").mkdir(parents=True)
    (folder / "wiki" / "leaf.txt").write_text("A leaf is green.")
    row = {"text": PRIVATE, "patient_id": "p1", "document_id": "d1"}
    (folder / "ward.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "labels.tsv").write_text(LABELS)
    return Ward(home, folder, confide, capsys)


def corpus_spec(path: Path | str, **more: Any) -> CorpusSpec:
    public = {"role": "public", "dataset": "public", "format": "jsonl", "path": str(path)}
    return spec_of(CorpusSpec, **(public | more))


def private_spec(path: Path, dataset: str = "ward", **more: Any) -> CorpusSpec:
    return corpus_spec(path, role="private", dataset=dataset, **more)


def entities_spec(labels: Path, **more: Any) -> EntitiesSpec:
    paths = {"train_path": str(labels), "test_path": str(labels)}
    return spec_of(EntitiesSpec, **(paths | more))


def job(files: Path, **more: Any) -> JobSettings:
    source = {"private_format": "jsonl", "private_path": str(files / "ward.jsonl")}
    return JobSettings.model_validate({**source, "private_dataset": "ward", **more})


# --- the trigger form


@pytest.mark.parametrize("declared", [False, True])
def test_registered_private_data_set_cannot_be_used_as_public(ward, declared):
    if declared:
        ward.declare(ward.files / "ward.jsonl")
    steps = job_steps(job(ward.files, all_public=True, vocabulary_epsilon=99.0))
    why = "registered as private, but this run calls it public"
    ward.refused(steps["budget"], why)
    ward.refused(steps["private_corpus"], why)


def test_run_does_not_register_a_public_data_set(ward):
    ward.declare(ward.files / "ward.jsonl")
    settings = job(ward.files, all_public=True, private_dataset="mine")
    steps = job_steps(settings)
    ward.refused(steps["budget"], "confide ledger register mine --public")
    ward.refused(steps["private_corpus"], "confide ledger register mine --public")
    assert list(ward.ledger.datasets()) == ["ward"]
    assert ward.confide("ledger", "register", "mine", "--public")[0] == 0
    assert run(steps["budget"]) == 0
    assert run(steps["private_corpus"]) == 0


@pytest.mark.cases
def test_undeclared_public_source_is_refused_before_a_charge(ward, settings):
    assert run(private_spec(ward.files / "ward.jsonl")) == 0  # the file is known as private
    ward.ledger.register_made_up("declared-elsewhere")
    ward.declare(ward.files / "wiki")  # the declaration covers only this folder
    shutil.copy(ward.files / "ward.jsonl", ward.files / "copy.jsonl")
    (ward.files / "link.jsonl").symlink_to(ward.files / "ward.jsonl")
    (ward.files / "model").mkdir()
    (ward.files / "model" / STATEMENT_DATA).write_text("{}")
    paths = ("public_path", *TABLES, "public_model")
    changes = {n: str(ward.files / v) if n in paths else v for n, v in settings.items()}
    steps = job_steps(job(ward.files, **changes))
    ward.refused(steps["budget"], "confide ledger declare-public")
    field = next((n for n in paths if n in changes), "private_path")
    step = {
        "public_path": "public_corpus", "entities_train": "entities",
        "private_path": "private_corpus",
    }.get(field)  # fmt: skip
    if step:  # the step itself refuses too, even if the budget step is skipped
        ward.refused(steps[step], field)


@pytest.mark.parametrize("job", ["dp_bert", "dp_sweep"])
def test_undeclared_source_is_refused_before_a_run_starts(ward, job):
    words = set_options(public_format="text", public_path=ward.files / "wiki")
    err = ward.confide.refused("run", job, *words)
    assert "public_path" in err and f"confide ledger declare-public {ward.files / 'wiki'}" in err
    assert not (ward.home.home / "logs").exists()


# --- specs written by hand


def test_spec_cannot_declare_a_real_file_made_up(ward):
    notes, labels = ward.files / "ward.jsonl", ward.files / "labels.tsv"
    made_up = "synthetic-notes"
    for spec, why in (
        (corpus_spec(notes), "declare-public"),
        (corpus_spec(notes, made_up=True), "declare-public"),
        (corpus_spec(notes, made_up=True, dataset="ward"), "declare-public"),
        (corpus_spec(notes, role="private", made_up=True, dataset=made_up), "declare-public"),
        # The budget of the project's made-up notes is unlimited, so no other text may be charged to
        # it.
        (corpus_spec(notes, role="private", dataset=made_up), "the project's own"),
        (entities_spec(labels), "declare-public"),
        (entities_spec(labels, made_up=True), "declare-public"),
        (entities_spec(labels, public=False, made_up=True, dataset="ward"), "as private"),
        (entities_spec(labels, public=False, dataset=made_up), "the project's own"),
        (corpus_spec(notes, role="private", dataset="nobodys"), "no privacy budget"),
    ):
        ward.refused(spec, why)


def test_budget_spec_without_sources_does_not_permit_reading(ward):
    """A budget spec written by hand may omit a source, but the reading step checks it."""
    settings = job(ward.files, public_format="text", public_path=str(ward.files / "wiki"))
    steps = job_steps(settings)
    budget = steps["budget"]
    ward.refused(steps["public_corpus"], "declare-public")
    assert run(budget.model_copy(update={"reads": ()})) == 0
    assert run(steps["public_corpus"]) == 2


# --- declarations refer to content


def test_declared_content_is_read_from_any_path(ward, tmp_path):
    ward.declare(ward.files / "wiki")
    shutil.copytree(ward.files / "wiki", tmp_path / "moved" / "again")
    assert run(corpus_spec(tmp_path / "moved" / "again", format="text")) == 0


def test_file_changed_after_its_declaration_is_refused(ward):
    ward.declare(ward.files / "wiki")
    spec = corpus_spec(ward.files / "wiki", format="text")
    for other in (PRIVATE, "A leaf is brown."):  # including a text of the same length
        (ward.files / "wiki" / "leaf.txt").write_text(other)
        ward.refused(spec, "declare-public")
    (ward.files / "wiki" / "leaf.txt").write_text("A leaf is green.")
    (ward.files / "wiki" / "more.txt").symlink_to(ward.files / "ward.jsonl")
    ward.refused(spec, "a link, a pipe or a device")
    (ward.files / "wiki" / "more.txt").unlink()
    (ward.files / "wiki" / "more").symlink_to(ward.files)
    ward.refused(spec, "a link, a pipe or a device")


def test_file_changed_between_check_and_reading_is_not_read(ward, monkeypatch):
    ward.declare(ward.files / "wiki")
    read = corpus.read_source

    def swapped(*given: Any, **more: Any) -> Any:
        (ward.files / "wiki" / "leaf.txt").write_text(PRIVATE)
        return read(*given, **more)

    monkeypatch.setattr(corpus, "read_source", swapped)
    spec = corpus_spec(ward.files / "wiki", format="text")
    assert run(spec) == 0
    shards = output_folder(ward.home, spec.output).rglob("*.parquet")
    text = "".join(str(pq.read_table(shard).to_pylist()) for shard in shards)
    assert "leaf" in text and "Quorvath" not in text


def test_withdrawn_declaration_also_invalidates_finished_steps(ward):
    ward.declare(ward.files / "wiki")
    spec = corpus_spec(ward.files / "wiki", format="text")
    assert run(spec) == 0
    assert run(spec) == 0  # the second run reuses the result
    (shown,) = ward.confide.json("ledger", "declare-public")
    # the prefix could match another declaration
    ward.confide.refused("ledger", "withdraw-public", shown["digest"][:4])
    assert ward.confide("ledger", "withdraw-public", shown["digest"])[0] == 0
    ward.confide.refused("ledger", "withdraw-public", shown["digest"])
    ward.refused(spec, "declare-public")


def test_bucket_is_declared_by_its_content(ward, bucket, tmp_path):
    root = f"gs://{bucket}/{tmp_path.name}"
    Store(root, tmp_path / "cache").write(f"{root}/wiki/leaf.txt", b"A leaf is green.")
    spec = corpus_spec(f"{root}/wiki", format="text")
    assert run(spec) == 2
    ward.declare(f"{root}/wiki")
    assert run(spec) == 0
    assert run(corpus_spec(ward.files / "wiki", format="text")) == 0
    Store(root, tmp_path / "cache").write(f"{root}/wiki/leaf.txt", PRIVATE.encode())
    assert run(spec.model_copy(update={"data_version": "2"})) == 2
    assert list(ward.home.work.glob("asked-*")) == []


# --- declarations that the operator could make by mistake


def test_known_private_text_needs_an_explicit_option_to_be_declared(ward):
    notes = ward.files / "ward.jsonl"
    assert run(private_spec(notes)) == 0
    for path in (notes, ward.files):  # the folder contains the file
        err = ward.confide.refused("ledger", "declare-public", path)
        assert "private text of ward" in err and "--known-private" in err
    ward.refused(corpus_spec(notes), "declare-public")
    assert ward.confide("ledger", "declare-public", "--known-private", notes)[0] == 0
    assert run(corpus_spec(notes)) == 0


def test_declaration_is_invalid_after_the_files_are_read_as_private(ward):
    notes = ward.files / "ward.jsonl"
    ward.declare(notes)
    assert run(private_spec(notes)) == 0
    ward.refused(corpus_spec(notes), "read as private text of ward")
    assert "NO: declare" in ward.confide("ledger")[1].replace("\n", " ")
    assert ward.confide("ledger", "declare-public", "--known-private", notes)[0] == 0
    assert run(corpus_spec(notes)) == 0


def test_outputs_of_the_deployment_cannot_be_declared_public(ward):
    model = ward.home.home / "store" / "pretrain" / "0"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    for path in (model, ward.home.home, ward.home.home.parent):
        err = ward.confide.refused("ledger", "declare-public", path)
        assert "this deployment has made" in err
    shutil.copytree(model, ward.files / "model")  # as an export or a copy contains it
    (ward.files / "model" / STATEMENT_DATA).write_text("{}")
    err = ward.confide.refused("ledger", "declare-public", ward.files / "model")
    assert "a model that Confide made" in err
    assert ward.ledger.sources.public() == []


# --- one text, two budgets


def test_same_file_under_two_data_sets_is_warned_about(ward):
    ledger = ward.ledger
    ledger.register_dataset("letters", PrivacyUnit.PATIENT, 8.0, 1e-5)
    ledger.register_dataset("wing", PrivacyUnit.PATIENT, 8.0, 1e-5, shares_budget_with="ward")
    shutil.copy(ward.files / "ward.jsonl", ward.files / "letters.jsonl")
    assert run(private_spec(ward.files / "ward.jsonl")) == 0
    assert run(private_spec(ward.files / "ward.jsonl", "wing")) == 0
    assert "WARNING" not in "".join(ward.capsys.readouterr())
    assert "WARNING" not in ward.confide("ledger")[1]
    assert run(private_spec(ward.files / "letters.jsonl", "letters")) == 0
    output = "".join(ward.capsys.readouterr())
    assert "WARNING: the files of letters are those of ward, wing too" in output
    budgets = ward.confide.json("ledger")
    same = {name: budget["same_files_as"] for name, budget in budgets.items()}
    assert same == {"letters": ["ward", "wing"], "ward": ["letters"], "wing": ["letters"]}
    assert ward.confide("ledger")[1].count("WARNING") == 3


def test_register_command_refuses_contradictory_options(confide):
    assert confide("ledger", "register", "shown", "--public")[0] == 0
    full = ["--unit", "patient", "--epsilon", "1", "--delta", "1e-6"]
    for words, reason in (
        (["shown", "--public", "--epsilon", "1"], "a public data set has no budget"),
        (["ward", "--public"], "ward"),  # a private data set stays private
        (["other", "--unit", "patient"], "needs --unit, --epsilon and --delta"),
        (["Synthetic-Notes", *full], "made-up notes have that name"),
        (["shown", *full], "shown"),
    ):
        assert reason in confide.refused("ledger", "register", *words)


# --- a single function opens sources


def test_every_step_opens_its_sources_through_one_function():
    def files_with(word: str, folder: str) -> set[str]:
        files = (CHECKOUT / folder).rglob("*.py")
        return {file.stem for file in files if word in file.read_text()}

    assert files_with("stage_source(", "tasks") == {"declarations", "backends"}
    openers = {"checkpoint_step", "corpus_step", "entities_step", "pretrain_step"}
    assert files_with(open_source.__name__, "tasks/steps") == openers
    # The outputs of these steps are for the operator only.
    undeclared = files_with(open_for_operator.__name__, "tasks/steps")
    assert undeclared == {"membership_step", "privacy_audit_step"}
