"""Steps as pods: what is asked of the cluster, and what an exit code means to Airflow."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from kubernetes.client import ApiClient, models

from dags.launcher.kubernetes import KubernetesStep, template
from dags.launcher.work import Work
from tasks.protocol import JobSettings, RunContext, dp_bert_steps, spec_from_json

ROOT = "gs://bucket/store"
SECRET = "postgresql://ledger:hunter2@db/ledger"
TODAY = datetime(2026, 1, 1, tzinfo=UTC)
PENDING = models.V1Pod(
    metadata=models.V1ObjectMeta(name="p", namespace="confide"),
    status=models.V1PodStatus(phase="Pending"),
)


def unknown_fields(value: Any, kind: str, place: str) -> list[str]:
    """Return the places at which a manifest departs from the API's own types."""
    if kind.startswith("list["):
        if not isinstance(value, list):
            return [f"{place}: not a list"]
        return [
            f for i, v in enumerate(value) for f in unknown_fields(v, kind[5:-1], f"{place}[{i}]")
        ]
    if matched := re.fullmatch(r"dict[(\[](\w+), (.+)[)\]]", kind):
        if not isinstance(value, Mapping):
            return [f"{place}: not a mapping"]
        return [f for k, v in value.items() for f in unknown_fields(v, matched[2], f"{place}.{k}")]
    if hasattr(models, kind):
        model = getattr(models, kind)
        if not isinstance(value, Mapping):
            return [f"{place}: not a {kind}"]
        names = {json: attribute for attribute, json in model.attribute_map.items()}
        found = [f"{place}.{key}: {kind} has no such field" for key in value if key not in names]
        for key in value.keys() & names.keys():
            found += unknown_fields(value[key], model.openapi_types[names[key]], f"{place}.{key}")
        return found
    python = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}
    right = isinstance(value, python[kind]) and (kind != "int" or not isinstance(value, bool))
    return [] if right else [f"{place}: not of type {kind}"]


def work(device: str) -> Work:
    spec = dp_bert_steps(JobSettings(device=device), ROOT)["dp_pretraining"]
    context = RunContext(run_key="dp_bert/manual", run_name="a run", task="dp_pretraining")
    return Work(spec=spec, context=context)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> KubernetesStep:
    monkeypatch.setenv("CONFIDE_TASK_IMAGE", "registry.example/confide-task:1")
    monkeypatch.setenv("CONFIDE_STORE", ROOT)
    monkeypatch.setenv("CONFIDE_LEDGER", SECRET)
    monkeypatch.delenv("CONFIDE_POD_TEMPLATES", raising=False)
    return KubernetesStep(task_id="dp_pretraining", plan=lambda *_: {})


def rendered(step: KubernetesStep, device: str) -> dict[str, Any]:
    step.describe(work(device))
    pod = step.build_pod_request_obj(dry_run=True)
    manifest: dict[str, Any] = ApiClient().sanitize_for_serialization(pod)
    return manifest


@pytest.mark.parametrize("device", ["cpu", "mock-tpu:8", "tpu"])
def test_templates_and_pods_fit_the_api_s_schema(step: KubernetesStep, device: str) -> None:
    assert unknown_fields(template(device), "V1Pod", "pod") == []
    assert unknown_fields(rendered(step, device), "V1Pod", "pod") == []


def test_the_schema_check_can_fail() -> None:
    pod = template("tpu")
    pod["spec"]["nodeSelectors"] = pod["spec"].pop("nodeSelector")
    pod["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"] = 8
    pod["spec"]["volumes"] = {}
    assert sorted(unknown_fields(pod, "V1Pod", "pod")) == [
        "pod.spec.containers[0].resources.limits.google.com/tpu: not of type str",
        "pod.spec.nodeSelectors: V1PodSpec has no such field",
        "pod.spec.volumes: not a list",
    ]


def test_the_pod_runs_the_very_step(step: KubernetesStep) -> None:
    container = rendered(step, "cpu")["spec"]["containers"][0]
    assert container["image"] == "registry.example/confide-task:1"
    assert container["args"][:4] == ["-m", "tasks", "pretrain", "--spec"]
    body = container["args"][4].partition("base64,")[2]
    assert spec_from_json(base64.b64decode(body)) == work("cpu").spec
    assert "command" not in container or container["command"] == []


def test_a_tpu_pod_asks_for_its_slice(step: KubernetesStep) -> None:
    spec = rendered(step, "tpu")["spec"]
    assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert spec["containers"][0]["resources"]["limits"]["google.com/tpu"] == "8"
    assert spec["serviceAccountName"] == "confide-steps"


@pytest.mark.parametrize("device", ["cpu", "mock-tpu:8"])
def test_other_pods_ask_for_no_tpu(step: KubernetesStep, device: str) -> None:
    assert "google.com/tpu" not in str(rendered(step, device))


def test_secrets_travel_by_name_only(step: KubernetesStep) -> None:
    manifest = rendered(step, "tpu")
    assert SECRET not in str(manifest)
    container = manifest["spec"]["containers"][0]
    assert {"name": "CONFIDE_STORE", "value": ROOT} in container["env"]
    assert container["envFrom"] == [
        {"secretRef": {"name": "confide-tracking"}},
        {"secretRef": {"name": "confide-ledger"}},
    ]


def test_a_run_s_name_cannot_ask_the_cluster_for_a_secret(step: KubernetesStep) -> None:
    asked = RunContext(run_key="dp_bert/$(CONFIDE_LEDGER)", run_name="r", task="dp_pretraining")
    step.describe(Work(spec=work("cpu").spec, context=asked))
    pod = step.build_pod_request_obj(dry_run=True)
    (told,) = [e.value for e in pod.spec.containers[0].env if e.name == "CONFIDE_RUN_CONTEXT"]
    assert "dp_bert/$$(CONFIDE_LEDGER)" in told


def test_pods_are_not_root(step: KubernetesStep) -> None:
    spec = rendered(step, "cpu")["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_deployment_s_own_templates_win(
    step: KubernetesStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path("dags/launcher/pods/cpu.yaml").read_text().replace("confide-steps", "their-steps")
    (tmp_path / "cpu.yaml").write_text(own)
    granted = Path("dags/launcher/pods/granted.yaml").read_text().replace("-ledger", "-db")
    (tmp_path / "granted.yaml").write_text(granted)
    monkeypatch.setenv("CONFIDE_POD_TEMPLATES", str(tmp_path))
    assert rendered(step, "cpu")["spec"]["serviceAccountName"] == "their-steps"
    assert "confide-db" in str(rendered(step, "cpu"))
    with pytest.raises(AirflowFailException, match=r"tpu\.yaml: FileNotFoundError"):
        rendered(step, "tpu")


def ended(exit_code: int, message: str) -> models.V1Pod:
    state = models.V1ContainerState(
        terminated=models.V1ContainerStateTerminated(exit_code=exit_code, message=message)
    )
    status = models.V1ContainerStatus(
        name="base", image="i", image_id="i", ready=False, restart_count=0, state=state
    )
    return models.V1Pod(
        metadata=models.V1ObjectMeta(name="p", namespace="confide"),
        spec=models.V1PodSpec(containers=[models.V1Container(name="base")]),
        status=models.V1PodStatus(phase="Failed", container_statuses=[status]),
    )


@pytest.mark.parametrize(
    ("exit_code", "never_again"), [(2, True), (3, True), (1, False), (137, False), (143, False)]
)
def test_bad_input_and_budget_are_not_tried_again(
    step: KubernetesStep, monkeypatch: pytest.MonkeyPatch, exit_code: int, never_again: bool
) -> None:
    pod = ended(exit_code, "first line\nconfide: pretrain: what is wrong\n")
    deleted: list[Any] = []
    monkeypatch.setattr(step, "process_pod_deletion", lambda pod, **_: deleted.append(pod))
    monkeypatch.setattr(step, "patch_already_checked", lambda pod, **_: None)
    monkeypatch.setattr(step, "is_istio_enabled", lambda pod: False)
    with pytest.raises(AirflowException, match="what is wrong") as raised:
        step.cleanup(pod, pod)
    assert isinstance(raised.value, AirflowFailException) is never_again
    assert deleted == [pod]


def test_it_waits_without_a_worker_and_answers_afterwards(
    step: KubernetesStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    step.plan = lambda params, root, point: {"dp_pretraining": work("tpu").spec}
    run = SimpleNamespace(dag_id="dp_bert", run_id="manual", start_date=None, run_after=TODAY)
    context = {"params": {}, "dag_run": run, "ti": SimpleNamespace(xcom_push=lambda **_: None)}
    monkeypatch.setattr(step, "build_pod_request_obj", lambda context: ended(0, ""))
    monkeypatch.setattr(step, "get_or_create_pod", lambda pod_request_obj, context: PENDING)
    step.kubernetes_conn_id = None
    with pytest.raises(TaskDeferred) as deferred:
        step.execute(context)
    assert deferred.value.method_name == "trigger_reentry"
    trigger = deferred.value.trigger
    assert (trigger.pod_name, trigger.on_kill_action.value) == ("p", "delete_pod")  # cancelled here
    monkeypatch.setattr(KubernetesPodOperator, "trigger_reentry", lambda self, context, event: None)
    cluster = Cluster(log="pretrain: 10/10\nMLflow: http://mlflow/#/experiments/1/runs/a\n")
    monkeypatch.setattr(KubernetesPodOperator, "client", cluster)
    answer = step.trigger_reentry(context, {"status": "success", "name": "p", "namespace": "n"})
    assert answer == {"output": work("tpu").spec.output, "metrics": {}}
    assert step.tracked_at == "http://mlflow/#/experiments/1/runs/a"


class Cluster:
    """The few calls of a cluster that these tests need, with the pods that it holds."""

    def __init__(self, pods: list[models.V1Pod] | None = None, log: str = "") -> None:
        self.pods, self.log = pods or [], log
        self.made: list[Any] = []
        self.deleted: list[str] = []
        self.asked = ""

    def list_namespaced_pod(self, namespace: str, label_selector: str) -> models.V1PodList:
        self.asked = label_selector
        return models.V1PodList(items=self.pods)

    def read_namespaced_pod_log(self, **_: Any) -> str:
        return self.log

    def delete_namespaced_pod(self, name: str, **_: Any) -> None:
        self.deleted.append(name)

    def create_pod(self, pod: models.V1Pod) -> models.V1Pod:
        self.made.append(pod)
        return pod


def pod(phase: str) -> models.V1Pod:
    labels = {"try_number": "1"}
    return models.V1Pod(
        metadata=models.V1ObjectMeta(name="first", namespace="confide", labels=labels),
        status=models.V1PodStatus(phase=phase),
    )


def test_a_step_whose_time_is_up_goes_on_in_another_pod_within_the_same_try(
    step: KubernetesStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    monkeypatch.setattr(KubernetesPodOperator, "client", cluster)
    monkeypatch.setattr(KubernetesPodOperator, "pod_manager", cluster)
    monkeypatch.setattr(step, "process_pod_deletion", lambda pod, **_: True)
    monkeypatch.setattr(step, "patch_already_checked", lambda pod, **_: None)
    monkeypatch.setattr(step, "is_istio_enabled", lambda pod: False)
    step.plan = lambda params, root, point: {"dp_pretraining": work("cpu").spec}
    step.kubernetes_conn_id = None
    ti = SimpleNamespace(
        dag_id="dp_bert", task_id="dp_pretraining", run_id="manual", map_index=-1, try_number=1
    )
    ti.xcom_push = lambda **_: None
    run = SimpleNamespace(dag_id="dp_bert", run_id="manual", start_date=TODAY, run_after=TODAY)
    run.logical_date = None
    context = {"params": {}, "dag_run": run, "ti": ti, "dag": None, "run_id": "manual"}
    event = {"status": "failed", "name": "p", "namespace": "confide"}
    build, pod = step.build_pod_request_obj, ended(75, "not done in its time\n")
    monkeypatch.setattr(step, "build_pod_request_obj", lambda context: build(dry_run=True))
    again = lambda self, context, event: self.cleanup(pod, pod)  # noqa: E731
    monkeypatch.setattr(KubernetesPodOperator, "trigger_reentry", again)
    for _ in range(2):
        with pytest.raises(TaskDeferred) as deferred:
            step.trigger_reentry(context, event)
        assert deferred.value.method_name == "trigger_reentry"
    names = [one.metadata.name for one in cluster.made]
    assert len(set(names)) == 2
    assert deferred.value.trigger.pod_name == names[-1]


@pytest.mark.parametrize(("phase", "made"), [("Running", 0), ("Pending", 0), ("Failed", 1)])
def test_a_retry_finds_the_pod_that_still_works_and_replaces_one_that_does_not(
    step: KubernetesStep, monkeypatch: pytest.MonkeyPatch, phase: str, made: int
) -> None:
    """Nothing trains twice beside itself; and a release is charged by its spec, not by its pod."""
    cluster = Cluster([pod(phase)])
    monkeypatch.setattr(KubernetesPodOperator, "client", cluster)
    monkeypatch.setattr(KubernetesPodOperator, "pod_manager", cluster)
    ended: list[Any] = []
    monkeypatch.setattr(step, "process_pod_deletion", lambda pod: ended.append(pod) or True)
    ti = SimpleNamespace(
        dag_id="dp_bert", task_id="dp_pretraining", run_id="manual", map_index=-1, try_number=2
    )
    run = SimpleNamespace(run_id="manual", logical_date=None, dag_id="dp_bert")
    context = {"ti": ti, "dag_run": run, "dag": None, "run_id": "manual"}
    step.describe(work("cpu"))
    found = step.get_or_create_pod(pod("Pending"), context)
    assert len(cluster.made) == len(ended) == made
    assert found.metadata.name == "first"
    assert "try_number" not in cluster.asked  # the pod of an earlier try is found as well


def test_a_cancelled_task_deletes_its_pod(
    step: KubernetesStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    monkeypatch.setattr(KubernetesPodOperator, "client", cluster)
    step.pod = pod("Running")
    step.on_kill()
    assert cluster.deleted == ["first"]
