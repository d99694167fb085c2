"""Steps as containers of the task image, on the Docker engine of this deployment.

What the containers are given comes from the scheduler's own environment:

`CONFIDE_TASK_IMAGE`      the image (default `confide-task`)
`CONFIDE_DOCKER_NETWORK`  the network that they join
`CONFIDE_DOCKER_MOUNTS`   `SOURCE:TARGET` or `SOURCE:TARGET:ro`, separated by spaces; a source
                          that begins with `/` is a folder of the host, any other a volume
`CONFIDE_DOCKER_SEEDS`    the mount of the secret seeds: for steps that charge, and no others
`CONFIDE_DOCKER_SOURCES`  mounts for the steps that read files from outside, and no others; they
                          are read only, whatever the words say
`CONFIDE_DOCKER_MEMORY`   a bound such as `8g`
`CONFIDE_DOCKER_GPUS`     `all`, or how many
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from airflow.providers.docker.operators.docker import DockerOperator
from airflow.sdk.exceptions import AirflowException
from docker.errors import APIError
from docker.types import DeviceRequest, Mount

from dags.launcher.handed_on import PLACES, SECRETS, handed_on
from dags.launcher.lines import Stream, whole_lines
from dags.launcher.links import tracked_at
from dags.launcher.outcome import BAD_INPUT, UNFINISHED, failure
from dags.launcher.work import Plan, Work, work_of
from tasks.protocol import Need, NoReader, environment_for, needs

# Airflow escalates every 5 s, and there is a container to remove too; its first process has ended
# the step by then (docker/attend.py), and the step itself still before that.
GRACE_SECONDS = 4
LONGEST_ARGUMENT = 100_000  # bytes; Linux refuses a single argument above 128 KiB
OUT_OF_MEMORY = "out of memory: raise CONFIDE_DOCKER_MEMORY, or make the batch smaller"
SEEDS_AT = "/var/lib/confide-seeds"  # in the image: docker/task.Dockerfile
SPEC_FILE = "/tmp/spec.json"  # noqa: S108 - inside a container of its own
RUN, TASK, SPEC = "confide.run", "confide.task", "confide.spec"
# An image that compose built carries its service's labels: compose would take its container for
# a replica too many, and stop it.
NO_SERVICE = {"com.docker.compose.project": "", "com.docker.compose.service": ""}


class DockerStep(DockerOperator):
    """Runs a step in a container that ends with the task, however that ends.

    The task holds the container's standard input open as a lease: when the worker dies without
    a chance to say so, the engine closes it, and the image's first process ends the step.
    """

    template_fields = ("point",)

    def __init__(
        self, *, plan: Plan, point: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        super().__init__(
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
        }
        self.plan = plan
        self.point = point
        self.tracked_at = ""

    def execute(self, context: Any) -> dict[str, Any]:
        """Start the step, pass its lines on to the task's log, and answer for its exit code."""
        work = work_of(self.task_id, self.plan, context, self.point)
        context["point_name"] = work.context.point
        self.log.info("Output: %s", work.spec.output)
        self.labels = NO_SERVICE | {
            RUN: work.context.run_key,
            TASK: f"{self.task_id}.{context['ti'].map_index}",
            SPEC: work.spec.digest(),
        }
        exit_code, last_line = self._once(work)
        while exit_code == UNFINISHED:
            exit_code, last_line = self._once(work)
        if exit_code:
            raise failure(work.context.task, exit_code, last_line)
        return work.answer()

    def _once(self, work: Work) -> tuple[int, str]:
        """Run the step in a container of its own, which does not outlive this call."""
        self._remove_left_behind()
        try:
            return self._run(work)
        finally:
            self._end()

    def _run(self, work: Work) -> tuple[int, str]:
        if not self.cli.images(name=self.image):
            raise AirflowException(f"no image {self.image} on this engine: build or pull it")
        self.container = self._create(work)
        identifier = self.container["Id"]
        last: dict[Stream, str] = {}
        lease = self.cli.attach_socket(identifier, params={"stdin": 1, "stream": 1})
        try:
            output = self.cli.attach(identifier, stdout=True, stderr=True, stream=True, demux=True)
            self.cli.start(identifier)
            for stream, line in whole_lines(output):
                self.log.info("%s", line)
                self.tracked_at = tracked_at(line) or self.tracked_at
                last[stream] = line
            exit_code = int(self.cli.wait(identifier)["StatusCode"])
        finally:
            lease.close()
        if self.cli.inspect_container(identifier)["State"].get("OOMKilled"):
            return exit_code, OUT_OF_MEMORY
        # A step says on standard error what failed; which stream came last is chance.
        return exit_code, last.get("stderr") or last.get("stdout") or "no output"

    def _create(self, work: Work) -> dict[str, Any]:
        words = work.arguments()
        long = len(words[-1]) > LONGEST_ARGUMENT  # the report of a large sweep
        held = needs(work.spec)
        try:
            told = environment_for(work.spec, handed_on(os.environ, PLACES + SECRETS), apart=True)
        except NoReader as error:
            raise failure(work.context.task, BAD_INPUT, str(error)) from None
        environment = told | work.environment()
        environment["CONFIDE_LEASE"] = "stdin"
        if self.execution_timeout is not None:
            environment["CONFIDE_DEADLINE"] = str(self.execution_timeout.total_seconds())
        container: dict[str, Any] = self.cli.create_container(
            image=self.image,
            command=[*words[:-1], SPEC_FILE] if long else words,
            environment=environment,
            labels=self.labels,
            stdin_open=True,
            host_config=self.cli.create_host_config(
                mounts=self.mounts + [m for need in held for m in self.granted.get(need, [])],
                network_mode=self.network_mode,
                mem_limit=self.mem_limit,
                device_requests=self.device_requests,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                pids_limit=4096,
            ),
        )
        if long:
            spec = work.spec.model_dump_json().encode()
            self.cli.put_archive(container["Id"], "/", archive(SPEC_FILE.lstrip("/"), spec))
        return container

    def _remove_left_behind(self) -> None:
        """Remove what an earlier try of this task left, whatever state it is in."""
        labels = [f"{name}={self.labels[name]}" for name in (RUN, TASK)]
        for left in self.cli.containers(all=True, filters={"label": labels}):
            self.log.info("Removing container %s of an earlier try", left["Id"][:12])
            self.cli.remove_container(left["Id"], force=True)

    def _end(self) -> None:
        """Stop the container if it still runs, and remove it."""
        if self.container is None:
            return
        identifier, self.container = self.container["Id"], None
        with contextlib.suppress(APIError):  # it is gone already
            self.cli.stop(identifier, timeout=GRACE_SECONDS)
            self.cli.remove_container(identifier, force=True)

    def on_kill(self) -> None:
        """End the container: the task was cancelled."""
        self._end()


def for_every_step(variable: str) -> list[Mount]:
    """Return the mounts that every step gets.

    Raises:
        ValueError: the seeds are among them; Airflow shows it as the DAG's import error.
    """
    found = mounts(variable)
    if any(PurePosixPath(SEEDS_AT).is_relative_to(mount["Target"]) for mount in found):
        raise ValueError(f"{variable}: the seeds ({SEEDS_AT}) belong in CONFIDE_DOCKER_SEEDS")
    return found


def mounts(variable: str, *, read_only: bool = False) -> list[Mount]:
    """Return the mounts that a variable's `SOURCE:TARGET[:ro]` words describe.

    Raises:
        ValueError: a word of another form; Airflow shows it as the DAG's import error.
    """
    found = []
    for word in os.environ.get(variable, "").split():
        source, _, rest = word.partition(":")
        target, _, mode = rest.partition(":")
        if not source or not target.startswith("/") or mode not in ("", "ro"):
            raise ValueError(f"{variable}: {word!r} is not SOURCE:TARGET or SOURCE:TARGET:ro")
        kind = "bind" if source.startswith("/") else "volume"
        found.append(Mount(target, source, type=kind, read_only=read_only or mode == "ro"))
    return found


def gpus(word: str) -> list[DeviceRequest] | None:
    """Return the request for `all` GPUs or for so many; None for none."""
    if not word:
        return None
    count = -1 if word == "all" else int(word)
    return [DeviceRequest(count=count, capabilities=[["gpu"]])]


def archive(name: str, content: bytes) -> bytes:
    """Return a tar archive of one file that anyone inside the container may read."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), 0o644
        tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()
