"""The Docker launcher: steps as containers of the task image on the deployment's Docker engine.

The scheduler's environment configures the containers:

`CONFIDE_TASK_IMAGE`      the image (default `confide-task`)
`CONFIDE_DOCKER_NETWORK`  the network that they join
`CONFIDE_DOCKER_MOUNTS`   `SOURCE:TARGET` or `SOURCE:TARGET:ro`, separated by spaces; a source
                          that begins with `/` is a folder of the host, any other a volume
`CONFIDE_DOCKER_SEEDS`    the mount of the secret seeds, only for steps that charge
`CONFIDE_DOCKER_SOURCES`  mounts only for steps that read files from outside; always read-only
`CONFIDE_DOCKER_CLUSTER`  the mount of a Ray cluster's secrets, only for steps that use the cluster
                          named by `CONFIDE_CLUSTER`
`CONFIDE_DOCKER_MEMORY`   the memory limit, such as `8g`
`CONFIDE_DOCKER_GPUS`     `all`, or the number of GPUs
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

from airflow.providers.docker.operators.docker import DockerOperator
from airflow.sdk.exceptions import AirflowException
from docker.errors import APIError
from docker.types import DeviceRequest, Mount
from docker.utils import create_archive

from dags.launcher.step_operator import PLACES, SECRETS, SEEDS_AT, NamedSteps, Plan, StepOperator
from tasks.protocol.least_privilege import needs_in
from tasks.protocol.messages import CHANNEL, STDOUT, Failed, Follower, Lines
from tasks.protocol.specs import Need
from tasks.protocol.step_process import LONGEST_ARGUMENT, Work
from tasks.protocol.supervisor import LAUNCHER_GRACE

OUT_OF_MEMORY = "out of memory: raise CONFIDE_DOCKER_MEMORY, or make the batch smaller"
SPEC_FILE = "/tmp/spec.json"  # noqa: S108 - inside the step's container
RUN, TASK, SPEC = "confide.run", "confide.task", "confide.spec"
SHARED_MEMORY = "2g"  # for the objects of a step that uses a cluster
# An image built by compose carries its service's labels. Without these empty labels, compose would
# regard the container as a surplus replica and stop it.
NO_SERVICE = {"com.docker.compose.project": "", "com.docker.compose.service": ""}


class DockerStep(StepOperator, DockerOperator):
    """Runs a step in a container that always ends together with the task.

    The task holds the container's standard input open as a lease. If the worker dies suddenly, the
    engine closes the input, and the step ends itself. The engine's init process (`docker run
    --init`) forwards SIGTERM and reaps processes. Standard output carries the step's messages,
    standard error the log.
    """

    def __init__(self, *, plan: Plan, named: NamedSteps | None = None, **options: Any) -> None:
        super().__init__(
            plan=plan,
            named=named,
            image=os.environ.get("CONFIDE_TASK_IMAGE") or "confide-task",
            network_mode=os.environ.get("CONFIDE_DOCKER_NETWORK") or None,
            mem_limit=os.environ.get("CONFIDE_DOCKER_MEMORY") or None,
            mounts=for_every_step("CONFIDE_DOCKER_MOUNTS"),
            device_requests=gpus(os.environ.get("CONFIDE_DOCKER_GPUS", "")),
            mount_tmp_dir=False,
            auto_remove="force",
            **options,
        )
        self.granted = {
            Need.CHARGING: mounts("CONFIDE_DOCKER_SEEDS"),
            Need.SOURCES: mounts("CONFIDE_DOCKER_SOURCES", read_only=True),
            Need.CLUSTER: mounts("CONFIDE_DOCKER_CLUSTER", read_only=True),
        }

    def run_step(self, work: Work, map_index: int) -> tuple[int, Follower]:
        """Run the step in a new container and remove the container afterwards."""
        self.labels = NO_SERVICE | {
            RUN: work.context.run_key,
            TASK: f"{self.task_id}.{map_index}",
            SPEC: work.spec.digest(),
        }
        # Earlier tries of this task may have left containers in any state.
        names = [f"{name}={self.labels[name]}" for name in (RUN, TASK)]
        for left in self.cli.containers(all=True, filters={"label": names}):
            self.log.info("Removing container %s of an earlier try", left["Id"][:12])
            self.cli.remove_container(left["Id"], force=True)
        try:
            return self._run(work)
        finally:
            self.on_kill()

    def _run(self, work: Work) -> tuple[int, Follower]:
        if not self.cli.images(name=self.image):
            raise AirflowException(f"no image {self.image} on this engine: build or pull it")
        self.container = self.create(work)
        identifier = self.container["Id"]
        messages = Follower()
        lease = self.cli.attach_socket(identifier, params={"stdin": 1, "stream": 1})
        try:
            output = self.cli.attach(identifier, stdout=True, stderr=True, stream=True, demux=True)
            self.cli.start(identifier)
            for is_message, line in whole_lines(output):
                if not (is_message and messages.hear(line)):
                    self.log.info("%s", line)
            exit_code = int(self.cli.wait(identifier)["StatusCode"])
        finally:
            lease.close()
        if self.cli.inspect_container(identifier)["State"].get("OOMKilled"):
            messages.failed = Failed(exit_code=exit_code, reason=OUT_OF_MEMORY)
        return exit_code, messages

    def create(self, work: Work) -> dict[str, Any]:
        """Create the step's container with only the variables and mounts that it needs."""
        words = work.arguments()
        long = len(words[-1]) > LONGEST_ARGUMENT  # the report of a large sweep
        environment = self.variables_of(work, *PLACES, *SECRETS)
        environment |= {"CONFIDE_LEASE": "stdin", CHANNEL: STDOUT}
        held = needs_in(work.spec, os.environ)
        granted = [mount for need in held for mount in self.granted.get(need, [])]
        container: dict[str, Any] = self.cli.create_container(
            image=self.image,
            command=[*words[:-1], SPEC_FILE] if long else words,
            environment=environment,
            labels=self.labels,
            stdin_open=True,
            host_config=self.cli.create_host_config(
                init=True,
                mounts=self.mounts + granted,
                network_mode=self.network_mode,
                mem_limit=self.mem_limit,
                shm_size=SHARED_MEMORY if Need.CLUSTER in held else None,
                device_requests=self.device_requests,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                pids_limit=4096,
            ),
        )
        if long:
            file = (SPEC_FILE.lstrip("/"), work.spec.model_dump_json())
            with create_archive("/", files=[], extra_files=[file]) as archive:
                self.cli.put_archive(container["Id"], "/", archive.read())
        return container

    def on_kill(self) -> None:
        """Stop the container if it still runs, and remove it."""
        if self.container is None:
            return
        identifier, self.container = self.container["Id"], None
        with contextlib.suppress(APIError):  # it is gone already
            self.cli.stop(identifier, timeout=int(LAUNCHER_GRACE))
            self.cli.remove_container(identifier, force=True)


def whole_lines(pieces: Iterable[tuple[bytes | None, bytes | None]]) -> Iterator[tuple[bool, str]]:
    """Yield each complete, non-empty line, with True for standard output.

    The engine sends both streams in pieces: between the two halves of a line on one stream there
    may be a line of the other.

    Args:
        pieces: bytes of standard output and of standard error, or None; lines and UTF-8 characters
            may be cut anywhere.
    """
    streams = Lines(), Lines()
    for both in pieces:
        for lines, piece in zip(streams, both, strict=True):
            if piece:
                yield from ((lines is streams[0], line) for line in lines.add(piece))
    for lines in streams:
        yield from ((lines is streams[0], line) for line in lines.add(b""))


def for_every_step(variable: str) -> list[Mount]:
    """Return the mounts of every step.

    Raises:
        ValueError: a mount contains the seeds; Airflow shows the line as an import error.
    """
    mounted = mounts(variable)
    if any(PurePosixPath(SEEDS_AT).is_relative_to(mount["Target"]) for mount in mounted):
        raise ValueError(f"{variable}: the seeds ({SEEDS_AT}) belong in CONFIDE_DOCKER_SEEDS")
    return mounted


def mounts(variable: str, *, read_only: bool = False) -> list[Mount]:
    """Return the mounts that a variable's `SOURCE:TARGET[:ro]` words describe.

    Raises:
        ValueError: a word has another form; Airflow shows the line as an import error.
    """
    mounted = []
    for word in os.environ.get(variable, "").split():
        source, _, rest = word.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target.startswith("/") or mode not in ("", "ro"):
            raise ValueError(f"{variable}: {word!r} is not SOURCE:TARGET or SOURCE:TARGET:ro")
        kind = "bind" if source.startswith("/") else "volume"
        mounted.append(Mount(target, source, type=kind, read_only=read_only or mode == "ro"))
    return mounted


def gpus(word: str) -> list[DeviceRequest] | None:
    """Return the request for `all` GPUs or for a number of them; None for an empty word."""
    if not word:
        return None
    count = -1 if word == "all" else int(word)
    return [DeviceRequest(count=count, capabilities=[["gpu"]])]
