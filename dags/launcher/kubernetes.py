"""Steps as pods of a Kubernetes cluster; while they run, Airflow waits without a worker.

What the pods are made of:

`CONFIDE_TASK_IMAGE`      the image (default `confide-task`)
`CONFIDE_POD_TEMPLATES`   a folder with `cpu.yaml` and `tpu.yaml`: service account, node selectors,
                          resources, volumes, secrets; and `granted.yaml`: what a step gets besides,
                          by what it needs (default: the folder `pods` here)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from dags.launcher.handed_on import PLACES, handed_on
from dags.launcher.links import tracked_at
from dags.launcher.outcome import BAD_INPUT, UNFINISHED, failure
from dags.launcher.work import Plan, Work, work_of
from tasks.protocol import Need, environment_for, needs

TEMPLATES = Path(__file__).parent / "pods"
LONGEST_ARGUMENT = 100_000  # bytes; Linux refuses a single argument above 128 KiB
SEEDS_AT = "/var/lib/confide-seeds"  # in the image: docker/task.Dockerfile
LAST_LINES = 50  # of a step's log: its run's address is among them


class TimeIsUp(AirflowException):
    """The step's own time is up, and its checkpoint written: another pod goes on from there."""


class KubernetesStep(KubernetesPodOperator):
    """Runs a step in a pod; a worker that dies finds its pod again, a cancelled one deletes it.

    Secrets never pass through Airflow: the pod template names the Kubernetes secret.
    """

    template_fields = ("point",)

    def __init__(
        self, *, plan: Plan, point: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        super().__init__(
            image=os.environ.get("CONFIDE_TASK_IMAGE") or "confide-task",
            deferrable=True,
            durable=True,
            get_logs=True,
            do_xcom_push=False,  # no sidecar: the result lies in the store
            log_pod_spec_on_failure=False,
            # The last lines of a failed step's log become its message.
            termination_message_policy="FallbackToLogsOnError",
            startup_timeout_seconds=1800,  # a TPU slice has to be made first
            poll_interval=10,
            **options,
        )
        self.plan = plan
        self.point = point
        self.tracked_at = ""

    def execute(self, context: Any) -> dict[str, Any]:
        """Start the pod and wait for it without a worker; `trigger_reentry` goes on from there."""
        work = self._prepare(context)
        super().execute(context)
        return work.answer()

    def _prepare(self, context: Any) -> Work:
        work = work_of(self.task_id, self.plan, context, self.point)
        context["point_name"] = work.context.point
        self.log.info("Output: %s", work.spec.output)
        self.describe(work)
        return work

    def describe(self, work: Work) -> None:
        """Set what the pod of this work consists of, beyond its template."""
        arguments = work.arguments()
        if len(arguments[-1]) > LONGEST_ARGUMENT:
            raise failure(
                work.context.task,
                BAD_INPUT,
                "the spec is too long for a pod: make the sweep smaller",
            )
        self.name = f"confide-{work.context.task.replace('_', '-')}"
        self.arguments = arguments
        told = environment_for(work.spec, handed_on(os.environ, PLACES), apart=True)
        told |= work.environment()
        # The cluster would put variables in place of $(NAME), secrets among them: $$ is a $.
        self.env_vars = {name: value.replace("$(", "$$(") for name, value in told.items()}
        self.labels = {"app": "confide", "confide-spec": work.spec.digest()[:32]}
        device = getattr(work.spec, "device", "cpu")
        self.pod_template_dict = granted(template(device), needs(work.spec))
        if self.execution_timeout is not None:
            self.active_deadline_seconds = int(self.execution_timeout.total_seconds())

    def trigger_reentry(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """Answer for the pod that has ended; where its time was up, start the next one and wait."""
        self.tracked_at = self._tracked_at(event)  # first: the pod is deleted on the way
        try:
            super().trigger_reentry(context, event)
        except TimeIsUp:
            self.log.info("Not done in its time: going on in another pod")
            self.pod = self.pod_request_obj = None
            self._prepare(context)
            self.execute_async(context)  # within the same try: nothing has failed
        return work_of(self.task_id, self.plan, context, self.point).answer()

    def _tracked_at(self, event: Mapping[str, Any]) -> str:
        """Return the address of the step's run, out of its log; '' where that is gone."""
        try:
            log: str = self.client.read_namespaced_pod_log(
                name=event["name"],
                namespace=event["namespace"],
                container=self.base_container_name,
                tail_lines=LAST_LINES,
            )
        except (ApiException, HTTPError):
            return ""
        return next(filter(None, map(tracked_at, reversed(log.splitlines()))), "")

    def cleanup(self, pod: Any, remote_pod: Any, *more: Any, **named: Any) -> None:
        """Delete the pod; say what its exit code means, and that bad input is not tried again."""
        try:
            super().cleanup(pod, remote_pod, *more, **named)
        except (AirflowSkipException, AirflowFailException):
            raise
        except AirflowException:
            ended = terminated(remote_pod, self.base_container_name)
            if ended is None or not ended.exit_code:
                raise
            if ended.exit_code == UNFINISHED:
                raise TimeIsUp from None
            lines = (ended.message or ended.reason or "no output").strip().splitlines()
            raise failure(self.task_id, ended.exit_code, lines[-1]) from None


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
        for place, kind in ((spec, "volumes"), (container, "volumeMounts"), (container, "envFrom")):
            place[kind] = [*place.get(kind, []), *grant.get(kind, [])]
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
