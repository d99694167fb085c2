"""What each step's process, container and pod is given: nothing that it does not need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from kubernetes.client import ApiClient

from dags.launcher import docker as containers
from dags.launcher.docker import DockerStep
from dags.launcher.kubernetes import KubernetesStep, granted, template
from dags.launcher.process import _environment
from dags.launcher.work import Work
from tasks.protocol import (
    JobSettings,
    Need,
    RunContext,
    StepSpec,
    SweepSettings,
    dp_bert_steps,
    needs,
    sweep_report,
)
from tasks.protocol.least_privilege import _NEEDS, WITHHELD
from tasks.protocol.specs import _ADAPTER

PASSWORD, READER = "hunter2", "looks-only"
LEDGER = f"postgresql://ledger:{PASSWORD}@db/ledger"
LEDGER_READER = f"postgresql://ledger_reader:{READER}@db/ledger"
SEEDS, DATA = "confide_seeds", "/srv/notes"
KINDS = sorted(_NEEDS)
# Every step of a job that reads everything from outside: a public model among it.
SETTINGS = JobSettings(
    private_format="text",
    private_path="/data/notes",
    private_dataset="ward-notes",
    public_format="text",
    public_path="/data/wiki",
    entities_format="columns",
    entities_train="/data/train",
    entities_test="/data/test",
    public_model="/data/model",
)


def job(settings: JobSettings = SETTINGS) -> dict[str, StepSpec]:
    steps: dict[str, StepSpec] = dict(dp_bert_steps(settings, "gs://bucket/store"))
    return steps


def reads_from_outside(spec: StepSpec) -> bool:
    """Whether a spec names a file that is no output of an earlier step."""
    named = spec.model_dump(include={"path", "train_path", "test_path", "public_model"})
    return any(named.values())


def work(spec: StepSpec, task: str = "task") -> Work:
    return Work(spec, RunContext(run_key="dp_bert/1", run_name="a run", task=task))


@pytest.fixture(autouse=True)
def _deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "CONFIDE_LEDGER": LEDGER,
        "CONFIDE_LEDGER_READER": LEDGER_READER,
        "CONFIDE_STORE": "gs://bucket/store",
        "CONFIDE_DOCKER_MOUNTS": "home:/var/lib/confide confide_keys:/var/lib/confide/keys:ro",
        "CONFIDE_DOCKER_SEEDS": f"{SEEDS}:/var/lib/confide-seeds",
        "CONFIDE_DOCKER_SOURCES": f"{DATA}:/data",
        "AIRFLOW__CORE__FERNET_KEY": "a key",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CONFIDE_POD_TEMPLATES", raising=False)


# --- the table


def test_the_table_knows_every_step_and_no_other() -> None:
    kinds = {kind.model_fields["step"].default for kind in _specs()}
    assert set(_NEEDS) == kinds


def _specs() -> Iterator[Any]:
    union = _ADAPTER._type.__origin__  # type: ignore[union-attr]
    yield from union.__args__


def test_who_reads_files_from_outside_holds_no_seed_and_no_password() -> None:
    readers = {name: needs(spec) for name, spec in job().items() if reads_from_outside(spec)}
    assert set(readers) == {"private_corpus", "public_corpus", "entities", "public_pretraining"}
    for name, held in readers.items():
        assert Need.SOURCES in held, name
        assert Need.CHARGING not in held, name


@pytest.mark.parametrize("mode", ["dp", "nonprivate"])
def test_no_hand_made_spec_has_seeds_and_files_from_outside(mode: str) -> None:
    body = job()["dp_pretraining"].model_dump() | {"mode": mode, "public_model": "/data/model"}
    with pytest.raises(ValueError, match="public_model"):
        _ADAPTER.validate_python(body)


def test_who_reads_no_file_from_outside_is_not_shown_any() -> None:
    """But the first step: it takes digests of what the run reads, and parses nothing."""
    assert needs(job()["budget"]) == {Need.SOURCES, Need.CHARGING}
    others = [
        spec for spec in job().values() if not reads_from_outside(spec) and spec.step != "budget"
    ]
    assert len(others) > 8
    assert not [spec.step for spec in others if Need.SOURCES in needs(spec)]


# --- each launcher


def started(spec: StepSpec, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return how the docker launcher asks for the step's container."""
    asked: list[dict[str, Any]] = []

    def create(**options: Any) -> dict[str, str]:
        asked.append(options)
        return {"Id": "x"}

    engine = SimpleNamespace(create_container=create, create_host_config=lambda **o: o)
    monkeypatch.setattr(DockerStep, "cli", engine)
    step = DockerStep(task_id="vocabulary", plan=lambda *_: {})
    step.labels = {}
    step._create(work(spec))
    return asked[0]


def pod(spec: StepSpec) -> dict[str, Any]:
    step = KubernetesStep(task_id="vocabulary", plan=lambda *_: {})
    step.describe(work(spec))
    manifest: dict[str, Any] = ApiClient().sanitize_for_serialization(
        step.build_pod_request_obj(dry_run=True)
    )
    return manifest["spec"]  # type: ignore[no-any-return]


def told(name: str, spec: StepSpec, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    if name == "process":
        return _environment(work(spec), Path("/progress"))
    if name == "docker":
        return dict(started(spec, monkeypatch)["environment"])
    return {e["name"]: e["value"] for e in pod(spec)["containers"][0]["env"] if "value" in e}


@pytest.mark.parametrize("launcher", ["process", "docker", "kubernetes"])
@pytest.mark.parametrize("task", sorted(job()))
def test_what_a_step_is_told(launcher: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job()[task]
    held, variables = needs(spec), told(launcher, spec, monkeypatch)
    assert not [name for name in variables if name.startswith("AIRFLOW")]
    assert "CONFIDE_LEDGER_READER" not in variables
    if Need.CHARGING in held:
        assert variables.get("CONFIDE_SEEDS", "") != WITHHELD
        if launcher != "kubernetes":  # there, by the name of a secret
            assert variables["CONFIDE_LEDGER"] == LEDGER
        return
    assert PASSWORD not in str(variables)
    assert variables["CONFIDE_SEEDS"] == WITHHELD
    if Need.LEDGER not in held:
        assert variables["CONFIDE_LEDGER"] == f"sqlite:///{WITHHELD}"
    elif launcher != "kubernetes":
        assert variables["CONFIDE_LEDGER"] == LEDGER_READER


@pytest.mark.parametrize("task", sorted(job()))
def test_what_a_container_sees_of_the_disk(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job()[task]
    mounts = started(spec, monkeypatch)["host_config"]["mounts"]
    by_source = {mount["Source"]: mount for mount in mounts}
    assert (SEEDS in by_source) == (Need.CHARGING in needs(spec))
    assert (DATA in by_source) == (Need.SOURCES in needs(spec))
    assert by_source["confide_keys"]["ReadOnly"]
    if DATA in by_source:
        assert by_source[DATA]["ReadOnly"]  # whatever the word said


@pytest.mark.parametrize("task", sorted(job()))
def test_what_a_pod_is_given(task: str) -> None:
    spec = job()[task]
    held, described = needs(spec), pod(spec)
    (container,) = described["containers"]
    secrets = {source["secretRef"]["name"] for source in container["envFrom"]}
    assert ("confide-ledger" in secrets) == (Need.CHARGING in held)
    assert ("confide-ledger-reader" in secrets) == (Need.LEDGER in held)
    seeds = "confide-seeds" in str(described["volumes"])
    assert seeds == ("/var/lib/confide-seeds" in str(container["volumeMounts"]))
    assert seeds == (Need.CHARGING in held)


@pytest.mark.parametrize("report", ["job", "sweep"])
def test_a_report_may_look_at_the_account_and_has_nothing_else(
    monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    spec = job()["report"] if report == "job" else sweep_report(SweepSettings(), "gs://b/store")
    monkeypatch.setenv("CONFIDE_STORE", spec.root)
    options = started(spec, monkeypatch)
    assert READER in str(options)
    assert PASSWORD not in str(options)
    assert SEEDS not in str(options)


def test_no_container_is_started_with_the_ledger_s_password_for_want_of_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CONFIDE_LEDGER_READER")
    with pytest.raises(AirflowFailException, match="CONFIDE_LEDGER_READER is not"):
        started(job()["private_corpus"], monkeypatch)
    started(job()["vocabulary"], monkeypatch)  # whose step charges


def test_seeds_in_the_template_of_every_pod_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = template("cpu")
    own["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] = containers.SEEDS_AT
    (tmp_path / "cpu.yaml").write_text(str(own))  # of which YAML is a superset
    monkeypatch.setenv("CONFIDE_POD_TEMPLATES", str(tmp_path))
    with pytest.raises(AirflowFailException, match=r"granted\.yaml"):
        template("cpu")


def test_a_need_that_nobody_described_is_no_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pod_template = template("cpu")
    (tmp_path / "granted.yaml").write_text("sources: {}\n")
    monkeypatch.setenv("CONFIDE_POD_TEMPLATES", str(tmp_path))
    with pytest.raises(AirflowFailException, match="charging"):
        granted(pod_template, {Need.CHARGING})
