"""Steps as pods of a Kubernetes cluster; while they run, Airflow waits without a worker.

What the pods are made of:

`CONFIDE_TASK_IMAGE`      the image (default `confide-task`)
`CONFIDE_HOSTS`           over how many hosts a pre-training is spread: its pod, and beside it an
                          indexed Job of pods that help it, behind a headless service
`CONFIDE_POD_TEMPLATES`   a folder with `cpu.yaml` and `tpu.yaml`: service account, node selectors,
                          resources, volumes, secrets; and `granted.yaml`: what a step gets besides,
                          by what it needs (default: the folder `pods` here)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping
from http.client import CONFLICT
from pathlib import Path
from typing import Any

import yaml
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from kubernetes.client import models
from kubernetes.client.exceptions import ApiException

from dags.launcher.step_operator import (
    BAD_INPUT,
    LONGEST_ARGUMENT,
    PLACES,
    SEEDS_AT,
    UNFINISHED,
    StepOperator,
    Work,
    failure,
    forwarded_environment,
    hosts,
)
from tasks.protocol import Need, needs, uses_cluster
from tasks.protocol.least_privilege import HELPER, HOSTS, HOSTS_AT, for_helpers
from tasks.protocol.messages import CHANNEL, Follower

TEMPLATES = Path(__file__).parent / "pods"
KEYS_AT = "/var/lib/confide/keys"  # in the image: docker/task.Dockerfile
HOSTS_PORT = 4646
HOSTS_LABEL = "confide-hosts"
TERMINATION_MESSAGE = "/dev/termination-log"  # of which the cluster keeps the last 4 KiB


class TimeIsUp(AirflowException):
    """The step's own time is up, and its checkpoint written: another pod goes on from there."""


class KubernetesStep(StepOperator, KubernetesPodOperator):
    """Runs a step in a pod; a worker that dies finds its pod again, a cancelled one deletes it.

    Secrets never pass through Airflow: the pod template names the Kubernetes secret. The step's
    messages are the container's termination message.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            image=os.environ.get("CONFIDE_TASK_IMAGE") or "confide-task",
            deferrable=True,
            durable=True,
            get_logs=True,
            do_xcom_push=False,  # no sidecar: the result lies in the store
            log_pod_spec_on_failure=False,
            termination_message_policy="File",
            startup_timeout_seconds=1800,  # a TPU slice has to be made first
            poll_interval=10,
            **options,
        )
        self.device, self.hosts = "cpu", 1

    def execute(self, context: Any) -> dict[str, Any]:
        """Start the pod and wait for it without a worker; `trigger_reentry` goes on from there."""
        work = self._prepare(context)
        KubernetesPodOperator.execute(self, context)
        return self.answer(work)

    def _prepare(self, context: Any) -> Work:
        work = self.work(context)
        self.describe(work)
        return work

    def describe(self, work: Work) -> None:
        """Set what the pod of this work consists of, beyond its template."""
        arguments = work.arguments()
        if len(arguments[-1]) > LONGEST_ARGUMENT:
            raise failure(BAD_INPUT, "the spec is too long for a pod: make the sweep smaller")
        self.name = f"confide-{work.context.task.replace('_', '-')}"
        self.arguments = arguments
        told = work.environment(forwarded_environment(*PLACES), apart=True)
        told[CHANNEL] = TERMINATION_MESSAGE
        # The cluster would put variables in place of $(NAME), secrets among them: $$ is a $.
        self.env_vars = {name: value.replace("$(", "$$(") for name, value in told.items()}
        self.labels = {"app": "confide", "confide-spec": work.spec.digest()[:32]}
        self.device, self.hosts = getattr(work.spec, "device", "cpu"), hosts(work.spec)
        held = needs(work.spec) | ({Need.HOSTS} if self.hosts > 1 else set())
        if not uses_cluster(work.spec, os.environ):
            held -= {Need.CLUSTER}
        self.pod_template_dict = granted(template(self.device), held)
        if self.execution_timeout is not None:
            self.active_deadline_seconds = int(self.execution_timeout.total_seconds())

    def build_pod_request_obj(self, context: Any = None, *, dry_run: bool = False) -> Any:
        """Return the step's pod; where others help it, with a name at which they find it."""
        pod = super().build_pod_request_obj(context, dry_run=dry_run)
        if self.hosts > 1:
            name = pod.metadata.name
            pod.metadata.labels[HOSTS_LABEL] = name
            pod.spec.hostname, pod.spec.subdomain = "step", name
            at = models.V1EnvVar(name=HOSTS_AT, value=hosts_at(name))
            pod.spec.containers[0].env.append(at)
        return pod

    def get_or_create_pod(self, pod_request_obj: Any, context: Any) -> Any:
        """Return the step's pod; make what helps it, which goes with it."""
        pod = super().get_or_create_pod(pod_request_obj, context)
        if self.hosts > 1:
            self._make_helpers(pod.metadata.name, pod.metadata.namespace)
        return pod

    def _make_helpers(self, name: str, namespace: str) -> None:
        """Make service and Job of the pod of this name: the cluster removes them with the pod."""
        owner = self.client.read_namespaced_pod(name, namespace).metadata.uid
        environment = for_helpers(forwarded_environment(*PLACES))
        job = helpers_job(
            name,
            owner,
            template(self.device),
            hosts=self.hosts,
            image=self.image,
            environment=environment,
            seconds=self.active_deadline_seconds,
        )
        make_service = self.client.create_namespaced_service
        make_job = self.hook.batch_v1_client.create_namespaced_job
        for make, body in ((make_service, hosts_service(name, owner, job)), (make_job, job)):
            try:
                make(namespace, body)
            except ApiException as error:
                if error.status != CONFLICT:  # made before the worker was lost
                    raise

    def trigger_reentry(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """Answer for the pod that has ended; where its time was up, start the next one and wait."""
        try:
            super().trigger_reentry(context, event)
        except TimeIsUp:
            self.log.info("Not done in its time: going on in another pod")
            self.pod = self.pod_request_obj = None
            self._prepare(context)
            self.execute_async(context)  # within the same try: nothing has failed
        return self.answer(self.work(context))

    def cleanup(self, pod: Any, remote_pod: Any, *more: Any, **named: Any) -> None:
        """Delete the pod; say what its exit code means, and that bad input is not tried again."""
        ended, told = terminated(remote_pod, self.base_container_name), Follower()
        for line in (ended.message or "").splitlines() if ended else ():
            told.hear(line)
        self.hear(told)
        try:
            super().cleanup(pod, remote_pod, *more, **named)
        except (AirflowSkipException, AirflowFailException):
            raise
        except AirflowException:
            if ended is None or not ended.exit_code:
                raise
            if ended.exit_code == UNFINISHED:
                raise TimeIsUp from None
            reason = told.reason(ended.reason or Follower().reason())
            raise failure(ended.exit_code, reason) from None


def hosts_at(name: str) -> str:
    """Return the addresses of a step's pod and of its helpers, for `CONFIDE_HOSTS_AT`."""
    return f"step.{name}:{HOSTS_PORT} {name}-{{}}.{name}:{HOSTS_PORT}"


def hosts_service(name: str, owner: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headless service by which the hosts of a training find each other.

    Args:
        name: of the step's pod.
        owner: its uid.
        job: of the helpers.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(name, owner, job["metadata"]["namespace"]),
        "spec": {
            "clusterIP": "None",
            "selector": {HOSTS_LABEL: name},
            "publishNotReadyAddresses": True,
            "ports": [{"name": "hosts", "port": HOSTS_PORT}],
        },
    }


def helpers_job(
    name: str,
    owner: str,
    pod: Mapping[str, Any],
    *,
    hosts: int,
    image: str,
    environment: Mapping[str, str],
    seconds: int | None = None,
) -> dict[str, Any]:
    """Return the indexed Job of the pods that help a step: given the store, and no seed or ledger.

    One that fails ends the Job: the training goes on from its checkpoint, with helpers anew.

    Args:
        name: of the step's pod.
        owner: its uid.
        pod: the template of the step's device.
        hosts: of the training, the step's pod among them.
        image: of the step.
        environment: what helpers are told.
        seconds: that the step may take.
    """
    spec = copy.deepcopy(pod["spec"])
    container = spec["containers"][0]
    container["envFrom"] = []  # MLflow's password among them
    mounts = [m for m in container.get("volumeMounts", []) if m["mountPath"] != KEYS_AT]
    used = {mount["name"] for mount in mounts}
    container["volumeMounts"] = mounts
    spec["volumes"] = [v for v in spec.get("volumes", []) if v["name"] in used]
    spec = granted({"spec": spec}, {Need.HOSTS})["spec"]
    told = {**environment, HOSTS: str(hosts), HOSTS_AT: hosts_at(name)}
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    container["env"] = [
        *container.get("env", []),
        *({"name": n, "value": v.replace("$(", "$$(")} for n, v in sorted(told.items())),
        {"name": HELPER, "valueFrom": {"fieldRef": index}},
    ]
    container |= {"image": image, "args": ["-m", "tasks.steps.training_hosts"]}
    body: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": hosts - 1,
        "parallelism": hosts - 1,
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": {"app": "confide", HOSTS_LABEL: name}},
            "spec": spec | {"subdomain": name, "restartPolicy": "Never"},
        },
    }
    if seconds is not None:
        body["activeDeadlineSeconds"] = seconds
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _owned(name, owner, pod["metadata"]["namespace"]),
        "spec": body,
    }


def _owned(name: str, owner: str, namespace: str) -> dict[str, Any]:
    pod = {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": owner}
    labels = {"app": "confide", HOSTS_LABEL: name}
    return {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [pod]}


def template(device: str) -> dict[str, Any]:
    """Return the pod template for a step's device.

    Raises:
        AirflowFailException: there is none; trying again cannot help.
    """
    pod = _read("tpu.yaml" if device == "tpu" else "cpu.yaml")
    if SEEDS_AT in str(pod):
        raise AirflowFailException(
            f"pod template: the seeds ({SEEDS_AT}) belong in granted.yaml, under `charging`"
        )
    return pod


def granted(pod: dict[str, Any], held: Collection[Need]) -> dict[str, Any]:
    """Return a template with what `granted.yaml` gives to steps with these needs.

    Raises:
        AirflowFailException: the file is not there, or says nothing of a need.
    """
    grants = _read("granted.yaml")
    spec = pod["spec"]
    container = spec["containers"][0]
    for need in sorted(held):
        if need not in grants:
            raise AirflowFailException(f"granted.yaml has no section {need.value!r}")
        grant = grants[need] or {}
        for part, kind in ((spec, "volumes"), (container, "volumeMounts"), (container, "envFrom")):
            part[kind] = [*part.get(kind, []), *grant.get(kind, [])]
    return pod


def _read(name: str) -> dict[str, Any]:
    file = Path(os.environ.get("CONFIDE_POD_TEMPLATES") or TEMPLATES) / name
    try:
        content: dict[str, Any] = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise AirflowFailException(f"pod template {file}: {type(error).__name__}") from None
    return content


def terminated(pod: Any, container: str) -> Any:
    """Return how a container of a pod ended, or None where the pod does not say."""
    statuses = (pod.status.container_statuses if pod is not None and pod.status else None) or []
    for status in statuses:
        if status.name == container and status.state is not None:
            return status.state.terminated
    return None
