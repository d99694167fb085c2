import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from dp_core.config.privacy import UnitConfig
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.privacy.ledger import Entry, Ledger, State
from dp_core.privacy.mechanisms import Gaussian, PrivacyUnit
from tasks.execution import contract
from tasks.execution.run_job import stops_on_signals
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import GiveBackSpec, RunContext
from tasks.releases.deployment_ledger import killed_runs, plans_given_back
from tasks.runtime.deployment import Deployment

RUN = "cli/dp_bert/now"
CONTEXT = RunContext(run_key=RUN, run_name="now", task="reserve")


def reservation(run: str = RUN) -> Entry:
    return Entry(
        "notes", PrivacyUnit.PATIENT, Gaussian(2.0), 1e-6, f"of {run}", f"{run} · notes", run
    )


def states(ledger: Ledger) -> list[State]:
    return [entry.state for entry in ledger.history("notes")]


@pytest.mark.parametrize(
    ("end", "state"),
    [("success", State.WITHDRAWN), ("error", State.WITHDRAWN), ("release", State.RESERVED)],
)
def test_plan_of_which_no_release_has_begun_is_withdrawn_at_the_end_of_its_run(
    deployment, ledger, end, state
):
    with suppress(BadInput), plans_given_back(deployment, RUN) as given_back:
        ledger.register_plan([reservation()])
        assert given_back == [] and killed_runs(deployment) == frozenset()
        if end == "error":
            raise BadInput("a column is missing")
        if state is State.RESERVED:
            ledger.reserve(reservation())
    assert len(given_back) == (state is State.WITHDRAWN) and states(ledger) == [state]
    assert list((deployment.home / "runs").iterdir()) == []


PROGRAM = """
import sys, time
from dp_core.privacy.ledger import (Ledger, Entry)
from dp_core.privacy.mechanisms import Gaussian, PrivacyUnit
from tasks.execution.run_job import stops_on_signals
from tasks.releases.deployment_ledger import plans_given_back
from tasks.runtime.deployment import Deployment

home, run = sys.argv[1:]
deployment = Deployment.from_environment({"CONFIDE_HOME": home})
with stops_on_signals(), plans_given_back(deployment, run):
    Ledger.open(deployment.ledger).register_plan([Entry(
        "notes", PrivacyUnit.PATIENT, Gaussian(2.0), 1e-6, f"of {run}", f"{run} · notes", run
    )])
    print("planned", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_plan_of_a_stopped_or_killed_run_does_not_hold_the_budget(deployment, ledger, end):
    words = [sys.executable, "-c", PROGRAM, str(deployment.home), "cli/other"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "planned\n"
        with plans_given_back(deployment, RUN):  # during another live run
            assert states(ledger) == [State.PLANNED]
        process.send_signal(end)
        assert process.wait(30) == (143 if end is signal.SIGTERM else -signal.SIGKILL)
    killed = frozenset({"cli/other"} if end is signal.SIGKILL else ())
    assert killed_runs(deployment) == killed
    assert states(ledger) == [State.PLANNED if killed else State.WITHDRAWN]
    with plans_given_back(deployment, RUN):  # the next run
        assert states(ledger) == [State.WITHDRAWN]
    assert killed_runs(deployment) == frozenset()


def test_job_of_another_thread_leaves_the_signals_unchanged():
    def handler() -> Any:
        with stops_on_signals():
            return signal.getsignal(signal.SIGTERM)

    ours = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler).result() is ours
    assert handler() is not ours


def test_last_step_of_a_dag_run_withdraws_its_plan(untracked, ledger):
    spec = GiveBackSpec(made_up=False)
    for number in (1, 2):  # the result of an earlier run must not be reused
        context = CONTEXT.model_copy(update={"run_key": f"dp_bert/{number}", "task": "give_back"})
        ledger.register_plan([reservation(context.run_key)])
        assert contract.run_step(spec, untracked, context).facts["given_back"] == 1
        assert states(ledger) == [State.WITHDRAWN] * number


def job(tmp_path: Path, **more: Any) -> JobSettings:
    return JobSettings.model_validate({
        "private_format": "jsonl", "private_path": str(tmp_path / "notes.jsonl"),
        "private_dataset": "notes", "public_format": "synthetic", "synthetic_patients": 50,
        "noise_multiplier": 4.0, "words_per_unit": 16, "epochs": 1.0, **more,
    })  # fmt: skip


def write_notes(tmp_path: Path) -> None:
    note = '{{"patient_id": "p{0}", "text": "pain in arm", "document_id": "{0}"}}\n'
    (tmp_path / "notes.jsonl").write_text("".join(note.format(n) for n in range(30)))


def run_until_reserved(settings: JobSettings, deployment: Deployment, **more: Any) -> None:
    """Run the steps of a job up to `reserve`; `more` replaces fields of that step's spec."""
    for task, spec in job_steps(settings).items():
        changed = spec.model_copy(update=more) if task == "reserve" else spec
        contract.run_step(changed, deployment, CONTEXT.model_copy(update={"task": task}))
        if task == "reserve":
            return


def test_wrong_column_name_plans_nothing(untracked, ledger, tmp_path):
    write_notes(tmp_path)
    wrong = job(tmp_path, private_columns="text:note,patient:patient_id")
    with pytest.raises(BadInput, match="a field is missing"):
        run_until_reserved(wrong, untracked)
    assert ledger.history("notes") == []


@pytest.mark.parametrize("unit", ["patient", "document", "example"])
def test_more_units_than_declared_are_refused_before_the_charge(untracked, ledger, tmp_path, unit):
    write_notes(tmp_path)
    settings = job(tmp_path)
    units = UnitConfig(declared_units=29, unit=unit, words_per_unit=16)
    with pytest.raises(BadInput, match="more units than the declared bound of 29") as refused:
        run_until_reserved(settings, untracked, units=units)
    assert "30" not in str(refused.value)
    assert ledger.history("notes") == []


@pytest.mark.parametrize("lacks", ["document_id", "patient_id"])
@pytest.mark.parametrize("kind", ["notes", "labels"])
def test_documents_are_protected_only_if_all_texts_have_the_same_ids(
    untracked, ledger, tmp_path, kind, lacks
):
    write_notes(tmp_path)
    texts = [{"text": "leg", "label": "y", "document_id": f"{n}", "patient_id": "p"} for n in "12"]
    del texts[1][lacks]
    with (file := tmp_path / f"{kind}.jsonl").open("a") as opened:
        opened.write("\n".join(map(json.dumps, texts)))
    settings, units = job(tmp_path), UnitConfig(declared_units=99, unit="document")
    if kind == "labels":
        settings, units = job(
            tmp_path, head="classes", class_names="y,n", entities_format="jsonl",
            entities_train=str(file), entities_test=str(file), entities_dataset="labels",
            entities_declared_units=99, finetune_privacy="dp", finetune_batch_size=9,
        ), UnitConfig(declared_units=99)  # fmt: skip
    with pytest.raises(PrivateTextRefusal, match="others lack it"):
        run_until_reserved(settings, untracked, units=units)
    assert ledger.history("notes") == []


PRIVATE = {
    "finetune_privacy": "dp", "entity_types": "problem", "finetune_batch_size": 5,
    "entities_declared_units": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("documents", "tag", "more", "reason"),
    [
        (3, "B-problem", {}, ""),
        (3, "O", {}, "no entity to learn"),
        (10, "B-problem", PRIVATE, ""),
        (11, "B-problem", PRIVATE, "the declared bound of 10"),
    ],
)
def test_unusable_private_labels_are_refused_before_the_charge(
    untracked, ledger, tmp_path, documents, tag, more, reason
):
    write_notes(tmp_path)
    (tmp_path / "labels").mkdir()
    for document in range(documents):
        (tmp_path / "labels" / f"{document}.tsv").write_text(f"Pain\t{tag}\n")
    paths = dict.fromkeys(("entities_train", "entities_test"), str(tmp_path / "labels"))
    settings = job(tmp_path, entities_format="columns", entities_dataset="labels", **paths, **more)
    with pytest.raises(BadInput, match=reason) if reason else nullcontext():
        run_until_reserved(settings, untracked)
    assert states(ledger) == [State.PLANNED] * 2 * (not reason)
