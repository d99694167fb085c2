"""Ray: shards as tasks and hosts of a training as actors, on other machines or on this one.

The step is Ray's driver. Only the step holds seeds, ledger and plan. Workers receive functions of
shards and the weights of an update, and return counts and clipped sums without noise.

*Faults.* A task whose worker or machine is lost runs again elsewhere; a lost actor is started again
and computes the same call again. A call depends only on its arguments, so the result is the same.

*Secrets.* Every call between processes carries the cluster's token, over TLS in both directions
(`node`). An address without these secrets is refused. A cluster on this machine only makes
temporary secrets, and ends with the step.

*Logs.* Tasks, actors and objects have fixed names, no error of a function reaches Ray, and workers
print nothing: Ray's logs hold times, sizes and addresses.

Source: Moritz et al., "Ray: A Distributed Framework for Emerging AI Applications", OSDI 2018.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dp_core.cluster.node import (
    RAY_SETTINGS,
    STARTING,
    address_towards,
    make_secrets,
    member_environment,
    require_secrets,
)
from dp_core.cluster.shard_map import (
    WHERE,
    HostFunction,
    HostProcess,
    ProcessPool,
    R,
    ShardMap,
    T,
    Version,
    map_shard,
    packed,
    unpacked,
)
from dp_core.errors import BadInput, ConfideError

VARIABLE = "CONFIDE_CLUSTER"
PLACES = "in-process, pool, local:N for N Ray workers of this machine, or HOST:PORT of a Ray head"
_LOCAL = re.compile(r"local:([1-9][0-9]{0,2})")
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*:[0-9]{1,5}")
_PATIENCE = 120.0  # seconds without any suitable machine, after which a call fails
_ANSWERING = 10.0  # seconds for the head to accept a connection
_RETRIES = 3  # of a task or call whose worker was lost
_MOST_AT_ONCE = 256  # shards in flight, for clusters of any size
_LOOK = 2.0  # seconds between two checks of the cluster's machines
_ANYWHERE = "192.0.2.1"  # a documentation address: no packet is sent


class RayCluster:
    """A Ray cluster; the connection starts with the first use.

    Args:
        place: `local:N`, or `HOST:PORT` of the cluster's head.
        secrets: folder of the cluster's secrets (`node`); needed with an address.
        environment: environment of the Ray processes that this step starts, including local
            workers.
        packages: packages whose code must be the same on every worker.

    Raises:
        BadInput: an invalid place, or an address without secrets.
    """

    def __init__(
        self,
        place: str,
        *,
        secrets: Path | None = None,
        environment: Mapping[str, str] | None = None,
        packages: Sequence[str] = ("dp_core",),
    ) -> None:
        self._cpus = int(local[1]) if (local := _LOCAL.fullmatch(place)) else 0
        if not self._cpus and not _ADDRESS.fullmatch(place):
            raise BadInput(f"{place!r} is not a place", where=VARIABLE, fix=f"Use {PLACES}.")
        self._secrets = None if self._cpus else require_secrets(secrets, f"{VARIABLE}={place}")
        self._place, self._packages = place, tuple(packages)
        self._environment = dict(os.environ if environment is None else environment)
        if self._cpus:  # threads of several workers would compete for the cores
            threads = max(1, len(os.sched_getaffinity(0)) // self._cpus)
            self._environment.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
        self._ray: Any = None
        self._started = ExitStack()  # ends in reverse order

    def map(self, function: Callable[[T], R], shards: Sequence[T]) -> Iterator[R]:
        """Yield the function's value of every shard, in their order; see `ShardMap`."""
        if not shards:
            return
        ray = self._connected()
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(map_shard)
        version, code = Version.of(self._packages), ray.put(packed(function))
        waiting, ahead = iter(shards), deque[Any]()
        try:
            while True:
                cores = int(ray.cluster_resources().get("CPU", 0))
                room = min(cores + 1, _MOST_AT_ONCE) - len(ahead)
                for shard in itertools.islice(waiting, max(room, 0)):
                    ahead.append(task.remote(version, code, packed(shard)))
                if not ahead:
                    return
                yield unpacked(self._answer(ahead.popleft(), {"CPU": 1})).result()
        finally:
            for reference in ahead:
                with suppress(Exception):  # the cluster may be gone
                    ray.cancel(reference, force=True)

    def hosts(self, count: int, device: str) -> RayHosts:
        """Return the hosts of a training, each on a machine with the device.

        Raises:
            ConfideError: no machine of the cluster has the device.
        """
        return RayHosts(self, count, host_resources(device, self._machines()))

    def close(self) -> None:
        """Disconnect, and end the Ray processes that this step has started."""
        self._ray = None
        self._started.close()
        atexit.unregister(self.close)

    def _machines(self) -> list[Mapping[str, float]]:
        """Return the resources of every machine that is alive."""
        ray = self._connected()
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def _answer(self, reference: Any, needed: Mapping[str, float]) -> Any:
        """Return the value of a call, while the cluster has a machine for it.

        Raises:
            ConfideError: the cluster lost the call more often than the retry limit, has no machine
                for it, or no room for objects.
        """
        ray, alone_since = self._ray, None
        while True:
            try:
                ready, _ = ray.wait([reference], timeout=_LOOK)
                if ready:
                    return ray.get(reference)
                fits = any(
                    all(machine.get(name, 0) >= amount for name, amount in needed.items())
                    for machine in self._machines()
                )
            except ray.exceptions.RayError as error:
                raise _fault(error) from None
            if fits:
                alone_since = None
                continue
            alone_since = alone_since or time.monotonic()
            if time.monotonic() - alone_since > _PATIENCE:
                raise ConfideError(
                    f"no suitable machine joined the cluster in {_PATIENCE:.0f} seconds",
                    where=WHERE,
                    fix="Check that the cluster's workers run and have cores and memory free.",
                )

    # --- the connection

    def _connected(self) -> Any:
        """Return the module `ray`, connected to the cluster.

        Raises:
            ConfideError: the cluster does not answer, or does not accept this step.
        """
        if self._ray is not None:
            return self._ray
        # Ray's folders are readable by all users, so they are inside a private folder.
        folder = tempfile.TemporaryDirectory(prefix="confide-", ignore_cleanup_errors=True)
        self._scratch = Path(self._started.enter_context(folder))
        atexit.register(self.close)
        secrets = self._secrets or self._scratch / "secrets"
        host = _ANYWHERE if self._cpus else self._place.rpartition(":")[0]
        try:
            if self._cpus:
                make_secrets(secrets)
                address = self._start_node("local", str(self._cpus), secrets)
            else:
                self._find_head()
                address = self._start_node("step", self._place, secrets)
            driver = self._scratch / "driver"
            driver.mkdir()
            member = member_environment(secrets, driver, address_towards(host))
            os.environ.update(RAY_SETTINGS | member)
            self._ray = _connect(address)
            self._started.callback(_disconnect, self._ray)
        except Exception as error:
            self.close()
            if isinstance(error, ConfideError):
                raise
            raise ConfideError(
                f"the Ray cluster did not accept this step ({type(error).__name__})",
                where=self._place,
                fix="Check that the cluster runs this version of Ray and has the same secrets.",
            ) from None
        return self._ray

    def _find_head(self) -> None:
        """Raise `ConfideError` if no process answers at the cluster's address."""
        host, _, port = self._place.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWERING).close()
        except OSError:
            raise ConfideError(
                "no cluster answers", where=self._place, fix=f"Start it, or change {VARIABLE}."
            ) from None

    def _start_node(self, kind: str, target: str, secrets: Path) -> str:
        """Start Ray's processes on this machine; return the address that they print."""
        words = [kind, target, str(self._scratch / "ray"), str(secrets)]
        path = [*sys.path, self._environment.get("PYTHONPATH", "")]
        self._node = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "dp_core.cluster.node", *words],
            env=self._environment | {"PYTHONPATH": ":".join(filter(None, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._started.callback(_end, self._node)
        timer = threading.Timer(STARTING, self._node.kill)
        timer.start()
        try:
            assert self._node.stdout is not None  # noqa: S101 - a pipe
            printed = self._node.stdout.readline().decode().strip()
        finally:
            timer.cancel()
        if not printed:
            raise ConfideError(
                "Ray did not start on this machine",
                where=self._place,
                fix="Check that the cluster runs and has the same secrets and version of Ray.",
            )
        return printed


class RayHosts:
    """Hosts of a training as Ray actors; see `Hosts`.

    Args:
        cluster: the cluster that runs them.
        count: number of hosts.
        resources: resources that each host takes of its machine.
    """

    def __init__(self, cluster: RayCluster, count: int, resources: Mapping[str, float]) -> None:
        self.count, self._cluster, self._resources = count, cluster, resources
        self._functions: list[Any] = []
        self._actors: list[Any] = []

    def start(self, made: Sequence[Callable[[], HostFunction]]) -> None:
        """Start an actor for every function; see `Hosts`."""
        ray = self._cluster._connected()
        special = {n: v for n, v in self._resources.items() if n not in ("CPU", "GPU")}
        actor = ray.remote(HostProcess).options(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            resources=special,
            max_restarts=-1,
            max_task_retries=_RETRIES,
            scheduling_strategy="SPREAD",
        )
        version = Version.of(self._cluster._packages)
        # Kept while an actor may have to be started again.
        self._functions = [ray.put(packed(function)) for function in made]
        self._actors = [actor.remote(version, function) for function in self._functions]

    def call(self, shared: Any, arguments: Sequence[Any]) -> Iterator[Any]:
        """Yield the value of every host, in their order; see `Hosts`.

        Raises:
            ConfideError: a host raised it, or a host was lost more often than the retry limit.
        """
        ray = self._cluster._connected()
        try:
            reference = ray.put(shared)
            calls = [
                actor.call.remote(reference, argument)
                for actor, argument in zip(self._actors, arguments, strict=True)
            ]
        except ray.exceptions.RayError as error:
            raise _fault(error) from None
        for call in calls:
            yield self._cluster._answer(call, self._resources).result()

    def end(self) -> None:
        """End the actors."""
        actors, self._actors, self._functions = self._actors, [], []
        for actor in actors:
            with suppress(Exception):  # the cluster may be gone
                self._cluster._ray.kill(actor)


def open_cluster(place: str, **options: Any) -> ShardMap:
    """Return the place where functions of shards run, given the value of CONFIDE_CLUSTER.

    Args:
        place: `in-process`; `pool`, over all cores that this process may use; or as `RayCluster`.
        options: options of `RayCluster`.

    Raises:
        BadInput: an invalid place, or an address without secrets.
    """
    if place in ("in-process", "pool"):
        return ProcessPool(len(os.sched_getaffinity(0)) if place == "pool" else 1)
    return RayCluster(place, **options)


def host_resources(device: str, machines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the resources that a host of a training takes of its machine.

    A host with accelerators takes all of its machine's: TensorFlow distributes over them.

    Args:
        device: cpu, gpu, tpu or mock-tpu:N.
        machines: resources of every machine.

    Raises:
        ConfideError: no machine has the device, or machines have different numbers of it.
    """
    kind = {"gpu": "GPU", "tpu": "TPU"}.get(device)
    if kind is None:
        return {"CPU": 1}
    numbers = sorted({machine[kind] for machine in machines if machine.get(kind)})
    if not numbers:
        raise ConfideError(
            f"no machine of the cluster has a {kind}", where=WHERE, fix="Choose another device."
        )
    if len(numbers) > 1:
        raise ConfideError(
            f"machines of the cluster have {', '.join(f'{n:g}' for n in numbers)} {kind}s each",
            where=WHERE,
            fix="Use machines of one kind for a training.",
        )
    return {"CPU": 1, kind: numbers[0]}


def _connect(address: str) -> Any:
    """Return the module `ray` after a connection; the step keeps its handler of SIGTERM."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            namespace="confide",
            log_to_driver=False,  # workers' output stays on their machines
            configure_logging=False,
        )
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return ray


def _disconnect(ray: Any) -> None:
    with suppress(Exception):  # the cluster may be gone
        ray.shutdown()


def _fault(error: Exception) -> ConfideError:
    """Convert an error of Ray to ours, without its message, which may hold arguments."""
    name = type(error).__name__
    if name in ("ObjectStoreFullError", "OutOfDiskError"):
        return ConfideError(
            "the cluster's object store is full",
            where=WHERE,
            fix="Give its machines more memory or disk, or use more shards.",
        )
    return ConfideError(
        f"the cluster lost a call more often than it retries ({name})",
        where=WHERE,
        fix="A worker may have lacked memory: give workers more, or use more shards.",
    )


def _end(node: subprocess.Popen[bytes]) -> None:
    """End the Ray processes of this machine by closing their input."""
    for pipe in (node.stdin, node.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    try:
        node.wait(timeout=30)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
