import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from kubernetes.client import ApiClient, models
from launcher_conformance import (
    LEDGER,
    ROOT,
    IsolatedLauncherConformance,
    Outcome,
    context_of,
    plan,
)
from launcher_conformance import work as work_on

from dags.launcher.kubernetes_step import KubernetesStep, granted, template
from dags.launcher.step_operator import SEEDS_AT, StepOperator
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import Need
from tasks.protocol.step_process import Work


def unknown_fields(value: Any, kind: str, place: str) -> list[str]:
    """Return the places at which a manifest differs from the types of the Kubernetes API."""
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
        faults = [f"{place}.{key}: {kind} has no such field" for key in value if key not in names]
        for key in value.keys() & names.keys():
            faults += unknown_fields(value[key], model.openapi_types[names[key]], f"{place}.{key}")
        return faults
    python = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}
    right = isinstance(value, python[kind]) and (kind != "int" or not isinstance(value, bool))
    return [] if right else [f"{place}: not of type {kind}"]


def work(device: str) -> Work:
    spec = job_steps(JobSettings(device=device))["With DP / pretraining"]
    return work_on(spec, task="pretraining")


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> KubernetesStep:
    monkeypatch.setenv("CONFIDE_TASK_IMAGE", "registry.example/confide-task:1")
    monkeypatch.setenv("CONFIDE_STORE", ROOT)
    monkeypatch.setenv("CONFIDE_LEDGER", LEDGER)
    monkeypatch.delenv("CONFIDE_POD_TEMPLATES", raising=False)
    return KubernetesStep(task_id="pretraining", plan=plan)


def rendered(step: KubernetesStep, device: str) -> dict[str, Any]:
    step.describe(work(device))
    pod = step.build_pod_request_obj(dry_run=True)
    manifest: dict[str, Any] = ApiClient().sanitize_for_serialization(pod)
    return manifest


@pytest.mark.parametrize("device", ["cpu", "mock-tpu:8", "tpu"])
def test_pod_fits_the_schema_and_has_no_root_no_password_and_the_device(step, device):
    manifest = rendered(step, device)
    assert unknown_fields(template(device), "V1Pod", "pod") == []
    assert unknown_fields(manifest, "V1Pod", "pod") == []
    spec, container = manifest["spec"], manifest["spec"]["containers"][0]
    assert container["image"] == "registry.example/confide-task:1"
    assert "command" not in container or container["command"] == []
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert LEDGER not in str(manifest)  # secrets travel by name only
    assert {"name": "CONFIDE_STORE", "value": ROOT} in container["env"]
    named = [source["secretRef"]["name"] for source in container["envFrom"]]
    assert named == ["confide-tracking", "confide-ledger"]
    assert ("google.com/tpu" in str(manifest)) == (device == "tpu")
    if device == "tpu":
        assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x4"
        assert container["resources"]["limits"]["google.com/tpu"] == "8"
        assert spec["serviceAccountName"] == "confide-steps"


def test_the_schema_check_can_fail():
    pod = template("tpu")
    pod["spec"]["nodeSelectors"] = pod["spec"].pop("nodeSelector")
    pod["spec"]["containers"][0]["resources"]["limits"]["google.com/tpu"] = 8
    pod["spec"]["volumes"] = {}
    assert sorted(unknown_fields(pod, "V1Pod", "pod")) == [
        "pod.spec.containers[0].resources.limits.google.com/tpu: not of type str",
        "pod.spec.nodeSelectors: V1PodSpec has no such field",
        "pod.spec.volumes: not a list",
    ]


def test_a_run_s_name_cannot_ask_the_cluster_for_a_secret(step):
    step.describe(work_on(work("cpu").spec, run_key="dp_bert/$(CONFIDE_LEDGER)"))
    pod = step.build_pod_request_obj(dry_run=True)
    (context,) = [e.value for e in pod.spec.containers[0].env if e.name == "CONFIDE_RUN_CONTEXT"]
    assert "dp_bert/$$(CONFIDE_LEDGER)" in context


def test_a_deployment_s_own_templates_win(step, tmp_path, monkeypatch):
    cpu = Path("dags/launcher/pods/cpu.yaml").read_text().replace("confide-steps", "their-steps")
    (tmp_path / "cpu.yaml").write_text(cpu)
    granted = Path("dags/launcher/pods/granted.yaml").read_text().replace("-ledger", "-db")
    (tmp_path / "granted.yaml").write_text(granted)
    monkeypatch.setenv("CONFIDE_POD_TEMPLATES", str(tmp_path))
    assert rendered(step, "cpu")["spec"]["serviceAccountName"] == "their-steps"
    assert "confide-db" in str(rendered(step, "cpu"))
    with pytest.raises(AirflowFailException, match=r"tpu\.yaml: FileNotFoundError"):
        rendered(step, "tpu")


# --- training on a Ray cluster


@pytest.mark.parametrize("hosts", ["2", ""])
def test_accelerators_of_a_training_on_hosts_belong_to_the_cluster(step, monkeypatch, hosts):
    monkeypatch.setenv("CONFIDE_CLUSTER", "confide-head-svc:6379")
    monkeypatch.setenv("CONFIDE_HOSTS", hosts)
    spec = work("tpu").spec.model_copy(update={"device": "tpu"})
    step.describe(Work(spec, work("tpu").context))
    assert ("google.com/tpu" in str(step.pod_template_dict)) == (not hosts)


def ended(exit_code: int, message: str, reason: str = "") -> models.V1Pod:
    state = models.V1ContainerState(
        terminated=models.V1ContainerStateTerminated(
            exit_code=exit_code, message=message, reason=reason
        )
    )
    status = models.V1ContainerStatus(
        name="base", image="i", image_id="i", ready=False, restart_count=0, state=state
    )
    return models.V1Pod(
        metadata=models.V1ObjectMeta(name="p", namespace="confide"),
        spec=models.V1PodSpec(containers=[models.V1Container(name="base")]),
        status=models.V1PodStatus(
            phase="Failed" if exit_code else "Succeeded", container_statuses=[status]
        ),
    )


class TestKubernetes(IsolatedLauncherConformance):
    passwords_by_name = True  # type: ignore[assignment]

    def operator(self, **options: Any) -> StepOperator:
        operator = KubernetesStep(task_id="vocabulary", plan=plan, **options)
        operator.kubernetes_conn_id = None
        return operator

    def pod(self, of: Work) -> dict[str, Any]:
        operator = self.operator()
        operator.describe(of)
        request = operator.build_pod_request_obj(dry_run=True)
        spec: dict[str, Any] = ApiClient().sanitize_for_serialization(request)["spec"]
        return spec

    def asked(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, str]]:
        (container,) = self.pod(of)["containers"]
        return container["args"], {e["name"]: e["value"] for e in container["env"] if "value" in e}

    grants = frozenset({Need.CHARGING, Need.CLUSTER, Need.LEDGER})

    def granted(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> set[Need]:
        described = self.pod(of)
        (container,) = described["containers"]
        secrets = {source["secretRef"]["name"] for source in container["envFrom"]}
        seeds = "confide-seeds" in str(described["volumes"])
        assert (
            seeds == (SEEDS_AT in str(container["volumeMounts"])) == ("confide-ledger" in secrets)
        )
        on_cluster = "confide-ray" in str(described)
        assert on_cluster == ("shared-memory" in str(described))
        needs = {Need.CHARGING: seeds, Need.CLUSTER: on_cluster}
        needs[Need.LEDGER] = "confide-ledger-reader" in secrets
        return {need for need, has in needs.items() if has}

    def run(
        self, operator: StepOperator, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        """Run the task with pods whose messages the cluster keeps as termination messages."""
        cluster = Cluster()
        quiet(operator, cluster, monkeypatch)
        expected = len(outcomes)

        def one_ends(self: Any, context: Any, event: Any) -> None:
            code, messages = outcomes.pop(0)
            pod = ended(code, "".join(f"{m.model_dump_json()}\n" for m in messages))
            self.post_complete_action(pod=pod, remote_pod=pod, context=context, result=None)

        monkeypatch.setattr(KubernetesPodOperator, "trigger_reentry", one_ends)
        event = {"status": "success", "name": "p", "namespace": "confide"}
        with pytest.raises(TaskDeferred) as deferred:  # the task occupies no worker while it waits
            operator.execute(context_of())
        while True:
            assert deferred.value.method_name == "trigger_reentry"
            trigger = deferred.value.trigger
            assert trigger.on_kill_action.value == "delete_pod"  # if the task is cancelled
            event["name"] = cluster.made[-1].metadata.name
            try:
                answer: dict[str, Any] = operator.trigger_reentry(context_of(), event)
            except TaskDeferred as again:
                deferred.value.trigger = again.trigger
                continue
            names = [pod.metadata.name for pod in cluster.made]
            assert len(set(names)) == len(names) == expected
            return answer

    def test_reason_without_a_message_of_the_step_comes_from_the_cluster(self, monkeypatch):
        operator = self.operator()
        quiet(operator, Cluster(), monkeypatch)
        pod = ended(137, "not a message", "OOMKilled")
        with pytest.raises(AirflowException, match=r"^OOMKilled \(exit code 137\)"):
            operator.cleanup(pod, pod)  # type: ignore[attr-defined]

    def test_seeds_for_every_pod_and_needs_without_a_section_are_refused(
        self, monkeypatch, tmp_path
    ):
        cpu = template("cpu")
        cpu["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] = SEEDS_AT
        (tmp_path / "cpu.yaml").write_text(str(cpu))  # valid YAML
        monkeypatch.setenv("CONFIDE_POD_TEMPLATES", str(tmp_path))
        with pytest.raises(AirflowFailException, match=r"granted\.yaml"):
            template("cpu")
        (tmp_path / "granted.yaml").write_text("sources: {}\n")
        with pytest.raises(AirflowFailException, match="no section 'charging'"):
            granted(cpu, {Need.CHARGING})


def quiet(operator: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KubernetesPodOperator, "client", cluster)
    monkeypatch.setattr(KubernetesPodOperator, "pod_manager", cluster)
    for name in ("process_pod_deletion", "patch_already_checked"):
        monkeypatch.setattr(operator, name, lambda *_, **__: True)
    monkeypatch.setattr(operator, "is_istio_enabled", lambda pod: False)
    build = operator.build_pod_request_obj
    monkeypatch.setattr(operator, "build_pod_request_obj", lambda context: build(dry_run=True))


class Cluster:
    def __init__(self, pods: list[models.V1Pod] | None = None) -> None:
        self.pods = pods or []
        self.made: list[Any] = []
        self.deleted: list[str] = []
        self.asked = ""

    def list_namespaced_pod(self, namespace: str, label_selector: str) -> models.V1PodList:
        self.asked = label_selector
        return models.V1PodList(items=self.pods)

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


@pytest.mark.parametrize(("phase", "made"), [("Running", 0), ("Pending", 0), ("Failed", 1)])
def test_a_retry_finds_the_pod_that_still_works_and_replaces_one_that_does_not(
    step, monkeypatch, phase, made
):
    """No step runs twice at a time; a release is charged by its spec, not by its pod."""
    cluster = Cluster([pod(phase)])
    monkeypatch.setattr(KubernetesPodOperator, "client", cluster)
    monkeypatch.setattr(KubernetesPodOperator, "pod_manager", cluster)
    ended: list[Any] = []
    monkeypatch.setattr(step, "process_pod_deletion", lambda pod: ended.append(pod) or True)
    step.describe(work("cpu"))
    context = context_of()
    context["ti"].try_number = 2
    pod_of_retry = step.get_or_create_pod(pod("Pending"), context)
    assert len(cluster.made) == len(ended) == made
    assert pod_of_retry.metadata.name == "first"
    assert "try_number" not in cluster.asked  # so that the pod of an earlier try is found too


def test_a_cancelled_task_deletes_its_pod(step, monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(KubernetesPodOperator, "client", cluster)
    step.pod = pod("Running")
    step.on_kill()
    assert cluster.deleted == ["first"]
