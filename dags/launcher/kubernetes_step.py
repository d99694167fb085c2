"""The Kubernetes launcher: steps as pods, for which Airflow waits without a worker.

The scheduler's environment configures the pods:

`CONFIDE_TASK_IMAGE`      the image (default `confide-task`)
`CONFIDE_POD_TEMPLATES`   a folder with `cpu.yaml` and `tpu.yaml`: service account, node selectors,
                          resources, volumes, secrets; and `granted.yaml`: additions to the template
                          by the step's needs (default: the folder `pods` here)
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.utils.container import get_container_status
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dags.launcher.step_operator import (
    BAD_INPUT,
    PLACES,
    SEEDS_AT,
    UNFINISHED,
    NamedSteps,
    Plan,
    StepOperator,
    failure,
)
from tasks.protocol.least_privilege import needs_in
from tasks.protocol.messages import CHANNEL, Follower
from tasks.protocol.specs import Need
from tasks.protocol.step_process import LONGEST_ARGUMENT, Work

TEMPLATES = Path(__file__).parent / "pods"
TERMINATION_MESSAGE = "/dev/termination-log"  # of which the cluster keeps the last 4 KiB


class TimeIsUp(AirflowException):
    """The step wrote a checkpoint at its time limit; another pod continues from there."""


class KubernetesStep(StepOperator, KubernetesPodOperator):
    """Runs a step in a pod. A restarted worker finds its pod again; a cancelled task deletes it.

    Secrets never pass through Airflow, because the pod template names the Kubernetes secret. The
    step's messages are the container's termination message.
    """

    def __init__(self, *, plan: Plan, named: NamedSteps | None = None, **options: Any) -> None:
        super().__init__(
            plan=plan,
            named=named,
            image=os.environ.get("CONFIDE_TASK_IMAGE") or "confide-task",
            deferrable=True,
            durable=True,
            get_logs=True,
            do_xcom_push=False,  # no sidecar: the result is in the store
            log_pod_spec_on_failure=False,
            termination_message_policy="File",
            startup_timeout_seconds=1800,  # a TPU slice has to be made first
            poll_interval=10,
            **options,
        )

    def execute(self, context: Any) -> dict[str, Any]:
        """Start the first pod and wait for it without a worker; `trigger_reentry` continues."""
        works = self.works(context)
        self.describe(works[0])
        KubernetesPodOperator.execute(self, context)
        return self.answer(works)

    def describe(self, work: Work) -> None:
        """Set the pod's arguments, variables, labels and granted additions to its template."""
        self.arguments = work.arguments()
        if len(self.arguments[-1]) > LONGEST_ARGUMENT:
            raise failure(BAD_INPUT, "the spec is too long for a pod: make the sweep smaller")
        self.name = pod_name(work)
        variables = self.variables_of(work, *PLACES)
        variables[CHANNEL] = TERMINATION_MESSAGE
        # The cluster would replace $(NAME) by the variable, which may be a secret; $$ escapes a $.
        self.env_vars = {name: value.replace("$(", "$$(") for name, value in variables.items()}
        self.labels = {"app": "confide", "confide-spec": work.spec.digest()[:32]}
        held, device = needs_in(work.spec, os.environ), getattr(work.spec, "device", "cpu")
        on_hosts = Need.CLUSTER in held and os.environ.get("CONFIDE_HOSTS")
        if on_hosts and work.spec.step == "pretrain":
            device = "cpu"  # the cluster's hosts have the accelerators
        self.pod_template_dict = granted(template(device), held)
        if self.execution_timeout is not None:
            self.active_deadline_seconds = int(self.execution_timeout.total_seconds())

    def trigger_reentry(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """Start the next step's pod, or return the results after the last one.

        If the time of a step was up, another pod continues it.
        """
        works = self.works(context)
        number = number_of(event["name"], works)
        try:
            super().trigger_reentry(context, event)
            number += 1
        except TimeIsUp:
            self.log.info("The time limit was reached: the step continues in another pod")
        if number < len(works):
            self.pod = self.pod_request_obj = None
            self.describe(works[number])
            self.execute_async(context)  # within the same try: nothing has failed
        return self.answer(works)

    def cleanup(self, pod: Any, remote_pod: Any, *more: Any, **named: Any) -> None:
        """Delete the pod, and raise the exception for its exit code."""
        status = get_container_status(remote_pod, self.base_container_name)
        ended = status.state.terminated if status and status.state else None
        messages = Follower()
        for line in (ended.message or "").splitlines() if ended else ():
            messages.hear(line)
        self.hear(messages)
        try:
            super().cleanup(pod, remote_pod, *more, **named)
        except (AirflowSkipException, AirflowFailException):
            raise
        except AirflowException:
            if ended is None or not ended.exit_code:
                raise
            if ended.exit_code == UNFINISHED:
                raise TimeIsUp from None
            reason = messages.reason(ended.reason or Follower().reason())
            raise failure(ended.exit_code, reason) from None


def pod_name(work: Work) -> str:
    """Return the beginning of the name of a step's pod."""
    return f"confide-{work.context.task.replace('_', '-')}"


def number_of(pod: str, works: Sequence[Work]) -> int:
    """Return the number, from 0, of the step of a pod; the first if the name fits none."""
    names = [pod_name(work) for work in works]
    of_pod = [name for name in names if pod.startswith(f"{name}-")]
    return names.index(max(of_pod, key=len, default=names[0]))


def template(device: str) -> dict[str, Any]:
    """Return the pod template for a step's device.

    Raises:
        AirflowFailException: there is no template; another try cannot help.
    """
    pod = _read("tpu.yaml" if device == "tpu" else "cpu.yaml")
    if SEEDS_AT in str(pod):
        raise AirflowFailException(
            f"pod template: the seeds ({SEEDS_AT}) belong in granted.yaml, under `charging`"
        )
    return pod


def granted(pod: dict[str, Any], held: Collection[Need]) -> dict[str, Any]:
    """Return a template with the additions of `granted.yaml` for these needs.

    Raises:
        AirflowFailException: the file is missing, or has no section for a need.
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
