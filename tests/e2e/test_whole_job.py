"""A tiny job on private text, run step by step, and a search of every file for its secrets."""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from listed_metrics import labels_of_metric
from mlflow.tracking import MlflowClient  # noqa: TID251 - reads the runs that tracking wrote
from small_job import folder_of, result_of

from dp_core.data.tokens import SPECIAL_TOKENS
from dp_core.models.config import BertConfig
from dp_core.models.hugging_face import save
from dp_core.models.parameters import fresh
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit, compose
from dp_core.privacy.seed_store import SeedStore
from tasks.commands.export_command import command as export
from tasks.demo_data.notes import notes
from tasks.execution import contract
from tasks.protocol.job import job_steps, names_of, point_and_task
from tasks.protocol.messages import StepResult
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import RunContext, StepSpec
from tasks.releases.declarations import declare_public
from tasks.results import STATEMENT_DATA, kept_folder
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow, SQLAlchemy and TensorFlow.

NAME, NUMBER, PATIENT = "Zyqvarnex Bolgathorpe", "998-87-66551", "patient-quorvath"
DOCUMENT, LABEL = "document-xanthorquil", "entiquorble"
TYPE = "typequandrix"  # an entity type that the settings do not name
SECRETS = (*NAME.split(), NUMBER, PATIENT, DOCUMENT, LABEL)
PRIVATE_STEPS = ("corpus", "entities")  # their outputs are private text in the private store
OPERATOR_METRICS = {
    "loss", "batch", "clipped", "units", "rows", "documents", "f1", "distinct_words"
}  # fmt: skip


@dataclass
class Finished:
    """The finished job and its deployment."""

    deployment: Deployment
    settings: JobSettings
    steps: dict[str, StepSpec]
    sources: Path
    printed: dict[str, str] = field(default_factory=dict)
    started: str = "12:34:56"

    def result(self, task: str) -> StepResult:
        return result_of(self.steps[task])

    def output(self, task: str) -> Path:
        return folder_of(self.steps[task])

    def files_left(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and content of every file of the deployment except seeds and keys."""
        for file in sorted(self.deployment.home.rglob("*")):
            secret = {self.deployment.seeds, self.deployment.keys} & set(file.parents)
            if file.is_file() and not secret:
                yield str(file.relative_to(self.deployment.home)), _content(file)

    def may_hold_text(self, name: str) -> bool:
        return any(name.startswith((f"store/{s}/", f"work/{s}-")) for s in PRIVATE_STEPS)


def _content(file: Path) -> bytes:
    if file.suffix == ".parquet":
        return json.dumps(pq.read_table(file).to_pylist()).encode()
    return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()


def _statement(model: Path) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads((model / STATEMENT_DATA).read_text())
    return statement


def _secrets_in(secrets: tuple[str, ...], content: bytes) -> list[str]:
    lower = content.lower()
    return [s for s in secrets if s.lower().encode() in lower]


def _write_sources(folder: Path) -> None:
    with (folder / "notes.jsonl").open("w") as stream:
        for number, note in enumerate(notes(60, seed=5)):
            text = note.text + (f" Seen with {NAME}, number {NUMBER}." if number == 7 else "")
            patient = PATIENT if note.patient_id.endswith("3") else note.patient_id
            document = DOCUMENT if number == 11 else note.document_id
            row = {"text": text, "document_id": document, "patient_id": patient}
            stream.write(json.dumps(row) + "\n")
    sentence = "The O\npatient O\nhad O\n{} B-problem\ntoday O\n\n"
    for part, words in (("train", ["fever", "cough", LABEL] * 6), ("test", ["fever", LABEL] * 3)):
        text = "".join(sentence.format(word) for word in words)
        text += f"Odd B-{TYPE}\nfinding O\n\n"
        (folder / f"{part}.tsv").write_text(text.replace(" ", "\t"))
    config = BertConfig.of_size(vocab_size=9, hidden=64, layers=1, max_positions=32)
    save(fresh(config, 3), folder / "bert")
    tokens = (*SPECIAL_TOKENS, "the", "patient", "fever", "a")
    (folder / "bert" / "vocab.txt").write_text("\n".join(tokens))


def _settings(folder: Path) -> JobSettings:
    return JobSettings(
        private_format="jsonl", private_path=str(folder / "notes.jsonl"), private_dataset="notes",
        entities_format="columns", entities_train=str(folder / "train.tsv"),
        entities_test=str(folder / "test.tsv"), synthetic_patients=50,
        entities_dataset="labels", entities_unit="example", finetune_privacy="dp",
        entities_declared_units=40, entity_types="problem", public_model=str(folder / "bert"),
        declared_units=100, words_per_unit=64, vocabulary_epsilon=50.0, vocabulary_size=400,
        sequence_length=32, batch_size=20, epochs=0.6, public_steps=3,
        kept_epochs="0.2", nonprivate_batch_size=20,
        public_batch_size=8, max_examples_per_unit=2, finetune_epochs=10, device="cpu",
        canary_patterns="HS", canary_rates="0.2", canaries_per_group=2,
        phrases_epsilon=60.0, phrases_lengths="2,3", phrases_per_unit=40, phrases_steps=3,
        nonprivate=True, holdout=0.05,
        written_documents=20, written_words=40, membership_units=20,
    )  # fmt: skip


def _run(finished: Finished, task: str, capture: pytest.CaptureFixture[str]) -> int:
    point, step_task = point_and_task(task)
    file = finished.deployment.home / f"{point}{step_task}.spec.json"
    file.write_text(finished.steps[task].model_dump_json())
    started = f"2026-11-22 {finished.started}"
    context = RunContext(
        run_key=f"e2e/{started}", run_name=f"dp_bert {started}", task=step_task, point=point
    )
    code = contract.main(finished.steps[task].step, str(file), context=context.model_dump_json())
    finished.printed[task] = "".join(capture.readouterr())
    return code


_DONE: list[Finished] = []


@pytest.fixture
def finished(
    e2e_home: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> Finished:
    """The job, run once for all tests of this file; the output of each step is kept per task."""
    if not _DONE:
        sources = tmp_path_factory.mktemp("sources")
        _write_sources(sources)
        deployment = Deployment.from_environment()
        deployment.prepare()
        ledger = Ledger.open(deployment.ledger)
        ledger.register_dataset("notes", PrivacyUnit.PATIENT, 500.0, 1e-4)
        ledger.register_dataset("labels", PrivacyUnit.EXAMPLE, 200.0, 1e-4)
        settings = _settings(sources)
        declare_public(settings.public_model, deployment, known_private=False)
        done = Finished(deployment, settings, job_steps(settings), sources)
        for task in done.steps:
            assert _run(done, task, capfd) == 0, done.printed[task]
        _DONE.append(done)
    return _DONE[0]


def test_private_text_stays_in_the_private_store(finished):
    for name, content in finished.files_left():
        assert _secrets_in(SECRETS, name.encode()) == [], "a file name holds a secret"
        if not finished.may_hold_text(name):
            assert _secrets_in(SECRETS, content) == [], name
    for task, output in finished.printed.items():
        assert _secrets_in(SECRETS, output.encode()) == [], task


def test_search_finds_the_secrets_in_the_private_store(finished):
    private = b"".join(c for n, c in finished.files_left() if finished.may_hold_text(n))
    assert _secrets_in(SECRETS, private) == list(SECRETS)
    assert finished.printed["With DP / pretraining"]
    assert any(name == "mlflow.db" for name, _ in finished.files_left())


def _forms(secret: bytes) -> Iterator[bytes]:
    """Yield the encodings of every piece of 12 bytes of a secret."""
    for start in range(len(secret) - 11):
        piece = secret[start : start + 12]
        yield piece
        yield piece.hex().encode()
        yield piece.hex().upper().encode()
        yield base64.b64encode(piece)  # one of the offsets is aligned with the encoded text
        yield base64.urlsafe_b64encode(piece)
        yield ", ".join(str(byte) for byte in piece).encode()  # a list of numbers
        yield repr(piece)[2:-1].encode()
    for number in (int.from_bytes(secret, "big"), int.from_bytes(secret, "little")):
        yield str(number).encode()


def _leaked(secrets: dict[str, bytes], content: bytes) -> set[str]:
    return {name for name, secret in secrets.items() if any(f in content for f in _forms(secret))}


def test_privacy_seeds_stay_in_the_seed_store(finished):
    kept = (finished.deployment.seeds, finished.deployment.keys)
    secrets: dict[str, bytes] = {}
    for file in (file for folder in kept for file in folder.glob("*.json")):
        store = SeedStore(file.parent)
        secrets[file.stem] = bytes.fromhex(json.loads(file.read_text())["secret"])
        for t in range(2):  # these keys reveal the sampled units, although not the noise
            key = store.get(file.stem).derive("sampling", "poisson", t)
            secrets[f"{file.stem}, batch {t}"] = key[:16]
    assert len(secrets) >= 9  # of the vocabulary, the DP training, and the key of content digests
    assert any(".log" in name or "result.json" in name for name, _ in finished.files_left())
    for name, content in finished.files_left():
        assert _leaked(secrets, name.encode() + content) == set(), name
    assert _leaked(secrets, "".join(finished.printed.values()).encode()) == set()


def test_search_finds_a_seed_in_every_encoding():
    seed = bytes(range(7, 39))
    for written in (
        b"\x00" + seed[3:20],
        b'{"seed": "' + seed.hex().encode(),
        base64.b64encode(b"ab" + seed),
        base64.b64encode(b"{'key': " + seed + b"}"),
        json.dumps(list(seed)).encode(),
        str(int.from_bytes(seed, "little")).encode(),
    ):
        assert _leaked({"seed": seed}, b"before " + written + b" after") == {"seed"}
    assert _leaked({"seed": seed}, hashlib.sha256(seed).hexdigest().encode()) == set()


EXPERIMENTS = ("confide", "confide-operator")


def _runs(finished: Finished, experiment: str) -> list[Any]:
    client = MlflowClient(finished.deployment.tracking)
    return list(client.search_runs([client.get_experiment_by_name(experiment).experiment_id]))


def _metrics_of_runs(finished: Finished) -> dict[str, dict[str, float]]:
    """Return the metrics of each run by `NAME in EXPERIMENT`; the job's run has the name `job`."""
    seen: dict[str, dict[str, float]] = {}
    for experiment in EXPERIMENTS:
        for run in _runs(finished, experiment):
            name, tags = str(run.info.run_name), run.data.tags
            if "confide.step" not in tags:  # the run of a model or of the job
                name = tags.get("confide.model", "job")
            seen[f"{name} in {experiment}"] = run.data.metrics
    return seen


def test_operator_metrics_are_absent_from_the_public_experiment(finished):
    names = {
        experiment: {metric for run in _runs(finished, experiment) for metric in run.data.metrics}
        for experiment in EXPERIMENTS
    }
    assert names["confide-operator"] >= OPERATOR_METRICS
    public_corpus = {"documents", "units", "rows", "loss", "batch"}  # of public text
    assert names["confide"] & OPERATOR_METRICS <= public_corpus
    for task in (
        "private_corpus",
        "private_store",
        "With DP / pretraining",
        "Without privacy / pretraining",
    ):
        shown = {m.name for m in finished.result(task).metrics if m.label != "operator"}
        assert shown & OPERATOR_METRICS == set()


def _downloaded(client: MlflowClient, run: str, folder: Path, of: str = "") -> list[Path]:
    client.download_artifacts(run, of, str(folder))
    return [file for file in folder.rglob("*") if file.is_file()]


def test_reference_lists_every_metric_with_its_label(finished):
    for task in finished.steps:
        for metric in finished.result(task).metrics:
            assert metric.label in labels_of_metric(metric.name), metric


def test_every_model_has_a_run_with_epsilon_f1_and_exposure(finished):
    """The operator's run shows ε next to F1 on private labels; the job's run shows the DP model."""
    seen = _metrics_of_runs(finished)
    total = {m.name: m.value for m in finished.result("With DP / exposure").metrics}
    for name in ("With DP", "job"):
        for_all, restricted = (seen[f"{name} in {experiment}"] for experiment in EXPERIMENTS)
        for cost in ("epsilon", "delta"):
            assert restricted[cost] == for_all[cost] == pytest.approx(total[cost], rel=1e-3)
        assert for_all["exposure"] == pytest.approx(total["exposure"], rel=1e-3)
        assert "f1" in restricted and "f1" not in for_all  # the labels are private
    assert seen["Public text only in confide"]["epsilon"] == pytest.approx(
        {m.name: m.value for m in finished.result("Public text only / pretraining").metrics}[
            "epsilon"
        ],
        rel=1e-3,
    )
    assert "exposure" in seen["Without privacy in confide-operator"]
    assert not seen.get("Without privacy in confide", {}).keys() & {"epsilon", "exposure"}


def test_registered_model_contains_only_the_files_of_the_model(finished, tmp_path):
    client = MlflowClient(finished.deployment.tracking)
    (version,) = client.search_model_versions("name = 'confide-notes'")
    shown = _downloaded(client, version.run_id, tmp_path, "model")  # of the report's run
    files = {file.name: file for file in shown}
    assert version.tags["confide.verdict"] == "not audited"
    assert client.get_registered_model("confide-notes").aliases == {}
    assert set(files) == {
        "PRIVACY.md", "config.json", "model.safetensors", "privacy_statement.json",
        "tokenizer.json", "tokenizer_config.json", "vocab.txt",
    }  # fmt: skip
    output = finished.output("With DP / pretraining")
    assert {f.name for f in output.iterdir()} - set(files) == {
        "result.json",
        "checksums.json",
        "after",
    }
    assert all(f.read_bytes() == (output / name).read_bytes() for name, f in files.items())
    for task in ("With DP / pretraining", "With DP / finetuning"):  # copies have the same files
        folder = tmp_path / point_and_task(task)[1]
        words = [str(folder), "--uri", finished.steps[task].output]
        assert CliRunner().invoke(export, words).exit_code == 0
        assert {f.name for f in folder.iterdir()} == {*files, "README.md"}
    copied = {f.name: f.read_bytes() for f in (tmp_path / "pretraining").iterdir()}
    assert copied.pop("README.md").startswith(b"---")  # the model card
    assert copied == {name: (output / name).read_bytes() for name in copied}


def test_public_experiment_contains_no_private_label_path_or_time_of_day(finished, tmp_path):
    """Only the entity type named in the settings is scored, and only for the operator."""
    hidden = (TYPE, "notes.jsonl", "train.tsv", "test.tsv")
    client = MlflowClient(finished.deployment.tracking)
    named = [
        any("f1/problem" in run.data.metrics for run in _runs(finished, experiment))
        for experiment in EXPERIMENTS
    ]
    assert named == [False, True]
    for run in _runs(finished, "confide"):
        for file in _downloaded(client, run.info.run_id, tmp_path / run.info.run_id):
            assert _secrets_in(hidden, _content(file)) == [], file.name
        published = json.dumps([run.data.params, run.data.tags, run.info.run_name])
        assert _secrets_in((*hidden, finished.started), published.encode()) == []
    page = (finished.output("report") / "report" / "report.html").read_text()
    assert TYPE not in page
    assert finished.result("report").facts["created"] not in page
    operators = (finished.output("report") / "operator_report" / "report.html").read_text()
    assert ">problem<" in operators and TYPE not in operators


def test_progress_on_private_labels_hides_their_number(finished):
    for task in ("Public text only / finetuning", "Without privacy / finetuning"):
        progress = re.findall(r"finetuning: (\d+)/(\d+)", finished.printed[task])
        epochs = finished.settings.finetune_epochs
        assert progress and {(int(done) <= epochs, int(of)) for done, of in progress} == {
            (True, epochs)
        }


def test_total_epsilon_composes_all_releases_of_the_model(finished):
    vocabulary, dp = finished.result("vocabulary"), finished.result("With DP / pretraining")
    assert [r.ledger_id for r in dp.releases][:1] == [r.ledger_id for r in vocabulary.releases]
    assert len(dp.releases) == 3  # vocabulary, phrases, training
    events = [MechanismEvent.from_json(r.event) for r in dp.releases]
    total = epsilon_pld(compose(*events), sum(r.delta for r in dp.releases))
    headline = {m.name: m.value for m in finished.result("report").metrics}
    assert headline["epsilon"] == pytest.approx(total)
    assert total < sum(r.epsilon for r in dp.releases)


def test_ledger_holds_every_release_and_a_rerun_adds_none(finished, capfd):
    ledger = Ledger.open(finished.deployment.ledger)
    before = [(e.id, e.state, e.accounted) for e in ledger.history("notes")]
    # One plan of vocabulary, phrases and DP training, and one unaccounted use of the operator.
    assert [(state, accounted) for _, state, accounted in before] == [
        *[("settled", True)] * 3,
        ("settled", False),
    ]
    assert [e.whole_plan for e in ledger.history("notes")] == [True, True, True, False]
    # For the labels: a private fine-tuning of each DP model, and four unaccounted uses of the
    # operator.
    labels = ledger.history("labels")
    assert [(e.state, e.accounted) for e in labels] == [
        *[("settled", True)] * 2,
        *[("settled", False)] * 4,
    ]
    assert {e.unit for e in labels} == {PrivacyUnit.EXAMPLE}
    # the recipe for a quarter of 40 labelled sentences
    plans = [entry.event.to_json() for entry in labels if entry.accounted]
    assert [plan["phases"] for plan in plans] == [[[0.25, 2.75, 40]]] * 2
    for task in ("vocabulary", "phrases", "With DP / pretraining", "Without privacy / pretraining"):
        assert _run(finished, task, capfd) == 0
        assert "done before" in finished.printed[task]
    assert [(e.id, e.state, e.accounted) for e in ledger.history("notes")] == before


def test_model_of_an_earlier_epoch_has_the_epsilon_of_all_epochs(finished):
    """Statements, MLflow and the report state the ε that the ledger charged."""
    ledger = Ledger.open(finished.deployment.ledger)
    charged = [entry for entry in ledger.history("notes") if entry.accounted]
    training = charged[-1].event.to_json()
    # one charge for all updates up to the last
    assert sum(steps for _, _, steps in training["phases"]) == 3
    total = pytest.approx(
        epsilon_pld(compose(*(e.event for e in charged)), sum(e.delta for e in charged))
    )
    earlier, red = (point for point in finished.settings.points() if point.is_on_the_way)
    folder = finished.output("With DP / pretraining")
    tuned = finished.output(names_of(earlier)["finetuning"])
    for model in (folder, folder / kept_folder(1), tuned, finished.output("With DP / finetuning")):
        statement = _statement(model)
        assert statement["epsilon"] == total and statement["dataset"] == "notes"
        assert statement["released_after_updates"] == [1, 3]
        assert "1 and 3 updates" in (model / "PRIVACY.md").read_text()

    metrics_of = _metrics_of_runs(finished)
    for experiment in EXPERIMENTS:
        metrics = metrics_of[f"{earlier.name} in {experiment}"]
        rounded = pytest.approx(total.expected, rel=1e-3)
        assert metrics["epsilon"] == metrics["epsilon/notes"] == rounded
        costs = {n for n in metrics if n.startswith("epsilon")}
        assert costs == {"epsilon", "epsilon/notes", "epsilon/labels"}
        delta = sum(entry.delta for entry in charged)
        assert metrics["delta"] == pytest.approx(delta, rel=1e-3)
    assert "exposure" in metrics_of[f"{earlier.name} in confide"]
    assert "f1" in metrics_of[f"{earlier.name} in confide-operator"]  # the labels are private
    assert "f1" not in metrics_of[f"{earlier.name} in confide"]
    assert not metrics_of.get(f"{red.name} in confide", {}).keys() & {"epsilon", "exposure", "f1"}

    report = finished.output("report")
    kept, published = (
        json.loads((report / edition / "tables.json").read_text())["by_epoch"]
        for edition in ("operator_report", "report")
    )
    titles = [column["name"] for column in kept["headers"]]
    assert titles[-2:] == ["Epoch 0.2", "Epoch 0.6"]
    mine = [row for row in kept["rows"] if row[0]["text"] == "With DP"]
    assert [row[1]["text"] for row in mine] == ["Entity F1", "Exposure", "Exposure"]
    assert all(row[titles.index("ε")]["value"] == total for row in mine)
    assert all(isinstance(cell["value"], float) for row in mine for cell in row[-2:])
    for row in published["rows"]:
        hidden = row[1]["text"] == "Entity F1" or row[0]["text"] == "Without privacy"
        assert [bool(cell.get("withheld")) for cell in row[-2:]] == [hidden] * 2, row[:2]


def test_every_exported_model_states_its_guarantee(finished):
    ids = [r.ledger_id for r in finished.result("With DP / pretraining").releases]
    statement = _statement(finished.output("With DP / pretraining"))
    assert (statement["private"], statement["one_plan"]) == (True, True)
    assert statement["ledger_ids"] == ids
    words = (finished.output("With DP / pretraining") / "PRIVACY.md").read_text()
    assert all(entry in words for entry in ids)
    # A model that was fine-tuned privately on labels of another data set has two separate
    # guarantees.
    statement = _statement(finished.output("With DP / finetuning"))
    assert (statement["dataset"], statement["private"]) == ("notes", True)
    assert [(s["dataset"], s["unit"]) for s in statement["others"]] == [("labels", "example")]
    assert len(statement["ledger_ids"]) == 4
    # Models without privacy, or fine-tuned on private labels without privacy, are for the operator
    # only.
    operator_only = (
        "Without privacy / pretraining",
        "Without privacy / finetuning",
        "Public text only / finetuning",
    )
    for task in (*operator_only, "Released phrases only / finetuning"):
        assert _statement(finished.output(task))["private"] is False
        assert "Not private" in (finished.output(task) / "PRIVACY.md").read_text()


def _refused(
    finished: Finished, changes: dict[str, object], task: str, capfd: pytest.CaptureFixture[str]
) -> str:
    """Run a task of the same job with other settings; return its refusal."""
    changed = finished.settings.model_copy(update=changes)
    steps = job_steps(changed)
    failing = Finished(finished.deployment, changed, steps, finished.sources)
    if task == "vocabulary":
        assert _run(failing, "private_corpus", capfd) == 0
    assert _run(failing, task, capfd) == 2
    return failing.printed[task]


def test_error_messages_quote_no_private_text(finished, capfd):
    broken = finished.sources / "broken.jsonl"
    broken.write_text(f'{{"text": "{NAME}", "patient_id": [\n{{"text": {NUMBER} {NAME}\n' * 20)
    named = finished.sources / "named"
    (named / PATIENT).mkdir(parents=True)
    (named / PATIENT / "note.txt").write_bytes(b"\xff\xfe\xff")
    unreadable = _refused(finished, {"private_path": str(broken)}, "private_corpus", capfd)
    as_text: dict[str, object] = {"private_format": "text", "private_path": str(named)}
    not_text = _refused(finished, as_text, "private_corpus", capfd)
    few: dict[str, object] = {
        "declared_units": 20, "vocabulary_epsilon": 49.0, "kept_epochs": ""
    }  # fmt: skip
    too_many = _refused(finished, few, "vocabulary", capfd)
    for message in (unreadable, not_text, too_many):
        assert len(message.strip().splitlines()) == 1
        assert _secrets_in(SECRETS, message.encode()) == []
    list_file = not_text.partition("Which ones: ")[2].strip()
    assert PATIENT in Path(list_file).read_text()
